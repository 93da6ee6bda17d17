"""Running a transformers model while recording every call of its attention interface."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from lipbound.errors import CaptureError, LipboundError, shown
from lipbound.models.capture.left_out import AttentionFinder
from lipbound.models.quiet import first_line
from lipbound.models.sources.loaded_model import bare_inputs
from lipbound.models.training.recomputing import attention_configs

RECORDING_ATTENTION = "lipbound"
"""Name of our attention function in the transformers registry."""
EAGER = "eager_attention_forward"
"""How the names of transformers' eager attention functions end."""


@dataclass(eq=False)
class ModuleRun:
    """One run of a module: its name in the model, what it was given, by name but for the first
    argument, and how often it called attention."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int = 0


@dataclass
class Call:
    """One call of the attention interface, with the module that made it and what that module was
    given."""

    run: ModuleRun
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None
    extras: dict[str, Any]
    out: Tensor
    turn: int
    """How many calls the same module made before (models such as ALBERT run one module as every
    layer)."""
    boolean: bool = False
    """Whether the mask was given as True and False, which torch's fused attention understands; here
    it is what that adds to scores."""
    given_mask: Tensor | None = None
    """The mask of tokens, (samples, N), that the model (of a composed one the part) around the
    layer was given."""
    consumer: nn.Module | None = None
    changed: str = ""
    """What happens to the head outputs before they are projected, where something does."""

    @property
    def module(self) -> nn.Module:
        """The module that made it."""
        return self.run.module

    @property
    def name(self) -> str:
        """The name of that module in the model."""
        return self.run.name

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional argument of the module, if it was given one."""
        return self.run.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """All other arguments of the module."""
        return self.run.kwargs

    def to(self, device: torch.device) -> "Call":
        """The same call with its tensors on a device; the modules stay where they are."""
        if self.q.device == device:
            return self

        def there(value: Any) -> Any:
            return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, value)

        own = {
            field.name: there(getattr(self, field.name))
            for field in fields(self)
            if field.name not in ("run", "consumer")
        }
        return replace(
            self, run=replace(self.run, args=there(self.args), kwargs=there(self.kwargs)), **own
        )

    def unsupported(self, what: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
        """The error, of this kind, about something that the layer does."""
        return kind(
            f"layer {self.name}: {type(self.module).__name__} {what}, which is not supported"
        )


_handler: Callable[..., tuple[Tensor, Any]] | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Parameters have the interface's names, since some models pass them by keyword."""
    function = _eager(module) if _handler is None else _handler
    return function(module, query, key, value, attention_mask, **kwargs)


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The eager attention that a module's own code names (a file may have several)."""
    kind: Any = type(module)
    named = _named_in(kind)
    function = (
        getattr(sys.modules[kind.__module__], EAGER, None)
        if named is None
        else named[0].get(named[1])
    )  # as it is now
    if function is None:
        raise CaptureError(
            f"{type(module).__name__} names no eager attention function, so its attention cannot "
            "be checked"
        )
    found: Callable[..., tuple[Tensor, Any]] = function
    return found


@cache
def _named_in(kind: Any) -> tuple[dict[str, Any], str] | None:
    """The globals and the name of the eager attention function that the methods of a class mention,
    ``forward`` first."""
    methods = [
        inspect.unwrap(f)
        for cls in kind.__mro__
        for f in sorted(vars(cls).values(), key=_is_not_forward)
        if inspect.isfunction(f)
    ]
    return next(
        (
            (f.__globals__, name)
            for f in methods
            for name in f.__code__.co_names
            if name.endswith(EAGER)
        ),
        None,
    )


def _is_not_forward(value: object) -> bool:
    return getattr(value, "__name__", "") != "forward"


AttentionInterface.register(RECORDING_ATTENTION, _attention)


AttentionMaskInterface.register(
    RECORDING_ATTENTION, eager_mask
)  # without it, causal and padding masks would silently be lost


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
    """The model with another attention implementation, in evaluation mode, without gradients and as
    if it had seen no text before; restored afterwards."""
    training = {module: module.training for module in model.modules()}
    configs = {
        id(c): c
        for module in model.modules()
        for c in attention_configs(getattr(module, "config", None))
    }
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    experts = (
        model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None
    )
    try:
        model.set_attn_implementation(name)
        if (
            experts is not None
            and model.dtype == torch.float64
            and model._can_set_experts_implementation()
        ):
            model.set_experts_implementation(
                "eager"
            )  # torch's grouped product of experts knows no float64
        model.eval()
        with torch.no_grad(), _fresh_rotary_tables(model):
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        if experts is not None:
            model.config._experts_implementation = experts
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _fresh_rotary_tables(model: nn.Module) -> Iterator[None]:
    """Context in which rotary tables that grow with the longest text seen (dynamic NTK) start anew;
    what they were comes back."""
    kept = []
    for module in model.modules():
        for original in [
            name for name in vars(module) | module._buffers if name.endswith("original_inv_freq")
        ]:
            table, longest = (
                original.replace("original_inv_freq", "inv_freq"),
                original.replace("original_inv_freq", "max_seq_len_cached"),
            )
            kept += [
                (module, name, getattr(module, name))
                for name in (table, longest)
                if hasattr(module, name)
            ]
            before = getattr(module, original)
            if (
                isinstance(before, Tensor)
                and isinstance(now := getattr(module, table, None), Tensor)
                and before.shape == now.shape
            ):
                setattr(module, table, before.to(now).clone())
            if hasattr(module, longest) and hasattr(module, "original_max_seq_len"):
                setattr(module, longest, module.original_max_seq_len)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def taken(model: PreTrainedModel, inputs: object) -> dict[str, Tensor]:
    """Inputs as a model's forward takes them: floating-point ones in its dtype, those of
    `lipbound.prepare` on its device.

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
"""What the code of models raises when it is given what it does not expect."""


def cannot_compute(model: nn.Module, error: Exception) -> CaptureError:
    """The error about a forward pass that fails."""
    return CaptureError(
        f"{type(model).__name__} cannot compute with these inputs: {first_line(error)}"
    )


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, cache: bool = False) -> None:
    """One pass through the model, without a cache where it would keep one unless ``cache``; raises
    CaptureError where the model does."""
    extra = (
        {"use_cache": False}
        if not cache and "use_cache" in inspect.signature(model.forward).parameters
        else {}
    )
    try:
        model(**{**inputs, **extra})
    except LipboundError:
        raise
    except RAISED as error:
        raise cannot_compute(model, error) from error


class _Recorder:
    """Record of one forward pass, made by hooks on every module and by our attention function."""

    def __init__(self, watch: AttentionFinder | None):
        self.calls: list[Call] = []
        self._stack: list[ModuleRun] = []
        self._watch = watch
        self._waiting: Call | None = None
        """The last call, until the projection of its output is found."""

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
    ) -> tuple[Tensor, Any]:
        """Stands for the attention function; lets the module's own eager one compute."""
        boolean = mask is not None and mask.dtype == torch.bool
        if mask is not None and boolean:  # eager functions would add True as 1
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(
                ~mask, torch.finfo(q.dtype).min
            )
        with nullcontext() if self._watch is None else self._watch.seen():
            out, probabilities = _eager(module)(module, q, k, v, mask, **kw)
        run = next((run for run in reversed(self._stack) if run.module is module), None)
        if run is None:
            raise CaptureError(
                f"attention was called on behalf of {type(module).__name__}, which is not being run"
            )
        run.calls += 1
        extras = {name: value for name, value in kw.items() if value is not None}
        turn = sum(call.module is module for call in self.calls)
        self._waiting = Call(
            run, q, k, v, mask, kw.get("scaling"), extras, out, turn, boolean, self._given_mask()
        )
        self.calls.append(self._waiting)
        return out, probabilities

    def _given_mask(self) -> Tensor | None:
        inside = next(
            (run for run in reversed(self._stack) if isinstance(run.module, PreTrainedModel)), None
        )
        mask = None if inside is None else inside.kwargs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append(ModuleRun(module, name, *_by_name(module, args, kwargs)))
            if self._watch is not None:
                self._watch.enter(module, name)
            if self._waiting is not None and args and isinstance(args[0], Tensor):
                self._follow(self._waiting, module, args[0])

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        if self._watch is not None:
            self._watch.leave()

    def _follow(self, call: Call, module: nn.Module, x: Tensor) -> None:
        """Note what a module makes of the output of a call, if that is what its input ``x`` is."""
        flat = call.out.flatten(2)
        if x.numel() != flat.numel():
            return
        same = torch.equal(x.reshape(flat.shape), flat)
        if same and _is_linear(module) and x.shape[-1] == flat.shape[-1]:
            call.consumer, self._waiting = module, None
        elif same and "norm" in type(module).__name__.lower():
            call.changed = (
                f"normalises its head outputs ({type(module).__name__}) before they are projected"
            )
        elif (
            not call.changed
            and _is_linear(module)
            and call.run in self._stack
            and _is_gated(x.reshape(flat.shape), flat)
        ):
            call.changed = "multiplies its head outputs by a gate before they are projected"


def record(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    watch: AttentionFinder | None = None,
    cache: bool = False,
) -> list[Call]:
    """The calls of the attention interface in one forward pass, in order, with the projection that
    consumed each call's output.

    Args:
        model, inputs: of the pass.
        watch: also told what runs, to find attention that does not go through the interface.
        cache: whether the model may keep a cache.

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


def hidden_states(call: Call) -> Tensor:
    """The owner's input X, its first positional argument or ``hidden_states``."""
    x = call.args[0] if call.args else call.kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise CaptureError(
            f"layer {call.name}: {type(call.module).__name__} is not given one (samples, N, D) "
            "tensor of token vectors"
        )
    if call.k.shape[-2] != x.shape[1] or call.q.shape[-2] != x.shape[1]:
        raise CaptureError(
            f"layer {call.name}: {call.q.shape[-2]} queries attend to {call.k.shape[-2]} keys "
            f"while the layer's input has {x.shape[1]} tokens; "
            "only self-attention is supported (no cross-attention, no cache, no windows cut out "
            "of the input)"
        )
    return x


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _is_gated(x: Tensor, flat: Tensor) -> bool:
    """Tell whether every number of ``x`` has the sign of that of ``flat``, as after a gate between
    0 and 1."""
    return bool(((x == 0) | (x.sign() == flat.sign())).all()) and bool((x != 0).any())


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with all but the first by name, so that it makes no difference how they
    were passed."""
    if len(args) < 2:
        return args, kwargs
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [p.name for p in parameters[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(named) < len(args):
        return args, kwargs
    return args[:1], {**dict(zip(named[1:], args[1:], strict=True)), **kwargs}
