r"""Eigensolvers for the top singular value of a batch of Jacobians (`lipbound.operators.JacobianOperator`).

All of them work on the whole batch at once, drop the entries that have converged, and return a `Norm`. What they return in
``lower`` is a Rayleigh quotient, hence a lower bound on the norm up to rounding; ``error`` is an estimate of its relative error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.errors import LipboundError
from lipbound.operators import JacobianOperator


@dataclass(frozen=True)
class Norm:
    """Spectral norms of a batch of Jacobians.

    Attributes:
        lower: attained value, a lower bound on the norm (up to rounding of the dtype), float64.
        upper: upper bound on the norm, infinite where none was computed, float64.
        steps: matrix products with J J^T (or J^T J) spent, int64; 0 for dense methods.
        converged: whether the stopping rule was met.
        error: estimate of the relative error of ``lower`` (an estimate, not a bound), float64.
        left, right: top singular pair, unit vectors, when asked for; else None.
    """

    lower: Tensor
    upper: Tensor
    steps: Tensor
    converged: Tensor
    error: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    def view(self, *shape: int) -> "Norm":
        """The same values with the batch axis reshaped."""
        return replace(self, **{name: getattr(self, name).view(*shape) for name in ("lower", "upper", "steps", "converged", "error")})


def start_vectors(op: JacobianOperator, shape: tuple[int, ...], seed: int | Sequence[int]) -> Tensor:
    """Independent directions, uniform on the sphere: one unit vector per batch entry, (batch, prod(shape)), drawn on the CPU in float64.

    With a sequence of seeds the batch is cut into that many equal parts, each with a generator of its own, so that a part's vectors do not
    depend on what else is in the batch.
    """
    seeds = [seed] if isinstance(seed, int) else list(seed)
    if not seeds or op.batch % len(seeds):
        raise LipboundError(f"{len(seeds)} seeds were given for {op.batch} norms; give one seed, or one per sample")
    parts = []
    for one in seeds:
        generator = torch.Generator().manual_seed(one)
        parts.append(torch.randn(op.batch // len(seeds), math.prod(shape), generator=generator, dtype=torch.float64))
    x = torch.cat(parts)
    return (x / torch.linalg.vector_norm(x, dim=1, keepdim=True)).to(op.device, op.dtype)


class _Results:
    """Values of the entries that have stopped, and the positions of those that have not."""

    def __init__(self, op: JacobianOperator, vectors: bool):
        self.lower = torch.zeros(op.batch, dtype=torch.float64)
        self.error = torch.zeros(op.batch, dtype=torch.float64)
        self.steps = torch.zeros(op.batch, dtype=torch.int64)
        self.converged = torch.zeros(op.batch, dtype=torch.bool)
        self.left = torch.zeros(op.batch, *op.out_shape, dtype=op.dtype, device=op.device) if vectors else None
        self.done = torch.zeros(op.batch, dtype=torch.bool)

    def norm(self, op: JacobianOperator) -> Norm:
        if not bool(torch.isfinite(self.lower).all()):
            remedy = " in float32; use dtype='float64'" if op.dtype == torch.float32 else "; rescale the inputs or the weights"
            raise LipboundError(f"Jacobian products overflow{remedy}")
        right = None
        if self.left is not None:
            right = op.vjp(self.left)
            right = right / right.flatten(1).norm(dim=1).clamp_min(torch.finfo(op.dtype).tiny).view(-1, *(1,) * (right.ndim - 1))
        upper = torch.full_like(self.lower, math.inf)
        return Norm(self.lower, upper, self.steps, self.converged, self.error, self.left, right)


def ritz_error(top: Tensor, second: Tensor, residual: Tensor) -> Tensor:
    """A-posteriori estimate of the relative error of sqrt(top), top the largest Ritz value of a symmetric matrix.

    An eigenvalue lies within ``residual`` of ``top``, and within ``residual**2 / gap`` once the gap to the rest of the
    spectrum, here read off the second Ritz value, exceeds the residual.
    """
    gap = top - second - residual
    error = torch.where(gap > residual, residual**2 / gap.clamp_min(1e-300), residual)
    return torch.where(top > 0, error / (2 * top.clamp_min(1e-300)), 0.0)


def lanczos(op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], vectors: bool = False) -> Norm:
    """Norms of J by the Lanczos method on J J^T with full reorthogonalisation.

    An entry stops when the a-posteriori relative error of its top singular value (`ritz_error`) is at most ``tol``, when its Krylov
    space is exhausted, or after ``max_steps`` products (then it is marked as not converged).
    """
    n = math.prod(op.out_shape)
    limit = min(max_steps, n)
    whole, results = op, _Results(op, vectors)
    active = torch.arange(op.batch)
    v = start_vectors(op, op.out_shape, seed)
    basis = v.new_empty(op.batch, min(16, limit), n)
    alpha = torch.zeros(op.batch, limit, dtype=torch.float64)
    beta = torch.zeros(op.batch, limit, dtype=torch.float64)
    unit = torch.ones(op.batch, dtype=torch.float64)
    eps = torch.finfo(op.dtype).eps
    for j in range(limit):
        if j == basis.shape[1]:
            basis = torch.cat([basis, basis.new_empty(len(active), min(j, limit - j), n)], 1)
        basis[:, j] = v
        w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        if j == 0:  # a power of two brings squares of the entries into range, exactly
            size = w.abs().amax(1).double().cpu()
            unit = torch.where(size > 0, 2.0 ** size.clamp_min(1e-300).log2().round(), 1.0)
        w = w / unit.to(op.device, op.dtype)[:, None]
        alpha[:, j] = (w * v).sum(1).double().cpu()
        known = basis[:, : j + 1]
        for _ in range(2):
            w = torch.baddbmm(w[:, :, None], known.mT, known @ w[:, :, None], alpha=-1)[..., 0]
        b = w.norm(dim=1)
        beta[:, j] = b.double().cpu()
        v = w / b.clamp_min(torch.finfo(op.dtype).tiny)[:, None]

        t = torch.diag_embed(alpha[:, : j + 1]) + sum(torch.diag_embed(beta[:, :j], k) for k in (1, -1))
        ritz, s = torch.linalg.eigh(torch.nan_to_num(t))
        top = ritz[:, -1]
        second = ritz[:, -2] if j else torch.zeros_like(top)
        error = ritz_error(top, second, beta[:, j] * s[:, -1, -1].abs())
        exhausted = (beta[:, j] <= 4 * eps * ritz.abs().amax(1)) | torch.tensor(j + 1 == n)
        error = torch.where(exhausted, 0.0, error)
        good = exhausted | ((error <= tol) & (j >= 1))
        stop = (good | ~torch.isfinite(alpha[:, j]) | torch.tensor(j + 1 == limit)) & ~results.done[active]
        if bool(stop.any()):
            index = active[stop]
            value = top.clamp_min(0).sqrt() * unit.sqrt()
            results.lower[index] = torch.where(torch.isfinite(alpha[:, j]), value, math.nan)[stop]
            results.error[index], results.steps[index], results.converged[index] = error[stop], j + 1, good[stop]
            if results.left is not None:
                left = (s[stop, :, -1].to(v)[:, None] @ basis[stop.to(op.device), : j + 1])[:, 0]
                results.left[index.to(op.device)] = left.view(-1, *op.out_shape)
            results.done[index] = True
            going = ~results.done[active]
            if not bool(going.any()):
                break
            if int(going.sum()) <= 0.8 * len(active):  # worth copying the rest to a smaller batch
                where = going.nonzero()[:, 0]
                on_device = where.to(op.device)
                op, basis, v = op.select(on_device), basis[on_device], v[on_device]
                active, alpha, beta, unit = active[where], alpha[where], beta[where], unit[where]
    return results.norm(whole)


def golub_kahan(op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], vectors: bool = False) -> Norm:
    """Norms of J by Golub-Kahan-Lanczos bidiagonalisation with full reorthogonalisation.

    The same Krylov spaces as `lanczos` on J^T J, without squaring the singular values; for any operator. Stops as `lanczos` does.
    """
    n, m = math.prod(op.in_shape), math.prod(op.out_shape)
    limit = min(max_steps, n, m)
    results = _Results(op, vectors)
    v = start_vectors(op, op.in_shape, seed)
    right, left = v[:, None], v.new_empty(op.batch, 0, m)
    alpha = torch.zeros(op.batch, limit, dtype=torch.float64)
    beta = torch.zeros(op.batch, limit, dtype=torch.float64)
    tiny, eps = torch.finfo(op.dtype).tiny, torch.finfo(op.dtype).eps

    def orthogonal(x: Tensor, basis: Tensor) -> Tensor:
        for _ in range(2):
            x = x - (basis.mT @ (basis @ x[..., None]))[..., 0]
        return x

    for j in range(limit):
        u = orthogonal(op.jvp(v.view(-1, *op.in_shape)).flatten(1), left)
        a = torch.linalg.vector_norm(u, dim=1)
        u = u / a.clamp_min(tiny)[:, None]
        left = torch.cat([left, u[:, None]], 1)
        w = orthogonal(op.vjp(u.view(-1, *op.out_shape)).flatten(1), right)
        b = torch.linalg.vector_norm(w, dim=1)
        v = w / b.clamp_min(tiny)[:, None]
        right = torch.cat([right, v[:, None]], 1)
        alpha[:, j], beta[:, j] = a.double().cpu(), b.double().cpu()
        bidiagonal = torch.diag_embed(alpha[:, : j + 1]) + torch.diag_embed(beta[:, :j], 1)
        s_left, sigma, _ = torch.linalg.svd(torch.nan_to_num(bidiagonal))
        second = sigma[:, 1] if j else torch.zeros_like(sigma[:, 0])
        residual = beta[:, j] * s_left[:, -1, 0].abs() * sigma[:, 0]
        error = ritz_error(sigma[:, 0] ** 2, second**2, residual)
        exhausted = (torch.minimum(alpha[:, j], beta[:, j]) <= 4 * eps * sigma[:, 0]) | torch.tensor(j + 1 == min(n, m))
        error = torch.where(exhausted, 0.0, error)
        good = exhausted | ((error <= tol) & (j >= 1))
        stop = (good | ~torch.isfinite(alpha[:, j]) | torch.tensor(j + 1 == limit)) & ~results.done
        results.lower[stop] = torch.where(torch.isfinite(alpha[:, j]), sigma[:, 0], math.nan)[stop]
        results.error[stop], results.steps[stop], results.converged[stop] = error[stop], j + 1, good[stop]
        if results.left is not None:
            vector = (s_left[:, :, 0].to(u)[:, None] @ left)[:, 0].view(-1, *op.out_shape)
            chosen = stop.to(op.device)
            results.left[chosen] = vector[chosen]
        results.done |= stop
        if bool(results.done.all()):
            break
    return results.norm(op)


def power_iteration(op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], vectors: bool = False) -> Norm:
    r"""Norms of J by power iteration on J^T J, as papers on attention define it (Castin et al. 2024, appendix E.1).

    :math:`x_{k+1} = J^T J x_k / |J^T J x_k|`, :math:`\mu_k = |J x_k|`; stops when
    :math:`|\mu_{k+1} - \mu_k| <` ``tol``, an *absolute* change, or after ``max_steps``. It approaches the norm from below, and the rule
    depends on the scale of J: the result is a lower estimate without an error (``error`` is NaN); `lanczos` is there for the number itself.
    """
    results = _Results(op, vectors)
    x = start_vectors(op, op.in_shape, seed).view(-1, *op.in_shape)
    previous = torch.full((op.batch,), math.inf, dtype=torch.float64)
    for step in range(1, max_steps + 1):
        y = op.jvp(x)
        size = torch.linalg.vector_norm(y.flatten(1), dim=1)
        mu = size.double().cpu()
        good = (mu - previous).abs() < tol
        stop = (good | torch.tensor(step == max_steps)) & ~results.done
        results.lower[stop], results.steps[stop], results.converged[stop] = mu[stop], step, good[stop]
        if results.left is not None:
            chosen = stop.to(op.device)
            unit = y / size.clamp_min(torch.finfo(op.dtype).tiny).view(-1, *(1,) * (y.ndim - 1))
            results.left[chosen] = unit[chosen]
        results.done |= stop
        if bool(results.done.all()):
            break
        previous = mu
        x = op.vjp(y)
        x = x / torch.linalg.vector_norm(x.flatten(1), dim=1).clamp_min(torch.finfo(op.dtype).tiny).view(-1, *(1,) * (x.ndim - 1))
    results.error.fill_(math.nan)
    return results.norm(op)


def dense_svd(op: JacobianOperator, *, vectors: bool = False, memory: float = 4e9) -> Norm:
    """Norms of J from the singular values of the matrices themselves, in float64, one batch entry at a time.

    ``lower`` and ``upper`` are the computed value less and plus a generous rounding allowance of LAPACK's SVD.

    Raises:
        LipboundError: when one matrix and its decomposition would take more than ``memory`` bytes.
    """
    out, into = math.prod(op.out_shape), math.prod(op.in_shape)
    if 3 * 8 * out * into > memory:
        raise LipboundError(
            f"method 'dense' needs a matrix of {out} x {into} per head, about {3 * 8 * out * into / 1e9:.0f} GB of memory; use method='lanczos'"
        )
    results = _Results(op, vectors)
    rounding = torch.zeros(op.batch, dtype=torch.float64)
    for i in range(op.batch):
        one = op.select(torch.tensor([i], device=op.device))
        matrix = one.dense()[0].double()
        if results.left is None:
            sigma = torch.linalg.svdvals(matrix)
        else:
            u, sigma, _ = torch.linalg.svd(matrix, full_matrices=False)
            results.left[i] = u[:, 0].view(op.out_shape).to(op.dtype)
        results.lower[i] = sigma[0].cpu()
        rounding[i] = (out + into) * torch.finfo(torch.float64).eps
    results.converged.fill_(True)
    results.error.copy_(rounding)
    norm = results.norm(op)
    return replace(norm, lower=norm.lower * (1 - rounding), upper=norm.lower * (1 + rounding))
