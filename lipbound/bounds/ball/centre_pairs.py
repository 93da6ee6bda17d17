r"""Our bound over a ball by sums over pairs of tokens in place of norms of single blocks.

Statement and proof: Lemma 108 (docs/theory/ball_pairs.md). All pairs of tokens contribute to the
difference of the Jacobians at two inputs, and the vectors that they contribute point in different
directions. `lipbound.bounds.ball.centre_entries` adds up their lengths, this module the positive
semi-definite matrices that they make: norms of sums over pairs of tokens, weighted by numbers >= 0,
are Lemma 107 (docs/theory/ball_pairs.md), and their rounding Lemma 109 (docs/theory/ball_pairs.md).
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.ball.centre_entries import BallCentre, RowMaps, VariantBallCentre
from lipbound.bounds.ball.softmax_interval import relative_interval
from lipbound.bounds.ours.block_norms import outer
from lipbound.linalg.matrix_norms import (
    block_norm,
    gamma,
    matrix_norm,
    nonnegative_norm,
    upper_factor,
)

LEAST_SHARE = 0.05
"""Least weight by which values and queries share a product; weights fall with the distance of the
value."""
UNEVEN = 1.5
"""Exponent of the ratio of two lengths in the weights between which their sum is shared: 1 is best
where both are along one direction, 2 where they are orthogonal."""
PAIR_CHUNK = 2**24
"""Bytes of the largest temporary, the d x d matrices of some tokens of all heads."""


# -- sums over pairs of tokens ---------------------------------------------------------------------


def spread(
    w: Tensor,
    x: Tensor,
    centre: Tensor | None,
    off: Tensor | None = None,
    maps: RowMaps | None = None,
) -> Tensor:
    """||sum_j w_ij y_ij y_ij^T||^(1/2) for y_ij = F_i^T (x_j - c_i): (heads, N, 1).

    Args:
        w: weights >= 0, (heads, N, M).
        x: (heads, M, d).
        centre: c, (heads, N, d), or 0.
        off: how far each y_ij may be from what is meant, (heads, N, 1).
        maps: F of some rows; the identity without.

    Returns:
        Upper values but for relative roundings.
    """
    (n, m), d = w.shape[-2:], x.shape[-1]
    total, length = w.sum(-1, keepdim=True), x.norm(dim=-1, keepdim=True)
    size, side = w @ length.square(), torch.zeros_like(w[..., :1])
    if centre is not None:
        far = centre.norm(dim=-1, keepdim=True)
        side = w @ x - total / 2 * centre
        size = size + 2 * far * (w @ length) + far.square() * total
    lost = gamma(m + 2 * d + 18) * size  # the difference cancels
    pairs, step = outer(x, x), max(1, PAIR_CHUNK // (8 * len(x) * d * d))
    found = []
    for rows in (slice(i, i + step) for i in range(0, n, step)):
        sums, more = (w[:, rows] @ pairs).unflatten(-1, (d, d)), lost[:, rows]
        if centre is not None:
            cross = side[:, rows, :, None] * centre[:, rows, None, :]
            sums = sums - cross - cross.mT
        if maps is not None:
            factor = maps(rows)
            sums, more = factor.mT @ sums @ factor, more * factor.square().sum((-1, -2))[..., None]
        found.append((block_norm(sums)[..., None] + more).sqrt())
    root = torch.cat(found, 1)
    return root if off is None else root + off * total.sqrt()


class MovingQueries(NamedTuple):
    r"""Vectors :math:`x_i` of queries, moved by :math:`G h_i` when token i moves by :math:`h_i`.

    Lemma 116 (docs/theory/ball_norm.md).

    Attributes:
        x, off: the vectors, (heads, N, r), and how far they are known, (heads, N, 1).
        g, off_g: rows whose sum of squares is at least :math:`G G^T`, (heads, s, r), and how far
            they are known in the Frobenius norm, (heads, 1, 1).
        size: at least ||G||, (heads, 1, 1).
    """

    x: Tensor
    off: Tensor
    g: Tensor
    off_g: Tensor
    size: Tensor

    def columns(self, w: Tensor, most: Tensor) -> Tensor:
        r"""Upper values of :math:`(\sum_i w_{ij} (y \cdot x'_i)^2)^{1/2}` for unit y, (heads, N).

        The weights w are (heads, N, N); :math:`\sum_i w_{ij} (y \cdot G h_i)^2` is at most ``most``
        (heads, N) times :math:`|G^T y|^2`.
        """
        w, move = w.mT, most.sqrt()[..., None]
        squares = w @ self.off.square()
        still = spread(w, self.x, None) + squares.sqrt()
        ratio = (still / (move * self.size)).nan_to_num(1.0).clamp(1e-6, 1e6) ** UNEVEN
        share, rest = 1 + 1 / ratio, (1 + ratio) * move.square()
        weights = torch.cat([share * w, rest.expand(-1, -1, self.g.shape[1])], -1)
        joint = spread(weights, torch.cat([self.x, self.g], 1), None)
        joint = joint + (share * squares).sqrt() + rest.sqrt() * self.off_g
        return (still + move * self.size).minimum(joint)[..., 0]


# -- the bound -------------------------------------------------------------------------------------


class BallChanges(NamedTuple):
    """Quantities that move within the ball, row by row, broadcastable to (heads, N, M).

    With the names of Lemma 108 (docs/theory/ball_pairs.md): P^+, Delta, sigma, m^V, m^A, c^v, c^k,
    w, w^k.
    """

    up: Tensor
    change: Tensor
    total: Tensor
    m_v: Tensor
    m_a: Tensor
    c_v: Tensor
    c_k: Tensor
    w: Tensor
    w_k: Tensor


class ByPairs(BallCentre):
    r"""`BallCentre` with sums over its pairs of tokens.

    They are upper values in real arithmetic but for relative roundings. Weights w are (heads, N,
    M), 0 where attention is forbidden; M = N, or N + 1 with a sink. :math:`x_{ij} = v_j - o_i`,
    :math:`\hat k_{ij} = \tilde k_{ij} - \bar k_i`.
    """

    @cached_property
    def means(self) -> tuple[Tensor, Tensor]:
        r""":math:`o_i` and :math:`\bar k_i`, (heads, N, .)."""
        return self.p @ self.v, self.p @ self.k

    @cached_property
    def reaches(self) -> tuple[Tensor, Tensor]:
        r"""Half the largest distance of two values, of two :math:`\tilde k_j`, (heads, 1, 1)."""
        apart, apart_k = (
            torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (self.v, self.k)
        )
        most, most_k, off, off_k = (
            t.amax((-1, -2), keepdim=True) for t in (apart, apart_k, self.off.d, self.off.f)
        )
        half_k = most_k / 2 + off_k
        return most / 2 + off, half_k if self.map_k is None else torch.full_like(half_k, torch.inf)

    def values(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} x_{ij} x_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return spread(w, self.v, self.means[0], self.off.d)

    def keys(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} \hat k_{ij} \hat k_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return spread(w, self.k, self.means[1], self.off.f, self.map_k)

    def columns(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_i w_{ij} \tilde q_{ij} \tilde q_{ij}^T\|^{1/2}` of all j, (heads, N)."""
        w = w[..., : w.shape[-2]].mT
        found = spread(w, self.q, None, None, self.map_q)
        return (found + (w @ self.off.u.square()).sqrt())[..., 0]

    def bounds(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """The smaller of both bounds: of the change of J over the ball, and of J, (heads,) each."""
        both = self.by_entries(radius, ball), self.by_pairs(radius, ball)
        changed, whole = (torch.minimum(*values) for values in zip(*both, strict=True))
        return changed, whole

    def by_pairs(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """`bounds` by Lemmas 108 (docs/theory/ball_pairs.md) and 116 (docs/theory/ball_norm.md)."""
        to = self._moved(radius, ball)
        own, own_up = self._own(to)
        held = (to.c_v + to.m_v).square() * to.up[..., : to.up.shape[-2]]
        most = radius**2 * (held.sum(-2) if ball == "token" else held.amax(-2))
        turned = self.norm_a * most.amax(-1).sqrt()
        keys, values, cross = self._whole(to, held, most, own_up)
        direct = (keys.square() + values.square() + 2 * cross).sqrt()
        changed = self._keys(to) + turned + self._values(to.change, own, to.total)
        changed, direct = self.enlarged(changed, direct)
        return changed, direct

    def interval(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """Smallest and largest P' over the ball, (heads, N, M)."""
        low, up, _ = self.reach(radius, ball)
        return low, up

    def _moved(self, radius: float, ball: str) -> BallChanges:
        d, f, norm_a = self.d, self.f, self.norm_a[:, None, None]
        low, up = self.interval(radius, ball)
        change = self.change(low, up)
        total = change.sum(-1, keepdim=True).clamp(max=2.0)
        move = self.move(up, radius, ball)
        far, far_k = self.values(up), self.keys(up)
        half, half_k = self.reaches
        c_v = far.minimum(d.amax(-1, keepdim=True)).minimum(half)
        c_k = far_k.minimum(f.amax(-1, keepdim=True)).minimum(half_k)
        # how far scores move, as a root mean square
        score = radius * c_k + (self.u.amax(-1, keepdim=True) + norm_a * radius) * move
        w, w_k = (
            (change * x)
            .sum(-1, keepdim=True)
            .minimum(total.sqrt() * sums(change))
            .minimum(c * score)
            .minimum(most)
            .minimum(x.amax(-1, keepdim=True))
            for x, sums, c, most in (
                (d, self.values, c_v, far),
                (f, self.keys, c_k, far_k),
            )
        )
        return BallChanges(up, change, total, self.norm_v * move, norm_a * move, c_v, c_k, w, w_k)

    def _own(self, to: BallChanges) -> tuple[Tensor, Tensor]:
        """Upper values of ||B'_i - B_i|| and of ||B'_i||, (heads, N, 1) each."""
        c = to.c_v + to.m_v
        whole = self.values(to.change) * self.keys(to.change)
        sums = (to.change * self.d * self.f).sum(-1, keepdim=True).minimum(whole)
        own = sums + to.w * to.w_k + to.m_v * to.c_k + c * to.m_a
        return own, (self.b[..., None] + own).minimum(c * (to.c_k + to.m_a))

    def _whole(
        self, to: BallChanges, held: Tensor, most: Tensor, own_up: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Upper values of ||K'||, of ||V' + B'|| and of ||K' (V' + B')^T||, (heads,) each.

        Lemma 116 (docs/theory/ball_norm.md).
        """
        by_token, through = self._reached(held, most)
        keys, values = by_token.amax(-1), self._values(to.up, own_up, torch.ones_like(own_up))
        sums = to.up[..., : to.up.shape[-2]].sum(-2).amax(-1).sqrt()
        cross = through.amax(-1) * sums + (own_up[..., 0] * by_token).amax(-1)
        return keys, values, cross.minimum(keys * values)

    def _reached(self, w: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Upper values of (sum_i w_ij (y . q~'_ij)^2)^(1/2), and for W_V^T q~'_ij, (heads, N) each.

        For each token j and all unit vectors y; from weights (heads, N, N) and the most that sum_i
        w_ij |h'_i|^2 can be, (heads, N).
        """
        found = self.columns(w) + self.norm_a[:, None] * most.sqrt()
        return found, self.norm_v[..., 0] * found

    def _keys(self, to: BallChanges) -> Tensor:
        """Upper values of the change of J through keys while queries stand still, (heads,)."""

        def columns(w: Tensor) -> Tensor:
            return self.columns(w).amax(-1)

        values = self.values
        share = (self.d / self.d.amax(-1, keepdim=True).clamp_min(1e-290)).clamp_min(LEAST_SHARE)
        even = columns(values(to.change).square() * to.change)
        shared = columns(values(to.change / share).square() * (to.change * share))
        squared = to.w.square()
        mean = columns(squared * to.total * to.change) + columns(squared * self.p)
        mean = mean.minimum(columns(squared * to.up))
        return even.minimum(shared) + mean + columns(to.m_v.square() * to.up)

    def _values(self, weights: Tensor, own: Tensor, total: Tensor) -> Tensor:
        """Upper values of the norm of ||W_V|| weights + diag own, (heads,).

        The smaller of the norm itself and what sums of rows (at most ``total``) and columns make of
        it.
        """
        weights = weights[..., : weights.shape[-2]]
        whole = nonnegative_norm(self.norm_v * weights + torch.diag_embed(own[..., 0]), rtol=1e-4)
        sums = (total.amax((-1, -2)) * weights.sum(-2).amax(-1)).sqrt()
        return whole.minimum(self.norm_v[:, 0, 0] * sums + own.amax((-1, -2)))


class PairedBallCentre(ByPairs):
    """`ByPairs` of a plain head: Lemma 108 (docs/theory/ball_pairs.md)."""

    def __init__(self, att: Attention):
        super().__init__(att)
        self._moving = self._moving_queries(att)

    def _moving_queries(self, att: Attention) -> list[MovingQueries]:
        r""":math:`\tilde q_i`, and :math:`W_V^T \tilde q_i`."""
        c, through, off = abs(att.scale), att.w_k.mT @ att.w_v, self.off
        f_q, f_k = (upper_factor(w)[0] for w in (att.w_q, att.w_k))
        own = gamma(att.tokens + att.x.shape[2] + 8 * (att.d + att.d_v) + 100)
        of_q, of_fk, of_k, of_v = (
            torch.linalg.matrix_norm(w)[:, None, None] for w in (f_q, f_k, att.w_k, att.w_v)
        )
        keys = self.q, off.u, c * f_q @ f_k.mT, own * c * of_q * of_fk
        seen, lost = c * att.q[0] @ through, own * c * of_q * of_k * of_v
        values = seen, of_v * off.u, c * f_q @ through, lost
        return [
            MovingQueries(x, off_x, g, off_g, matrix_norm(g)[:, None, None] + off_g)
            for x, off_x, g, off_g in (keys, values)
        ]

    def interval(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        low, up, _ = self.reach(radius, ball)
        size, mean_square = self.relative_changes(radius, ball)
        size = size + self.off.scores + self.off.p
        return relative_interval(self.scores, size, mean_square, low, up)

    def relative_changes(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        r"""Largest moves of scores beyond the mean of their row, and mean squares.

        Lemma 106 (docs/theory/ball_pairs.md): :math:`\varepsilon_{ij}`, (heads, N, N), and upper
        values of the means of squares, (heads, N, 1).
        """
        p, u, norm_a = self.p, self.u, self.norm_a[:, None, None]
        off = 4 * self.off.p + 1e-13  # the differences cancel
        move: float | Tensor = radius
        if ball == "token":
            size = 2 * ((1 - p).clamp_min(0) + off) * (radius * u + norm_a * radius**2)
            size = radius * self.f + size
        else:
            square = p.square().sum(-1, keepdim=True)
            eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
            own = eye - p.diagonal(dim1=-2, dim2=-1)[..., None]
            every = (1 - 2 * p + square).clamp_min(0)
            others = ((every - own.square()).clamp_min(0) + 2 * off) * u.square()
            size = radius * ((self.f + (own.abs() + off) * u).square() + others).sqrt()
            size = size + norm_a * radius**2 * (every + off).sqrt()
            move = radius * (p.amax(-1, keepdim=True) * (1 + off)).sqrt()
        root = radius * self.cov_k[..., None].sqrt() + (u + norm_a * radius) * move
        return size, root.square()

    def _reached(self, w: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        keys, through = (moving.columns(w, most) for moving in self._moving)
        return keys, through


class PairedVariantCentre(VariantBallCentre, ByPairs):
    """`ByPairs` of a head with rotary position embeddings or sinks.

    Of one with a cap the bound by entries alone: Lemma 110 (docs/theory/ball_pairs.md).
    """

    def bounds(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        return super().bounds(radius, ball) if self.cap is None else self.by_entries(radius, ball)
