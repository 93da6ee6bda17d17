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
from lipbound.surroundings import surroundings, watching

AFFINE = 1e-4
"""Largest relative error of a rebuilt tensor. Affine projections rebuild to 1e-5 or better in float32, others miss by orders of magnitude."""


def head_error(mine: Tensor, reference: Tensor, floor: Tensor, valid: Tensor | None) -> float:
    """Largest difference of two (samples, heads, N, d) tensors, relative to each head's own largest entry, padding left out.

    ``floor`` (samples or 1, heads): size of the numbers a head is computed from, below a thousandth of which no head's entries are taken
    seriously: they are sums that cancel.
    """
    difference, size = (mine - reference).abs(), reference.abs()
    if valid is not None:
        padded = ~valid[:, None, :, None]
        difference, size = difference.masked_fill(padded, 0), size.masked_fill(padded, 0)
    scale = torch.maximum(size.amax((-1, -2)), 1e-3 * floor.to(size.dtype)).clamp_min(torch.finfo(size.dtype).tiny)
    return float((difference.amax((-1, -2)) / scale).amax())


@dataclass
class LayerCapture:
    """Attention of one layer with what the check against the model said."""

    index: int
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
        around: also find what stands around each layer (`lipbound.surroundings`).
    """

    model: PreTrainedModel
    layers: Sequence[int] | None = None
    around: bool = False
    _weights: dict[int, Weights] = field(default_factory=dict)
    _verified: dict[bool, float] = field(default_factory=dict)

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
            with watching(self.model if self.around else None) as seen:
                calls = record(self.model, inputs)
            chosen = self._chosen(len(calls))
            for i in chosen:
                if i not in self._weights:
                    self._weights[i] = probe(calls[i])
        captures = []
        for i in chosen:
            attention, error = self._assemble(calls[i], self._weights[i], inputs)
            attention.surroundings = surroundings(attention, seen) if self.around else None
            captures.append(LayerCapture(i, calls[i].name, attention, error))
        padded = captures[0].attention.valid is not None
        if padded not in self._verified:  # once without padding, once with
            self._verified[padded] = self._verify(inputs, [calls[i] for i in chosen], captures)
        for capture in captures:
            capture.error = max(capture.error, *self._verified.values())
        return captures

    def forget(self) -> None:
        """Verify the next batch against the model again, whatever was verified before; probed weights stay."""
        self._verified.clear()

    def _chosen(self, count: int) -> list[int]:
        if self.layers is None:
            return list(range(count))
        wrong = [i for i in self.layers if not -count <= i < count]
        if wrong:
            raise CaptureError(f"layers {wrong} do not exist: the model has {count} attention layers, numbered 0 to {count - 1}")
        if not len(self.layers):
            raise CaptureError(f"layers is empty; name some of the {count} attention layers, or None for all")
        return list(dict.fromkeys(i % count for i in self.layers))

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
        return attention, self._check(call, attention)

    def _check(self, call: Call, attention: Attention) -> float:
        """Largest error of rebuilt queries, keys, values and head outputs, on every sample and head of this forward pass."""
        valid, groups = attention.valid, call.q.shape[1] // call.k.shape[1]
        reach = torch.linalg.vector_norm(attention.x, dim=-1).amax(-1, keepdim=True)
        error = 0.0
        for name, mine, model, w in (
            ("queries", attention.q, call.q, attention.w_q),
            ("keys", attention.k, call.k.repeat_interleave(groups, 1), attention.w_k),
            ("values", attention.v, call.v.repeat_interleave(groups, 1), attention.w_v),
        ):
            difference = head_error(mine, model, reach * torch.linalg.matrix_norm(w), valid)
            if not difference <= AFFINE:
                raise CaptureError(_not_affine(call, name, difference))
            error = max(error, difference)
        difference = head_error(attention.out, call.out.transpose(1, 2), attention.v.abs().amax((-1, -2)), valid)
        if not difference <= AFFINE:
            raise CaptureError(_different(call.name, difference))
        for name in ("p", "out"):  # of all layers at once they would fill the memory
            attention.__dict__.pop(name, None)
        return max(error, difference)

    def _verify(self, inputs: Mapping[str, Tensor], calls: list[Call], captures: list[LayerCapture]) -> float:
        """Largest error of the head outputs of one sample, padded if any is, against the model's untouched eager attention."""
        valid = captures[0].attention.valid
        sample = 0 if valid is None else int((~valid).any(-1).nonzero()[0])
        part = slice(sample, sample + 1)
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
                forward(self.model, {name: t[part] if len(t) == len(captures[0].attention.x) else t for name, t in inputs.items()})
        finally:
            for hook in hooks:
                hook.remove()
        error = 0.0
        for call, capture in zip(calls, captures, strict=True):
            own = seen[id(call.consumer or call.module)][call.turn]
            att = capture.attention.select(samples=part)
            if own.numel() != att.tokens * att.heads * att.d_v:
                raise CaptureError(f"layer {capture.name}: no point of the model could be found where its head outputs can be checked")
            own = own.reshape(1, att.tokens, att.heads, att.d_v).transpose(1, 2)
            difference = head_error(att.out, own, att.v.abs().amax((-1, -2)), att.valid)
            if not difference <= AFFINE:
                raise CaptureError(_different(capture.name, difference))
            error = max(error, difference)
        return error


def _different(name: str, difference: float) -> str:
    return (
        f"layer {name}: rebuilt head outputs differ from the model's own eager attention by {difference:.1e} relative "
        f"(allowed {AFFINE:.0e}); its attention is not softmax(scale q k^T + mask) v"
    )


def capture(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, layers: Sequence[int] | None = None, around: bool = False) -> list[Attention]:
    """The `Attention` of every layer of a transformers model at a batch of ready inputs, checked against the model.

    Args:
        model: a loaded transformers model, in float32 or float64; any task class.
        inputs: what its forward takes, e.g. ``tokenizer(texts, return_tensors="pt", padding=True)``.
        layers: indices of the attention layers wanted; all by default.
        around: also find residual connection and layer normalisation, for the maps "pre_norm" and "post_norm".

    Returns:
        One `Attention` per layer, in the order of the forward pass, with ``w_o`` where the projection of the concatenated heads was found.

    Raises:
        CaptureError: see `Capturer.run`.
    """
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(f"model is a {type(model).__name__}; capture takes a transformers model (a PreTrainedModel)")
    return [layer.attention for layer in Capturer(model, layers, around).run(inputs)]


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
