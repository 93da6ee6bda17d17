"""Multiplication by powers of two: exact where the result stays in the range of float64."""

import torch
from torch import Tensor


def exact_power(e: Tensor) -> Tensor:
    """2^e of integers between -1022 and 1023, float64, by their bits: what exp2 rounds would no
    longer be exact."""
    return ((e.long() + 1023) << 52).view(torch.float64)


def times_power(t: Tensor, e: Tensor) -> Tensor:
    """t 2^e of integers e, in two steps, of which none leaves the range unless the result does;
    differentiable in t."""
    half = e.long() >> 1
    return t * exact_power(half.clamp(-1022, 1023)) * exact_power((e - half).clamp(-1022, 1023))


def times_power_up(t: Tensor, e: Tensor) -> Tensor:
    """An upper value of t 2^e of numbers t >= 0: near the end of the range, where the product
    rounds, something is added."""
    value = times_power(t, e)
    return torch.where((t > 0) & (value < 1e-300), value + 1e-307, value)
