"""Capped scores, which a hyperbolic tangent keeps between two numbers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, Shapes, Variant
from lipbound.errors import AttentionError


@dataclass(frozen=True)
class Cap(Variant):
    r"""Scores :math:`z \mapsto cap\,\tanh(z / cap)`, before the mask is added.

    Gemma 2 (2024), section 2.

    Args:
        value: the cap, a positive number.
    """

    value: float

    name = "cap"
    title = "capped scores"
    stage = 2
    place = 2
    shift_invariant = False

    def check(self, shapes: Shapes) -> None:
        if not 0 < self.value < math.inf:
            raise AttentionError(f"cap is {self.value}; it must be a positive number")

    def scores(self, z: Tensor) -> Tensor:
        return self.value * torch.tanh(z / self.value)

    def slopes(self, z: Tensor) -> Tensor:
        return cap_slope(z / self.value)

    def rounded_scores(self, error: Tensor, reach: Tensor) -> tuple[Tensor, Tensor | float]:
        # tanh has slope at most 1, and the logarithm of its derivative slope at most 2;
        # exponentials and tanh are off by a few units
        slopes = torch.expm1(2 * error / self.value) * (1 + 64 * UNIT) + 64 * UNIT
        return error + 16 * UNIT * reach.clamp_max(self.value), slopes


def cap_slope(z: Tensor) -> Tensor:
    """Return the derivative of tanh, 1 / cosh(z)^2.

    It and its own derivative keep their digits where cosh overflows.
    """
    small = torch.exp(-2 * z.abs())
    return 4 * small / (1 + small) ** 2
