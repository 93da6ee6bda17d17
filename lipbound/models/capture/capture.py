"""From a transformers model and a batch of inputs to the `Attention` of every layer, whatever the architecture.

The model is run with an attention function of our own (`lipbound.models.capture.recorder`), which records what it is handed and lets the model's own
eager attention do the computing. The projections are read off by probing (`lipbound.models.capture.probing`). Every capture is checked against the
model: rebuilt q, k, v against those of the forward pass, and rebuilt head outputs against a second pass through the model's untouched eager
attention.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError
from lipbound.models.capture.probing import CAPTURE_TOLERANCE, Weights, hidden_states, probe
from lipbound.models.capture.recorder import RECORDING_ATTENTION, Call, forward, implementation, record
from lipbound.models.capture.residual_detection import Seen, surroundings, watching
from lipbound.models.offload import by_layer


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

    Of a model that is read layer by layer (`lipbound.models.offload`) weights are probed for every batch, one layer in memory at a time.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``.
        layers: indices of attention calls, in the order of the forward pass; all by default.
        around: also find what stands around each layer (`lipbound.models.capture.residual_detection`).
    """

    model: PreTrainedModel
    layers: Sequence[int] | None = None
    around: bool = False
    _weights: dict[int, Weights] = field(default_factory=dict)
    _verified: dict[tuple[bool, int], float] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, Tensor]) -> list[LayerCapture]:
        """The attention of every (chosen) layer at these model inputs, in the model's dtype and on its device; see `each`."""
        return list(self.each(inputs))

    def each(self, inputs: Mapping[str, Tensor], skip: Collection[int] = ()) -> Iterator[LayerCapture]:
        """The attention of one (chosen) layer after the other, but for those at the positions ``skip``.

        Raises:
            CaptureError: the model never calls the attention interface, or a layer is not what `Attention` describes (latent attention,
                cross-attention, other transformations of queries and keys), or the rebuilt layer does not reproduce the model; the message names
                the layer and the reason.
        """
        model_dtype = next(self.model.parameters()).dtype
        if model_dtype not in (torch.float32, torch.float64):
            raise CaptureError(f"the model computes in {model_dtype}; convert it first, model.float() or model.double()")
        with implementation(self.model, RECORDING_ATTENTION), watching(self.model if self.around else None) as seen:
            calls = record(self.model, inputs)
        chosen = [i for position, i in enumerate(self._chosen(len(calls))) if position not in skip]
        if not chosen:
            return
        valid = _valid(inputs, hidden_states(calls[chosen[0]]))
        padded = valid is not None
        fresh = [i for i in chosen if (padded, i) not in self._verified]  # once without padding, once with
        sample = 0 if valid is None else int((~valid).any(-1).nonzero()[0])
        own = self._own_outputs(inputs, [calls[i] for i in fresh], sample, len(hidden_states(calls[chosen[0]]))) if fresh else {}
        for i in chosen:
            yield self._layer(i, calls[i], inputs, own.get(id(calls[i])), sample, seen)

    def _layer(self, i: int, call: Call, inputs: Mapping[str, Tensor], own: Tensor | None, sample: int, seen: Sequence[Seen]) -> LayerCapture:
        """One layer; ``own``: what the model itself passes on at a sample, where that is to be checked."""
        attention, error = self._assemble(call, self._probed(i, call), inputs)
        if own is not None:
            self._verified[attention.valid is not None, i] = _verify(call, attention, own, sample)
        attention.surroundings = surroundings(attention, seen) if self.around else None
        attention.cache.drop("p", "weights", "out")  # of all layers at once they would fill the memory
        return LayerCapture(i, call.name, attention, max([error, *(e for (_, j), e in self._verified.items() if j == i)]))

    def forget(self) -> None:
        """Verify the next batch against the model again, whatever was verified before; probed weights stay."""
        self._verified.clear()

    def _probed(self, i: int, call: Call) -> Weights:
        weights = self._weights.get(i)
        if weights is None or not weights.belongs_to(call):
            with implementation(self.model, RECORDING_ATTENTION):
                weights = probe(call)
            if not by_layer(self.model):  # its weights are many
                self._weights[i] = weights
        return weights

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
        valid = _valid(inputs, x)
        mask = _additive(call, x)
        if mask is not None:
            if valid is not None:  # padding is `valid`'s business; what remains is often no mask at all
                padded = ~(valid[:, None, :, None] & valid[:, None, None, :])
                mask = mask.expand(len(x), *mask.shape[1:]).masked_fill(padded.expand(len(x), mask.shape[1], -1, -1), 0.0)
            if bool((mask == 0).all()):
                mask = None
            elif mask.shape[0] > 1 and bool((mask == mask[:1]).all()):
                mask = mask[:1]
        scale = call.scale if call.scale is not None else call.q.shape[-1] ** -0.5

        def cast(t: Tensor) -> Tensor:
            return t.to(x.dtype)

        b_q, b_k, b_v = (None if b is None else cast(b) for b in weights.b)
        w_q, w_k, w_v = (cast(w) for w in weights.w)
        norm_q, norm_k = (None if norm is None else norm.map(cast) for norm in (weights.norm_q, weights.norm_k))
        sinks = call.extras.get("s_aux")
        attention = Attention(
            x.detach(), w_q, w_k, w_v, b_q=b_q, b_k=b_k, b_v=b_v, w_o=None if weights.w_o is None else cast(weights.w_o), scale=float(scale),
            mask=mask, valid=valid, rotation=weights.rotation, norm_q=norm_q, norm_k=norm_k, cap=call.extras.get("softcap"),
            sinks=None if sinks is None else cast(sinks.detach()).flatten(),
        )  # fmt: skip
        return attention, self._check(call, attention, weights)

    def _check(self, call: Call, attention: Attention, weights: Weights) -> float:
        """Largest error of rebuilt queries, keys, values and head outputs, on every sample and head of this forward pass."""
        valid, groups = attention.valid, call.q.shape[1] // call.k.shape[1]
        reach = torch.linalg.vector_norm(attention.x, dim=-1).amax(-1, keepdim=True)
        order = slice(None) if weights.order is None else weights.order
        error = 0.0
        for name, mine, model, w, norm in (
            ("queries", attention.q, call.q[..., order], attention.w_q, weights.norm_q),
            ("keys", attention.k, call.k[..., order].repeat_interleave(groups, 1), attention.w_k, weights.norm_k),
            ("values", attention.v, call.v.repeat_interleave(groups, 1), attention.w_v, None),
        ):
            size = reach * torch.linalg.matrix_norm(w) if norm is None else torch.zeros_like(reach)
            difference = head_error(mine, model, size, valid)
            if not difference <= CAPTURE_TOLERANCE:
                raise CaptureError(_not_affine(call, name, difference))
            error = max(error, difference)
        difference = head_error(attention.out, call.out.transpose(1, 2), attention.v.abs().amax((-1, -2)), valid)
        if not difference <= CAPTURE_TOLERANCE:
            raise CaptureError(_different(call.name, difference))
        return max(error, difference)

    def _own_outputs(self, inputs: Mapping[str, Tensor], calls: list[Call], sample: int, samples: int) -> dict[int, Tensor]:
        """What the model's untouched eager attention passes on at one sample, by the identity of each call."""
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
                forward(self.model, {name: _one_sample(name, t, part, samples) for name, t in inputs.items()})
        finally:
            for hook in hooks:
                hook.remove()
        return {id(call): seen[id(call.consumer or call.module)][call.turn] for call in calls}


def _one_sample(name: str, value: Any, part: slice, samples: int) -> Any:
    """The part of a model input that belongs to one sample."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if name == "position_ids" and value.ndim == 3:  # one row of positions for time, height and width each
        return value[:, part] if value.shape[1] == samples else value
    return value[part] if len(value) == samples else value


def _verify(call: Call, attention: Attention, own: Tensor, sample: int) -> float:
    """Error of the head outputs of one sample, padded if any is, against the model's untouched eager attention."""
    att = attention.select(samples=slice(sample, sample + 1))
    if own.numel() != att.tokens * att.heads * att.d_v:
        raise CaptureError(f"layer {call.name}: no point of the model could be found where its head outputs can be checked")
    own = own.reshape(1, att.tokens, att.heads, att.d_v).transpose(1, 2)
    difference = head_error(att.out, own, att.v.abs().amax((-1, -2)), att.valid)
    if not difference <= CAPTURE_TOLERANCE:
        raise CaptureError(_different(call.name, difference))
    return difference


def _additive(call: Call, x: Tensor) -> Tensor | None:
    """What a call adds to its scores: its mask, and biases of relative positions."""
    mask, bias = call.mask, call.extras.get("position_bias")
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, -torch.inf)
        mask = mask.to(x.dtype)
    if bias is None:
        return mask
    bias = bias.detach().to(x.dtype)
    return bias if mask is None else (mask + bias).clamp_min(torch.finfo(x.dtype).min)  # the lowest number and a bias may overflow


def _different(name: str, difference: float) -> str:
    return (
        f"layer {name}: rebuilt head outputs differ from the model's own eager attention by {difference:.1e} relative "
        f"(allowed {CAPTURE_TOLERANCE:.0e}); its attention is not softmax(scale q k^T + mask) v, nor a variant of it known here"
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
    return (
        f"{what}, but for a normalisation and a rotation: the layer transforms them in another way between projection and scores, or takes them from "
        "another input (cross-attention)"
    )
