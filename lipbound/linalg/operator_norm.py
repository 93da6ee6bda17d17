"""The spectral norm of any batch of linear operators, by the method of choice.

Lanczos' method stops on the probabilistic upper bound of `lipbound.linalg.certificates`, not on a
residual: residuals say that *some* singular value is near, and on real heads stop at the wrong one.
Power iteration, as papers use it, and the dense decomposition are what it is measured by.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.devices import has_float64, in_own_modes
from lipbound.errors import LipboundError, RangeError, choice, real, whole
from lipbound.linalg.certificates import ESTIMATE_DELTA, ROUNDING, Certificate
from lipbound.linalg.krylov import Array, Recurrence, Runs
from lipbound.linalg.matrix_norms import power_of_two
from lipbound.linalg.operators import FromCPU, InUnits, JacobianOperator
from lipbound.linalg.solution import (
    Norm,
    Seed,
    check_finite,
    seeds_each,
    solved,
    start_vectors,
    unit_vectors,
    with_vectors,
)

METHODS = ("lanczos", "power", "dense")
DEFAULT_STEPS = dict(zip(METHODS, (500, 100, 500), strict=True))
LARGEST_DENSE_SVD = 512
"""Largest output dimension for which a Krylov space that ends before a certificate is reached is
replaced by a dense decomposition."""


@in_own_modes
def operator_norm(
    op: JacobianOperator,
    *,
    method: str = "lanczos",
    tol: float = 1e-4,
    delta: float | None = None,
    vectors: bool = False,
    seed: int | Sequence[int] = 0,
    max_steps: int | None = None,
) -> Norm:
    """Compute spectral norms of any `JacobianOperator`, one per batch entry.

    Nothing is known of the rounding of its products: ends hold for the operator as it computes, up
    to `lipbound.linalg.certificates.ROUNDING`. `lipbound.spectral_norm` counts all rounding.

    Args:
        op: the operators.
        method: "lanczos", "power" or "dense".
        tol: relative width to reach with "lanczos", absolute change with "power".
        delta: failure probability of the upper ends of "lanczos"; None for estimates without any.
        vectors: whether to return top singular vectors.
        seed: of the start vectors, one for all or one for each of equal parts of the batch.
        max_steps: products with J J^T at most; 500 for "lanczos", 100 for "power" when None.

    Returns:
        The norms, (batch,).

    Raises:
        UnknownNameError: an unknown method.
        LipboundError: a tolerance, number of steps or failure probability that is none.

    >>> import torch
    >>> from lipbound.linalg.operators import AutogradJacobian
    >>> op = AutogradJacobian(torch.sin, torch.zeros(3, dtype=torch.float64))
    >>> round(float(operator_norm(op).lower), 6)
    1.0
    """
    tol, steps = check_search(method, tol, delta, max_steps)
    op = op if has_float64(op.device) else FromCPU(op)
    if method == "dense":
        return dense_svd(op, vectors=vectors)
    if method == "power":
        return power_iteration(op, tol=tol, max_steps=steps, seed=seed, vectors=vectors)
    if delta is not None and tol <= (rounding := ROUNDING[op.dtype]):
        raise LipboundError(
            f"tol {tol:g} cannot be certified in {str(op.dtype).removeprefix('torch.')}, whose "
            f"rounding takes {rounding:g}; "
            f"use {'float64 or ' if op.dtype == torch.float32 else ''}a larger tol"
        )
    with torch.no_grad():
        norm, left = lanczos(op, tol=tol, max_steps=steps, seed=seed, delta=delta)
        return with_vectors(norm, op, left) if vectors else norm


def check_search(method: str, tol: Any, delta: float | None, max_steps: Any) -> tuple[float, int]:
    """Check how norms are to be searched, as of `operator_norm`.

    Returns:
        The tolerance, and how many steps there may be.

    Raises:
        LipboundError: what makes no sense.
    """
    choice("method", method, METHODS)
    tol = real("tol", tol, "a number >= 0", above=math.nextafter(0, -1))
    if delta is not None:
        real("delta", delta, "between 0 and 1, a probability of failure", above=0, below=1)
        if method == "power":
            raise LipboundError(
                "method 'power' gives no upper bound; use 'lanczos' with delta, or delta=None"
            )
    most = DEFAULT_STEPS[method] if max_steps is None else max_steps
    return tol, whole("max_steps", most, least=1)


def lanczos(
    op: JacobianOperator,
    *,
    tol: float,
    max_steps: int,
    seed: Seed,
    delta: float | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Norm, Tensor]:
    """Compute norms of J by the Lanczos method on J J^T with full reorthogonalisation.

    An entry stops when its upper bound is within ``tol`` of its Ritz value, when its Krylov space
    is exhausted, or after ``max_steps`` products. ``lower`` is the root of a Rayleigh quotient.

    Args:
        op, tol, max_steps: as of `operator_norm`.
        seed: of the start vectors, one for all entries or one for each part of the batch.
        delta: failure probability of the upper bounds of the whole batch; None for estimates,
            which stop by bounds that fail with probability 1e-3 each.
        meanwhile: what else the host may do while a GPU takes the first steps.

    Returns:
        The norms, float64, (batch,), and the Ritz vectors on the left, (batch, n).

    Raises:
        RangeError: products leave the range of the dtype.
    """
    n, known = math.prod(op.out_shape), torch.finfo(op.dtype)
    rounding = 0.0 if delta is None else ROUNDING[op.dtype]
    each = ESTIMATE_DELTA if delta is None else delta / max(1, op.batch)
    certificate, one = Certificate(n, each, floor=4 * known.eps), np.ones(op.batch, dtype=int)

    def goal(top: Array) -> Array:
        with np.errstate(over="ignore"):
            return top * ((1 + tol) / (1 + rounding)) ** 2

    def rule(index: Array, part: Recurrence) -> Array:
        return certificate.shows(index, part, goal(part.top), one[index])[0]

    start = start_vectors(op, op.out_shape, seed)
    runs = Runs(op, start, limit=min(max_steps, n))
    meanwhile()
    found = runs.until(rule).recurrence
    bound = certificate.bound(found, one, goal(found.top))
    upper, lower = np.sqrt(bound) * (1 + rounding), np.sqrt(found.top)
    nothing = (found.top == 0) & (found.last == 0)
    reached = rule(np.arange(op.batch), found) | nothing
    upper = np.where(reached & (found.top > 0), np.minimum(upper, lower * (1 + tol)), upper)
    # a top of 0 is a zero, or a Ritz value that rounding has made negative
    none = np.where(reached, 0.0, math.inf)
    error = np.where(found.top > 0, upper / np.maximum(lower, 1e-300) - 1, none)
    high = upper if delta is not None else np.full_like(upper, math.inf)
    parts = (lower, high, found.steps, reached | (error <= tol), error)
    norm, vectors = Norm(*map(torch.tensor, parts)), runs.vectors
    # squares of what is so small, or so large, may have left the range
    size = np.maximum(found.alpha.max(1), found.beta.max(1))
    near = (n * known.tiny) ** 0.5 / known.eps
    rough = (~((size >= near) & (size <= 1 / near)) | np.isnan(found.top)).nonzero()[0]
    if len(rough) and not isinstance(op, InUnits):
        there, seeds = torch.from_numpy(rough).to(op.device), seeds_each(op.batch, seed, "in units")
        scaled, unit = _scaled(op, start, there)
        some, share = [seeds[i] for i in rough], None if delta is None else each * len(rough)
        part, vectors[there] = lanczos(scaled, tol=tol, max_steps=max_steps, seed=some, delta=share)
        part = replace(part, lower=part.lower / unit, upper=part.upper / unit)
        norm.put(torch.from_numpy(rough), part)
    check_finite(op, norm.lower)
    # A Krylov space that has ended may have ended on rounding, short of the top: what it shows is
    # in `error`; small cases are settled densely.
    ended = torch.from_numpy(found.whole | (found.steps == n))
    early = (ended & ~norm.converged).nonzero()[:, 0]
    if len(early) and n <= LARGEST_DENSE_SVD:
        dense = dense_svd(op.select(early.to(op.device)))
        upper = dense.upper if delta is not None else dense.upper + math.inf
        close, steps = dense.error <= max(tol, 1e-12), norm.steps[early]
        norm.put(early, replace(dense, upper=upper, converged=close, steps=steps))
    return norm, vectors


def _scaled(op: JacobianOperator, start: Tensor, index: Tensor) -> tuple[InUnits, Tensor]:
    """Return some of the operators times powers of two (on the CPU) that bring them into range.

    Raises:
        RangeError: their images of ``start`` (batch, n) have lost digits already.
    """
    image = op.vjp(start.view(-1, *op.out_shape)).flatten(1)[index].abs().amax(1)
    if bool(((image > 0) & (image < torch.finfo(op.dtype).tiny)).any()):
        name = str(op.dtype).removeprefix("torch.")
        other = "use float64, or " if op.dtype == torch.float32 else ""
        raise RangeError(f"Jacobian products underflow {name}; {other}rescale the weights")
    unit = torch.where(image.isfinite(), 1 / power_of_two(image), 1.0)
    return InUnits(op.select(index), unit), unit.cpu()


@torch.no_grad()
def power_iteration(
    op: JacobianOperator, *, tol: float | Tensor, max_steps: int, seed: Seed, vectors: bool = False
) -> Norm:
    r"""Return estimates of norms of J by power iteration on J^T J, as papers on attention do.

    The rule of Castin et al. 2024, appendix E.1:
    :math:`x_{k+1} = J^T J x_k / |J^T J x_k|`, :math:`\mu_k = |J x_k|`; stops when
    :math:`|\mu_{k+1} - \mu_k| <` ``tol``, an *absolute* change, or after ``max_steps``. It
    approaches the norm from below, and the rule depends on the scale of J: the result is a lower
    estimate without an error (``error`` is NaN); `lanczos` is there for the number itself. ``tol``
    may be one for each entry, (batch,).
    """
    x = start_vectors(op, op.in_shape, seed).view(-1, *op.in_shape)
    lower, steps = torch.full((op.batch,), math.inf, dtype=torch.float64), torch.zeros(op.batch)
    done, left = torch.zeros(op.batch, dtype=torch.bool), x.new_zeros(op.batch, *op.out_shape)
    for _ in range(max_steps):
        y = op.jvp(x)
        mu = torch.linalg.vector_norm(y.flatten(1), dim=1).double().cpu()
        there = done.to(op.device).view(-1, *(1,) * (y.ndim - 1))
        settled = (mu - lower).abs() < tol
        lower, left = torch.where(done, lower, mu), torch.where(there, left, y)
        steps, done = steps + ~done, done | settled
        if bool(done.all()):
            break
        x = unit_vectors(op.vjp(y))
    top = unit_vectors(left) if vectors else None
    return solved(op, lower, steps=steps, converged=done, error=math.nan, left=top)


def dense_svd(op: JacobianOperator, *, vectors: bool = False, memory: float = 4e9) -> Norm:
    """Return norms of J from the matrices themselves, in float64, so many at a time as fit.

    ``lower`` and ``upper`` are the computed value less and plus a relative rounding allowance for
    decomposing the matrix: Lemma 50 (docs/theory/numerics.md); where attention saturates, the
    cancellation in ``v_j - o_i`` comes on top (`lipbound.jacobians.rounding.roundoff`).

    Raises:
        LipboundError: when one matrix and its decomposition would take more than ``memory`` bytes.
    """
    out, into = math.prod(op.out_shape), math.prod(op.in_shape)
    needed = 3 * 8 * out * into
    if needed > memory:
        raise LipboundError(
            f"method 'dense' needs a matrix of {out} x {into} per head, about {needed / 1e9:.0f} "
            "GB of memory; use method='lanczos'"
        )
    precise = op.double()
    rounding = 4 * (out + into) * torch.finfo(precise.dtype).eps
    sizes, left = [], []
    entries = torch.arange(op.batch, device=op.device).split(max(1, int(memory // needed)))
    for matrix in (m.double() for some in entries for m in precise.select(some).dense()):
        if vectors:
            u, sigma, _ = torch.linalg.svd(matrix, full_matrices=False)
            left.append(u[:, 0].to(op.dtype))
        else:
            sigma = torch.linalg.svdvals(matrix)
        sizes.append(sigma[0].cpu())
    value, top = torch.stack(sizes), torch.stack(left) if vectors else None
    low, high = value * (1 - rounding), value * (1 + rounding)
    return solved(op, low, upper=high, error=rounding, left=top)
