r"""Lanczos methods for the top singular value of a batch of Jacobians
(`lipbound.linalg.operators.JacobianOperator`).

They work on the whole batch at once. What they return in ``lower`` is a Rayleigh quotient, hence a
lower bound on the norm up to rounding. They stop on the probabilistic upper bound of
`lipbound.linalg.certificates`, not on a residual: residuals say that *some* singular value is near,
and on real heads stop at the wrong one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.errors import RangeError
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import Norm, Results, normal_numbers, start_vectors
from lipbound.linalg.stopping import StoppingRule, project_out

LOOK = 2
"""Steps between two looks at the recurrences of vectors with fewer than `LARGE` entries: their
small eigenvalue problems cost as much as a step."""
LARGE = 2**14


def lanczos(
    op: JacobianOperator,
    *,
    tol: float,
    max_steps: int,
    seed: int | Sequence[int],
    delta: float | None = None,
    vectors: bool = False,
    refined: bool = True,
) -> Norm:
    """Norms of J by the Lanczos method on J J^T with full reorthogonalisation.

    An entry stops when its upper bound (at failure probability ``delta`` for the whole batch, or
    1e-3 each for an estimate) is within ``tol`` of its Ritz value, when its Krylov space is
    exhausted, or after ``max_steps`` products; it is then no longer computed. Without ``refined``
    vectors are Ritz vectors on the left alone, as they are found.
    """
    n = math.prod(op.out_shape)
    limit, look = min(max_steps, n), 1 if n >= LARGE else LOOK
    whole, results, rule = (
        op,
        Results(op, vectors, limit),
        StoppingRule(n, op.batch, tol, delta, op.dtype),
    )
    tops = torch.zeros(op.batch, dtype=torch.float64)
    active = torch.arange(op.batch)
    v = start_vectors(op, op.out_shape, seed)
    basis = v.new_empty(op.batch, min(32, limit), n)
    alpha, beta = (torch.zeros(op.batch, limit, dtype=torch.float64) for _ in range(2))
    unit = torch.ones(op.batch, dtype=torch.float64)
    b = v.new_zeros(op.batch)
    for j in range(limit):
        if j == basis.shape[1]:
            basis = torch.cat([basis, basis.new_empty(len(active), min(j, limit - j), n)], 1)
        basis[:, j] = v
        w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        if j == 0:  # a power of two brings squares of the entries into range, exactly
            size = w.abs().amax(1).double().cpu()
            unit = torch.where(size > 0, 2.0 ** size.clamp_min(1e-300).log2().round(), 1.0)
            if bool((size == 0).any()) and bool(
                (
                    op.vjp(v.view(-1, *op.out_shape)).flatten(1).abs().amax(1).cpu()[size == 0] > 0
                ).any()
            ):
                remedy = (
                    "use float64, or rescale the weights"
                    if op.dtype == torch.float32
                    else "rescale the weights"
                )
                raise RangeError(
                    f"Jacobian products underflow {str(op.dtype).removeprefix('torch.')}; {remedy}"
                )
        w = w / unit.to(op.device, op.dtype)[:, None]
        a_j = (w * v).sum(1, keepdim=True)
        alpha[:, j] = a_j[:, 0].double().cpu()
        known = basis[:, : j + 1]
        # The recurrence removes the large components, then one pass against the whole basis what
        # rounding has left of it.
        w.addcmul_(v, a_j, value=-1)
        if j:
            w.addcmul_(basis[:, j - 1], b[:, None], value=-1)
        w = project_out(w, known)
        b = torch.linalg.vector_norm(w, dim=1)
        beta[:, j] = b.double().cpu()
        v = w / b.clamp_min(torch.finfo(op.dtype).tiny)[:, None]

        a, c = alpha[:, : j + 1], beta[:, : j + 1]
        largest = a.abs().amax(1) + 2 * c.amax(1)  # above every Ritz value (Gershgorin)
        if j % look and j + 1 < limit and bool((c[:, j] > rule.floor * largest).all()):
            continue  # nobody's Krylov space has ended: look at the next step
        top, s, reached, exhausted = rule.look(a, c, results.done[active])
        exhausted |= torch.tensor(j + 1 == n)
        broken = ~torch.isfinite(a[:, j])
        stop = (reached | exhausted | broken | torch.tensor(j + 1 == limit)) & ~results.done[active]
        if not bool(stop.any()):
            continue
        index = active[stop]
        tops[index] = torch.where(broken, math.nan, top)[stop]
        results.stop(index, j + 1, a[stop], c[stop], unit[stop], exhausted[stop], reached[stop])
        if results.left is not None:
            left = (s[stop].to(v)[:, None] @ known[stop.to(op.device)])[:, 0]
            results.left[index.to(op.device)] = left.view(-1, *op.out_shape)
        going = ~results.done[active]
        if not bool(going.any()):
            break
        if int(going.sum()) <= 0.8 * len(active):  # worth copying the rest to a smaller batch
            where = going.nonzero()[:, 0]
            there = where.to(op.device)
            for new, old in enumerate(
                where.tolist()
            ):  # in place: a fresh copy would cost more than a step
                if new != old:
                    basis[new, : j + 1] = basis[old, : j + 1]
            op, basis, v, b = op.select(there), basis[: len(where)], v[there], b[there]
            active, alpha, beta, unit = active[where], alpha[where], beta[where], unit[where]
    rule.finish(results, whole, tops)
    return results.norm(whole, refined=refined)


def ritz_vectors(
    op: JacobianOperator, *, steps: int, count: int, seed: int | Sequence[int]
) -> Tensor:
    """The top ``count`` Ritz vectors of J J^T after so many Lanczos steps, largest first: (batch,
    count, n), float64; fewer when n is smaller.

    Where a Krylov space ends early, the recurrence goes on from a fresh random direction orthogonal
    to it.
    """
    op = op.double()
    n = math.prod(op.out_shape)
    steps = min(steps, n)
    v = start_vectors(op, op.out_shape, seed)
    basis = v.new_zeros(op.batch, steps, n)
    images = v.new_zeros(op.batch, steps, n)
    for j in range(steps):
        basis[:, j] = v
        images[:, j] = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        known = basis[:, : j + 1]
        w = images[:, j].clone()
        size = torch.linalg.vector_norm(w, dim=1)
        w = project_out(w, known, 2)
        ended = torch.linalg.vector_norm(w, dim=1) <= 1e-12 * size
        if bool(ended.any()):
            other = normal_numbers(w.numel(), "fresh", j).view(w.shape).to(w.device)
            w = torch.where(ended[:, None], project_out(other, known, 2), w)
        v = w / torch.linalg.vector_norm(w, dim=1, keepdim=True).clamp_min(1e-300)
    projected = basis @ images.mT
    _, s = torch.linalg.eigh((projected + projected.mT) / 2)
    return s.flip(-1)[..., :count].mT @ basis
