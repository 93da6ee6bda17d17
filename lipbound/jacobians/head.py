"""The Jacobian of every attention head in closed form, as a batch of linear operators."""

import math
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.linalg.operators import JacobianOperator, cast, select_entries

GRAM_BYTES = {"cpu": 2**22, "cuda": 2**30}
"""Bytes of the attention matrices that one product works on at a time: what a cache holds, and what keeps a GPU busy."""


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, *t.shape[2:])


class HeadJacobian(JacobianOperator):
    r"""Closed-form Jacobian of every head of an `Attention`, with respect to its input X.

    With ``w = [scale w_q, scale w_k, w_v]`` (D x m) and ``dq, dk, dv = dX w`` (q, k and v below are unscaled),

    .. math::
        dS = dq\,k^T + q\,dk^T,\quad T = P \circ (dS - \mathrm{rowsum}(P \circ dS)),\quad J\,dX = T v + P\,dv

    That is Lemma 1 (docs/theory/jacobian.md). A rotation or normalisation of queries and keys turns dq and dk on their way to dS, token by token
    (`lipbound.attention.token_maps`); a cap multiplies dS by its slope. Where queries or keys of all heads are normalised together, their common size
    is one more coordinate of dX, different for each token. Values and keys enter only through differences and are centred first, which removes the
    cancellation that large biases would cause.

    J sees dX only through ``dX w``, so it is applied in coordinates of the row space of ``w``: with ``w = u r`` (thin QR, u: D x m' with orthonormal
    columns, m' = min(D, m)), inputs of the operator are ``dX u``, (N, m'), and singular values are unchanged: Lemma 3 (docs/theory/jacobian.md).
    ``gram`` needs no QR at all, only ``w^T w`` (m x m). ``lift`` brings vectors of the reduced space back to (N, D).

    Batch entries are in the order of ``att.p.flatten(0, 1)``: all heads of sample 0, then sample 1, ...
    """

    def __init__(self, att: Attention):
        self._set(att)
        self._p, self._t = _flat(att.p), _flat(att.weights)
        self._o = self._p @ self._v

    def _set(self, att: Attention) -> None:
        """Everything that does not depend on P."""
        heads = att.heads
        self._plain = not att.variants
        self.batch = att.samples * heads
        self.dtype, self.device = att.dtype, att.device
        self.out_shape = (att.tokens, att.d_v)
        self._w = torch.cat([att.scale * att.w_q, att.scale * att.w_k, att.w_v], -1)
        self._head = torch.arange(heads, device=att.device).repeat(att.samples)
        self._sample = torch.arange(att.samples, device=att.device).repeat_interleave(heads)
        self._to_q, self._to_k = att.passages()
        self._sizes = [att.d, att.d, att.d_v, self._to_q.extra, self._to_k.extra]
        directions = [to.direction for to in (self._to_q, self._to_k) if to.direction is not None]
        self._spans = [norm.over[0] for norm in (att.norm_q, att.norm_k) if norm is not None and norm.over is not None]
        self._extra = att.scale * torch.stack(directions, -1) if directions else None  # (samples, N, D, 1 or 2)
        self.in_shape = (att.tokens, min(att.x.shape[2], self._w.shape[2] + sum(w.shape[1] for w in self._spans)))
        self._q = _flat(att.q)
        self._k = _flat(att.centred_k.to(att.dtype))
        self._v = _flat(att.centred_v.to(att.dtype))
        self._weights_gram = (self._w.mT @ self._w)[self._head]
        if self._extra is not None:
            self._cross = _flat(torch.einsum("hdm,snde->shnme", self._w, self._extra))
            self._own = (self._extra.mT @ self._extra)[self._sample]

    @property
    def _entries(self) -> tuple[str, ...]:
        """Names of the tensors that have the batch axis."""
        names = ("_p", "_t", "_q", "_k", "_v", "_o", "_head", "_sample", "_weights_gram")
        return names if self._extra is None else (*names, "_cross", "_own")

    @cached_property
    def _reduction(self) -> tuple[Tensor, Tensor]:
        """Of the row space of w (and of what is normalised together): a basis u (heads, D, m'), and u^T w (heads, m', m). ``gram`` does without."""
        w = self._w.double()
        spans = [t.double().expand(len(w), -1, -1) for t in self._spans]
        u = torch.linalg.qr(torch.cat([w, *spans], -1)).Q
        return u.to(self.dtype), (u.mT @ w).to(self.dtype)

    def _weighted(self, x: Tensor, u: Tensor | None) -> Tensor:
        """Coordinates of perturbations x (batch, N, m') in the basis u, or (batch, N, D) without one: (batch, N, m), and those that are extra."""
        z = x @ (self._w if u is None else self._reduction[1])[self._head]
        return z if self._extra is None else torch.cat([z, torch.einsum("bnr,bnre->bne", x, self._directions(u))], -1)

    def _directions(self, u: Tensor | None) -> Tensor:
        """What the extra coordinates are taken along, (batch, N, m' or D, 1 or 2)."""
        assert self._extra is not None
        extra = self._extra[self._sample]
        return extra if u is None else u[self._head].mT[:, None] @ extra

    def _cotangents(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The cotangents of q, k, v as they enter scores and output, under y."""
        g = y @ self._v.mT
        shift = (y * self._o).sum(-1, keepdim=True)
        g = self._t * (g - shift) if torch.is_grad_enabled() else g.sub_(shift).mul_(self._t)
        return g @ self._k, g.mT @ self._q, self._p.mT @ y

    def _pulled(self, y: Tensor) -> list[Tensor]:
        """The cotangents of the three projections under y, and of the extra coordinates."""
        q, k, v = self._cotangents(y)
        (q, extra_q), (k, extra_k) = self._to_q.pull(q), self._to_k.pull(k)
        return [q, k, v, *(t for t in (extra_q, extra_k) if t is not None)]

    def _arriving(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Perturbations of all coordinates, side by side, as those of q, k and v as they enter scores and output."""
        q, k, v, extra_q, extra_k = z.split(self._sizes, -1)
        q, k = (to.push(t, extra if to.extra else None) for to, t, extra in ((self._to_q, q, extra_q), (self._to_k, k, extra_k)))
        return q, k, v

    def pull(self, y: Tensor) -> Tensor:
        """The cotangents of all coordinates under y, side by side, (batch, N, m)."""
        return torch.cat(self._pulled(y), -1)

    def spread(self, x: Tensor) -> Tensor:
        """Coordinates of perturbations of the layer's input, (samples, N, D) -> (batch, N, m), for a batch of whole layers."""
        z = torch.einsum("snd,hdm->shnm", x, self._w)
        if self._extra is None:
            return _flat(z)
        along = torch.einsum("snd,snde->sne", x, self._extra[self._layers()])[:, None].expand(-1, len(self._w), -1, -1)
        return _flat(torch.cat([z, along], -1))

    def collect(self, z: Tensor) -> Tensor:
        """The transpose of `spread`, (batch, N, m) -> (samples, N, D)."""
        z = z.unflatten(0, (-1, len(self._w)))
        x = torch.einsum("shnm,hdm->snd", z[..., : self._w.shape[2]], self._w)
        if self._extra is None:
            return x
        return x + torch.einsum("shne,snde->snd", z[..., self._w.shape[2] :], self._extra[self._layers()])

    def _layers(self) -> Tensor:
        """The samples of a batch of whole layers."""
        return self._sample[:: len(self._w)]

    def push(self, z: Tensor) -> Tensor:
        """The output perturbation under perturbations z of the projections (scores already scaled), (batch, N, d_v)."""
        z_q, z_k, z_v = self._arriving(z)
        s = (z_q @ self._k.mT).baddbmm_(self._q, z_k.mT)
        t = self._t * s if torch.is_grad_enabled() else s.mul_(self._t)
        # at a one-hot row the difference is exactly zero, which a fused multiply-add would spoil
        return (t @ self._v - t.sum(-1, keepdim=True) * self._o).baddbmm_(self._p, z_v)

    def jvp(self, x: Tensor) -> Tensor:
        return self.push(self._weighted(x, self._reduction[0]))

    def vjp(self, y: Tensor) -> Tensor:
        z = self.pull(y)
        x = z[..., : self._w.shape[2]] @ self._reduction[1][self._head].mT
        if self._extra is None:
            return x
        return x + torch.einsum("bne,bnre->bnr", z[..., self._w.shape[2] :], self._directions(self._reduction[0]))

    def along(self, dx: Tensor) -> Tensor:
        """J dX in the coordinates of X, (batch, N, D) -> (batch, N, d_v); unlike the other products differentiable in what the layer is made of."""
        return self.push(self._weighted(dx, None))

    def paths(self, dx: Tensor) -> dict[str, Tensor]:
        """J dX, (batch, N, D) -> (batch, N, d_v), in three parts: what passes through values, keys and queries; as `along`."""
        parts = self._weighted(dx, None).split(self._sizes, -1)
        ways = {"values": (2,), "keys": (1, 4), "queries": (0, 3)}
        return {name: self.push(torch.cat([t if i in way else torch.zeros_like(t) for i, t in enumerate(parts)], -1)) for name, way in ways.items()}

    def gram(self, y: Tensor) -> Tensor:
        together = max(1, int(GRAM_BYTES.get(self.device.type, GRAM_BYTES["cpu"]) // (self.out_shape[0] ** 2 * self.dtype.itemsize)))
        if self.batch <= together or "_p" not in self.__dict__:
            return self._gram(y)
        parts = range(0, self.batch, together)
        return torch.cat([self._slice(slice(i, i + together))._gram(y[i : i + together]) for i in parts])

    def _slice(self, entries: slice) -> "HeadJacobian":
        """Some neighbours of the batch, without copies."""
        return self.select(entries)

    def _gram(self, y: Tensor) -> Tensor:
        pulled = self._pulled(y)
        first, *others = zip(pulled[:3], self._weights_gram.split(self._sizes[:3], 1), strict=True)
        z = torch.bmm(*first)
        for part, w in others:
            z.baddbmm_(part, w)
        if self._extra is not None:
            extra = torch.cat(pulled[3:], -1)[..., None]
            along = self._cross.mT @ torch.cat(pulled[:3], -1)[..., None] + self._own @ extra
            z = torch.cat([z + (self._cross @ extra)[..., 0], along[..., 0]], -1)
        return self.push(z)

    def dense(self) -> Tensor:
        """The matrices, block by block for plain attention: Lemma 1 (docs/theory/jacobian.md)."""
        if not self._plain:
            return super().dense()
        r_q, r_k, r_v = self._reduction[1][self._head].split(self._sizes[:3], -1)
        centred = self._v[:, None] - self._o[:, :, None]  # (batch, i, j, d_v)
        weighted = self._p[..., None] * centred
        blocks = torch.einsum("bija,bim->biajm", weighted, self._q @ r_k.mT)
        blocks = blocks + torch.einsum("bij,bma->biajm", self._p, r_v)
        own = torch.einsum("bija,bjc,bmc->biam", weighted, self._k, r_q)
        i = torch.arange(self.out_shape[0], device=self.device)
        blocks[:, i, :, i] += own.transpose(0, 1)
        return blocks.reshape(self.batch, math.prod(self.out_shape), math.prod(self.in_shape))

    def lift(self, x: Tensor) -> Tensor:
        """Reduced input vectors (batch, N, m') in the coordinates of X, (batch, N, D)."""
        return x @ self._reduction[0][self._head].mT

    def double(self) -> "HeadJacobian":
        return self._doubled(("_p", "_t", "_q", "_k", "_v", "_o", "_w", "_weights_gram"))

    def _doubled(self, names: tuple[str, ...]) -> Self:
        other = cast(self, names + (() if self._extra is None else ("_extra", "_cross", "_own")))
        other._to_q, other._to_k = self._to_q.double(), self._to_k.double()
        return other

    def select(self, index: Tensor | slice) -> Self:
        part = select_entries(self, self._entries, index)
        part._to_q, part._to_k = self._to_q.select(index), self._to_k.select(index)
        return part
