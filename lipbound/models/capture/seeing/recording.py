"""Recording every attention of a forward pass of a model, in whichever way it is computed."""

import copy
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache, PreTrainedModel

from lipbound.attention.scoring import four_axes
from lipbound.errors import CaptureError
from lipbound.models.capture.seeing.follower import BY_HAND, FUSED, INTERFACE, Follower, Form, Heads
from lipbound.models.capture.seeing.interface import copied_state, forward, takes_mask
from lipbound.models.checkpoint import MASK

HIDDEN = -9999.0
"""Additive mask entries up to this value hide a key: some models write -10000 for the lowest."""
OUTER = 4
"""Modules around a call that are kept, the innermost included."""
WAYS = (
    "Softmax attention can be given by its tensors, as lipbound.Attention; any function has a norm "
    "by lipbound.linalg.operator_norm.operator_norm; closed=False needs attention that is seen, too"
)
"""Advice that ends the error about a model in which no attention is seen."""
UNSUPPORTED = ", which is not supported; layers= leaves it out"
"""End of the error about something that a layer does."""
NAMED = 4
"""Number of modules that a sentence names."""
_ATTENTION = "attention|attn|mhs?a"
"""Regular expression: names of classes that hold it are taken for attention modules."""


def first_tensor(returned: object) -> Tensor | None:
    """Return the first floating-point tensor of what a module returns."""
    leaves = tree_leaves(returned)
    return next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)


def samples_first(t: Tensor, samples: int, n: int) -> Tensor:
    """Return a tensor with samples on its first axis, which is turned if it is (N, samples, D).

    One of N samples of N tokens is taken to have them there already.
    """
    turned = t.ndim == 3 and t.shape[:2] == (n, samples) != (samples, n)
    return t.transpose(0, 1) if turned else t


def same_numbers(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same numbers, in whatever order."""
    if a is None or b is None or a.numel() != b.numel():
        return False
    a, b = (t.nan_to_num().flatten() for t in (a, b))
    if torch.equal(a, b):
        return True
    alike = bool(a.amax() == b.amax() and a.amin() == b.amin())
    return alike and torch.equal(a.sort().values, b.sort().values)


def listed(names: Sequence[str], most: int = 1) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(eq=False)
class ModuleRun:
    """One run of a module in a forward pass.

    Attributes:
        module: what ran.
        name: of the module in the model.
        args: the first argument, where it was given by position.
        kwargs: all other arguments, by name.
        calls: how often the module called attention in this run.
        returned: the first tensor that the module returned.
        learned: those of its tensors that are made of parameters alone, such as learned queries.
        inside: how often it and the modules inside it called attention in this run.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int = 0
    inside: int = 0
    returned: Tensor | None = None
    learned: list[Tensor] = field(default_factory=list)

    @property
    def given(self) -> Any:
        """The first of its arguments, which mostly is the tokens, in whatever layout."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among its arguments."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]


@dataclass(eq=False, kw_only=True)
class Call(Heads):
    """One call of attention, with the run of the module that made it.

    Attributes:
        run: of the module whose attention it is.
        q: queries, (samples, heads, N, d).
        k: keys, (samples, heads or fewer that they share, N, d).
        out: head outputs, (samples, N, heads, d_v). Values are (samples, heads or fewer, N, d_v).
        turn: how many calls the same module made before (ALBERT runs one module as every layer).
        given_mask: the mask of tokens, (samples, N), that the model (of a composed one the part)
            around the layer was given.
        consumer: the module that projects the head outputs, where it is given just these.
        changed: what happens to the head outputs before they are projected, where something does.
        apart: of parts of them that are projected one by one, whether nothing was done to each.
        gated: whether that may be a gate, a factor between 0 and 1 for each.
        around: the runs that it happened in, the innermost first, each with the number of calls of
            attention before it in that run.
        samples: number of samples in the pass.
        formed: whether ``q``, ``k``, ``v`` and ``out`` have the axes given above; by hand they may
            be as they were multiplied.
        form: how they were brought to these, where they were not handed over so.
        pieces: places of the calls that were put together, counted in the run from the first.
        stream: the tokens, where they were found otherwise than as the first argument.
        sides: which of queries, keys and values are made of them; all of "qkv" but for
            cross-attention.
        valid_rows: which queries are not padding, (samples, N) bool, or None for all.
        valid_keys: the same of keys, (samples, M) bool.
        projection: the run of the outermost module that is given nothing but the head outputs, or
            what was made of them on the way, and multiplies them with weights.
        projected: what that was given, before hooks on it.
        w_o: what is known of the map to the module's return (`lipbound.models.capture.rerun`).
    """

    run: ModuleRun
    q: Tensor
    k: Tensor
    out: Tensor
    turn: int = 0
    given_mask: Tensor | None = None
    consumer: nn.Module | None = None
    changed: str = ""
    apart: list[bool] = field(default_factory=list)
    gated: bool = False
    around: list[tuple[ModuleRun, int]] = field(default_factory=list)
    samples: int = 1
    projection: ModuleRun | None = None
    projected: Tensor | None = None
    formed: bool = True
    form: Form | None = None
    pieces: tuple[int, ...] = (0,)
    stream: Tensor | None = None
    sides: str = "qkv"
    valid_rows: Tensor | None = None
    valid_keys: Tensor | None = None
    w_o: list[Tensor | None] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The module that made the call."""
        return self.run.module

    @property
    def name(self) -> str:
        """The name of that module in the model."""
        return self.run.name

    @property
    def given(self) -> Any:
        """The token vectors as the module was given them, in whatever layout."""
        return self.run.given if self.stream is None else self.stream

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and tokens of the stream."""
        return len(self.q), (self.q if "q" in self.sides else self.k).shape[-2]

    @property
    def x(self) -> Tensor:
        """The token vectors that the module was given, (samples, N, D).

        Those of one sample may have been given without an axis of samples, those of pictures with
        two axes for the tokens, and tokens before samples.

        Raises:
            CaptureError: it was given no such tensor, or attends to other tokens than these.
        """
        if not self.formed:
            raise self.unsupported("multiplies queries and keys in tensors of unknown axes")
        given, (samples, n) = self.given, self.shape
        x = samples_first(given, samples, n) if isinstance(given, Tensor) else given
        if isinstance(x, Tensor) and x.ndim in (2, 4) and x[..., 0].numel() == samples * n:
            x = x.reshape(samples, n, x.shape[-1])
        queries, keys = self.q.shape[-2], self.k.shape[-2]
        apart = self.sides == "qkv" and keys != queries
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != n or apart:
            what = "one tensor (samples, N, D) of these (but several, a cache, or windows of one)"
            raise self.unsupported(f"has {queries} queries and {keys} keys, not given {what}")
        return x

    def additive(self) -> Tensor | None:
        """Return what is added to scores: the mask, and biases of relative positions."""
        mask, bias, dtype = self.mask, self.extras.get("position_bias"), self.q.dtype
        if mask is not None:
            mask = mask[..., : self.k.shape[-2]].to(dtype)  # one for a cache may be wider
            mask = four_axes(mask) if self.q.ndim == 4 else mask
        if bias is None:
            return mask
        bias = bias.detach().to(dtype)
        # the lowest number and a bias may overflow
        return bias if mask is None else (mask + bias).clamp_min(torch.finfo(dtype).min)

    def unsupported(self, what: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
        """Return the error, of some kind, about something that the layer does."""
        owner = type(self.module).__name__
        return kind(f"layer {self.name}: {owner} {what}{UNSUPPORTED}")


def moved(value: Any, device: torch.device, copies: dict[int, Any]) -> Any:
    """Return a call, a run or a tensor on a device; modules stay where they are.

    Args:
        value: anything.
        device: for tensors.
        copies: what was moved before, by ``id`` of the original: what is in two places is copied
            once. Entries are added.
    """
    if isinstance(value, Tensor):
        return copies.setdefault(id(value), value.to(device))
    if not isinstance(value, Call | ModuleRun):
        return value
    if id(value) not in copies:
        copies[id(value)] = there = copy.copy(value)
        vars(there).update(tree_map(partial(moved, device=device, copies=copies), vars(value)))
    return copies[id(value)]


class ModuleRuns:
    """Runs of modules in a forward pass, recorded by hooks.

    Args:
        wanted: modules whose runs are kept when they have ended.

    Attributes:
        running: what runs at the moment, the outermost first.
        kept: runs that have ended.
        hooks: on modules.
    """

    def __init__(self, wanted: Collection[nn.Module]):
        self._wanted = {*wanted}
        self.running: list[ModuleRun] = []
        self.kept: list[ModuleRun] = []
        self.hooks = ExitStack()

    @contextmanager
    def hooked(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Yield while modules, with their names, have the hooks."""
        with self.hooks as hooks:
            for name, module in modules:
                if isinstance(module, torch.jit._script.RecursiveScriptModule):
                    continue  # of what torch.jit.script returns, which takes no hooks
                hook, enter = module.register_forward_pre_hook, partial(self.enter, name)
                # a module's own hooks belong to what it does
                hooks.enter_context(hook(enter, with_kwargs=True, prepend=True))
                hooks.enter_context(module.register_forward_hook(self.leave, always_call=True))
            yield

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Run before a module of that name, as a hook; all arguments but the first go by names."""
        if len(args) > 1 and not isinstance(module, torch.jit.ScriptModule):  # without signature
            parameters = inspect.signature(module.forward).parameters.values()
            names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
            if len(args) <= len(names):  # however they were passed
                args, kwargs = args[:1], dict(zip(names[1:], args[1:], strict=False)) | kwargs
        self.running.append(ModuleRun(module, name, args, kwargs))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run after every module, as a hook."""
        run = self.running.pop()
        run.returned = first_tensor(output)
        if module in self._wanted:
            self.kept.append(run)

    def mask_given(self, otherwise: Any = None) -> Any:
        """Return the mask that the innermost transformers model was given, or else another."""
        models = (run for run in reversed(self.running) if isinstance(run.module, PreTrainedModel))
        inside = next(models, None)
        return otherwise if inside is None else inside.kwargs.get(MASK)


def _layers_left_out(model: nn.Module, captured: Collection[nn.Module]) -> Iterator[str]:
    """Yield a sentence for each list of layers in some of which no attention was seen."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, module in lists.items():
        layers = [layer for layer in module if layer is not None]
        # layers may share their attention, or be one
        attending = sum(any(part in captured for part in layer.modules()) for layer in layers)
        within = any(name.startswith(f"{outer}.") for outer in lists)  # parts of one layer
        if attending and not within and attending < len(module):
            found = f"softmax attention was found in {attending} of {len(module)} layers"
            yield f"{found} in {name}; what the others do to tokens is left out"


def _notes(model: nn.Module, calls: Collection[Call], unseen: str) -> Iterator[str]:
    """Yield sentences on attention that was not seen, or is not what it seems."""
    if unseen:
        yield f"attention of unknown make is left out, in {unseen} of {type(model).__name__}"
    yield from _layers_left_out(model, {call.run.module for call in calls})
    apart = {call.run: call.name for call in calls if call.run.calls > len(call.pieces)}
    for run, name in apart.items():
        what = f"({type(run.module).__name__}) calls attention {run.calls} times in a run"
        alone = "each call that goes its own way is measured as a layer by itself"
        yield f"layer {name} {what}, and {alone}"
    if adding := [call.name for call in calls if call.adds]:
        what = "a mask of True and False is added to scores as the numbers 1 and 0"
        yield f"{what}, as the model's own attention does, in layer {listed(adding)}"


class ThroughPython(TorchDispatchMode):
    """Lets operations of scripted functions (torch.jit.script) be followed as all others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Recorder(ModuleRuns, Follower):
    """The calls of one forward pass, with the runs of modules that they happened in.

    Args:
        samples: of the pass.
        adds: as of `Follower`.
        mask: of the tokens, where the model itself is not given it.
        wanted: as of `ModuleRuns`.

    Attributes:
        calls: of attention, so far.
        unseen: modules by name that are called attention, and in which none was seen.
    """

    def __init__(self, samples: int, adds: bool, mask: Any, wanted: Collection[nn.Module]):
        ModuleRuns.__init__(self, wanted)
        Follower.__init__(self, adds)
        self._samples, self._mask = samples, mask
        self.unseen: dict[str, nn.Module] = {}
        self._made: dict[int, Call] = {}
        self.calls: list[Call] = []

    def computed(self, heads: Heads) -> None:
        """Record a call.

        Raises:
            CaptureError: the module is not being run.
        """
        runs = [r for r in self.running if heads.caller is None or r.module is heads.caller]
        if not runs:
            raise CaptureError(f"{type(heads.caller).__name__} calls attention and does not run")
        run, out = runs[-1], heads.raw
        out = out.transpose(-3, -2) if heads.way == FUSED else out
        seen = {**vars(heads), "q": heads.left[0], "k": heads.right[0], "out": out}
        call = Call(**seen, run=run, samples=self._samples)
        call.formed = heads.way == INTERFACE or (heads.way == FUSED and out.ndim == 4)
        call.turn = sum(other.module is call.module for other in self.calls)
        mask = self.mask_given(self._mask)
        call.given_mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        run.calls += 1
        position = self.running.index(run)
        call.around = [(outer, outer.inside) for outer in self.running[position::-1][:OUTER]]
        for outer, _ in call.around:
            outer.learned = [t for t in outer.tensors if self.is_weight(t)]
        for outer in self.running:
            outer.inside += 1
        self._made[id(heads)] = call
        self.calls.append(call)

    def projected(self, x: Tensor, heads: Heads) -> None:
        """Note the module that multiplies outputs of heads with its weights first."""
        self._put_together(heads)
        if len(heads.parts) == 1:  # beside something else
            return
        call = self._made.pop(id(heads.calls[0]), None)
        if call is None:
            for one in (call for call in self.calls if call.raw is heads.calls[0].raw):
                first = x if one.projected is None else one.projected
                if first.numel() < one.raw.numel() and not _same(x, first):
                    one.apart += [bool(torch.isin(t, one.raw).all()) for t in (first, x)]
            return
        # wrappers of a module are given what it is given
        runs = (r for r in self.running if not r.inside and self.kind(_only(r)) is heads)
        run = next(runs, call.projection)
        call.projection, x = run, x if run is None else run.args[0]
        call.consumer, call.projected = None, x
        self._give_form(call, x, heads)
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
            what = "less" if len(flat) < len(out) else "more"
            call.changed = f"hands on {what} than the outputs of its heads to their projection"
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

    def _put_together(self, heads: Heads, run: ModuleRun | None = None) -> None:
        """Make one call, the first, of those whose outputs were put together.

        They are of one run of a module, or of modules of one kind that run in another.

        Args:
            heads: with parts.
            run: the one that returned what was put together, if one did; every call must have
                happened in it.
        """
        calls = [call for part in heads.parts if (call := self._made.get(id(part)))]
        if len(calls) < max(2, len(heads.parts)) or len({type(c.module) for c in calls}) > 1:
            return
        first, places = calls[0], [dict(call.around) for call in calls]
        around = [pair for pair in first.around if all(pair[0] in some for some in places)]
        if not around or run not in (None, around[0][0]):
            return
        first.around, (first.run, start) = around, around[0]
        first.pieces = tuple(some[first.run] - start for some in places)
        first.run.calls, first.formed = first.run.calls or len(calls), False
        self.calls = [call for call in self.calls if all(call is not one for one in calls[1:])]
        first.turn = sum(c.module is first.module for c in self.calls if c is not first)
        if run is not None and run.returned is not None:
            self._give_form(first, run.returned, heads)

    def _give_form(self, call: Call, x: Tensor, heads: Heads) -> None:
        """Bring a call to (samples, heads, tokens, width), best as outputs that are projected."""
        count, axes = max(1, x.shape[-1] // heads.width), (1, 2, 0) if heads.parts else (None,)
        for form in (Form(count, axis, turned) for turned in (False, True) for axis in axes):
            if call.formed and _same(x, call.out):
                return
            made = form.in_heads(heads.calls)
            if made and (_same(x, made[3].transpose(1, 2)) or not (call.formed or heads.parts)):
                (call.q, call.k, call.v), call.out = made[:3], made[3].transpose(1, 2)
                call.form, call.formed = form, True
                if call.way == FUSED:
                    call.mask = made[4]
                elif heads.parts:
                    call.scores = made[4]

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        super().enter(name, module, args, kwargs)
        run = self.running[-1]  # hooks may change what it is given, and the pass adds to caches
        caches = {key: v for key, v in run.kwargs.items() if isinstance(v, Cache)}
        run.kwargs = run.kwargs | (copied_state(caches) if caches else {})

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        run = self.running[-1]
        super().leave(module, args, output)
        if not run.inside and _is_attention(run) and not any(map(_is_attention, self.running)):
            self.unseen[run.name] = module
        heads = self.kind(run.returned) if run.inside else None
        if isinstance(heads, Heads):
            self._put_together(heads, run)


def record(
    model: nn.Module, inputs: Mapping[str, Any], wanted: Collection[nn.Module] = ()
) -> tuple[list[Call], list[ModuleRun], list[str]]:
    """Return the calls of attention in one forward pass, in order, and what there is to tell of it.

    Args:
        model: in the context of `implementation`.
        inputs: of the pass.
        wanted: modules whose runs are returned, too.

    Returns:
        Each call with the projection that consumed its output; those runs; and notes, a sentence
        each.

    Raises:
        CaptureError: the model computes no attention that is seen.
    """
    # tokens of all samples may be packed together
    samples = min((len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim), default=1)
    mask = None if takes_mask(model) else inputs.get(MASK)
    recorder = Recorder(samples, not getattr(model, "_supports_sdpa", True), mask, wanted)
    hooked, scripted = recorder.hooked(model.named_modules()), ThroughPython()  # type: ignore[no-untyped-call]
    with hooked, scripted, recorder.following():
        drew = forward(model, inputs)
    unseen = _named(recorder.unseen)
    if not recorder.calls:
        make = f"its attention is of unknown make, in {unseen}"
        own = make if unseen else "it seems to have no attention layers"
        raise CaptureError(
            f"{type(model).__name__} has no attention that can be captured: its forward pass "
            "calls neither the transformers attention interface nor scaled_dot_product_attention, "
            f"and multiplies no softmax of products of its tokens with others ({own}). {WAYS}"
        )
    notes = [*_notes(model, recorder.calls, unseen)]
    if drew:
        notes.append("the model draws random numbers: here those of torch.manual_seed(0)")
    return recorder.calls, recorder.kept, notes


def _is_attention(run: ModuleRun) -> bool:
    """Return whether a module is called attention, by its name or by its class, and has weights.

    They are several: of a normalisation beside attention there is no matrix, of a projection one.
    """
    kind = str(getattr(run.module, "original_name", type(run.module).__name__))  # of what is traced
    called = run.name.endswith(("attn", "attention")) or re.search(_ATTENTION, kind, re.I)
    return bool(called) and sum(w.ndim > 1 for w in run.module.parameters()) > 1


def _named(modules: Mapping[str, nn.Module]) -> str:
    """Return the number of modules, and names and types of some; "" for none."""
    found = [f"{name or 'the model itself'} ({type(m).__name__})" for name, m in modules.items()]
    count = f"{len(found)} module{'s' * (len(found) > 1)}"
    return f"{count}: {listed(found, NAMED)}" if found else ""


def _only(run: ModuleRun) -> Tensor | None:
    """Return the first argument of a module that was given no other tensor."""
    floating = [t for t in run.tensors if t.is_floating_point()]
    return floating[0] if run.args and len(floating) == 1 and floating[0] is run.args[0] else None


def _same(x: object, out: Tensor) -> bool:
    return isinstance(x, Tensor) and torch.equal(x.flatten(), out.flatten())
