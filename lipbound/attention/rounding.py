r"""Upper values of how far float64 tensors of a layer are from those of exact arithmetic.

A running error analysis. The numbers a layer is made of are taken as exact. Every rounding between
them and P is counted: Lemmas 68 and 69 (docs/theory/rounding.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention, centred
from lipbound.attention.scoring import BLOCKED, four_axes
from lipbound.attention.variants.base import SIDES, UNIT, Passing, Side

MARGIN = 1 + 1e-6
"""The upper values are sums and products of at most some thousand numbers >= 0, each rounded: that
moves them by less than this factor."""
VANISHED = 690.0
"""Scores so far below the largest have probabilities below 1e-299."""
SMALLEST = 1e-290
"""Bound on all that underflows, far above what any sum of such numbers can be."""


@dataclass(frozen=True)
class TensorErrors:
    r"""Upper values of lengths and errors, (samples, heads, N) each, float64.

    Infinite where nothing can be said. Padding counts as zero.

    Attributes:
        q, k, v: lengths of the queries, centred keys and centred values.
        q_error, k_error, v_error: their distances from those of exact arithmetic (centred at the
            same points).
        q_slope, k_slope, v_slope: how much faster than a token its query, key or value can move;
            the Frobenius norm of the projection without variants.
        q_slope_error, k_slope_error, v_slope_error: distances of the computed derivatives from the
            exact ones.
        score: absolute error of the scores that a query's softmax sees, and of their differences
            from the largest.
        p: relative error of the probabilities of a query (on top of `SMALLEST`).
        weights: the same of `Attention.weights`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_error: Tensor
    k_error: Tensor
    v_error: Tensor
    q_slope: Tensor
    k_slope: Tensor
    v_slope: Tensor
    q_slope_error: Tensor
    k_slope_error: Tensor
    v_slope_error: Tensor
    score: Tensor
    p: Tensor
    weights: Tensor


@memoised
def tensor_errors(att: Attention) -> TensorErrors:
    """Return errors of ``wide_q``, ``centred_k``, ``centred_v`` and P of `Attention` in float64.

    Whatever the dtype of ``att``.
    """
    return _tensor_errors(att.double())


@torch.no_grad()
def _tensor_errors(att: Attention) -> TensorErrors:
    n = att.keys
    around = torch.linalg.vector_norm(centred(att.x, att.valid), dim=-1)
    size = torch.linalg.vector_norm(att.x, dim=-1)
    found = [_entered(att, side, size, around) for side in SIDES]
    vectors = (att.wide_q, att.centred_k, att.centred_v)
    lengths = [torch.linalg.vector_norm(t, dim=-1) for t in vectors]
    errors = [one.error for one in found]
    errors[2] = errors[2] + 2 * UNIT * lengths[2]
    if att.shift_invariant:
        errors[1] = errors[1] + 2 * UNIT * lengths[1]
    slopes = [one.slope for one in found], [one.slope_error for one in found]
    sides = dict(zip(SIDES, ((att.rows, att.valid_rows), *[(n, att.valid_keys)] * 2), strict=True))
    every = [
        _upper(t.expand(att.samples, att.heads, sides[side][0]), sides[side][1])
        for t, side in zip((*lengths, *errors, *slopes[0], *slopes[1]), SIDES * 4, strict=True)
    ]
    score, reach = _scores(att, *every[:2], *every[3:5])
    slope: Tensor | float = 0.0
    constant = _constants(att, reach)
    spread = (reach + constant).clamp_max(VANISHED) if att.cap is None else VANISHED
    if att.cap is not None:
        # tanh has slope at most 1, and the logarithm of its derivative slope at most 2;
        # exponentials and tanh are off by a few units
        slope = torch.expm1(2 * score / att.cap) * (1 + 64 * UNIT) + 64 * UNIT
        score = score + 16 * UNIT * reach.clamp_max(att.cap)
    # adding the mask, where there is one, and taking differences from the largest
    score = score + 2 * UNIT * (constant + reach) * (constant > 0) + 4 * UNIT * spread
    p = torch.expm1(2 * score) + (2 * n + 64) * UNIT
    rest = (_upper(t, att.valid_rows) for t in (score, p, (1 + p) * (1 + slope) - 1))
    return TensorErrors(*every, *rest)


def _upper(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return upper values of numbers >= 0 from their computed values.

    NaN, from infinity less infinity or times zero, says nothing.
    """
    x = torch.nan_to_num(x * MARGIN, nan=torch.inf, posinf=torch.inf)
    return x if valid is None else x.masked_fill(~valid[:, None], 0.0)


def _projected(size: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return the distance of computed projections from exact ones, (samples, heads, N).

    Of tokens of lengths ``size`` (samples, N).
    """
    reach = size[:, None] * torch.linalg.matrix_norm(w)[:, None]
    reach = reach if b is None else reach + torch.linalg.vector_norm(b, dim=-1)[:, None]
    return 2 * (w.shape[1] + 8) * UNIT * reach


def length(w: Tensor) -> Tensor:
    """Return upper values of the Frobenius norms of matrices (heads, D, m), (heads,), float64."""
    return torch.linalg.matrix_norm(w.double()) * MARGIN


def _entered(att: Attention, side: Side, size: Tensor, around: Tensor) -> Passing:
    """Return what is known of queries, keys or values as they are used.

    Of tokens of lengths ``size``, and ``around`` their mean, (samples, N) each.
    """
    if att.fixed(side) is not None:
        return Passing(*[torch.zeros(1, 1, 1, dtype=torch.float64, device=att.device)] * 3)
    (w, b), steps = att.projection(side), att.steps(side)
    centred = {"q": False, "k": att.shift_invariant, "v": att.sinks is None}[side]
    error = _projected(around, w, None) if centred and not steps else _projected(size, w, b)
    slope = length(w)
    passing = Passing(error, slope[:, None].expand_as(error), torch.zeros_like(error))
    y = att.projected(side) if steps else error
    for step in steps:
        passing = step.rounded(att.x, y, passing)
        y = step.enter(att.x, y, att.valid)
    return passing


def _scores(
    att: Attention, q: Tensor, k: Tensor, q_error: Tensor, k_error: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the error of scale q k^T in every row, and a bound on the size of its entries."""
    longest, furthest = k.amax(-1, keepdim=True), k_error.amax(-1, keepdim=True)
    c = abs(att.scale)
    rounding = 2 * (att.d + 4) * UNIT * q * longest
    return c * (q_error * longest + (q + q_error) * furthest + rounding), c * q * longest


def _constants(att: Attention, reach: Tensor) -> Tensor:
    """Return the largest absolute value of what is added to scores or takes part beside them.

    Only where its probability does not vanish; broadcasts to rows.
    """
    largest = torch.zeros(1, 1, 1, dtype=torch.float64, device=att.device)
    if (mask := att.level_mask) is not None:
        mask = four_axes(mask).double()
        alive = mask >= mask.amax(-1, keepdim=True) - VANISHED - 2 * reach.amax()
        largest = mask.abs().masked_fill(~alive | (mask <= BLOCKED), 0.0).amax(-1)
    return largest if att.sinks is None else largest + att.sinks.double().abs()[:, None]
