r"""Our bound over a ball by sums over pairs of tokens in place of norms of single blocks.

Statement and proof: Lemma 108 (docs/theory/ball_pairs.md). All pairs of tokens contribute to the
difference of the Jacobians at two inputs, and the vectors that they contribute point in different
directions. `lipbound.bounds.ball.centre_entries` adds up their lengths, this module the positive
semi-definite matrices that they make.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.ball.centre_entries import BallCentre, CentreErrors
from lipbound.bounds.ball.centre_entries_variants import VariantBallCentre
from lipbound.bounds.ball.pair_sums import PairSums, VariantPairSums
from lipbound.bounds.ball.softmax_interval import relative_changes, relative_interval
from lipbound.linalg.matrix_norms import gamma, nonnegative_norm

LEAST_SHARE = 0.05
"""Of the weights that share a product between values and queries: they fall with the distance of
the value, but not below this."""


class BallChanges(NamedTuple):
    """What moves within the ball, row by row, tensors that broadcast to (heads, N, M), with the
    names of Lemma 108 (docs/theory/ball_pairs.md): P^+, Delta, sigma, m^V, m^A, c^v, c^k, w, w^k.
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
    """`BallCentre` with ``pairs``, the sums over its pairs of tokens."""

    pairs: PairSums

    def bounds(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        (changed, whole), (changed_pairs, whole_pairs) = (
            self.by_entries(radius, ball),
            self.by_pairs(radius, ball),
        )
        return changed.minimum(changed_pairs), whole.minimum(whole_pairs)

    def by_pairs(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """`bounds` by Lemma 108 (docs/theory/ball_pairs.md) and Lemma 116
        (docs/theory/ball_norm.md)."""
        to = self._moved(radius, ball)
        own, own_up = self._own(to)
        held = (to.c_v + to.m_v).square() * to.up[..., : to.up.shape[-2]]
        most = radius**2 * (held.sum(-2) if ball == "token" else held.amax(-2))
        turned = self.norm_a * most.amax(-1).sqrt()
        keys, values, cross = self._whole(to, held, most, own_up)
        direct = (keys.square() + values.square() + 2 * cross).sqrt()
        changed = self._keys(to) + turned + self._values(to.change, own, to.total)
        slack = 2 * gamma(20 * (self.p.shape[-2] + 20) + 2000)
        changed, direct = (
            t.nan_to_num(torch.inf, torch.inf) * (1 + slack) for t in (changed, direct)
        )
        return changed, direct

    def interval(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """Smallest and largest P' over the ball, (heads, N, M)."""
        low, up, _ = self.reach(radius, ball)
        return low, up

    def _moved(self, radius: float, ball: str) -> BallChanges:
        p, d, f, n = self.p, self.d, self.f, self.p.shape[-2]
        low, up = self.interval(radius, ball)
        change = (torch.maximum(up - p, p - low).clamp(0.0, 1.0) + p * self.off_p + 1e-289).clamp(
            max=1.0
        )
        total = change.sum(-1, keepdim=True).clamp(max=2.0)
        move = (
            torch.full_like(total, radius)
            if ball == "token"
            else radius * up[..., :n].amax(-1, keepdim=True).sqrt()
        )
        norm_a = self.norm_a[:, None, None]
        far, far_k = self.pairs.values(up), self.pairs.keys(up)
        c_v = far.minimum(d.amax(-1, keepdim=True)).minimum(self.pairs.reach_v)
        c_k = far_k.minimum(f.amax(-1, keepdim=True)).minimum(self.pairs.reach_k)
        score = (
            radius * c_k + (self.u.amax(-1, keepdim=True) + norm_a * radius) * move
        )  # how far scores move, as a root mean square
        w, w_k = (
            (change * x)
            .sum(-1, keepdim=True)
            .minimum(total.sqrt() * sums(change))
            .minimum(c * score)
            .minimum(most)
            .minimum(x.amax(-1, keepdim=True))
            for x, sums, c, most in (
                (d, self.pairs.values, c_v, far),
                (f, self.pairs.keys, c_k, far_k),
            )
        )
        return BallChanges(up, change, total, self.norm_v * move, norm_a * move, c_v, c_k, w, w_k)

    def _own(self, to: BallChanges) -> tuple[Tensor, Tensor]:
        """Upper values of ||B'_i - B_i|| and of ||B'_i||, (heads, N, 1) each."""
        c = to.c_v + to.m_v
        sums = (
            (to.change * self.d * self.f)
            .sum(-1, keepdim=True)
            .minimum(self.pairs.values(to.change) * self.pairs.keys(to.change))
        )
        own = sums + to.w * to.w_k + to.m_v * to.c_k + c * to.m_a
        return own, (self.b[..., None] + own).minimum(c * (to.c_k + to.m_a))

    def _whole(
        self, to: BallChanges, held: Tensor, most: Tensor, own_up: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Upper values of ||K'||, of ||V' + B'|| and of ||K' (V' + B')^T||, (heads,) each: Lemma
        116 (docs/theory/ball_norm.md)."""
        by_token, through = self._reached(held, most)
        keys, values = by_token.amax(-1), self._values(to.up, own_up, torch.ones_like(own_up))
        sums = to.up[..., : to.up.shape[-2]].sum(-2).amax(-1).sqrt()
        cross = through.amax(-1) * sums + (own_up[..., 0] * by_token).amax(-1)
        return keys, values, cross.minimum(keys * values)

    def _reached(self, w: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token j and unit vectors y, at least the root of sum_i w_ij (y . q~'_ij)^2, and
        of that of W_V^T q~'_ij, (heads, N) each.

        From weights (heads, N, N) and the most that sum_i w_ij |h'_i|^2 can be, (heads, N).
        """
        found = self.pairs.columns(w) + self.norm_a[:, None] * most.sqrt()
        return found, self.norm_v[..., 0] * found

    def _keys(self, to: BallChanges) -> Tensor:
        """How far the part of J through keys is from that at the centre while queries stand still,
        (heads,)."""

        def columns(w: Tensor) -> Tensor:
            return self.pairs.columns(w).amax(-1)

        values = self.pairs.values
        share = (self.d / self.d.amax(-1, keepdim=True).clamp_min(1e-290)).clamp_min(LEAST_SHARE)
        even = columns(values(to.change).square() * to.change)
        shared = columns(values(to.change / share).square() * (to.change * share))
        squared = to.w.square()
        mean = (columns(squared * to.total * to.change) + columns(squared * self.p)).minimum(
            columns(squared * to.up)
        )
        return even.minimum(shared) + mean + columns(to.m_v.square() * to.up)

    def _values(self, weights: Tensor, own: Tensor, total: Tensor) -> Tensor:
        """|| ||W_V|| weights + diag own ||, or what the sums of rows (``total``) and columns make
        of it, (heads,)."""
        weights = weights[..., : weights.shape[-2]]
        whole = nonnegative_norm(self.norm_v * weights + torch.diag_embed(own[..., 0]), rtol=1e-4)
        sums = (total.amax((-1, -2)) * weights.sum(-2).amax(-1)).sqrt()
        return whole.minimum(self.norm_v[:, 0, 0] * sums + own.amax((-1, -2)))


class PairedBallCentre(ByPairs):
    """`ByPairs` of a plain head: Lemma 108 (docs/theory/ball_pairs.md)."""

    def __init__(self, att: Attention):
        super().__init__(att)
        self.pairs = PairSums(att, self.p, CentreErrors(att))

    def interval(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        low, up, _ = self.reach(radius, ball)
        size, mean_square = relative_changes(
            self.p, self.off_p, self.f, self.u, self.cov_k, self.norm_a, radius, ball
        )
        return relative_interval(
            self.scores, size + self.off_scores + self.off_p, mean_square, low, up
        )

    def _reached(self, w: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        return self.pairs.turned(w, most)


class PairedVariantCentre(VariantBallCentre, ByPairs):
    """`ByPairs` of a head with rotary position embeddings or sinks; of one with a cap the bound by
    entries alone: Lemma 110 (docs/theory/ball_pairs.md)."""

    def __init__(self, att: Attention):
        super().__init__(att)
        if self.cap is None:
            self.pairs = VariantPairSums(att, self.p, CentreErrors(att))

    def bounds(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        return super().bounds(radius, ball) if self.cap is None else self.by_entries(radius, ball)
