r"""Lanczos methods for the top singular value of a batch of Jacobians (`lipbound.operators.JacobianOperator`).

They work on the whole batch at once. What they return in ``lower`` is a Rayleigh quotient, hence a lower bound on the norm up to rounding. They
stop on the probabilistic upper bound of `lipbound.certificates`, not on a residual: residuals say that *some* singular value is near, and on
real heads stop at the wrong one.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstemr
from torch import Tensor

from lipbound.certificates import ROUNDING, excludes, log_inverse_epsilon, upper_bound
from lipbound.errors import LipboundError
from lipbound.operators import JacobianOperator
from lipbound.simple import dense_svd
from lipbound.solution import Norm, Results, start_vectors

ESTIMATE_DELTA = 1e-3
"""Failure probability, per norm, behind the error estimate of a norm for which no certificate was asked."""
DENSE = 512
"""Largest output dimension for which a Krylov space that ends before a certificate is reached is replaced by a dense decomposition."""
LOOK = 2
"""Steps between two looks at the recurrences, whose small eigenvalue problems cost as much as a step on small layers."""


class _Rule:
    """When a Lanczos recurrence may stop, and what it has then shown.

    Args:
        n: dimension of the sphere the start vectors were drawn from.
        batch: how many norms share the failure probability ``delta`` (union bound).
        tol: relative width ``upper / lower - 1`` to reach.
        delta: total failure probability of the upper bounds, or None for an estimate.
        dtype: of the products.
    """

    def __init__(self, n: int, batch: int, tol: float, delta: float | None, dtype: torch.dtype):
        self.certify = delta is not None
        if delta is not None and not 0 < delta < 1:
            raise LipboundError(f"delta is {delta}; the failure probability must be between 0 and 1")
        self.rounding = ROUNDING[dtype] if self.certify else 0.0
        if self.certify and tol <= self.rounding:
            raise LipboundError(
                f"tol {tol:g} cannot be certified in {str(dtype).removeprefix('torch.')}, whose rounding takes {self.rounding:g}; "
                "use float64 or a larger tol"
            )
        self.log_inverse = log_inverse_epsilon(n, ESTIMATE_DELTA if delta is None else delta / max(1, batch))
        self.tol = tol
        self.floor = 4 * torch.finfo(dtype).eps

    def look(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """After k steps, alpha and beta (batch, k): top Ritz value, its vector (batch, k), whether tol is reached, whether the space is exhausted."""
        a, b = alpha.numpy().copy(), beta.numpy().copy()
        if not np.isfinite(b[:, -1]).all() or not np.isfinite(a[:, -1]).all():
            a, b = np.nan_to_num(a), np.nan_to_num(b)
        k = a.shape[1]
        ritz, s = top_eigenpairs(a, b)
        top = np.maximum(ritz, 0)
        target = top * ((1 + self.tol) / (1 + self.rounding)) ** 2
        reached = excludes(a, self._floored(b, top), np.full(len(a), k), target, self.log_inverse) | (top == 0)
        exhausted = b[:, -1] <= self.floor * top
        return torch.from_numpy(top), torch.from_numpy(s), torch.from_numpy(reached), torch.from_numpy(exhausted)

    def _floored(self, beta: np.ndarray, top: np.ndarray) -> np.ndarray:
        """A beta below rounding is rounding: taking it larger makes the bound larger."""
        return np.maximum(np.maximum(beta, self.floor * top[:, None]), 1e-300)

    def finish(self, results: Results, op: JacobianOperator, top: Tensor) -> None:
        """Values of all entries from their recurrences and largest Ritz values ``top``; dense ones where the Krylov space ended too early."""
        beta = self._floored(results.beta.numpy(), top.numpy())
        bound = upper_bound(results.alpha.numpy(), beta, results.steps.numpy(), top.numpy(), self.log_inverse)
        upper = torch.from_numpy(bound).sqrt() * (1 + self.rounding)
        upper = torch.where(results.converged, upper.minimum(top.sqrt() * (1 + self.tol)), upper)  # what `look` has shown
        results.lower = top.sqrt()
        results.error = torch.where(top > 0, upper / results.lower.clamp_min(1e-300) - 1, 0.0)
        results.converged |= results.error <= self.tol
        if self.certify:
            results.upper = upper
        scale = results.unit.sqrt()
        results.lower, results.upper = results.lower * scale, results.upper * scale
        # A Krylov space that has ended may have ended on rounding, short of the top: what it shows is in `error`; small cases are settled densely.
        early = results.exhausted & ~results.converged & torch.isfinite(top)
        if bool(early.any()) and math.prod(op.out_shape) <= DENSE:
            dense = dense_svd(op.select(early.nonzero()[:, 0].to(op.device)))
            results.lower[early], results.error[early] = dense.lower, dense.error
            if self.certify:
                results.upper[early] = dense.upper
            results.converged[early] = dense.error <= max(self.tol, 1e-12)


def top_eigenpairs(alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest eigenvalues (batch,) and their vectors (batch, k) of tridiagonal matrices: diagonal alpha, off-diagonal beta[:, :-1], both (batch, k).

    By LAPACK's tridiagonal solver: a dense one costs more than a step, and numpy's threads would fight with torch's over the cores.
    """
    k = alpha.shape[1]
    values, vectors = np.empty(len(alpha)), np.empty((len(alpha), k))
    for i in range(len(alpha)):
        found, value, vector, info = dstemr(alpha[i].copy(), beta[i].copy(), 2, 0.0, 0.0, k, k)  # which overwrites them
        if info or found != 1:
            value, vector = eigh_tridiagonal(alpha[i], beta[i, :-1], select="i", select_range=(k - 1, k - 1))
        values[i], vectors[i] = value[0], vector[:, 0]
    return values, vectors


def project_out(x: Tensor, basis: Tensor, passes: int = 1) -> Tensor:
    """x (batch, n), in place, without its components along the orthonormal rows of basis (batch, k, n).

    Vectors are rows here: a product with a single column is an order of magnitude slower on a CPU.
    """
    row = x[:, None]
    for _ in range(passes):
        row.baddbmm_(row @ basis.mT, basis, alpha=-1)
    return x


def lanczos(
    op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], delta: float | None = None, vectors: bool = False
) -> Norm:
    """Norms of J by the Lanczos method on J J^T with full reorthogonalisation.

    An entry stops when its upper bound (at failure probability ``delta`` for the whole batch, or 1e-3 each for an estimate) is within
    ``tol`` of its Ritz value, when its Krylov space is exhausted, or after ``max_steps`` products; it is then no longer computed.
    """
    n = math.prod(op.out_shape)
    limit = min(max_steps, n)
    whole, results, rule = op, Results(op, vectors, limit), _Rule(n, op.batch, tol, delta, op.dtype)
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
            if bool((size == 0).any()) and bool((op.vjp(v.view(-1, *op.out_shape)).flatten(1).abs().amax(1).cpu()[size == 0] > 0).any()):
                raise LipboundError(f"Jacobian products underflow {op.dtype}; use float64, or rescale the weights")
        w = w / unit.to(op.device, op.dtype)[:, None]
        a_j = (w * v).sum(1, keepdim=True)
        alpha[:, j] = a_j[:, 0].double().cpu()
        known = basis[:, : j + 1]
        # The recurrence removes the large components, then one pass against the whole basis what rounding has left of it.
        w.addcmul_(v, a_j, value=-1)
        if j:
            w.addcmul_(basis[:, j - 1], b[:, None], value=-1)
        w = project_out(w, known)
        b = torch.linalg.vector_norm(w, dim=1)
        beta[:, j] = b.double().cpu()
        v = w / b.clamp_min(torch.finfo(op.dtype).tiny)[:, None]

        a, c = alpha[:, : j + 1], beta[:, : j + 1]
        largest = a.abs().amax(1) + 2 * c.amax(1)  # above every Ritz value (Gershgorin)
        if j % LOOK and j + 1 < limit and bool((c[:, j] > rule.floor * largest).all()):
            continue  # nobody's Krylov space has ended: look at the next step
        top, s, reached, exhausted = rule.look(a, c)
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
            for new, old in enumerate(where.tolist()):  # in place: a fresh copy would cost more than a step
                if new != old:
                    basis[new, : j + 1] = basis[old, : j + 1]
            op, basis, v, b = op.select(there), basis[: len(where)], v[there], b[there]
            active, alpha, beta, unit = active[where], alpha[where], beta[where], unit[where]
    rule.finish(results, whole, tops)
    return results.norm(whole)


def golub_kahan(
    op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], delta: float | None = None, vectors: bool = False
) -> Norm:
    """Norms of J by Golub-Kahan-Lanczos bidiagonalisation with full reorthogonalisation, for any operator.

    Its bidiagonal B gives the Lanczos recurrence of J^T J (B^T B), by which entries stop as in `lanczos`; singular values are not squared.
    """
    n, m = math.prod(op.in_shape), math.prod(op.out_shape)
    limit = min(max_steps, n, m + 1)
    results, rule = Results(op, vectors, limit), _Rule(n, op.batch, tol, delta, op.dtype)
    tops = torch.zeros(op.batch, dtype=torch.float64)
    v = start_vectors(op, op.in_shape, seed)
    right, left = v[:, None], v.new_empty(op.batch, 0, m)
    a, b, alpha, beta = (torch.zeros(op.batch, limit, dtype=torch.float64) for _ in range(4))
    unit = torch.ones(op.batch, dtype=torch.float64)
    tiny = torch.finfo(op.dtype).tiny

    for j in range(limit):
        u = project_out(op.jvp(v.view(-1, *op.in_shape)).flatten(1), left, 2)
        size = torch.linalg.vector_norm(u, dim=1)
        if j == 0:
            unit = torch.where(size > 0, size.double(), 1.0).cpu()
        u = u / size.clamp_min(tiny)[:, None]
        left = torch.cat([left, u[:, None]], 1)
        w = project_out(op.vjp(u.view(-1, *op.out_shape)).flatten(1), right, 2)
        following = torch.linalg.vector_norm(w, dim=1)
        v = w / following.clamp_min(tiny)[:, None]
        right = torch.cat([right, v[:, None]], 1)
        a[:, j], b[:, j] = size.double().cpu() / unit, following.double().cpu() / unit
        alpha[:, j] = a[:, j] ** 2 + (b[:, j - 1] ** 2 if j else 0.0)
        beta[:, j] = a[:, j] * b[:, j]
        bidiagonal = torch.diag_embed(a[:, : j + 1]) + torch.diag_embed(b[:, :j], 1)
        s_left, sigma, _ = torch.linalg.svd(torch.nan_to_num(bidiagonal))
        _, _, reached, exhausted = rule.look(alpha[:, : j + 1], beta[:, : j + 1])
        exhausted |= torch.tensor(j + 1 == min(n, m + 1))
        broken = ~torch.isfinite(a[:, j])
        stop = (reached | exhausted | broken | torch.tensor(j + 1 == limit)) & ~results.done
        if not bool(stop.any()):
            continue
        tops[stop] = torch.where(broken, math.nan, sigma[:, 0] ** 2)[stop]
        index = stop.nonzero()[:, 0]
        results.stop(index, j + 1, alpha[stop, : j + 1], beta[stop, : j + 1], unit[stop] ** 2, exhausted[stop], reached[stop])
        if results.left is not None:
            vector = (s_left[:, :, 0].to(u)[:, None] @ left)[:, 0].view(-1, *op.out_shape)
            chosen = stop.to(op.device)
            results.left[chosen] = vector[chosen]
        if bool(results.done.all()):
            break
    rule.finish(results, op, tops)
    return results.norm(op)


def ritz_vectors(op: JacobianOperator, *, steps: int, count: int, seed: int | Sequence[int]) -> Tensor:
    """The top ``count`` Ritz vectors of J J^T after so many Lanczos steps, largest first: (batch, count, n), float64; fewer when n is smaller.

    Where a Krylov space ends early, the recurrence goes on from a fresh random direction orthogonal to it.
    """
    op = op.double()
    n = math.prod(op.out_shape)
    steps = min(steps, n)
    fresh = torch.Generator().manual_seed(0)
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
            other = torch.randn(w.shape, generator=fresh, dtype=torch.float64).to(w.device)
            w = torch.where(ended[:, None], project_out(other, known, 2), w)
        v = w / torch.linalg.vector_norm(w, dim=1, keepdim=True).clamp_min(1e-300)
    projected = basis @ images.mT
    _, s = torch.linalg.eigh((projected + projected.mT) / 2)
    return s.flip(-1)[..., :count].mT @ basis
