r"""Rounding errors of a Jacobian in float64, and of its products.

Upper values, from the error analysis of the layer's tensors and the blocks of J: Lemmas 70, 71 and
72 (docs/theory/rounding.md).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import keep_result, memoised
from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.attention.rounding import (
    MARGIN,
    SMALLEST,
    InheritedErrors,
    TensorErrors,
    errors_with,
    projection_norms,
    root_norm,
    tensor_errors,
)
from lipbound.attention.variants.base import Passing
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.value_norm import ValueNorm
from lipbound.jacobians.gate_rounding import gated
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.maps import BLOCKS, normaliser_of
from lipbound.jacobians.one_side import OneSide
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.matrix_norms import UNIT, times_power, times_power_up
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.upper import Upper, scaled

SCHUR_STEPS = 4
"""Steps of power iteration for the norms of matrices of sizes: within a few percent."""


def tensor_error(att: Attention) -> Tensor:
    r"""Upper values of :math:`\|J - \hat J\|`, (samples, heads), float64.

    J is that at the given numbers, J-hat that of the float64 tensors made of them. Where logits are
    so large that P cannot be known, what holds for any P; infinite where tensors overflow, or a
    variant does not say what rounding does to its scores. float32 numbers count as they are.
    """
    return _tensor_error(att.double())


@memoised
def _tensor_error(att: Attention) -> Tensor:
    return roundoff(att, head_jacobian(att)).tensors.view(att.samples, att.heads)


def inherited_error(att: Attention, inherited: InheritedErrors) -> Tensor:
    """Return what `tensor_error` does, J being that of the tensors that are meant.

    Args:
        att: a plain float64 layer. inherited: how far it may be from the layer that is meant.
    """
    found = roundoff(att, head_jacobian(att), errors=errors_with(att, inherited))
    return found.tensors.view(att.samples, att.heads).to(att.device)


class Moments(NamedTuple):
    """Moments of the rows of P, upper values.

    Attributes:
        value, key: root mean squares of |v_j| and |k_j| (as centred), (..., heads, N).
        mass: sums, (..., heads, N), or 1.
        rest: what the largest entry leaves of 1, (..., heads, N).
        columns: a bound on the norm of P, (..., heads).
    """

    value: Tensor
    key: Tensor
    mass: Tensor | float
    rest: Tensor
    columns: Tensor

    @staticmethod
    def of(
        value: Tensor, key: Tensor, mass: Tensor | float, largest: Tensor, sums: Tensor
    ) -> "Moments":
        """Moments from mean squares, sums and largest entries of rows, and sums of columns.

        As computed in float64, (..., heads, N) each.
        """
        n = max(largest.shape[-1], sums.shape[-1])
        value, key = ((MARGIN * t).clamp_min(0).sqrt() for t in (value, key))
        rest = (1 - largest).clamp_min(0) + (n + 8) * UNIT
        return Moments(value, key, mass, rest, (sums.amax(-1).clamp_max(n) * MARGIN).sqrt())


def distance(e: TensorErrors, rows: Moments, scale: float) -> Tensor:
    r"""Upper values of :math:`\|J - \hat J\|`, with variants or without, (..., heads).

    Lemma 70 (docs/theory/rounding.md).

    Args:
        e: errors of the tensors, (..., heads, N).
        rows: of P.
        scale: of the scores.

    Returns:
        The upper values.
    """
    value, key, mass, rest, columns = rows
    c, sums = abs(scale), (max(e.q.shape[-1], e.k.shape[-1]) + 8) * UNIT
    k_slope, k_slope_error, k_error, v_error = (
        t.amax(-1, keepdim=True) for t in (e.k_slope, e.k_slope_error, e.k_error, e.v_error)
    )
    longest = (e.v + e.v_error).amax(-1, keepdim=True)
    # of v_j from o_i: little where a row is nearly one-hot
    deviation = torch.minimum(value, 2 * longest * rest.sqrt()) + sums * value
    output = e.p * deviation + (1 + e.p) * v_error + 2 * sums * value
    # of T_ij (v_j - o_i): by T, and by v and o
    own, shift = e.weights * deviation, (1 + e.weights) * (v_error + output)
    off = own + shift * mass
    off_keys = own * key + shift * mass**0.5 * key + (deviation + off) * k_error
    moved = k_slope * e.q_error + k_slope_error * (e.q + e.q_error)
    through_k = off * k_slope * e.q + (deviation + off) * moved
    through_q = off_keys * e.q_slope + (deviation * key + off_keys) * e.q_slope_error
    # of P: entry by entry, and sums over rows
    relative, rows_moved = e.p.amax(-1), (e.p * (2 * rest).clamp_max(1) + sums).amax(-1)
    known = torch.minimum(relative, (relative * rows_moved).sqrt())
    v_slope, v_slope_error = e.v_slope.amax(-1), e.v_slope_error.amax(-1)
    through_v = columns * (known * v_slope + (1 + relative) * v_slope_error)
    return _upper(c * through_k.norm(dim=-1) + c * through_q.amax(-1) + through_v)


@torch.no_grad()
def roundoff(
    att: Attention,
    op: HeadOperator,
    *,
    folding: "Folding | None" = None,
    errors: TensorErrors | None = None,
    sharp: bool = False,
    alone: OneSide | None = None,
) -> Roundoff:
    """Roundings of the heads of a float64 layer.

    Lemma 70 (docs/theory/rounding.md) for its tensors, Lemma 71 (docs/theory/rounding.md) for its
    products.

    Args:
        att: the layer.
        op: its Jacobian.
        folding: how far its values may be from those that are meant.
        errors: of its tensors, where they are more than `tensor_errors`.
        sharp: spend some passes over P on sizes that are a half or a third.
        alone: the side whose Jacobian this is, None for the inputs.

    Returns:
        Fields (samples x heads,), on the CPU.
    """
    if op.squared and att.scale and alone is None:
        keep_result(projection_norms, att, _norms_by_squares(att, op))
    if errors is None:
        errors = tensor_errors(att) if alone is None else alone.errors(att)
    e = errors
    c, n = abs(att.scale), max(att.rows, att.keys)
    rows, skew = _moments(op, e), 0.0
    if folding is not None:
        skew = folding.skew
    if folding is not None and att.scoring.find(Gate) is None:
        length, slope = _moved(att, folding)
        if alone is not None:  # what values are made of does not move
            slope = folding.weights[:, None] if alone.side == "v" else torch.zeros_like(slope)
        v_error, v_slope_error = e.v_error + length, e.v_slope_error + slope
        e = replace(e, v_error=v_error, v_slope_error=v_slope_error)
    tensors = torch.minimum(distance(e, rows, c), 2 * _whatever_p(e, c))
    v_slope = e.v_slope.amax(-1)
    value, key, columns = rows.value, rows.key, rows.columns
    k_slope = e.k_slope.amax(-1, keepdim=True)
    ends = [t.amax(-1) for t in (e.v, e.k, e.q, e.q_slope, e.k_slope)]
    vanished = SMALLEST * (ends[0] * c * (ends[1] * ends[3] + ends[2] * ends[4]) + v_slope)
    # Norms of the three parts of J: of entries' absolute values, so that they bound the rounding of
    # sums as well
    reach = torch.minimum((e.q * value).norm(dim=-1), columns * ends[0] * ends[2])
    both, reach = 2 * value * key, 2 * reach
    if sharp:
        both, reach = (torch.minimum(*t) for t in zip((both, reach), _paths(op, e), strict=True))
    parts = [c * (both * e.q_slope).amax(-1), c * reach * k_slope[..., 0], columns * v_slope]
    size = sum(parts[1:], start=parts[0])
    steps = n + max(2 * att.d, att.d_v) + 24
    terms = [part.shape[-2] + 16 for part in op.triangle[:3]]
    if not op.turned_alone:
        steps += 2 * (att.d + att.d_v) + 40
        terms = [sum(op.w.shape[2:]) + 2 * op.in_shape[1] + 24] * 3
    # Coordinates are products with a triangular factor, whose absolute values have a norm that is
    # larger by these factors at most
    wide = sum(part * s for part, s in zip(parts, _spread(att), strict=True))
    norms = projection_norms(att) if alone is None else alone.norms()
    absolute = zip(parts, _absolute(op, att, norms), terms, strict=True)
    rounded = steps * size + sum(part * s * count for part, s, count in absolute)
    tensors = tensors + vanished + op.rows.loss * wide
    found = Roundoff(*(_upper(t).flatten().cpu() for t in (tensors, rounded * UNIT, size)))
    gate = att.scoring.find(Gate)
    if gate is not None:
        lost = 0.0 if folding is None else folding.weights
        found = gated(att, gate, op, e, found, lost, logits_move=alone is None)
    return found._replace(tensors=_upper(found.tensors + skew * found.size)) if skew else found


def _whatever_p(e: TensorErrors, scale: float) -> Tensor:
    """Upper values of ||J|| whatever P is, at given and at stored tensors, (samples, heads)."""
    q, k, v = (t + error for t, error in ((e.q, e.q_error), (e.k, e.k_error), (e.v, e.v_error)))
    q_slope, k_slope, v_slope = (
        (t + error).amax(-1)
        for t, error in (
            (e.q_slope, e.q_slope_error),
            (e.k_slope, e.k_slope_error),
            (e.v_slope, e.v_slope_error),
        )
    )
    size = 2 * scale * v.amax(-1) * (k.amax(-1) * q_slope + k_slope * q.norm(dim=-1))
    return _unless_unknown(_upper(size + q.shape[-1] ** 0.5 * v_slope), e)


def _unless_unknown(x: Tensor, e: TensorErrors) -> Tensor:
    """Values (samples, heads); infinite where a variant does not say what it does to scores."""
    return torch.where(torch.isfinite(e.score).all(-1), x, torch.inf)


def _norms_by_squares(att: Attention, op: HeadOperator) -> tuple[Tensor, ...]:
    """Norms of the projections, `projection_norms`, from products that the operator has formed."""
    ends = list(itertools.accumulate(op.sizes[:3], initial=0))
    places, units = map(slice, ends, ends[1:]), (abs(att.scale), abs(att.scale), 1.0)
    norms = [root_norm(op.rows.square[:, at, at], op.w.shape[1]) for at in places]
    return tuple(norm / unit for norm, unit in zip(norms, units, strict=True))


def _spread(att: Attention) -> list[Tensor]:
    """Norms of the projections' absolute values over their norms at most, (heads,) each.

    Of queries, keys, values.
    """
    return [
        torch.linalg.matrix_norm(w) / norm.clamp_min(1e-300)
        for w, norm in zip((att.w_q, att.w_k, att.w_v), projection_norms(att), strict=True)
    ]


def _absolute(op: HeadOperator, att: Attention, norms: Sequence[Tensor]) -> list[Tensor]:
    """Norms of the coordinates' absolute values over the projections' norms at most, (heads,)."""
    found, units = [], (att.scale, att.scale, 1.0)
    coordinates = op.rows.coordinates.split(op.sizes[:4], -1)[:3]
    for r, norm, unit in zip(coordinates, norms, units, strict=True):
        size = r.abs()
        schur = (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()
        most = torch.minimum(torch.linalg.matrix_norm(size), schur)
        found.append(most / (abs(unit) * norm).clamp_min(1e-300))
    return found


class Folding(NamedTuple):
    r"""Upper values of the rounding by which an output slice was folded into the values.

    Attributes:
        weights: :math:`\|W_V W_O - \hat w E^T\|_F`, (heads,); of normalised values :math:`M W_O -
            \hat M E^T` with M what follows the normalisation, likewise of gated outputs.
        biases: the same of the values' biases, (heads,).
        skew: how far E, as stored, is from orthonormal columns.
    """

    weights: Tensor
    biases: Tensor
    skew: float

    def shifted(self, exponents: Tensor) -> "Folding":
        """The same for values multiplied by powers of two, (heads,)."""
        weights, biases = (times_power_up(t, exponents) for t in (self.weights, self.biases))
        return Folding(weights, biases, self.skew)


@torch.no_grad()
def folding_error(att: Attention, folded: Attention, basis: Tensor) -> Folding:
    """Rounding of a layer that `Attention.fold_output` made of another.

    With its ``basis`` E (heads, D_out, r): Lemma 72 (docs/theory/rounding.md).
    """
    assert att.w_o is not None
    gates = [one.scoring.find(Gate) for one in (att, folded)]
    if gates[0] is not None and gates[1] is not None and gates[1].after is not None:
        m = gates[0].after
        if m is None:
            m = torch.eye(att.d_v, dtype=att.dtype, device=att.device).expand(att.heads, -1, -1)
        weights, skew = _missed(m, att.w_o, basis, gates[1].after)
        return Folding(weights, torch.zeros_like(weights), skew)
    before, after = (one.scoring.values_step for one in (att, folded))
    if before is not None and after is not None:
        m, made = (next(iter(step.linear().values())) for step in (before, after))
        if m.ndim == 2:  # the first matrix that follows normalised values
            m = torch.eye(att.d_v, dtype=att.dtype, device=att.device).expand(att.heads, -1, -1)
        weights, skew = _missed(m.flatten(1, -2), att.w_o, basis, made.flatten(1, -2))
        return Folding(weights, torch.zeros_like(weights), skew)
    weights, skew = _missed(att.w_v, att.w_o, basis, folded.w_v)
    if att.b_v is None or folded.b_v is None:
        return Folding(weights, torch.zeros_like(weights), skew)
    return Folding(weights, _missed(att.b_v[:, None], att.w_o, basis, folded.b_v[:, None])[0], skew)


def values_folding_error(w_o: Tensor, basis: Tensor, through: Tensor) -> Folding:
    """Rounding of matrices (heads, d_v, r) by which values are multiplied in place of ``w_o``.

    With ``basis`` as for `folding_error`.
    """
    eye = torch.eye(w_o.shape[1], dtype=w_o.dtype, device=w_o.device).expand(len(w_o), -1, -1)
    weights, skew = _missed(eye, w_o, basis, through)
    return Folding(weights, torch.zeros_like(weights), skew)


def _missed(w: Tensor, w_o: Tensor, e: Tensor, folded: Tensor) -> tuple[Tensor, float]:
    """Upper values of |w w_o - folded e^T|_F, (heads,), and of |e^T e - 1|_F.

    w and w_o are taken in units of their sizes, so that no square underflows.
    """
    (w, a), (w_o, b), e = scaled(w, (-2, -1)), scaled(w_o, (-2, -1)), e.double()
    near, inner = times_power(folded.double(), -(a + b)), w_o @ e
    per = 2 * (w.shape[-1] + e.shape[1] + 16) * UNIT
    sizes = [torch.linalg.matrix_norm(t) for t in (w, w_o, e, inner)]
    left = torch.linalg.matrix_norm(w_o - inner @ e.mT) + per * sizes[1] * sizes[2] * (1 + sizes[2])
    made = torch.linalg.matrix_norm(near - w @ inner) + per * sizes[0] * sizes[3]
    missed = Upper.of((sizes[0] * left + sizes[2] * made) * MARGIN)
    unit = torch.eye(e.shape[2], dtype=e.dtype, device=e.device)
    skew = torch.linalg.matrix_norm(e.mT @ e - unit) + per * sizes[2] ** 2
    return missed.shifted((a + b)[..., 0, 0]).value(), float(skew.amax())


def _moved(att: Attention, folding: Folding) -> tuple[Tensor, Tensor]:
    """Distances of values from those that are meant, and of their derivatives.

    (samples, heads, N), and broadcasting to it. Less what all values share where P does not see
    that.
    """
    x, sinks = att.x.double(), att.scoring.extra_scores is not None
    weights, step = folding.weights[:, None], att.scoring.values_step
    if isinstance(step, OtherStream):
        moved = weights.expand(att.samples, -1, -1).expand(-1, -1, att.keys)
        return moved, torch.zeros_like(moved)
    if isinstance(step, ValueNorm):
        y, slope = att.projected("v"), projection_norms(att)[2][:, None]
        none = torch.zeros_like(y[..., 0])
        known = step.norm.rounded(x, y, Passing(none, slope.expand_as(none), none))
        length = torch.linalg.vector_norm(step.norm.apply(x, y), dim=-1) + known.error
        return length * weights, known.slope * weights
    x = x if sinks else att.centred(x)
    moved = torch.linalg.vector_norm(x, dim=-1)[:, None] * weights
    return moved + folding.biases[:, None] if sinks else moved, weights


@torch.no_grad()
def folding_slack(folded: Attention, folding: Folding) -> Tensor:
    """Upper values of the norms that folding has taken from heads, (samples, heads).

    Lemma 72 (docs/theory/rounding.md). They are norms of heads with the same probabilities, as far
    as these are known, whose values are what was rounded away.
    """
    gate = folded.scoring.find(Gate)
    if gate is not None:
        bare = folded.scoring.replaced(replace(gate, after=None))
        ungated = folded.with_parts(scoring=bare, check=False)
        known = roundoff(ungated, head_jacobian(ungated))
        size = (known.size + known.tensors).view(folded.samples, folded.heads).to(folded.device)
        return _upper(size * folding.weights)
    e, op = tensor_errors(folded), head_jacobian(folded)
    v, v_slope = (t * MARGIN for t in _moved(folded, folding))
    n, c = max(folded.rows, folded.keys), abs(folded.scale)
    keys = folded.valid_keys
    v = v if keys is None else v.masked_fill(~keys[:, None], 0.0)
    rest = (1 - op.largest().view(e.p.shape)).clamp_min(0) + e.p + (n + 8) * UNIT
    deviation = v.amax(-1, keepdim=True) * (2 * rest.sqrt()).clamp_max(1)
    q, k = e.q + e.q_error, (e.k + e.k_error).amax(-1)
    q_slope, k_slope = e.q_slope + e.q_slope_error, (e.k_slope + e.k_slope_error).amax(-1)
    through_k = k_slope * (deviation * q).norm(dim=-1)
    through_q = k * (deviation * q_slope).amax(-1)
    return _unless_unknown(_upper(c * (through_k + through_q) + n**0.5 * v_slope.amax(-1)), e)


def layer_roundoff(att: Attention, op: HeadOperator, map: str, *, sharp: bool = False) -> Roundoff:
    """Roundings of a whole layer, (samples,): Lemma 72 (docs/theory/rounding.md).

    Args:
        att: the layer, float64.
        op: the Jacobian of its heads.
        map: of `lipbound.jacobians.maps.WHOLE`.
        sharp: as for `roundoff`.

    Returns:
        Fields (samples,), on the CPU.
    """
    heads = roundoff(att, op, sharp=sharp)
    tensors, size = (t.view(att.samples, att.heads) for t in (heads.tensors, heads.size))
    # the last of absolute values
    per = [tensors, size, size * torch.stack(_spread(att)).amax(0).cpu()]
    tokens, inputs = max(att.rows, att.keys), att.x.shape[2]
    width = (2 * (tokens + 3 * (att.d + att.d_v) + inputs + att.heads + 60)) * UNIT
    if map == "heads" or att.w_o is None:
        tensors, size, rounded = (_length(t) for t in per)
    else:
        w_o = torch.linalg.matrix_norm(att.w_o).cpu()
        tensors, size, rounded = ((t * w_o).sum(-1) for t in per)
        width += 2 * (att.heads * att.d_v + att.w_o.shape[2] + 8) * UNIT
    if map in BLOCKS:
        return _block(att, map, tensors, size, rounded, width)
    return Roundoff(_upper(tensors), _upper(width * rounded), _upper(size))


def _length(t: Tensor) -> Tensor:
    """Return lengths of vectors of numbers >= 0 over the last axis, also of tiny ones."""
    largest = t.amax(-1, keepdim=True)
    known = (largest > 0) & torch.isfinite(largest)
    unit = torch.where(known, largest, 1.0)
    return (t / unit).norm(dim=-1) * unit[..., 0]


def _block(
    att: Attention, map: str, tensors: Tensor, size: Tensor, rounded: Tensor, width: float
) -> Roundoff:
    """Roundings of a layer with what stands around it.

    ``rounded`` is a bound on the norm of absolute values, as ``size`` is on the norm.
    """
    norm = normaliser_of(att, map)
    if norm is None:
        size, rounded, width = 1 + size, 1 + rounded, width + 8 * UNIT
    else:
        reach, error = (t.cpu() for t in normaliser_error(norm, att.valid))
        width += 2 * (2 * norm.x.shape[2] + 16) * UNIT
        if map == "pre_norm":
            tensors = tensors * reach + (size + tensors) * error
            size, rounded = 1 + size * reach, 1 + rounded * reach
        else:
            tensors = reach * tensors + error * (1 + size + tensors)
            size, rounded = reach * (1 + size), reach * (1 + rounded)
    return Roundoff(_upper(tensors), _upper(width * rounded), _upper(size))


def normaliser_error(norm: Normaliser, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Norm of a normalisation's Jacobian with absolute values inside, and of its rounding error.

    (samples,) each.
    """
    norm = norm.double()
    n, size, (off, unit_error) = norm.x.shape[2], norm.size[..., 0], norm.rounding
    unit = torch.linalg.vector_norm(norm.unit, dim=-1)
    reach = norm.weight.abs().amax() / size * (2 + unit**2 / n)
    error = reach * (off + (2 * unit * unit_error + unit_error**2) / n + 16 * UNIT)
    if valid is not None:
        reach, error = (t.masked_fill(~valid, 0.0) for t in (reach, error))
    return _upper(reach.amax(-1)), _upper(error.amax(-1))


def _moments(op: HeadOperator, e: TensorErrors) -> Moments:
    """Moments of the heads of an operator, (samples, heads, N)."""
    shape = e.p.shape
    means = op.average(torch.stack([e.v**2, e.k**2, torch.ones_like(e.v)], -1).flatten(0, 1))
    value, key, mass = (t.view(shape) for t in means.unbind(-1))
    sums = op.transposed_average(torch.ones_like(op.o[..., :1])).view(e.v.shape)
    largest = op.largest().view(shape)
    return Moments.of(value, key, (MARGIN * mass).clamp_min(0), largest, sums)


def _paths(op: HeadOperator, e: TensorErrors) -> tuple[Tensor, Tensor]:
    r"""Sizes of what passes through queries and through keys, absolute values taken.

    Sums :math:`\sum_j P_{ij} (|v_j| + |o_i|) |k_j|`, (samples, heads, N), and the norms of the
    matrices :math:`[P_{ij} (|v_j| + |o_i|) |q_i|]_{ij}`, (samples, heads), by Lemma 49
    (docs/theory/numerics.md); upper values.
    """
    v, k, q, o = (t.flatten(0, 1) for t in (e.v, e.k, e.q, op.o.norm(dim=-1).view(e.q.shape)))
    both, key = op.average(torch.stack([v * k, k], -1)).unbind(-1)
    y, found = torch.ones_like(v), torch.full_like(v[:, 0], torch.inf)
    for _ in range(SCHUR_STEPS):
        value, mass = op.average(torch.stack([v * y, y], -1)).unbind(-1)
        image = q * (value + o * mass)
        back, far = op.transposed_average(torch.stack([q * image, o * q * image], -1)).unbind(-1)
        z = v * back + far
        found = torch.minimum(found, (z / y).amax(-1))
        y = (z / z.amax(-1, keepdim=True).clamp_min(1e-300)).clamp_min(1e-14)
    both, norm = both + o * key, (found + SMALLEST).sqrt()
    return _upper(both.view(e.q.shape)), _upper(norm.view(e.v.shape[:2]))


def _upper(x: Tensor) -> Tensor:
    return torch.nan_to_num(x * MARGIN, nan=math.inf, posinf=math.inf)
