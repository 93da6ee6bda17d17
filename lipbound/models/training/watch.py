"""Following the attention of a model in training: which calls it makes, with masks and padding.

Gradient checkpointing computes layers again in the backward pass, when the context that changed the
model may have ended: the recomputation does what the first pass did.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, __version__
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from lipbound.attention.scoring import BLOCKED
from lipbound.errors import CaptureError, indices, shown
from lipbound.models.capture.seeing.follower import Follower, Heads
from lipbound.models.capture.seeing.interface import (
    ATTRIBUTE,
    AttentionFunction,
    additive_mask,
    attention_configs,
    own_functions,
    own_names,
)
from lipbound.models.capture.seeing.recording import by_name
from lipbound.models.in_memory import bare_model
from lipbound.models.quiet import changed

TRAINING_ATTENTION = "lipbound-training"
"""Name in the transformers registry of the attention function that can keep its probabilities."""
CHECKPOINTING = "_gradient_checkpointing_func"
"""Where a module of transformers keeps the function that checkpoints it."""


class RecomputationNotes(threading.local):
    """Notes on the attention calls of checkpointed layers, which their recomputation follows."""

    notes: list[bool] | None = None
    script: Iterator[bool] | None = None


replay = RecomputationNotes()


class Probabilities(list[Tensor]):
    """Attention probabilities, one tensor per layer, (samples, heads, queries, keys).

    Attributes:
        valid: per layer (samples, queries) bool, False at padding, or None where there is none.
    """

    def __init__(self, found: Iterable[Tensor] = (), valid: Iterable[Tensor | None] | None = None):
        super().__init__(found)
        self.valid: list[Tensor | None] = [None] * len(self) if valid is None else list(valid)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Probabilities(found, self.valid[index]) if isinstance(index, slice) else found


@dataclass(eq=False)
class TrainingCall:
    """One call of the attention interface.

    Attributes:
        module: that called.
        query: (samples, heads, queries, d).
        key: (samples, heads or fewer that they share, keys, d).
        value: (samples, heads or fewer that they share, keys, d_v).
        given: the mask as the model gives it.
        mask: what was added to scores.
        scale: the factor of scores.
        biased: whether biases of relative positions are added to its scores.
        x: the input of the module, where that is watched.
        valid: (samples, queries) bool, False at padding; None where there is none.
        repeated: whether the module called again in the same pass.
        own: whether it called an attention function of the user's own.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    given: Tensor | None
    mask: Tensor | None
    scale: float
    biased: bool
    x: Tensor | None = None
    valid: Tensor | None = None
    repeated: bool = False
    own: bool = False


@dataclass(eq=False)
class ProbabilityCollector:
    """The probabilities of a model's layers.

    Attributes:
        modules: identities of the model's modules.
        chosen: numbers of the layers wanted, or None for all.
        whole: whether calls are kept, not probabilities alone.
        found: probabilities so far.
        calls: so far, where they are kept.
        hooks: on modules, until it is closed.
        streams: masks of the models that run, the innermost last.
        inputs: of modules, by their identities.
        passes: how often modules were entered since they first called attention.
        layers: numbers of layers, by module and pass.
        last: the first call of each layer, and its place in ``found``.
        ran: whether a model ran.
    """

    modules: frozenset[int]
    chosen: frozenset[int] | None
    whole: bool
    found: Probabilities = field(default_factory=Probabilities)
    calls: list[TrainingCall] = field(default_factory=list)
    hooks: ExitStack = field(default_factory=ExitStack)
    streams: list[Any] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[int, int] = field(default_factory=dict)
    layers: dict[tuple[int, int], int] = field(default_factory=dict)
    last: dict[int, tuple[TrainingCall, int]] = field(default_factory=dict)
    ran: bool = False

    def layer(self, module: nn.Module) -> int:
        """Return the number of the layer that calls; called twice in one pass, it is one layer."""
        key = id(module)
        if key not in self.passes:
            self.passes[key] = 0
            self.hooks.enter_context(module.register_forward_pre_hook(self._enter))
        return self.layers.setdefault((key, self.passes[key]), len(self.layers))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.passes[id(module)] += 1

    def add(self, call: TrainingCall, layer: int, p: Tensor) -> None:
        """Keep the probabilities of a call, with those of earlier calls in the same pass."""
        x, valid = self.inputs.get(id(call.module)), _valid(call, self.streams)
        call = replace(call, x=x, valid=valid)
        first, place = self.last.setdefault(layer, (call, len(self.found)))
        if first is call:
            self.found.append(p)
            self.found.valid.append(valid)
            self.calls += [call] if self.whole else []
            return
        first.repeated = True
        shared = call.query is first.query and call.key is first.key and call.given is first.given
        if not shared:
            both = _side_by_side(self.found[place], self.found.valid[place], p, valid)
            self.found[place], self.found.valid[place] = both


_watches: list[ProbabilityCollector] = []


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    own_function: AttentionFunction | None = None,
    **kw: Any,
) -> tuple[Tensor, Any]:
    """Return torch's fused attention, or the same by way of probabilities where they are wanted.

    A function of the user's own takes its place, and is followed where they are wanted.

    Raises:
        CaptureError: scores are capped or have sinks, or the module is a copy of DataParallel's.
    """
    given = module, query, key, value, attention_mask
    fused = partial(own_function or sdpa_attention_forward, *given, **kw)
    explicit: Callable[[], Any] = partial(_followed, fused, given)
    if own_function is None:
        if extras := [name for name in ("softcap", "s_aux") if kw.get(name) is not None]:
            raise CaptureError(
                f"{type(module).__name__}: penalties do not support {', '.join(extras)}"
            )
        explicit = partial(_explicit, module, (query, key, value), attention_mask, kw)
    if replay.script is not None:
        return explicit()[:2] if next(replay.script) else fused()
    if getattr(module, "_is_replica", False):
        raise CaptureError(
            "DataParallel runs copies of the model in threads of their own, which penalties cannot "
            "follow; use one device, or DistributedDataParallel (torchrun)"
        )
    watches = [watch for watch in list(_watches) if id(module) in watch.modules]
    numbers = [(watch, watch.layer(module)) for watch in watches]
    layers = [(w, layer) for w, layer in numbers if w.chosen is None or layer in w.chosen]
    if replay.notes is not None:
        replay.notes.append(bool(layers))
    if not layers:
        return fused()
    out, p, call, wide = explicit()
    for watch, layer in layers:
        watch.add(call, layer, wide)
    return out, p


class _Softmax(Follower):
    """The probabilities of attention, as functions that are followed compute them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self.found = module, list[Tensor]()

    def computed(self, heads: Heads) -> None:
        qkv, kw = (heads.q[0], heads.k[0], heads.v), {"scaling": heads.scale, "is_causal": False}
        wide = torch.promote_types(qkv[0].dtype, torch.float32)
        with self.paused():
            if heads.scores is None:  # the mask says what is causal
                self.found.append(_explicit(self._module, qkv, heads.mask, kw)[3])
            else:
                self.found.append(torch.softmax(heads.scores, -1, dtype=wide))


def _followed(
    function: partial[Any], given: tuple[nn.Module, Tensor, Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Any, TrainingCall, Tensor]:
    """Return what `_explicit` does, as the user's own function makes it of what it is given.

    Raises:
        CaptureError: no softmax is seen in it, or several are.
    """
    module, query = given[:2]
    with _Softmax(module) as seen:
        out, p = function()
    if len(seen.found) != 1:
        raise CaptureError(
            f"{type(module).__name__} computes attention by {function.func.__name__}, which was "
            "registered with AttentionInterface, and in which not one softmax of products of "
            "queries and keys is seen; set_attn_implementation('eager') is measured"
        )
    wide = seen.found[0]
    call = TrainingCall(*given, None, torch.nan, False, own=True)
    return out, p, call, wide.reshape(*query.shape[:2], *wide.shape[-2:])


AttentionInterface.register(TRAINING_ATTENTION, _attention)
AttentionMaskInterface.register(TRAINING_ATTENTION, eager_mask)


def _explicit(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], given: Tensor | None, kw: dict[str, Any]
) -> tuple[Tensor, Tensor, TrainingCall, Tensor]:
    """Return output and probabilities as a model takes them, the call, and wide probabilities.

    Those are before dropout and in float32 at least.
    """
    query, key, value = qkv
    scale = kw.get("scaling") or query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scores = ((query @ keys.mT) * scale).to(torch.promote_types(query.dtype, torch.float32))
    mask = _added(module, given, kw.get("is_causal"), scores)
    if (bias := kw.get("position_bias")) is not None:
        scores = scores + bias[..., : scores.shape[-1]]
    p = torch.softmax(scores if mask is None else scores + mask, -1)
    if given is not None:
        # where nothing is seen, fused attention gives zeros; the lowest number is a number
        unseen = ~given if given.dtype == torch.bool else given == -torch.inf
        p = p.masked_fill(unseen[..., : p.shape[-1]].all(-1, keepdim=True), 0.0)
    used = p.to(query.dtype)
    dropped = nn.functional.dropout(used, kw.get("dropout", 0.0), module.training)
    out = (dropped @ values).transpose(1, 2).contiguous()
    call = TrainingCall(module, query, key, value, given, mask, scale, bias is not None)
    return out, used, call, p


def _added(module: nn.Module, given: Any, causal: bool | None, scores: Tensor) -> Tensor | None:
    """Return what is added to scores, as fused attention takes a mask or the absence of one.

    Raises:
        CaptureError: a mask of whole numbers.
    """
    lowest, (rows, keys) = torch.finfo(scores.dtype).min, scores.shape[-2:]
    if given is None:
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal or rows == 1:
            return None
        given = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril()[None, None]
    given = given[..., :keys]
    if given.dtype == torch.bool:
        return additive_mask(scores, scores, given, False)
    if not given.is_floating_point():
        raise CaptureError(
            f"{type(module).__name__} was given a mask of "
            f"{str(given.dtype).removeprefix('torch.')} numbers; give True where attention is "
            "allowed, or floating-point numbers that are added to the scores"
        )
    return given.to(scores.dtype).masked_fill(given <= torch.finfo(given.dtype).min, lowest)


def _valid(call: TrainingCall, streams: Sequence[Any]) -> Tensor | None:
    """Return which queries are not padding, (samples, queries) bool; None where none is.

    The mask of the innermost model that runs says it, whose token stream they are.
    """
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
    """Return probabilities of two calls of one layer as samples, the shorter ones padded."""
    if p.shape[1:] == q.shape[1:] and valid is None and other is None:
        return torch.cat([p, q]), None
    rows, keys = (max(a, b) for a, b in zip(p.shape[-2:], q.shape[-2:], strict=True))

    def padded(t: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = t.new_ones(t.shape[::2], dtype=torch.bool) if mask is None else mask
        short = rows - t.shape[-2]
        return pad(t, (0, keys - t.shape[-1], 0, short)), pad(mask, (0, short))

    tensors, masks = zip(padded(p, valid), padded(q, other), strict=True)
    return torch.cat(tensors), torch.cat(masks)


@contextmanager
def watching(
    model: nn.Module, layers: object, inputs_of: Sequence[nn.Module] | None = None
) -> Iterator[ProbabilityCollector]:
    """Yield a `ProbabilityCollector` that follows the attention of a model.

    Args:
        model: in training.
        layers: numbers of attention layers, or None for all.
        inputs_of: modules whose inputs are kept, and calls with them.

    Raises:
        CaptureError: layers that do not exist, or a model ran and no attention was seen.
    """
    inner = bare_model(model, tells=False)
    chosen = None if layers is None else frozenset(indices("layers", layers))
    if chosen is not None and min(chosen, default=0) < 0:
        raise CaptureError(f"layers is {shown(layers)}; count from 0, in the order they run in")
    modules = list((model if isinstance(model, nn.Module) else inner).modules())
    watch = ProbabilityCollector(frozenset(map(id, modules)), chosen, inputs_of is not None)
    hooked, attending = _hooked(watch, modules, inputs_of or ()), _attending(inner, modules)
    with hooked, attending, uncompiled(modules):
        _watches.append(watch)
        try:
            yield watch
        finally:
            _watches.remove(watch)
    if watch.ran and not watch.layers:
        newer = "" if __version__ >= "5" else ", or install transformers>=5, where more does"
        raise CaptureError(
            f"{type(inner).__name__} ran, and none of its attention goes through "
            f"AttentionInterface in transformers {__version__}, so its probabilities are not seen; "
            "run it outside with attn_implementation='eager' and output_attentions=True, and take "
            f"its attentions{newer}"
        )
    missing = sorted(i for i in watch.chosen or () if i >= len(watch.layers))
    if missing and watch.layers:
        raise CaptureError(f"layers {missing} do not exist: 0 to {len(watch.layers) - 1} ran")


def uncompiled(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they are written."""
    compiled = any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules)
    if compiled and not hasattr(torch.compiler, "set_stance"):
        raise CaptureError("compiled models need torch 2.6 or newer; give the model uncompiled")
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def _hooked(
    watch: ProbabilityCollector, parts: Sequence[nn.Module], modules: Sequence[nn.Module]
) -> Iterator[None]:
    """Yield while a watch knows which token stream is computed, and what modules are given."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch.ran = True
        watch.streams.append(by_name(module, args, kwargs)[1].get("attention_mask"))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if watch.streams:
            watch.streams.pop()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, Tensor):
            watch.inputs[id(module)] = x

    with watch.hooks as hooks:
        for part in parts:
            if isinstance(part, PreTrainedModel):
                hooks.enter_context(part.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(part.register_forward_hook(leave, always_call=True))
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        yield


@contextmanager
def _attending(model: PreTrainedModel, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Yield while a model, all of whose ``modules`` are given, runs our attention function.

    Checkpointed layers that run then are recomputed with it.
    """
    found = (c for module in modules for c in attention_configs(vars(module).get("config")))
    configs = list({id(config): config for config in found}.values())
    with ExitStack() as stack:
        kept = own_names(configs)
        stack.enter_context(own_functions(_attention))
        for config in configs:
            stack.callback(setattr, config, ATTRIBUTE, getattr(config, ATTRIBUTE))
        if any(getattr(config, ATTRIBUTE) != TRAINING_ATTENTION for config in configs):
            model.set_attn_implementation(TRAINING_ATTENTION)
        for config, own in kept:
            setattr(config, ATTRIBUTE, own)
        ours = [config for config in configs if getattr(config, ATTRIBUTE) == TRAINING_ATTENTION]
        ours += [config for config, _ in kept]
        for module in modules:
            func: Any = vars(module).get(CHECKPOINTING)
            if getattr(func, "func", None) is checkpoint:
                noting = partial(_checkpoint, ours, func)
                stack.enter_context(changed(CHECKPOINTING, noting, module))
        yield


def _checkpoint(configs: Sequence[Any], func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what torch's checkpointing does, made to remember which attention was watched.

    Args:
        configs: of the model, that name our attention function.
        func: torch's checkpointing with its options.
        *args: of the layer.
        **kwargs: of the layer and of checkpointing.

    Raises:
        CaptureError: checkpointing is reentrant.
    """
    keywords = {**getattr(func, "keywords", {}), **kwargs}
    if keywords.get("use_reentrant"):
        raise CaptureError(
            "a penalty would have no gradient where checkpointing is reentrant; pass "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    own = keywords.get("context_fn")

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        notes: list[bool] = []
        first, second = (nullcontext(), nullcontext()) if own is None else own()
        return _noting(first, notes), _Recomputing(second, notes, configs)

    return func(*args, **kwargs | {"context_fn": contexts})


@contextmanager
def _noting(own: AbstractContextManager[Any], notes: list[bool]) -> Iterator[None]:
    with own, changed("notes", notes, replay):
        yield


class _Recomputing(ExitStack):
    """Context of a recomputation, which torch may enter again for another backward pass."""

    def __init__(self, own: AbstractContextManager[Any], notes: list[bool], configs: Sequence[Any]):
        super().__init__()
        self._own, self._notes, self._configs = own, notes, configs

    def __enter__(self) -> Self:
        own = {id(config) for config, _ in own_names(self._configs)}
        others = [config for config in self._configs if id(config) not in own]
        self.enter_context(self._own)
        self.enter_context(own_functions(_attention))
        self.enter_context(changed(ATTRIBUTE, TRAINING_ATTENTION, *others))
        self.enter_context(changed("script", iter(self._notes), replay))
        return self
