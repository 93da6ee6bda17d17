r"""Our bounds where single tokens move.

Norms of the blocks of J, added up over rows or columns, and Lemma 95 (docs/theory/token_bounds.md).
Symbols: docs/theory/notation.md. Proofs: docs/theory/token_bounds.md. Of heads with variants blocks
of J are as in `lipbound.jacobians.token_tangents`, their weights from Lemma 97
(docs/theory/token_bounds.md).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.variants import LINEAR_VALUES
from lipbound.bounds import conditions
from lipbound.bounds.ours import BIBTEX, CITATION
from lipbound.bounds.ours.block_norms import (
    CHUNK,
    BlockNorms,
    in_chunks,
    lengths,
    longest,
    mean,
    outer,
    root,
    weights_of,
)
from lipbound.bounds.ours.pairwise_variants import ROWS, together
from lipbound.bounds.ours.token_block_norms import VariantHead
from lipbound.bounds.registry import bound
from lipbound.bounds.whole_layer_rules import with_folded
from lipbound.linalg.matrix_norms import UNIT, gamma, symmetric_norm

AT_ONCE = 16
"""Rows whose matrices are formed together, those with the largest sums of norms first."""


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
    r"""The largest norm of a column of upper values of the norms of the blocks of J.

    It bounds what one token can do to the whole output.

    .. math:: \max_j \|J_{:j}\| \le \max_j \Big(\sum_i \|J_{ij}\|^2\Big)^{1/2}

    Blocks as for ``lipbound_every_block``: Lemmas 94 and 96 (docs/theory/token_bounds.md).
    """
    return _sums(att)[..., 1]


@lipbound_every.extends(
    *LINEAR_VALUES, condition=conditions.always, layer=with_folded, longest=longest
)
@memoised
def _every(att: Attention) -> Tensor:
    return in_chunks(att, _refined_variants, [_root_count(att)])[..., 0]


@lipbound_every_block.extends(
    *LINEAR_VALUES, condition=conditions.always, layer=with_folded, longest=longest
)
def _every_block(att: Attention) -> Tensor:
    return together(att)[..., ROWS]


@lipbound_one.extends(
    *LINEAR_VALUES, condition=conditions.always, layer=with_folded, longest=longest
)
def _one(att: Attention) -> Tensor:
    return together(att)[..., ROWS + 1]


def _root_count(att: Attention) -> float:
    """The root of N or a little more: the every-token norm may exceed the spectral norm by it."""
    return att.tokens**0.5 * (1 + 4 * UNIT)


@memoised
def _sums(att: Attention) -> Tensor:
    """Largest sum of a row, and length of a column, of the norms of blocks, (samples, heads, 2)."""

    def values(one: Attention, heads: slice) -> Tensor:
        sizes = TokenBlocks(one, heads).sizes
        return torch.stack([sizes.sum(-1).amax(-1), root(sizes.square().sum(-2)).amax(-1)], -1)

    return in_chunks(att, values, [_root_count(att), 1.0])


def _refined(att: Attention, heads: slice) -> Tensor:
    """`lipbound_every` of some heads of one sample, (heads, 1)."""
    rows = BlockRows(att, heads)
    return torch.stack([rows.largest(h) for h in range(len(rows.blocks.sizes))])[:, None]


def _refined_variants(att: Attention, heads: slice) -> Tensor:
    """`lipbound_every` of some heads with variants of one sample, (heads, 1)."""
    found = [VariantBlockRows(att, h).largest() for h in range(*heads.indices(att.heads))]
    return torch.stack(found)[:, None]


def largest_row(totals: Tensor, norms: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """The largest over rows i of min(t_i, (t_i n_i)^(1/2)), NaN if one is.

    Args:
        totals: t, (N,).
        norms: n of some rows, given by their numbers; asked for in the order of ``totals``, until
            what is left lies below what is found.
        width: numbers that a row of blocks has.
    """
    totals, order = totals.sort(descending=True)
    found = torch.zeros_like(totals[0])
    step = max(1, min(AT_ONCE, CHUNK // (8 * width)))
    for i in range(0, len(totals), step):
        if not bool(totals[i] > found):
            return totals[i] if bool(totals[i].isnan()) else found
        most = totals[i : i + step]
        each = torch.minimum(root(most * norms(order[i : i + step])), most)
        found = torch.maximum(found, each.amax())
    return found


class TokenBlocks:
    r"""Upper values of the norms of the blocks of J, for some heads of a layer of one sample.

    But for the allowance of `Bound`: Lemma 96 (docs/theory/token_bounds.md).

    Attributes:
        parts: what they are made of. z: :math:`z_i = W_V^T \tilde q_i`, (heads, N, d_v).
        inner: upper values of :math:`\|W_V^T + (v_j - o_i) \tilde q_i^T\|`, (heads, N, N). sizes:
            of :math:`\|J_{ij}\|`, (heads, N, N).
    """

    def __init__(self, att: Attention, heads: slice):
        self.parts = parts = BlockNorms(att, heads)
        w, inputs = weights_of(att), att.x.shape[2]
        w_k, w_v, distance = att.w_k[heads], att.w_v[heads], parts.distance
        self.z = z = att.scale * att.q[0, heads] @ (w_k.mT @ w_v)
        off = gamma(inputs + att.d + 4) * parts.size * (w.size_k * w.size_v)[heads, None]
        length = z.norm(dim=-1) + off

        along = z @ parts.v.mT - (parts.o * z).sum(-1, keepdim=True)  # (v_j - o_i) . z_i
        across = lengths(parts.v)[:, None] + lengths(parts.o)[..., None]
        along = along + off[..., None] * distance.detach()
        along = along + gamma(att.d_v + 6) * across * length.detach()[..., None]
        reach = distance * length[..., None]
        along = torch.minimum(torch.maximum(along, -reach), reach)
        squares = (parts.qt_norm * distance) ** 2
        most = (squares + 2 * reach).detach()
        slack, total = gamma(inputs + 2 * att.d + 2 * att.d_v + 64), squares + 2 * along
        under = total**2 + 4 * (reach - along) * (reach + along) + 64 * slack * most**2
        top = ((total + root(under)) / 2 + 16 * slack * most).clamp_min(0)
        self.inner = root(parts.norm_v**2 + top)
        self.sizes = parts.p * self.inner + torch.diag_embed(parts.b)


class RowWeights:
    """Weights of the sum of Lemma 95 (docs/theory/token_bounds.md) for some rows of blocks.

    Attributes:
        own: 1 / d_ii. mixed: P_ii / d_ii, (rows,). factor: P_ij^2 / d_ij, (rows, N).
    """

    def __init__(self, rows: Tensor, p: Tensor, inner: Tensor, b: Tensor):
        self._at = at = torch.arange(len(rows), device=rows.device), rows
        own = p[at] * inner[at] + b  # d_ii; the other d_ij are P_ij inner_ij
        self.own = torch.where(own > 0, 1 / torch.where(own > 0, own, 1.0), 0.0)
        self.factor = torch.where(inner > 0, p / torch.where(inner > 0, inner, 1.0), 0.0)
        self.mixed = p[at] * self.own
        self.factor[at] = p[at] * self.mixed

    def sizes(self, inner: Tensor, mine: Tensor) -> Tensor:
        """Sizes that rounding is relative to, (rows,), from norms of the parts of blocks."""
        own = 2 * self.mixed * inner[self._at] * mine + self.own * mine**2
        return (self.factor * inner**2).sum(-1) + own


class BlockRows:
    """The sums of Lemma 95 (docs/theory/token_bounds.md), for some heads of one sample."""

    def __init__(self, att: Attention, heads: slice):
        self.blocks = blocks = TokenBlocks(att, heads)
        self._att, parts = att, blocks.parts
        self._q, self._k = att.scale * att.q[0, heads], att.centred_k[0, heads]
        self._w_q, self._w_k, self._w_v = (w[heads] for w in (att.w_q, att.w_k, att.w_v))
        w = weights_of(att)
        self._factor = w.factor_q[heads]
        self._keys, self._mean_k = outer(parts.v, self._k), parts.p @ self._k
        # Frobenius norms of the parts of blocks with absolute values inside
        length_k, length_v, length_o = lengths(self._k), lengths(parts.v), lengths(parts.o)
        sums = mean(parts.p, length_v * length_k) + length_o * mean(parts.p, length_k)
        self._mine = abs(att.scale) * sums * w.size_q[heads, None]
        reach = (parts.size * w.size_k[heads, None])[..., None]
        self._inner = w.size_v[heads, None, None] + parts.distance * reach

    def largest(self, head: int) -> Tensor:
        """The largest value of a row."""
        n, d_v = self.blocks.z.shape[1:]
        totals = self.blocks.sizes[head].sum(-1)
        return largest_row(totals, lambda rows: self._norms(head, rows), n * d_v)

    def _norms(self, head: int, rows: Tensor) -> Tensor:
        """Upper values of the norms of sum_j J_ij J_ij^T / d_ij for some rows, (rows,)."""
        att, blocks, parts = self._att, self.blocks, self.blocks.parts
        p, o, q = parts.p[head, rows], parts.o[head, rows], self._q[head, rows]
        weights = RowWeights(rows, p, blocks.inner[head, rows], parts.b[head, rows])
        a, z, w_v = parts.v[head] - o[:, None], blocks.z[head, rows], self._w_v[head]
        c = (p @ self._keys[head]).unflatten(-1, (-1, att.d))
        c = att.scale * (c - o[..., None] * self._mean_k[head, rows][:, None])
        factor = weights.factor[:, None]
        through_k = (c @ (self._w_q[head].mT @ self._w_k[head] @ q[..., None]))[..., 0]  # B_i q~_i
        own_a = a[torch.arange(len(rows), device=rows.device), rows]
        own = c @ (self._w_q[head].mT @ w_v) + through_k[:, :, None] * own_a[:, None]
        cross = (factor @ a)[:, 0, :, None] * z[:, None] + weights.mixed[:, None, None] * own
        by_query = c @ self._factor[head].mT
        total = weights.factor.sum(-1)[:, None, None] * (w_v.mT @ w_v) + cross + cross.mT
        total = total + parts.qt_norm[head, rows, :, None] ** 2 * (a.mT * factor) @ a
        total = total + weights.own[:, None, None] * by_query @ by_query.mT
        sizes = weights.sizes(self._inner[head, rows], self._mine[head, rows])
        widths = att.x.shape[2] + att.tokens + att.d + att.d_v
        return symmetric_norm(total) + gamma(4 * widths + 100) * sizes


class VariantBlockRows:
    """The sums of `BlockRows` for one head of one sample, any variant, padding left out."""

    def __init__(self, att: Attention, h: int):
        self.head = head = VariantHead(att, h)
        p = head.p
        self._slope = torch.where(p > 0, head.t / torch.where(p > 0, p, 1.0), 0.0)
        steep, found = self._slope * head.distance, head.token_vectors(inner=False, squarings=2)
        self._length, self._b = found.length, found.b
        squares = head.norm_v**2 + 2 * steep * found.image + (steep * found.length) ** 2
        self._h = squares.sqrt()
        size_k = head.tangents.size("k", head.kept)
        self._inner = head.size_v + steep * size_k * head.size[:, None]
        self._mine = head.by_query(slice(None))

    def largest(self) -> Tensor:
        """The largest value of a row, but for the allowance of `Bound`."""
        head, totals = self.head, (self.head.p * self._h).sum(-1) + self._b
        found = largest_row(totals, self._norms, len(totals) * head.width)
        return found * head.unit * (1 + gamma(10 * head.width + 200))

    def _norms(self, rows: Tensor) -> Tensor:
        """Upper values of the norms of sum_j J_ij J_ij^T / d_ij for some rows, (rows,)."""
        head, n = self.head, len(self.head.p)
        o, q, w_v = head.o[rows], head.q[rows], head.w_v
        weights = RowWeights(rows, head.p[rows], self._h[rows], self._b[rows])
        c, own = head.covariances(rows), head.kept[rows]
        m_q, m_k, m_v = (head.tangents.product("q", a, own) for a in "qkv")
        own_a = self._slope[rows, rows, None] * (head.v[rows] - o)
        through_k = (c @ m_k @ q[..., None])[..., 0]
        cross = weights.mixed[:, None, None] * (c @ m_v + through_k[:, :, None] * own_a[:, None])
        total = weights.factor.sum(-1)[:, None, None] * (w_v.mT @ w_v)
        step = max(1, CHUNK // (8 * len(rows) * head.width))
        for part in (slice(j, j + step) for j in range(0, n, step)):
            a = self._slope[rows, part, None] * (head.v[None, part] - o[:, None])  # (rows, j, d_v)
            z = q @ head.tangents.product("k", "v", head.kept[part])
            z = z.expand(a.shape[1], -1, -1).transpose(0, 1)
            factor = weights.factor[:, part]
            cross = cross + (a.mT * factor[:, None]) @ z
            total = total + (a.mT * (factor * self._length[rows, part] ** 2)[:, None]) @ a
        total = total + cross + cross.mT + weights.own[:, None, None] * c @ m_q @ c.mT
        sizes = weights.sizes(self._inner[rows], self._mine[rows])
        d, d_v = head.q.shape[1], w_v.shape[1]
        widths = head.inputs + n + 2 * d + 2 * d_v
        return symmetric_norm(total) + gamma(8 * widths + 200) * sizes
