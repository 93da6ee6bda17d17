r"""What float64 arithmetic does to a Jacobian: how far it can be from that of exact arithmetic, and
its products from exact ones.

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
    projection_norms,
    tensor_errors,
)
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.maps import BLOCKS, WHOLE
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.matrix_norms import UNIT, times_power, times_power_up
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.upper import Upper, scaled

SCHUR_STEPS = 4
"""Steps of power iteration for the norms of matrices of sizes: within a few percent."""


def tensor_error(att: Attention) -> Tensor:
    r"""An upper value of :math:`\|J - \hat J\|`, (samples, heads), float64: J at the given numbers,
    J-hat of the float64 tensors made of them.

    Where logits are so large that P cannot be known, what holds for any P; infinite where tensors
    overflow, or a variant does not say what rounding does to its scores. float32 numbers count as
    they are.
    """
    return _tensor_error(att.double())


@memoised
def _tensor_error(att: Attention) -> Tensor:
    return roundoff(att, head_jacobian(att)).tensors.view(att.samples, att.heads)


class Moments(NamedTuple):
    """Of the rows of P, upper values.

    Attributes:
        value, key: root mean squares of |v_j| and |k_j| (as centred), (..., heads, N). mass: sums,
            (..., heads, N), or 1.
        rest: what the largest entry leaves of 1, (..., heads, N). columns: a bound on the norm of
            P, (..., heads).
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
        """From computed mean squares, sums and largest entries of rows, all float64, and sums of
        columns, (..., heads, N) each."""
        n = largest.shape[-1]
        value, key = ((MARGIN * t).clamp_min(0).sqrt() for t in (value, key))
        return Moments(
            value,
            key,
            mass,
            (1 - largest).clamp_min(0) + (n + 8) * UNIT,
            (sums.amax(-1).clamp_max(n) * MARGIN).sqrt(),
        )


def distance(
    e: TensorErrors, rows: Moments, scale: float, w_v: Tensor, loose: Tensor | float = 0.0
) -> Tensor:
    r"""An upper value of :math:`\|J - \hat J\|` of plain heads and those with variants, (...,
    heads): Lemma 70 (docs/theory/rounding.md).

    Args:
        e: errors of the tensors, (..., heads, N). rows: of P. scale: of the scores.
        w_v: upper values of the norms of the values' projections, (heads,). loose: how far these
            may be from the projections that are meant.
    """
    value, key, mass, rest, columns = rows
    c, sums = abs(scale), (e.q.shape[-1] + 8) * UNIT
    k_slope, k_slope_error, k_error, v_error = (
        t.amax(-1, keepdim=True) for t in (e.k_slope, e.k_slope_error, e.k_error, e.v_error)
    )
    longest = (e.v + e.v_error).amax(-1, keepdim=True)
    deviation = (
        torch.minimum(value, 2 * longest * rest.sqrt()) + sums * value
    )  # of v_j from o_i: little where a row is nearly one-hot
    output = e.p * deviation + (1 + e.p) * v_error + 2 * sums * value
    own, shift = (
        e.weights * deviation,
        (1 + e.weights) * (v_error + output),
    )  # of T_ij (v_j - o_i): by T, and by v and o
    off = own + shift * mass
    off_keys = own * key + shift * mass**0.5 * key + (deviation + off) * k_error
    through_k = off * k_slope * e.q + (deviation + off) * (
        k_slope * e.q_error + k_slope_error * (e.q + e.q_error)
    )
    through_q = off_keys * e.q_slope + (deviation * key + off_keys) * e.q_slope_error
    relative, moved = (
        e.p.amax(-1),
        (e.p * (2 * rest).clamp_max(1) + sums).amax(-1),
    )  # of P: entry by entry, and sums over rows
    through_v = columns * (
        torch.minimum(relative, (relative * moved).sqrt()) * w_v + (1 + relative) * loose
    )
    return _upper(c * through_k.norm(dim=-1) + c * through_q.amax(-1) + through_v)


@torch.no_grad()
def roundoff(
    att: Attention, op: HeadOperator, *, folding: "Folding | None" = None, sharp: bool = False
) -> Roundoff:
    """Of the heads of a float64 layer: Lemma 70 (docs/theory/rounding.md) for its tensors, Lemma 71
    (docs/theory/rounding.md) for its products.

    Args:
        att, op: the layer and its Jacobian.
        folding: how far its values may be from those that are meant.
        sharp: whether to spend some passes over P on sizes that are a half or a third.
    """
    e = tensor_errors(att)
    c, n = abs(att.scale), att.tokens
    rows, w_v = _moments(op, e), projection_norms(att)[2]
    if folding is not None:
        e = replace(e, v_error=e.v_error + _moved(att, folding))
    known, skew = (0.0, 0.0) if folding is None else (folding.weights, folding.skew)
    tensors = torch.minimum(distance(e, rows, c, w_v, known), 2 * _whatever_p(e, c, w_v + known))
    value, key, columns = rows.value, rows.key, rows.columns
    k_slope = e.k_slope.amax(-1, keepdim=True)
    ends = [t.amax(-1) for t in (e.v, e.k, e.q, e.q_slope, e.k_slope)]
    vanished = SMALLEST * (ends[0] * c * (ends[1] * ends[3] + ends[2] * ends[4]) + w_v)
    # Norms of the three parts of J: of entries' absolute values, so that they bound the rounding of
    # sums as well
    both, reach = (
        value * key,
        torch.minimum((e.q * value).norm(dim=-1), columns * ends[0] * ends[2]),
    )
    both, reach = 2 * both, 2 * reach
    if sharp:
        both, reach = (torch.minimum(*t) for t in zip((both, reach), _paths(op, e), strict=True))
    parts = [c * (both * e.q_slope).amax(-1), c * reach * k_slope[..., 0], columns * w_v]
    size = sum(parts[1:], start=parts[0])
    steps = n + max(2 * att.d, att.d_v) + 24
    terms = [part.shape[-2] + 16 for part in op.triangle]
    if not op.turned_alone:
        steps, terms = (
            steps + 2 * (att.d + att.d_v) + 40,
            [sum(op.w.shape[2:]) + 2 * op.in_shape[1] + 24] * 3,
        )
    # Coordinates are products with a triangular factor, whose absolute values have a norm that is
    # larger by these factors at most
    spread = _spread(att)
    wide = sum(part * s for part, s in zip(parts, spread, strict=True))
    rounded = steps * size + sum(
        part * s * count for part, s, count in zip(parts, _absolute(op, att), terms, strict=True)
    )
    return Roundoff(
        *(
            _upper(t).flatten().cpu()
            for t in (tensors + vanished + op.rows.loss * wide + skew * size, rounded * UNIT, size)
        )
    )


def _whatever_p(e: TensorErrors, scale: float, w_v: Tensor) -> Tensor:
    """An upper value of the norm of J whatever the probabilities are, at the given tensors and at
    the stored ones, (samples, heads)."""
    q, k, v = (t + error for t, error in ((e.q, e.q_error), (e.k, e.k_error), (e.v, e.v_error)))
    q_slope, k_slope = (
        (t + error).amax(-1)
        for t, error in ((e.q_slope, e.q_slope_error), (e.k_slope, e.k_slope_error))
    )
    size = (
        2 * scale * v.amax(-1) * (k.amax(-1) * q_slope + k_slope * q.norm(dim=-1))
        + q.shape[-1] ** 0.5 * w_v
    )
    return torch.where(
        torch.isfinite(e.score).all(-1), _upper(size), torch.inf
    )  # a variant that does not say what it does to scores


def _spread(att: Attention) -> list[Tensor]:
    """How much larger the norms of the projections' absolute values may be than their norms,
    (heads,) each, queries, keys, values."""
    return [
        torch.linalg.matrix_norm(w) / norm.clamp_min(1e-300)
        for w, norm in zip((att.w_q, att.w_k, att.w_v), projection_norms(att), strict=True)
    ]


def _absolute(op: HeadOperator, att: Attention) -> list[Tensor]:
    """How much larger the norms of the absolute values of the coordinates may be than the norms of
    the projections, (heads,) each."""
    found = []
    for r, norm, unit in zip(
        op.rows.coordinates.split(op.sizes[:3], -1),
        projection_norms(att),
        (att.scale, att.scale, 1.0),
        strict=True,
    ):
        size = r.abs()
        most = torch.minimum(
            torch.linalg.matrix_norm(size), (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()
        )
        found.append(most / (abs(unit) * norm).clamp_min(1e-300))
    return found


class Folding(NamedTuple):
    r"""Upper values of the rounding by which an output slice was folded into the values.

    Attributes:
        weights: :math:`\|W_V W_O - \hat w E^T\|_F`, (heads,). biases: the same of the values'
            biases, (heads,).
        skew: how far E, as stored, is from orthonormal columns.
    """

    weights: Tensor
    biases: Tensor
    skew: float

    def shifted(self, exponents: Tensor) -> "Folding":
        """The same for values multiplied by powers of two, (heads,)."""
        return Folding(
            times_power_up(self.weights, exponents),
            times_power_up(self.biases, exponents),
            self.skew,
        )


@torch.no_grad()
def folding_error(att: Attention, folded: Attention, basis: Tensor) -> Folding:
    """The rounding of a layer that `Attention.fold_output` made of another, with its ``basis`` E
    (heads, D_out, r): Lemma 72 (docs/theory/rounding.md)."""
    assert att.w_o is not None
    weights, skew = _missed(att.w_v, att.w_o, basis, folded.w_v)
    if att.b_v is None or folded.b_v is None:
        return Folding(weights, torch.zeros_like(weights), skew)
    return Folding(weights, _missed(att.b_v[:, None], att.w_o, basis, folded.b_v[:, None])[0], skew)


def _missed(w: Tensor, w_o: Tensor, e: Tensor, folded: Tensor) -> tuple[Tensor, float]:
    """Upper values of |w w_o - folded e^T|_F, (heads,), and of |e^T e - 1|_F; w and w_o in units of
    their sizes, so that no square underflows."""
    (w, a), (w_o, b), e = scaled(w, (-2, -1)), scaled(w_o, (-2, -1)), e.double()
    near, inner = times_power(folded.double(), -(a + b)), w_o @ e
    per = 2 * (w.shape[-1] + e.shape[1] + 16) * UNIT
    sizes = [torch.linalg.matrix_norm(t) for t in (w, w_o, e, inner)]
    left = torch.linalg.matrix_norm(w_o - inner @ e.mT) + per * sizes[1] * sizes[2] * (1 + sizes[2])
    made = torch.linalg.matrix_norm(near - w @ inner) + per * sizes[0] * sizes[3]
    missed = (
        Upper.of((sizes[0] * left + sizes[2] * made) * MARGIN).shifted((a + b)[..., 0, 0]).value()
    )
    unit = torch.eye(e.shape[2], dtype=e.dtype, device=e.device)
    return missed, float((torch.linalg.matrix_norm(e.mT @ e - unit) + per * sizes[2] ** 2).amax())


def _moved(att: Attention, folding: Folding) -> Tensor:
    """Distances of values from those that are meant, less what all share where P does not see that,
    (samples, heads, N)."""
    x = att.x.double()
    if att.scoring.extra_scores is None:
        return torch.linalg.vector_norm(att.centred(x), dim=-1)[:, None] * folding.weights[:, None]
    return (
        torch.linalg.vector_norm(x, dim=-1)[:, None] * folding.weights[:, None]
        + folding.biases[:, None]
    )


@torch.no_grad()
def folding_slack(folded: Attention, folding: Folding) -> Tensor:
    """Upper values of the norms that folding has taken from heads, (samples, heads): Lemma 72
    (docs/theory/rounding.md).

    They are norms of heads with the same probabilities, as far as these are known, whose values are
    what was rounded away.
    """
    e, v, op, n, c = (
        tensor_errors(folded),
        _moved(folded, folding) * MARGIN,
        head_jacobian(folded),
        folded.tokens,
        abs(folded.scale),
    )
    v = v if folded.valid is None else v.masked_fill(~folded.valid[:, None], 0.0)
    rest = (1 - op.largest().view(e.p.shape)).clamp_min(0) + e.p + (n + 8) * UNIT
    deviation = v.amax(-1, keepdim=True) * (2 * rest.sqrt()).clamp_max(1)
    through_k = (e.k_slope + e.k_slope_error).amax(-1) * (deviation * (e.q + e.q_error)).norm(
        dim=-1
    )
    through_q = (e.k + e.k_error).amax(-1) * (deviation * (e.q_slope + e.q_slope_error)).amax(-1)
    found = _upper(c * (through_k + through_q) + n**0.5 * folding.weights)
    return torch.where(
        torch.isfinite(e.score).all(-1), found, torch.inf
    )  # a variant that does not say what it does to scores


def layer_roundoff(att: Attention, op: HeadOperator, map: str, *, sharp: bool = False) -> Roundoff:
    """Of a whole layer, from its heads': Lemma 72 (docs/theory/rounding.md)."""
    heads = roundoff(att, op, sharp=sharp)
    tensors, size = (t.view(att.samples, att.heads) for t in (heads.tensors, heads.size))
    per = [
        tensors,
        size,
        size * torch.stack(_spread(att)).amax(0).cpu(),
    ]  # the last of absolute values
    width = (2 * (att.tokens + 3 * (att.d + att.d_v) + att.x.shape[2] + att.heads + 60)) * UNIT
    if map == "heads" or att.w_o is None:
        tensors, size, rounded = (t.norm(dim=-1) for t in per)
    else:
        w_o = torch.linalg.matrix_norm(att.w_o).cpu()
        tensors, size, rounded = ((t * w_o).sum(-1) for t in per)
        width += 2 * (att.heads * att.d_v + att.w_o.shape[2] + 8) * UNIT
    if map in BLOCKS:
        return _block(att, map, tensors, size, rounded, width)
    return Roundoff(_upper(tensors), _upper(width * rounded), _upper(size))


def _block(
    att: Attention, map: str, tensors: Tensor, size: Tensor, rounded: Tensor, width: float
) -> Roundoff:
    """The same for a layer with what stands around it; ``rounded`` is a bound on the norm of
    absolute values, as ``size`` is on the norm."""
    around = att.surroundings
    norm = (
        None
        if around is None
        else {"pre_norm": around.fed_by, "post_norm": around.followed_by}.get(map)
    )
    if norm is None:
        size, rounded, width = 1 + size, 1 + rounded, width + 8 * UNIT
    else:
        reach, error = (t.cpu() for t in normaliser_error(norm, att.valid))
        width += 2 * (2 * norm.x.shape[2] + 16) * UNIT
        if map == "pre_norm":
            tensors, size, rounded = (
                tensors * reach + (size + tensors) * error,
                1 + size * reach,
                1 + rounded * reach,
            )
        else:
            tensors, size, rounded = (
                reach * tensors + error * (1 + size + tensors),
                reach * (1 + size),
                reach * (1 + rounded),
            )
    return Roundoff(_upper(tensors), _upper(width * rounded), _upper(size))


def normaliser_error(norm: Normaliser, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """How large the entries of a normalisation's Jacobian are in norm, absolute values taken, and
    how far rounding moves it, (samples,) each."""
    norm = norm.double()
    n, size, (off, unit_error) = norm.x.shape[2], norm.size[..., 0], norm.rounding
    unit = torch.linalg.vector_norm(norm.unit, dim=-1)
    reach = norm.weight.abs().amax() / size * (2 + unit**2 / n)
    error = reach * (off + (2 * unit * unit_error + unit_error**2) / n + 16 * UNIT)
    if valid is not None:
        reach, error = (t.masked_fill(~valid, 0.0) for t in (reach, error))
    return _upper(reach.amax(-1)), _upper(error.amax(-1))


def _moments(op: HeadOperator, e: TensorErrors) -> Moments:
    """Of the heads of an operator, (samples, heads, N)."""
    shape = e.p.shape
    means = op.average(torch.stack([e.v**2, e.k**2, torch.ones_like(e.v)], -1).flatten(0, 1))
    value, key, mass = (t.view(shape) for t in means.unbind(-1))
    return Moments.of(
        value,
        key,
        (MARGIN * mass).clamp_min(0),
        op.largest().view(shape),
        op.column_sums().view(shape),
    )


def _paths(op: HeadOperator, e: TensorErrors) -> tuple[Tensor, Tensor]:
    r"""Sums :math:`\sum_j P_{ij} (|v_j| + |o_i|) |k_j|`, (samples, heads, N), and the norms of the
    matrices :math:`[P_{ij} (|v_j| + |o_i|) |q_i|]_{ij}`, (samples, heads), by Lemma 49
    (docs/theory/numerics.md); upper values."""
    v, k, q, o = (t.flatten(0, 1) for t in (e.v, e.k, e.q, op.o.norm(dim=-1).view(e.v.shape)))
    both, key = op.average(torch.stack([v * k, k], -1)).unbind(-1)
    y, found = torch.ones_like(v), torch.full_like(v[:, 0], torch.inf)
    for _ in range(SCHUR_STEPS):
        value, mass = op.average(torch.stack([v * y, y], -1)).unbind(-1)
        image = q * (value + o * mass)
        back, far = op.transposed_average(torch.stack([q * image, o * q * image], -1)).unbind(-1)
        z = v * back + far
        found = torch.minimum(found, (z / y).amax(-1))
        y = (z / z.amax(-1, keepdim=True).clamp_min(1e-300)).clamp_min(1e-14)
    return _upper((both + o * key).view(e.v.shape)), _upper(
        (found + SMALLEST).sqrt().view(e.v.shape[:2])
    )


def _upper(x: Tensor) -> Tensor:
    return torch.nan_to_num(x * MARGIN, nan=math.inf, posinf=math.inf)


def map_roundoff(att: Attention, op: HeadOperator, map: str, *, sharp: bool = False) -> Roundoff:
    """Of the Jacobian of ``map`` of a float64 layer, whose heads' Jacobian is ``op``."""
    return (
        layer_roundoff(att, op, map, sharp=sharp)
        if map in WHOLE
        else roundoff(att, op, sharp=sharp)
    )
