"""Assumptions that several statements share.

(1 or samples, 1 or heads) bool, True where they hold.
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.scoring import BLOCKED

LINEAR = ("rotation", "cap")
"""Variants under which queries and keys are still affine in their tokens and rows of P still sum to
one: published bounds extend to them."""


def has_query_bias(att: Attention) -> Tensor:
    """True where a head has a nonzero query bias, (heads,): the only bias that enters J."""
    if att.b_q is None:
        return torch.zeros(att.heads, dtype=torch.bool, device=att.device)
    return (att.b_q != 0).any(-1)


def hides_or_shows(att: Attention) -> Tensor:
    """True where the mask has no finite offsets and lets every token attend to itself, (1, 1)."""
    if att.mask is None:
        return torch.ones(1, 1, dtype=torch.bool, device=att.device)
    blocked = att.mask <= BLOCKED
    n = att.tokens
    diagonal = blocked.expand(*blocked.shape[:-2], n, n).diagonal(dim1=-2, dim2=-1)
    if att.valid is not None:
        diagonal = diagonal & att.valid[:, None]
    return (((att.mask == 0) | blocked).all() & ~diagonal.any()).view(1, 1)


def _forbids(att: Attention, later: Tensor) -> Tensor:
    """True where the mask forbids just ``later`` among tokens that are not padding, (1, 1)."""
    mask = torch.zeros_like(later, dtype=torch.float64) if att.mask is None else att.mask
    right = torch.where(later, mask <= BLOCKED, mask == 0)
    if att.valid is not None:
        both = att.valid[:, None, :, None] & att.valid[:, None, None, :]
        right = right | ~both
    return right.all().view(1, 1)


def unmasked(att: Attention) -> Tensor:
    """True where every token may attend to all but padding and no score has an offset, (1, 1)."""
    nothing = torch.zeros(1, 1, dtype=torch.bool, device=att.device)
    return always(att) if att.mask is None else _forbids(att, nothing)


def causal(att: Attention) -> Tensor:
    """True where every token may attend to itself and to all before it alone, at no offset, (1, 1).

    Padding does not count.
    """
    n = att.tokens
    return _forbids(att, torch.ones(n, n, dtype=torch.bool, device=att.device).triu(1))


def always(att: Attention) -> Tensor:
    """True for every layer."""
    return torch.ones(1, 1, dtype=torch.bool, device=att.device)


def never(att: Attention) -> Tensor:
    """False for every layer."""
    return ~always(att)


def no_query_bias(att: Attention) -> Tensor:
    """True where queries have no bias, (heads,).

    With variants (rotation, cap), under which the keys' bias enters J too, keys have none either.
    """
    free = ~has_query_bias(att)
    return free & (att.b_k == 0).all(-1) if att.variants and att.b_k is not None else free
