"""Rows of P of one head, formed anew whenever they are asked for."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.masking import add_mask

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
        self._q, self._k, self._valid = att.scale * att.q[0, head], att.centred_k[0, head], att.valid
        self._scoring = att.scoring.select(slice(0, 1), slice(head, head + 1))
        step = max(1, ROW_BYTES // (8 * max(n, width)))
        self.blocks = [slice(i, min(i + step, n)) for i in range(0, n, step)]

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Every block with its rows of P, (rows, N)."""
        return ((rows, self.p(rows)) for rows in self.blocks)

    def p(self, rows: slice) -> Tensor:
        """Rows of P, (rows, N), float64."""
        return self._probabilities(rows, self._q[rows] @ self._k.mT)

    def with_weights(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Every block with its rows of P and of what changes of scores are weighted with, P times the slopes of the scores."""
        for rows in self.blocks:
            scores = self._q[rows] @ self._k.mT
            slopes = self._scoring.slopes(scores, 0, rows) if self._scoring.sloped else None
            p = self._probabilities(rows, scores)
            yield rows, p, p if slopes is None else p * slopes

    def _probabilities(self, rows: slice, scores: Tensor) -> Tensor:
        scores = self._scoring.transformed(scores, 0, rows)
        mask = self._scoring.mask_part(0, 0, rows)
        if mask is not None:
            scores = add_mask(scores, mask)
        if self._valid is not None:
            scores = scores.masked_fill(~self._valid[0], -torch.inf)
        valid = None if self._valid is None else self._valid[:, rows]
        return self._scoring.probabilities(scores[None, None], valid)[0, 0]
