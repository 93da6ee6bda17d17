r"""Our closed-form bounds: compression of the blocks of :math:`J J^T`, and of J, by token pairs.

Symbols: docs/theory/notation.md. In short :math:`A_i` (d_v x N) has columns
:math:`P_{ij}(v_j - o_i)`, :math:`\tilde q_i = c\,W_K q_i` and :math:`B_i = c\,A_i K W_Q^T` with
:math:`c` = ``scale``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.cache import keep_result, memoised
from lipbound.attention.layer import Attention
from lipbound.bounds import conditions
from lipbound.bounds.ours import BIBTEX
from lipbound.bounds.ours.block_norms import (
    MATRICES,
    RTOL,
    BlockNorms,
    in_chunks,
    longest,
    root,
    samples_of,
)
from lipbound.bounds.registry import bound
from lipbound.bounds.statement import Bound
from lipbound.bounds.whole_layer_rules import with_folded
from lipbound.devices import Routine, require
from lipbound.linalg.matrix_norms import (
    gamma,
    matrix_norm,
    nonnegative_routine,
    singular_pair,
    symmetric_norm,
)

PARTS: dict[str, Any] = {"condition": conditions.always, "layer": with_folded, "longest": longest}
"""Facts that are the same for every formula of our bounds, whatever the heads have."""


def our_bound(name: str, **facts: Any) -> Callable[[Callable[[Attention], Tensor]], Bound]:
    """Decorator: `bound` with what our bounds share."""
    return bound(name, bibtex=BIBTEX, assumptions="any biases, any mask", **PARTS, **facts)


def gram_terms(bound: Bound, att: Attention) -> dict[str, Tensor]:
    """Shares of the terms of ``lipbound``, at the top eigenvector of its first branch's matrix."""

    def terms(sample: Attention) -> dict[str, Tensor]:
        parts = BlockNorms(sample, gram=True)
        names = ("values", "keys", "queries", "mixed")
        return {name: getattr(parts, name)() for name in names}

    return _shares(att, terms)


def block_terms(bound: Bound, att: Attention) -> dict[str, Tensor]:
    """Shares of the terms of ``lipbound_block``, at the top singular pair of its matrix."""

    def terms(sample: Attention) -> dict[str, Tensor]:
        parts = BlockNorms(sample)
        moved = parts.p * parts.distance * parts.qt_norm
        own = torch.diag_embed(parts.b)
        return {"values": parts.p * parts.norm_v, "keys": moved, "queries": own}

    return _shares(att, terms)


def _shares(att: Attention, terms: Callable[[Attention], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Shares of matrices (heads, N, N) in the norm of their sum, (samples, heads) each."""
    most = MATRICES * att.heads * 8.0 * att.tokens**2
    what = f"terms of our bounds at {att.tokens} tokens need matrices over all their pairs"
    require(most, att.device, what, "measure shorter inputs or fewer heads")
    found: dict[str, list[Tensor]] = {}
    for sample, *_ in samples_of(att):
        parts = terms(sample)
        left, right = singular_pair(torch.stack(list(parts.values())).sum(0))
        forms = {name: (left.mT @ term @ right)[..., 0, 0] for name, term in parts.items()}
        whole = torch.stack(list(forms.values())).sum(0)
        for name, form in forms.items():
            share = torch.where(whole > 0, form / torch.where(whole > 0, whole, 1.0), 0.0)
            found.setdefault(name, []).append(share)
    return {name: torch.stack(values) for name, values in found.items()}


@our_bound(
    "lipbound",
    label="lipbound",
    statement_latex=r"$\|J\|^2 \le \min(\|E + K\|, \|E\| + L)$, $N \times N$ matrices of norms "
    r"of the blocks of $J J^T$ (see its docstring)",
    source="Lemma 16 in the documentation of lipbound",
    cost="O(N^3 + N^2 d d_v)",
    terms=gram_terms,
)
@memoised
def lipbound(att: Attention) -> Tensor:
    r"""Path-Gram compression: within a factor of about 1.3 of the exact norm on pretrained heads.

    With :math:`S = P P^T`, :math:`E_{ij} = P_{ij}|v_j - o_i|`, :math:`z_i = W_V^T \tilde q_i` and
    :math:`a_{ik} = \min((E P^T)_{ik}, \|A_i\| |P_k|)`, let

    .. math::
        X_{ik} &= P_{ik}\,\|B_k W_V\| + P_{ki}\,|B_i \tilde q_k|\,|v_i - o_k| + |z_i|\,a_{ik} \\
        E_0 &= S\,\|W_V\|^2 + \mathrm{diag}\,\|B_i\|^2 + X + X^T \\
        K_{ik} &= |\tilde q_i \cdot \tilde q_k|\,\min(\|A_i\|\|A_k\|, (E E^T)_{ik}) \\
        L &= \min\big(\|\mathrm{diag}(\|A_i\|)\,\tilde Q\|^2,
            \|\textstyle\sum_i |\tilde q_i|^2 A_i^T A_i\|\big)

    Then :math:`\|J\|^2 \le \min(\|E_0 + K\|, \|E_0\| + L)`.

    This is Lemma 16 (docs/theory/bounds.md): norms of the terms of each block of :math:`J J^T`,
    compressed.

    J depends on keys and values only through differences, so both are centred first; the norms of
    small matrices are upper values (`lipbound.linalg.matrix_norms.block_norm`, within 1 %). Memory
    O(N^2 + N d d_v) per head.
    Differentiable in all that enters J (not ``b_k``, ``b_v``); where the norm of a matrix has no
    derivative (several equal top singular values), the derivative is that along one of its top
    pairs.

    The matrices over all pairs of tokens, 17 and one for each head, may take 4 GB: 5,271 tokens for
    one head, 4,153 for twelve. For longer inputs take the enclosure of the exact norm, which is
    cheaper there. With rotary position embeddings, normalised queries and keys, capped scores or
    sinks: `lipbound.bounds.ours.pairwise_variants`.
    """
    values = in_chunks(att, _lipbound, several=True)
    keep_result(_compressed, att, values[..., 1])  # the same numbers, whichever bound comes first
    return values[..., 0]


@our_bound(
    "lipbound_block",
    label="lipbound, blocks of J",
    statement_latex=r"$\|J\| \le \|\,[P_{ij} (\|W_V\| + |v_j - o_i| |\mathrm{scale}\,W_K "
    r"q_i|)]_{ij} + \mathrm{diag}\,\|B_i\|\,\|$, an $N \times N$ matrix",
    source="Lemma 15 in the documentation of lipbound",
    cost="O(N^2 d d_v)",
    terms=block_terms,
)
def lipbound_block(att: Attention) -> Tensor:
    r"""Compression of J itself: about 2 times the exact norm on pretrained heads.

    .. math::
        \|J\| \le \big\|\,[P_{ij}(\|W_V\| + |v_j - o_i||\tilde q_i|)]_{ij} +
        \mathrm{diag}\,\|B_i\|\,\big\|

    The entries bound the norms of the blocks of J: Lemmas 14 and 15 (docs/theory/bounds.md). As
    long inputs as for ``lipbound``.
    """
    return _compressed(att)


@memoised
def _compressed(att: Attention) -> Tensor:
    """`lipbound_block`, (samples, heads)."""
    return in_chunks(att, _block, several=True)[..., 1]


def _block(att: Attention, heads: slice) -> Routine[Tensor]:
    """`lipbound_block` for some heads, twice, (samples x heads, 2).

    Laid out as by `_lipbound`, so that norms over heads round alike.
    """
    norm = yield from nonnegative_routine(BlockNorms(att, heads).block(), rtol=RTOL)
    return norm[:, None].expand(-1, 2)


def _lipbound(att: Attention, heads: slice) -> Routine[Tensor]:
    """Both bounds for some heads, (samples x heads, 2)."""
    parts = BlockNorms(att, heads, gram=True)
    v, o, a = parts.v, parts.o, parts.a
    e0, moved = parts.values() + parts.queries() + parts.mixed(), a[..., None] * parts.qt
    sizes = (e0 + parts.keys(), e0, parts.block())
    whole, without, block = yield from nonnegative_routine(torch.stack(sizes), rtol=RTOL)
    key = (matrix_norm(moved) + (a.detach() * parts.off_qt).norm(dim=-1)) ** 2

    rows = parts.p * parts.qt_norm
    far = v.detach().norm(dim=-1)[..., None, :] + o.detach().norm(dim=-1)[..., :, None]
    off = gamma(att.tokens + att.d_v + 10) * (rows.detach() * far).square().sum((-1, -2))
    # a diagonal entry of the matrix whose norm may be smaller
    least = (rows.detach() * parts.distance.detach()).square().sum(-2).amax(-1)
    open_, near = ~_decided(key, least, without, whole), key.device.type == "cpu"
    # a GPU would wait for which these are for longer than it multiplies
    i = open_.nonzero()[:, 0] if near else torch.arange(len(key), device=key.device)
    if len(i):  # the second number of L, where it may be what decides
        rows, v, o = rows[i], v[i], o[i]
        mixed = (rows * (o @ v.mT - (o * o).sum(-1, keepdim=True) / 2)).mT @ rows
        second = (v @ v.mT) * (rows.mT @ rows) - mixed - mixed.mT
        least = _quotient(second.detach()) + off[i]
        (known,) = yield [_decided(key[i], least, without[i], whole[i])]
        left = (~known).nonzero()[:, 0].to(key.device)
        if len(left):
            # on a GPU two rounds: 1e-3 above at most, 1e-9 where an eigenvalue stands alone
            i, other = i[left], symmetric_norm(second[left], rounds=2)
            key = key.index_put((i,), torch.minimum(key[i], other + off[i]))
    return torch.stack([root(torch.minimum(whole, without + key)), block], -1)


def _decided(key: Tensor, least: Tensor, without: Tensor, whole: Tensor) -> Tensor:
    """Return which bounds a second number of L of at least ``least`` cannot lower, (heads,)."""
    return (key <= least) | (without + least >= whole)


def _quotient(g: Tensor) -> Tensor:
    """Rayleigh quotients of symmetric matrices (heads, n, n) near their largest eigenvalues.

    After two steps from the largest column, (heads,).
    """
    column = g.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
    y = g.gather(-2, column.expand(-1, 1, g.shape[-1]))
    for _ in range(2):
        y = y @ g
        y = y / y.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return (y * (y @ g)).sum((-1, -2))
