r"""Norms of the matrices that rows of P make of values and keys:
:math:`C_i = c \sum_j P_{ij} (v_j - o_i) k_j^T` times weights, :math:`A_i`.

Second moments of all rows come from one product each: Lemma 52 (docs/theory/numerics.md). Upper
values but for `positive_slack`: Lemma 78 (docs/theory/upper_values.md). Products are float32 where
no derivatives are wanted, their rounding allowed for, but for C_i, a sum that cancels.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.bounds.ours.rounded_products import (
    TINIEST,
    divided,
    each_times,
    lengths,
    mean,
    normalised,
    outer,
    root,
    seen,
    upper_lengths,
)
from lipbound.devices import Room
from lipbound.linalg.matrix_norms import block_norm, gamma, reproducible_float32

ROW_BYTES = 2**20
"""Bytes of the float64 matrices of as many rows as are taken at a time: what a core's own cache
holds."""


class RowTensors(NamedTuple):
    """P, values, keys times c, and outputs of some heads, (heads, N, ...), float64; ``off``: what
    rounding may take from C_i, (heads, N)."""

    p: Tensor
    v: Tensor
    k: Tensor
    o: Tensor
    off: Tensor


class CovarianceFactors(NamedTuple):
    r"""What C_i is multiplied with, (heads, ...), float64.

    Attributes:
        query: transpose of W_Q or of a factor of its square, (heads, d, r). value:
            :math:`W_Q^T W_V`, (heads, d, d_v).
        size_q, size_v: Frobenius norms of W_Q and W_V, (heads,). inputs: D.
        images: :math:`W_Q^T \tilde q_k`, (heads, N, d). reach: what their rounding is relative to,
            at least their lengths, (heads, N).
    """

    query: Tensor
    value: Tensor
    size_q: Tensor
    size_v: Tensor
    inputs: int
    images: Tensor
    reach: Tensor


class Covariance(NamedTuple):
    """C_i of some rows.

    Attributes:
        rows: which. queries: those that see some of them as keys.
        unit: over their Frobenius norms, (heads, n, d_v, d). size: these norms, off: what float64
            rounding may take from C_i, (heads, n).
        lost: what rounding may take from a product of ``unit`` with a matrix whose absolute values
            have norm 1, in the Frobenius norm.
    """

    rows: slice
    queries: slice
    unit: Tensor
    size: Tensor
    off: Tensor
    lost: float


def query_norms(rows: RowTensors, query: Tensor, size_q: Tensor) -> Tensor:
    """||B_i||, (heads, N); ``query``, ``size_q``: as in `CovarianceFactors`."""
    return torch.cat(
        [_b(c, *normalised(query, c.unit.dtype), size_q) for c in _covariances(rows)], 1
    )


def all_norms(rows: RowTensors, weights: CovarianceFactors) -> tuple[Tensor, Tensor, Tensor]:
    r"""||B_i||, ||B_i W_V||, (heads, N) each, and :math:`|B_i \tilde q_k|`, (heads, N, N), zero
    where k does not see i."""
    d, inputs, work = rows.k.shape[-1], weights.inputs, _work()
    query, value = normalised(weights.query, work), normalised(weights.value, work)
    sizes, long = (weights.size_q * weights.size_v)[:, None], lengths(weights.images)
    images, b, b_v, b_q = (
        divided(weights.images, long.clamp_min(TINIEST)[..., None], work),
        [],
        [],
        torch.zeros_like(rows.p),
    )
    for c in _covariances(rows):
        b.append(_b(c, *query, weights.size_q))
        norm = block_norm(each_times(c.unit, value[0])) + c.lost
        b_v.append(norm * (c.size * value[1]) + (c.off + gamma(inputs + d + 4) * c.size) * sizes)
        moved = (images[:, c.queries] @ c.unit.flatten(1, 2).mT).unflatten(
            2, c.unit.shape[1:3]
        )  # (heads, k, i, d_v)
        length = upper_lengths(moved) + c.lost
        lost = (c.off + gamma(inputs + 2 * d + 6) * c.size)[:, None] * weights.reach[
            :, c.queries, None
        ]
        b_q[:, c.rows, c.queries] = (length * long[:, c.queries, None] * c.size[:, None] + lost).mT
    return torch.cat(b, 1), torch.cat(b_v, 1), b_q


def own_norms(p: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """||A_i||, (heads, N), from P, values and outputs of some heads."""
    work, (n, d_v) = _work(), v.shape[-2:]
    most = lengths(v).amax(-1)[:, None, None].clamp_min(TINIEST)
    v, o = v / most, o / most
    w, far, length = p * p, lengths(o), lengths(v)
    total = w.sum(-1)
    side = w @ v - total[..., None] / 2 * o
    off = gamma(n + 10, work) * (
        mean(w, length**2) + 2 * far * mean(w, length) + total.detach() * far**2
    )
    off = off + 8 * n * d_v * torch.finfo(work).tiny  # what underflow takes from the sums
    v, w, side, o = (t.to(work) for t in (v, w, side, o))
    squares, found, step = outer(v, v), [], max(1, ROW_BYTES // (8 * len(p) * d_v**2))
    for r in (slice(i, i + step) for i in range(0, n, step)):
        squared = (w[:, r] @ squares).unflatten(-1, (d_v, d_v))  # A_i A_i^T, less the next two
        for x, y in ((side, o), (o, side)):
            squared = torch.addcmul(squared, x[:, r, :, None], y[:, r, None, :], value=-1)
        found.append(block_norm(squared))
    return root(torch.cat(found, 1) + off) * most[..., 0]


def _covariances(rows: RowTensors) -> Iterator[Covariance]:
    """Of all rows, some at a time."""
    d_v, d, work = rows.v.shape[-1], rows.k.shape[-1], _work()
    room, step = Room(), max(1, ROW_BYTES // (8 * len(rows.p) * d_v * d))
    pairs, average = outer(rows.v, rows.k, room), rows.p @ rows.k
    for r, queries, keys in seen((rows.p != 0).any(0), step):
        sums = (rows.p[:, r, keys] @ pairs[:, keys]).unflatten(-1, (d_v, d))
        c = torch.addcmul(sums, rows.o[:, r, :, None], average[:, r, None, :], value=-1)
        size = torch.linalg.vector_norm(c.detach(), dim=(-2, -1))
        unit = divided(c, size.clamp_min(TINIEST)[..., None, None], work)
        yield Covariance(r, queries, unit, size, rows.off[:, r], gamma(d + 8, work))


def _b(c: Covariance, query: Tensor, size: Tensor, size_q: Tensor) -> Tensor:
    norm = block_norm(each_times(c.unit, query)) + c.lost
    return norm * (c.size * size) + (c.off + gamma(query.shape[1] + 2) * c.size) * size_q[:, None]


def _work() -> torch.dtype:
    return (
        torch.float32 if not torch.is_grad_enabled() and reproducible_float32() else torch.float64
    )
