r"""Sums over tokens of :math:`|\tilde q_{ij} \cdot \tilde q_{kj}|` for long heads with variants: inner products where terms are large, else lengths.

Proof: Lemma 118 (docs/theory/long_terms.md).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lipbound.attention.layer import Attention
from lipbound.bounds.lipbound2026.parts import CHUNK
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import gamma

LARGEST = 32
"""How many tokens of a row have inner products."""


class Metric(NamedTuple):
    """What a token does to inner products of queries: its number, (d, d), and its rounding over the lengths of both queries."""

    token: int
    product: Tensor
    lost: Tensor


class InnerProducts:
    r"""Of vectors :math:`\tilde q_{ij}` with one token j, for some of the queries i with all, never less than they are.

    Args:
        att: the layer. tangents: of one of its heads. kept: its tokens but for padding. q: c q_i of these, (N, d).
    """

    def __init__(self, att: Attention, tangents: Tangents, kept: Tensor, q: Tensor):
        self._tangents, self._kept, self._q, self._size = tangents, kept, q, q.norm(dim=-1)
        self._gamma = gamma(att.x.shape[2] + 6 * att.d + att.d_v + 52)

    def metrics(self) -> Iterator[Metric]:
        """Of all tokens."""
        n, step = len(self._q), max(1, CHUNK // (8 * self._q.shape[1] ** 2))
        for tokens in (slice(i, min(i + step, n)) for i in range(0, n, step)):
            count, kept = tokens.stop - tokens.start, self._kept[tokens]
            products = self._tangents.product("k", "k", kept).expand(count, -1, -1)
            lost = self._gamma * self._tangents.size("k", kept).square().expand(count)
            yield from (Metric(*each) for each in zip(range(tokens.start, tokens.stop), products, lost, strict=True))

    def of(self, metric: Metric, rows: Tensor, length: Tensor) -> Tensor:
        r"""Absolute values, (rows, N), at most the products of ``length``, :math:`|\tilde q_{ij}|` (N,)."""
        inner = (self._q[rows] @ metric.product @ self._q.mT).abs_().addcmul_(metric.lost * self._size[rows, None], self._size)
        return torch.minimum(inner, length[rows, None] * length)

    def parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As many rows as are worth taking at a time."""
        return rows.split(max(1, CHUNK // (8 * len(self._q))))


def sums_of(inner: InnerProducts, e: Tensor, length: Tensor) -> Tensor:
    r"""Upper values of :math:`\sum_j E_{ij} E_{kj} |\tilde q_{ij} \cdot \tilde q_{kj}|` but for `positive_slack`, (N, N), float64.

    From E and upper values of :math:`|\tilde q_{ij}|`, (N, N). Where derivatives are wanted, terms are formed once more for them, not kept.
    """
    reach = e * length
    chosen = torch.zeros_like(e, dtype=torch.bool).scatter_(1, reach.topk(min(LARGEST, len(e)), -1).indices, True)
    total = torch.where(chosen, 0.0, reach) @ reach.mT

    def terms(metric: Metric, rows: Tensor) -> Tensor:
        j = metric.token
        return inner.of(metric, rows, length[:, j]) * (e[rows, j, None] * e[:, j])

    for metric in inner.metrics():
        for rows in inner.parts(chosen[:, metric.token].nonzero()[:, 0]):
            found = checkpoint(terms, metric, rows, use_reentrant=False, preserve_rng_state=False) if total.requires_grad else terms(metric, rows)
            total = total.index_add_(0, rows, found)
    return torch.minimum(total, total.mT)
