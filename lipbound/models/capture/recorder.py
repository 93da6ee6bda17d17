"""Running a transformers model while recording every call of its attention interface."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from lipbound.errors import CaptureError, LipboundError, shown

RECORDING_ATTENTION = "lipbound"
"""Name of our attention function in the transformers registry."""


@dataclass
class Call:
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

    def to(self, device: torch.device) -> "Call":
        """The same call with its tensors on a device; the modules stay where they are."""
        if self.q.device == device:
            return self
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("module", "consumer")}
        return replace(self, **tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, given))

    def unsupported(self, what: str) -> CaptureError:
        """The error about something that the layer does."""
        return CaptureError(f"layer {self.name}: {type(self.module).__name__} {what}, which is not supported")


_handler: Callable[..., tuple[Tensor, Any]] | None = None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Parameters have the interface's names, since some models pass them by keyword."""
    function = _eager(module) if _handler is None else _handler
    return function(module, query, key, value, attention_mask, **kwargs)


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    source = sys.modules[type(module).__module__]
    if not hasattr(source, "eager_attention_forward"):
        raise CaptureError(f"{type(module).__name__} has no eager attention function next to it, so its attention cannot be checked")
    function: Callable[..., tuple[Tensor, Any]] = source.eager_attention_forward
    return function


AttentionInterface.register(RECORDING_ATTENTION, _attention)


AttentionMaskInterface.register(RECORDING_ATTENTION, eager_mask)  # without it, causal and padding masks would silently be lost


@contextmanager
def handling(function: Callable[..., tuple[Tensor, Any]]) -> Iterator[None]:
    """Context in which calls of the attention interface go to ``function``."""
    global _handler
    previous, _handler = _handler, function
    try:
        yield
    finally:
        _handler = previous


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation, restored afterwards, in evaluation mode and without gradients."""
    training = {module: module.training for module in model.modules()}
    configs = {id(c): c for module in model.modules() for c in _configs(getattr(module, "config", None))}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    experts = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None
    try:
        model.set_attn_implementation(name)
        if experts is not None and model.dtype == torch.float64 and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # torch's grouped product of experts knows no float64
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        if experts is not None:
            model.config._experts_implementation = experts
        for module, mode in training.items():
            module.training = mode


def _configs(config: Any) -> Iterator[Any]:
    """A model configuration and those inside it."""
    if hasattr(config, "_attn_implementation_internal"):
        yield config
        for name in getattr(config, "sub_configs", {}):
            yield from _configs(getattr(config, name, None))


def check_model(model: object) -> None:
    """Raise CaptureError for what is no transformers model."""
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(f"model is {shown(model)}; give a loaded transformers model (of lipbound.load_checkpoint(...).model, for one)")


def taken(model: PreTrainedModel, inputs: object) -> dict[str, Tensor]:
    """Inputs as a model's forward takes them: floating-point ones in its dtype.

    Raises:
        CaptureError: there are no named tensors among them.
    """
    if not isinstance(inputs, Mapping) or not any(isinstance(t, Tensor) for t in inputs.values()):
        kind = "without tensors" if isinstance(inputs, Mapping) else shown(inputs)
        raise CaptureError(f"inputs is {kind}; give named tensors, such as tokenizer(text, return_tensors='pt')")
    dtype = next(model.parameters()).dtype
    return {str(name): t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in inputs.items()}


def cannot_compute(model: nn.Module, error: Exception) -> CaptureError:
    """The error about a forward pass that fails."""
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CaptureError(f"{type(model).__name__} cannot compute with these inputs: {message[:300]}")


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """One pass through the model, without a cache where it would keep one; raises CaptureError where the model does."""
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        model(**{**inputs, **extra})
    except LipboundError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
        raise cannot_compute(model, error) from error


def record(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Call]:
    """The calls of the attention interface in one forward pass, in order, with the projection that consumed each call's output.

    Raises:
        CaptureError: the model never calls the interface.
    """
    calls: list[Call] = []
    stack: list[tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]] = []
    waiting: dict[int, Tensor] = {}

    def handler(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any) -> tuple[Tensor, Any]:
        out, probabilities = _eager(module)(module, q, k, v, mask, **kw)
        entry = next((e for e in reversed(stack) if e[0] is module), None)
        if entry is None:
            raise CaptureError(f"attention was called on behalf of {type(module).__name__}, which is not being run")
        extras = {name: value for name, value in kw.items() if value is not None}
        turn = sum(call.module is module for call in calls)
        calls.append(Call(module, entry[1], entry[2], entry[3], q, k, v, mask, kw.get("scaling"), extras, out, turn))
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
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        with handling(handler):
            forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise CaptureError(
            f"{type(model).__name__} has no attention that can be captured: its forward pass never calls the transformers attention "
            "interface (either it has no attention layers, or it brings an attention code of its own)"
        )
    return calls


def hidden_states(call: Call) -> Tensor:
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


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
