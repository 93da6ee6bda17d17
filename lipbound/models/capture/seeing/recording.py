"""Recording every attention of a forward pass of a model, in whichever way it is computed."""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from lipbound.errors import CaptureError
from lipbound.models.capture.seeing.call import BY_HAND, FUSED, INTERFACE, Call, ModuleRun
from lipbound.models.capture.seeing.follower import Follower, Heads, in_heads
from lipbound.models.capture.seeing.interface import forward

OUTER = 4
"""Modules around a call that are kept, the innermost included."""
SOFTMAX = ("_softmax", "_safe_softmax")
FUSED_ATTENTION = re.compile(
    "_?scaled_dot_product|_native_multi_head_attention|_transformer_encoder_layer|_fused_sdp|"
    "_flash_attention|_efficient_attention"
)
"""Beginnings of the names of torch's operations that are attention by themselves."""
DEEP = 3
"""Largest number of modules from one of attention to its softmax, with it."""
NAMED = 4
"""Number of modules that a sentence names."""


class AttentionFinder(TorchDispatchMode):
    """The modules that compute attention: a softmax, or torch's own attention.

    Routers of experts and mixtures of residual streams have a softmax, too: a module counts if the
    name of its class says that it is attention.

    Attributes:
        found: modules by name.
        running: the modules that run, the innermost last.
        paused: whether attention is computed that is seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, nn.Module] = {}
        self.running: list[ModuleRun] = []
        self.paused = False

    def names(self, captured: Collection[str]) -> str:
        """Return names and types of some of the modules found, but for captured ones."""
        found = [
            f"{name or 'the model itself'} ({type(module).__name__})"
            for name, module in self.found.items()
            if name not in captured
        ]
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        return ", ".join(found[:NAMED]) + more

    def left_out(self, model: nn.Module, captured: Collection[str]) -> list[str]:
        """Return a sentence on the modules whose attention was not captured, where some were not.

        Args:
            model: whose forward pass was watched.
            captured: names of the modules that were captured.
        """
        count = len(set(self.found) - set(captured))
        compute = f"{count} modules compute" if count > 1 else "a module computes"
        said = (
            f"{compute} attention of an unknown make, which cannot be captured: "
            f"{self.names(captured)} of {type(model).__name__} {'are' if count > 1 else 'is'} left "
            "out"
        )
        return [said] if count else []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.paused or not self.running:
            return out
        operation = func._schema.name.rpartition("::")[2]
        near = reversed(self.running[-DEEP:])
        owner = next((run for run in near if "att" in type(run.module).__name__.lower()), None)
        if FUSED_ATTENTION.match(operation):
            owner = owner or self.running[-1]
        elif operation not in SOFTMAX or out.ndim < 3:
            return out
        if owner is not None:
            self.found[owner.name] = owner.module
        return out


def without_softmax(model: nn.Module, captured: Collection[str]) -> list[str]:
    """Return a sentence for each list of layers of which only some have softmax attention.

    Args:
        model: whose forward pass was watched.
        captured: names of the modules that compute attention.
    """
    said = []
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, module in lists.items():
        within = any(name.startswith(f"{outer}.") for outer in lists)  # parts of one layer
        starts = [f"{name}.{i}." for i in range(len(module))]
        count = sum(any(f"{one}.".startswith(start) for one in captured) for start in starts)
        if not within and 0 < count < len(module):
            have = "have" if count > 1 else "has"
            said.append(
                f"{count} of {len(module)} layers in {name} {have} softmax attention; the others "
                "mix tokens in another way, or not at all, and are left out"
            )
    return said


class _Recorder(Follower):
    """The calls of one forward pass, in which hooks on every module tell which of them run."""

    def __init__(self, watch: AttentionFinder, samples: int, adds: bool):
        super().__init__(adds)
        self._samples, self._watch, self._stack = samples, watch, watch.running
        self._made: dict[int, Call] = {}
        self.calls: list[Call] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._watch.paused = True
        try:
            with super().paused():
                yield
        finally:
            self._watch.paused = False

    def computed(self, heads: Heads) -> None:
        """Record a call.

        Raises:
            CaptureError: the module is not being run.
        """
        runs = [r for r in self._stack if heads.module is None or r.module is heads.module]
        if not runs:
            raise CaptureError(
                f"attention was called on behalf of {type(heads.module).__name__}, which is not "
                "being run"
            )
        run, out = runs[-1], heads.raw
        if heads.way == FUSED:
            out = out.transpose(-3, -2)
        if heads.way == BY_HAND:
            for near in self._stack[-OUTER:]:  # its attention was seen after all
                self._watch.found.pop(near.name, None)
        q, k = heads.q[0], heads.k[0]
        call = Call(run, q, k, heads.v, heads.mask, heads.scale, heads.extras, out, heads.raw)
        call.way, call.scores, call.samples = heads.way, heads.scores, self._samples
        call.boolean, call.adds = heads.boolean, heads.adds
        call.formed = heads.way == INTERFACE or (heads.way == FUSED and out.ndim == 4)
        call.turn = sum(other.module is call.module for other in self.calls)
        call.given_mask = self._given_mask()
        run.calls += 1
        position = self._stack.index(run)
        call.around = [(outer, outer.inside) for outer in self._stack[position::-1][:OUTER]]
        for outer, _ in call.around:
            tensors = [t for t in tree_leaves((outer.args, outer.kwargs)) if isinstance(t, Tensor)]
            outer.learned = [t for t in tensors if self.is_weight(t)]
        for outer in self._stack:
            outer.inside += 1
        self._made[id(heads)] = call
        self.calls.append(call)

    def projected(self, x: Tensor, heads: Heads) -> None:
        """Note the module that multiplies outputs of heads with its weights first."""
        call = self._made.pop(id(heads), None)
        if call is None:
            return
        module = self._stack[-1].module
        call.projection, call.projected = module if _is_linear(module) else None, x
        if call.way == BY_HAND and heads.form is not None and x.shape[-1] % heads.width == 0:
            apart = x.shape[-1] == heads.width and heads.form[0].ndim == 4
            count = heads.form[0].shape[1] if apart else x.shape[-1] // heads.width
            forms = in_heads(heads, count)
            if forms is not None:
                call.q, call.k, call.v = forms[:3]
                call.out, call.formed = forms[3].transpose(1, 2), True
        if not call.formed or call.consumer is not None:
            return
        if _same(x, call.out):
            call.consumer = call.projection
            return
        if call.way == INTERFACE and call.run not in self._stack:
            return  # what is made of it outside is not the layer's
        flat, out = x.flatten(), call.out.flatten()
        if len(flat) != len(out):
            call.changed = "hands on more than the outputs of its heads to their projection"
            return
        first, second = (t.nan_to_num().sort().values for t in (flat, out))
        if not torch.equal(first, second):  # not even in another order
            call.changed = "changes its head outputs before they are projected (a norm, a gate)"
            call.gated = call.way != BY_HAND and _is_gated(flat, out)
            call.consumer = call.projection if call.gated else None

    def _given_mask(self) -> Tensor | None:
        models = (run for run in reversed(self._stack) if isinstance(run.module, PreTrainedModel))
        inside = next(models, None)
        mask = None if inside is None else inside.kwargs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def enter(self, name: str) -> Callable[..., None]:
        """Return the hook that runs before the module of that name."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            args, kwargs = _by_name(module, args, kwargs)
            kwargs = {key: _as_it_is(value) for key, value in kwargs.items()}
            self._stack.append(ModuleRun(module, name, args, kwargs))
            call = self._made.get(id(self.kind(args[0]))) if args and _is_linear(module) else None
            if call is not None and call.formed and _same(args[0], call.out):
                call.consumer = module

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run behind every module, as a hook."""
        run = self._stack.pop()
        if run.inside:
            run.returned = output[0] if isinstance(output, tuple) and output else output


def record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    watch: AttentionFinder | None = None,
    cache: bool = False,
) -> list[Call]:
    """Return the calls of attention in one forward pass, in order.

    Args:
        model: in the context of `implementation`.
        inputs: of the pass.
        watch: finds attention that is seen in no way.
        cache: whether the model may keep a cache.

    Returns:
        Each call with the projection that consumed its output.

    Raises:
        CaptureError: the model computes no attention that is seen.
    """
    watch = watch or AttentionFinder()
    # tokens of all samples may be packed together
    samples = min((len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim), default=1)
    recorder = _Recorder(watch, samples, not getattr(model, "_supports_sdpa", True))
    hooks = []
    try:
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(recorder.enter(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(recorder.leave))
        with watch, recorder:
            drew = forward(model, inputs, cache=cache)
    finally:
        for hook in hooks:
            hook.remove()
    if not recorder.calls:
        own = "it seems to have no attention layers"
        if watch.found:
            own = f"its attention is of an unknown make, in {watch.names([])}"
        raise CaptureError(
            f"{type(model).__name__} has no attention that can be captured: its forward pass "
            "calls neither the transformers attention interface nor scaled_dot_product_attention, "
            f"and multiplies no softmax of products of its tokens with others ({own})"
        )
    for call in recorder.calls:
        call.random = drew
    return recorder.calls


def _as_it_is(value: Any) -> Any:
    """Return a copy of a cache, to which the pass will add; its tensors are shared."""
    if not isinstance(value, Cache):
        return value
    return copy.deepcopy(value, {id(t): t for t in _tensors_in(value)})


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        yield from _tensors_in([*(value if isinstance(value, dict) else vars(value)).values()])


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _same(x: Tensor, out: Tensor) -> bool:
    return torch.equal(x.flatten(), out.flatten())


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
