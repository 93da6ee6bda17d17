"""Other singular values of Jacobians than the first, Frobenius norms and condition numbers."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.attention.variants import WITH_TOKEN_NORMS
from lipbound.devices import in_own_modes
from lipbound.errors import TooLargeError, check_layer, choice, real, whole
from lipbound.jacobians.automatic import AutomaticJacobian
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.in_range import in_range
from lipbound.jacobians.maps import WHOLE
from lipbound.jacobians.token_norms.blocks import LayerTensors
from lipbound.jacobians.token_norms.token_norm import TOKEN_MAPS, beside, chunks, pieces, tensors_of
from lipbound.linalg.matrix_norms import UNIT, decomposed, times_power
from lipbound.linalg.operators import JacobianOperator, Product, Roundoff, Transposed
from lipbound.linalg.solution import normal_numbers, seeds_each

Measure = Callable[[JacobianOperator, Roundoff, LayerTensors | None], Tensor]
ACCURACY = 1e-5
"""Relative error beyond which a Frobenius norm is not known."""
RESOLVED = 0.01
"""Relative error of a smallest singular value beyond which it is not told from zero."""
MOST_OUTPUTS = {"frobenius_norm": 8192, "condition_number": 1024}
"""Most outputs, N d_v of a head, for which matrices are formed row by row, or decomposed."""
SPARE_VECTORS = 4
"""Vectors of a block beyond the singular values that are asked for: they converge faster."""


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
        every = AutomaticJacobian(att, map)
        exact = Roundoff(*torch.zeros(3, every.batch, dtype=torch.float64))
        found = measure(every, exact, None).cpu()
        return found if map in WHOLE else found.view(att.samples, att.heads)
    check_layer(att, what)
    values = []
    for part in pieces(att, map):
        one = part.double()
        if measure is _condition and (one.valid_rows is not None or one.valid_keys is not None):
            one = one.unpadded(0)  # padding would be singular values of zero
        wide = in_range(one, map)
        op, by_blocks = wide.jacobian(), wide.layer.variants <= set(WITH_TOKEN_NORMS)
        parts = tensors_of(wide, op) if measure is _frobenius and by_blocks else None
        value = measure(op, wide.allowance(op), parts).cpu()
        value = times_power(value, wide.exponents) if measure is _frobenius else value
        values.append(value if map in WHOLE else value[None])
    return beside(values, att.samples, map, lambda several, dim: torch.cat(list(several), dim))


def _frobenius(op: JacobianOperator, roundoff: Roundoff, parts: LayerTensors | None) -> Tensor:
    """Norms of a batch, (batch,), from its blocks or row by row."""
    if parts is None:
        rows = _rows(op, "frobenius_norm")
        total = torch.stack([row.square().sum(1) for row in rows]).sum(0)
        products = roundoff.products.to(total.device)
        error = 2 * total.sqrt() * products * math.prod(op.out_shape) ** 0.5
    else:
        squares, off = [], []
        for maps, tokens in chunks(parts):
            found = [parts.of_maps(maps).squares(t, columns=False) for t in tokens]
            traces = [g.diagonal(dim1=-2, dim2=-1).sum((1, 2)) for g, _ in found]
            squares.append(torch.stack(traces).sum(0))
            off.append(torch.stack([slack.sum(1) for _, slack in found]).sum(0))
        total, error = torch.cat(squares), torch.cat(off)
    norm = total.clamp_min(0).sqrt()
    # its allowance is of blocks' Frobenius norms: N rows of them have a root of N times that
    moved = roundoff.tensors.to(norm.device) * op.out_shape[0] ** 0.5
    known = (error <= ACCURACY * total) & (moved <= ACCURACY / 2 * norm)
    return torch.where(known | (total == 0) & (moved == 0), norm, torch.nan)


def _condition(op: JacobianOperator, roundoff: Roundoff, _: LayerTensors | None) -> Tensor:
    """Condition numbers of a batch, (batch,)."""
    rows = torch.stack(list(_rows(op, "condition_number")), 1).cpu()
    s = torch.linalg.svdvals(rows)
    largest, smallest = s[:, 0], s[:, -1]
    error = 8 * sum(rows.shape[1:]) * UNIT * largest
    # the latter of the matrix of all rows
    error = error + roundoff.tensors + roundoff.products * rows.shape[1] ** 0.5
    return torch.where(smallest * RESOLVED > error, largest / smallest, torch.inf)


def _rows(op: JacobianOperator, what: str) -> Iterator[Tensor]:
    """Rows of the matrices of a batch, (batch, inputs) each, by one product a row.

    Raises:
        TooLargeError: there are too many.
    """
    count, most = math.prod(op.out_shape), MOST_OUTPUTS[what]
    if count > most:
        raise TooLargeError(
            f"{what} of a Jacobian with {count:,} outputs (tokens times their width) is asked for, "
            f"and all its rows are formed up to {most:,}; give shorter inputs, or leave it out"
        )
    return Transposed(op).columns()


class SingularValues(NamedTuple):
    """The k largest singular values of a batch of Jacobians, as far as they were found.

    (samples, heads, k), or (samples, k) of maps of the whole layer, float64, descending; zero
    beyond the smaller side of a matrix.

    Attributes:
        values: Ritz values, the i-th at most the i-th singular value.
        lower: the same less all rounding: proved lower ends.
        residual: with all rounding; a singular value lies within it of every Ritz value above it,
            and of c values of a cluster c singular values within the root of the sum of its
            squares.
        cluster: numbers from 0 on: values of one number are not told apart by their residuals,
            so that only the space of their vectors is determined.
        converged: whether the residual is at most ``tol`` times the largest value.
        left: unit vectors of outputs, orthogonal to each other, (..., k, N, width).
        right: unit vectors of inputs, (..., k, N, D); zero where the value is.
    """

    values: Tensor
    lower: Tensor
    residual: Tensor
    cluster: Tensor
    converged: Tensor
    left: Tensor
    right: Tensor


@in_own_modes
@torch.no_grad()
def singular_values(
    att: Attention,
    k: int = 8,
    *,
    map: str = "head",
    tol: float = 1e-4,
    seed: int = 0,
    max_steps: int = 60,
) -> SingularValues:
    r"""Return the k largest singular values of the Jacobian of every head at every input.

    By Rayleigh and Ritz on the Krylov space of a random block of k + 4 vectors under
    :math:`J J^T`, in float64: a multiple value is found as often as it occurs. Lower ends are
    proved, by Courant and Fischer, and so is that singular values lie near: Lemma 43
    (docs/theory/certificates.md). That none between or above them was missed is not: it is of the
    first one alone, by `lipbound.spectral_norm` with ``delta``.

    Args:
        att: the layer, samples x heads, in closed form.
        k: how many.
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`.
        tol: residual, over the largest value, at which the search stops.
        seed: of the random block.
        max_steps: products of a block with J J^T; the vectors of all are kept.

    Returns:
        `SingularValues`, values in float64 on the CPU, vectors in the dtype of ``att``.

    Raises:
        LipboundError: an unknown map, numbers that make no sense.

    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(1, 6, 8), (2, 8, 4), (2, 8, 4), (2, 8, 4)]
    >>> att = Attention(*(torch.randn(shape, generator=g).double() for shape in shapes))
    >>> found = singular_values(att, k=3)
    >>> found.values.shape, bool((found.values[..., :-1] >= found.values[..., 1:]).all())
    (torch.Size([1, 2, 3]), True)
    """
    choice("map", map, TOKEN_MAPS)
    tol, steps = real("tol", tol, "a number > 0", above=0), whole("max_steps", max_steps, least=1)
    search = partial(_search, k=whole("k", k, least=1), tol=tol, steps=steps, seed=seed)
    check_layer(att, "singular_values")
    parts = [_of_piece(part, map, search) for part in pieces(att, map)]

    def joined(several: Sequence[SingularValues], dim: int) -> SingularValues:
        return SingularValues(*(torch.cat(t, dim) for t in zip(*several, strict=True)))

    return beside(parts, att.samples, map, joined)


def _of_piece(att: Attention, map: str, search: Callable[..., SingularValues]) -> SingularValues:
    """Measure one sample, in the units and coordinates of the layer."""
    wide = in_range(att.double(), map)
    op, powers = wide.jacobian(), wide.exponents[:, None]
    found = search(op, torch.stack(wide.allowance(op)[:2]))
    numbers, left, right = [times_power(t, powers) for t in found[:3]], found.left, found.right
    if isinstance(op, HeadOperator):
        right = torch.stack([op.lift(one) for one in right.unbind(1)], 1)
    left = left if wide.basis is None else left @ wide.basis.mT[:, None]
    whole = [*numbers, *found[3:5], left.to(att.dtype), right.to(att.dtype)]
    return SingularValues(*(whole if map in WHOLE else (t[None] for t in whole)))


def _search(
    op: JacobianOperator, noise: Tensor, *, k: int, tol: float, steps: int, seed: int
) -> SingularValues:
    """Find the values of a batch, (batch, k), with the rounding (2, batch) of J and of products."""
    n, m = math.prod(op.out_shape), math.prod(op.in_shape)
    width, count = min(k + SPARE_VECTORS, n), min(k, n, m)
    drawn = [normal_numbers(width * n, one) for one in seeds_each(op.batch, seed)]
    block = torch.stack(drawn).view(-1, width, n).to(op.device, op.dtype)
    basis, inner = block[:, :0], block.new_zeros(op.batch, 0, 0)  # and J J^T there
    for _ in range(steps):
        for _again in range(3):  # what is new may be rounding alone, and is then any direction
            block = block - (block @ basis.mT) @ basis
            block = torch.linalg.qr(block.mT.cpu()).Q.mT.to(op.device)
        basis = torch.cat([basis, block], 1)
        image = _each(op.gram, block, op.out_shape)
        along, new = basis @ image.mT, block.shape[1]
        inner = torch.nn.functional.pad(inner, (0, new, 0, new))
        inner[:, :, -new:] = along
        inner[:, -new:] = along.mT
        squares, vectors = decomposed(inner)
        top, sizes = vectors[..., -count:], squares[:, -count:].clamp_min(0).sqrt()
        beyond, least = image - along.mT @ basis, tol * sizes[:, -1:]
        off = torch.linalg.vector_norm(top[:, -new:].mT @ beyond, dim=-1)
        block = beyond[:, : n - basis.shape[1]]
        if not block.shape[1] or bool((off <= least * torch.maximum(sizes, least)).all()):
            break
    return _ritz(op, top.mT @ basis, noise.to(op.device), k, tol)


def _each(product: Product, vectors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply every vector of (batch, k, ...) by a batch of operators, (batch, k, outputs)."""
    return torch.stack([product(x.reshape(-1, *shape)).flatten(1) for x in vectors.unbind(1)], 1)


def _ritz(op: JacobianOperator, u: Tensor, noise: Tensor, k: int, tol: float) -> SingularValues:
    """Return the Ritz values in the space of orthonormal u (batch, c, n), and how sure they are."""
    (tensors, products), count, image = noise, u.shape[1], _each(op.vjp, u, op.out_shape)
    turn, values, right = (t.to(u) for t in torch.linalg.svd(image.cpu(), full_matrices=False))
    left = turn.mT @ u
    off = _each(op.jvp, right, op.in_shape) - values[..., None] * left
    eye = torch.eye(count, dtype=u.dtype, device=u.device)
    skew = torch.linalg.matrix_norm(u @ u.mT - eye) + count * (u.shape[2] + 8) * UNIT
    sums = 8 * (count + sum(image.shape[1:]) + u.shape[2]) * UNIT * values[:, 0] * (1 + skew)
    rounding = (sums + count**0.5 * products * (1 + skew))[:, None]
    lower = (values - rounding) / (1 + skew[:, None]) - tensors[:, None]
    residual = torch.linalg.vector_norm(off, dim=-1) + 2 * rounding + tensors[:, None]
    residual = residual + skew[:, None] * values
    more = (0, k - count)
    values, residual, lower = (torch.nn.functional.pad(t, more) for t in (values, residual, lower))
    apart = values[:, :-1] - residual[:, :-1] > values[:, 1:] + residual[:, 1:]
    cluster = torch.nn.functional.pad(apart.cumsum(1), (1, 0))
    converged = residual <= tol * values[:, :1]
    found = [values, lower.nan_to_num(nan=0.0).clamp_min(0), residual, cluster, converged]
    found = [t.cpu() for t in found]
    for t, shape in ((left, op.out_shape), (right, op.in_shape)):
        found.append(torch.nn.functional.pad(t, (0, 0, *more)).unflatten(2, shape))
    return SingularValues(*found)
