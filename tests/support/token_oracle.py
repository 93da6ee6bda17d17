"""Norms that tell tokens apart, from dense Jacobians: what the closed forms and the enclosures are tested against."""

import numpy as np
import torch
from scipy.optimize import minimize
from support.oracles import jacobians
from torch import Tensor

from lipbound.attention.layer import Attention


def blocks(att: Attention, sample: int, map: str) -> Tensor:
    """Blocks of the autograd Jacobian of the definition, padding left out: (heads or 1, i, j, r, D)."""
    dense = jacobians(att.double(), sample)  # (n, heads, d_v, n D)
    dense = dense.unflatten(-1, (dense.shape[0], -1))  # (i, h, v, j, D)
    w_o = None if att.w_o is None else att.w_o.double()
    if map == "head":
        return torch.einsum("ihvjx->hijvx", dense)
    if map == "head_out":
        return torch.einsum("ihvjx,hvr->hijrx", dense, w_o)
    if map == "heads":
        return torch.einsum("ihvjx->ijhvx", dense).flatten(2, 3)[None]
    return torch.einsum("ihvjx,hvr->ijrx", dense, w_o)[None]


def one(j: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks (i, j, r, D): largest norm of a column of blocks, and of a block."""
    return torch.linalg.matrix_norm(j.transpose(0, 1).flatten(1, 2), 2).amax(), torch.linalg.matrix_norm(j, 2).amax()


def rows(j: Tensor) -> Tensor:
    """Norms of the rows of blocks (i, j, r, D), (i,)."""
    return torch.linalg.matrix_norm(j.transpose(1, 2).flatten(2), 2)


def every_from_below(j: Tensor, starts: int, steps: int = 60, seed: int = 0) -> float:
    r"""The largest :math:`\sum_j |J_{ij}^T y|` that plain ascent by gradients of the sum finds from random starts, blocks (i, j, r, D)."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(len(j), starts, j.shape[2], generator=generator, dtype=torch.float64)
    best = 0.0
    for _ in range(steps):
        y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp_min(1e-300)
        pulled = torch.einsum("ijrx,isr->isjx", j, y)
        lengths = torch.linalg.vector_norm(pulled, dim=-1)
        best = max(best, float(lengths.sum(-1).amax()))
        y = torch.einsum("ijrx,isjx->isr", j, pulled / lengths[..., None].clamp_min(1e-300))
    return best


def every_from_above(j: Tensor) -> float:
    r"""What :math:`\max_i \min_d \lambda_{\max}(\sum_j J_{ij} J_{ij}^T / d_j)^{1/2}` comes to, d minimised by scipy over the simplex as a softmax."""
    worst = 0.0
    for row in j:
        products = (row @ row.mT).numpy()
        traces = np.sqrt(np.trace(products, axis1=1, axis2=2))
        if not traces.sum() > 0:
            continue
        keep = traces > 1e-13 * traces.sum()
        products, traces = products[keep], traces[keep]

        def value(z: np.ndarray, products: np.ndarray = products) -> tuple[float, np.ndarray]:
            d = np.exp(np.maximum(z - z.max(), -60))
            d = d / d.sum()
            values, vectors = np.linalg.eigh(np.einsum("j,jab->ab", 1 / d, products))
            slope = -np.einsum("a,jab,b->j", vectors[:, -1], products, vectors[:, -1]) / d**2
            return float(values[-1]), (slope - (slope * d).sum()) * d

        z = np.log(traces / traces.sum())
        best = min(value(z)[0], minimize(value, z, jac=True, method="L-BFGS-B", options={"maxiter": 200}).fun)
        worst = max(worst, best**0.5 + 1e-13 * float(traces.sum()))
    return worst
