"""Symmetric matrices with entries >= 0 in float32, rounded upwards: two of them share one square.

Rounding: Lemma 117 (docs/theory/long_terms.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

UP = 1 + 2.0**-22
"""More than rounding to float32 takes from a number, times it and put back before."""
HIDDEN = 2.0**-100
"""More than underflow takes from an entry, where the largest is about 1."""


class Packed:
    """Above the diagonal one matrix, below it another; tiles on the diagonal of the second are apart.

    Attributes:
        tiles: rows that are converted together. scale: a power of two that entries are divided by, which must be set before any is put.
    """

    def __init__(self, tiles: Sequence[slice], device: torch.device):
        self.tiles, n = tiles, tiles[-1].stop
        self._square = torch.empty(n, n, dtype=torch.float32, device=device)
        self.scale = torch.ones((), dtype=torch.float64, device=device)
        self._diagonal: list[Tensor] = []

    def put(self, rows: slice, cols: slice, values: Tensor) -> None:
        """Write values >= 0."""
        self._square[rows, cols] = self._up(values)

    def put_diagonal(self, rows: slice, upper: Tensor, lower: Tensor) -> None:
        """The next tile on the diagonal of either matrix, made symmetric where rounding has not left it so."""
        self.put(rows, rows, torch.maximum(upper, upper.mT))
        self._diagonal.append(self._up(torch.maximum(lower, lower.mT)))

    def get(self, rows: slice, cols: slice) -> Tensor:
        """What was put there, or a little more, float64."""
        return self._square[rows, cols].double() * self.scale

    def _up(self, values: Tensor) -> Tensor:
        return (values * (UP / self.scale)).add_(HIDDEN).float()

    def upper(self, y: Tensor) -> Tensor:
        """The upper matrix, over ``scale``, times y (n, 1), float64."""
        total = torch.zeros_like(y)
        for rows in self.tiles:
            part, after = self._square[rows, rows.start :].double(), slice(rows.stop, None)
            total[rows] += part @ y[rows.start :]
            total[after] += part[:, rows.stop - rows.start :].mT @ y[rows]
        return total

    def both(self, y: Tensor) -> Tensor:
        """The same of the sum of both."""
        total = self.upper(y)
        for rows, own in zip(self.tiles, self._diagonal, strict=True):
            part, before = self._square[rows, : rows.start].double(), slice(0, rows.start)
            total[rows] += part @ y[before] + own.double() @ y[rows]
            total[before] += part.mT @ y[rows]
        return total
