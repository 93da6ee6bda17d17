"""Inputs at which copies of tokens make a head steeper: a search by gradient ascent (see
`lipbound.analysis.mean_field.duplicated_norm`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.analysis.mean_field import query_block_norms
from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm


class SplitSearch(NamedTuple):
    """For every head the largest ratio found, (heads,), float64, and the input where it was found,
    (heads, N, D). Above 1 the head splits there."""

    ratio: Tensor
    x: Tensor


def search_split(att: Attention, *, steps: int = 60, rate: float = 0.05) -> SplitSearch:
    r"""Look for inputs at which :math:`\max_i \|B_i\| > \|J\|`, by gradient ascent (Adam) on the
    logarithm of their ratio from every sample of ``att``.

    Args:
        att: the heads, and where to start; no padding.
        steps: of the ascent. rate: length of a step, relative to the mean length of tokens.

    Returns:
        `SplitSearch`; ratios are those of exact norms in float64, to 1e-6.

    Raises:
        LipboundError: padded inputs.
    """
    att.only("search_split")
    if att.valid is not None:
        raise LipboundError(
            "the search takes inputs without padding; give one sample at a time, "
            "Attention.unpadded(i)"
        )
    att = att.double()
    found = [_search(att.select(heads=slice(h, h + 1)), steps, rate) for h in range(att.heads)]
    return SplitSearch(
        torch.stack([ratio for ratio, _ in found]), torch.stack([x for _, x in found])
    )


def _search(att: Attention, steps: int, rate: float) -> tuple[Tensor, Tensor]:
    x = att.x.clone().requires_grad_()
    size = float(att.x.norm(dim=-1).mean()) / att.x.shape[2] ** 0.5
    optimiser = torch.optim.Adam([x], lr=rate * size)
    best, where = torch.tensor(0.0, dtype=torch.float64), att.x[0]
    for _ in range(steps + 1):
        here = att.at(x.detach().clone())
        top = spectral_norm(here, tol=1e-6, vectors=True)
        moving = att.at(x)
        own = query_block_norms(moving).amax(-1)[:, 0]
        ratio = own.detach().cpu() / top.lower[:, 0].clamp_min(1e-300)
        if float(ratio.max()) > float(best):
            best, where = ratio.max(), here.x[int(ratio.argmax())]
        assert top.left is not None
        assert top.right is not None
        norm = (top.left[:, 0] * HeadJacobian(moving).along(top.right[:, 0])).sum((-1, -2))
        optimiser.zero_grad()
        (norm.clamp_min(1e-300).log() - own.clamp_min(1e-300).log()).sum().backward()
        x.grad = None if x.grad is None else torch.nan_to_num(x.grad)
        optimiser.step()
    return best, where
