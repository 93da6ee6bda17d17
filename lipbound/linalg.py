"""Matrix norms that bounds are built from. Each returns an *upper* value, in float64: an estimate from below would void the bound."""

import torch
from torch import Tensor

DENSE = 1024
"""Largest matrix handed to a dense eigensolver where an iterative upper bound has not settled."""


def _upwards(value: Tensor, size: int) -> Tensor:
    """``value`` enlarged by the rounding error of a dense decomposition of matrices of this size."""
    return value * (1 + 4 * size * torch.finfo(torch.float64).eps)


def matrix_norm(w: Tensor) -> Tensor:
    """Spectral norms of the last two axes by dense SVD of the smaller triangular factor: (..., m, n) -> (...), float64."""
    w = w.double()
    if w.shape[-2] < w.shape[-1]:
        w = w.mT
    if w.shape[-2] > w.shape[-1]:
        w = torch.linalg.qr(w, mode="r").R
    return _upwards(torch.linalg.svdvals(w)[..., 0], sum(w.shape[-2:]))


def product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Spectral norms of ``a @ b^T`` for tall a (..., m, d) and b (..., n, d), without forming it: (...), float64."""
    r_a, r_b = (torch.linalg.qr(w.double(), mode="r").R for w in (a, b))
    return matrix_norm(r_a @ r_b.mT)


def block_norm(b: Tensor, *, squarings: int = 2) -> Tensor:
    r"""Spectral norms of many small matrices (..., m, n), rounded upwards: (...), float64.

    No iteration to convergence: the Gram matrix of the shorter side is squared ``squarings`` times, then Wolkowicz and Styan's
    :math:`\lambda_{max} \le t/k + \sqrt{(1 - 1/k)(f - t^2/k)}` (t, f: trace and squared Frobenius norm, k: order) is taken of the power and
    rooted back. An upper value for every number of squarings; each of them halves the logarithm of the excess.
    """
    b = b.double()
    b = b if b.shape[-2] <= b.shape[-1] else b.mT
    size = b.abs().amax((-1, -2), keepdim=True)
    b = b / torch.where(size > 0, size, 1.0)
    gram = b @ b.mT
    logarithm, power = torch.zeros_like(size[..., 0, 0]), 1.0  # gram^power = exp(logarithm) * g
    g = gram
    for _ in range(squarings):
        unit = g.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)
        g = g / unit[..., None, None]
        g = g @ g
        logarithm, power = 2 * (logarithm + unit.log()), 2 * power
    k = g.shape[-1]
    t, f = g.diagonal(dim1=-2, dim2=-1).sum(-1), (g * g).sum((-1, -2))
    spread = (f - t * t / k).clamp_min(0) + 16 * k * torch.finfo(torch.float64).eps * f  # the difference cancels
    top = torch.minimum(t / k + ((1 - 1 / k) * spread).sqrt(), f.sqrt())
    value = ((top.clamp_min(1e-300).log() + logarithm) / (2 * power)).exp()
    return torch.where(size[..., 0, 0] > 0, value * size[..., 0, 0], 0.0) * (1 + 1e-13 * k)


def symmetric_norm(g: Tensor) -> Tensor:
    """Largest eigenvalues of symmetric positive semi-definite matrices (..., n, n), rounded upwards, zero at least: (...), float64."""
    top = torch.linalg.eigvalsh(g.double())[..., -1].clamp_min(0)
    return _upwards(top, g.shape[-1])


def nonnegative_norm(p: Tensor, *, rtol: float = 1e-6, max_steps: int = 40) -> Tensor:
    r"""Spectral norms of entrywise nonnegative matrices, rounded upwards: (..., n, n) -> (...), float64.

    Collatz-Wielandt on :math:`B = P^T P`: for every y > 0, :math:`\rho(B) \le \max_i (B y)_i / y_i`. y follows power iteration, and the best
    upper value is kept; where it has not come within ``rtol`` of the Rayleigh quotient, and n is at most 1024, a dense eigensolver decides.
    """
    flat = p.reshape(-1, *p.shape[-2:])
    n = p.shape[-1]
    upper = torch.full((len(flat),), torch.inf, dtype=torch.float64, device=p.device)
    active = torch.arange(len(flat), device=p.device)
    part = flat.double()
    y = torch.ones(len(flat), n, 1, dtype=torch.float64, device=p.device)
    going = torch.ones(len(flat), dtype=torch.bool, device=p.device)
    for _ in range(max_steps):
        z = part.mT @ (part @ y)
        ratio = (z / y).amax((-1, -2))
        upper[active] = torch.where(going, torch.minimum(upper[active], ratio), upper[active])  # settled values stay as they are
        rayleigh = (y * z).sum((-1, -2)) / (y * y).sum((-1, -2))
        going = going & (upper[active] > rayleigh * (1 + 2 * rtol))
        unsettled = active[going]
        if not len(unsettled):
            break
        y = (z / z.amax((-1, -2), keepdim=True).clamp_min(1e-300)).clamp_min(1e-14)  # any y > 0 will do: keep it off zero
        if len(unsettled) <= 0.7 * len(active):
            active, part, y = unsettled, part[going], y[going]
            going = torch.ones(len(active), dtype=torch.bool, device=p.device)
    if len(unsettled) and n <= DENSE:
        dense = flat[unsettled].double()
        exact = torch.linalg.eigvalsh(dense.mT @ dense)[:, -1].clamp_min(0)
        upper[unsettled] = torch.minimum(upper[unsettled], _upwards(exact, n))
    return _upwards(upper.sqrt(), n).view(p.shape[:-2])
