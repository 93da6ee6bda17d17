r"""Compression of the blocks of J, and of those of :math:`J J^T`, to the matrix of their norms: costlier and sharper than `lipbound.bounds.ours`."""

import torch
from torch import Tensor

from lipbound.attention import Attention
from lipbound.bounds import quantities as qty
from lipbound.bounds.registry import bound
from lipbound.gram import Gram
from lipbound.linalg import block_norm, nonnegative_norm


def compressed_norm(gram: Gram) -> float:
    r"""Theorem 1 for any stacking of heads: :math:`\|J\| \le \|[\|G_{ik}\|]_{ik}\|^{1/2}`, rounding of G included."""
    sizes = torch.zeros(gram.tokens, gram.tokens, dtype=torch.float64, device=gram.device)
    for rows, cols, tile in gram.tiles():
        norms = block_norm(tile.transpose(1, 2))
        sizes[rows, cols] = norms
        if rows != cols:
            sizes[cols, rows] = norms.mT
    return float((nonnegative_norm(sizes) + gram.error).sqrt() * (1 + 1e-12))


@bound(
    "lipbound_gram",
    label="lipbound, blocks of JJ^T",
    citation="lipbound2026",
    statement="||J||^2 <= ||[ ||G_ik|| ]_ik||, G_ik = sum_j J_ij J_kj^T the blocks of J J^T by token pairs",
    source="lipbound.bounds.ours_gram",
    assumptions="any biases, any mask",
    condition=qty.always,
    cost="O(N^3 d_v^2)",
    costly=True,
)
def lipbound_gram(att: Attention) -> Tensor:
    r"""Gram compression: within about 5 % of the exact norm on pretrained heads. Deterministic, in float64.

    .. math:: \|J\| \le \big\|\,[\|G_{ik}\|]_{ik}\,\big\|^{1/2},\quad G = J J^T

    *Proof.* :math:`\|J\|^2 = \|G\|`, and a block matrix is no larger in norm than the matrix of its blocks' norms. It is never above
    the compression of J itself: :math:`\|G_{ik}\| \le \sum_j \|J_{ij}\|\|J_{kj}\|`, the entries of :math:`C C^T` with :math:`C = [\|J_{ij}\|]`.
    QED

    The blocks come from their closed form (`lipbound.gram`), tile by tile, and the rounding error of G is added. Norms of blocks are upper values
    (`lipbound.linalg.block_norm`). With a ``w_o`` per head folded into the values this bounds "head_out"; for whole layers see
    `lipbound.bounds.multihead`.
    """
    with torch.no_grad():
        rows = [[compressed_norm(Gram(att, s, [h])) for h in range(att.heads)] for s in range(att.samples)]
    return torch.tensor(rows, dtype=torch.float64, device=att.device)
