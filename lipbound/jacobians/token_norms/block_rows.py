r"""Rows of blocks :math:`J_{ij}` of an attention Jacobian, many at once, without forming them.

:math:`J_{ij}`, from token j to output token i, is
:math:`\sum_h E_h^T (P_{ij} W_V^T + A_i[:,j]\,\tilde q_{ij}^T + [i = j]\,B_i)` with the symbols of
head h, E_h its slice of the output projection or of the identity: Lemmas 1 and 6
(docs/theory/jacobian.md).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from lipbound.linalg.matrix_norms import gamma, matrix_norm


def _forms(x: Tensor, m: Tensor, y: Tensor) -> Tensor:
    """Sums over heads h, g of x_h m_hg y_g, (..., n).

    From (..., h, n), (..., h, g, n or 1) and (..., g, n).
    """
    if x.shape[-2] == 1:
        return x[..., 0, :] * m[..., 0, 0, :] * y[..., 0, :]
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
    def rows(self) -> tuple[int, int]:
        """Maps, and output tokens of each."""
        return self.p.shape[0], self.p.shape[1]

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

    @property
    def _own_values(self) -> Tensor:
        """Maps of values of the row's own token, (b, i or 1, h, m, d_v)."""
        maps = self.to_v.transpose(1, 2)
        if maps.shape[1] == 1:
            return maps
        return maps[torch.arange(len(maps), device=maps.device)[:, None], self.token]

    @cached_property
    def full(self) -> Tensor:
        """J_ii^T head by head, (b, i, h, m, d_v)."""
        values = self._at_own(self.p)[..., None, None] * self._own_values
        keys = self._at_own(self.qt.mT)[..., None] * self._at_own(self.a.mT)[..., None, :]
        return values + keys + self.own

    def enter(self, y: Tensor) -> Tensor:
        """Cotangents of outputs (b, i, s, r) as those of heads, (b, i, s, h, d_v)."""
        if self.w_o is None:
            return y.unflatten(-1, (self.p.shape[2], -1))
        return torch.einsum("bisr,hvr->bishv", y, self.w_o)

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
        heads = self.enter(y)
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
        keys = (a_h * (w * self._keys[:, :, h, g])[..., None]).mT @ a_g
        by_h = torch.einsum("binv,binw->bivw", a_h * (w * p_g)[..., None], self._cross[:, :, h, g])
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
