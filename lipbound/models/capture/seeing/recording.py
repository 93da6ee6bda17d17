"""Recording every attention of a forward pass of a model, in whichever way it is computed."""

import copy
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from lipbound.errors import CaptureError
from lipbound.models.capture.seeing.call import (
    BY_HAND,
    FUSED,
    INTERFACE,
    Call,
    ModuleRun,
    first_tensor,
    listed,
    same_numbers,
)
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

    Args:
        recorder: of the pass, which knows what runs and what is seen.

    Attributes:
        found: modules by name.
    """

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, nn.Module] = {}
        self._recorder = recorder

    def names(self, captured: Collection[str]) -> str:
        """Return names and types of some of the modules found, but for captured ones."""
        found = [
            f"{name or 'the model itself'} ({type(module).__name__})"
            for name, module in self.found.items()
            if name not in captured
        ]
        return listed(found, NAMED)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, running = func(*args, **(kwargs or {})), self._recorder.running
        if self._recorder.is_paused or not running:
            return out
        operation = func._schema.name.rpartition("::")[2]
        near = reversed(running[-DEEP:])
        owner = next((run for run in near if "att" in type(run.module).__name__.lower()), None)
        if FUSED_ATTENTION.match(operation):
            owner = owner or running[-1]
        elif operation not in SOFTMAX or out.ndim < 3:
            return out
        if owner is not None:
            self.found[owner.name] = owner.module
        return out


def _notes(model: nn.Module, calls: Collection[Call], unseen: AttentionFinder) -> list[str]:
    """Return sentences on attention that was not seen, or is not what it seems."""
    said, captured = [], {call.name for call in calls}
    if left_out := unseen.names(captured):
        said.append(
            "attention of an unknown make cannot be captured and is left out, in "
            f"{left_out} of {type(model).__name__}"
        )
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, module in lists.items():
        within = any(name.startswith(f"{outer}.") for outer in lists)  # parts of one layer
        starts = [f"{name}.{i}." for i in range(len(module))]
        count = sum(any(f"{one}.".startswith(start) for one in captured) for start in starts)
        if not within and 0 < count < len(module):
            said.append(
                f"softmax attention was found in {count} of {len(module)} layers in {name}; the "
                "others mix tokens in another way, or not at all, and are left out"
            )
    if adding := [call.name for call in calls if call.adds]:
        said.append(
            "a mask of True and False is added to scores as the numbers 1 and 0, which is what the "
            f"model's own attention does, in layer {listed(adding)}"
        )
    return said


class Recorder(Follower):
    """The calls of one forward pass, in which hooks on every module tell which of them run."""

    def __init__(self, samples: int, adds: bool):
        super().__init__(adds)
        self._samples, self.unseen = samples, AttentionFinder(self)
        self._made: dict[int, Call] = {}
        self.running: list[ModuleRun] = []
        self.calls: list[Call] = []

    def computed(self, heads: Heads) -> None:
        """Record a call.

        Raises:
            CaptureError: the module is not being run.
        """
        runs = [r for r in self.running if heads.module is None or r.module is heads.module]
        if not runs:
            raise CaptureError(
                f"attention was called on behalf of {type(heads.module).__name__}, which is not "
                "being run"
            )
        run, out = runs[-1], heads.raw
        out = out.transpose(-3, -2) if heads.way == FUSED else out
        if heads.way == BY_HAND:
            for near in self.running[-OUTER:]:  # its attention was seen after all
                self.unseen.found.pop(near.name, None)
        q, k = heads.q[0], heads.k[0]
        call = Call(run, q, k, heads.v, heads.mask, heads.scale, heads.extras, out, heads.raw)
        call.way, call.scores, call.samples = heads.way, heads.scores, self._samples
        call.boolean, call.adds = heads.boolean, heads.adds
        if heads.own:
            call.reason = (
                "computes attention by a function that was registered with AttentionInterface, in "
                "which no softmax of products of queries and keys is seen"
            )
        call.formed = heads.way == INTERFACE or (heads.way == FUSED and out.ndim == 4)
        call.turn = sum(other.module is call.module for other in self.calls)
        call.given_mask = self._given_mask()
        run.calls += 1
        position = self.running.index(run)
        call.around = [(outer, outer.inside) for outer in self.running[position::-1][:OUTER]]
        for outer, _ in call.around:
            tensors = [t for t in tree_leaves((outer.args, outer.kwargs)) if isinstance(t, Tensor)]
            outer.learned = [t for t in tensors if self.is_weight(t)]
        for outer in self.running:
            outer.inside += 1
        self._made[id(heads)] = call
        self.calls.append(call)

    def projected(self, x: Tensor, heads: Heads) -> None:
        """Note the module that multiplies outputs of heads with its weights first."""
        call = self._made.pop(id(heads), None)
        if call is None:
            return
        # wrappers of a module are given what it is given
        runs = (r for r in self.running if not r.inside and self.kind(_only(r)) is heads)
        run = next(runs, call.projection)
        call.projection, x = run, x if run is None else run.args[0]
        call.consumer, call.projected = None, x
        if call.way == BY_HAND and heads.form is not None and x.shape[-1] % heads.width == 0:
            apart = x.shape[-1] == heads.width and heads.form[0].ndim == 4
            count = heads.form[0].shape[1] if apart else x.shape[-1] // heads.width
            forms = in_heads(heads, count)
            if forms is not None:
                call.q, call.k, call.v = forms[:3]
                call.out, call.formed = forms[3].transpose(1, 2), True
        if not call.formed:
            return
        module = None if run is None else run.module
        if _same(x, call.out):
            call.consumer = module
            return
        if call.way == INTERFACE and call.run not in self.running:
            call.projection = call.projected = None
            return  # what is made of it outside is not the layer's
        flat, out = x.flatten(), call.out.flatten()
        if len(flat) != len(out):
            call.changed = "hands on more than the outputs of its heads to their projection"
            return
        if not same_numbers(flat, out):  # not even in another order
            call.changed = "changes its head outputs before they are projected (a norm, a gate)"
            # behind a gate between 0 and 1 they keep their signs
            signed = bool(((flat == 0) | (flat.sign() == out.sign())).all() and (flat != 0).any())
            call.gated = call.way != BY_HAND and signed
            call.consumer = module if call.gated else None

    def returned(self, out: Tensor) -> None:
        """Take what a function of the user's own makes of outputs of heads as part of the heads."""
        if not same_numbers(self.calls[-1].raw, out):
            self.calls[-1].w_o.append(None)

    def _given_mask(self) -> Tensor | None:
        models = (run for run in reversed(self.running) if isinstance(run.module, PreTrainedModel))
        inside = next(models, None)
        mask = None if inside is None else inside.kwargs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run before a module of that name, as a hook."""
        args, kwargs = by_name(module, args, kwargs)
        kwargs = {key: _as_it_is(value) for key, value in kwargs.items()}
        self.running.append(ModuleRun(module, name, args, kwargs))
        call = self._made.get(id(self.kind(args[0]))) if args and _is_linear(module) else None
        if call is not None and call.formed and not call.consumer and _same(args[0], call.out):
            call.consumer, call.projection = module, self.running[-1]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run behind every module, as a hook."""
        self.running.pop().returned = first_tensor(output)


def record(
    model: nn.Module, inputs: Mapping[str, Any], *, cache: bool = False
) -> tuple[list[Call], list[str]]:
    """Return the calls of attention in one forward pass, in order, and what there is to tell of it.

    Args:
        model: in the context of `implementation`.
        inputs: of the pass.
        cache: whether the model may keep a cache.

    Returns:
        Each call with the projection that consumed its output; and sentences.

    Raises:
        CaptureError: the model computes no attention that is seen.
    """
    # tokens of all samples may be packed together
    samples = min((len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim), default=1)
    recorder = Recorder(samples, not getattr(model, "_supports_sdpa", True))
    with ExitStack() as afterwards:
        for name, module in model.named_modules():
            hook, enter = module.register_forward_pre_hook, partial(recorder.enter, name)
            # a module's own hooks belong to what it does
            afterwards.enter_context(hook(enter, with_kwargs=True, prepend=True))
            afterwards.enter_context(module.register_forward_hook(recorder.leave))
        with recorder.unseen, recorder:
            drew = forward(model, inputs, cache=cache)
    if not recorder.calls:
        own = "it seems to have no attention layers"
        if recorder.unseen.found:
            own = f"its attention is of an unknown make, in {recorder.unseen.names([])}"
        raise CaptureError(
            f"{type(model).__name__} has no attention that can be captured: its forward pass "
            "calls neither the transformers attention interface nor scaled_dot_product_attention, "
            f"and multiplies no softmax of products of its tokens with others ({own})"
        )
    notes = _notes(model, recorder.calls, recorder.unseen)
    if drew:
        notes.append(
            "the model draws random numbers in its forward pass; it is measured at those of "
            "torch.manual_seed(0)"
        )
    return recorder.calls, notes


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


def _only(run: ModuleRun) -> Tensor | None:
    """Return the first argument of a module that was given no other tensor."""
    tensors = [t for t in tree_leaves((run.args, run.kwargs)) if isinstance(t, Tensor)]
    floating = [t for t in tensors if t.is_floating_point()]
    return floating[0] if run.args and len(floating) == 1 and floating[0] is run.args[0] else None


def _same(x: object, out: Tensor) -> bool:
    return isinstance(x, Tensor) and torch.equal(x.flatten(), out.flatten())


def by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with all but the first by name, however they were passed."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p.name for p in list(parameters)[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) < 2 or len(named) < len(args):
        return args, kwargs
    return args[:1], {**dict(zip(named[1:], args[1:], strict=True)), **kwargs}
