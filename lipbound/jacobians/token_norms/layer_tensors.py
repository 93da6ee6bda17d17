"""Float64 tensors that the blocks of a layer's Jacobian are made of."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import tensor_errors
from lipbound.attention.variants.base import TokenMap
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.token_norms.block_rows import Blocks
from lipbound.linalg.matrix_norms import gamma

SLOPE = 4.0
"""Absolute values in the factors of a token's map have a norm that is larger than that of the map
by this factor at most: Lemma 87 (docs/theory/token_norms.md)."""
VANISHED = 1e-100
"""Norms this small, in the units of a layer of ordinary size, may come of squares that underflow.
"""


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
            values in their factors, (b, h, n).
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
            sizes[2] = own[op.head].view(att.samples, att.heads, 1).expand(e.v.shape)
        p, v = att.p, att.centred_v
        p, t, q, k, v, o = (
            x.reshape(*shape, *x.shape[2:])
            for x in (p, att.weights, att.q, att.centred_k, v, p @ v)
        )
        to_q, to_k, to_v = (x.view(*shape, *x.shape[1:]) for x in maps)
        q_size, k_size, v_size = (x.reshape(*shape, -1) for x in sizes)
        return LayerTensors(
            p, t, q, k, v, o, to_q, to_k, to_v, w_o, q_size, k_size, v_size, roundings
        )

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
        size = self.v_size.amax(-1) + v * (
            k * self.q_size.amax(-1) + q * self.k_size.amax(-1) + (v > 0)
        )
        return torch.where(size > 0, VANISHED * (1 + self._projected(size)), 0.0).sum(-1)

    def _projected(self, size: Tensor) -> Tensor:
        """Sizes (b, h, ...) of heads after the output projection."""
        if self.w_o is None:
            return size
        return size * torch.linalg.matrix_norm(self.w_o).view(-1, *(1,) * (size.ndim - 2))

    def rows(self, rows: slice | Tensor) -> Blocks:
        """Blocks of some output tokens of every map."""
        p, t, q, o = (x[:, :, rows] for x in (self.p, self.t, self.q, self.o))
        a = t[..., None] * (self.v[:, :, None] - o[..., None, :])  # (b, h, i, n, d_v)
        lengths = torch.linalg.vector_norm(a, dim=-1)
        own_q = self.to_q if self.to_q.shape[2] == 1 else self.to_q[:, :, rows]
        own = own_q @ (a.mT @ self.k[:, :, None]).mT  # (b, h, i, m, d_v)
        qt = torch.einsum("bhnmd,bhid->bhinm", self.to_k, q)
        reach = torch.linalg.vector_norm(q, dim=-1)[..., None] * self.k_size[:, :, None]
        size = p * self.v_size[:, :, None] + lengths * reach
        token = torch.arange(self.tokens, device=p.device)[rows]
        size = self._projected(size + self._own_size(lengths, token))
        p, t, o, qt, own = (x.transpose(1, 2) for x in (p, t, o, qt, own))
        token, size = token.expand(len(p), -1), size.sum(1) * (1 + 1e-6)
        return Blocks(p, t, self.v, o, self.to_v, qt, own, token, self.w_o, size, self.roundings)

    def _own_size(self, lengths: Tensor, place: Tensor) -> Tensor:
        """Sizes of B_i at each token's own place, zero elsewhere, (b, h, i, n).

        From the lengths of columns of A_i of the tokens ``place``, (b, h, i, n).
        """
        reach = (lengths * torch.linalg.vector_norm(self.k, dim=-1)[:, :, None]).sum(-1)
        reach = reach * self.q_size[:, :, place]
        mine = place[:, None] == torch.arange(self.tokens, device=place.device)
        return torch.where(mine, reach[..., None], 0.0)

    def columns(self, tokens: slice) -> tuple[Tensor, Tensor]:
        r""":math:`\sum_i J_{ij}^T J_{ij}` of some tokens j, (b, j, m, m), and its rounding, (b, j).

        The latter in the 2-norm: Lemma 88 (docs/theory/token_norms.md).
        """
        heads = range(self.p.shape[1])
        p, t = (x[..., tokens].mT for x in (self.p, self.t))  # (b, h, j, i)
        a = t[..., None] * (self.v[:, :, tokens, None] - self.o[:, :, None])  # (b, h, j, i, d_v)
        place = torch.arange(self.tokens, device=p.device)[tokens]
        near = self.v[:, :, None] - self.o[:, :, tokens, None]
        near = self.t[:, :, tokens, :, None] * near  # A_j, (b, h, j, n, d_v)
        c = near.mT @ self.k[:, :, None]  # C_j, (b, h, j, d_v, d)
        each = (
            x if x.shape[2] == 1 else x[:, :, tokens] for x in (self.to_v, self.to_k, self.to_q)
        )
        maps = torch.cat([x.expand(*c.shape[:3], -1, -1) for x in each], -1)
        out = torch.zeros_like(p[:, 0, :, :1, None])
        for h in heads:
            for g in heads if self.w_o is not None else (h,):
                out = out + maps[:, h] @ self._inner(h, g, p, a, c, place) @ maps[:, g].mT
        reach = (
            torch.linalg.vector_norm(self.q, dim=-1)[:, :, None] * self.k_size[:, :, tokens, None]
        )
        size = p * self.v_size[:, :, tokens, None] + torch.linalg.vector_norm(a, dim=-1) * reach
        size = size + self._own_size(torch.linalg.vector_norm(near, dim=-1), place)
        squares = self._projected(size).sum(1).square().sum(-1)
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
    found = []
    for entry in range(len(w)):
        inner = to.matrices(entry, slice(None), d)
        assert inner is not None
        out = w[entry] @ inner[:, :d]
        found.append(out if extra is None else out + extra[entry][..., None] * inner[:, d:])
    return torch.stack(found)
