"""Attention matrices in blocks of rows, each with the keys that its queries see: what is zero beside them takes no part in products.

A block of queries i0 ... i1 sees keys 0 ... i1 under a causal mask, i0 - w ... i1 in a sliding window of w, all of them without a mask. Which it sees
is read off the mask, or the zeros of P, so that any mask counts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.masking import BLOCKED, four_axes
from lipbound.devices import Room

ROWS = 128
"""Queries of a block: fewer would see fewer keys that they do not need, but make products of matrices that processors are slow at."""
WORTH = 0.85
"""Share of the attention matrices above which whole matrices are the faster."""
LEAST = 384
"""Tokens from which blocks of matrices that are in memory are faster than these."""


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of rows of a batch of N x N matrices, and where the columns begin and end outside which their entries are zero.

    Attributes:
        tokens: N. step: rows of a block; the last may have fewer.
        first, last: (batch, blocks) int64 on the CPU; columns from ``first`` to before ``last``, none where both are equal.
    """

    tokens: int
    step: int
    first: Tensor
    last: Tensor

    @staticmethod
    def of_probabilities(p: Tensor, step: int) -> "RowBlocks":
        """From the zeros of P, (batch, N, N)."""
        n = p.shape[-1]
        seen = [torch.stack([each[i : i + step].amax(0) != 0 for i in range(0, n, step)]) for each in p.detach()]
        return _of(torch.stack(seen), n, step, (len(p),))

    @staticmethod
    def of_mask(att: Attention, step: int) -> "RowBlocks":
        """From the mask of a layer and its padding, looked at once; the batch is all heads of sample 0, then of sample 1, ..."""
        return att.memo(("row blocks", step), lambda: RowBlocks._of_mask(att, step))

    @staticmethod
    def _of_mask(att: Attention, step: int) -> "RowBlocks":
        n, mask, valid = att.tokens, att.mask, att.valid
        count = -(-n // step)
        seen = torch.ones(1, 1, count, n, dtype=torch.bool, device=att.device)
        if mask is not None:
            rows = four_axes(mask.detach()).expand(-1, -1, n, -1)  # a view
            seen = torch.stack([rows[:, :, i : i + step].amax(2) > BLOCKED for i in range(0, n, step)], 2).expand(-1, -1, -1, n)
        if valid is not None:
            some = torch.stack([part.any(-1) for part in valid.split(step, -1)], -1)
            seen = seen & (some[..., None] & valid[:, None])[:, None]
        return _of(seen, n, step, (att.samples, att.heads))

    def select(self, index: Tensor | slice) -> "RowBlocks":
        """Some entries of the batch."""
        index = index if isinstance(index, slice) else index.cpu()
        return replace(self, first=self.first[index], last=self.last[index])

    def of(self, b: int) -> list[tuple[slice, slice]]:
        """Rows and columns of the blocks of an entry that are not all zero."""
        starts = range(0, self.tokens, self.step)
        ends = zip(starts, self.first[b].tolist(), self.last[b].tolist(), strict=True)
        return [(slice(i, min(i + self.step, self.tokens)), slice(a, c)) for i, a, c in ends if a < c]

    @property
    def widest(self) -> int:
        """The most columns of a block."""
        return int((self.last - self.first).amax())

    @property
    def size(self) -> int:
        """Entries of all matrices inside the blocks."""
        rows = torch.tensor([min(self.step, self.tokens - i) for i in range(0, self.tokens, self.step)])
        return int(((self.last - self.first) * rows).sum())

    @property
    def share(self) -> float:
        """Of all entries, those inside the blocks."""
        return self.size / (max(1, len(self.first)) * self.tokens**2)


def _of(seen: Tensor, n: int, step: int, batch: tuple[int, ...]) -> RowBlocks:
    """From which columns each block has entries in, (..., blocks, N) bool, of which some entries of the batch may share one."""
    order = seen.to(torch.uint8)
    ends = (order.argmax(-1), n - order.flip(-1).argmax(-1))
    first, last = (torch.where(seen.any(-1), t, 0).expand(*batch, -1).flatten(0, len(batch) - 1).cpu() for t in ends)
    return RowBlocks(n, step, first, last)


def worthwhile(p: Tensor) -> RowBlocks | None:
    """The blocks of matrices P (batch, N, N) that are in memory, where products are faster with them; None where not."""
    if p.device.type != "cpu" or p.shape[-1] < LEAST:  # on a GPU many small products cost more than few large ones
        return None
    blocks = RowBlocks.of_probabilities(p, ROWS)
    return blocks if blocks.share <= WORTH else None


class Block(NamedTuple):
    """Rows and columns of a block, and P and what changes of q k^T are weighted with there, (rows, columns)."""

    rows: slice
    keys: slice
    p: Tensor
    weights: Tensor

    def to(self, dtype: torch.dtype) -> "Block":
        """In another dtype."""
        p = self.p.to(dtype)
        return self._replace(p=p, weights=p if self.weights is self.p else self.weights.to(dtype))


Read = Callable[[int], Iterable[Block]]
"""The blocks of an entry of a batch."""


def cotangents(read: Read, q: Tensor, k: Tensor, v: Tensor, o: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of q, k, v as they enter scores and output, under y: everything (batch, N, d or d_v). Not differentiable.

    Results are laid out column by column, which makes float64 products up to twice as fast.
    """
    to_q, to_k, to_v = (t.new_zeros(t.shape[0], t.shape[2], t.shape[1]) for t in (q, k, v))
    room = Room()
    for b in range(len(y)):
        columns, shift = k[b].mT.contiguous(), (y[b] * o[b]).sum(-1, keepdim=True)
        for rows, keys, p, weights in read(b):
            part, g = y[b, rows], room.take(v, *p.shape)
            torch.mm(part, v[b, keys].mT, out=g).sub_(shift[rows]).mul_(weights)
            to_q[b, :, rows] = columns[:, keys] @ g.mT
            to_k[b, :, keys].addmm_(q[b, rows].mT, g)
            to_v[b, :, keys].addmm_(part.mT, p)
    return to_q.mT, to_k.mT, to_v.mT


def pushed(read: Read, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The output's perturbations, (batch, N, d_v), under perturbations z of q, k and v, shaped like these. Not differentiable."""
    z_q, z_k, z_v = z
    out = o.new_zeros(o.shape[0], o.shape[2], o.shape[1])
    room = Room()
    for b in range(len(out)):
        left, right = torch.cat([z_q[b], q[b]], -1), torch.cat([k[b], z_k[b]], -1)
        columns, moved = v[b].mT.contiguous(), z_v[b].mT.contiguous()
        for rows, keys, p, weights in read(b):
            t = torch.mm(left[rows], right[keys].mT, out=room.take(v, *p.shape)).mul_(weights)
            part = columns[:, keys] @ t.mT
            # at a one-hot row the difference is exactly zero, which a fused multiply-add would spoil
            part -= (t.sum(-1, keepdim=True) * o[b, rows]).mT
            out[b, :, rows] = part.addmm_(moved[:, keys], p.mT)
    return out.mT
