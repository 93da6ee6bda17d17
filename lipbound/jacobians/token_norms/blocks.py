r"""The blocks of a layer's Jacobian, and the float64 tensors that they are made of.

Rows of blocks :math:`J_{ij}` are worked on many at once, without forming them.

:math:`J_{ij}`, from token j to output token i, is
:math:`\sum_h E_h^T (P_{ij} W_V^T + A_i[:,j]\,\tilde q_{ij}^T + [i = j]\,B_i)` with the symbols of
head h, E_h its slice of the output projection or of the identity: Lemmas 1 and 6
(docs/theory/jacobian.md).
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import tensor_errors
from lipbound.attention.variants.base import SIDES, TokenMap
from lipbound.jacobians.head import HeadOperator
from lipbound.linalg.matrix_norms import gamma, matrix_norm

SLOPE = 4.0
"""Absolute values in the factors of a token's map have a norm that is larger than that of the map
by this factor at most: Lemma 87 (docs/theory/token_norms.md)."""
_VANISHED = 1e-100
"""Norms this small, in the units of a layer of ordinary size, may come of squares that underflow.
"""


def _forms(x: Tensor, m: Tensor, y: Tensor) -> Tensor:
    """Sums over heads h, g of x_h m_hg y_g, (..., n).

    From (..., h, n), (..., h, g, n or 1) and (..., g, n).
    """
    return (x * (m * y[..., None, :, :]).sum(-2)).sum(-2)


@dataclass(frozen=True, eq=False)
class Blocks:
    r"""Blocks of some output tokens of a batch of maps, float64.

    Shapes: b maps, i output tokens of each, h heads that share an input, n tokens, d_v values, m
    coordinates of a token's perturbation, r of an output. A row is one output token of one map.

    Attributes:
        p, t: P and what changes of scores are weighted with, (b, i, h, n).
        v, o: values, (b, h, n, d_v), and outputs, (b, i, h, d_v).
        to_v: :math:`D^{vT}_j`, of values, (b, h, n or 1, m, d_v).
        qt: :math:`\tilde q_{ij}`, (b, i, h, n or 1, m). own: :math:`B_i^T`, (b, i, h, m, d_v).
        token: which token a row is, (b, i).
        w_o: slices of the output projection, (h, d_v, r), or None for heads side by side.
        size: upper values of the Frobenius norms of blocks with absolute values inside, (b, i, n):
            Lemma 87 (docs/theory/token_norms.md).
        roundings: how many an entry of what is computed from blocks sees at most.
    """

    p: Tensor
    t: Tensor
    v: Tensor
    o: Tensor
    to_v: Tensor
    qt: Tensor
    own: Tensor
    token: Tensor
    w_o: Tensor | None
    size: Tensor
    roundings: int

    @property
    def width(self) -> int:
        """r, of an output token."""
        return self.p.shape[2] * self.v.shape[-1] if self.w_o is None else self.w_o.shape[2]

    def select(self, chosen: Tensor) -> Self:
        """Some rows (k, 2), as k maps with one output token each."""
        b, i = chosen.unbind(-1)
        names = ("p", "t", "o", "qt", "own", "token", "size")
        rows = {name: getattr(self, name)[b, i][:, None] for name in names}
        return replace(self, v=self.v[b], to_v=self.to_v[b], **rows)

    # -- what all products share -------------------------------------------------------------------

    @cached_property
    def a(self) -> Tensor:
        """A_i, (b, i, h, n, d_v)."""
        return self.t[..., None] * (self.v[:, None] - self.o[..., None, :])

    @cached_property
    def _values(self) -> Tensor:
        """Products of the maps of values between heads, (b, h, g, n or 1, d_v, d_v)."""
        return torch.einsum("bhnmv,bgnmw->bhgnvw", self.to_v, self.to_v)

    @cached_property
    def _keys(self) -> Tensor:
        """Products of the q-tilde of heads, (b, i, h, g, n or 1)."""
        return torch.einsum("bihnm,bignm->bihgn", self.qt, self.qt)

    @cached_property
    def _cross(self) -> Tensor:
        """Values' map of head g times the q-tilde of head h, (b, i, h, g, n or 1, d_v)."""
        return torch.einsum("bihnm,bgnmv->bihgnv", self.qt, self.to_v)

    @cached_property
    def _own_place(self) -> Tensor:
        """[i = j], (b, i, n) bool."""
        return self.token[..., None] == torch.arange(self.p.shape[-1], device=self.p.device)

    def _at_own(self, x: Tensor) -> Tensor:
        """Entries (b, i, ..., n) at the row's own token, (b, i, ...)."""
        index = self.token.view(*self.token.shape, *(1,) * (x.ndim - 2)).expand(*x.shape[:-1], 1)
        return x.gather(-1, index)[..., 0] if x.shape[-1] > 1 else x[..., 0]

    @cached_property
    def full(self) -> Tensor:
        """J_ii^T head by head, (b, i, h, m, d_v)."""
        to_v = self.to_v.transpose(1, 2)  # of the own token, (b, i or 1, h, m, d_v)
        if to_v.shape[1] > 1:
            to_v = to_v[torch.arange(len(to_v), device=to_v.device)[:, None], self.token]
        values = self._at_own(self.p)[..., None, None] * to_v
        keys = self._at_own(self.qt.mT)[..., None] * self._at_own(self.a.mT)[..., None, :]
        return values + keys + self.own

    # -- products for the search, whose rounding does not matter -----------------------------------

    def pulled(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Lengths :math:`|J_{ij}^T y|`, (b, i, s, n), under cotangents y, (b, i, s, h, d_v).

        And what they are made of: :math:`A_i[:,j] \cdot y`, (b, i, s, h, n), and the products of
        values' images with the q-tilde, (b, i, s, h, g, n or 1).
        """
        shift = torch.einsum("bishv,bihv->bish", y, self.o)[..., None]
        alpha = (torch.einsum("bishv,bhnv->bishn", y, self.v) - shift) * self.t[:, :, None]
        p = self.p[:, :, None]
        values = torch.einsum("bishv,bhgnvw,bisgw->bishgn", y, self._values, y)
        cross = torch.einsum("bihgnv,bisgv->bishgn", self._cross, y)
        keys = _forms(alpha, self._keys[:, :, None], alpha)
        squares = _forms(p, values, p) + 2 * _forms(alpha, cross, p) + keys
        own = torch.einsum("bihmv,bishv->bism", self.full, y).square().sum(-1)
        squares = torch.where(self._own_place[:, :, None], own[..., None], squares)
        return squares.clamp_min(0).sqrt(), alpha, cross

    def ascend(self, y: Tensor, *, together: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        r"""One step :math:`y \mapsto \sum_j J_{ij} J_{ij}^T y / |J_{ij}^T y|`, normalised.

        Lemma 89 (docs/theory/token_norms.md).

        Args:
            y: unit vectors, (b, i, s, r).
            together: s of them make one matrix of Frobenius norm one, and lengths are Frobenius
                norms.

        Returns:
            The step; lengths before it, (b, i, s or 1, n); and their sums, (b, i, s or 1).
        """
        if self.w_o is None:
            heads = y.unflatten(-1, (self.p.shape[2], -1))
        else:
            heads = torch.einsum("bisr,hvr->bishv", y, self.w_o)
        lengths, alpha, cross = self.pulled(heads)
        if together:
            lengths = lengths.square().sum(2, keepdim=True).sqrt()
        w = torch.where(lengths > 0, 1 / lengths.clamp_min(1e-300), 0.0)
        z = self._weighted(heads, w, alpha, cross)
        norm = torch.linalg.vector_norm(z, dim=(2, 3) if together else 3, keepdim=True)
        return torch.where(norm > 0, z / norm.clamp_min(1e-300), y), lengths, lengths.sum(-1)

    def _weighted(self, y: Tensor, w: Tensor, alpha: Tensor, cross: Tensor) -> Tensor:
        r""":math:`\sum_j w_j J_{ij} J_{ij}^T y`, (b, i, s, r), from what `pulled` made of y."""
        own = self._at_own(w.expand(*y.shape[:3], -1))[..., None, None]
        w = torch.where(self._own_place[:, :, None], 0.0, w)[..., None, :]
        p, t = self.p[:, :, None].expand_as(alpha), self.t[:, :, None]
        values = (cross * p[..., None, :, :]).sum(-2)
        keys = (self._keys[:, :, None] * alpha[..., None, :, :]).sum(-2)
        back = (values + keys) * t * w  # of qt . J^T y, (b, i, s, h, n)
        z = torch.einsum("bishn,bhnv->bishv", back, self.v)
        z = z - back.sum(-1)[..., None] * self.o[:, :, None]
        z = z + torch.einsum("bishn,bisgn,bhgnvw,bisgw->bishv", p * w, p, self._values, y)
        z = z + torch.einsum("bishn,bisgn,bihgnv->bisgv", w * alpha, p, self._cross)
        through = torch.einsum("bihmv,bishv->bism", self.full, y)
        z = z + own * torch.einsum("bihmv,bism->bishv", self.full, through)
        return z.flatten(3) if self.w_o is None else torch.einsum("bishv,hvr->bisr", z, self.w_o)

    # -- matrices with known rounding --------------------------------------------------------------

    def matrix(self, w: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\sum_j w_{ij} J_{ij} J_{ij}^T` for weights w >= 0 (b, i, n), (b, i, r, r).

        And bounds on the 2-norm of its rounding error, (b, i): Lemma 87
        (docs/theory/token_norms.md).
        """
        own, w_rest = self._at_own(w)[..., None, None], torch.where(self._own_place, 0.0, w)
        heads = range(self.p.shape[2])
        parts: dict[tuple[int, int], Tensor] = {}
        for h, g in ((h, g) for h in heads for g in heads if g >= h):
            mine = own * (self.full[:, :, h].mT @ self.full[:, :, g])
            parts[h, g] = self._between(h, g, w_rest) + mine
            parts[g, h] = parts[h, g] if h == g else parts[h, g].mT
        lines = [torch.cat([parts[h, g] for g in heads], -1) for h in heads]
        stacked = torch.cat(lines, -2)
        if self.w_o is not None:
            w_o = self.w_o.flatten(0, 1)
            stacked = w_o.mT @ stacked @ w_o
        return stacked, gamma(self.roundings) * (w * self.size.square()).sum(-1) * (1 + 1e-6)

    def _between(self, h: int, g: int, w: Tensor) -> Tensor:
        """The sum of `matrix` for heads h and g, own blocks apart, (b, i, d_v, d_v)."""
        p_h, p_g, a_h, a_g = self.p[:, :, h], self.p[:, :, g], self.a[:, :, h], self.a[:, :, g]
        values = torch.einsum("bin,bnvw->bivw", w * p_h * p_g, self._values[:, h, g])
        weighted = a_h * w[..., None]  # where weights are large, they are of small entries
        keys = (weighted * self._keys[:, :, h, g][..., None]).mT @ a_g
        by_h = torch.einsum("binv,binw->bivw", weighted * p_g[..., None], self._cross[:, :, h, g])
        by_g = torch.einsum("binv,binw->biwv", a_g * (w * p_h)[..., None], self._cross[:, :, g, h])
        return values + keys + by_h + by_g

    def single(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """J_ij^T for some (map, row, token j), (k, 3): (k, m, r), and bounds on its rounding, (k,).

        The latter in the 2-norm.
        """
        b, i, j = chosen.unbind(-1)
        at = j if self.qt.shape[3] > 1 else torch.zeros_like(j)
        alpha = self.t[b, i, :, j, None] * (self.v[b, :, j] - self.o[b, i])  # (k, h, d_v)
        values = self.to_v[b, :, j if self.to_v.shape[2] > 1 else torch.zeros_like(j)]
        parts = self.p[b, i, :, j, None, None] * values
        parts = parts + self.qt[b, i, :, at][..., None] * alpha[..., None, :]
        mine = (j == self.token[b, i])[:, None, None, None]
        parts = parts + torch.where(mine, self.own[b, i], 0.0)
        out = parts.transpose(1, 2).flatten(2)
        out = out if self.w_o is None else out @ self.w_o.flatten(0, 1)
        return out, gamma(self.roundings) * self.size[b, i, j] * (1 + 1e-6)

    def norm_bounds(self) -> Tensor:
        """Upper values of the norms of blocks, (b, i, n), from those of a block's three parts.

        Lemma 92 (docs/theory/token_norms.md).
        """
        reach = torch.linalg.vector_norm(self.a, dim=-1) * torch.linalg.vector_norm(self.qt, dim=-1)
        each = self.p * matrix_norm(self.to_v)[:, None] + reach
        own = torch.linalg.matrix_norm(self.own)[..., None]
        each = each + torch.where(self._own_place[:, :, None], own, 0.0)
        if self.w_o is None:
            whole = torch.linalg.vector_norm(each, dim=2)
        else:
            whole = torch.einsum("bihn,h->bin", each, matrix_norm(self.w_o))
        return (whole + gamma(self.roundings) * self.size) * (1 + 1e-9)


@dataclass(frozen=True, eq=False)
class LayerTensors:
    r"""Tensors of b maps of h heads that share an input, (b, h, ...), float64.

    Attributes:
        p, t: P and its weights, (b, h, n, n). q, k: (b, h, n, d).
        v, o: values and outputs, (b, h, n, d_v).
        to_q, to_k: :math:`D^{qT}_j` times the scale, and the same of keys, (b, h, n or 1, m, d).
            to_v: of values, without scale, (b, h, n or 1, m, d_v).
        w_o: slices of the output projection, (h, d_v, r), or None.
        q_size, k_size, v_size: upper values of the Frobenius norms of these maps with absolute
            values in their factors, the largest of all tokens, (b, h).
        roundings: how many an entry of what is computed from blocks sees at most.
    """

    p: Tensor
    t: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    to_q: Tensor
    to_k: Tensor
    to_v: Tensor
    w_o: Tensor | None
    q_size: Tensor
    k_size: Tensor
    v_size: Tensor
    roundings: int

    @staticmethod
    def of(att: Attention, op: HeadOperator, *, together: bool, project: bool) -> "LayerTensors":
        """Tensors of a float64 layer.

        Args:
            att: the layer.
            op: the Jacobians of its heads.
            together: all heads of a sample are one map, in the coordinates of X; else each is one,
                in those of ``op``.
            project: with the output projection.
        """
        shape = (att.samples, att.heads) if together else (att.samples * att.heads, 1)
        e, c, w_o = tensor_errors(att), abs(att.scale), att.w_o if project else None
        w = (op.w if together else op.rows.coordinates).split(op.sizes[:3], -1)
        basis = None if together or op.rows.everything else op.rows.basis
        extra = None if op.extra is None else op.extra[op.sample]  # (batch, n, D, 1 or 2)
        roundings = 3 * att.tokens + 2 * att.x.shape[2] + 10 * (att.d + att.d_v) + 200
        roundings += 2 * att.heads if together else 2
        if w_o is not None:
            roundings += 2 * (att.heads * att.d_v + w_o.shape[2])
        if extra is not None and basis is not None:
            roundings += int(2 * att.x.shape[2] * basis.shape[-1] ** 0.5)
            extra = basis[op.head].mT[:, None] @ extra
        columns = [] if extra is None else list(extra.unbind(-1))
        maps = [
            _token_maps(to, part[op.head], columns.pop(0) if to.extra else None, part.shape[-1])
            for to, part in zip((op.to_q, op.to_k, op.to_v), w, strict=True)
        ]
        sizes = [SLOPE * slope for slope in (c * e.q_slope, c * e.k_slope, e.v_slope)]
        if not op.to_v.steps:
            own = torch.linalg.matrix_norm(w[2]) * (1 + 1e-6)
            sizes[2] = own[op.head].view(att.samples, att.heads)
        v = att.centred_v
        every = {"p": att.p, "t": att.weights, "q": att.q, "k": att.centred_k, "v": v}
        every |= {"o": att.p @ v, **{f"{a}_size": t for a, t in zip(SIDES, sizes, strict=True)}}
        tensors: dict[str, Any] = {a: t.reshape(*shape, *t.shape[2:]) for a, t in every.items()}
        to = {f"to_{a}": t.view(*shape, *t.shape[1:]) for a, t in zip(SIDES, maps, strict=True)}
        return LayerTensors(**tensors, **to, w_o=w_o, roundings=roundings)

    def of_maps(self, maps: slice) -> Self:
        """Some of the maps."""
        names = (f.name for f in fields(self) if f.name not in ("w_o", "roundings"))
        tensors: dict[str, Any] = {name: getattr(self, name)[maps] for name in names}
        return replace(self, **tensors)

    @property
    def tokens(self) -> int:
        """N."""
        return self.p.shape[-1]

    @property
    def row_bytes(self) -> int:
        """Memory of one output token of one map while its blocks are worked on."""
        _, h, n, d_v = self.v.shape
        varied = self.to_k.shape[2] > 1 or self.to_v.shape[2] > 1
        between = h * h * (n * (d_v + 1) if varied else d_v + 1)
        wide = self.to_v.shape[3] * ((n if varied else 1) + 2 * d_v)
        return 8 * (h * (n * (3 * d_v + 12) + wide) + between + 3 * (h * d_v) ** 2)

    @property
    def vanished(self) -> Tensor:
        """Far more than what underflows can take from a norm, (b,); zero where J is."""
        q, v = (torch.linalg.vector_norm(x, dim=-1).amax(-1) for x in (self.q, self.v))
        k = torch.linalg.vector_norm(self.k, dim=-1).amax(-1)
        size = self.v_size + v * (k * self.q_size + q * self.k_size + (v > 0))
        return torch.where(size > 0, _VANISHED * (1 + self._projected(size)), 0.0).sum(-1)

    def _projected(self, size: Tensor) -> Tensor:
        """Sizes (b, h, ...) of heads after the output projection."""
        if self.w_o is None:
            return size
        return size * torch.linalg.matrix_norm(self.w_o).view(-1, *(1,) * (size.ndim - 2))

    @cached_property
    def size(self) -> Tensor:
        """`Blocks.size` of all blocks, (b, n, n)."""
        apart = torch.cdist(self.o, self.v, compute_mode="donot_use_mm_for_euclid_dist")
        lengths = self.t * apart  # of columns of A_i
        q, k = (torch.linalg.vector_norm(x, dim=-1) for x in (self.q, self.k))
        size = self.p * self.v_size[..., None, None]
        size = size + lengths * (q * self.k_size[..., None])[..., None]
        own = (lengths * k[:, :, None]).sum(-1) * self.q_size[..., None]
        return self._projected(size + torch.diag_embed(own)).sum(1) * (1 + 1e-6)

    def rows(self, rows: slice | Tensor) -> Blocks:
        """Blocks of some output tokens of every map."""
        p, t, q, o = (x[:, :, rows] for x in (self.p, self.t, self.q, self.o))
        a = t[..., None] * (self.v[:, :, None] - o[..., None, :])  # (b, h, i, n, d_v)
        own_q = self.to_q if self.to_q.shape[2] == 1 else self.to_q[:, :, rows]
        own = own_q @ (a.mT @ self.k[:, :, None]).mT  # (b, h, i, m, d_v)
        qt = torch.einsum("bhnmd,bhid->bhinm", self.to_k, q)
        token = torch.arange(self.tokens, device=p.device)[rows].expand(len(p), -1)
        p, t, o, qt, own = (x.transpose(1, 2) for x in (p, t, o, qt, own))
        size = self.size[:, rows]
        return Blocks(p, t, self.v, o, self.to_v, qt, own, token, self.w_o, size, self.roundings)

    def squares(self, tokens: slice, *, columns: bool) -> tuple[Tensor, Tensor]:
        """`columns` of some tokens, or the same of rows, with bounds on their rounding."""
        if columns:
            return self.columns(tokens)
        blocks = self.rows(tokens)
        return blocks.matrix(torch.ones_like(blocks.size))

    def columns(self, tokens: slice) -> tuple[Tensor, Tensor]:
        r""":math:`\sum_i J_{ij}^T J_{ij}` of some tokens j, (b, j, m, m), and its rounding, (b, j).

        The latter in the 2-norm: Lemma 88 (docs/theory/token_norms.md).
        """
        heads = range(self.p.shape[1])
        p, t = (x[..., tokens].mT for x in (self.p, self.t))  # (b, h, j, i)
        a = t[..., None] * (self.v[:, :, tokens, None] - self.o[:, :, None])  # (b, h, j, i, d_v)
        near = self.v[:, :, None] - self.o[:, :, tokens, None]
        near = self.t[:, :, tokens, :, None] * near  # A_j, (b, h, j, n, d_v)
        c = near.mT @ self.k[:, :, None]  # C_j, (b, h, j, d_v, d)
        each = (
            x if x.shape[2] == 1 else x[:, :, tokens] for x in (self.to_v, self.to_k, self.to_q)
        )
        maps = torch.cat([x.expand(*c.shape[:3], -1, -1) for x in each], -1)
        place = torch.arange(self.tokens, device=p.device)[tokens]
        out = torch.zeros_like(p[:, 0, :, :1, None])
        for h in heads:
            for g in heads if self.w_o is not None else (h,):
                out = out + maps[:, h] @ self._inner(h, g, p, a, c, place) @ maps[:, g].mT
        squares = self.size[:, :, tokens].square().sum(1)
        return out, gamma(self.roundings) * squares * (1 + 1e-6)

    def _inner(self, h: int, g: int, p: Tensor, a: Tensor, c: Tensor, place: Tensor) -> Tensor:
        """Products over all outputs of what arrives in values, keys and queries of heads h and g.

        (b, j, d_v + 2 d, d_v + 2 d).
        """
        (p_h, p_g), (a_h, a_g), (c_h, c_g), (q_h, q_g) = (
            (x[:, h], x[:, g]) for x in (p, a, c, self.q)
        )
        if self.w_o is None:
            between = torch.eye(self.v.shape[-1], dtype=p.dtype, device=p.device)
            b_g, b_h = a_g, a_h
        else:
            between = self.w_o[h] @ self.w_o[g].mT
            b_g, b_h = a_g @ (self.w_o[g] @ self.w_o[h].mT), a_h @ between
        vv = (p_h * p_g).sum(-1)[..., None, None] * between
        vk = (b_g * p_h[..., None]).mT @ q_g[:, None]
        kv = ((b_h * p_g[..., None]).mT @ q_h[:, None]).mT
        kk = (q_h[:, None] * (a_h * b_g).sum(-1)[..., None]).mT @ q_g[:, None]
        d_g, d_h = between @ c_g, between.mT @ c_h
        at = torch.arange(len(place), device=place.device), place
        own_p_h, own_p_g, own_a_h, own_a_g = (x[:, *at] for x in (p_h, p_g, a_h, a_g))
        vq, qv = own_p_h[..., None, None] * d_g, (own_p_g[..., None, None] * d_h).mT
        kq = q_h[:, place][..., None] * (own_a_h[..., None, :] @ d_g)
        qk = (q_g[:, place][..., None] * (own_a_g[..., None, :] @ d_h)).mT
        lines = [vv, vk, vq], [kv, kk, kq], [qv, qk, c_h.mT @ d_g]
        return torch.cat([torch.cat(line, -1) for line in lines], -2)


def _token_maps(to: TokenMap, w: Tensor, extra: Tensor | None, d: int) -> Tensor:
    """Maps from a token's query or key back to its perturbation, (batch, n or 1, m, d).

    Of projections w (batch, m, d) and extra directions (batch, n, m).
    """
    if not to.steps:
        return w[:, None]
    each = (to.matrices(entry, slice(None), d) for entry in range(len(w)))
    inner = torch.stack([m for m in each if m is not None])
    out = w[:, None] @ inner[:, :, :d]
    return out if extra is None else out + extra[..., None] * inner[:, :, d:]
