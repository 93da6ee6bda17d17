r"""`lipbound_every` for heads with rotary position embeddings, normalised queries and keys, capped
scores or sinks: a matrix for each row of blocks.

Blocks of J as in `lipbound.jacobians.token_tangents`, weights from Lemma 97
(docs/theory/token_bounds.md), rounding in Lemma 96 (docs/theory/token_bounds.md). float64
throughout.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.ours.block_norms import CHUNK
from lipbound.bounds.ours.rounded_products import root
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import (
    block_norm,
    gamma,
    matrix_norm,
    power_of_two,
    symmetric_norm,
)

AT_ONCE = 16
"""Rows whose matrices are formed together, those with the largest sums of norms first."""


def largest_row(totals: Tensor, norms: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """The largest over rows i of min(t_i, (t_i n_i)^(1/2)), NaN if one is.

    Args:
        totals: t, (N,).
        norms: n of some rows, given by their numbers; asked for in the order of ``totals``, until
            what is left lies below what is found.
        width: numbers that a row of blocks has.
    """
    totals, order = totals.sort(descending=True)
    found = torch.zeros_like(totals[0])
    step = max(1, min(AT_ONCE, CHUNK // (8 * width)))
    for i in range(0, len(totals), step):
        if not bool(totals[i] > found):
            return totals[i] if bool(totals[i].isnan()) else found
        most = totals[i : i + step]
        found = torch.maximum(
            found, torch.minimum(root(most * norms(order[i : i + step])), most).amax()
        )
    return found


class VariantRows:
    """Rows of blocks of one head of one sample of a float64 layer, padding left out: `value` is the
    bound but for `positive_slack`."""

    def __init__(self, att: Attention, sample: int, h: int):
        keep: slice | Tensor = slice(None) if att.valid is None else att.valid[sample]
        self._kept = torch.arange(att.tokens, device=att.device)[keep]
        p, t = (w[sample, h][keep][:, keep] for w in (att.p, att.weights))
        self._att, self._tangents, self._w_v = att, Tangents(att, sample, h), att.w_v[h]
        self._q = att.scale * att.q[sample, h][keep]
        self._k, self._v = att.centred_k[sample, h][keep], att.centred_v[sample, h][keep]
        self._o = p @ self._v
        self.unit = power_of_two(p.amax())
        self._p, self._t = p / self.unit, t / self.unit
        self._slope = torch.where(p > 0, t / torch.where(p > 0, p, 1.0), 0.0)
        distance = torch.cdist(self._o, self._v, compute_mode="donot_use_mm_for_euclid_dist")
        self._steep, self._e = self._slope * distance, self._t * distance
        self._size, length_k = self._q.norm(dim=-1), self._k.norm(dim=-1)
        ones = torch.ones_like(self._size)
        self._s_q, self._s_k = (self._tangents.size(a, self._kept) * ones for a in ("q", "k"))
        self._mine = (
            abs(att.scale) * (self._e @ length_k) * self._s_q
        )  # Frobenius norms of B_i, absolute values taken
        self._inner = (
            torch.linalg.matrix_norm(self._w_v) + self._steep * self._s_k * self._size[:, None]
        )
        self._measure()

    def value(self) -> Tensor:
        """The largest value of a row."""
        n, d_v = self._v.shape
        largest = largest_row(self.sizes.sum(-1), self._norms, n * max(d_v, self._q.shape[1]))
        return largest * self.unit * (1 + gamma(10 * self._q.shape[1] + 200))

    def _measure(self) -> None:
        """Lengths of q~_ij, upper values of the norms of K_ij and of blocks: `_length`, `_h`, `_b`
        and `sizes`."""
        n, d_v = self._v.shape
        small = gamma(self._att.x.shape[2] + 6 * self._q.shape[1] + d_v + 40)
        self._length, image, self._b = (
            torch.zeros_like(self._p),
            torch.zeros_like(self._p),
            self._p.new_zeros(n),
        )
        step = max(1, CHUNK // (8 * n * max(n, d_v, self._q.shape[1])))
        for j in range(0, n, step):
            part = slice(j, j + step)
            reach = self._s_k[part, None] * self._size
            pulled = (self._q @ self._product("k", "v", part)).norm(dim=-1)
            image[:, part] = (pulled + small * reach * torch.linalg.matrix_norm(self._w_v)).mT
            squares = ((self._q @ self._product("k", "k", part)) * self._q).sum(-1).clamp_min(
                0
            ) + small * reach**2
            self._length[:, part] = squares.sqrt().mT
            cov, lost = self._covariance(torch.arange(n, device=image.device)[part])
            squared = (
                block_norm(cov @ self._product("q", "q", part) @ cov.mT) + lost * self._mine[part]
            )
            self._b[part] = squared.sqrt()
        self._h = (
            matrix_norm(self._w_v) ** 2
            + 2 * self._steep * image
            + (self._steep * self._length) ** 2
        ).sqrt()
        self.sizes = self._p * self._h + torch.diag_embed(self._b)

    def _product(self, a: str, b: str, part: slice | Tensor) -> Tensor:
        return self._tangents.product(a, b, self._kept[part])

    def _covariance(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """C_i of some rows, (rows, d_v, d), and what rounding may have taken from the
        norm of B_i."""
        a = self._t[rows, :, None] * (self._v[None] - self._o[rows, None, :])
        n, d_v = self._v.shape
        lost = (
            gamma(2 * n + self._att.x.shape[2] + 8 * self._q.shape[1] + d_v + 60) * self._mine[rows]
        )
        return self._att.scale * a.mT @ self._k, lost

    def _norms(self, rows: Tensor) -> Tensor:
        """Upper values of the largest eigenvalues of sum_j J_ij J_ij^T / d_ij for some rows,
        (rows,)."""
        at, n = torch.arange(len(rows), device=rows.device), len(self._p)
        p, h, b, o, q = self._p[rows], self._h[rows], self._b[rows], self._o[rows], self._q[rows]
        own = p[at, rows] * h[at, rows] + b
        weight = torch.where(own > 0, 1 / torch.where(own > 0, own, 1.0), 0.0)
        factor = torch.where(h > 0, p / torch.where(h > 0, h, 1.0), 0.0)
        mixed = p[at, rows] * weight
        factor[at, rows] = p[at, rows] * mixed

        total = factor.sum(-1)[:, None, None] * (self._w_v.mT @ self._w_v)
        cov, _ = self._covariance(rows)
        own_a = self._slope[rows, rows, None] * (self._v[rows] - o)
        through_k = (cov @ self._product("q", "k", rows) @ q[..., None])[..., 0]
        cross = mixed[:, None, None] * (
            cov @ self._product("q", "v", rows) + through_k[:, :, None] * own_a[:, None]
        )
        step = max(1, CHUNK // (8 * self._q.shape[1] * self._v.shape[1]))
        for j in range(0, n, step):
            part = slice(j, j + step)
            a = self._slope[rows, part, None] * (self._v[None, part] - o[:, None])  # (rows, j, d_v)
            z = (q @ self._product("k", "v", part)).expand(a.shape[1], -1, -1).transpose(0, 1)
            cross = cross + (a.mT * factor[:, None, part]) @ z
            total = total + (a.mT * (factor * self._length[rows] ** 2)[:, None, part]) @ a
        total = (
            total
            + cross
            + cross.mT
            + weight[:, None, None] * cov @ self._product("q", "q", rows) @ cov.mT
        )
        inner, mine = self._inner[rows], self._mine[rows]
        sizes = (factor * inner**2).sum(-1) + 2 * mixed * inner[at, rows] * mine + weight * mine**2
        widths = self._att.x.shape[2] + n + 2 * self._q.shape[1] + 2 * self._v.shape[1]
        return symmetric_norm(total) + gamma(8 * widths + 200) * sizes
