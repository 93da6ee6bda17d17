r"""Our bounds where single tokens move: norms of the blocks of J, added up over rows or columns,
and Lemma 95 (docs/theory/token_bounds.md).

Symbols: docs/theory/notation.md. Proofs: docs/theory/token_bounds.md. Heads with variants:
`lipbound.bounds.ours.pairwise_variants` and `lipbound.bounds.ours.single_token_variants`.
"""

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.variants import VARIANTS
from lipbound.bounds import conditions
from lipbound.bounds.ours import BIBTEX, CITATION
from lipbound.bounds.ours.block_norms import BlockNorms, in_chunks, longest, weights_of
from lipbound.bounds.ours.pairwise_variants import ROWS, together
from lipbound.bounds.ours.rounded_products import lengths, mean, outer, root
from lipbound.bounds.ours.single_token_variants import VariantRows, largest_row
from lipbound.bounds.registry import bound
from lipbound.bounds.whole_layer_rules import with_folded
from lipbound.linalg.matrix_norms import UNIT, gamma, symmetric_norm


@bound(
    "lipbound_every",
    label="lipbound, every token",
    citation=CITATION,
    bibtex=BIBTEX,
    statement="||J||^2 <= max_i (sum_j d_ij) ||sum_j J_ij J_ij^T / d_ij||, d_ij upper values of "
    "||J_ij||",
    statement_latex=r"$\|J\|^2 \le \max_i (\sum_j d_{ij}) \|\sum_j J_{ij} J_{ij}^T / d_{ij}\|$, "
    r"$d_{ij}$ upper values of $\|J_{ij}\|$",
    source="Lemma 95 in the documentation of lipbound",
    assumptions="any biases, any mask",
    condition=conditions.always,
    cost="O(N^2 d_v (d + d_v)), fewer rows where some stand out",
    layer=with_folded,
    longest=longest,
    differentiable=False,
    norm="every-token",
)
@memoised
def lipbound_every(att: Attention) -> Tensor:
    r"""How far an output token can move when every token moves by at most 1: 3 to 6 % above the
    exact value on pretrained heads (geometric mean).

    .. math::
        \|J\| \le \max_i \Big(\sum_j d_{ij}\Big)^{1/2} \Big\|\sum_j J_{ij} J_{ij}^T /
        d_{ij}\Big\|^{1/2}

    It holds for all :math:`d_{ij} > 0`; at upper values of :math:`\|J_{ij}\|` it is at most
    ``lipbound_every_block``: Lemmas 94, 95 and 96 (docs/theory/token_bounds.md). The matrices are
    d_v x d_v, in closed form, for heads with variants too. Rows are taken in the order of their
    sums of norms, until those that are left cannot be the largest.
    """
    return in_chunks(att, _refined, [_root_count(att)])[..., 0]


@bound(
    "lipbound_every_block",
    label="lipbound, rows of blocks",
    citation=CITATION,
    bibtex=BIBTEX,
    statement="||J|| <= max_i sum_j ||J_ij||, with upper values of the norms of the blocks of J",
    statement_latex=r"$\|J\| \le \max_i \sum_j \|J_{ij}\|$, with upper values of the norms of "
    r"the blocks of J",
    source="Lemma 94 in the documentation of lipbound",
    assumptions="any biases, any mask",
    condition=conditions.always,
    cost="O(N^2 d d_v)",
    layer=with_folded,
    longest=longest,
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


@bound(
    "lipbound_one",
    label="lipbound, columns of blocks",
    citation=CITATION,
    bibtex=BIBTEX,
    statement="||J|| <= max_j (sum_i ||J_ij||^2)^(1/2), with upper values of the norms of the "
    "blocks of J",
    statement_latex=r"$\|J\| \le \max_j (\sum_i \|J_{ij}\|^2)^{1/2}$, with upper values of the "
    r"norms of the blocks of J",
    source="Lemma 94 in the documentation of lipbound",
    assumptions="any biases, any mask",
    condition=conditions.always,
    cost="O(N^2 d d_v)",
    layer=with_folded,
    longest=longest,
    norm="one-token",
)
def lipbound_one(att: Attention) -> Tensor:
    r"""The largest norm of a column of upper values of the norms of the blocks of J: what one token
    can do to the whole output.

    .. math:: \max_j \|J_{:j}\| \le \max_j \Big(\sum_i \|J_{ij}\|^2\Big)^{1/2}

    Blocks as for ``lipbound_every_block``: Lemmas 94 and 96 (docs/theory/token_bounds.md).
    """
    return _sums(att)[..., 1]


@lipbound_every.extends(*VARIANTS, condition=conditions.always, layer=with_folded, longest=longest)
@memoised
def _every(att: Attention) -> Tensor:
    def values(one: Attention, sample: int, heads: slice) -> Tensor:
        return torch.stack(
            [VariantRows(one, sample, h).value() for h in range(*heads.indices(one.heads))]
        )[:, None]

    return in_chunks(att, values, [_root_count(att)])[..., 0]


@lipbound_every_block.extends(
    *VARIANTS, condition=conditions.always, layer=with_folded, longest=longest
)
def _every_block(att: Attention) -> Tensor:
    return together(att)[..., ROWS]


@lipbound_one.extends(*VARIANTS, condition=conditions.always, layer=with_folded, longest=longest)
def _one(att: Attention) -> Tensor:
    return together(att)[..., ROWS + 1]


def _root_count(att: Attention) -> float:
    """At least the root of N: how much larger than its spectral norm a matrix can be in the
    every-token norm."""
    return att.tokens**0.5 * (1 + 4 * UNIT)


@memoised
def _sums(att: Attention) -> Tensor:
    """Of the norms of blocks: the largest sum of a row, and length of a column, (samples, heads,
    2)."""

    def values(one: Attention, sample: int, heads: slice) -> Tensor:
        sizes = TokenBlocks(one, sample, heads).sizes
        return torch.stack([sizes.sum(-1).amax(-1), root(sizes.square().sum(-2)).amax(-1)], -1)

    return in_chunks(att, values, [_root_count(att), 1.0])


def _refined(att: Attention, sample: int, heads: slice) -> Tensor:
    """`lipbound_every` of some heads of one sample, (heads, 1)."""
    rows = BlockRows(att, sample, heads)
    return torch.stack([rows.largest(h) for h in range(len(rows.blocks.sizes))])[:, None]


class TokenBlocks:
    r"""Upper values of the norms of the blocks of J, for some heads of one sample of a float64
    layer; but for `positive_slack`: Lemma 96 (docs/theory/token_bounds.md).

    Attributes:
        parts: what they are made of. z: :math:`z_i = W_V^T \tilde q_i`, (heads, N, d_v).
        inner: upper values of :math:`\|W_V^T + (v_j - o_i) \tilde q_i^T\|`, (heads, N, N). sizes:
            of :math:`\|J_{ij}\|`, (heads, N, N).
    """

    def __init__(self, att: Attention, sample: int, heads: slice):
        self.parts = parts = BlockNorms(att, sample, heads)
        inputs, d, d_v = att.x.shape[2], att.d, att.d_v
        *_, size_k, size_v = (w[heads] for w in weights_of(att))
        w_k, w_v, distance = att.w_k[heads], att.w_v[heads], parts.distance
        self.z = att.scale * att.q[sample, heads] @ (w_k.mT @ w_v)
        off = gamma(inputs + d + 4) * parts.size * (size_k * size_v)[:, None]
        length = self.z.norm(dim=-1) + off

        along = self.z @ parts.v.mT - (parts.o * self.z).sum(-1, keepdim=True)  # (v_j - o_i) . z_i
        across = lengths(parts.v)[:, None] + lengths(parts.o)[..., None]
        along = (
            along
            + off[..., None] * distance.detach()
            + gamma(d_v + 6) * across * length.detach()[..., None]
        )
        reach = distance * length[..., None]
        along = torch.minimum(torch.maximum(along, -reach), reach)
        squares = (parts.qt_norm * distance) ** 2
        most, slack = (squares + 2 * reach).detach(), gamma(inputs + 2 * d + 2 * d_v + 64)
        total = squares + 2 * along
        under = total**2 + 4 * (reach - along) * (reach + along) + 64 * slack * most**2
        top = ((total + root(under)) / 2 + 16 * slack * most).clamp_min(0)
        self.inner = root(parts.norm_v**2 + top)
        self.sizes = parts.p * self.inner + torch.diag_embed(parts.b)


class BlockRows:
    """What Lemma 95 (docs/theory/token_bounds.md) makes of each row of blocks, for some heads of
    one sample of a float64 layer."""

    def __init__(self, att: Attention, sample: int, heads: slice):
        self.blocks = blocks = TokenBlocks(att, sample, heads)
        self.totals = blocks.sizes.sum(-1)
        self._att, parts = att, blocks.parts
        self._q, self._k = att.q[sample, heads], att.centred_k[sample, heads]
        self._w_q, self._w_k, self._w_v = (w[heads] for w in (att.w_q, att.w_k, att.w_v))
        factor_q, _, _, _, size_q, size_k, size_v = (w[heads] for w in weights_of(att))
        self._factor = factor_q
        self._keys, self._mean_k = outer(parts.v, self._k), parts.p @ self._k
        # Frobenius norms of the parts of blocks, absolute values taken: what rounding is relative
        # to
        length_k, length_v, length_o = lengths(self._k), lengths(parts.v), lengths(parts.o)
        self._by_query = (
            abs(att.scale)
            * (mean(parts.p, length_v * length_k) + length_o * mean(parts.p, length_k))
            * size_q[:, None]
        )
        self._inner = (
            size_v[:, None, None] + parts.distance * (parts.size * size_k[:, None])[..., None]
        )

    def largest(self, head: int) -> Tensor:
        """The largest value of a row."""
        n, d_v = self.blocks.z.shape[1:]
        return largest_row(self.totals[head], lambda rows: self._norms(head, rows), n * d_v)

    def _norms(self, head: int, rows: Tensor) -> Tensor:
        """Upper values of the largest eigenvalues of sum_j J_ij J_ij^T / d_ij for some rows,
        (rows,)."""
        att, blocks, parts = self._att, self.blocks, self.blocks.parts
        at = torch.arange(len(rows), device=rows.device)
        p, h, b, o = (
            parts.p[head, rows],
            blocks.inner[head, rows],
            parts.b[head, rows],
            parts.o[head, rows],
        )
        own = p[at, rows] * h[at, rows] + b  # d_ii; the other d_ij are P_ij h_ij
        weight = torch.where(own > 0, 1 / torch.where(own > 0, own, 1.0), 0.0)
        factor = torch.where(h > 0, p / torch.where(h > 0, h, 1.0), 0.0)  # P_ij^2 / d_ij
        mixed = p[at, rows] * weight
        factor[at, rows] = p[at, rows] * mixed

        a, z, w_v = parts.v[head] - o[:, None], blocks.z[head, rows], self._w_v[head]
        c = att.scale * (
            (p @ self._keys[head]).unflatten(-1, (-1, att.d))
            - o[..., None] * self._mean_k[head, rows][:, None]
        )
        q = att.scale * self._q[head, rows]
        side = (factor[:, None] @ a)[:, 0]
        cross = side[:, :, None] * z[:, None]
        through_k = (c @ (self._w_q[head].mT @ self._w_k[head] @ q[..., None]))[..., 0]  # B_i q~_i
        own_cross = c @ (self._w_q[head].mT @ w_v) + through_k[:, :, None] * a[at, rows][:, None]
        cross = cross + mixed[:, None, None] * own_cross
        by_query = c @ self._factor[head].mT
        total = factor.sum(-1)[:, None, None] * (w_v.mT @ w_v) + cross + cross.mT
        total = total + parts.qt_norm[head, rows, :, None] ** 2 * (a.mT * factor[:, None]) @ a
        total = total + weight[:, None, None] * by_query @ by_query.mT
        inner, mine = self._inner[head, rows], self._by_query[head, rows]
        sizes = (factor * inner**2).sum(-1) + 2 * mixed * inner[at, rows] * mine + weight * mine**2
        return (
            symmetric_norm(total)
            + gamma(4 * (att.x.shape[2] + att.tokens + att.d + att.d_v) + 100) * sizes
        )
