"""Attention probabilities, and whole `Attention` layers, of a model in training, with gradients: what penalties are computed from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError
from lipbound.models.capture.parameters import projections
from lipbound.models.unwrapping import bare_model

TRAINING_TOLERANCE = 1e-3
"""Largest relative difference between the model's queries and projected inputs."""
TRAINING_ATTENTION = "lipbound-training"
"""Name of the attention function in the transformers registry that keeps its probabilities when asked to."""


@dataclass
class _Watch:
    """Who wants the probabilities of which calls, counted in the order of the forward pass."""

    chosen: frozenset[int] | None
    found: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    calls: int = 0


_watch: _Watch | None = None


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kw: Any) -> tuple[Tensor, Any]:
    watch = _watch
    if watch is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kw)
    watch.calls += 1
    if watch.chosen is not None and watch.calls - 1 not in watch.chosen:
        return sdpa_attention_forward(module, query, key, value, mask, **kw)
    extras = [name for name in ("softcap", "s_aux", "position_bias") if kw.get(name) is not None]
    if extras:
        raise CaptureError(f"{type(module).__name__} uses {', '.join(extras)} in its attention, which penalties do not support")
    scale = kw.get("scaling") or query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scores = (query @ key.mT) * scale
    scores = scores if mask is None else scores + mask[..., : key.shape[-2]]
    p = torch.softmax(scores, -1, dtype=torch.promote_types(query.dtype, torch.float32))
    watch.found.append(p)  # before dropout: rows of it do not sum to one
    watch.queries.append(query)
    watch.modules.append(module)
    watch.masks.append(mask)
    watch.scales.append(scale)
    p = p.to(query.dtype)
    dropped = nn.functional.dropout(p, kw.get("dropout", 0.0), module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), p


AttentionInterface.register(TRAINING_ATTENTION, _attention)


AttentionMaskInterface.register(TRAINING_ATTENTION, eager_mask)


@contextmanager
def _watching(model: PreTrainedModel, layers: Sequence[int] | None) -> Iterator[_Watch]:
    global _watch
    model = bare_model(model, tells=False)
    if model.config._attn_implementation != TRAINING_ATTENTION:
        model.set_attn_implementation(TRAINING_ATTENTION)
    before, _watch = _watch, _Watch(None if layers is None else frozenset(layers))
    try:
        yield _watch
    finally:
        _watch = before


@contextmanager
def attention_probabilities(model: PreTrainedModel, layers: Sequence[int] | None = None) -> Iterator[list[Tensor]]:
    """Context in which every forward pass of a model adds its attention probabilities to a list, per layer (samples, heads, N, N), with gradients.

    The model keeps the attention function that does this (set with ``set_attn_implementation``); outside such a context it runs torch's fused
    attention, as it does for layers that are not chosen. Probabilities are those before dropout, in float32 at least, also where the model or
    autocast uses less.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``.
        layers: numbers of attention calls, in the order of the forward pass, counted over all forward passes in the context; all by default.

    Raises:
        CaptureError: capped scores, sinks or position biases.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
    >>> with attention_probabilities(model) as found:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> [tuple(p.shape) for p in found]
    [(1, 2, 3, 3), (1, 2, 3, 3)]
    """
    with _watching(model, layers) as watch:
        yield watch.found


@contextmanager
def attention_layers(model: PreTrainedModel, layers: Sequence[int] | None = None) -> Iterator[list[Attention]]:
    """The same with whole `Attention` layers, differentiable in the model's weights and inputs: what bounds are computed from.

    The list is filled when the context ends. Weights are found by their names (`lipbound.models.capture.parameters`).

    Raises:
        CaptureError: a model whose projections are not found, or whose attention modules are not given one tensor of token vectors.
    """
    known = {id(p.module): p for p in projections(model)}
    given: dict[int, list[Tensor]] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, Tensor):
            given.setdefault(id(module), []).append(x)

    hooks = [p.module.register_forward_pre_hook(before, with_kwargs=True) for p in known.values()]
    result: list[Attention] = []
    try:
        with _watching(model, layers) as watch:
            yield result
    finally:
        for hook in hooks:
            hook.remove()
    for module, query, mask, scale in zip(watch.modules, watch.queries, watch.masks, watch.scales, strict=True):
        if id(module) not in known or not given.get(id(module)):
            raise CaptureError(f"the projections of {type(module).__name__} are not found by their names, so its bound has no gradient")
        found, x = known[id(module)], given[id(module)].pop(0)
        mask = None if mask is None else mask.to(x.dtype)
        (w_q, w_k, w_v), (b_q, b_k, b_v) = found.w, found.b
        heads = query.shape[1]
        w_q, w_k, w_v = (w.repeat_interleave(heads // len(w), 0) for w in (w_q, w_k, w_v))
        att = Attention(x, w_q, w_k, w_v, b_q=b_q, b_k=b_k, b_v=b_v, scale=scale, mask=mask)
        with torch.no_grad():
            mine = att.select(slice(0, 1)).q
            off = float((mine - query[:1]).abs().amax() / query[:1].abs().amax().clamp_min(torch.finfo(mine.dtype).tiny))
        if not off <= TRAINING_TOLERANCE:
            raise CaptureError(
                f"{type(module).__name__} does more to its queries than project them (off by {off:.1e}), so its bound has no gradient here"
            )
        result.append(att)
