"""Largest logits of the batches that a model is trained on, from its own forward passes."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lipbound.attention.scoring import BLOCKED
from lipbound.errors import CaptureError
from lipbound.models.other_libraries import temporarily

QUERIES = 64
"""Queries whose scores are computed at a time: these stay in a processor's cache."""


class BatchLogits:
    """Largest logits of heads, from queries and keys of the passes of a model in training mode.

    Hooks have the attention function, while one of the layers runs, hand on what it is given; it
    computes what it computes without them. No scores are kept, and all are in the model's dtype.
    For torch below 2.5 padding at the left would count: transformers has it attend to all there.

    Args:
        layers: modules of transformers that call the attention function "sdpa".

    Attributes:
        found: by identities of modules, (heads,).
        is_watching: whether passes are looked at.
        hooks: to be closed, which removes them.

    Raises:
        CaptureError: they call another one, or torch is older.
    """

    def __init__(self, layers: Iterable[Any]):
        self.found, self.is_watching = dict[int, Tensor](), False
        self.hooks, self._running = ExitStack(), ExitStack()
        for layer in layers:
            name = getattr(getattr(layer, "config", None), "_attn_implementation", None)
            if name != "sdpa" or torch.__version__ < "2.5":
                what = f"{type(layer).__name__} has {name}, with torch {torch.__version__}"
                raise CaptureError(f"batch_logit needs attention 'sdpa' and torch 2.5, and {what}")
            leave = layer.register_forward_hook(self._leave, always_call=True)
            for hook in (layer.register_forward_pre_hook(self._enter), leave):
                self.hooks.callback(hook.remove)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.is_watching and module.training:
            known = ALL_ATTENTION_FUNCTIONS._local_mapping | {"sdpa": self._attend}
            self._running.enter_context(
                temporarily("_local_mapping", known, ALL_ATTENTION_FUNCTIONS)
            )

    def _leave(self, *_: Any) -> None:
        self._running.close()

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
    ) -> Any:
        """Look at a call of the attention function, and compute it."""
        causal = kw.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        with torch.no_grad():
            found = largest_logits(q, k, mask, kw.get("scaling"), causal)
        self.found[id(module)] = torch.maximum(found, self.found.get(id(module), found))
        return sdpa_attention_forward(module, q, k, v, mask, **kw)


def largest_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool
) -> Tensor:
    """Return the largest scores of pairs that may attend to each other, (heads,), float32.

    Args:
        q: queries, (samples, heads, N, d).
        k: keys, (samples, heads or fewer, M, d).
        mask: True where attention is allowed, or numbers to be added; (samples or 1, heads or 1, N,
            M), or None. Queries whose own key no query may attend to are padding, and do not count.
        scale: factor of the scores; None for d^-0.5.
        is_causal: as of scaled_dot_product_attention; without effect where there is a mask.
    """
    rows, keys = q.shape[-2], k.shape[-2]
    causal = mask is None and is_causal and rows > 1
    later = q.new_full((QUERIES, QUERIES), -torch.inf).triu(1)
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask > BLOCKED
        seen = seen & seen.any(-2, keepdim=True).mT if rows == keys else seen
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    q = (q * (q.shape[-1] ** -0.5 if scale is None else scale)).contiguous()
    k, found = k.repeat_interleave(q.shape[1] // k.shape[1], 1), []
    for i in range(0, rows, QUERIES):
        end = i + QUERIES if causal else keys
        scores = q[..., i : i + QUERIES, :] @ k[..., :end, :].mT
        if causal:
            scores[..., i:] += later[: scores.shape[-2], : scores.shape[-1] - i]
        elif mask is not None:
            scores += mask[..., i : i + QUERIES, :]
        found.append(scores.amax((0, -2, -1)))
    return torch.stack(found).amax(0).float()
