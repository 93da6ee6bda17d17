"""Activation functions, their derivatives, and the range of a derivative over an interval: Lemma 112 (docs/theory/networks.md)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ROUNDING = 1e-14
"""Absolute allowance for the rounding of a derivative in float64."""
TANH_GELU = (2 / math.pi) ** 0.5
SIGMOID_GELU = 1.702


@dataclass(frozen=True)
class Activation:
    """A function of one number.

    Attributes:
        name: what transformers and torch call it.
        value, slope: the function and its derivative, of tensors.
        turns: where the derivative has its local extremes; between two of them it is monotone. At a jump both sides.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    turns: tuple[float, ...] = ()

    def slopes(self, z: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest derivative at distance at most ``reach`` from z; shapes broadcast."""
        low, high = z - reach, z + reach
        ends = torch.stack([self.slope(low), self.slope(high), self.slope(z).expand_as(low)])
        least, most = ends.amin(0), ends.amax(0)
        for turn in self.turns:
            there = (low <= turn) & (turn <= high)
            value = float(self.slope(torch.tensor(turn, dtype=torch.float64)))
            least, most = torch.where(there, least.clamp_max(value), least), torch.where(there, most.clamp_min(value), most)
        return least - ROUNDING, most + ROUNDING

    def slope_change(self, z: Tensor, reach: Tensor) -> Tensor:
        """How far the derivative can be from that at z within ``reach`` of it."""
        least, most = self.slopes(z, reach)
        here = self.slope(z)
        return torch.maximum(most - here, here - least) + ROUNDING


def _gelu_slope(z: Tensor) -> Tensor:
    return torch.special.ndtr(z) + z * (-z.square() / 2).exp() / (2 * math.pi) ** 0.5


def _tanh_gelu_slope(z: Tensor) -> Tensor:
    t = torch.tanh(TANH_GELU * (z + 0.044715 * z**3))
    return (1 + t) / 2 + z / 2 * (1 - t.square()) * TANH_GELU * (1 + 3 * 0.044715 * z.square())


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s + z * s * (1 - s)


SILU_TURN = 2.39935728051546767
"""Where z tanh(z/2) = 2."""
TANH_GELU_TURN = 1.41850400879082836
"""Where the second derivative of GELU's tanh form is 0."""
JUST_BELOW = -5e-324
"""0 seen from below: where a jump's other side is."""
ACTIVATIONS = (
    Activation("gelu", gelu, _gelu_slope, (-(2**0.5), 2**0.5)),
    Activation("gelu_tanh", lambda z: gelu(z, approximate="tanh"), _tanh_gelu_slope, (-TANH_GELU_TURN, TANH_GELU_TURN)),
    Activation("silu", silu, _silu_slope, (-SILU_TURN, SILU_TURN)),
    Activation(
        "quick_gelu", lambda z: z * torch.sigmoid(SIGMOID_GELU * z), lambda z: _silu_slope(SIGMOID_GELU * z),
        (-SILU_TURN / SIGMOID_GELU, SILU_TURN / SIGMOID_GELU),
    ),
    Activation("relu", torch.relu, lambda z: (z >= 0).to(z.dtype), (JUST_BELOW, 0.0)),
    Activation("tanh", torch.tanh, lambda z: 1 - torch.tanh(z).square(), (0.0,)),
)  # fmt: skip
"""Those that are known, in the order in which they are tried."""
