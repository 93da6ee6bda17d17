"""Norms in which single tokens move, by brute force on the blocks of dense Jacobians, and attained values of them in 80 digits."""

from decimal import Decimal

import numpy as np
import torch
from support import mp_oracle
from support.oracles import dense_jacobians, jacobians
from torch import Tensor

from lipbound.attention.layer import Attention


def blocks(att: Attention) -> Tensor:
    """J_ij of every head of every sample, (samples, heads, N, d_v, N, D), float64; of padding zero."""
    if not att.variants:
        return dense_jacobians(att)
    att = att.double()
    n, width = att.tokens, att.x.shape[2]
    found = torch.zeros(att.samples, att.heads, n, att.d_v, n, width, dtype=torch.float64)
    for s in range(att.samples):
        real = torch.arange(n) if att.valid is None else att.valid[s].nonzero()[:, 0]
        j = jacobians(att, s).unflatten(-1, (len(real), width)).transpose(0, 1)  # (heads, n, d_v, n, D)
        rows = torch.zeros(att.heads, n, att.d_v, len(real), width, dtype=torch.float64).index_copy(1, real, j)
        found[s] = torch.zeros_like(found[s]).index_copy(3, real, rows)
    return found


def one_token(j: Tensor) -> Tensor:
    """The largest norm of a column of blocks (..., N, d_v, N, D), exact: (...)."""
    return torch.linalg.svdvals(j.movedim(-2, -4).flatten(-3, -2))[..., 0].amax(-1)


def every_token(j: Tensor, *, starts: int = 6, steps: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ends of max_i sup over |x_j| <= 1 of |sum_j J_ij x_j|, (...): an attained value, and one that no perturbation exceeds.

    The first is the largest sum_j |J_ij^T y| over unit vectors y that ascent finds from eigenvectors and random starts, for every row; it is convex,
    so that maximising its linearisation never decreases it. The second is the Cauchy-Schwarz bound at the weights |J_ij^T y| of the best y, mixed
    with those of the norms of blocks, smallest over the mixtures.
    """
    rows = j.movedim(-2, -3)  # (..., N, N, d_v, D)
    lengths = _pulled(rows, _ascent(rows, starts, steps, seed)).norm(dim=-1)  # (..., N, starts, N)
    totals = lengths.sum(-1)
    best = totals.argmax(-1)[..., None, None].expand(*totals.shape[:-1], 1, lengths.shape[-1])
    at, sizes = lengths.gather(-2, best)[..., 0, :], torch.linalg.matrix_norm(rows, 2)
    upper = torch.full_like(totals[..., 0], torch.inf)
    for share in (1e-9, 1e-6, 1e-3, 0.03, 0.1, 0.3, 1.0):
        d = (1 - share) * at + share * sizes
        form = (torch.where(d > 0, 1 / d.clamp_min(1e-300), 0.0)[..., None, None] * rows @ rows.mT).sum(-3)
        upper = torch.minimum(upper, (d.sum(-1) * torch.linalg.eigvalsh(form)[..., -1].clamp_min(0)).sqrt())
    return totals.amax((-1, -2)), upper.amax(-1)


def _pulled(rows: Tensor, y: Tensor) -> Tensor:
    """J_ij^T y, (..., N, starts, N, D)."""
    return torch.einsum("...jvd,...sv->...sjd", rows, y)


def _ascent(rows: Tensor, starts: int, steps: int, seed: int) -> Tensor:
    """Unit vectors for every row, (..., N, starts, d_v)."""
    g = torch.Generator().manual_seed(seed)
    random = torch.randn(*rows.shape[:-3], starts, rows.shape[-2], generator=g, dtype=torch.float64)
    y = torch.cat([torch.linalg.eigh((rows @ rows.mT).sum(-3)).eigenvectors.mT, random], -2)
    for _ in range(steps + 1):
        y = y / y.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        pulled = _pulled(rows, y)
        y = torch.einsum("...jvd,...sjd->...sv", rows, pulled / pulled.norm(dim=-1, keepdim=True).clamp_min(1e-300))
    return y / y.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def attained(att: Attention, sample: int, head: int) -> dict[str, Decimal]:
    """Lower ends of both norms of a head at the given numbers, by norm: values of the Jacobian in 80 digits, at directions found in float64."""
    with mp_oracle.exactly(mp_oracle.DIGITS[0]):
        found = mp_oracle.differentiated(att, sample, head, "head")
        n, d_v, _, width = found.jacobian.shape
        lost = found.error * n * Decimal(n * d_v * width).sqrt()
        largest = max(map(abs, found.jacobian.flat))
        if largest == 0:
            return {"every-token": Decimal(0), "one-token": Decimal(0)}
        j = found.jacobian * Decimal(1).scaleb(-largest.adjusted())
        rough = torch.from_numpy(j.astype(float))
        every = one = Decimal(0)
        for i, ys in enumerate(_ascent(rough.movedim(-2, -3), 2, 40, 0)):
            best = ys[_pulled(rough.movedim(-2, -3)[i], ys).norm(dim=-1).sum(-1).argmax()]
            if not bool(best.any()):  # a row that vanishes beside the largest
                continue
            y = mp_oracle.exact_vector(best.numpy())
            pulled = np.tensordot(y, j[i], (0, 0))  # (n, D)
            every = max(every, sum(_length(x) for x in pulled) / _length(y))
        for t in range(n):
            x = mp_oracle.exact_vector(torch.linalg.svd(rough[:, :, t].flatten(0, 1)).Vh[0].numpy())
            one = max(one, _length(j[:, :, t].reshape(-1, width) @ x) / _length(x))
        unit = Decimal(1).scaleb(largest.adjusted()) * (1 - Decimal("1e-60"))
        return {"every-token": max(Decimal(0), every * unit - lost), "one-token": max(Decimal(0), one * unit - lost)}


def _length(x: np.ndarray) -> Decimal:
    return (x * x).sum().sqrt()
