r"""Lanczos methods for the top singular value of a batch of Jacobians.

They work on the whole batch (`lipbound.linalg.operators.JacobianOperator`) at once. What they
return in ``lower`` is a Rayleigh quotient, hence a lower bound on the norm up to rounding. They
stop on the probabilistic upper bound of `lipbound.linalg.certificates`, not on a residual:
residuals say that *some* singular value is near, and on real heads stop at the wrong one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.errors import RangeError
from lipbound.linalg.krylov import moved_up, project_out, with_room
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import Norm, Results, normal_numbers, start_vectors
from lipbound.linalg.stopping import StoppingRule

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
    """Compute norms of J by the Lanczos method on J J^T with full reorthogonalisation.

    An entry stops when its upper bound is within ``tol`` of its Ritz value, when its Krylov space
    is exhausted, or after ``max_steps`` products; it is then no longer computed.

    Args:
        op: the Jacobians.
        tol: relative width to reach.
        max_steps: products with J J^T at most.
        seed: of the start vectors, one for all entries or one for each part of the batch.
        delta: failure probability of the upper bounds of the whole batch; None for estimates,
            which stop by bounds that fail with probability 1e-3 each.
        vectors: whether to return singular vectors.
        refined: whether these are refined by a product; else there are Ritz vectors on the left
            alone, as they are found.

    Returns:
        The norms, float64, (batch,). Products that leave the range of the dtype raise RangeError.
    """
    n = math.prod(op.out_shape)
    limit, look = min(max_steps, n), 1 if n >= LARGE else LOOK
    whole, results = op, Results(op, vectors, limit)
    rule = StoppingRule(n, op.batch, tol, delta, op.dtype)
    tops, active = torch.zeros(op.batch, dtype=torch.float64), torch.arange(op.batch)
    v = start_vectors(op, op.out_shape, seed)
    basis = v.new_empty(op.batch, min(32, limit), n)
    alpha, beta = (torch.zeros(op.batch, limit, dtype=torch.float64) for _ in range(2))
    unit, b = torch.ones(op.batch, dtype=torch.float64), v.new_zeros(op.batch)
    for j in range(limit):
        basis = with_room(basis, j, limit)
        basis[:, j] = v
        w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        if j == 0:
            unit = _unit(op, v, w)
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
        done = results.done[active]
        top, s, reached, exhausted = rule.look(a, c, done)
        exhausted |= torch.tensor(j + 1 == n)
        broken = ~torch.isfinite(a[:, j])
        stop = (reached | exhausted | broken | torch.tensor(j + 1 == limit)) & ~done
        if not bool(stop.any()):
            continue
        index = active[stop]
        tops[index] = torch.where(broken, math.nan, top)[stop]
        results.stop(index, j + 1, a[stop], c[stop], unit[stop], exhausted[stop], reached[stop])
        if results.left is not None:
            left = (s[stop].to(v)[:, None] @ known[stop.to(op.device)])[:, 0]
            results.left[index.to(op.device)] = left.view(-1, *op.out_shape)
        keep = (~results.done[active]).nonzero()[:, 0]
        if not len(keep):
            break
        if len(keep) <= 0.8 * len(active):  # worth copying the rest to a smaller batch
            there, basis = keep.to(op.device), moved_up(basis, keep, j + 1)
            op, v, b = op.select(there), v[there], b[there]
            active, alpha, beta, unit = active[keep], alpha[keep], beta[keep], unit[keep]
    rule.finish(results, whole, tops)
    return results.norm(whole, refined=refined)


def _unit(op: JacobianOperator, v: Tensor, w: Tensor) -> Tensor:
    """Return powers of two (batch,) that bring squares of entries of w = G v into range, exactly.

    Raises:
        RangeError: an image is zero by underflow.
    """
    size = w.abs().amax(1).double().cpu()
    zero = size == 0
    if bool(zero.any()):
        image = op.vjp(v.view(-1, *op.out_shape)).flatten(1).abs().amax(1).cpu()
        if bool((image[zero] > 0).any()):
            precise = "use float64, or " if op.dtype == torch.float32 else ""
            name = str(op.dtype).removeprefix("torch.")
            raise RangeError(f"Jacobian products underflow {name}; {precise}rescale the weights")
    return torch.where(size > 0, 2.0 ** size.clamp_min(1e-300).log2().round(), 1.0)


def ritz_vectors(
    op: JacobianOperator, *, steps: int, count: int, seed: int | Sequence[int]
) -> Tensor:
    """Compute the top Ritz vectors of J J^T after a given number of Lanczos steps.

    Where a Krylov space ends early, the recurrence goes on from a fresh random direction orthogonal
    to it.

    Args:
        op: the Jacobians; products are taken in float64.
        steps: products with J J^T.
        count: vectors to return, fewer when n is smaller.
        seed: of the start vectors.

    Returns:
        Vectors, largest Ritz value first, (batch, count, n), float64.
    """
    op = op.double()
    n = math.prod(op.out_shape)
    steps = min(steps, n)
    v = start_vectors(op, op.out_shape, seed)
    basis, images = (v.new_zeros(op.batch, steps, n) for _ in range(2))
    for j in range(steps):
        basis[:, j] = v
        images[:, j] = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        known, w = basis[:, : j + 1], images[:, j].clone()
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
