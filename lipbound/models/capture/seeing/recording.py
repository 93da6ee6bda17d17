"""Recording every attention of a forward pass of a model, in whichever way it is computed."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from lipbound.errors import CaptureError
from lipbound.models.capture.seeing.by_hand import Follower, HeadOutputs, in_heads
from lipbound.models.capture.seeing.call import BY_HAND, FUSED, INTERFACE, Call, ModuleRun
from lipbound.models.capture.seeing.fused import (
    SDPA,
    additive_mask,
    handling_fused,
)
from lipbound.models.capture.seeing.interface import eager, forward, handling
from lipbound.models.capture.seeing.left_out import AttentionFinder

OUTER = 4
"""Modules around a call that are kept, the innermost included."""


class _Recorder:
    """The calls of one forward pass, seen by hooks on every module and our attention functions."""

    def __init__(self, watch: AttentionFinder | None, samples: int, adds: bool):
        self._samples = samples
        self._adds = adds  # masks of True and False are added to scores as numbers
        self._made: dict[int, Call] = {}
        self.calls: list[Call] = []
        self.follower = Follower(self._computed, self._projected, self.fused)
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
            hidden = q.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)
            mask = mask.to(q.dtype) if self._adds else hidden
        with self._unwatched():
            out, probabilities = eager(module)(module, q, k, v, mask, **kw)
        run = next((run for run in reversed(self._stack) if run.module is module), None)
        if run is None:
            raise CaptureError(
                f"attention was called on behalf of {type(module).__name__}, which is not being run"
            )
        extras = {name: value for name, value in kw.items() if value is not None}
        call = Call(run, q, k, v, mask, kw.get("scaling"), extras, out)
        call.boolean, call.adds = boolean and not self._adds, boolean and self._adds
        self._add(call, HeadOutputs(out, out.shape[-1], out.ndim - 2, v))
        return out, probabilities

    def fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return what torch's own attention does, and record it."""
        with self._unwatched(), torch._C.DisableTorchFunction():
            out = SDPA(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        mask = additive_mask(query, key, attn_mask, is_causal)
        call = Call(
            self._stack[-1],
            query,
            key,
            value,
            mask,
            scale,
            {},
            out.transpose(-3, -2),
            boolean=attn_mask is not None and attn_mask.dtype == torch.bool,
            way=FUSED,
            formed=out.ndim == 4,
        )
        self._add(call, HeadOutputs(out, out.shape[-1], out.ndim - 3, value))
        return out

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        paused, self.follower.paused = self.follower.paused, True
        try:
            with nullcontext() if self._watch is None else self._watch.captured():
                yield
        finally:
            self.follower.paused = paused

    def _add(self, call: Call, outputs: HeadOutputs) -> None:
        call.turn = sum(other.module is call.module for other in self.calls)
        call.given_mask, call.samples = self._given_mask(), self._samples
        call.run.calls += 1
        position = self._stack.index(call.run)
        call.around = [(run, run.inside) for run in self._stack[position::-1][:OUTER]]
        for run, _ in call.around:
            tensors = [t for t in tree_leaves((run.args, run.kwargs)) if isinstance(t, Tensor)]
            run.learned = [t for t in tensors if self.follower.is_weight(t)]
        for run in self._stack:
            run.inside += 1
        self._waiting = call
        self._made[id(outputs)] = call
        self.calls.append(call)
        self.follower.follow(outputs.raw, outputs)

    def _computed(self, outputs: HeadOutputs) -> None:
        """Record attention by hand."""
        q, k = outputs.q[0], outputs.k[0]
        softmax = outputs.probabilities
        scores = None if softmax is None else softmax.values
        run, out = self._stack[-1], outputs.raw
        call = Call(
            run, q, k, outputs.v, None, None, {}, out, way=BY_HAND, scores=scores, formed=False
        )
        call.raw = out
        if self._watch is not None:
            self._watch.seen([run.name for run in self._stack[-OUTER:]])
        self._add(call, outputs)

    def _projected(self, x: Tensor, outputs: HeadOutputs) -> None:
        """Note the module that multiplies outputs of heads with its weights first."""
        call = self._made.pop(id(outputs), None)
        module = self._stack[-1].module
        if call is None:
            return
        call.projection, call.projected = module if _is_linear(module) else None, x
        if call.way == INTERFACE:
            return
        if call.way == BY_HAND and outputs.form is not None and x.shape[-1] % outputs.width == 0:
            apart = x.shape[-1] == outputs.width and outputs.form[0].ndim == 4
            heads = outputs.form[0].shape[1] if apart else x.shape[-1] // outputs.width
            forms = in_heads(outputs.form, heads)
            if forms is not None:
                call.q, call.k, call.v = forms[:3]
                call.out, call.formed = forms[3].transpose(1, 2), True
        if call.formed and x.numel() == call.out.numel():
            same = torch.equal(x.reshape(call.out.shape), call.out)
            call.consumer = call.projection if same else None
            first, second = (t.flatten().nan_to_num().sort().values for t in (x, call.out))
            if not torch.equal(first, second):  # not even in another order
                call.changed = "changes its head outputs before they are projected (a gate, or so)"
                flat = call.out.flatten(2)
                call.gated = call.way == FUSED and _is_gated(x.reshape(flat.shape), flat)
                call.consumer = call.projection if call.gated else None
        elif call.formed:
            call.changed = "hands on more than the outputs of its heads to their projection"

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
            if self._watch is not None:
                self._watch.running.append((module, name))
            if self._waiting is not None and args and isinstance(args[0], Tensor):
                self._look(self._waiting, module, args[0])

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run behind every module, as a hook."""
        run = self._stack.pop()
        if run.inside:
            run.returned = output[0] if isinstance(output, tuple) and output else output
        if self._watch is not None:
            self._watch.running.pop()

    def _look(self, call: Call, module: nn.Module, x: Tensor) -> None:
        """Note what a module makes of the output of a call, if that is what its input ``x`` is."""
        if call.way != INTERFACE or call.out.ndim < 4 or x.numel() != call.out.numel():
            return
        flat = call.out.flatten(2)
        linear, y = _is_linear(module), x.reshape(flat.shape)
        same = torch.equal(y, flat)
        if same and linear and x.shape[-1] == flat.shape[-1]:
            call.consumer, self._waiting = module, None
        elif same and "norm" in type(module).__name__.lower():
            norm = type(module).__name__
            call.changed = f"normalises its head outputs ({norm}) before they are projected"
        elif linear and not call.changed and call.run in self._stack and _is_gated(y, flat):
            call.changed = "multiplies its head outputs by a gate before they are projected"
            call.gated, call.consumer = True, module


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
        watch: also told what runs, to find attention that is seen in no way.
        cache: whether the model may keep a cache.

    Returns:
        Each call with the projection that consumed its output.

    Raises:
        CaptureError: the model computes no attention that is seen.
    """
    # tokens of all samples may be packed together
    samples = min((len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim), default=1)
    recorder = _Recorder(watch, samples, not getattr(model, "_supports_sdpa", True))
    hooks = []
    try:
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(recorder.enter(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(recorder.leave))
        with (
            handling(recorder.attention),
            handling_fused(recorder.fused),
            nullcontext() if watch is None else watch,
            recorder.follower,
        ):
            drew = forward(model, inputs, cache=cache)
    finally:
        for hook in hooks:
            hook.remove()
    if not recorder.calls:
        own = "it seems to have no attention layers"
        if watch is not None and watch.found:
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
