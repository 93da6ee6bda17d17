"""Norms of Jacobians in which every output follows its own token alone: queries of another stream.

Each is the largest norm of its blocks, d_v x D for every token, which are decomposed one by one:
deterministic, and no search.
"""

from dataclasses import replace

import torch

from lipbound.jacobians.head import HeadOperator
from lipbound.linalg.enclosures.enclose import widened
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.solution import Norm, Results


def own_block_norms(op: HeadOperator, roundoff: Roundoff, *, tol: float, vectors: bool) -> Norm:
    """Return the norms of block diagonal Jacobians, both ends proved, (batch,).

    Lemma 17 (docs/theory/bounds.md).

    Args:
        op: float64, of heads whose keys and values do not follow the inputs.
        roundoff: of its tensors and products.
        tol: relative width of the enclosures.
        vectors: whether singular vectors are wanted.
    """
    (n, d_v), results = op.out_shape, Results(op, vectors)
    eye = torch.eye(d_v, dtype=op.dtype, device=op.device)
    # one row of every token's block from one product
    rows = [op.vjp(e.expand(op.batch, n, d_v).contiguous()) for e in eye]
    blocks = torch.stack(rows, 2)  # (batch, N, d_v, m)
    norms = torch.linalg.matrix_norm(blocks, 2)
    top, place = norms.max(-1)
    if results.left is not None:
        chosen = blocks[torch.arange(op.batch, device=op.device), place]
        u = torch.linalg.svd(chosen, full_matrices=False).U[..., 0]
        results.left[torch.arange(op.batch, device=op.device), place] = u
    results.lower = top.cpu()
    results.steps.fill_(d_v)
    results.converged.fill_(True)
    rounding = 8 * (d_v + blocks.shape[-1]) * torch.finfo(op.dtype).eps
    norm = results.norm(op)
    norm = replace(norm, lower=norm.lower * (1 - rounding), upper=norm.lower * (1 + rounding))
    return widened(norm, roundoff.tensors + d_v**0.5 * roundoff.products, tol)
