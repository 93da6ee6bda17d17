"""Fast search for vectors near the top of a batch of operators, which enclosures start from."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lipbound.linalg.krylov import eigenpairs, project_out, top_eigenpairs, with_room
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import normal_numbers, start_vectors


def ritz_search(
    op: JacobianOperator, *, count: int, residual: float, max_steps: int, seed: int | Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Search for the top ``count`` Ritz vectors of J J^T; they need not be right, only good.

    Lanczos with full reorthogonalisation, until the largest Ritz value's residual is below
    ``residual`` times the value. Where a Krylov space ends before it holds so many vectors, the
    rest are random.

    Returns:
        Vectors, largest first, (batch, count, n) in the dtype of ``op``, and products spent,
        (batch,) int64.
    """
    n = math.prod(op.out_shape)
    limit = min(max_steps, n)
    rest = normal_numbers(count * n, "rest").view(1, count, n)
    found = rest.repeat(op.batch, 1, 1).to(op.device, op.dtype)
    spent = torch.zeros(op.batch, dtype=torch.int64)
    active = torch.arange(op.batch)
    v = start_vectors(op, op.out_shape, seed)
    basis = v.new_empty(op.batch, min(16, limit), n)
    alpha, beta = (np.zeros((op.batch, limit)) for _ in range(2))
    unit = torch.ones(op.batch, 1, dtype=op.dtype, device=op.device)
    for j in range(limit):
        basis = with_room(basis, j, limit)
        basis[:, j] = v
        w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        if j == 0:  # a power of two brings squares of the entries into range
            size = w.abs().amax(1, keepdim=True)
            power = 2.0 ** size.clamp_min(1e-37).log2().round()
            unit = torch.where((size > 0) & torch.isfinite(size), power, 1.0)
        w = w / unit
        alpha[:, j] = (w * v).sum(1).double().cpu().numpy()
        w = project_out(w, basis[:, : j + 1], 2)
        b = torch.linalg.vector_norm(w, dim=1)
        beta[:, j] = b.double().cpu().numpy()
        v = w / b.clamp_min(torch.finfo(op.dtype).tiny)[:, None]
        if j + 1 < count and j + 1 < limit:
            continue
        a, c = alpha[:, : j + 1], beta[:, : j + 1]
        known = np.asarray(np.isfinite(a).all(1) & np.isfinite(c).all(1))
        top, s = top_eigenpairs(np.where(known[:, None], a, 0.0), np.where(known[:, None], c, 0.0))
        small = c[:, -1] * np.abs(s[:, -1]) <= residual * top
        small |= c[:, -1] <= 1e-6 * residual * np.abs(a).max(1)
        stop = np.asarray(~known | small | (j + 1 == limit))
        if not stop.any():
            continue
        spent[active[stop]] = j + 1
        ended = np.flatnonzero(stop & known)
        _, turns = eigenpairs(a[ended], c[ended, :-1])
        largest = torch.from_numpy(turns[:, :, ::-1][:, :, :count].swapaxes(1, 2).copy()).to(basis)
        there = torch.from_numpy(ended).to(op.device)
        found[active[ended].to(op.device), : largest.shape[1]] = largest @ basis[there, : j + 1]
        keep = torch.from_numpy(np.flatnonzero(~stop))
        if not len(keep):
            break
        there = keep.to(op.device)
        op, basis, v, unit = op.select(there), basis[there], v[there], unit[there]
        active, alpha, beta = active[keep], alpha[keep.numpy()], beta[keep.numpy()]
    finite = torch.isfinite(found).flatten(1).all(1)[:, None, None]
    return torch.where(finite, found, torch.ones_like(found)), spent
