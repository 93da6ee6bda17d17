"""Recording every call of transformers' attention interface in a forward pass of a model."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from lipbound.errors import CaptureError, LipboundError, shown
from lipbound.models.capture.seeing.call import Call, ModuleRun
from lipbound.models.capture.seeing.left_out import AttentionFinder
from lipbound.models.quiet import first_line
from lipbound.models.sources.loaded_model import bare_inputs

RECORDING_ATTENTION = "lipbound"
"""Name of our attention function in the transformers registry."""
EAGER = "eager_attention_forward"
"""Ending of the names of transformers' eager attention functions."""
ATTRIBUTE = "_attn_implementation_internal"
"""Where a configuration of transformers keeps the name of the attention function."""
ORIGINAL = "original_inv_freq"
"""Ending of the names of rotary tables in modules that stay as they were made."""
RAISED = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    NameError,
)
"""Errors that the code of models raises when it is given what it does not expect."""

AttentionFunction = Callable[..., tuple[Tensor, Any]]
"""A function (module, query, key, value, mask, ...) -> (outputs, probabilities)."""

_handler: AttentionFunction | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    # parameters have the interface's names, since some models pass them by keyword
    function = _eager(module) if _handler is None else _handler
    return function(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(RECORDING_ATTENTION, _attention)
# without this, causal and padding masks would silently be lost
AttentionMaskInterface.register(RECORDING_ATTENTION, eager_mask)


def _eager(module: nn.Module) -> AttentionFunction:
    """Return the eager attention that a module's own code names; a file may have several.

    Raises:
        CaptureError: it names none.
    """
    kind: Any = type(module)
    space, name = _eager_name(kind) or (vars(sys.modules[kind.__module__]), EAGER)
    function: AttentionFunction | None = space.get(name)  # as it is now
    if function is None:
        why = "names no eager attention function, so its attention cannot be checked"
        raise CaptureError(f"{kind.__name__} {why}")
    return function


@cache
def _eager_name(kind: Any) -> tuple[dict[str, Any], str] | None:
    """Return globals and name of the eager attention function that a class mentions."""
    for cls in kind.__mro__:
        for f in filter(inspect.isfunction, sorted(vars(cls).values(), key=_is_not_forward)):
            f = inspect.unwrap(f)
            for name in f.__code__.co_names:
                if name.endswith(EAGER):
                    return f.__globals__, name
    return None


def _is_not_forward(value: object) -> bool:
    return getattr(value, "__name__", "") != "forward"


@contextmanager
def handling(function: AttentionFunction) -> Iterator[None]:
    """Yield while calls of the attention interface go to ``function``."""
    global _handler
    previous, _handler = _handler, function
    try:
        yield
    finally:
        _handler = previous


def attention_configs(config: Any) -> Iterator[Any]:
    """Yield a model configuration and those inside it that name an attention function."""
    if hasattr(config, ATTRIBUTE):
        yield config
        for name in getattr(config, "sub_configs", {}):
            yield from attention_configs(getattr(config, name, None))


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Yield while a model runs another attention function, as if it had seen no text before.

    It is in evaluation mode and has no gradients; afterwards all is as it was.
    """
    training = {module: module.training for module in model.modules()}
    given = [getattr(module, "config", None) for module in training]
    configs = {id(c): c for config in given for c in attention_configs(config)}
    before = {key: getattr(config, ATTRIBUTE) for key, config in configs.items()}
    experts = getattr(model, "get_experts_implementation", lambda: None)()
    try:
        model.set_attn_implementation(name)
        wide = experts is not None and model.dtype == torch.float64
        if wide and model._can_set_experts_implementation():
            # torch's grouped product of experts knows no float64
            model.set_experts_implementation("eager")
        model.eval()
        with torch.no_grad(), _fresh_rotary_tables(model):
            yield
    finally:
        for key, config in configs.items():
            setattr(config, ATTRIBUTE, before[key])
        if experts is not None:
            model.config._experts_implementation = experts
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _fresh_rotary_tables(model: nn.Module) -> Iterator[None]:
    """Yield while rotary tables that grow with the longest text seen (dynamic NTK) start anew."""
    kept = []
    for module in model.modules():
        names = list(vars(module) | module._buffers)
        for prefix in [n.removesuffix(ORIGINAL) for n in names if n.endswith(ORIGINAL)]:
            table, longest = prefix + "inv_freq", prefix + "max_seq_len_cached"
            found = [name for name in (table, longest) if hasattr(module, name)]
            kept += [(module, name, getattr(module, name)) for name in found]
            before, now = getattr(module, prefix + ORIGINAL), getattr(module, table, None)
            if isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape == now.shape:
                setattr(module, table, before.to(now).clone())
            if hasattr(module, longest) and hasattr(module, "original_max_seq_len"):
                setattr(module, longest, module.original_max_seq_len)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def taken(model: PreTrainedModel, inputs: object) -> dict[str, Tensor]:
    """Return inputs as a model's forward takes them: floating-point ones in its dtype.

    Those of `lipbound.prepare` come to its device.

    Raises:
        CaptureError: there are no named tensors among them.
    """
    inputs = bare_inputs(inputs, model)
    if not isinstance(inputs, Mapping) or not any(isinstance(t, Tensor) for t in inputs.values()):
        kind = "without tensors" if isinstance(inputs, Mapping) else shown(inputs)
        raise CaptureError(
            f"inputs is {kind}; give named tensors, such as tokenizer(text, return_tensors='pt')"
        )
    dtype = next(model.parameters()).dtype
    return {
        str(name): t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in inputs.items()
    }


@contextmanager
def computing(model: nn.Module) -> Iterator[None]:
    """Yield while a model computes; what its code raises becomes one error that names it.

    Raises:
        CaptureError: it cannot compute.
    """
    try:
        yield
    except RAISED as error:
        if isinstance(error, LipboundError):
            raise
        why = f"cannot compute with these inputs: {first_line(error)}"
        raise CaptureError(f"{type(model).__name__} {why}") from error


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, cache: bool = False) -> None:
    """Run a model once, without a cache where it would keep one unless ``cache``."""
    caches = "use_cache" in inspect.signature(model.forward).parameters
    extra = {"use_cache": False} if caches and not cache else {}
    with computing(model):
        model(**{**inputs, **extra})


class _Recorder:
    """The calls of one forward pass, seen by hooks on every module and our attention function."""

    def __init__(self, watch: AttentionFinder | None):
        self.calls: list[Call] = []
        self._stack: list[ModuleRun] = []
        self._watch = watch
        self._waiting: Call | None = None  # the last call, until what projects its output is found

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
    ) -> tuple[Tensor, Any]:
        """Return what the module's own eager attention function does, and record the call.

        Raises:
            CaptureError: the module is not being run.
        """
        boolean = mask is not None and mask.dtype == torch.bool
        if mask is not None and boolean:  # eager functions would add True as 1
            mask = q.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)
        with nullcontext() if self._watch is None else self._watch.captured():
            out, probabilities = _eager(module)(module, q, k, v, mask, **kw)
        run = next((run for run in reversed(self._stack) if run.module is module), None)
        if run is None:
            raise CaptureError(
                f"attention was called on behalf of {type(module).__name__}, which is not being run"
            )
        run.calls += 1
        extras = {name: value for name, value in kw.items() if value is not None}
        turn = sum(call.module is module for call in self.calls)
        given = self._given_mask()
        scale = kw.get("scaling")
        self._waiting = Call(run, q, k, v, mask, scale, extras, out, turn, boolean, given)
        self.calls.append(self._waiting)
        return out, probabilities

    def _given_mask(self) -> Tensor | None:
        models = (run for run in reversed(self._stack) if isinstance(run.module, PreTrainedModel))
        inside = next(models, None)
        mask = None if inside is None else inside.kwargs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def enter(self, name: str) -> Callable[..., None]:
        """Return the hook that runs before the module of that name."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append(ModuleRun(module, name, *_by_name(module, args, kwargs)))
            if self._watch is not None:
                self._watch.running.append((module, name))
            if self._waiting is not None and args and isinstance(args[0], Tensor):
                self._follow(self._waiting, module, args[0])

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run behind every module, as a hook."""
        self._stack.pop()
        if self._watch is not None:
            self._watch.running.pop()

    def _follow(self, call: Call, module: nn.Module, x: Tensor) -> None:
        """Note what a module makes of the output of a call, if that is what its input ``x`` is."""
        flat = call.out.flatten(2)
        if x.numel() != flat.numel():
            return
        linear, y = _is_linear(module), x.reshape(flat.shape)
        same = torch.equal(y, flat)
        if same and linear and x.shape[-1] == flat.shape[-1]:
            call.consumer, self._waiting = module, None
        elif same and "norm" in type(module).__name__.lower():
            norm = type(module).__name__
            call.changed = f"normalises its head outputs ({norm}) before they are projected"
        elif linear and not call.changed and call.run in self._stack and _is_gated(y, flat):
            call.changed = "multiplies its head outputs by a gate before they are projected"


def record(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    watch: AttentionFinder | None = None,
    cache: bool = False,
) -> list[Call]:
    """Return the calls of the attention interface in one forward pass, in order.

    Args:
        model: in the context of `implementation`.
        inputs: of the pass.
        watch: also told what runs, to find attention that does not go through the interface.
        cache: whether the model may keep a cache.

    Returns:
        Each call with the projection that consumed its output.

    Raises:
        CaptureError: the model never calls the interface.
    """
    recorder = _Recorder(watch)
    hooks = []
    try:
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(recorder.enter(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(recorder.leave))
        with handling(recorder.attention), nullcontext() if watch is None else watch:
            forward(model, inputs, cache=cache)
    finally:
        for hook in hooks:
            hook.remove()
    if not recorder.calls:
        own = "either it has no attention layers, or it brings an attention code of its own"
        if watch is not None and watch.found:
            own = f"it brings an attention code of its own, in {watch.names([])}"
        raise CaptureError(
            f"{type(model).__name__} has no attention that can be captured: its forward pass "
            f"never calls the transformers attention interface ({own})"
        )
    return recorder.calls


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _is_gated(x: Tensor, flat: Tensor) -> bool:
    """Return whether ``x`` has the signs of ``flat``, as after a gate between 0 and 1."""
    return bool(((x == 0) | (x.sign() == flat.sign())).all()) and bool((x != 0).any())


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with all but the first by name, however they were passed."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p.name for p in list(parameters)[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) < 2 or len(named) < len(args):
        return args, kwargs
    return args[:1], {**dict(zip(named[1:], args[1:], strict=True)), **kwargs}
