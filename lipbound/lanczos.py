r"""Iterative and dense solvers for the top singular value of a batch of Jacobians (`lipbound.operators.JacobianOperator`).

All of them work on the whole batch at once and return a `Norm`. What they return in ``lower`` is a Rayleigh quotient, hence a lower bound on the norm
up to rounding. The Lanczos methods stop on the probabilistic upper bound of `lipbound.certificates`, not on a residual: residuals say that *some*
singular value is near, and on real heads stop at the wrong one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lipbound.certificates import ROUNDING, excludes, log_inverse_epsilon, upper_bound
from lipbound.errors import LipboundError
from lipbound.operators import JacobianOperator

ESTIMATE_DELTA = 1e-3
"""Failure probability, per norm, behind the error estimate of a norm for which no certificate was asked."""
DENSE = 512
"""Largest output dimension for which a Krylov space that ends before a certificate is reached is replaced by a dense decomposition."""
LOOK = 2
"""Steps between two looks at the recurrences, whose small eigenvalue problems cost as much as a step on small layers."""


@dataclass(frozen=True)
class Norm:
    """Spectral norms of a batch of Jacobians.

    Attributes:
        lower: attained value, a lower bound on the norm (up to rounding of the dtype), float64.
        upper: upper bound on the norm where one was asked for (``delta``, or a dense method), else infinite, float64.
        steps: products with J J^T (or J^T J) spent, int64; 0 for dense methods.
        converged: whether the stopping rule was met.
        error: estimate of the relative error of ``lower`` (exceeded with probability at most 1e-3 each), float64; NaN for power iteration.
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
    """What the entries that have stopped have shown: recurrences of the operator in units of ``unit``, then values."""

    def __init__(self, op: JacobianOperator, vectors: bool, limit: int = 0):
        self.alpha, self.beta = (torch.ones(op.batch, limit, dtype=torch.float64) for _ in range(2))
        self.unit = torch.ones(op.batch, dtype=torch.float64)
        self.exhausted = torch.zeros(op.batch, dtype=torch.bool)
        self.lower = torch.zeros(op.batch, dtype=torch.float64)
        self.upper = torch.full((op.batch,), math.inf, dtype=torch.float64)
        self.error = torch.zeros(op.batch, dtype=torch.float64)
        self.steps = torch.zeros(op.batch, dtype=torch.int64)
        self.converged = torch.zeros(op.batch, dtype=torch.bool)
        self.left = torch.zeros(op.batch, *op.out_shape, dtype=op.dtype, device=op.device) if vectors else None
        self.done = torch.zeros(op.batch, dtype=torch.bool)

    def stop(self, index: Tensor, steps: int, alpha: Tensor, beta: Tensor, unit: Tensor, exhausted: Tensor, reached: Tensor) -> None:
        """Store the recurrences of the entries ``index`` after ``steps`` steps."""
        self.alpha[index, :steps], self.beta[index, :steps], self.unit[index] = alpha, beta, unit
        self.exhausted[index], self.converged[index], self.steps[index], self.done[index] = exhausted, reached, steps, True

    def norm(self, op: JacobianOperator) -> Norm:
        """The results as a `Norm`; singular vectors are refined by one product, which also clears directions that J does not reach."""
        if not bool(torch.isfinite(self.lower).all()):
            remedy = " in float32; use dtype='float64'" if op.dtype == torch.float32 else "; rescale the inputs or the weights"
            raise LipboundError(f"Jacobian products overflow{remedy}")
        left = right = None
        if self.left is not None:
            right = _unit(op.vjp(self.left))
            left = _unit(op.jvp(right))
        return Norm(self.lower, self.upper, self.steps, self.converged, self.error, left, right)


def _unit(x: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x.flatten(1), dim=1).clamp_min(torch.finfo(x.dtype).tiny)
    return x / size.view(-1, *(1,) * (x.ndim - 1))


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
        a, b = np.nan_to_num(alpha.numpy()), np.nan_to_num(beta.numpy())
        k = a.shape[1]
        t = np.zeros((len(a), k, k))
        i = np.arange(k)
        t[:, i, i] = a
        t[:, i[1:], i[:-1]] = b[:, :-1]  # eigh reads the lower triangle
        ritz, s = np.linalg.eigh(t)
        top = np.maximum(ritz[:, -1], 0)
        target = top * ((1 + self.tol) / (1 + self.rounding)) ** 2
        reached = excludes(a, self._floored(b, top), np.full(len(a), k), target, self.log_inverse) | (top == 0)
        exhausted = b[:, -1] <= self.floor * top
        return torch.from_numpy(top), torch.from_numpy(s[:, :, -1]), torch.from_numpy(reached), torch.from_numpy(exhausted)

    def _floored(self, beta: np.ndarray, top: np.ndarray) -> np.ndarray:
        """A beta below rounding is rounding: taking it larger makes the bound larger."""
        return np.maximum(np.maximum(beta, self.floor * top[:, None]), 1e-300)

    def finish(self, results: _Results, op: JacobianOperator, top: Tensor) -> None:
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


def lanczos(
    op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], delta: float | None = None, vectors: bool = False
) -> Norm:
    """Norms of J by the Lanczos method on J J^T with full reorthogonalisation.

    An entry stops when its upper bound (at failure probability ``delta`` for the whole batch, or 1e-3 each for an estimate) is within
    ``tol`` of its Ritz value, when its Krylov space is exhausted, or after ``max_steps`` products; it is then no longer computed.
    """
    n = math.prod(op.out_shape)
    limit = min(max_steps, n)
    whole, results, rule = op, _Results(op, vectors, limit), _Rule(n, op.batch, tol, delta, op.dtype)
    tops = torch.zeros(op.batch, dtype=torch.float64)
    active = torch.arange(op.batch)
    v = start_vectors(op, op.out_shape, seed)
    basis = v.new_empty(op.batch, min(16, limit), n)
    alpha, beta = (torch.zeros(op.batch, limit, dtype=torch.float64) for _ in range(2))
    unit = torch.ones(op.batch, dtype=torch.float64)
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
        alpha[:, j] = (w * v).sum(1).double().cpu()
        known = basis[:, : j + 1]
        # The recurrence removes the large components, then one pass against the whole basis what rounding has left of it.
        recent = basis[:, max(0, j - 1) : j + 1]
        for part in (recent, known):
            w = torch.baddbmm(w[:, :, None], part.mT, part @ w[:, :, None], alpha=-1)[..., 0]
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
            op, basis, v = op.select(there), basis[there], v[there]
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
    results, rule = _Results(op, vectors, limit), _Rule(n, op.batch, tol, delta, op.dtype)
    tops = torch.zeros(op.batch, dtype=torch.float64)
    v = start_vectors(op, op.in_shape, seed)
    right, left = v[:, None], v.new_empty(op.batch, 0, m)
    a, b, alpha, beta = (torch.zeros(op.batch, limit, dtype=torch.float64) for _ in range(4))
    unit = torch.ones(op.batch, dtype=torch.float64)
    tiny = torch.finfo(op.dtype).tiny

    def orthogonal(x: Tensor, basis: Tensor) -> Tensor:
        for _ in range(2):
            x = x - (basis.mT @ (basis @ x[..., None]))[..., 0]
        return x

    for j in range(limit):
        u = orthogonal(op.jvp(v.view(-1, *op.in_shape)).flatten(1), left)
        size = torch.linalg.vector_norm(u, dim=1)
        if j == 0:
            unit = torch.where(size > 0, size.double(), 1.0).cpu()
        u = u / size.clamp_min(tiny)[:, None]
        left = torch.cat([left, u[:, None]], 1)
        w = orthogonal(op.vjp(u.view(-1, *op.out_shape)).flatten(1), right)
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


def power_iteration(op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], vectors: bool = False) -> Norm:
    r"""Norms of J by power iteration on J^T J, as papers on attention define it (Castin et al. 2024, appendix E.1).

    :math:`x_{k+1} = J^T J x_k / |J^T J x_k|`, :math:`\mu_k = |J x_k|`; stops when :math:`|\mu_{k+1} - \mu_k| <` ``tol``, an *absolute* change, or
    after ``max_steps``. It approaches the norm from below, and the rule depends on the scale of J: the result is a lower estimate without an error
    (``error`` is NaN); `lanczos` is there for the number itself.
    """
    results = _Results(op, vectors)
    x = start_vectors(op, op.in_shape, seed).view(-1, *op.in_shape)
    previous = torch.full((op.batch,), math.inf, dtype=torch.float64)
    for step in range(1, max_steps + 1):
        y = op.jvp(x)
        mu = torch.linalg.vector_norm(y.flatten(1), dim=1).double().cpu()
        good = (mu - previous).abs() < tol
        stop = (good | torch.tensor(step == max_steps)) & ~results.done
        results.lower[stop], results.steps[stop], results.converged[stop] = mu[stop], step, good[stop]
        if results.left is not None:
            chosen = stop.to(op.device)
            results.left[chosen] = _unit(y)[chosen]
        results.done |= stop
        if bool(results.done.all()):
            break
        previous = mu
        x = _unit(op.vjp(y))
    results.error.fill_(math.nan)
    return results.norm(op)


def dense_svd(op: JacobianOperator, *, vectors: bool = False, memory: float = 4e9) -> Norm:
    """Norms of J from the singular values of the matrices themselves, in float64, one batch entry at a time.

    ``lower`` and ``upper`` are the computed value less and plus a relative rounding allowance for forming and decomposing the matrix; where
    attention saturates, the cancellation in ``v_j - o_i`` comes on top (`lipbound.norms.rounding`).

    Raises:
        LipboundError: when one matrix and its decomposition would take more than ``memory`` bytes.
    """
    out, into = math.prod(op.out_shape), math.prod(op.in_shape)
    needed = 3 * 8 * out * into
    if needed > memory:
        raise LipboundError(f"method 'dense' needs a matrix of {out} x {into} per head, about {needed / 1e9:.0f} GB of memory; use method='lanczos'")
    results = _Results(op, vectors)
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
