"""Jacobians of attention heads in closed form, as a batch of linear operators."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.base import TokenMap
from lipbound.attention.variants.gate import GateStep
from lipbound.devices import Room
from lipbound.errors import LipboundError, whole
from lipbound.jacobians.products.matrices import InParts, by_columns, narrow
from lipbound.jacobians.products.row_blocks import SHORT, Group, RowBlock, RowBlocks, worthwhile
from lipbound.jacobians.row_space import RowSpace, length_by_squares, length_sums
from lipbound.linalg.operators import JacobianOperator, PerEntry, TensorOperator


@dataclass(init=False, eq=False, repr=False)
class HeadOperator(TensorOperator):
    r"""Closed-form Jacobian of every head of an `Attention`, with respect to its input X.

    With ``w = [scale w_q, scale w_k, w_v]`` (D x m) and ``dq, dk, dv = dX w`` (q, k and v below are
    unscaled),

    .. math::
        dS = dq\,k^T + q\,dk^T,\quad T = P \circ (dS - \mathrm{rowsum}(P \circ dS)),\quad
        J\,dX = T v + P\,dv

    That is Lemma 1 (docs/theory/jacobian.md). A rotation or normalisation of queries, keys and
    values changes dq, dk and dv on their way, token by token
    (`lipbound.attention.variants.base`); a cap multiplies dS by its slope. Where they are
    normalised by the size of a vector other than their own, that size is one more coordinate of dX,
    different for each token. Values and keys enter only through differences and are centred first,
    which removes the cancellation that large biases would cause.

    J sees dX only through ``dX w``, so it is applied in coordinates of the row space of ``w``: with
    ``w = u r`` (thin QR, u: D x m' with orthonormal columns, m' = min(D, m)), inputs of the
    operator are ``dX u``, (N, m'), and singular values are unchanged: Lemma 3
    (docs/theory/jacobian.md). ``lift`` brings them back to (N, D).

    Batch entries are all heads of sample 0, then of sample 1, ...
    """

    w: Tensor
    """(heads, D, m), shared by all entries."""
    rows: RowSpace
    sizes: list[int]
    """Widths of the parts of m: queries, keys, values, logits of a gate, and of the first three the
    size of what is normalised together, where it is a coordinate of its own."""
    plain: bool
    """True if the heads have no variants."""
    squared: bool
    """True if J J^T is formed with w^T w in float64 as well: for estimates, see `estimating`."""
    extra: Tensor | None
    """Directions of the extra coordinates, (samples, N, D, up to 3), or None."""
    head: PerEntry[Tensor]
    sample: PerEntry[Tensor]
    q: PerEntry[Tensor]
    k: PerEntry[Tensor]
    v: PerEntry[Tensor]
    o: PerEntry[Tensor]
    cross: PerEntry[Tensor | None]
    """Products of w with the extra directions, (batch, N, m, up to 3)."""
    own: PerEntry[Tensor | None]
    """Products of the extra directions with each other, (batch, N, up to 3, up to 3)."""
    to_q: PerEntry[TokenMap]
    to_k: PerEntry[TokenMap]
    to_v: PerEntry[TokenMap]
    gate: PerEntry[GateStep | None]
    """Derivative of the gate, whose logits are one more part of m; None without a gate."""

    def __repr__(self) -> str:
        moved, made = (" x ".join(map(str, shape)) for shape in (self.in_shape, self.out_shape))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.batch} heads of samples, {moved} to {made}, {dtype})"

    def _set(self, att: Attention) -> None:
        """Everything that does not depend on P."""
        self.plain, self.squared = not att.variants, False
        self.batch = att.samples * att.heads
        self.dtype, self.device = att.dtype, att.device
        self.out_shape = (att.rows, att.d_v)
        gate = att.gate
        weights = [att.scale * att.w_q, att.scale * att.w_k, att.w_v]
        self.w = torch.cat([*weights, *([] if gate is None else [gate.w])], -1)
        self.gate = self.cross = self.own = None
        self.head = torch.arange(att.heads, device=att.device).repeat(att.samples)
        self.sample = torch.arange(att.samples, device=att.device).repeat_interleave(att.heads)
        self.to_q, self.to_k, self.to_v = att.passages().values()
        of_gate = 0 if gate is None else att.d_v
        self.sizes = [att.d, att.d, att.d_v, of_gate, *(to.extra for to in self._passages)]
        self.rows = RowSpace(self.w, att.spans, att.dtype)
        self.in_shape = (att.tokens, self.rows.width)
        parts = (att.q, att.centred_k, att.centred_v)
        self.q, self.k, self.v = (self._laid_out(t.to(att.dtype).flatten(0, 1)) for t in parts)
        scaled = zip(self._passages, (att.scale, att.scale, 1.0), strict=True)
        directions = [c * to.direction for to, c in scaled if to.direction is not None]
        self.extra = torch.stack(directions, -1) if directions else None
        if self.extra is not None:
            self.cross = torch.einsum("hdm,snde->shnme", self.w, self.extra).flatten(0, 1)
            self.own = (self.extra.mT @ self.extra)[self.sample]

    def _set_gate(self, att: Attention) -> None:
        """Set the gate, once outputs are known: less what centring took from all of them."""
        if (gate := att.gate) is not None:
            shift = att.wide_v[:, :, :1] - att.centred_v[:, :, :1]
            outputs = self.o.view(att.samples, att.heads, *self.o.shape[1:]).double() + shift
            step = gate.at(att.x, outputs)
            if att.valid is not None:
                real = att.valid[:, None, :, None].expand(-1, att.heads, -1, -1).flatten(0, 1)
                step = GateStep(step.factor * real, step.slope * real, step.after)
            self.gate = step.to(self.dtype)

    @abstractmethod
    def _groups(self) -> Iterable[Group] | None:
        """The blocks of rows of P that products are formed in; None for whole matrices."""

    @cached_property
    def _summed(self) -> tuple[Tensor, Tensor]:
        """Keys and values, laid out so that sums over tokens are fastest."""
        return by_columns(self.k), self._laid_out(self.v)

    def _beside(self, y: Tensor) -> Tensor:
        """The cotangents of q, k, v as they enter scores and output, under y, side by side.

        Laid out coordinate by coordinate; in blocks, where there are some.
        """
        groups, (d, _, d_v) = self._groups(), self.sizes[:3]
        assert groups is not None
        found, room = y.new_zeros(len(y), 2 * d + d_v, y.shape[1]).mT, Room()
        for entries, blocks in groups:
            given, (to_q, to_k, to_v) = y[entries], found[entries].split([d, d, d_v], -1)
            q, k, v, o = (t[entries] for t in (self.q, self._summed[0], self.v, self.o))
            shift = (given * o).sum(-1, keepdim=True)
            for rows, keys, p, weights in blocks:
                part = given[:, rows]
                g = torch.bmm(part, v[:, keys].mT, out=room.take(y, *p.shape))
                g = g.sub_(shift[:, rows]).mul_(weights)
                torch.bmm(g, k[:, keys], out=to_q[:, rows])
                to_k[:, keys].baddbmm_(g.mT, q[:, rows])
                to_v[:, keys].baddbmm_(p.mT, part)
        return found

    def _cotangents(self, y: Tensor) -> tuple[Tensor, ...]:
        """The cotangents of q, k, v as they enter scores and output, under y."""
        return self._beside(y).split(self.sizes[:3], -1)

    @property
    def _passages(self) -> tuple[TokenMap, TokenMap, TokenMap]:
        return self.to_q, self.to_k, self.to_v

    @property
    def turned_alone(self) -> bool:
        """True if queries and keys are turned at most between projection and scores."""
        return all(not to.steps or to.turns() is not None for to in self._passages)

    def single(self) -> Self | None:
        """The same maps with products in float32; None where normalisations are among them.

        Of a float64 layer whose numbers are in the range of float32.
        """
        return self.to(torch.float32) if self.turned_alone else None

    def _unreduced(self) -> Self:
        """The same maps with inputs in the coordinates of X, which needs no QR decomposition."""
        rows = RowSpace(self.w, [], self.dtype, everything=True)
        return self._with(rows=rows, in_shape=(self.in_shape[0], rows.width))

    def estimating(self) -> Self:
        """The same maps, for searches in float32 whose results few products in float64 check."""
        return self._unreduced()._with(squared=True)

    def push(self, z: Tensor | list[Tensor]) -> Tensor:
        """The output perturbation, (batch, N, d_v), under perturbations z of all coordinates.

        Those of scores are already scaled; side by side, or part by part.
        """
        parts = z.split(self.sizes, -1) if isinstance(z, Tensor) else z
        every = zip(self._passages, parts[:3], parts[4:], strict=True)
        q, k, v = (to.push(t, extra if to.extra else None) for to, t, extra in every)
        out = self._mixed((q, k, v))
        return out if self.gate is None else self.gate.push(out, parts[3])

    def _mixed(self, arriving: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The perturbations of outputs under those of q, k and v as they enter.

        In blocks, where there are some; these are not differentiable.
        """
        groups, (z_q, z_k, z_v) = self._groups(), arriving
        assert groups is not None
        z_v, room = self._laid_out(z_v), Room()
        out = torch.zeros_like(z_v)
        for entries, blocks in groups:
            q, k, v, o = (t[entries] for t in (self.q, self.k, self._summed[1], self.o))
            left, right = torch.cat([z_q[entries], q], -1), torch.cat([k, z_k[entries]], -1)
            for rows, keys, p, weights in blocks:
                t = torch.bmm(left[:, rows], right[:, keys].mT, out=room.take(z_v, *p.shape))
                t = t.mul_(weights)
                part = torch.bmm(t, v[:, keys], out=out[entries, rows])
                # at a one-hot row the difference is exactly zero, which a fused multiply-add would
                # spoil
                part -= t.sum(-1, keepdim=True) * o[:, rows]
                part.baddbmm_(p, z_v[entries][:, keys])
        return out

    @abstractmethod
    def column_sums(self) -> Tensor:
        """The sums of the columns of P, (batch, N)."""

    @abstractmethod
    def largest(self) -> Tensor:
        """The largest entry of every row of P, (batch, N); less where it is not known."""

    def _perturbed(self, dx: Tensor) -> list[Tensor]:
        """The perturbations of all coordinates under dx (batch, N, D), part by part."""
        z = dx @ self.w[self.head]
        if self.extra is not None:
            z = torch.cat([z, torch.einsum("bnr,bnre->bne", dx, self.extra[self.sample])], -1)
        return list(z.split(self.sizes, -1))

    @cached_property
    def triangle(self) -> list[Tensor]:
        """Coordinates of queries, keys and values, (batch or 1, rows, size) each, gathered once.

        The first two without the rows that are zero; last those of a gate.
        """
        r, d = self.rows.coordinates, self.sizes[0]
        values, of_gate = r[..., 2 * d :].split(self.sizes[2:4], -1)
        rows = (None, None) if self.rows.everything else (d, 2 * d)
        parts = [r[:, : rows[0], :d], r[:, : rows[1], d : 2 * d], values]
        parts += [] if self.gate is None else [of_gate]
        if len(r) > 1 and not torch.equal(self.head, torch.arange(len(r), device=self.device)):
            parts = [part[self.head] for part in parts]
        return parts if self.rows.everything else [*map(self._laid_out, parts)]

    @property
    def _times(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The function that multiplies fastest by matrices of few columns."""
        long = self._groups() is not None and self.out_shape[0] >= SHORT
        # of float64 by a fifth, where their results are laid out by columns
        return narrow if long or self.dtype == torch.float64 else torch.bmm

    def _laid_out(self, t: Tensor) -> Tensor:
        """A factor of few columns as `_times` takes it."""
        return by_columns(t) if self.dtype == torch.float64 else t.contiguous()

    @cached_property
    def _square(self) -> Tensor:
        """Products w^T w, (batch, m, m)."""
        return self.rows.square[self.head]

    @cached_property
    def _along(self) -> Tensor:
        """Directions of the extra coordinates in the operator's, (batch, N, m', up to 3)."""
        assert self.extra is not None
        if self.rows.everything:
            return self.extra[self.sample]
        found = torch.einsum("bdm,bnde->bnme", self.rows.basis[self.head], self.extra[self.sample])
        return found.contiguous()

    def _pulled(self, y: Tensor) -> list[Tensor]:
        """The cotangents of the projections under y, and of the extra coordinates."""
        of_gate: list[Tensor] = []
        if self.gate is not None:
            y, logits = self.gate.pull(y)
            of_gate = [logits]
        cotangents = zip(self._passages, self._cotangents(y), strict=True)
        parts, extra = zip(*(to.pull(t) for to, t in cotangents), strict=True)
        return [*parts, *of_gate, *(t for t in extra if t is not None)]

    @torch.no_grad()
    def pull(self, y: Tensor) -> Tensor:
        """The cotangents of all coordinates under y, side by side, (batch, N, m).

        Laid out coordinate by coordinate.
        """
        if self.gate is None and not any(to.steps for to in self._passages):
            return self._beside(y)
        return torch.cat([t.mT for t in self._pulled(y)], 1).mT

    def spread(self, x: Tensor) -> Tensor:
        """Coordinates of perturbations of whole layers' input, (samples, N, D) -> (batch, N, m)."""
        z = torch.einsum("snd,hdm->shnm", x, self.w)
        if self.extra is None:
            return z.flatten(0, 1)
        along = torch.einsum("snd,snde->sne", x, self.extra[self.sample[:: len(self.w)]])[:, None]
        return torch.cat([z, along.expand(-1, len(self.w), -1, -1)], -1).flatten(0, 1)

    def collect(self, z: Tensor) -> Tensor:
        """The transpose of `spread`, (batch, N, m) -> (samples, N, D)."""
        z = z.unflatten(0, (-1, len(self.w)))
        x = torch.einsum("shnm,hdm->snd", z[..., : self.w.shape[2]], self.w)
        if self.extra is None:
            return x
        extra = z[..., self.w.shape[2] :]
        return x + torch.einsum("shne,snde->snd", extra, self.extra[self.sample[:: len(self.w)]])

    def jvp(self, x: Tensor) -> Tensor:
        times = self._times
        parts = [part.expand(len(x), -1, -1) for part in self.triangle]
        z = [times(x[..., : part.shape[-2]], part) for part in parts]
        z += [] if self.gate is not None else [x[..., :0]]
        if self.extra is None:
            return self.push([*z, *[x[..., :0]] * 3])
        extra = torch.einsum("bnr,bnre->bne", x, self._along)
        return self.push([*z, *extra.split(self.sizes[4:], -1)])

    @torch.no_grad()
    def vjp(self, y: Tensor) -> Tensor:
        q, k, v, *extra = self._pulled(y)
        to_q, to_k, to_v, *to_gate = (part.mT.expand(len(y), -1, -1) for part in self.triangle)
        times = self._times
        x = times(v, to_v)  # of all rows; the others add to the first of them
        for part, to in ((k, to_k), (q, to_q)):
            x[..., : to.shape[-1]].baddbmm_(part, to)
        for to in to_gate:
            x.baddbmm_(extra.pop(0), to)
        if self.extra is None:
            return x
        return x + torch.einsum("bne,bnre->bnr", torch.cat(extra, -1), self._along)

    def along(self, dx: Tensor) -> Tensor:
        """J dX in the coordinates of X, (batch, N, D) -> (batch, N, d_v).

        Unlike the other products differentiable in what the layer is made of.
        """
        return self.push(self._perturbed(dx))

    def paths(self, dx: Tensor) -> dict[str, Tensor]:
        """J dX as `along`, in parts: what passes through values, keys, queries and a gate."""
        parts = self._perturbed(dx)
        ways: dict[str, tuple[int, ...]] = {"values": (2, 6), "keys": (1, 5), "queries": (0, 4)}
        ways |= {} if self.gate is None else {"gate": (3,)}

        def push(way: tuple[int, ...]) -> Tensor:
            return self.push([t if i in way else torch.zeros_like(t) for i, t in enumerate(parts)])

        return {name: push(way) for name, way in ways.items()}

    @property
    def _by_factors(self) -> bool:
        """True if `gram` multiplies by the triangular factor twice, not by its square once.

        Which rounds less.
        """
        return self.dtype == torch.float64 and not self.squared

    def gram(self, y: Tensor) -> Tensor:
        if self._by_factors:
            return self.jvp(self.vjp(y))
        pulled = self.pull(y)
        if self.cross is None or self.own is None:
            return self.push(torch.bmm(pulled, self._square))
        whole, extra = pulled.split([self.w.shape[2], pulled.shape[2] - self.w.shape[2]], -1)
        along = self.cross.mT @ whole[..., None] + self.own @ extra[..., None]
        z = torch.bmm(whole, self._square) + (self.cross @ extra[..., None])[..., 0]
        return self.push(torch.cat([z, along[..., 0]], -1))

    @property
    def _in_parts(self) -> bool:
        """True if `image` returns cotangents of coordinates, with lengths by way of w^T w."""
        return self.squared and self.extra is None

    def image(self, y: Tensor) -> Tensor:
        return self.pull(y) if self._in_parts else self.vjp(y)

    def sums(self, image: Tensor) -> Tensor:
        return length_sums(image, self._square) if self._in_parts else super().sums(image)

    def length(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        if not self._in_parts:
            return super().length(sums)
        (n, _), (_, count, m) = self.out_shape, self.w.shape
        return length_by_squares(sums, n, count, m, self.dtype)

    def lift(self, x: Tensor) -> Tensor:
        """Reduced input vectors (batch, N, m') in the coordinates of X, (batch, N, D)."""
        return x if self.rows.everything else x @ self.rows.basis[self.head].mT


@dataclass(init=False, eq=False, repr=False)
class HeadJacobian(InParts, HeadOperator):
    """`HeadOperator` with all of P in memory.

    Args:
        att: the layer; products are differentiable in what it is made of (`along`, `paths`).
    """

    p: PerEntry[Tensor]
    t: PerEntry[Tensor]
    """P times the slopes of the scores."""
    blocks: PerEntry[RowBlocks | None]
    """Blocks of rows of P without its zeros, where products in blocks are faster."""

    def __init__(self, att: Attention):
        self._set(att)
        self.p = att.p.flatten(0, 1)
        self.t = self.p if att.weights is att.p else att.weights.flatten(0, 1)
        self.o = self._laid_out(self.p @ self.v)
        self._set_gate(att)
        dense = att.mask is None and att.valid is None
        self.blocks = None if dense or att.rows != att.keys else worthwhile(self.p)

    @cached_property
    def _shared(self) -> list[RowBlock]:
        """Blocks that hold those of all entries."""
        assert self.blocks is not None
        places = self.blocks.shared()
        return [RowBlock(*at, self.p[:, *at], self.t[:, *at]) for at in places]

    def _groups(self) -> Iterable[Group] | None:
        if self.blocks is None or torch.is_grad_enabled():
            return None
        return [(slice(None), self._shared)]

    def _beside(self, y: Tensor) -> Tensor:
        if self._groups() is not None:
            return super()._beside(y)
        d_v = self.sizes[2]
        shift = torch.bmm(y.reshape(-1, 1, d_v), self.o.reshape(-1, d_v, 1)).view(*y.shape[:2], 1)
        g = torch.baddbmm(shift, y, self.v.mT, beta=-1).mul_(self.t)
        found = y.new_empty(len(y), sum(self.sizes[:3]), y.shape[1])
        q, k, v = found.split(self.sizes[:3], 1)
        torch.bmm(self.k.mT, g.mT, out=q)
        torch.bmm(self.q.mT, g, out=k)
        torch.bmm(y.mT, self.p, out=v)
        return found.mT

    def _cotangents(self, y: Tensor) -> tuple[Tensor, ...]:
        if self.q.shape == self.k.shape:
            return super()._cotangents(y)
        g = self.t * (y @ self.v.mT - (y * self.o).sum(-1, keepdim=True))
        return narrow(g, self.k), narrow(g.mT, self.q), narrow(self.p.mT, y)

    def _mixed(self, arriving: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        if self._groups() is not None:
            return super()._mixed(arriving)
        z_q, z_k, z_v = arriving
        s = torch.bmm(z_q, self.k.mT).baddbmm_(self.q, z_k.mT)
        t = self.t * s if torch.is_grad_enabled() else s.mul_(self.t)
        mean = t.sum(-1, keepdim=True) * self.o
        # at a one-hot row the difference is exactly zero, which a fused multiply-add would spoil:
        # processors' products may begin with what they are added to
        if self.dtype == torch.float64:
            return (narrow(t, self.v) - mean).mT.baddbmm_(z_v.mT, self.p.mT).mT
        if self.device.type == "cpu":
            out = self._times(t, self.v)
            out -= mean
        else:
            out = torch.baddbmm(mean, t, self.v, beta=-1)
        return out.baddbmm_(self.p, z_v)

    def to(self, dtype: torch.dtype) -> Self:
        other = super().to(dtype)
        return other._with(t=other.p) if self.t is self.p else other

    def column_sums(self) -> Tensor:
        return self.p.sum(1)

    def largest(self) -> Tensor:
        return self.p.amax(-1)

    def product(self, y: Tensor) -> Tensor:
        return HeadOperator.gram(self, y)

    def graphable(self) -> bool:
        if not super().graphable():
            return False
        _ = self.triangle if self._by_factors else self._square
        if self._by_factors and self.extra is not None:
            _ = self._along
        return True

    def as_linear_operator(self, sample: int = 0, head: int = 0) -> LinearOperator:
        """The Jacobian of one head at one input, for scipy's solvers.

        Args:
            sample: which input.
            head: which head.

        Returns:
            Operator of shape (N d_v, N D) on flattened outputs and inputs, in this one's dtype.

        Raises:
            LipboundError: no such sample or head.
        """
        heads = len(self.w)
        place = whole("sample", sample, least=0) * heads + whole("head", head, least=0)
        if head >= heads or place >= self.batch:
            raise LipboundError(
                f"sample {sample} and head {head} are asked for; there are {self.batch // heads} "
                f"samples and {heads} heads, counted from 0"
            )
        return self._unreduced().to_scipy(place)

    def dense(self) -> Tensor:
        """The matrices, block by block for plain attention: Lemma 1 (docs/theory/jacobian.md)."""
        if not self.plain:
            return JacobianOperator.dense(self)
        r_q, r_k, r_v = self.rows.coordinates[self.head].split(self.sizes[:3], -1)
        centred = self.v[:, None] - self.o[:, :, None]  # (batch, i, j, d_v)
        weighted = self.p[..., None] * centred
        blocks = torch.einsum("bija,bim->biajm", weighted, self.q @ r_k.mT)
        blocks = blocks + torch.einsum("bij,bma->biajm", self.p, r_v)
        own = torch.einsum("bija,bjc,bmc->biam", weighted, self.k, r_q)
        i = torch.arange(self.out_shape[0], device=self.device)
        blocks[:, i, :, i] += own.transpose(0, 1)
        return blocks.reshape(self.batch, math.prod(self.out_shape), math.prod(self.in_shape))
