"""Attention that a module leaves to torch: scaled_dot_product_attention, MultiheadAttention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SDPA = F.scaled_dot_product_attention
"""torch's own function."""
MULTIHEAD = F.multi_head_attention_forward

Adapter = Callable[..., tuple[dict[str, Any], Callable[[Tensor], Tensor]]]
"""Brings a call's arguments into those of scaled_dot_product_attention, by name; and what brings
its outputs, (samples, heads, N, d_v), into the layout of the function's own."""
OTHERS: list[tuple[Any, str, Adapter]] = []
"""Other functions that compute attention: the module that calls each by a name, that name, and the
adapter."""


@contextmanager
def handling_fused(function: Callable[..., Tensor]) -> Iterator[None]:
    """Yield while calls of scaled_dot_product_attention go to ``function``.

    torch's own layers take no fast path that calls neither it nor anything else in Python, and
    its MultiheadAttention returns no weights, for which it would multiply by hand.
    """
    fast = torch.backends.mha.get_fastpath_enabled()

    def multihead(*args: Any, **kwargs: Any) -> Any:
        return MULTIHEAD(*args, **{**kwargs, "need_weights": False})

    others = [(owner, name, getattr(owner, name), adapt) for owner, name, adapt in OTHERS]
    for owner, name, _, adapt in others:
        setattr(owner, name, partial(_adapted, function, adapt))
    F.scaled_dot_product_attention = function
    F.multi_head_attention_forward = multihead
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = SDPA
        F.multi_head_attention_forward = MULTIHEAD
        torch.backends.mha.set_fastpath_enabled(fast)
        for owner, name, original, _ in others:
            setattr(owner, name, original)


def _adapted(function: Callable[..., Tensor], adapt: Adapter, *args: Any, **kwargs: Any) -> Tensor:
    given, back = adapt(*args, **kwargs)
    return back(function(**given))


def additive_mask(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Return what masks of scaled_dot_product_attention add to scores, or None for nothing."""
    if is_causal:
        shape = (q.shape[-2], k.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(q.dtype).min
    return q.new_zeros(mask.shape).masked_fill(~mask, lowest)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention by products and a softmax, twice differentiable."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = additive_mask(query, key, attn_mask, is_causal)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value
