"""What may stand between projections and softmax besides a mask."""

import torch
from torch import Tensor

VARIANTS = {
    "rotation": "rotary position embeddings",
    "qk_norm": "normalised queries and keys",
    "cap": "capped scores",
    "sinks": "sink logits",
}
"""What may stand between projections and softmax besides a mask."""


def cap_slope(z: Tensor) -> Tensor:
    """Derivative of tanh, 1 / cosh(z)^2; it and its own derivative keep their digits where cosh overflows."""
    small = torch.exp(-2 * z.abs())
    return 4 * small / (1 + small) ** 2
