"""From a transformers model and a batch of inputs to the `Attention` of every layer, whatever the architecture.

The model is run with an attention function of our own, which records what it is handed and lets the model's own eager attention do the
computing. The projections are then read off by probing: the module that owns the call is fed the tokens 0, e_1, ..., e_D in float64, and since
x -> q, k, v is affine, q(0) is the bias and q(e_i) - q(0) row i of the weight. Every capture is checked against the model: rebuilt q, k, v against
those of the forward pass, and rebuilt head outputs against a second pass through the model's untouched eager attention.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from lipbound.attention import Attention
from lipbound.errors import CaptureError

NAME = "lipbound"
AFFINE = 1e-4
"""Largest relative error of a rebuilt tensor. Affine projections rebuild to 1e-5 or better in float32, others miss by orders of magnitude."""

Tensors = tuple[Tensor, ...]


@dataclass
class _Call:
    """One call of the attention interface, with the module that made it and what that module was given."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None
    extras: dict[str, Any]
    out: Tensor
    turn: int
    """How many calls the same module made before (models such as ALBERT run one module as every layer)."""
    consumer: nn.Module | None = None


@dataclass
class _Weights:
    """What probing found for one call: per-head projections in float64, and the output projection if there is one."""

    w: tuple[Tensor, Tensor, Tensor]
    b: tuple[Tensor | None, Tensor | None, Tensor | None]
    w_o: Tensor | None


class _Abort(Exception):
    """Ends a probing pass at the interface, carrying q, k, v."""

    def __init__(self, qkv: Tensors):
        self.qkv = qkv


_handler: Callable[..., tuple[Tensor, Any]] | None = None


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
    if _handler is None:
        return _eager(module)(module, query, key, value, mask, **kwargs)
    return _handler(module, query, key, value, mask, **kwargs)


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    source = sys.modules[type(module).__module__]
    if not hasattr(source, "eager_attention_forward"):
        raise CaptureError(f"{type(module).__name__} has no eager attention function next to it, so its attention cannot be checked")
    function: Callable[..., tuple[Tensor, Any]] = source.eager_attention_forward
    return function


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)  # without it, causal and padding masks would silently be lost


@contextmanager
def _handling(function: Callable[..., tuple[Tensor, Any]]) -> Iterator[None]:
    global _handler
    previous, _handler = _handler, function
    try:
        yield
    finally:
        _handler = previous


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation, restored afterwards, in evaluation mode and without gradients."""
    before, training = model.config._attn_implementation, model.training
    try:
        model.set_attn_implementation(name)
        model.eval()
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(before or "eager")
        model.train(training)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest absolute difference over the largest absolute entry of the reference."""
    scale = reference.abs().amax().clamp_min(torch.finfo(reference.dtype).tiny)
    return float((value - reference).abs().amax() / scale)


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """One pass through the model, without a cache where it would keep one."""
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model(**{**inputs, **extra})


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
    _weights: dict[int, _Weights] = field(default_factory=dict)
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
        with _implementation(self.model, NAME):
            calls = self._record(inputs)
            chosen = self._chosen(len(calls))
            for i in chosen:
                if i not in self._weights:
                    self._weights[i] = self._probe(calls[i])
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

    # -- recording -----------------------------------------------------------------------------------------------------

    def _record(self, inputs: Mapping[str, Tensor]) -> list[_Call]:
        calls: list[_Call] = []
        stack: list[tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]] = []
        waiting: dict[int, Tensor] = {}

        def handler(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any) -> tuple[Tensor, Any]:
            out, probabilities = _eager(module)(module, q, k, v, mask, **kw)
            entry = next((e for e in reversed(stack) if e[0] is module), None)
            if entry is None:
                raise CaptureError(f"attention was called on behalf of {type(module).__name__}, which is not being run")
            extras = {name: kw[name] for name in ("softcap", "s_aux", "position_bias") if kw.get(name) is not None}
            turn = sum(call.module is module for call in calls)
            calls.append(_Call(module, entry[1], entry[2], entry[3], q, k, v, mask, kw.get("scaling"), extras, out, turn))
            waiting.clear()
            waiting[len(calls) - 1] = out.flatten(2)
            return out, probabilities

        def enter(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                stack.append((module, name, args, kwargs))
                if waiting and args and isinstance(args[0], Tensor) and _is_linear(module):
                    (i, flat), x = next(iter(waiting.items())), args[0]
                    if x.shape[-1] == flat.shape[-1] and x.numel() == flat.numel() and torch.equal(x.reshape(flat.shape), flat):
                        calls[i].consumer = module
                        waiting.clear()

            return hook

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            stack.pop()

        hooks = []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(leave))
        try:
            with _handling(handler):
                forward(self.model, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        if not calls:
            raise CaptureError(
                f"{type(self.model).__name__} has no attention that can be captured: its forward pass never calls the transformers attention "
                "interface (either it has no attention layers, or it brings an attention code of its own)"
            )
        return calls

    # -- probing -------------------------------------------------------------------------------------------------------

    def _probe(self, call: _Call) -> _Weights:
        x = _hidden_states(call)
        width = x.shape[-1]
        owner = copy.deepcopy(call.module).double()

        def stop(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any) -> tuple[Tensor, Any]:
            raise _Abort((q, k, v))

        def projections(tokens: Tensor) -> Tensors:
            args, kwargs = _with_hidden_states(call, tokens)
            try:
                with _handling(stop):
                    owner(*args, **kwargs)
            except _Abort as end:
                return tuple(t.transpose(1, 2).flatten(0, 1) for t in end.qkv)
            raise CaptureError(f"layer {call.name}: probing did not reach the attention interface")

        parts = []
        for rows in _probe_tokens(width, x):
            parts.append([y[: len(rows)] for y in projections(_fill(rows, x))])
        heads = call.q.shape[1]
        weights, biases = [], []
        for pieces in zip(*parts, strict=True):
            y = torch.cat(pieces)  # (D + 1, H or H_kv, d)
            y = y.repeat_interleave(heads // y.shape[1], 1)
            weights.append((y[1:] - y[0]).transpose(0, 1).contiguous())
            biases.append(y[0] if bool((y[0] != 0).any()) else None)
        return _Weights((weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]), self._probe_output(call))

    def _probe_output(self, call: _Call) -> Tensor | None:
        """Slices of the projection that consumes the flattened heads, (heads, d_v, D_out)."""
        if call.consumer is None:
            return None
        heads, d_v = call.q.shape[1], call.v.shape[-1]
        projection = copy.deepcopy(call.consumer).double()
        device = call.q.device
        eye = torch.eye(heads * d_v, dtype=torch.float64, device=device)
        y: Tensor = projection(eye) - projection(torch.zeros_like(eye[:1]))
        return y.view(heads, d_v, -1)

    # -- assembling and checking ------------------------------------------------------------------------------------------

    def _assemble(self, call: _Call, weights: _Weights, inputs: Mapping[str, Tensor]) -> tuple[Attention, float]:
        x = _hidden_states(call)
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

    def _verify(self, inputs: Mapping[str, Tensor], calls: list[_Call], captures: list[LayerCapture], chosen: list[int]) -> dict[int, float]:
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
            with _implementation(self.model, "eager"):
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


# -- small pieces ------------------------------------------------------------------------------------------------------


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _hidden_states(call: _Call) -> Tensor:
    """The owner's input X, its first positional argument or ``hidden_states``."""
    x = call.args[0] if call.args else call.kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise CaptureError(f"layer {call.name}: {type(call.module).__name__} is not given one (samples, N, D) tensor of token vectors")
    if call.k.shape[-2] != x.shape[1] or call.q.shape[-2] != x.shape[1]:
        raise CaptureError(
            f"layer {call.name}: {call.q.shape[-2]} queries attend to {call.k.shape[-2]} keys while the layer's input has {x.shape[1]} tokens; "
            "only self-attention is supported (no cross-attention, no cache, no windows cut out of the input)"
        )
    return x


def _with_hidden_states(call: _Call, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The owner's arguments with X replaced, floating tensors in float64, and no cache."""

    def double(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return tuple(double(v) for v in value) if isinstance(value, tuple) else value

    kwargs = {name: None if name in ("past_key_values", "layer_past") else double(value) for name, value in call.kwargs.items()}
    if call.args:
        return (x, *(double(a) for a in call.args[1:])), kwargs
    return (), kwargs | {"hidden_states": x}


def _probe_tokens(width: int, like: Tensor) -> Iterator[Tensor]:
    """The rows of [0; I] in pieces of at most the number of token slots, float64."""
    rows = torch.cat([torch.zeros(1, width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)]).to(like.device)
    yield from rows.split(like.shape[0] * like.shape[1])


def _fill(rows: Tensor, like: Tensor) -> Tensor:
    """``rows`` in the first token slots of a zero tensor shaped like ``like``."""
    slots = torch.zeros(like.shape[0] * like.shape[1], rows.shape[1], dtype=rows.dtype, device=rows.device)
    slots[: len(rows)] = rows
    return slots.view(*like.shape[:2], -1)


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


def _not_affine(call: _Call, name: str, difference: float) -> str:
    what = f"layer {call.name} ({type(call.module).__name__}): {name} are not one affine map of the layer's input (off by {difference:.1e} relative)"
    names = {part for part, _ in call.module.named_modules()}
    if any(marker in n for n in names for marker in ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")):
        return f"{what}: the layer normalises queries and keys, which is not supported"
    if "position_embeddings" in call.kwargs or any("rotary" in n for n in names):
        return f"{what}: the layer rotates queries and keys by their positions (rotary embedding), which is not supported"
    return f"{what}: the layer transforms them between projection and scores, or takes them from another input (cross-attention)"
