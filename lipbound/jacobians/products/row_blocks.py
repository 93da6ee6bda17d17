"""Attention matrices in blocks of rows, each with the keys that its queries see.

Entries that are zero beside them take no part in products. A block of queries i0 ... i1 sees keys
0 ... i1 under a causal mask, i0 - w ... i1 in a sliding window of w, all of them without a mask.
Which it sees is read off the mask, or the zeros of P, so that any mask counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.scoring import BLOCKED, four_axes

ROWS = 96
"""Queries of a block: fewer would see fewer keys that they do not need, but make products of
matrices that processors are slow at. A multiple of 24, the width of the tiles in which float64
products are computed on x86."""
WORTH = 0.85
"""Share of the attention matrices above which whole matrices are the faster."""
SHORT, FEWER_ROWS = 256, 48
"""So many queries of a block where there are fewer tokens than that."""
LEAST = 96
"""Tokens from which blocks of matrices that are in memory are faster than these."""


@dataclass(frozen=True)
class RowBlocks:
    """First and last nonzero column of each block of rows, for a batch of N x N matrices.

    Attributes:
        tokens: N.
        step: rows of a block; the last may have fewer.
        first, last: (batch, blocks) int64 on the CPU; columns from ``first`` to before ``last``,
            none where both are equal.
    """

    tokens: int
    step: int
    first: Tensor
    last: Tensor

    @staticmethod
    def of_probabilities(p: Tensor, step: int) -> "RowBlocks":
        """Blocks by the zeros of P, (batch, N, N)."""
        n, p = p.shape[-1], p.detach()
        seen = torch.stack([p[:, i : i + step].amax(1) != 0 for i in range(0, n, step)], 1)
        return _of(seen, n, step, (len(p),))

    @staticmethod
    @memoised
    def of_mask(att: Attention, step: int) -> "RowBlocks":
        """Blocks by the mask of a layer and its padding, looked at once.

        The batch is all heads of sample 0, then of sample 1, ...
        """
        n, mask, valid = att.tokens, att.mask, att.valid
        count = -(-n // step)
        seen = torch.ones(1, 1, count, n, dtype=torch.bool, device=att.device)
        if mask is not None:
            rows = four_axes(mask.detach()).expand(-1, -1, n, -1)  # a view
            parts = [rows[:, :, i : i + step].amax(2) > BLOCKED for i in range(0, n, step)]
            seen = torch.stack(parts, 2).expand(-1, -1, -1, n)
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
        ends = zip(self._rows(), self.first[b].tolist(), self.last[b].tolist(), strict=True)
        return [(rows, slice(a, c)) for rows, a, c in ends if a < c]

    def _rows(self) -> list[slice]:
        n, step = self.tokens, self.step
        return [slice(i, min(i + step, n)) for i in range(0, n, step)]

    def shared(self) -> list[tuple[slice, slice]]:
        """Rows and columns of blocks that hold those of every entry."""
        seen = self.last > self.first
        first, last = torch.where(seen, self.first, self.tokens).amin(0), self.last.amax(0)
        return replace(self, first=first[None], last=last[None]).of(0)

    @property
    def widest(self) -> int:
        """The most columns of a block."""
        return int((self.last - self.first).amax())

    @property
    def size(self) -> int:
        """Number of entries of all matrices inside the blocks."""
        rows = torch.tensor([rows.stop - rows.start for rows in self._rows()])
        return int(((self.last - self.first) * rows).sum())

    @property
    def share(self) -> float:
        """Share of all entries that is inside the blocks."""
        return self.size / (max(1, len(self.first)) * self.tokens**2)


def _of(seen: Tensor, n: int, step: int, batch: tuple[int, ...]) -> RowBlocks:
    """First and last nonzero column of each block of rows, from (..., blocks, N) bool.

    Some entries of the batch may share one.
    """
    order = seen.to(torch.uint8)
    ends = (order.argmax(-1), n - order.flip(-1).argmax(-1))
    first, last = (
        torch.where(seen.any(-1), t, 0).expand(*batch, -1).flatten(0, len(batch) - 1).cpu()
        for t in ends
    )
    return RowBlocks(n, step, first, last)


def worthwhile(p: Tensor) -> RowBlocks | None:
    """Blocks of matrices P (batch, N, N) in memory, or None where products are as fast without."""
    # on a GPU many small products cost more than few large ones
    if p.device.type != "cpu" or p.shape[-1] < LEAST:
        return None
    blocks = RowBlocks.of_probabilities(p, FEWER_ROWS if p.shape[-1] < SHORT else ROWS)
    return blocks if blocks.share <= WORTH else None


class RowBlock(NamedTuple):
    """Rows and columns of a block, with P and the weights of changes of q k^T there.

    (rows, columns), or (batch, rows, columns).
    """

    rows: slice
    keys: slice
    p: Tensor
    weights: Tensor

    def to(self, dtype: torch.dtype) -> "RowBlock":
        """The same in another dtype."""
        p = self.p.to(dtype)
        return self._replace(p=p, weights=p if self.weights is self.p else self.weights.to(dtype))


Group = tuple[slice, Iterable[RowBlock]]
"""Some entries of a batch and their blocks, the same for all of them, with P (entries, rows,
columns)."""
