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


def _mask_is(att: Attention, shown: Tensor, hidden: Tensor) -> Tensor:
    """True where the mask leaves scores as they are, or forbids them, just where it may, (1, 1).

    Pairs of tokens that are not padding, (N, N) or (1, 1) bool: ``shown`` where it may leave their
    score as it is, ``hidden`` where it may forbid it.
    """
    mask = torch.zeros_like(hidden, dtype=torch.float64) if att.mask is None else att.mask
    right = (shown & (mask == 0)) | (hidden & (mask <= BLOCKED))
    if att.valid is not None:
        both = att.valid[:, None, :, None] & att.valid[:, None, None, :]
        right = right | ~both
    return right.all().view(1, 1)


def hides_or_shows(att: Attention) -> Tensor:
    """True where the mask has no finite offsets and lets every token attend to itself, (1, 1)."""
    others = ~torch.eye(att.tokens, dtype=torch.bool, device=att.device)
    return _mask_is(att, always(att), others)


def unmasked(att: Attention) -> Tensor:
    """True where every token may attend to all but padding and no score has an offset, (1, 1)."""
    return _mask_is(att, always(att), never(att))


def causal(att: Attention) -> Tensor:
    """True where every token may attend to itself and to all before it alone, at no offset, (1, 1).

    Padding does not count.
    """
    later = torch.ones(att.tokens, att.tokens, dtype=torch.bool, device=att.device).triu(1)
    return _mask_is(att, ~later, later)


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
