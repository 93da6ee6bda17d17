"""What the blocks of a layer's Jacobian are made of: its stored float64 tensors, and how
perturbations of a token arrive in queries and keys."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import spectral, tensor_errors
from lipbound.attention.variants.token_maps import TokenMap
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
    r"""The tensors of the heads of a layer, float64, (b, h, ...): b maps of h heads that share an
    input.

    Attributes:
        p, t: P and its weights, (b, h, n, n). q, k: (b, h, n, d). v, o: values and outputs, (b, h,
            n, d_v).
        to_q, to_k: :math:`D^{qT}_j` times the scale, and the same of keys, (b, h, n or 1, m, d).
            w_v: (b, h, m, d_v).
        w_o: slices of the output projection, (h, d_v, r), or None.
        q_size, k_size: upper values of the Frobenius norms of these maps with absolute values in
            their factors, (b, h, n). v_size: of w_v, (b, h).
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
    w_v: Tensor
    w_o: Tensor | None
    q_size: Tensor
    k_size: Tensor
    v_size: Tensor
    roundings: int

    @staticmethod
    def of(att: Attention, op: HeadOperator, *, together: bool, project: bool) -> "LayerTensors":
        """Of a float64 layer and the Jacobians of its heads: head by head in the coordinates of
        ``op``, or all heads of a sample ``together``, in those of X, then with the output
        projection where they are to be projected."""
        shape = (att.samples, att.heads) if together else (att.samples * att.heads, 1)
        e = tensor_errors(att)
        w = (op.w if together else op.rows.coordinates).split(op.sizes[:3], -1)
        basis = None if together else op.rows.basis
        extra = None if op.extra is None else op.extra[op.sample]  # (batch, n, D, 1 or 2)
        if extra is not None and basis is not None:
            extra = basis[op.head].mT[:, None] @ extra
        columns = [] if extra is None else list(extra.unbind(-1))
        seen = [columns.pop(0) if to.extra else None for to in (op.to_q, op.to_k)]
        maps = [
            _token_maps(to, part[op.head], own, att.d)
            for to, part, own in zip((op.to_q, op.to_k), w[:2], seen, strict=True)
        ]
        sizes = [
            SLOPE * abs(att.scale) * slope * _spread(part)[:, None]
            for slope, part in ((e.q_slope, att.w_q), (e.k_slope, att.w_k))
        ]
        p, v = att.p, att.centred_v
        w_o = att.w_o if project else None
        width = 0 if w_o is None else 2 * (att.heads * att.d_v + w_o.shape[2])
        heads = 2 * att.heads if together else 2
        turned = (
            0
            if extra is None or basis is None
            else int(2 * att.x.shape[2] * basis.shape[-1] ** 0.5)
        )
        p, t, q, k, v, o = (
            x.reshape(*shape, *x.shape[2:])
            for x in (p, att.weights, att.q, att.centred_k, v, p @ v)
        )
        to_q, to_k, w_v = (x.view(*shape, *x.shape[1:]) for x in (*maps, w[2][op.head]))
        q_size, k_size = (x.reshape(*shape, -1) for x in sizes)
        v_size = torch.linalg.matrix_norm(w[2])[op.head].view(shape) * (1 + 1e-6)
        roundings = (
            3 * att.tokens
            + 2 * att.x.shape[2]
            + 10 * (att.d + att.d_v)
            + width
            + heads
            + turned
            + 200
        )
        return LayerTensors(
            p, t, q, k, v, o, to_q, to_k, w_v, w_o, q_size, k_size, v_size, roundings
        )

    def of_maps(self, maps: slice) -> Self:
        """Some of the maps."""
        tensors: dict[str, Any] = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("w_o", "roundings")
        }
        return replace(self, **{name: t[maps] for name, t in tensors.items()})

    @property
    def tokens(self) -> int:
        """N."""
        return self.p.shape[-1]

    @property
    def row_bytes(self) -> int:
        """What one output token of one map takes while its blocks are worked on."""
        _, h, n, d_v = self.v.shape
        varied = self.to_k.shape[2] > 1
        pairs = h * h * (n * (d_v + 1) if varied else d_v + 1)
        wide = self.w_v.shape[2] * ((n if varied else 1) + 2 * d_v)
        return 8 * (h * (n * (3 * d_v + 12) + wide) + pairs + 3 * (h * d_v) ** 2)

    @property
    def vanished(self) -> Tensor:
        """Far more than what underflows can take from a norm, (b,); zero where J is."""
        q, k, v = (torch.linalg.vector_norm(x, dim=-1).amax(-1) for x in (self.q, self.k, self.v))
        size = self.v_size + v * (k * self.q_size.amax(-1) + q * self.k_size.amax(-1) + (v > 0))
        if self.w_o is not None:
            size = size * torch.linalg.matrix_norm(self.w_o)
        return torch.where(size > 0, VANISHED * (1 + size), 0.0).sum(-1)

    def rows(self, rows: slice) -> Blocks:
        """Blocks of some output tokens of every map."""
        p, t, q, o = (x[:, :, rows] for x in (self.p, self.t, self.q, self.o))
        a = t[..., None] * (self.v[:, :, None] - o[..., None, :])  # (b, h, i, n, d_v)
        lengths = torch.linalg.vector_norm(a, dim=-1)
        own_q = self.to_q if self.to_q.shape[2] == 1 else self.to_q[:, :, rows]
        own = own_q @ (a.mT @ self.k[:, :, None]).mT  # (b, h, i, m, d_v)
        qt = torch.einsum("bhnmd,bhid->bhinm", self.to_k, q)
        reach = torch.linalg.vector_norm(q, dim=-1)[..., None] * self.k_size[:, :, None]
        size = p * self.v_size[..., None, None] + lengths * reach
        near = (lengths * torch.linalg.vector_norm(self.k, dim=-1)[:, :, None]).sum(
            -1
        ) * self.q_size[:, :, rows]
        token = torch.arange(self.tokens, device=p.device)[rows].expand(len(p), -1)
        size = size + torch.where(
            token[:, None, :, None] == torch.arange(self.tokens, device=p.device),
            near[..., None],
            0.0,
        )
        if self.w_o is not None:
            size = size * torch.linalg.matrix_norm(self.w_o)[:, None, None]
        p, t, o, qt, own = (x.transpose(1, 2) for x in (p, t, o, qt, own))
        return Blocks(
            p,
            t,
            self.v,
            o,
            self.w_v,
            qt,
            own,
            token,
            self.w_o,
            size.sum(1) * (1 + 1e-6),
            self.roundings,
        )

    def columns(self, tokens: slice) -> tuple[Tensor, Tensor]:
        r""":math:`\sum_i J_{ij}^T J_{ij}` for some tokens j, (b, j, m, m), and bounds on the 2-norm
        of its rounding error, (b, j): Lemma 88 (docs/theory/token_norms.md)."""
        heads = range(self.p.shape[1])
        p, t = (x[..., tokens].mT for x in (self.p, self.t))  # (b, h, j, i)
        a = t[..., None] * (self.v[:, :, tokens, None] - self.o[:, :, None])  # (b, h, j, i, d_v)
        place = torch.arange(self.tokens, device=p.device)[tokens]
        near = self.t[:, :, tokens, :, None] * (
            self.v[:, :, None] - self.o[:, :, tokens, None]
        )  # A_j, (b, h, j, n, d_v)
        c = near.mT @ self.k[:, :, None]  # C_j, (b, h, j, d_v, d)
        to_q, to_k = (x if x.shape[2] == 1 else x[:, :, tokens] for x in (self.to_q, self.to_k))
        maps = torch.cat(
            [
                self.w_v[:, :, None].expand(*c.shape[:3], -1, -1),
                *(x.expand(*c.shape[:3], -1, -1) for x in (to_k, to_q)),
            ],
            -1,
        )
        out: Tensor | float = 0.0
        for h in heads:
            for g in heads if self.w_o is not None else (h,):
                out = out + maps[:, h] @ self._inner(h, g, p, a, c, place) @ maps[:, g].mT
        assert isinstance(out, Tensor)
        return out, gamma(self.roundings) * self._column_size(p, a, near, place, tokens) * (
            1 + 1e-6
        )

    def _inner(self, h: int, g: int, p: Tensor, a: Tensor, c: Tensor, place: Tensor) -> Tensor:
        """What arrives in values, keys and queries of heads h and g, multiplied over all outputs,
        (b, j, d_v + 2 d, d_v + 2 d)."""
        p_h, p_g, a_h, a_g, c_h, c_g, q_h, q_g = (
            x[:, i] for x in (p, a, c, self.q) for i in (h, g)
        )
        b_g, b_h = (
            (a_g, a_h)
            if self.w_o is None
            else (a_g @ (self.w_o[g] @ self.w_o[h].mT), a_h @ (self.w_o[h] @ self.w_o[g].mT))
        )
        between = (
            torch.eye(self.v.shape[-1], dtype=p.dtype, device=p.device)
            if self.w_o is None
            else self.w_o[h] @ self.w_o[g].mT
        )
        vv = (p_h * p_g).sum(-1)[..., None, None] * between
        vk = (b_g * p_h[..., None]).mT @ q_g[:, None]
        kv = ((b_h * p_g[..., None]).mT @ q_h[:, None]).mT
        kk = (q_h[:, None] * (a_h * b_g).sum(-1)[..., None]).mT @ q_g[:, None]
        d_g, d_h = between @ c_g, between.mT @ c_h
        at = torch.arange(len(place), device=place.device)
        own_p_h, own_p_g, own_a_h, own_a_g = (
            p_h[:, at, place],
            p_g[:, at, place],
            a_h[:, at, place],
            a_g[:, at, place],
        )
        vq, qv = own_p_h[..., None, None] * d_g, (own_p_g[..., None, None] * d_h).mT
        kq = q_h[:, place][..., None] * (own_a_h[..., None, :] @ d_g)
        qk = (q_g[:, place][..., None] * (own_a_g[..., None, :] @ d_h)).mT
        return torch.cat(
            [torch.cat(row, -1) for row in ([vv, vk, vq], [kv, kk, kq], [qv, qk, c_h.mT @ d_g])], -2
        )

    def _column_size(
        self, p: Tensor, a: Tensor, near: Tensor, place: Tensor, tokens: slice
    ) -> Tensor:
        """Upper values of the squared Frobenius norms of column blocks with absolute values inside,
        (b, j)."""
        lengths = torch.linalg.vector_norm(a, dim=-1)
        size = (
            p * self.v_size[..., None, None]
            + lengths
            * torch.linalg.vector_norm(self.q, dim=-1)[:, :, None]
            * self.k_size[:, :, tokens, None]
        )
        reach = (
            torch.linalg.vector_norm(near, dim=-1)
            * torch.linalg.vector_norm(self.k, dim=-1)[:, :, None]
        ).sum(-1) * self.q_size[:, :, tokens]
        size = size + torch.where(
            place[:, None] == torch.arange(self.tokens, device=p.device), reach[..., None], 0.0
        )
        if self.w_o is not None:
            size = size * torch.linalg.matrix_norm(self.w_o)[:, None, None]
        return size.sum(1).square().sum(-1)


def _spread(w: Tensor) -> Tensor:
    """The Frobenius norms of projections (heads, D, d) over upper values of their spectral norms,
    rounded upwards, (heads,)."""
    return torch.linalg.matrix_norm(w) / spectral(w).clamp_min(1e-300) * (1 + 1e-4)


def _token_maps(to: TokenMap, w: Tensor, extra: Tensor | None, d: int) -> Tensor:
    """From a token's query or key back to its perturbation, (batch, n or 1, m, d), of projections w
    (batch, m, d) and extra directions (batch, n, m)."""
    if not to.steps:
        return w[:, None]
    found = []
    for entry in range(len(w)):
        inner = to.matrices(entry, slice(None), d)
        assert inner is not None
        out = w[entry] @ inner[:, :d]
        found.append(out if extra is None else out + extra[entry][..., None] * inner[:, d:])
    return torch.stack(found)
