r"""The largest :math:`\|X^T M(P_i)\|` over the rows of an attention matrix, rounded upwards, without solving for every row."""

import torch
from torch import Tensor

ROWS = 4
"""Rows of each head solved for at a time."""
ROUNDS = 8
"""Rounds after which the remaining rows keep their cheap upper values."""


def weighted_deviation_norm(x: Tensor, p: Tensor) -> Tensor:
    r""":math:`\max_i \|X^T M(P_i)\|` for inputs x (samples, N, D) and probabilities p (samples, heads, N, N): (samples, heads), float64.

    Every row gets a cheap upper value from a few N x N products; rows are then solved for exactly, in the order of those values, until no other row
    can be larger. Rows left over after `ROUNDS` rounds count with their upper values: the result is always an upper value, and the exact maximum when
    the rounds suffice: Lemma 51 (docs/theory/numerics.md). Cost O(N^3 + N^2 D), and a few eigenvalue problems per head.
    """
    x = x.double()
    x = x - x.mean(1, keepdim=True)
    return torch.stack([_one_sample(x[s], p[s].double()) for s in range(len(x))])


def _one_sample(x: Tensor, p: Tensor) -> Tensor:
    heads, n, _ = p.shape
    upper = _upper_values(x, p)
    best = torch.zeros(heads, dtype=torch.float64, device=x.device)
    active = torch.arange(heads, device=x.device)
    for _ in range(ROUNDS):
        rows = upper[active].topk(min(ROWS, n), -1).indices
        exact = _exact(x, p[active[:, None], rows])
        upper[active[:, None], rows] = -torch.inf
        best[active] = torch.maximum(best[active], exact.amax(-1))
        active = active[upper[active].amax(-1) > best[active]]
        if not len(active):
            break
    return torch.maximum(best, upper.amax(-1))


def _upper_values(x: Tensor, p: Tensor) -> Tensor:
    """Wolkowicz-Styan upper value of ||X^T M(P_i)|| for every row, (heads, N)."""
    n, width = x.shape
    k = x @ x.T
    w = p * p
    c = p @ k  # c_ij = mean_i . x_j
    s = (c * p).sum(-1, keepdim=True)  # |mean_i|^2
    distance = (k.diagonal() - 2 * c + s).clamp_min(0)
    t = (w * distance).sum(-1)
    # f = sum_jl w_j w_l (k_jl - c_j - c_l + s)^2 = sum_jl w_j w_l (k_jl - c_j)^2 + ..., expanded so that only N x N products occur
    total, wc, wcc = w.sum(-1), (w * c).sum(-1), (w * c * c).sum(-1)
    s = s[..., 0]
    wk = w @ k
    f = (
        ((w @ (k * k)) * w).sum(-1) + 2 * wcc * total + (s * total) ** 2 - 4 * (wk * w * c).sum(-1)
        + 2 * s * (wk * w).sum(-1) + 2 * wc**2 - 4 * s * wc * total
    )  # fmt: skip
    size = k.diagonal().amax()
    rounding = 64 * n * torch.finfo(torch.float64).eps * size
    t = t + rounding * total
    f = f.clamp_min(0) + rounding * size * total**2
    m = min(n, width)
    spread = torch.minimum(t / m + ((1 - 1 / m) * (f - t * t / m).clamp_min(0)).sqrt(), f.sqrt())
    return torch.minimum(spread, t).sqrt() * (1 + 1e-12)


def _exact(x: Tensor, p: Tensor) -> Tensor:
    """||X^T M(p)|| of given rows p (heads, rows, N), dense: (heads, rows). Centred at each row's heaviest token, which avoids cancellation."""
    y = x - x[p.argmax(-1)][..., None, :]
    z = p[..., None] * (y - (p[..., None, :] @ y))
    z = z if z.shape[-2] <= z.shape[-1] else z.mT
    n = z.shape[-2]
    scale = z.abs().amax((-1, -2), keepdim=True).clamp_min(1e-300)
    z = z / scale
    top = torch.linalg.eigvalsh(z @ z.mT)[..., -1].clamp_min(0)
    return top.sqrt() * scale[..., 0, 0] * (1 + 8 * n * torch.finfo(torch.float64).eps)
