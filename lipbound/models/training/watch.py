"""Watching the attention of a model in training: which calls it makes, with what masks
and padding."""

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from lipbound.attention.scoring import BLOCKED
from lipbound.errors import CaptureError, indices, shown
from lipbound.models.training.recomputing import TRAINING_ATTENTION, attending, lock, replay
from lipbound.models.unwrapping import bare_model


class Probabilities(list[Tensor]):
    """Attention probabilities, one tensor per layer, (samples, heads, queries, keys).

    Attributes:
        valid: per layer (samples, queries) bool, False at padding, or None where there is none.
    """

    def __init__(self, found: Iterable[Tensor] = (), valid: Iterable[Tensor | None] | None = None):
        super().__init__(found)
        self.valid: list[Tensor | None] = [None] * len(self) if valid is None else list(valid)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> "Probabilities": ...

    def __getitem__(self, index: SupportsIndex | slice) -> "Tensor | Probabilities":
        return (
            Probabilities(super().__getitem__(index), self.valid[index])
            if isinstance(index, slice)
            else super().__getitem__(index)
        )


@dataclass(eq=False)
class TrainingCall:
    """One call of the attention interface: queries, keys and values, what was added to the scores,
    and the input of its module."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    given: Tensor | None
    """The mask as the model gives it."""
    mask: Tensor | None
    scale: float
    biased: bool
    """Whether biases of relative positions are added to its scores."""
    x: Tensor | None = None
    valid: Tensor | None = None
    """(samples, queries) bool, False at padding; None where there is none."""
    repeated: bool = False
    """Whether the module called again in the same pass."""


class _Pass(threading.local):
    """State of one thread in the forward pass of a watched model."""

    def __init__(self) -> None:
        self.streams: list[Any] = []
        self.entered: dict[int, int] = {}
        self.inputs: dict[int, Tensor] = {}
        self.layers: dict[tuple[int, int], int] = {}
        self.last: dict[int, tuple[TrainingCall, int]] = {}


@dataclass(eq=False)
class ProbabilityCollector:
    """Collector of the probabilities of a model's layers; threads that run the model side by side
    count their layers each."""

    modules: frozenset[int]
    chosen: frozenset[int] | None
    whole: bool
    """Whether calls are kept, not probabilities alone."""
    found: Probabilities = field(default_factory=Probabilities)
    calls: list[TrainingCall] = field(default_factory=list)
    reached: int = 0
    here: _Pass = field(default_factory=_Pass)
    hooks: list[Any] = field(default_factory=list)

    def layer(self, module: nn.Module) -> int:
        """The number of the layer that calls; a module that calls twice in one pass is
        one layer."""
        if id(module) not in self.here.entered:
            self.here.entered[id(module)] = 0
            self.hooks.append(module.register_forward_pre_hook(self._enter))
        layer = self.here.layers.setdefault(
            (id(module), self.here.entered[id(module)]), len(self.here.layers)
        )
        self.reached = max(self.reached, layer + 1)
        return layer

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.here.entered[id(module)] = self.here.entered.get(id(module), 0) + 1

    def wants(self, layer: int) -> bool:
        """Tell whether a layer was asked for."""
        return self.chosen is None or layer in self.chosen

    def add(self, call: TrainingCall, layer: int, p: Tensor) -> None:
        """Keep the probabilities of a call, with those of earlier calls in the same pass."""
        call = replace(
            call, x=self.here.inputs.get(id(call.module)), valid=_valid(call, self.here.streams)
        )
        first, place = self.here.last.get(layer, (None, 0))
        if first is None:
            with lock:
                self.here.last[layer] = (call, len(self.found))
                self.found.append(p)
                self.found.valid.append(call.valid)
                self.calls += [call] if self.whole else []
            return
        first.repeated = True
        if (
            call.query is not first.query
            or call.key is not first.key
            or call.given is not first.given
        ):
            self.found[place], self.found.valid[place] = _side_by_side(
                self.found[place], self.found.valid[place], p, call.valid
            )


_watches: list[ProbabilityCollector] = []


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kw: Any,
) -> tuple[Tensor, Any]:
    """Torch's fused attention, or the same by way of probabilities where a watch wants them."""
    fused = partial(sdpa_attention_forward, module, query, key, value, attention_mask, **kw)
    if extras := [name for name in ("softcap", "s_aux") if kw.get(name) is not None]:
        raise CaptureError(
            f"{type(module).__name__} uses {', '.join(extras)} in its attention, which penalties "
            "do not support"
        )
    if replay.script is not None:
        return (
            _explicit(module, query, key, value, attention_mask, kw)[:2]
            if next(replay.script)
            else fused()
        )
    if getattr(module, "_is_replica", False):
        raise CaptureError(REPLICAS)
    layers = [
        (watch, watch.layer(module)) for watch in list(_watches) if id(module) in watch.modules
    ]
    layers = [(watch, layer) for watch, layer in layers if watch.wants(layer)]
    if replay.notes is not None:
        replay.notes.append(bool(layers))
    if not layers:
        return fused()
    out, p, call, wide = _explicit(module, query, key, value, attention_mask, kw)
    for watch, layer in layers:
        watch.add(call, layer, wide)
    return out, p


AttentionInterface.register(TRAINING_ATTENTION, _attention)


AttentionMaskInterface.register(TRAINING_ATTENTION, eager_mask)

REPLICAS = (
    "DataParallel runs copies of the model in threads of their own, whose attention penalties "
    "cannot follow; use one device, or "
    "DistributedDataParallel (torchrun)"
)


def _explicit(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Tensor | None,
    kw: Mapping[str, Any],
) -> tuple[Tensor, Tensor, TrainingCall, Tensor]:
    """Output and probabilities as a model takes them, the call, and probabilities before dropout in
    float32 at least."""
    scale = kw.get("scaling") or query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scores = ((query @ keys.mT) * scale).to(torch.promote_types(query.dtype, torch.float32))
    mask = _added(module, given, kw.get("is_causal"), scores)
    if (bias := kw.get("position_bias")) is not None:
        scores = scores + bias[..., : scores.shape[-1]]
    p = torch.softmax(scores if mask is None else scores + mask, -1)
    if (
        given is not None
    ):  # where nothing is seen, fused attention gives zeros; the lowest number is a number
        unseen = ~given if given.dtype == torch.bool else given == -torch.inf
        p = p.masked_fill(unseen[..., : p.shape[-1]].all(-1, keepdim=True), 0.0)
    used = p.to(query.dtype)
    dropped = nn.functional.dropout(used, kw.get("dropout", 0.0), module.training)
    out = (dropped @ values).transpose(1, 2).contiguous()
    return (
        out,
        used,
        TrainingCall(module, query, key, value, given, mask, scale, bias is not None),
        p,
    )


def _added(
    module: nn.Module, given: Tensor | None, causal: bool | None, scores: Tensor
) -> Tensor | None:
    """The mask that is added to the scores, as fused attention takes masks, and the
    absence of one."""
    lowest, (rows, keys) = torch.finfo(scores.dtype).min, scores.shape[-2:]
    if given is None:
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal or rows == 1:
            return None
        given = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril()[None, None]
    given = given[..., :keys]
    if given.dtype == torch.bool:
        return torch.zeros(given.shape, dtype=scores.dtype, device=scores.device).masked_fill(
            ~given, lowest
        )
    if not given.is_floating_point():
        raise CaptureError(
            f"{type(module).__name__} was given a mask of "
            f"{str(given.dtype).removeprefix('torch.')} numbers; give True where attention is "
            "allowed, "
            "or floating-point numbers that are added to the scores"
        )
    return given.to(scores.dtype).masked_fill(given <= torch.finfo(given.dtype).min, lowest)


def _valid(call: TrainingCall, streams: Sequence[Any]) -> Tensor | None:
    """Queries that are not padding, by the mask of the innermost model that runs, whose token
    stream they are; None where no query is padding."""
    given = streams[-1] if streams else None
    if isinstance(given, Mapping):
        given = next((t for t in given.values() if isinstance(t, Tensor)), None)
    if not isinstance(given, Tensor):
        return None
    (samples, _, rows, _), keys = call.query.shape, call.key.shape[-2]
    if given.ndim == 2 and tuple(given.shape) in ((samples, rows), (samples, keys)):
        valid = given[:, -rows:] != 0
    # a mask of all pairs, or one that the model has adapted to other tokens: what no query may
    # attend to is padding
    else:
        mask = given if given.ndim > 2 else call.mask if rows == keys else None
        if mask is None or mask.shape[-1] != rows:
            return None
        seen = mask if mask.dtype == torch.bool else mask > BLOCKED
        valid = seen.flatten(1, -2).any(1).expand(samples, -1)
    return None if bool(valid.all()) else valid


def _side_by_side(
    p: Tensor, valid: Tensor | None, q: Tensor, other: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Probabilities of two calls of one layer as samples of one tensor, the shorter ones padded."""
    if p.shape[1:] == q.shape[1:] and valid is None and other is None:
        return torch.cat([p, q]), None
    rows, keys = (max(a, b) for a, b in zip(p.shape[-2:], q.shape[-2:], strict=True))
    padded = [nn.functional.pad(t, (0, keys - t.shape[-1], 0, rows - t.shape[-2])) for t in (p, q)]
    known = [
        torch.ones(len(t), t.shape[-2], dtype=torch.bool, device=t.device) if v is None else v
        for t, v in ((p, valid), (q, other))
    ]
    return torch.cat(padded), torch.cat(
        [nn.functional.pad(v, (0, rows - v.shape[-1])) for v in known]
    )


def transformers_model(model: object) -> PreTrainedModel:
    """The transformers model inside what wraps it for training.

    Raises:
        CaptureError: there is none, or DataParallel on several devices.
    """
    inside = getattr(model, "_orig_mod", model)
    if isinstance(inside, nn.DataParallel) and len(inside.device_ids) > 1:
        raise CaptureError(REPLICAS)
    return bare_model(model, tells=False)


@contextmanager
def watching(
    model: nn.Module, layers: object, inputs_of: Mapping[int, nn.Module] | None = None
) -> Iterator[ProbabilityCollector]:
    """Context in which a `ProbabilityCollector` follows the attention of a model.

    Calls of the modules in ``inputs_of`` are kept with the inputs of these modules.
    """
    inner = transformers_model(model)
    chosen = None if layers is None else indices("layers", layers)
    if chosen is not None and min(chosen, default=0) < 0:
        raise CaptureError(
            f"layers is {shown(layers)}; count attention layers from 0, in the order of the "
            "forward pass"
        )
    modules = list((model if isinstance(model, nn.Module) else inner).modules())
    watch = ProbabilityCollector(
        frozenset(map(id, modules)),
        None if chosen is None else frozenset(chosen),
        inputs_of is not None,
    )
    with ExitStack() as stack:
        stack.enter_context(_hooked(watch, modules, list((inputs_of or {}).values())))
        stack.enter_context(attending(inner, modules))
        if any(
            module._compiled_call_impl is not None or "_orig_mod" in module._modules
            for module in modules
        ):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _watches.append(watch)
        try:
            yield watch
        finally:
            _watches.remove(watch)
    missing = sorted(i for i in watch.chosen or () if i >= watch.reached)
    if missing and watch.reached:
        raise CaptureError(
            f"layers {missing} do not exist: the model ran {watch.reached} attention layers, "
            "numbered from 0"
        )


@contextmanager
def _hooked(
    watch: ProbabilityCollector, parts: Sequence[nn.Module], modules: Sequence[nn.Module]
) -> Iterator[None]:
    """Context in which a watch knows which token stream is computed, and what modules are given."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            given = (
                inspect.signature(type(module).forward)
                .bind_partial(module, *args, **kwargs)
                .arguments
            )
        except TypeError:
            given = kwargs
        rest = next(
            (v for v in given.values() if isinstance(v, dict) and "attention_mask" in v), {}
        )
        watch.here.streams.append(given.get("attention_mask", rest.get("attention_mask")))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if watch.here.streams:
            watch.here.streams.pop()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, Tensor):
            watch.here.inputs[id(module)] = x

    for part in parts:
        if isinstance(part, PreTrainedModel):
            watch.hooks.append(part.register_forward_pre_hook(enter, with_kwargs=True))
            watch.hooks.append(part.register_forward_hook(leave, always_call=True))
    watch.hooks += [
        module.register_forward_pre_hook(before, with_kwargs=True) for module in modules
    ]
    try:
        yield
    finally:
        for hook in watch.hooks:
            hook.remove()
