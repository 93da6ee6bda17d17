r"""Norms of sums over pairs of tokens, weighted by numbers >= 0, which our bound over a ball is made of: Lemma 107 (docs/theory/ball_pairs.md).

Their rounding is Lemma 109 (docs/theory/ball_pairs.md).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.ball.plain import CentreErrors
from lipbound.bounds.ball.softmax_interval import key_spread
from lipbound.bounds.lipbound2026.parts import outer
from lipbound.linalg.matrix_norms import block_norm, gamma, upper_factor

PAIR_CHUNK = 2**24
"""Bytes of the largest temporary, the d x d matrices of some tokens of all heads."""


class PairSums:
    r"""Of one unpadded sample of a plain float64 layer, at its input: upper values in real arithmetic but for relative roundings.

    Weights w are (heads, N, N), 0 where attention is forbidden. :math:`x_{ij} = v_j - o_i`, :math:`\hat k_{ij} = \tilde k_j - \bar k_i`.

    Attributes:
        reach_v, reach_k: half the largest distance of two values, of two :math:`\tilde k_j`, (heads, 1, 1).
    """

    def __init__(self, att: Attention, off: CentreErrors):
        p, (_, k) = att.p[0], key_spread(att)
        self._off = off
        self._v, self._o = att.centred_v[0], p @ att.centred_v[0]
        self._k, self._mean = k, p @ k
        self._q = abs(att.scale) * att.q[0] @ upper_factor(att.w_k)[0].mT
        self.reach_v, self.reach_k = _half_diameter(self._v, off.d), _half_diameter(k, off.f)

    def values(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} x_{ij} x_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return _spread(w, self._v, self._o, self._off.d)

    def keys(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} \hat k_{ij} \hat k_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return _spread(w, self._k, self._mean, self._off.f)

    def columns(self, w: Tensor) -> Tensor:
        r""":math:`\max_j \|\sum_i w_{ij} \tilde q_i \tilde q_i^T\|^{1/2}`, (heads,)."""
        q, w = self._q, w.mT
        lost = gamma(q.shape[-2] + 4) * (w @ q.square().sum(-1, keepdim=True))
        top = _by_rows(w, q, lambda sums, _: block_norm(sums)[..., None]) + lost
        return (top.sqrt() + (w @ self._off.u.square()).sqrt()).amax((-1, -2))


def _half_diameter(x: Tensor, off: Tensor) -> Tensor:
    """Half the largest distance of two of the vectors (heads, N, d), each known up to ``off``, (heads, 1, 1)."""
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax((-1, -2))[:, None, None]
    return apart / 2 + off.amax((-1, -2), keepdim=True)


def _spread(w: Tensor, x: Tensor, centre: Tensor, off: Tensor) -> Tensor:
    """||sum_j w_ij (x_j - c_i)(x_j - c_i)^T||^(1/2) for differences that are each known up to ``off`` (heads, N, 1): (heads, N, 1)."""
    total, length = w.sum(-1, keepdim=True), x.norm(dim=-1, keepdim=True)
    side, far = w @ x - total / 2 * centre, centre.norm(dim=-1, keepdim=True)
    lost = gamma(w.shape[-1] + 10) * (w @ length.square() + 2 * far * (w @ length) + far.square() * total)  # the difference cancels

    def norm(sums: Tensor, rows: slice) -> Tensor:
        cross = side[:, rows, :, None] * centre[:, rows, None, :]
        return block_norm(sums - cross - cross.mT)[..., None]

    return (_by_rows(w, x, norm) + lost).sqrt() + off * total.sqrt()


def _by_rows(w: Tensor, x: Tensor, norm: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """``norm`` of the matrices sum_j w_ij x_j x_j^T (heads, rows, d, d) and their rows, some rows at a time: (heads, N, 1)."""
    n, d = x.shape[-2:]
    pairs, step = outer(x, x), max(1, PAIR_CHUNK // (8 * len(x) * d * d))
    rows = [slice(i, i + step) for i in range(0, n, step)]
    return torch.cat([norm((w[:, r] @ pairs).unflatten(-1, (d, d)), r) for r in rows], 1)
