"""Frobenius norms and condition numbers of Jacobians: what their other singular values add."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.attention.variants import WITH_TOKEN_NORMS
from lipbound.devices import in_own_modes
from lipbound.errors import TooLargeError, check_layer, choice
from lipbound.jacobians.automatic import AutomaticJacobian
from lipbound.jacobians.maps import WHOLE
from lipbound.jacobians.prepared_map import PreparedMap
from lipbound.jacobians.token_norms.token_norm import (
    TOKEN_MAPS,
    beside,
    chunks,
    matrices,
    pieces,
    tensors_of,
)
from lipbound.linalg.matrix_norms import UNIT, times_power
from lipbound.linalg.operators import JacobianOperator

Measure = Callable[[JacobianOperator, PreparedMap | None], Tensor]
ACCURACY = 1e-5
"""Relative error beyond which a Frobenius norm is not known."""
RESOLVED = 0.01
"""Relative error of a smallest singular value beyond which it is not told from zero."""
OUTPUTS = {"frobenius_norm": 8192, "condition_number": 1024}
"""Most outputs, N d_v of a head, for which matrices are formed row by row, or decomposed."""


@in_own_modes
@torch.no_grad()
def frobenius_norm(att: Attention | ModuleAttention, *, map: str = "head") -> Tensor:
    r"""Frobenius norm of the Jacobian of every head at every input: the root of all squares.

    :math:`\|J\|_F^2 = \sum_{ij} \|J_{ij}\|_F^2`, added up in float64 over blocks in closed form;
    of gated heads, cross-attention, and layers without closed form, over products with all unit
    vectors of outputs. :math:`\|J\|_F^2 / \|J\|^2` is the stable rank: how many
    directions are about as steep as the steepest.

    Args:
        att: the layer, samples x heads.
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`.

    Returns:
        (samples, heads), or (samples,) for maps of the whole layer, float64, on the CPU. To a
        relative error of 1e-5, that of float64 arithmetic from the given numbers on; NaN where that
        may be more, at huge logits. Rounding of a module without closed form is not counted.

    Raises:
        LipboundError: an unknown map, one without its output projection, or products with more than
            8,192 outputs.

    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(1, 6, 8), (2, 8, 4), (2, 8, 4), (2, 8, 4)]
    >>> att = Attention(*(torch.randn(shape, generator=g).double() for shape in shapes))
    >>> frobenius_norm(att).shape
    torch.Size([1, 2])
    """
    return _each_piece(att, map, "frobenius_norm", _frobenius)


@in_own_modes
@torch.no_grad()
def condition_number(att: Attention | ModuleAttention, *, map: str = "head") -> Tensor:
    r"""Condition number of the Jacobian of every head at every input, from all singular values.

    The largest over the smallest of the min(N d_v, N D) singular values, padding left out. Infinite
    where rounding does not tell the smallest from zero to 1 %, which happens from about 1e6 on, and
    at every Jacobian that is rank-deficient. With the map "head_out" outputs are those in the row
    space of the projection. It grows fast with N: heads of ``builtin:minilm`` and
    ``builtin:gpt2`` have 1e3 to 1e9 at 32 tokens.

    Args:
        att: the layer, samples x heads.
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`.

    Returns:
        (samples, heads), or (samples,) for maps of the whole layer, float64, on the CPU, to a
        relative error of 2 %, with all rounding of a closed form.

    Raises:
        LipboundError: an unknown map, or more than 1,024 outputs, N d_v of a head: the matrix is
            decomposed as a whole (`lipbound.errors.TooLargeError`).
    """
    return _each_piece(att, map, "condition_number", _condition)


def _each_piece(att: Attention | ModuleAttention, map: str, what: str, measure: Measure) -> Tensor:
    """Measure a layer part by part: one sample, and as many heads as fit."""
    choice("map", map, TOKEN_MAPS)
    if isinstance(att, ModuleAttention):
        found = measure(AutomaticJacobian(att, map), None).cpu()
        return found if map in WHOLE else found.view(att.samples, att.heads)
    check_layer(att, what)
    values = []
    for part in pieces(att, map):
        one = part.double()
        if measure is _condition and (one.valid_rows is not None or one.valid_keys is not None):
            one = one.unpadded(0)  # padding would be singular values of zero
        measured = PreparedMap(one, map)
        value = measure(measured.op, measured).cpu()
        exponents = measured.exponents[:1] if map in WHOLE else measured.exponents
        value = times_power(value, exponents) if measure is _frobenius else value
        values.append(value if map in WHOLE else value[None])
    return beside(values, att.samples, map, lambda several, dim: torch.cat(list(several), dim))


def _frobenius(op: JacobianOperator, measured: PreparedMap | None) -> Tensor:
    """Norms of a batch, (batch,)."""
    if measured is None:
        return _squares(op).sqrt()
    if measured.attention.variants <= set(WITH_TOKEN_NORMS):
        parts, squares, off = tensors_of(measured), [], []
        for maps, rows in chunks(parts):
            found = [matrices(parts.of_maps(maps), r, columns=False) for r in rows]
            traces = [g.diagonal(dim1=-2, dim2=-1).sum((1, 2)) for g, _ in found]
            squares.append(torch.stack(traces).sum(0))
            off.append(torch.stack([slack.sum(1) for _, slack in found]).sum(0))
        total, error = torch.cat(squares), torch.cat(off)
    else:
        total = _squares(op)
        products = measured.roundoff.products.to(total.device)
        error = 2 * total.sqrt() * products * math.prod(op.out_shape) ** 0.5
    norm = total.clamp_min(0).sqrt()
    # its allowance is of blocks' Frobenius norms: N rows of them have a root of N times that
    moved = measured.roundoff.tensors.to(norm.device) * op.out_shape[0] ** 0.5
    known = (error <= ACCURACY * total) & (moved <= ACCURACY / 2 * norm)
    return torch.where(known | (total == 0) & (moved == 0), norm, torch.nan)


def _condition(op: JacobianOperator, measured: PreparedMap | None) -> Tensor:
    """Condition numbers of a batch, (batch,)."""
    rows = torch.stack(list(_rows(op, "condition_number")), 1)
    s = torch.linalg.svdvals(rows)
    largest, smallest = s[:, 0], s[:, -1]
    error = 8 * sum(rows.shape[1:]) * UNIT * largest
    if measured is not None:
        tensors, products, _ = (t.to(s.device) for t in measured.roundoff)
        error = error + tensors + products * rows.shape[1] ** 0.5  # of the matrix of all rows
    return torch.where(smallest * RESOLVED > error, largest / smallest, torch.inf)


def _squares(op: JacobianOperator) -> Tensor:
    """Squared Frobenius norms of a batch, (batch,)."""
    return torch.stack([row.square().sum(1) for row in _rows(op, "frobenius_norm")]).sum(0)


def _rows(op: JacobianOperator, what: str) -> Iterator[Tensor]:
    """Rows of the matrices of a batch, (batch, inputs) each, by one product a row.

    Raises:
        TooLargeError: there are too many.
    """
    count, most = math.prod(op.out_shape), OUTPUTS[what]
    if count > most:
        raise TooLargeError(
            f"{what} of a Jacobian with {count:,} outputs (tokens times their width) is asked for, "
            f"and all its rows are formed up to {most:,}; give shorter inputs, or leave it out"
        )
    for k in range(count):
        e = torch.zeros(op.batch, count, dtype=op.dtype, device=op.device)
        e[:, k] = 1
        yield op.vjp(e.view(op.batch, *op.out_shape)).flatten(1)
