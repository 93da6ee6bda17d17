r"""Rounding errors of a Jacobian in float64, and of its products.

Upper values, from the error analysis of the layer's tensors and the blocks of J: Lemmas 70, 71 and
72 (docs/theory/rounding.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.attention.rounding import MARGIN, UNDERFLOWS, TensorErrors, tensor_errors, upper
from lipbound.attention.variants.gate import Gate
from lipbound.devices import Routine, finished
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.maps import BLOCKS, normaliser_of
from lipbound.jacobians.one_side import OneSide
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import Roundoff


@memoised
def tensor_error(att: Attention) -> Tensor:
    r"""Upper values of :math:`\|J - \hat J\|`, (samples, heads), float64.

    J is that at the given numbers, J-hat that of the float64 tensors made of them. Where logits are
    so large that P cannot be known, what holds for any P; infinite where tensors overflow, or a
    variant does not say what rounding does to its scores. float32 numbers count as they are.
    """
    att = att.double()
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
    def of(
        e: TensorErrors, columns: Tensor, largest: Tensor, valid: Tensor | None, *others: Tensor
    ) -> Routine[tuple[TensorErrors, "Mixing", list[Tensor]]]:
        """From computed column sums (..., heads, keys) and largest entries (..., heads, rows).

        Rows that are padding, where ``valid`` (..., rows) is False, do not count.

        Returns:
            The errors, these values, and other numbers of their shape, all on the CPU.
        """
        n = max(columns.shape[-1], largest.shape[-1])
        largest = largest if valid is None else largest.masked_fill(~valid[..., None, :], 1.0)
        (whole,) = yield [torch.stack([*e, columns.amax(-1), largest.amin(-1), *others])]
        e, (column, least, *rest) = TensorErrors(*whole[: len(e)]), whole[len(e) :]
        left = (1 - least).clamp_min(0) + (n + 8) * UNIT
        return e, Mixing((column * MARGIN).sqrt(), (left * MARGIN).sqrt(), n**0.5), rest

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
        near, slopes = mix.root * mix.spread, (e.q_slope, e.k_slope, e.v_slope)
        reach = 2 * e.v * torch.minimum(near, mix.norm)
        return Sizes(2 * e.v * mix.spread.clamp_max(1), reach, e.k, e.q, *slopes)

    def through(self, mix: Mixing, scale: float) -> tuple[Tensor, Tensor]:
        """Return what passes through scores, and through values: norms of both parts of J.

        They are norms of absolute values, too.
        """
        paths = self.off * self.key * self.w_q + self.reach * self.query * self.w_k
        return abs(scale) * paths, mix.norm * self.w_v

    def plus(self, e: TensorErrors, mix: Mixing) -> "Sizes":
        """Return sizes of the exact tensors: these, and what rounding may have moved them by."""
        sums = 2 * (mix.root**2 + 8) * UNIT * e.v
        off = 2 * e.v_error + e.p * self.off + sums  # of v_j, and of o_i
        errors = (e.k_error, e.q_error, e.q_slope_error, e.k_slope_error, e.v_slope_error)
        more = [off, off * mix.norm, *errors]
        return Sizes(*(size + error for size, error in zip(self, more, strict=True)))


def distance(e: TensorErrors, mix: Mixing, scale: float) -> Tensor:
    r"""Upper values of :math:`\|J - \hat J\|`, with variants or without, (..., heads).

    Lemma 70 (docs/theory/rounding.md): the parts of J are products, so that a change of their
    factors changes them by no more than it changes the product of their sizes. Where P is not
    known, what holds for any P.

    Args:
        e: errors of the tensors, (..., heads).
        mix: about P.
        scale: of the scores.

    Returns:
        The upper values.
    """
    computed = Sizes.of(e, mix)
    exact = computed.plus(e, mix)
    before, after = computed.through(mix, scale), exact.through(mix, scale)
    weights, p = e.weights, e.p
    changed = (1 + weights) * after[0] - before[0] + (1 + p) * after[1] - before[1]
    rounded = 16 * UNIT * ((1 + weights) * after[0] + (1 + p) * after[1])  # of the difference
    length, most = 2 * (e.v + e.v_error), mix.anything
    whatever = exact._replace(off=length, reach=length * most.norm).through(most, scale)
    known = torch.isfinite(e.score)  # a variant may not say what it does to scores
    least = torch.minimum(upper(changed + rounded), upper(2 * (whatever[0] + whatever[1])))
    return torch.where(known, least, torch.inf)


@torch.no_grad()
def roundoff(
    att: Attention, op: HeadOperator, alone: OneSide | None = None, *, values: Tensor | None = None
) -> Roundoff:
    """Roundings of the heads of a float64 layer.

    Lemma 70 (docs/theory/rounding.md) for its tensors, Lemma 71 (docs/theory/rounding.md) for its
    products. Everything is relative to one number a head, the triangle inequality's bound on J with
    absolute values inside.

    Args:
        att: the layer.
        op: its Jacobian.
        alone: the side whose Jacobian this is, None for the inputs.
        values: the largest lengths of values, (samples, heads), instead of the centred ones'.

    Returns:
        Fields (samples x heads,), on the CPU.
    """
    e, n = tensor_errors(att) if alone is None else alone.errors(att), max(att.rows, att.keys)
    e, shape = e if values is None else e._replace(v=values), (att.samples, att.heads)
    columns = op.column_sums().view(*shape, -1)
    largest, loss = op.largest().view(*shape, -1), op.rows.loss.expand(shape)
    e, mix, (loss,) = finished(Mixing.of(e, columns, largest, att.valid_rows, loss))
    # products take v_j and o_i one by one, whose difference may be small
    apart = mix._replace(spread=torch.ones_like(mix.spread))
    size = sum(Sizes.of(e, apart).through(mix, att.scale), start=torch.zeros_like(mix.norm))
    most = Sizes.of(e, mix.anything).through(mix.anything, att.scale)
    vanished = UNDERFLOWS * (most[0] + most[1])
    tensors = distance(e, mix, att.scale) + loss * size + vanished
    # roundings that a product of entries sees: over tokens, coordinates and widths
    steps = n + max(2 * att.d, att.d_v) + 2 * att.d + att.d_v + 40
    if not op.turned_alone:
        steps += 2 * (att.d + att.d_v + op.in_shape[1]) + 48
    found = Roundoff(*(upper(t).flatten() for t in (tensors, steps * UNIT * size, size)))
    gate = att.gate
    return found if gate is None else gated(att, gate, op, e, found, alone=alone is not None)


def gated(
    att: Attention, gate: Gate, op: HeadOperator, e: TensorErrors, before: Roundoff, *, alone: bool
) -> Roundoff:
    """Return roundings of gated heads of a float64 layer: Lemma 17 (docs/theory/bounds.md).

    Gates are at most 1, their slopes at most 1/4, and outputs no longer than the longest value.

    Args:
        att: the layer.
        gate: its gate.
        op: its Jacobian.
        e: errors of its tensors, on the CPU.
        before: roundings of the heads before their gates, (samples x heads,).
        alone: whether the gate is held, as where one side moves alone, and scales outputs only.
    """
    inner = [t.view(att.samples, att.heads).to(att.device) for t in before]
    size, token = torch.linalg.matrix_norm(gate.w), torch.linalg.vector_norm(att.x, dim=-1)
    bias = 0.0 if gate.b is None else torch.linalg.vector_norm(gate.b, dim=-1)
    values, real = torch.linalg.vector_norm(att.wide_v, dim=-1), att.valid
    if real is not None:
        token, values = token.masked_fill(~real, 0.0), values.masked_fill(~real[:, None], 0.0)
    token, longest = token.amax(-1, keepdim=True), values.amax(-1)
    logits = 2 * (gate.w.shape[1] + 8) * UNIT * (token * size + bias)
    shift = 0.0 if att.b_v is None else torch.linalg.vector_norm(att.b_v, dim=-1)
    made = token * torch.linalg.matrix_norm(att.w_v) + shift
    made = 4 * (att.x.shape[2] + att.tokens + 32) * UNIT * made + e.v_error.to(att.device)
    p = e.p.to(att.device)
    off = p * longest + (1 + p) * made  # of outputs
    own = torch.zeros_like(longest) if alone else size * longest / 4
    moved = torch.zeros_like(own) if alone else size * (longest * (logits + 16 * UNIT) + off / 2)
    tensors = inner[0] + (logits / 4 + 16 * UNIT) * inner[2] + moved + op.rows.loss * own
    width = op.w.shape[2] + 2 * op.in_shape[1] + 40
    products = inner[1] + UNIT * (width * own + 8 * inner[2])
    whole = inner[2] + own
    if gate.after is not None:
        norm = torch.linalg.matrix_norm(gate.after)
        products = norm * (products + 2 * (att.d_v + 8) * UNIT * whole)
        tensors, whole = norm * tensors, norm * whole
    return Roundoff(*(upper(t).flatten().cpu() for t in (tensors, products, whole)))


@torch.no_grad()
def folding_loss(
    att: Attention, basis: Tensor, op: HeadOperator, alone: OneSide | None = None
) -> Tensor:
    """Return upper values of what `Attention.fold_output` changes norms by, (samples, heads).

    What QR and products lose of the output slice, relative to its norm, times the size of the heads
    before it: Lemma 72 (docs/theory/rounding.md).

    Args:
        att: the layer before its output slices are folded in, float64.
        basis: (heads, D_out, r) as `Attention.fold_output` returns it.
        op: the Jacobian of the heads, folded or not.
        alone: the side that moves, before folding; None for the inputs.
    """
    assert att.w_o is not None
    w_o, inner = att.w_o, att.w_o @ basis
    eye = torch.eye(basis.shape[2], dtype=torch.float64, device=basis.device)
    parts = (w_o, basis, inner, basis.mT @ basis - eye, w_o - inner @ basis.mT)
    size, long, near, skew, left = (torch.linalg.matrix_norm(t) for t in parts)
    per = 2 * (sum(w_o.shape[1:]) + basis.shape[2] + 16) * UNIT
    lost = left + per * (size + near * long) + near * (skew + per * (1 + long**2))
    # values of another stream are folded token by token, with what they have in common
    crossed = att.other_stream is not None
    values = torch.linalg.vector_norm(att.wide_v, dim=-1).amax(-1) if crossed else None
    heads = roundoff(att, op, alone, values=values).size.view(att.samples, att.heads)
    return upper(heads.to(lost.device) * lost)


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
        tensors, size = tensors.norm(dim=-1), size.norm(dim=-1)
    else:
        w_o = torch.linalg.matrix_norm(att.w_o).cpu()
        tensors, size = ((t * w_o).sum(-1) for t in (tensors, size))
        width += 2 * (att.heads * att.d_v + att.w_o.shape[2] + 8) * UNIT
    if map in BLOCKS:
        return _block(att, map, tensors, size, width)
    return Roundoff(upper(tensors), upper(width * size), upper(size))


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
    return Roundoff(upper(tensors), upper(width * size), upper(size))


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
    return upper(reach.amax(-1)), upper(error.amax(-1))
