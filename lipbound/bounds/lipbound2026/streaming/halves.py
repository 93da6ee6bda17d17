"""Matrices with entries >= 0 in float16, rounded upwards, each row divided by a power of two of its own.

Rounding: Lemma 119 (docs/theory/long_terms.md).
"""

import torch
from torch import Tensor

from lipbound.linalg.matrix_norms import power_of_two

UP = 1 + 1.01 * 2.0**-11
"""More than rounding to float16 takes from a number, times it and put back before."""
HIDDEN = 1.01 * 2.0**-25
"""More than it takes from one next to zero."""
ROWS = 256
"""How many are converted at a time."""


class Halves:
    """A square matrix, zero at first. Zeros are exact.

    Args:
        size: near the largest entry that `put_columns` gets; ten thousand times as much would still fit.
    """

    def __init__(self, n: int, device: torch.device, size: Tensor):
        self._entries = torch.zeros(n, n, dtype=torch.float16, device=device)
        self._scale = power_of_two(size).expand(n).clone()

    def put(self, rows: slice, values: Tensor) -> None:
        """Replace some rows, (rows, n)."""
        scale = power_of_two(values.amax(-1))
        self._scale[rows] = scale
        self._entries[rows] = _up(values / scale[:, None])

    def put_columns(self, cols: slice, values: Tensor) -> None:
        """Replace some columns, given as rows, (cols, n)."""
        self._entries[:, cols] = _up(values / self._scale).mT

    def rows(self, rows: slice) -> Tensor:
        """Some rows, (rows, n), float64."""
        return self._entries[rows].double() * self._scale[rows, None]

    def columns(self, cols: slice) -> Tensor:
        """Some columns, as rows, (cols, n), float64."""
        return self._entries[:, cols].mT.double() * self._scale

    def times(self, y: Tensor) -> Tensor:
        """M y for y (n, m), float64."""
        return torch.cat([self._entries[rows].double() @ y for rows in self._blocks()]) * self._scale[:, None]

    def transposed_times(self, y: Tensor) -> Tensor:
        """M^T y."""
        total, y = torch.zeros_like(y), y * self._scale[:, None]
        for rows in self._blocks():
            total.addmm_(self._entries[rows].double().mT, y[rows])
        return total

    def _blocks(self) -> list[slice]:
        return [slice(i, i + ROWS) for i in range(0, len(self._entries), ROWS)]


def _up(values: Tensor) -> Tensor:
    return (values * UP + HIDDEN * (values > 0)).half()
