r"""Upper values of how far float64 tensors of a layer are from those of exact arithmetic.

A running error analysis. The numbers a layer is made of are taken as exact. Every rounding between
them and P is counted: Lemmas 68 and 69 (docs/theory/rounding.md).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.scoring import BLOCKED, four_axes
from lipbound.attention.variants.base import SIDES, UNIT, Passing, Side

MARGIN = 1 + 1e-6
"""The upper values are sums and products of at most some thousand numbers >= 0, each rounded: that
moves them by less than this factor."""
_VANISHED = 690.0
"""Scores so far below the largest have probabilities below 1e-299."""
UNDERFLOWS = 1e-290
"""Bound on all that underflows, far above what any sum of such numbers can be."""


class TensorErrors(NamedTuple):
    r"""Upper values of lengths and errors, the largest of all tokens, (samples, heads), float64.

    Infinite where nothing can be said. Padding counts as zero.

    Attributes:
        q, k, v: lengths of the queries, centred keys and centred values.
        q_error, k_error, v_error: their distances from those of exact arithmetic (centred at the
            same points).
        q_slope, k_slope, v_slope: Lipschitz constants of query, key and value as maps of a token;
            the Frobenius norm of the projection without variants.
        q_slope_error, k_slope_error, v_slope_error: distances of the computed derivatives from the
            exact ones.
        score: absolute error of the scores that a query's softmax sees, and of their differences
            from the largest.
        p: relative error of the probabilities of a query (on top of `UNDERFLOWS`).
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

    def of_samples(self, index: slice) -> "TensorErrors":
        """Return those of some samples."""
        return TensorErrors(*(t[index] for t in self))


@memoised
def tensor_errors(att: Attention) -> TensorErrors:
    """Return errors of ``wide_q``, ``centred_k``, ``centred_v`` and P of `Attention` in float64.

    Whatever the dtype of ``att``.
    """
    att = att.double()
    sides = (_side(att, side) for side in SIDES)
    every = [*(t for each in zip(*sides, strict=True) for t in each), *_probabilities(att)]
    shape = (att.samples, att.heads)
    return TensorErrors(*upper(torch.stack([t.expand(shape) for t in every])))


def probability_error(att: Attention) -> Tensor:
    """Return relative errors of P, ``p`` of `tensor_errors`, (samples, heads).

    Values are not looked at.
    """
    return upper(_probabilities(att.double())[1]).expand(att.samples, att.heads)


def upper(x: Tensor) -> Tensor:
    """Return upper values with `MARGIN`; NaN, from infinities or zeros, says nothing."""
    return torch.nan_to_num(x * MARGIN, nan=torch.inf, posinf=torch.inf)


@memoised
@torch.no_grad()
def _side(att: Attention, side: Side) -> list[Tensor]:
    """Return the largest length of queries, keys or values, and the fields of `Passing`."""
    differences = {"q": False, "k": att.shift_invariant, "v": att.sinks is None}[side]
    t = {"q": "wide_q", "k": "centred_k", "v": "centred_v"}[side]
    longest = _lengths(getattr(att, t), att.valid_rows if side == "q" else att.valid_keys).amax(-1)
    error, *slopes = _entered(att, side, differences=differences)
    if differences or side == "v":  # centring
        error = torch.add(error, longest, alpha=2 * UNIT)
    return [longest, error, *slopes]


@memoised
@torch.no_grad()
def _probabilities(att: Attention) -> list[Tensor]:
    """Return the fields ``score``, ``p`` and ``weights`` of `TensorErrors`, without `MARGIN`."""
    (q, q_error, *_), (k, k_error, *_) = _side(att, "q"), _side(att, "k")
    # of scale q k^T in every row, and how large its entries can be
    c, reach = abs(att.scale), abs(att.scale) * (q * k)
    score = torch.addcmul(c * (q_error * k), q + q_error, k_error, value=c)
    score = torch.add(score, reach, alpha=2 * (att.d + 4) * UNIT)
    slope: Tensor | float = 0.0
    if att.cap is not None:
        # tanh has slope at most 1, and the logarithm of its derivative slope at most 2;
        # exponentials and tanh are off by a few units
        slope = torch.expm1(2 * score / att.cap) * (1 + 64 * UNIT) + 64 * UNIT
        score = score + 16 * UNIT * reach.clamp_max(att.cap)
    # adding the mask, where there is one, and taking differences from the largest
    if att.mask is not None or att.sinks is not None:
        reach = reach + _constants(att, reach)
        score = score + 2 * UNIT * reach
    if att.cap is None:
        score = torch.add(score, reach.clamp_max(_VANISHED), alpha=4 * UNIT)
    else:
        score = score + 4 * UNIT * _VANISHED
    p = torch.expm1(2 * score) + (2 * att.keys + 64) * UNIT
    weights = p if att.cap is None else (1 + p) * (1 + slope) - 1
    return [score, p, weights]


def _lengths(t: Tensor, valid: Tensor | None) -> Tensor:
    """Return lengths of vectors (samples, heads, N, n), (samples, heads, N), zero for padding."""
    lengths = torch.linalg.vector_norm(t, dim=-1)
    return lengths if valid is None else lengths.masked_fill(~valid[:, None], 0.0)


def length(w: Tensor) -> Tensor:
    """Return upper values of the Frobenius norms of matrices (heads, D, m), (heads,), float64."""
    return torch.linalg.matrix_norm(w.double()) * MARGIN


def _entered(att: Attention, side: Side, *, differences: bool) -> Iterable[Tensor]:
    """Return what is known of queries, keys or values as they are used, the fields of `Passing`.

    The largest of all tokens. ``differences``: whether those between tokens alone count.
    """
    if att.fixed(side) is not None:
        return [torch.zeros(1, 1, dtype=torch.float64, device=att.device)] * 3
    (w, b), steps = att.projection(side), att.steps(side)
    alone = differences and not steps
    size = _token_lengths(att, alone)
    size, b = size if steps else size.amax(-1, keepdim=True), None if alone else b
    slope = torch.linalg.matrix_norm(w)[:, None]
    reach = size * slope
    reach = reach if b is None else reach + torch.linalg.vector_norm(b, dim=-1)[:, None]
    error = 2 * (w.shape[1] + 8) * UNIT * reach
    passing = Passing(error, slope, torch.zeros_like(slope))
    if not steps:
        return [t[..., 0] for t in passing]
    y = att.projected(side)
    for step in steps:  # which may divide by a token's own length
        passing = step.rounded(att.x, y, passing)
        y = step.enter(att.x, y, att.valid)
    if att.valid is not None:
        passing = Passing(*(t.masked_fill(~att.valid[:, None], 0.0) for t in passing))
    return [t.amax(-1) for t in passing]


@memoised
def _token_lengths(att: Attention, around: bool) -> Tensor:
    """Return lengths of tokens, or of tokens less their mean, (samples, 1, N)."""
    return _lengths((att.centred_x if around else att.x)[:, None], att.valid)


def _constants(att: Attention, reach: Tensor) -> Tensor:
    """Return the largest absolute value of what is added to scores or takes part beside them.

    Only where its probability does not vanish; broadcasts to (samples, heads).
    """
    largest = torch.zeros(1, 1, dtype=torch.float64, device=att.device)
    if (mask := att.level_mask) is not None:
        mask = four_axes(mask).double()
        alive = mask >= mask.amax(-1, keepdim=True) - _VANISHED - 2 * reach.amax()
        largest = mask.abs().masked_fill(~alive | (mask <= BLOCKED), 0.0).amax((-1, -2))
    return largest if att.sinks is None else largest + att.sinks.double().abs()
