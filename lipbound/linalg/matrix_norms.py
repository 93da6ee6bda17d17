"""Matrix norms that bounds are built from. Each returns an *upper* value, in float64: an estimate from below would void the bound."""

import torch
from torch import Tensor

UNIT = 2.0**-53
SMALLEST = 1e-140
"""Norms below it have no squares in the range of float64."""
LARGEST_DENSE_EIG = 1024
"""Largest matrix handed to a dense eigensolver where an iterative upper bound has not settled."""


def _upwards(value: Tensor, size: int) -> Tensor:
    """``value`` enlarged by the rounding error of a dense decomposition of matrices of this size: Lemma 50 (docs/theory/numerics.md)."""
    return value * (1 + 4 * size * torch.finfo(torch.float64).eps)


def matrix_norm(w: Tensor) -> Tensor:
    """Spectral norms of the last two axes by dense SVD of the smaller triangular factor: (..., m, n) -> (...), float64.

    The derivative is that of ``u^T w v`` at a top singular pair u, v.
    """
    w = w.double()
    fixed = w.detach()
    tall = fixed if w.shape[-2] >= w.shape[-1] else fixed.mT
    if tall.shape[-2] > tall.shape[-1]:
        tall = torch.linalg.qr(tall, mode="r").R
    norm = _upwards(torch.linalg.svdvals(tall)[..., 0], sum(w.shape[-2:]))
    if not w.requires_grad:
        return norm
    u, _, vh = torch.linalg.svd(fixed, full_matrices=False)
    return _with_derivative(norm, (u[..., None, :, 0] @ w @ vh[..., 0, :, None])[..., 0, 0])


def _with_derivative(value: Tensor, form: Tensor) -> Tensor:
    """``value`` with the derivative of ``form``."""
    return value + (form - form.detach())


def product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Spectral norms of ``a @ b^T`` for tall a (..., m, d) and b (..., n, d), without forming it: (...), float64."""
    r_a, r_b = (torch.linalg.qr(w.double(), mode="r").R for w in (a, b))
    return matrix_norm(r_a @ r_b.mT)


def reproducible_float32() -> bool:
    """Whether float32 products are float32 throughout, and not bfloat16 or TF32, which torch can be told to use."""
    return all(backend.matmul.fp32_precision in ("none", "ieee") for backend in (torch.backends.cuda, torch.backends.mkldnn))


def block_norm(b: Tensor, *, squarings: int = 2) -> Tensor:
    r"""Spectral norms of many small matrices (..., m, n), rounded upwards: (...), float64; differentiable.

    No iteration to convergence: the Gram matrix of the shorter side is squared ``squarings`` times, Wolkowicz and Styan's bound on its largest
    eigenvalue: Lemma 47 (docs/theory/numerics.md) is taken of the power and rooted back. An upper value for every number of squarings; each of them
    halves the logarithm of the excess.

    Small blocks are multiplied in float32. The allowance for rounding (about 1e-4 for k = 32, Lemma 48 (docs/theory/numerics.md)) is added to the
    result; where it would exceed 2e-3, products are in float64.
    """
    b = b if b.shape[-2] <= b.shape[-1] else b.mT
    k, m = b.shape[-2:]
    slack = k * (2 * m + 2 * k + 20)
    small = slack * torch.finfo(torch.float32).eps / 2 <= 2e-3 and squarings <= 2 and k * m <= 10_000
    work = torch.float32 if small and reproducible_float32() else torch.float64
    size = b.detach().abs().amax((-1, -2), keepdim=True).double()
    b = (b / size.clamp_min(1e-290)).to(work)  # entries are at most 1: powers stay in range
    g = b @ b.mT
    for _ in range(squarings):
        g = g @ g
    t, f = g.diagonal(dim1=-2, dim2=-1).sum(-1).double(), (g * g).sum((-1, -2)).double()
    unit = torch.finfo(work).eps / 2
    spread = (f - t * t / k).clamp_min(0) + 32 * k * unit * f  # the difference cancels
    top = torch.minimum(t / k + ((1 - 1 / k) * spread).clamp_min(1e-300).sqrt(), f.clamp_min(1e-300).sqrt())
    size = size[..., 0, 0]
    value = torch.where(size > 1e-290, top ** (0.5 / 2**squarings) * size, (k * m) ** 0.5 * size)  # near the end of the range, Frobenius
    return value * (1 + slack * unit)


def symmetric_norm(g: Tensor) -> Tensor:
    """Largest eigenvalues of symmetric positive semi-definite matrices (..., n, n), rounded upwards, zero at least: (...), float64.

    The derivative is that of ``x^T g x`` at a top eigenvector x.
    """
    g = g.double()
    if not g.requires_grad:
        return _upwards(torch.linalg.eigvalsh(g)[..., -1].clamp_min(0), g.shape[-1])
    values, vectors = torch.linalg.eigh(g.detach())
    x = vectors[..., -1:]
    return _with_derivative(_upwards(values[..., -1].clamp_min(0), g.shape[-1]), (x.mT @ g @ x)[..., 0, 0])


def nonnegative_norm(p: Tensor, *, rtol: float = 1e-6, max_steps: int = 40) -> Tensor:
    r"""Spectral norms of entrywise nonnegative matrices, rounded upwards: (..., n, n) -> (...), float64.

    Collatz-Wielandt on :math:`B = P^T P`: for every y > 0, :math:`\rho(B) \le \max_i (B y)_i / y_i`: Lemma 49 (docs/theory/numerics.md). y follows
    power iteration, and the best upper value is kept; where it has not come within ``rtol`` of the Rayleigh quotient, and n is at most 1024, a dense
    eigensolver decides.

    The derivative is that of the norm at the last y, :math:`u^T\,dP\,y` with :math:`u \propto P y`.
    """
    flat = p.reshape(-1, *p.shape[-2:])
    with torch.no_grad():
        size = flat.detach().double().amax((-1, -2))  # squares of the entries must stay in range
        size = torch.where(size > 0, size, 1.0)
        upper, y = _collatz_wielandt(flat.double() / size[:, None, None], rtol, max_steps)
        upper = upper * size * (1 + 4 * UNIT)
    if p.requires_grad:
        y = y / y.norm(dim=1, keepdim=True)
        u = flat.detach().double() @ y
        u = u / u.norm(dim=1, keepdim=True).clamp_min(1e-300)
        upper = _with_derivative(upper, (u * (flat.double() @ y)).sum((-1, -2)))
    return upper.view(p.shape[:-2])


def _collatz_wielandt(flat: Tensor, rtol: float, max_steps: int) -> tuple[Tensor, Tensor]:
    """Upper values (batch,) and the positive vectors (batch, n, 1) that the iteration ended on."""
    n = flat.shape[-1]
    upper = torch.full((len(flat),), torch.inf, dtype=torch.float64, device=flat.device)
    active = torch.arange(len(flat), device=flat.device)
    part = flat
    last = torch.ones(len(flat), n, 1, dtype=torch.float64, device=flat.device)
    y = last.clone()
    going = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    for _ in range(max_steps):
        z = part.mT @ (part @ y)
        ratio = (z / y).amax((-1, -2))
        upper[active] = torch.where(going, torch.minimum(upper[active], ratio), upper[active])  # settled values stay as they are
        rayleigh = (y * z).sum((-1, -2)) / (y * y).sum((-1, -2))
        going = going & (upper[active] > rayleigh * (1 + 2 * rtol))
        unsettled = active[going]
        y = (z / z.amax((-1, -2), keepdim=True).clamp_min(1e-300)).clamp_min(1e-14)  # any y > 0 will do: keep it off zero
        last[active] = y
        if not len(unsettled):
            break
        if len(unsettled) <= 0.7 * len(active):
            active, part, y = unsettled, part[going], y[going]
            going = torch.ones(len(active), dtype=torch.bool, device=flat.device)
    if len(unsettled) and n <= LARGEST_DENSE_EIG:
        dense = flat[unsettled]
        exact = torch.linalg.eigvalsh(dense.mT @ dense)[:, -1].clamp_min(0)
        upper[unsettled] = torch.minimum(upper[unsettled], _upwards(exact, n))
    return _upwards(upper.sqrt(), n), last


def gamma(k: int) -> float:
    """Higham's bound on the relative error of k accumulated float64 roundings."""
    return k * UNIT / (1 - k * UNIT)
