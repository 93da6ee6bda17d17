r"""Rounding errors of a Jacobian in float64, and of its products.

Upper values, from the error analysis of the layer's tensors and the blocks of J: Lemmas 70, 71 and
72 (docs/theory/rounding.md).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.attention.rounding import (
    MARGIN,
    SMALLEST,
    TensorErrors,
    length,
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


class Mixing(NamedTuple):
    """Upper values about P, (..., heads) each.

    Attributes:
        norm: at least the norm of P: rows sum to at most one, so that it is at most the root of the
            largest column sum.
        spread: the largest root of what a row's largest entry leaves of one.
        root: of the number of rows or keys.
    """

    norm: Tensor
    spread: Tensor
    root: float

    @staticmethod
    def of(columns: Tensor, largest: Tensor, real: Tensor | None) -> "Mixing":
        """From computed column sums (..., heads, keys) and largest entries (..., heads, rows).

        Rows that are padding, where ``real`` (..., 1, rows) is False, do not count.
        """
        n = max(columns.shape[-1], largest.shape[-1])
        rest = (1 - largest).clamp_min(0) + (n + 8) * UNIT
        rest = rest if real is None else rest.masked_fill(~real, 0.0)
        norm, spread = ((t.amax(-1) * MARGIN).sqrt() for t in (columns, rest))
        return Mixing(norm, spread, n**0.5)

    @property
    def anything(self) -> "Mixing":
        """What holds for any P."""
        return Mixing(torch.full_like(self.norm, self.root), torch.ones_like(self.norm), self.root)


class Sizes(NamedTuple):
    """Upper values about the tensors that J is a product of, (..., heads) each.

    Attributes:
        off: of sums of P_ij |v_j - o_i| over any row. reach: of the norm of the matrix of these
            terms.
        key, query: the longest centred key, the longest query.
        w_q, w_k, w_v: the largest derivatives of a token's query, key and value.
    """

    off: Tensor
    reach: Tensor
    key: Tensor
    query: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor

    @staticmethod
    def of(e: TensorErrors, mix: Mixing) -> "Sizes":
        """Sizes of the computed tensors."""
        value, *rest = (t.amax(-1) for t in (e.v, e.k, e.q, e.q_slope, e.k_slope, e.v_slope))
        near = torch.minimum(mix.root * mix.spread, mix.norm)
        return Sizes(2 * value * mix.spread.clamp_max(1), 2 * value * near, *rest)

    def through(self, mix: Mixing, scale: float) -> tuple[Tensor, Tensor]:
        """Return what passes through scores, and through values: norms of both parts of J.

        They are norms of absolute values, too.
        """
        paths = self.off * self.key * self.w_q + self.reach * self.query * self.w_k
        return abs(scale) * paths, mix.norm * self.w_v

    def plus(self, e: TensorErrors, mix: Mixing) -> "Sizes":
        """Return sizes of the exact tensors: these, and what rounding may have moved them by."""
        sums = 2 * (e.k.shape[-1] + 8) * UNIT * e.v.amax(-1)
        off = 2 * e.v_error.amax(-1) + e.p.amax(-1) * self.off + sums  # of v_j, and of o_i
        errors = (e.k_error, e.q_error, e.q_slope_error, e.k_slope_error, e.v_slope_error)
        more = [off, off * mix.norm, *(t.amax(-1) for t in errors)]
        return Sizes(*(size + error for size, error in zip(self, more, strict=True)))


def distance(e: TensorErrors, mix: Mixing, scale: float) -> Tensor:
    r"""Upper values of :math:`\|J - \hat J\|`, with variants or without, (..., heads).

    Lemma 70 (docs/theory/rounding.md): the parts of J are products, so that a change of their
    factors changes them by no more than it changes the product of their sizes. Where P is not
    known, what holds for any P.

    Args:
        e: errors of the tensors, (..., heads, N).
        mix: about P.
        scale: of the scores.

    Returns:
        The upper values.
    """
    computed = Sizes.of(e, mix)
    exact = computed.plus(e, mix)
    before, after = computed.through(mix, scale), exact.through(mix, scale)
    weights, p = e.weights.amax(-1), e.p.amax(-1)
    changed = (1 + weights) * after[0] - before[0] + (1 + p) * after[1] - before[1]
    rounded = 16 * UNIT * ((1 + weights) * after[0] + (1 + p) * after[1])  # of the difference
    length, most = 2 * (e.v + e.v_error).amax(-1), mix.anything
    whatever = exact._replace(off=length, reach=length * most.norm).through(most, scale)
    known = torch.isfinite(e.score).all(-1)  # a variant may not say what it does to scores
    least = torch.minimum(_upper(changed + rounded), _upper(2 * (whatever[0] + whatever[1])))
    return torch.where(known, least, torch.inf)


@torch.no_grad()
def roundoff(
    att: Attention,
    op: HeadOperator,
    *,
    folding: "Folding | None" = None,
    alone: OneSide | None = None,
) -> Roundoff:
    """Roundings of the heads of a float64 layer.

    Lemma 70 (docs/theory/rounding.md) for its tensors, Lemma 71 (docs/theory/rounding.md) for its
    products. Everything is relative to one number a head, the triangle inequality's bound on J with
    absolute values inside.

    Args:
        att: the layer.
        op: its Jacobian.
        folding: how far its values may be from those that are meant.
        alone: the side whose Jacobian this is, None for the inputs.

    Returns:
        Fields (samples x heads,), on the CPU.
    """
    e = tensor_errors(att) if alone is None else alone.errors(att)
    n, skew = max(att.rows, att.keys), 0.0 if folding is None else folding.skew
    if folding is not None and att.scoring.find(Gate) is None:
        moved, slope = _moved(att, folding)
        if alone is not None:  # what values are made of does not move
            slope = folding.weights[:, None] if alone.side == "v" else torch.zeros_like(slope)
        v_error, v_slope_error = e.v_error + moved, e.v_slope_error + slope
        e = replace(e, v_error=v_error, v_slope_error=v_slope_error)
    columns = op.transposed_average(torch.ones_like(op.o[..., :1])).view(e.v.shape)
    real = None if att.valid_rows is None else att.valid_rows[:, None]
    mix = Mixing.of(columns, op.largest().view(e.q.shape), real)
    # products take v_j and o_i one by one, whose difference may be small
    apart = mix._replace(spread=torch.ones_like(mix.spread))
    size = sum(Sizes.of(e, apart).through(mix, att.scale), start=torch.zeros_like(mix.norm))
    most = Sizes.of(e, mix.anything).through(mix.anything, att.scale)
    vanished = SMALLEST * (most[0] + most[1])
    tensors = distance(e, mix, att.scale) + op.rows.loss * size + vanished
    # roundings that a product of entries sees: over tokens, coordinates and widths
    steps = n + max(2 * att.d, att.d_v) + 2 * att.d + att.d_v + 40
    if not op.turned_alone:
        steps += 2 * (att.d + att.d_v + op.in_shape[1]) + 48
    found = Roundoff(*(_upper(t).flatten().cpu() for t in (tensors, steps * UNIT * size, size)))
    gate = att.scoring.find(Gate)
    if gate is not None:
        lost = 0.0 if folding is None else folding.weights
        found = gated(att, gate, op, e, found, lost, logits_move=alone is None)
    return found._replace(tensors=_upper(found.tensors + skew * found.size)) if skew else found


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
        y, slope = att.projected("v"), length(att.w_v)[:, None]
        none = torch.zeros_like(y[..., 0])
        known = step.norm.rounded(x, y, Passing(none, slope.expand_as(none), none))
        reach = torch.linalg.vector_norm(step.norm.apply(x, y), dim=-1) + known.error
        return reach * weights, known.slope * weights
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
    e = tensor_errors(folded)
    v, v_slope = (t * MARGIN for t in _moved(folded, folding))
    keys = folded.valid_keys
    v = v if keys is None else v.masked_fill(~keys[:, None], 0.0)
    root = torch.full_like(v.amax(-1), max(folded.rows, folded.keys) ** 0.5)
    mix = Mixing(root, torch.ones_like(root), float(root.flatten()[0]))
    length = 2 * v.amax(-1)
    exact = Sizes.of(e, mix).plus(e, mix)
    exact = exact._replace(off=length, reach=length * root, w_v=v_slope.amax(-1))
    through = exact.through(mix, folded.scale)
    stated = torch.isfinite(e.score).all(-1)
    return torch.where(stated, _upper(through[0] + through[1]), torch.inf)


def layer_roundoff(att: Attention, op: HeadOperator, map: str) -> Roundoff:
    """Roundings of a whole layer, (samples,): Lemma 72 (docs/theory/rounding.md).

    Args:
        att: the layer, float64.
        op: the Jacobian of its heads.
        map: of `lipbound.jacobians.maps.WHOLE`.

    Returns:
        Fields (samples,), on the CPU.
    """
    heads = roundoff(att, op)
    tensors, size = (t.view(att.samples, att.heads) for t in (heads.tensors, heads.size))
    tokens, inputs = max(att.rows, att.keys), att.x.shape[2]
    width = (2 * (tokens + 3 * (att.d + att.d_v) + inputs + att.heads + 60)) * UNIT
    if map == "heads" or att.w_o is None:
        tensors, size = _length(tensors), _length(size)
    else:
        w_o = torch.linalg.matrix_norm(att.w_o).cpu()
        tensors, size = ((t * w_o).sum(-1) for t in (tensors, size))
        width += 2 * (att.heads * att.d_v + att.w_o.shape[2] + 8) * UNIT
    if map in BLOCKS:
        return _block(att, map, tensors, size, width)
    return Roundoff(_upper(tensors), _upper(width * size), _upper(size))


def _length(t: Tensor) -> Tensor:
    """Return lengths of vectors of numbers >= 0 over the last axis, also of tiny ones."""
    largest = t.amax(-1, keepdim=True)
    known = (largest > 0) & torch.isfinite(largest)
    unit = torch.where(known, largest, 1.0)
    return (t / unit).norm(dim=-1) * unit[..., 0]


def _block(att: Attention, map: str, tensors: Tensor, size: Tensor, width: float) -> Roundoff:
    """Roundings of a layer with what stands around it."""
    norm = normaliser_of(att, map)
    if norm is None:
        size, width = 1 + size, width + 8 * UNIT
    else:
        reach, error = (t.cpu() for t in normaliser_error(norm, att.valid))
        width += 2 * (2 * norm.x.shape[2] + 16) * UNIT
        if map == "pre_norm":
            tensors, size = tensors * reach + (size + tensors) * error, 1 + size * reach
        else:
            tensors, size = reach * tensors + error * (1 + size + tensors), reach * (1 + size)
    return Roundoff(_upper(tensors), _upper(width * size), _upper(size))


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


def _upper(x: Tensor) -> Tensor:
    return torch.nan_to_num(x * MARGIN, nan=math.inf, posinf=math.inf)
