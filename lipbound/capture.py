"""From a transformers model and a batch of inputs to the `Attention` of every layer, whatever the architecture.

The model is run with an attention function of our own (`lipbound.recording`), which records what it is handed and lets the model's own eager
attention do the computing. The projections are read off by probing (`lipbound.probing`). Every capture is checked against the model: rebuilt
q, k, v against those of the forward pass, and rebuilt head outputs against a second pass through the model's untouched eager attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipbound.attention import Attention
from lipbound.errors import CaptureError
from lipbound.probing import Weights, hidden_states, probe
from lipbound.recording import NAME, Call, forward, implementation, record

AFFINE = 1e-4
"""Largest relative error of a rebuilt tensor. Affine projections rebuild to 1e-5 or better in float32, others miss by orders of magnitude."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest absolute difference over the largest absolute entry of the reference."""
    scale = reference.abs().amax().clamp_min(torch.finfo(reference.dtype).tiny)
    return float((value - reference).abs().amax() / scale)


@dataclass
class LayerCapture:
    """Attention of one layer with what the check against the model said."""

    name: str
    attention: Attention
    error: float
    """Largest relative error of rebuilt q, k, v and head outputs against the model's own."""


@dataclass
class Capturer:
    """Captures the attention of a model, batch after batch; weights are probed and the model verified on the first.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``.
        layers: indices of attention calls, in the order of the forward pass; all by default.
    """

    model: PreTrainedModel
    layers: Sequence[int] | None = None
    _weights: dict[int, Weights] = field(default_factory=dict)
    _verified: dict[int, float] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, Tensor]) -> list[LayerCapture]:
        """The attention of every (chosen) layer at these model inputs, in the model's dtype and on its device.

        Raises:
            CaptureError: the model never calls the attention interface, or a layer is not what `Attention` describes (rotary
                embeddings, normalised or non-affine queries and keys, cross-attention, capped scores, sinks), or the rebuilt layer does not
                reproduce the model; the message names the layer and the reason.
        """
        model_dtype = next(self.model.parameters()).dtype
        if model_dtype not in (torch.float32, torch.float64):
            raise CaptureError(f"the model computes in {model_dtype}; convert it first, model.float() or model.double()")
        with implementation(self.model, NAME):
            calls = record(self.model, inputs)
            chosen = self._chosen(len(calls))
            for i in chosen:
                if i not in self._weights:
                    self._weights[i] = probe(calls[i])
        captures = []
        for i in chosen:
            attention, error = self._assemble(calls[i], self._weights[i], inputs)
            captures.append(LayerCapture(calls[i].name, attention, error))
            calls[i].q = calls[i].k = calls[i].v = calls[i].out = torch.empty(0)
        if not self._verified:
            self._verified = self._verify(inputs, [calls[i] for i in chosen], captures, chosen)
        for i, capture in zip(chosen, captures, strict=True):
            capture.error = max(capture.error, self._verified[i])
        return captures

    def _chosen(self, count: int) -> list[int]:
        if self.layers is None:
            return list(range(count))
        wrong = [i for i in self.layers if not -count <= i < count]
        if wrong:
            raise CaptureError(f"layers {wrong} do not exist: the model has {count} attention layers, numbered 0 to {count - 1}")
        return [i % count for i in self.layers]

    def _assemble(self, call: Call, weights: Weights, inputs: Mapping[str, Tensor]) -> tuple[Attention, float]:
        x = hidden_states(call)
        if call.extras:
            what = {"softcap": "caps its scores with tanh", "s_aux": "has sink logits", "position_bias": "adds a relative position bias"}
            reasons = " and ".join(what[name] for name in call.extras)
            raise CaptureError(f"layer {call.name}: {type(call.module).__name__} {reasons}, which is not supported")
        valid = _valid(inputs, x)
        mask = call.mask
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, -torch.inf)
            mask = mask.to(x.dtype)
            if valid is not None:  # padding is `valid`'s business; what remains is often no mask at all
                padded = ~(valid[:, None, :, None] & valid[:, None, None, :])
                mask = mask.expand(len(x), *mask.shape[1:]).masked_fill(padded.expand(len(x), mask.shape[1], -1, -1), 0.0)
            if bool((mask == 0).all()):
                mask = None
            elif mask.shape[0] > 1 and bool((mask == mask[:1]).all()):
                mask = mask[:1]
        scale = call.scale if call.scale is not None else call.q.shape[-1] ** -0.5
        dtype = x.dtype
        b_q, b_k, b_v = (None if b is None else b.to(dtype) for b in weights.b)
        w_q, w_k, w_v = (w.to(dtype) for w in weights.w)
        w_o = None if weights.w_o is None else weights.w_o.to(dtype)
        attention = Attention(x.detach(), w_q, w_k, w_v, b_q=b_q, b_k=b_k, b_v=b_v, w_o=w_o, scale=float(scale), mask=mask, valid=valid)
        error = 0.0
        groups = call.q.shape[1] // call.k.shape[1]
        for name, mine, model in (
            ("queries", attention.q, call.q),
            ("keys", attention.k, call.k.repeat_interleave(groups, 1)),
            ("values", attention.v, call.v.repeat_interleave(groups, 1)),
        ):
            keep = slice(None) if valid is None else valid
            difference = relative_error(mine.transpose(1, 2)[keep], model.transpose(1, 2)[keep])
            if not difference <= AFFINE:
                raise CaptureError(_not_affine(call, name, difference))
            error = max(error, difference)
        return attention, error

    def _verify(self, inputs: Mapping[str, Tensor], calls: list[Call], captures: list[LayerCapture], chosen: list[int]) -> dict[int, float]:
        """Errors of the rebuilt head outputs of the first sample, against the model running its own eager attention."""
        seen: dict[int, list[Tensor]] = {id(c.consumer or c.module): [] for c in calls}

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen[id(module)].append(args[0])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            seen[id(module)].append(output[0] if isinstance(output, tuple) else output)

        hooks = []
        for module in {id(m): m for m in (c.consumer or c.module for c in calls)}.values():
            consumer = any(c.consumer is module for c in calls)
            hooks.append(module.register_forward_pre_hook(before) if consumer else module.register_forward_hook(after))
        try:
            with implementation(self.model, "eager"):
                forward(self.model, {name: t[:1] if isinstance(t, Tensor) and t.ndim else t for name, t in inputs.items()})
        finally:
            for hook in hooks:
                hook.remove()
        errors = {}
        for i, call, capture in zip(chosen, calls, captures, strict=True):
            own = seen[id(call.consumer or call.module)][call.turn]
            att = capture.attention.select(samples=slice(0, 1))
            mine = att.out.transpose(1, 2).flatten(2)
            if own.numel() != mine.numel():
                raise CaptureError(f"layer {capture.name}: no point of the model could be found where its head outputs can be checked")
            own = own.reshape(mine.shape)
            keep = slice(None) if att.valid is None else att.valid
            difference = relative_error(mine[keep], own[keep])
            if not difference <= AFFINE:
                raise CaptureError(
                    f"layer {capture.name}: rebuilt head outputs differ from the model's own eager attention by {difference:.1e} relative "
                    f"(allowed {AFFINE:.0e}); its attention is not softmax(scale q k^T + mask) v"
                )
            errors[i] = difference
        return errors


def capture(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, layers: Sequence[int] | None = None) -> list[Attention]:
    """The `Attention` of every layer of a transformers model at a batch of ready inputs, checked against the model.

    Args:
        model: a loaded transformers model, in float32 or float64; any task class.
        inputs: what its forward takes, e.g. ``tokenizer(texts, return_tensors="pt", padding=True)``.
        layers: indices of the attention layers wanted; all by default.

    Returns:
        One `Attention` per layer, in the order of the forward pass, with ``w_o`` where the projection of the concatenated heads was found.

    Raises:
        CaptureError: see `Capturer.run`.
    """
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(f"model is a {type(model).__name__}; capture takes a transformers model (a PreTrainedModel)")
    return [layer.attention for layer in Capturer(model, layers).run(inputs)]


def _valid(inputs: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Which tokens are not padding, from the model's attention_mask; None when all are real."""
    given = inputs.get("attention_mask")
    if given is None or bool((given != 0).all()):
        return None
    if tuple(given.shape) != tuple(x.shape[:2]):
        raise CaptureError(
            f"attention_mask has shape {tuple(given.shape)} but the attention layers see {tuple(x.shape[:2])} tokens, so padding cannot be told "
            "apart; give inputs without padding"
        )
    return given != 0


def _not_affine(call: Call, name: str, difference: float) -> str:
    what = f"layer {call.name} ({type(call.module).__name__}): {name} are not one affine map of the layer's input (off by {difference:.1e} relative)"
    names = {part for part, _ in call.module.named_modules()}
    if any(marker in n for n in names for marker in ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")):
        return f"{what}: the layer normalises queries and keys, which is not supported"
    if "position_embeddings" in call.kwargs or any("rotary" in n for n in names):
        return f"{what}: the layer rotates queries and keys by their positions (rotary embedding), which is not supported"
    return f"{what}: the layer transforms them between projection and scores, or takes them from another input (cross-attention)"
