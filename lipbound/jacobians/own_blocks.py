"""Norms of Jacobians in which every output follows its own token alone: those by queries.

Each is the largest norm of its blocks, d_v x D for every token, which are decomposed one by one:
deterministic, and no search.
"""

import math

import torch

from lipbound.jacobians.head import HeadOperator
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.solution import Norm, solved, widened

BLOCK_BYTES = 2**28
"""Bytes of the blocks that are formed at a time, of one entry of the batch at least."""


def own_block_norms(op: HeadOperator, roundoff: Roundoff, *, tol: float, vectors: bool) -> Norm:
    """Return the norms of block diagonal Jacobians, both ends proved, (batch,).

    Lemma 17 (docs/theory/bounds.md).

    Args:
        op: float64, of heads whose keys and values do not follow the inputs.
        roundoff: of its tensors and products.
        tol: relative width of the enclosures.
        vectors: whether singular vectors are wanted.
    """
    step = max(1, BLOCK_BYTES // (8 * math.prod(op.out_shape) * op.in_shape[1]))
    if step < op.batch:
        parts = [torch.arange(op.batch)[i : i + step] for i in range(0, op.batch, step)]
        pieces = [(op.select(part.to(op.device)), roundoff.select(part)) for part in parts]
        return Norm.cat([own_block_norms(*one, tol=tol, vectors=vectors) for one in pieces])
    n, d_v = op.out_shape
    eye = torch.eye(d_v, dtype=op.dtype, device=op.device)
    # one row of every token's block from one product
    rows = [op.vjp(e.expand(op.batch, n, d_v).contiguous()) for e in eye]
    blocks = torch.stack(rows, 2)  # (batch, N, d_v, m)
    top, place = torch.linalg.matrix_norm(blocks, 2).max(-1)
    left = None
    if vectors:
        at = torch.arange(op.batch, device=op.device), place
        left = torch.zeros(op.batch, n, d_v, dtype=op.dtype, device=op.device)
        left[at] = torch.linalg.svd(blocks[at], full_matrices=False).U[..., 0]
    value, rounding = top.cpu(), 8 * (d_v + blocks.shape[-1]) * torch.finfo(op.dtype).eps
    norm = solved(op, value * (1 - rounding), value * (1 + rounding), steps=d_v, left=left)
    return widened(norm, roundoff.tensors + d_v**0.5 * roundoff.products, tol)
