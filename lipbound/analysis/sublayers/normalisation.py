r"""Layer normalisation around an input: how steep it gets within a ball, and how far its Jacobian changes.

With c the length of the centred token, :math:`c^2 + D\,eps` under the root: Lemma 111 (docs/theory/networks.md).
"""

import math

import torch
from torch import Tensor

from lipbound.attention.layer_norm import Normaliser

SLACK = 1 + 1e-12


def norm(around: Normaliser) -> Tensor:
    """An upper value of the norm of its Jacobian at the input, the largest over tokens, ()."""
    return around.norms.amax()


def norm_within(around: Normaliser, radius: float) -> Tensor:
    """The same for all inputs whose tokens move by at most ``radius``, ()."""
    length, least = _lengths(around)
    near = (length - radius).maximum(least)
    return _scale(around) / near.amin() * SLACK


def change(around: Normaliser, radius: float) -> Tensor:
    """An upper value of how far its Jacobian is from that at the input when tokens move by at most ``radius``, ()."""
    length, _ = _lengths(around)
    left = length - radius
    curved = torch.where(left > 0, (2 / math.sqrt(3)) * radius / (length * left.clamp_min(1e-300)), torch.inf)
    bent = _scale(around) * curved.amax() * SLACK
    return bent.minimum(norm(around) + norm_within(around, radius))


def _lengths(around: Normaliser) -> tuple[Tensor, Tensor]:
    r""":math:`\sqrt{D}\,s` of every token, and what it is at least for any token, float64."""
    width = around.x.shape[-1]
    return math.sqrt(width) * around.size[..., 0], torch.tensor(math.sqrt(width * around.eps), dtype=torch.float64)


def _scale(around: Normaliser) -> Tensor:
    return around.weight.double().abs().amax() * math.sqrt(around.x.shape[-1])
