"""Inner products of long vectors in two stages, so that no term sees many more roundings than the
square root of the length."""

import math

import torch
from torch import Tensor

from lipbound.linalg.matrix_norms import UNIT


class Dots:
    """Inner products of vectors with n entries.

    Attributes:
        roundings: an upper value of their error over the product of the lengths of both vectors,
            float64.
    """

    def __init__(self, n: int):
        self._width = next(w for w in range(math.isqrt(n), 0, -1) if n % w == 0)
        self.roundings = (self._width + n // self._width + 2) * UNIT

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        """Of x (batch, n) with the rows of z (batch, r, n): (batch, r)."""
        return (z * x[:, None]).unflatten(-1, (-1, self._width)).sum(-1).sum(-1)

    def gram(self, z: Tensor) -> Tensor:
        """Of the rows of z (batch, r, n) with each other: (batch, r, r)."""
        return torch.stack([self(row, z) for row in z.unbind(1)], 1)
