r"""Norms of sums over pairs of tokens, weighted by numbers >= 0, which our bound over a ball is
made of: Lemma 107 (docs/theory/ball_pairs.md).

Their rounding is Lemma 109 (docs/theory/ball_pairs.md).
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.ball.centre_entries import CentreErrors
from lipbound.bounds.ball.moving_queries import Turning
from lipbound.bounds.ball.softmax_interval import key_spread
from lipbound.bounds.ours.weighted_spread import Maps, spread
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import gamma, matrix_norm, upper_factor


class PairSums:
    r"""Of one unpadded sample of a plain float64 layer, at its input: upper values in real
    arithmetic but for relative roundings.

    Weights w are (heads, N, M), 0 where attention is forbidden; M = N, or N + 1 with a sink.
    :math:`x_{ij} = v_j - o_i`, :math:`\hat k_{ij} = \tilde k_j - \bar k_i`.

    Attributes:
        reach_v, reach_k: half the largest distance of two values, of two :math:`\tilde k_j`,
            (heads, 1, 1).
    """

    _map_k: Maps | None = None
    _map_q: Maps | None = None

    def __init__(self, att: Attention, p: Tensor, off: CentreErrors):
        self._off, self._v, self._k = off, att.centred_v[0], key_spread(att)[1]
        self._q = abs(att.scale) * att.q[0] @ upper_factor(att.w_k)[0].mT
        self._o, self._mean = p @ self._v, p @ self._k
        self.reach_v, self.reach_k = _half_diameter(self._v, off.d), _half_diameter(self._k, off.f)
        self._turnings = self._turning(att, off)

    def _turning(self, att: Attention, off: CentreErrors) -> tuple[Turning, Turning]:
        r""":math:`\tilde q_i`, and :math:`W_V^T \tilde q_i`."""
        c, (f_q, f_k), through = (
            abs(att.scale),
            (upper_factor(w)[0] for w in (att.w_q, att.w_k)),
            att.w_k.mT @ att.w_v,
        )
        own = gamma(att.tokens + att.x.shape[2] + 8 * (att.d + att.d_v) + 100)
        of_q, of_fk, of_k, of_v = (
            torch.linalg.matrix_norm(w)[:, None, None] for w in (f_q, f_k, att.w_k, att.w_v)
        )
        found = []
        for x, off_x, g, off_g in (
            (self._q, off.u, c * f_q @ f_k.mT, own * c * of_q * of_fk),
            (c * att.q[0] @ through, of_v * off.u, c * f_q @ through, own * c * of_q * of_k * of_v),
        ):
            found.append(Turning(x, off_x, g, off_g, matrix_norm(g)[:, None, None] + off_g))
        return found[0], found[1]

    def turned(self, w: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """`Turning.columns` of queries, and of queries seen through the values, (heads, N) each."""
        keys, through = (turning.columns(w, most) for turning in self._turnings)
        return keys, through

    def values(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} x_{ij} x_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return spread(w, self._v, self._o, self._off.d, None)

    def keys(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} \hat k_{ij} \hat k_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return spread(w, self._k, self._mean, self._off.f, self._map_k)

    def columns(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_i w_{ij} \tilde q_{ij} \tilde q_{ij}^T\|^{1/2}` of every token j, (heads,
        N)."""
        w = w[..., : w.shape[-2]].mT
        return spread(w, self._q, None, None, self._map_q).add((w @ self._off.u.square()).sqrt())[
            ..., 0
        ]


class VariantPairSums(PairSums):
    r"""`PairSums` of a layer with rotary position embeddings or sinks, the sink being the last
    column.

    :math:`\hat k_{ij} = \tilde k_{ij} - \bar k_i`. Lemma 110 (docs/theory/ball_pairs.md).
    """

    def __init__(self, att: Attention, p: Tensor, off: CentreErrors):
        tangents = [Tangents(att, 0, h) for h in range(att.heads)]

        def maps(name: str) -> Maps:
            return lambda rows: torch.stack([t.factor(name, rows) for t in tangents])

        v, k = att.centred_v[0], abs(att.scale) * att.centred_k[0]
        if (
            p.shape[-1] > att.tokens
        ):  # shifted with the others, so that their differences keep their digits
            v, k = (
                torch.cat([x, torch.zeros_like(x[:, :1])], 1) - x.mean(1, keepdim=True)
                for x in (v, k)
            )
        self._off, self._v, self._k, self._q = off, v, k, abs(att.scale) * att.q[0]
        self._o, self._mean = p @ v, p @ k
        self._map_k, self._map_q = maps("q"), maps("k")
        self.reach_v, self.reach_k = (
            _half_diameter(v, off.d),
            torch.full_like(p[:, :1, :1], torch.inf),
        )


def _half_diameter(x: Tensor, off: Tensor) -> Tensor:
    """Half the largest distance of two of the vectors (heads, N, d), each known up to ``off``,
    (heads, 1, 1)."""
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax((-1, -2))[
        :, None, None
    ]
    return apart / 2 + off.amax((-1, -2), keepdim=True)
