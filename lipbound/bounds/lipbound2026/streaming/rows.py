"""Rows of P of one head, formed anew whenever they are asked for."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.masking import add_mask, four_axes

ROW_BYTES = 2**25
"""Bytes of the float64 rows of one N x N matrix that are in memory at a time."""


class Rows:
    """Of one head of a float64 layer with one sample.

    The same operations on the same numbers give the same P every time: it is one matrix, which is never there as a whole.

    Attributes:
        blocks: slices of rows that are formed together, always the same.
    """

    def __init__(self, att: Attention, head: int, width: int):
        """``width``: numbers that a row of the largest other temporary has."""
        n = att.tokens
        self._q, self._k, self._scoring, self._valid = att.scale * att.q[0, head], att.centred_k[0, head], att.scoring, att.valid
        mask = att.scoring.level_mask
        if mask is not None:
            mask = four_axes(mask)
            mask = mask[0, min(head, mask.shape[1] - 1)]
        self._mask = mask
        step = max(1, ROW_BYTES // (8 * max(n, width)))
        self.blocks = [slice(i, min(i + step, n)) for i in range(0, n, step)]

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Every block with its rows of P, (rows, N)."""
        return ((rows, self.p(rows)) for rows in self.blocks)

    def p(self, rows: slice) -> Tensor:
        """Rows of P, (rows, N), float64."""
        scores = self._q[rows] @ self._k.mT
        if self._mask is not None:
            scores = add_mask(scores, self._mask[rows] if len(self._mask) > 1 else self._mask)
        if self._valid is not None:
            scores = scores.masked_fill(~self._valid[0], -torch.inf)
        valid = None if self._valid is None else self._valid[:, rows]
        return self._scoring.probabilities(scores[None, None], valid)[0, 0]
