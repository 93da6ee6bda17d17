"""From scores of queries and keys to probabilities: caps, masks and the softmax."""

import math

import torch
from torch import Tensor

from lipbound.errors import AttentionError

BLOCKED = -1e30
"""Additive mask entries at or below this value forbid attention (models write the dtype's lowest
number, or -inf)."""


def zero_one(mask: Tensor) -> bool:
    """Return whether a mask holds both 0 and 1, and nothing else.

    It was hardly meant to be added to scores.

    >>> zero_one(torch.ones(2, 2).tril()), zero_one(torch.zeros(2, 2))
    (True, False)
    """
    zero, one = mask == 0, mask == 1
    return bool((zero | one).all()) and bool(one.any()) and bool(zero.any())


def add_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Return ``scores`` plus an additive mask of theirs, -inf where it forbids attention."""
    return (scores + mask).masked_fill(mask <= BLOCKED, -math.inf)


def level(mask: Tensor) -> Tensor:
    """Return a mask, float64, less the largest entry of each row.

    The softmax sees only differences, and large constants would swallow digits of scores.
    """
    forbidden = mask <= BLOCKED
    mask = mask.double().masked_fill(forbidden, -math.inf)
    top = mask.amax(-1, keepdim=True)
    return mask - torch.where(torch.isfinite(top), top, 0.0)


def four_axes(mask: Tensor) -> Tensor:
    """Return a mask as (samples or 1, heads or 1, N or 1, N or 1)."""
    return mask[(None,) * (4 - mask.ndim)]


def cap_slope(z: Tensor) -> Tensor:
    """Return the derivative of tanh, 1 / cosh(z)^2.

    It and its own derivative keep their digits where cosh overflows.
    """
    small = torch.exp(-2 * z.abs())
    return 4 * small / (1 + small) ** 2


def softmax(
    scores: Tensor, sinks: Tensor | None, rows: Tensor | None, *, check: bool = True
) -> Tensor:
    """Return the softmax of scores (samples, heads, N, N) over keys.

    Args:
        scores: as they are with the mask, float64.
        sinks: one more score in every softmax of a head, (heads,), whose probability is dropped.
        rows: queries that are not padding, (samples, N) bool; the rows of others are zero.
        check: whether scores may overflow; a GPU waits for the answer.

    Raises:
        AttentionError: scores overflow.
    """
    padded = None if rows is None else ~rows[:, None, :, None]
    scores = scores if padded is None else scores.masked_fill(padded, 0.0)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        p = torch.softmax(torch.cat([scores, column], -1), -1)[..., : scores.shape[-1]]
    else:
        p = torch.softmax(scores, -1)
    p = p if padded is None else p.masked_fill(padded, 0.0)
    # the sum of shares, which are at most 1
    if check and not math.isfinite(float(p.detach().sum())):
        raise AttentionError(
            "the attention scores overflow, so their softmax is not finite; rescale the "
            "inputs or the weights"
        )
    return p
