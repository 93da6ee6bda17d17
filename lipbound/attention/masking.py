"""Additive masks."""

import math

import torch
from torch import Tensor

BLOCKED = -1e30
"""Additive mask entries at or below this value forbid attention (models write the dtype's lowest
number, or -inf)."""


def zero_one(mask: Tensor) -> bool:
    """Tell whether a mask holds 0 and 1, both and nothing else: it was hardly meant to be added to
    scores.

    >>> zero_one(torch.ones(2, 2).tril()), zero_one(torch.zeros(2, 2))
    (True, False)
    """
    return (
        bool(((mask == 0) | (mask == 1)).all())
        and bool((mask == 1).any())
        and bool((mask == 0).any())
    )


def add_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """``scores`` plus an additive mask of theirs, -inf where it forbids attention."""
    return (scores + mask).masked_fill(mask <= BLOCKED, -math.inf)


def level(mask: Tensor) -> Tensor:
    """A mask, float64, less the largest entry of each row: the softmax sees only differences, and
    large constants would swallow digits of scores."""
    forbidden = mask <= BLOCKED
    mask = mask.double().masked_fill(forbidden, -math.inf)
    top = mask.amax(-1, keepdim=True)
    return mask - torch.where(torch.isfinite(top), top, 0.0)


def four_axes(mask: Tensor) -> Tensor:
    """A mask as (samples or 1, heads or 1, N or 1, N or 1)."""
    return mask[(None,) * (4 - mask.ndim)]


def selected(mask: Tensor, samples: slice, heads: slice) -> Tensor:
    """The mask of some samples and heads."""
    mask = four_axes(mask)
    mask = mask[samples] if mask.shape[0] > 1 else mask
    return mask[:, heads] if mask.shape[1] > 1 else mask


def among(mask: Tensor, keep: Tensor) -> Tensor:
    """The mask between some of the tokens, ``keep`` (N,) bool."""
    n = len(keep)
    return mask.expand(*mask.shape[:-2], n, n)[..., keep, :][..., keep]


def sees_some_key(mask: Tensor, tokens: int, valid: Tensor | None) -> bool:
    """Whether every query that counts may attend to some key; ``valid`` (samples, N)
    bool or None."""
    keys = (mask > BLOCKED).expand(
        *mask.shape[:-2], *torch.broadcast_shapes(mask.shape[-2:], (1, tokens))
    )
    if valid is not None:
        keys = keys & valid[:, None, None, :]
    sees = keys.any(-1)
    if valid is not None:
        sees = sees | ~valid[:, None, :]
    return bool(sees.all())
