"""Jacobians of heads whose attention matrices do not fit, or are mostly masked.

P is formed for some rows, and the keys they see, at a time.
"""

import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.scoring import add_mask
from lipbound.errors import MemoryFullError, T
from lipbound.jacobians.head import HeadJacobian, HeadOperator
from lipbound.jacobians.products.row_blocks import ROWS, Group, RowBlock, RowBlocks
from lipbound.linalg.operators import PerEntry

WHOLE_BYTES = {"cpu": 2e9, "cuda": 8e9}
"""Bytes of attention matrices and their temporaries above which they are not kept."""
STREAMED_BYTES = {"cpu": 2**23, "cuda": 2**29}
"""Bytes of the rows of float64 scores that are formed at a time."""
SCORE_BYTES = 20
"""Bytes for one entry of P while it is computed in float64, and in the products."""
LONG = 1024
"""Tokens from which P is formed in blocks where a mask allows at most `FEW` of its entries."""
REACH = 100.0
"""Largest score, by lengths of queries and keys, at which scores of a search are float32."""
FEW = 0.6
"""Largest share of allowed entries at which blocks are faster than all of P."""


BY_ROWS = ContextVar("by_rows", default=False)
"""True while rows of P are formed anew in every product, because memory has run out."""


def by_rows_if_full(att: Attention, measure: Callable[[], T]) -> T:
    """Call ``measure``, and where memory runs out call it again, with P formed by rows.

    Raises:
        MemoryFullError: they do not fit either.
    """
    try:
        return measure()
    except (torch.cuda.OutOfMemoryError, MemoryFullError):
        pass  # its traceback, which holds tensors, ends here
    att.cache.clear()
    torch.cuda.empty_cache()
    before = BY_ROWS.set(True)
    try:
        return measure()
    finally:
        BY_ROWS.reset(before)


def head_jacobian(att: Attention) -> HeadOperator:
    """`HeadJacobian` where all of P fits and is worth its memory, else `StreamedHeadJacobian`.

    Cross-attention is always the former.
    """
    needed = att.samples * att.heads * att.tokens**2 * SCORE_BYTES
    too_large = needed > whole_bytes(att.device) or BY_ROWS.get()
    if "cross" not in att.variants and (too_large or _mostly_masked(att)):
        return StreamedHeadJacobian(att)
    return HeadJacobian(att)


def _mostly_masked(att: Attention) -> bool:
    masked = att.mask is not None or att.valid is not None
    long = att.device.type == "cpu" and att.tokens >= LONG
    return masked and long and RowBlocks.of_mask(att, ROWS).share <= FEW


def whole_bytes(device: torch.device) -> float:
    """`WHOLE_BYTES` of a device."""
    return WHOLE_BYTES.get(device.type, WHOLE_BYTES["cpu"])


def _blocks(att: Attention) -> RowBlocks:
    """Blocks as large as memory allows; on a CPU of few rows where a mask forbids entries."""
    most = STREAMED_BYTES.get(att.device.type, STREAMED_BYTES["cpu"]) // 8
    rows = widest = att.tokens
    if att.device.type == "cpu" and not (att.mask is None and att.valid is None):
        rows, widest = ROWS, max(1, RowBlocks.of_mask(att, ROWS).widest)
    return RowBlocks.of_mask(att, max(1, min(rows, most // widest)))


@dataclass(frozen=True)
class Kept:
    """Blocks of P and of its weights, a list for every entry of a batch."""

    entries: list[list[RowBlock]]

    def select(self, index: Tensor | slice) -> "Kept":
        """Those of some entries."""
        index = index if isinstance(index, slice) else index.cpu()
        return Kept([self.entries[b] for b in torch.arange(len(self.entries))[index].tolist()])

    def to(self, dtype: torch.dtype) -> "Kept":
        """The same in another dtype."""
        return Kept([[block.to(dtype) for block in entry] for entry in self.entries])


@dataclass(init=False, eq=False, repr=False)
class StreamedHeadJacobian(HeadOperator):
    """`HeadOperator` in memory O(N (d + d_v)) per head.

    Rows of P come from q, k, and the largest score and sum of each row, twice in every product.
    Scores are formed only for the keys that a block of rows sees, so that time goes with the
    entries that the mask allows; where these fit, as in a sliding window, P is kept between
    products. Scores are float64, as for `Attention.p`, so the numbers are those of `HeadJacobian`
    up to the order of summation; in a copy in float32, for a search, scores of at most `REACH` are
    float32. Products take about twice as long where P is not kept. Not differentiable.
    """

    layer: Attention
    entry: PerEntry[Tensor]
    """Position in the whole batch: sample times heads plus head."""
    wide_q: PerEntry[Tensor]
    wide_k: PerEntry[Tensor]
    top: PerEntry[Tensor]
    """Largest score of each row, (batch, N, 1)."""
    total: PerEntry[Tensor]
    """Sum of each row's exponentials, (batch, N, 1)."""
    blocks: PerEntry[RowBlocks]
    """Rows that are formed together, and the keys that they see."""
    kept: PerEntry[Kept | None]
    """All of P that is not zero, where it fits."""
    shifted: bool
    """True if scores come out as logarithms of P, in float32, by one more coordinate of queries and
    keys."""
    coarse: float

    def __init__(self, att: Attention):
        self._set(att)
        self.wide_q, self.wide_k = (t.flatten(0, 1) for t in (att.wide_q, att.centred_k))
        self.layer, self.entry = att, torch.arange(self.batch, device=self.device)
        self.top = torch.zeros(self.batch, att.tokens, 1, dtype=torch.float64, device=self.device)
        self.total = torch.ones_like(self.top)
        self.o, self.blocks, self.kept = torch.zeros_like(self.v), _blocks(att), None
        self.shifted, self.coarse = False, 1.0
        needed = self.blocks.size * SCORE_BYTES * (1 if att.cap is None else 2)
        fits = needed <= whole_bytes(self.device) and not BY_ROWS.get()
        found = [self._first_pass(b, fits) for b in range(self.batch)]
        if fits:
            self.kept = Kept(found)
        self._set_gate(att)

    def _first_pass(self, b: int, keep: bool) -> list[RowBlock]:
        """Largest score, sum and output of each row of an entry; its blocks, if they are kept."""
        extra, found = self.layer.sinks, []
        extra = None if extra is None else extra.double()[b % self.layer.heads]
        for rows, keys in self.blocks.of(b):
            scores = self._scores(b, rows, keys)
            top = scores.amax(-1, keepdim=True)
            top = top if extra is None else top.maximum(extra.amax())
            # rows of padding attend to nothing
            self.top[b, rows] = top.masked_fill(top == -torch.inf, 0.0)
            grown = scores.sub_(self.top[b, rows]).exp_()
            total = grown.sum(-1, keepdim=True)
            if extra is not None:
                total = total + (extra - self.top[b, rows]).exp().sum(-1, keepdim=True)
            self.total[b, rows] = total.clamp_min(1.0)
            p = self._shares(b, rows, grown)
            self.o[b, rows] = p @ self.v[b, keys]
            if keep:
                found.append(RowBlock(rows, keys, p, self._weights(b, rows, keys, p)))
        return found

    def _scaled(self, b: int, rows: slice, keys: slice) -> Tensor:
        """Products scale q k^T for some queries and keys of an entry, (rows, keys).

        In float64 unless `shifted`; then less the logarithms of the rows' sums.
        """
        q, k = self.wide_q[b, rows], self.wide_k[b, keys]
        # nothing is added, and the scale takes no pass of its own
        scale = 1.0 if self.shifted else self.layer.scale
        return torch.addmm(q.new_empty(1), q, k.mT, beta=0, alpha=scale)

    def _scores(self, b: int, rows: slice, keys: slice) -> Tensor:
        """Masked scores of some queries of an entry, (rows, keys), float64 unless `shifted`."""
        s, h = divmod(int(self.entry[b]), self.layer.heads)
        scores = self.layer.capped(self._scaled(b, rows, keys))
        mask = self.layer.mask_part(s, h, rows, keys)
        if mask is not None:
            scores = add_mask(scores, mask.to(scores.dtype))
        if (valid := self.layer.valid) is not None:
            absent = ~(valid[s, keys] & valid[s, rows, None])
            scores = scores.masked_fill(absent, -torch.inf)
        return scores

    def _shares(self, b: int, rows: slice, grown: Tensor) -> Tensor:
        """Entries of some rows of P from exponentials of scores less the largest of their row."""
        return grown.to(self.dtype).div_(self.total[b, rows].to(self.dtype))

    def _weights(self, b: int, rows: slice, keys: slice, p: Tensor) -> Tensor:
        """Weights of changes of q k^T in a block of P."""
        if self.layer.cap is None:
            return p
        slopes = self.layer.slopes(self._scaled(b, rows, keys))
        return p if slopes is None else p * slopes.to(self.dtype)

    def _read(self, b: int) -> Iterator[RowBlock]:
        """The blocks of an entry that are not all zero."""
        if self.kept is not None:
            yield from self.kept.entries[b]
            return
        for rows, keys in self.blocks.of(b):
            scores = self._scores(b, rows, keys)
            if self.shifted:
                p = scores.to(self.dtype).exp_()
            else:
                p = self._shares(b, rows, scores.sub_(self.top[b, rows]).exp_())
            yield RowBlock(rows, keys, p, self._weights(b, rows, keys, p))

    def _groups(self) -> Iterator[Group]:
        for b in range(self.batch):
            blocks = (RowBlock(rows, keys, p[None], t[None]) for rows, keys, p, t in self._read(b))
            yield slice(b, b + 1), blocks

    def to(self, dtype: torch.dtype) -> Self:
        # scores stay in float64, but for some searches, and masks as they are
        kept = {name: getattr(self, name) for name in ("layer", "wide_q", "wide_k", "top", "total")}
        bare = self._with(**dict.fromkeys(kept))
        other = super(StreamedHeadJacobian, bare).to(dtype)._with(**kept)
        if dtype != torch.float32 or self.kept or self.layer.cap or self.shifted:
            return other
        # for a search: what proofs count are scores less the largest, divided by sums
        off, q = self.top + self.total.log(), self.layer.scale * self.wide_q
        longest = (torch.linalg.vector_norm(t, dim=-1).amax() for t in (q, self.wide_k))
        reach = float(math.prod(longest) + off.abs().amax())
        if not reach <= REACH:
            return other
        other.shifted, other.coarse = True, 1 + reach
        q, k = torch.cat([q, -off], -1), torch.cat([self.wide_k, torch.ones_like(off)], -1)
        return other._with(wide_q=q.to(dtype), wide_k=k.to(dtype))

    def column_sums(self) -> Tensor:
        out = self.o.new_zeros(self.batch, self.layer.tokens)
        for b in range(self.batch):
            for _, keys, p, _ in self._read(b):
                out[b, keys] += p.sum(0)
        return out

    def largest(self) -> Tensor:
        """The largest entry of every row of P, (batch, N); a sink's where that is larger."""
        return (1 / self.total[..., 0]).masked_fill((self.o == 0).all(-1), 0.0)
