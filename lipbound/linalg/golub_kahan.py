"""Golub-Kahan-Lanczos bidiagonalisation for the top singular value of a batch of operators."""

import math
from collections.abc import Sequence

import torch

from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import Norm, Results, start_vectors
from lipbound.linalg.stopping import StoppingRule, project_out


def golub_kahan(
    op: JacobianOperator, *, tol: float, max_steps: int, seed: int | Sequence[int], delta: float | None = None, vectors: bool = False,
    refined: bool = True
) -> Norm:  # fmt: skip
    """Norms of J by Golub-Kahan-Lanczos bidiagonalisation with full reorthogonalisation, for any operator.

    Its bidiagonal B gives the Lanczos recurrence of J^T J (B^T B), by which entries stop as in `lanczos`; singular values are not squared: Lemma 43
    (docs/theory/certificates.md).
    """
    n, m = math.prod(op.in_shape), math.prod(op.out_shape)
    limit = min(max_steps, n, m + 1)
    results, rule = Results(op, vectors, limit), StoppingRule(n, op.batch, tol, delta, op.dtype)
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
        s_left, sigma, _ = torch.linalg.svd(torch.nan_to_num(bidiagonal).masked_fill(results.done[:, None, None], 0))
        _, _, reached, exhausted = rule.look(alpha[:, : j + 1], beta[:, : j + 1], results.done)
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
    return results.norm(op, refined=refined)
