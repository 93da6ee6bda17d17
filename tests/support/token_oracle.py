"""Norms that tell tokens apart, from dense Jacobians: what closed forms, bounds and enclosures are
tested against; and attained values in 80 digits.

Blocks are (..., i, j, r, D): of output token i by token j.
"""

from decimal import Decimal

import numpy as np
import torch
from scipy.optimize import minimize
from support import mp_oracle
from support.layers import normal
from support.mp_oracle import length
from support.oracles import dense_jacobians, jacobians
from torch import Tensor

from lipbound.attention.layer import Attention


def blocks(att: Attention, sample: int, map: str = "head") -> Tensor:
    """Blocks of the autograd Jacobian of the definition, padding left out: (heads or 1, i, j, r,
    D)."""
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


def all_blocks(att: Attention) -> Tensor:
    """Those of every head of every sample at once, (samples, heads, i, j, d_v, D); of
    padding zero."""
    if not att.variants:
        return dense_jacobians(att).movedim(-2, -3)
    n, width = att.tokens, att.x.shape[2]
    found = torch.zeros(att.samples, att.heads, n, n, att.d_v, width, dtype=torch.float64)
    for s in range(att.samples):
        real = torch.arange(n) if att.valid is None else att.valid[s].nonzero()[:, 0]
        rows = torch.zeros_like(found[s]).index_select(1, real).index_copy(2, real, blocks(att, s))
        found[s] = found[s].index_copy(1, real, rows)
    return found


def one(j: Tensor) -> tuple[Tensor, Tensor]:
    """Largest norm of a column of blocks, and of a block, (...)."""
    columns = torch.linalg.matrix_norm(j.transpose(-3, -4).flatten(-3, -2), 2)
    return columns.amax(-1), torch.linalg.matrix_norm(j, 2).amax((-1, -2))


def rows(j: Tensor) -> Tensor:
    """Norms of the rows of blocks, (..., i)."""
    return torch.linalg.matrix_norm(j.transpose(-2, -3).flatten(-2), 2)


def every_from_below(j: Tensor, starts: int, steps: int = 60, seed: int = 0) -> Tensor:
    r"""The largest :math:`\sum_j |J_{ij}^T y|` over unit vectors y that ascent finds for any output
    token i, (...)."""
    return _pulled(j, _ascent(j, starts, steps, seed)).norm(dim=-1).sum(-1).amax((-1, -2))


def _pulled(j: Tensor, y: Tensor) -> Tensor:
    """J_ij^T y of vectors (..., i, s, r), (..., i, s, j, D)."""
    return torch.einsum("...ijrx,...isr->...isjx", j, y)


def _ascent(j: Tensor, starts: int, steps: int, seed: int) -> Tensor:
    """Unit vectors for every output token, (..., i, s, r), from eigenvectors of the row of blocks
    and ``starts`` random ones.

    The sum is convex, so that maximising its linearisation never decreases it.
    """
    random = normal(seed)(*j.shape[:-3], starts, j.shape[-2])
    y = torch.cat([torch.linalg.eigh((j @ j.mT).sum(-3)).eigenvectors.mT, random], -2)
    for _ in range(steps):
        y = y / y.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        pulled = _pulled(j, y)
        pulled = pulled / pulled.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        y = torch.einsum("...ijrx,...isjx->...isr", j, pulled)
    return y / y.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def every_from_above(j: Tensor) -> Tensor:
    r"""What :math:`\max_i \min_d \lambda_{\max}(\sum_j J_{ij} J_{ij}^T / d_j)^{1/2}` comes to,
    (...): d minimised by scipy as a softmax."""
    if j.ndim > 4:
        return torch.stack([every_from_above(one) for one in j])
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
        found = minimize(value, z, jac=True, method="L-BFGS-B", options={"maxiter": 200}).fun
        best = min(value(z)[0], found)
        worst = max(worst, best**0.5 + 1e-13 * float(traces.sum()))
    return torch.tensor(worst, dtype=torch.float64)


def attained(att: Attention, sample: int, head: int) -> dict[str, Decimal]:
    """Lower ends of both norms of a head at the given numbers, by norm: values of the Jacobian in
    80 digits, at directions found in float64."""
    with mp_oracle.exactly(mp_oracle.DIGITS[0]):
        found = mp_oracle.differentiated(att, sample, head, "head")
        n, d_v, _, width = found.jacobian.shape
        lost = found.error * n * Decimal(n * d_v * width).sqrt()
        largest = max(map(abs, found.jacobian.flat))
        if largest == 0:
            return {"every-token": Decimal(0), "one-token": Decimal(0)}
        j = found.jacobian * Decimal(1).scaleb(-largest.adjusted())
        rough = torch.from_numpy(j.astype(float)).movedim(-2, -3)  # (i, j, d_v, D)
        every = one = Decimal(0)
        vectors = _ascent(rough, 2, 40, 0)
        sums = _pulled(rough, vectors).norm(dim=-1).sum(-1)
        for i, k in enumerate(sums.argmax(-1).tolist()):
            best = vectors[i, k]
            if not bool(best.any()):  # a row that vanishes beside the largest
                continue
            y = mp_oracle.exact(best)
            pulled = np.tensordot(y, j[i], (0, 0))  # (n, D)
            every = max(every, sum(length(x) for x in pulled) / length(y))
        for t in range(n):
            x = mp_oracle.exact(torch.linalg.svd(rough[:, t].flatten(0, 1)).Vh[0])
            one = max(one, length(j[:, :, t].reshape(-1, width) @ x) / length(x))
        unit = Decimal(1).scaleb(largest.adjusted()) * (1 - Decimal("1e-60"))
        least = (max(Decimal(0), value * unit - lost) for value in (every, one))
        return dict(zip(("every-token", "one-token"), least, strict=True))
