r"""Our bounds where single tokens move.

Norms of the blocks of J, added up over rows or columns, and Lemma 95 (docs/theory/token_bounds.md).
Symbols: docs/theory/notation.md. Proofs: docs/theory/token_bounds.md. Of heads with variants blocks
of J are as in `lipbound.jacobians.token_tangents`, their weights from Lemma 97
(docs/theory/token_bounds.md).
"""

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.variants import LINEAR_VALUES
from lipbound.bounds.ours.block_norms import CHUNK, in_chunks, root, sharp_block_norms
from lipbound.bounds.ours.pairwise import PARTS, our_bound
from lipbound.bounds.ours.pairwise_variants import BY_TOKENS, variant_bounds
from lipbound.bounds.ours.token_block_norms import VariantHead
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.token_norms.blocks import LayerTensors
from lipbound.jacobians.token_norms.row_search import bounded
from lipbound.linalg.matrix_norms import UNIT, gamma

_FLOOR = 1e-6
"""A hundred times what d is at least, relative to the sizes of the parts of blocks."""
AT_ONCE = 16
"""Rows whose matrices are formed together, those with the largest sums of norms first."""


@our_bound(
    "lipbound_every",
    label="lipbound, every token",
    statement_latex=r"$\|J\|^2 \le \max_i (\sum_j d_{ij}) \|\sum_j J_{ij} J_{ij}^T / d_{ij}\|$, "
    r"$d_{ij}$ upper values of $\|J_{ij}\|$",
    source="Lemma 95 in the documentation of lipbound",
    cost="O(N^2 d_v (d + d_v)), fewer rows where some stand out",
    covers=LINEAR_VALUES,
    differentiable=False,
    norm="every-token",
)
@memoised
def lipbound_every(att: Attention) -> Tensor:
    r"""A bound on the move of any output token when every token moves by at most 1.

    3 to 6 % above the exact value on pretrained heads (geometric mean).

    .. math::
        \|J\| \le \max_i \Big(\sum_j d_{ij}\Big)^{1/2} \Big\|\sum_j J_{ij} J_{ij}^T /
        d_{ij}\Big\|^{1/2}

    It holds for all :math:`d_{ij} > 0`; at upper values of :math:`\|J_{ij}\|` it is at most
    ``lipbound_every_block``: Lemmas 94, 95 and 96 (docs/theory/token_bounds.md). The matrices are
    d_v x d_v, in closed form, for heads with variants too. Rows are taken in the order of their
    sums of norms, until those that are left cannot be the largest.
    """
    return in_chunks(att, _refined, [_root_count(att)])[..., 0]


@our_bound(
    "lipbound_every_block",
    label="lipbound, rows of blocks",
    statement_latex=r"$\|J\| \le \max_i \sum_j \|J_{ij}\|$, with upper values of the norms of "
    r"the blocks of J",
    source="Lemma 94 in the documentation of lipbound",
    cost="O(N^2 d d_v)",
    norm="every-token",
)
def lipbound_every_block(att: Attention) -> Tensor:
    r"""The largest sum over a row of upper values of the norms of the blocks of J.

    .. math::
        \|J\| \le \max_i \sum_j \big(P_{ij} (\|W_V\|^2 + \lambda_{ij})^{1/2} + [i = j]\,\|B_i\|\big)

    with :math:`\lambda_{ij}` the largest eigenvalue of
    :math:`a z_i^T + z_i a^T + |\tilde q_i|^2 a a^T`, :math:`a = v_j - o_i`,
    :math:`z_i = W_V^T \tilde q_i`: Lemmas 94 and 96 (docs/theory/token_bounds.md). With rotation,
    normalised queries and keys, cap or sinks the blocks are those of Lemma 97
    (docs/theory/token_bounds.md).
    """
    return _sums(att)[..., 0]


@our_bound(
    "lipbound_one",
    label="lipbound, columns of blocks",
    statement_latex=r"$\|J\| \le \max_j (\sum_i \|J_{ij}\|^2)^{1/2}$, with upper values of the "
    r"norms of the blocks of J",
    source="Lemma 94 in the documentation of lipbound",
    cost="O(N^2 d d_v)",
    norm="one-token",
)
def lipbound_one(att: Attention) -> Tensor:
    r"""The largest norm of a column of upper values of the norms of the blocks of J.

    It bounds what one token can do to the whole output.

    .. math:: \max_j \|J_{:j}\| \le \max_j \Big(\sum_i \|J_{ij}\|^2\Big)^{1/2}

    Blocks as for ``lipbound_every_block``: Lemmas 94 and 96 (docs/theory/token_bounds.md).
    """
    return _sums(att)[..., 1]


lipbound_every_block.extends(*LINEAR_VALUES, **PARTS)(
    lambda att: variant_bounds(att)[..., BY_TOKENS]
)
lipbound_one.extends(*LINEAR_VALUES, **PARTS)(lambda att: variant_bounds(att)[..., BY_TOKENS + 1])


def _root_count(att: Attention) -> float:
    """The root of N or a little more: the every-token norm may exceed the spectral norm by it."""
    return att.tokens**0.5 * (1 + 4 * UNIT)


@memoised
def _sums(att: Attention) -> Tensor:
    """Largest sum of a row, and length of a column, of the norms of blocks, (samples, heads, 2)."""

    def values(one: Attention, heads: slice) -> Tensor:
        sizes = sharp_block_norms(one, heads)
        return torch.stack([sizes.sum(-1).amax(-1), root(sizes.square().sum(-2)).amax(-1)], -1)

    return in_chunks(att, values, [_root_count(att), 1.0], several=True)


def _variant_sizes(head: VariantHead, att: Attention) -> Tensor:
    """Upper values of the norms of blocks of a head with variants, (N, N), zero at padding.

    Lemma 97 (docs/theory/token_bounds.md).
    """
    p, found = head.p, head.token_vectors(inner=False, squarings=2)
    squares = (p * head.norm_v) ** 2 + 2 * p * head.e * found.image + (head.e * found.length) ** 2
    sizes = (root(squares) + torch.diag_embed(found.b)) * head.unit
    out = sizes.new_zeros(att.tokens, att.tokens)
    out[head.kept[:, None], head.kept] = sizes * (1 + gamma(10 * head.width + 200))
    return out


def _refined(att: Attention, heads: slice) -> Tensor:
    """`lipbound_every` of some heads of one sample, (heads, 1).

    Matrices and their rounding are those of the exact norm: Lemma 87 (docs/theory/token_norms.md).
    """
    every, found = range(*heads.indices(att.heads)), []
    each = (_variant_sizes(VariantHead(att, h), att) for h in every)
    for h, d in zip(every, each if att.variants else sharp_block_norms(att, heads), strict=True):
        one = att.select(heads=slice(h, h + 1))
        parts = LayerTensors.of(one, HeadJacobian(one), together=True, project=False)
        found.append(_largest_row(parts, d))
    return torch.stack(found)[:, None]


def _largest_row(parts: LayerTensors, d: Tensor) -> Tensor:
    """The largest over rows of the smaller of a sum of d (N, N) and its matrix, NaN if one is.

    Rows are taken in the order of these sums, until what is left lies below what is found: Lemma 95
    (docs/theory/token_bounds.md).
    """
    totals, order = d.sum(-1).sort(descending=True)
    found, step = torch.zeros_like(totals[0]), max(1, min(AT_ONCE, CHUNK // parts.row_bytes))
    for i in range(0, len(totals), step):
        if not bool(totals[i] > found):
            return totals[i] if bool(totals[i].isnan()) else found
        rows = order[i : i + step]
        # of what overflows there are the sums
        each = torch.fmin(bounded(parts.rows(rows), d[None, rows], _FLOOR)[0], totals[i : i + step])
        found = torch.maximum(found, each.amax())
    return found
