"""Power iteration, as papers use it, and the dense decomposition: what Lanczos is measured by."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from lipbound.errors import LipboundError
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import Norm, Results, start_vectors, unit_vectors


def power_iteration(
    op: JacobianOperator,
    *,
    tol: float,
    max_steps: int,
    seed: int | Sequence[int],
    vectors: bool = False,
) -> Norm:
    r"""Return estimates of norms of J by power iteration on J^T J, as papers on attention do.

    The rule of Castin et al. 2024, appendix E.1:
    :math:`x_{k+1} = J^T J x_k / |J^T J x_k|`, :math:`\mu_k = |J x_k|`; stops when
    :math:`|\mu_{k+1} - \mu_k| <` ``tol``, an *absolute* change, or after ``max_steps``. It
    approaches the norm from below, and the rule depends on the scale of J: the result is a lower
    estimate without an error (``error`` is NaN); `lanczos` is there for the number itself.
    """
    results = Results(op, vectors)
    x = start_vectors(op, op.in_shape, seed).view(-1, *op.in_shape)
    previous = torch.full((op.batch,), math.inf, dtype=torch.float64)
    for step in range(1, max_steps + 1):
        y = op.jvp(x)
        mu = torch.linalg.vector_norm(y.flatten(1), dim=1).double().cpu()
        good = (mu - previous).abs() < tol
        stop = (good | torch.tensor(step == max_steps)) & ~results.done
        results.lower[stop], results.steps[stop] = mu[stop], step
        results.converged[stop] = good[stop]
        if results.left is not None:
            chosen = stop.to(op.device)
            results.left[chosen] = unit_vectors(y)[chosen]
        results.done |= stop
        if bool(results.done.all()):
            break
        previous = mu
        x = unit_vectors(op.vjp(y))
    results.error.fill_(math.nan)
    return results.norm(op)


def dense_svd(op: JacobianOperator, *, vectors: bool = False, memory: float = 4e9) -> Norm:
    """Return norms of J from the matrices themselves, in float64, one batch entry at a time.

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
    results = Results(op, vectors)
    precise = op.double()
    rounding = 4 * (out + into) * torch.finfo(precise.dtype).eps
    for i in range(op.batch):
        matrix = precise.select(torch.tensor([i], device=op.device)).dense()[0].double()
        if results.left is None:
            sigma = torch.linalg.svdvals(matrix)
        else:
            u, sigma, _ = torch.linalg.svd(matrix, full_matrices=False)
            results.left[i] = u[:, 0].view(op.out_shape).to(op.dtype)
        results.lower[i] = sigma[0].cpu()
    results.converged.fill_(True)
    results.error.fill_(rounding)
    norm = results.norm(op)
    return replace(norm, lower=norm.lower * (1 - rounding), upper=norm.lower * (1 + rounding))
