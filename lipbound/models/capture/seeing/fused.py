"""Attention that a module leaves to torch: scaled_dot_product_attention, MultiheadAttention."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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

    def multihead(*args: Any, **kwargs: Any) -> Any:
        return MULTIHEAD(*args, **{**kwargs, "need_weights": False})

    swapped = [(F, "scaled_dot_product_attention", function)]
    swapped += [(F, "multi_head_attention_forward", multihead)]
    swapped += [(owner, name, partial(_adapted, function, adapt)) for owner, name, adapt in OTHERS]
    with ExitStack() as afterwards:
        fast = torch.backends.mha.get_fastpath_enabled()
        afterwards.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        for owner, name, new in swapped:
            afterwards.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield


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


def plain_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Compute scaled_dot_product_attention by products and a softmax, twice differentiable."""
    with sdpa_kernel(SDPBackend.MATH):
        return SDPA(*args, **kwargs)
