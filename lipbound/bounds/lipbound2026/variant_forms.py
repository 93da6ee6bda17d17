r"""`lipbound.bounds.lipbound2026.variant_maps` for long heads: lengths of vectors as quadratic forms in queries.

:math:`|\tilde q_{it}|^2 = c^2 q_i^T H_t q_i` with :math:`H_t = L_t^T W_K^T W_K L_t`, and so on. With the d (d + 1)/2 products of the coordinates of
every query, all i and many t are one product of two matrices. Such products run at the speed of the processor, where a map for each token reads and
writes memory instead. Everything is float64, as forms cost half of the digits: Lemma 115
(docs/theory/long_variants.md).
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.lipbound2026.pieces import coordinate_pairs, image_norms, normalised, outer, root
from lipbound.bounds.lipbound2026.streaming.parts import against_outer
from lipbound.bounds.lipbound2026.variant_maps import Maps, Parts
from lipbound.devices import Room
from lipbound.linalg.matrix_norms import gamma

FORM_BYTES = 2**23
"""Bytes of the largest temporary of some tokens."""
PAIR_BYTES = 2**28
"""Bytes up to which the products of all values with all keys are kept."""


class Forms(Maps):
    """`Maps` without inner products and without derivatives."""

    def __init__(self, att: Attention, sample: int, h: int, keep: slice | Tensor):
        super().__init__(att, sample, h, keep)
        self._pairs = coordinate_pairs(self._unit)

    @property
    def rows(self) -> int:
        """How many tokens are worth taking at a time."""
        return max(1, FORM_BYTES // (8 * max(self._n, self._d_v * self._unit.shape[1], self._pairs.shape[1])))

    def of(self, tokens: Tensor, cov: Tensor, size_c: Tensor) -> Parts:
        """`Maps.parts` and `Maps.own` of some tokens, but for inner products."""
        image, b, b_v, b_q = self.but_lengths(tokens, cov, size_c)
        return Parts(self.lengths(tokens), image, None, b, b_v, b_q)

    def lengths(self, tokens: Tensor) -> Tensor:
        r"""`Parts.length` of some tokens alone, (n, N)."""
        reach, q = self.tangents.size("k", tokens)[:, None] * self._size, self._size
        metric, size = normalised(self.tangents.metric("k", "k", tokens), torch.float64)
        metric = self.tangents.returned("k", self.tangents.returned("k", metric, tokens).mT, tokens)
        i, j = torch.triu_indices(*metric.shape[-2:], device=metric.device)
        off = gamma(self._inputs + 6 * self._d + self._pairs.shape[1] + 54)
        return root((metric[:, i, j] @ self._pairs.mT).clamp_min(0) * (size * q.square()) + off * reach.square())

    def but_lengths(self, tokens: Tensor, cov: Tensor, size_c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The image, b, b_v and b_q of `Parts`."""
        longest, q = self.tangents.longest("k", tokens), self._size
        reach, small = self.tangents.size("k", tokens)[:, None] * q, gamma(self._inputs + 6 * self._d + self._d_v + 46)
        through, size_v = normalised(self.tangents.metric("k", "v", tokens), torch.float64)
        own = self.own(tokens, cov, size_c, torch.float64)
        values, steep = (self.tangents.returned("k", m, tokens) for m in (through.mT, own.through))
        ones = torch.ones_like(q)
        image = image_norms(values, self._pairs, longest, ones) * (size_v * q) + small * self._norm_v * reach
        most = longest * own.through.norm(dim=(-2, -1))
        seen = image_norms(steep, self._pairs, most, ones) * (own.size * q) + own.off[:, None] * reach
        return image, own.b, own.b_v, seen


class Covariances:
    """The covariances C_i of values and keys, c times, of many rows at a time: where memory allows, from the products of all values with all keys,
    which are put into ``room``."""

    def __init__(self, c: float, v: Tensor, k: Tensor, room: Room | None = None):
        self._v, self._k = v, c * k
        self._pairs = outer(v, self._k, room) if 8 * len(v) * v.shape[1] * k.shape[1] <= PAIR_BYTES else None

    def of(self, t: Tensor, o: Tensor, keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(rows, d_v, d), and sums of the sizes of their terms, (rows,), from rows of weights of some keys, and outputs."""
        v, k = self._v[keys], self._k[keys]
        sums = against_outer(t, v, k) if self._pairs is None else (t @ self._pairs[keys]).unflatten(-1, (v.shape[1], -1))
        far, long, weights = v.detach().norm(dim=-1), k.detach().norm(dim=-1), t.detach()
        sizes = weights @ (far * long) + o.detach().norm(dim=-1) * (weights @ long)
        return torch.addcmul(sums, o[:, :, None], (t @ k)[:, None, :], value=-1), sizes
