r"""Our own closed-form bounds: compression of the blocks of :math:`J J^T`, and of J, by token pairs.

Notation, for one head: :math:`o_i = \sum_j P_{ij} v_j`, :math:`A_i` (d_v x N) with columns :math:`P_{ij}(v_j - o_i)`,
:math:`C_i = A_i K` (d_v x d), :math:`\tilde q_i = c\,W_K q_i`, :math:`B_i = c\,C_i W_Q^T` with :math:`c` = ``scale``. The block of J from token j
to output i is

.. math:: J_{ij} = P_{ij} W_V^T + A_i[:,j]\,\tilde q_i^T + \delta_{ij} B_i
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds import ingredients as qty
from lipbound.bounds.lipbound2026 import BIBTEX, CITATION
from lipbound.bounds.lipbound2026.parts import RTOL, BlockNorms, in_chunks, root
from lipbound.bounds.lipbound2026.terms import block_terms, gram_terms
from lipbound.bounds.multihead import with_folded
from lipbound.bounds.registry import bound
from lipbound.linalg.matrix_norms import UNIT, matrix_norm, nonnegative_norm, symmetric_norm

BLOCK = "lipbound_block"
"""Key of its values among what a layer remembers."""


@bound(
    "lipbound",
    label="lipbound (ours)",
    citation=CITATION,
    bibtex=BIBTEX,
    statement="||J||^2 <= min(||E + K||, ||E|| + L), N x N matrices of norms of the blocks of J J^T (see its docstring)",
    source="lipbound.bounds.lipbound2026.plain",
    assumptions="any biases, any mask",
    condition=qty.always,
    cost="O(N^3 + N^2 d d_v)",
    terms=gram_terms,
    layer=with_folded,
)
def lipbound(att: Attention) -> Tensor:
    r"""Path-Gram compression: within a factor of about 1.3 of the exact norm on pretrained heads, in float64.

    With :math:`S = P P^T`, :math:`E_{ij} = P_{ij}|v_j - o_i|`, :math:`z_i = W_V^T \tilde q_i` and
    :math:`a_{ik} = \min((E P^T)_{ik}, \|A_i\| |P_k|)`, let

    .. math::
        X_{ik} &= P_{ik}\,\|B_k W_V\| + P_{ki}\,|B_i \tilde q_k|\,|v_i - o_k| + |z_i|\,a_{ik} \\
        E_0 &= S\,\|W_V\|^2 + \mathrm{diag}\,\|B_i\|^2 + X + X^T \\
        K_{ik} &= |\tilde q_i \cdot \tilde q_k|\,\min(\|A_i\|\|A_k\|, (E E^T)_{ik}) \\
        L &= \min\big(\|\mathrm{diag}(\|A_i\|)\,\tilde Q\|^2,\ \|\textstyle\sum_i |\tilde q_i|^2 A_i^T A_i\|\big)

    Then :math:`\|J\|^2 \le \min(\|E_0 + K\|, \|E_0\| + L)`.

    *Proof.* Write :math:`J = J_V + J_K + J_Q` after the three terms of its blocks. Block (i, k) of :math:`J J^T` is a sum of their products:

    - (V,V): :math:`S_{ik} W_V^T W_V`, and (Q,Q): :math:`\delta_{ik} B_i B_i^T`;
    - (V,Q): :math:`P_{ik} W_V^T B_k^T`, and (Q,K): :math:`P_{ki} B_i \tilde q_k (v_i - o_k)^T`, each with its transpose;
    - (K,V), with its transpose: :math:`(\sum_j P_{kj} A_i[:,j])\,z_i^T`, where the sum is at most :math:`a_{ik}` long, by the triangle
      inequality or as :math:`A_i P_k`;
    - (K,K): :math:`(\tilde q_i \cdot \tilde q_k) A_i A_k^T`, where :math:`\|A_i A_k^T\| \le \min(\|A_i\|\|A_k\|, \sum_j E_{ij} E_{kj})`.

    So block (i, k) has norm at most :math:`(E_0 + K)_{ik}`. A block matrix is no larger in norm than the matrix of its blocks' norms, which
    grows with its entries: the first branch. For the second, leave :math:`J_K J_K^T` out of the compression. Its row blocks are
    :math:`\tilde q_i^T \otimes A_i`. Pulling out :math:`\|A_i\|` leaves a block diagonal contraction times
    :math:`\mathrm{diag}(\|A_i\|) \tilde Q \otimes I`; pulling out :math:`|\tilde q_i|` leaves the Schur product of the correlation matrix
    :math:`\hat q_i \cdot \hat q_k` with the positive semi-definite :math:`[|\tilde q_i||\tilde q_k| A_i A_k^T]`, which does not increase its norm,
    that of :math:`\sum_i |\tilde q_i|^2 A_i^T A_i`. QED

    J depends on keys and values only through differences, so both are centred first; the norms of small matrices are upper values
    (`lipbound.linalg.matrix_norms.block_norm`, within 1 %). Memory O(N^2 + N d d_v) per head. Differentiable in all that enters J (not ``b_k``,
    ``b_v``); where the norm of a matrix has no derivative (several equal top singular values), the derivative is that along one of its top pairs.
    With rotary position embeddings, normalised queries and keys, capped scores or sinks: `lipbound.bounds.lipbound2026.variants`.
    """

    def make() -> Tensor:
        values = in_chunks(att, _lipbound)
        att.memo(BLOCK, lambda: values[..., 1])  # its parts are the same numbers, whichever bound needs them first
        return values[..., 0]

    return att.memo("lipbound", make)


@bound(
    "lipbound_block",
    label="lipbound, blocks of J",
    citation=CITATION,
    bibtex=BIBTEX,
    statement="||J|| <= ||[P_ij (||W_V|| + |v_j - o_i| |c W_K q_i|)]_ij + diag ||B_i|| ||, an N x N matrix",
    source="lipbound.bounds.lipbound2026.plain",
    assumptions="any biases, any mask",
    condition=qty.always,
    cost="O(N^2 d d_v)",
    terms=block_terms,
    layer=with_folded,
)
def lipbound_block(att: Attention) -> Tensor:
    r"""Compression of J itself: about 2 times the exact norm on pretrained heads.

    .. math:: \|J\| \le \big\|\,[P_{ij}(\|W_V\| + |v_j - o_i||\tilde q_i|)]_{ij} + \mathrm{diag}\,\|B_i\|\,\big\|

    *Proof.* The entries bound the norms of the blocks of J, by the triangle inequality; a block matrix is no larger in norm than the
    matrix of its blocks' norms: :math:`|\sum y_i^T J_{ij} x_j| \le \sum |y_i|\|J_{ij}\||x_j|`. QED
    """
    return att.memo(BLOCK, lambda: in_chunks(att, _block)[..., 1])


def _block(att: Attention, sample: int, heads: slice) -> Tensor:
    """`lipbound_block` for some heads of one sample, twice, (heads, 2): laid out as by `_lipbound`, so that norms over heads round alike."""
    return BlockNorms(att, sample, heads).block()[:, None].expand(-1, 2)


def _lipbound(att: Attention, sample: int, heads: slice) -> Tensor:
    """Both bounds for some heads of one sample, (heads, 2)."""
    parts = BlockNorms(att, sample, heads, gram=True)
    v, o, qt, a, size, n = parts.v, parts.o, parts.qt, parts.a, parts.size, att.tokens
    e0 = parts.values() + parts.queries() + parts.mixed()
    kk = parts.keys()

    rows = parts.p * qt.norm(dim=-1, keepdim=True)
    pair = rows.mT @ rows
    shifted = (v @ v.mT) * pair
    mixed = (rows * (o @ v.mT - (o * o).sum(-1, keepdim=True) / 2)).mT @ rows
    allowance = (1e-13 + 2 * n * UNIT) * n * pair.detach().diagonal(dim1=-2, dim2=-1).amax(-1) * size[:, 0] ** 2
    second = symmetric_norm(shifted - mixed - mixed.mT) + allowance
    key = torch.minimum(matrix_norm(a[..., None] * qt) ** 2, second)
    squared = torch.minimum(nonnegative_norm(e0 + kk, rtol=RTOL), nonnegative_norm(e0, rtol=RTOL) + key)
    return torch.stack([root(squared) * (1 + 1e-11), parts.block()], -1)
