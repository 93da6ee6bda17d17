"""The streams of tokens that attention is made of, and which of their tokens are padding."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lipbound.errors import CaptureError
from lipbound.models.capture.rerun import ModuleCopy, from_heads
from lipbound.models.capture.seeing.call import BY_HAND, HIDDEN, INTERFACE, Call
from lipbound.schema import INPUT, MEMORY, QUERIES

SIDES = {INPUT: "qkv", QUERIES: "q", MEMORY: "kv"}
"""The sides that are made of each stream: of cross-attention queries, or keys and values."""


@dataclass
class Streams:
    """The inputs of an owner that its queries, and its keys and values, are made of.

    Attributes:
        named: tensors of each stream, by its name: the input, of which queries, keys and values are
            all made; or what queries are made of, and the memory, which is everything else that
            keys and values are made of.
        joint: whether the input is several tensors of which queries, keys and values all have some
            (image and text together).
        apart: whether no input is made into queries and into keys or values both.
        held: whether something is also made of tensors that are in no stream.
    """

    named: dict[str, list[Tensor]]
    joint: bool
    apart: bool
    held: bool


def _streams(owner: ModuleCopy) -> Streams:
    leaves = [t.detach().double().requires_grad_() for t in owner.inputs]
    with torch.enable_grad():
        parts = owner.again(list(zip(owner.inputs, leaves, strict=True)))[1]
        some = zip(*((one.q, one.k, (one.v,)) for one in parts), strict=True)
        made = [_sources([*chain(*side)], leaves) for side in some]
    q, k, v = ([owner.inputs[i] for i in side] for side in made)

    def among(t: Tensor, others: Collection[Tensor]) -> bool:
        return any(t is other for other in others)

    beside = tree_leaves([v for name, v in owner.run.kwargs.items() if _is_side_input(name)])
    tokens = [t for t in q if not among(t, beside)]
    sides = [side for side in (k, v) if side]  # keys may be constant
    whole = [t for t in tokens if sides and all(among(t, side) for side in sides)]
    joint = [t for t in whole if t.ndim == 3 and t.shape[-1] == whole[0].shape[-1]]
    others = [t for t in v if among(t, k)] or list({id(t): t for t in (*v, *k)}.values())
    memory = [t for t in others if not among(t, q) and not among(t, beside)]
    apart = not any(among(t, (*k, *v)) for t in tokens)
    queries = whole or [t for t in tokens if among(t, (*k, *v))] or tokens or q
    found = {QUERIES: queries[:1], MEMORY: memory}
    if len(joint) > 1:
        found = {INPUT: joint}
    elif whole and not memory:
        found = {INPUT: whole[:1]}
    elif any(among(t, owner.run.learned) for t in queries[:1]):
        found = {MEMORY: memory}
    named = {n: t for n, t in found.items() if t}
    streams = [t for tensors in named.values() for t in tensors]
    held = any(not among(t, streams) for t in (*tokens, *memory))
    return Streams(named, len(joint) > 1, apart, held)


def _sources(side: Sequence[Tensor], leaves: list[Tensor]) -> list[int]:
    """Return which leaves some tensors depend on."""
    found: set[int] = set()
    for tensor in side:
        if not tensor.requires_grad or not leaves:
            continue
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        with torch._C.DisableTorchFunction():
            total = (tensor * weights.to(tensor)).sum()
            grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        found |= {i for i, g in enumerate(grads) if g is not None and bool((g != 0).any())}
    return sorted(found)


def _is_side_input(name: str) -> bool:
    return any(word in name for word in ("mask", "pos", "bias", "cos", "sin", "rot", "freq"))


def owner_of(call: Call, stream: str = INPUT) -> tuple[ModuleCopy, Streams]:
    """Return the innermost module whose inputs determine a call's queries, keys and values.

    Where it is given several tensors, the block around it may have made them of the one that it was
    given: then it is that block. So it is for a memory that is given twice, once with positions.

    Raises:
        CaptureError: no module around the call can be run by itself, or depends on its inputs.
    """
    found: tuple[ModuleCopy, Streams] | None = None
    refused: CaptureError | None = None
    for level, (run, position) in enumerate(call.around):
        memory = found[1].named[MEMORY] if found else []
        several = stream == MEMORY and len(memory) > 1
        # another attention stands between, or there is a stack of layers
        others = position or (refused and run.inside > len(call.pieces))
        if level and others and not several:
            break
        try:
            owner = ModuleCopy(call, run)
            streams = _streams(owner)
        except CaptureError as error:
            refused = refused or error
            continue
        if not (named := streams.named):
            continue
        if found:
            inside = [t.shape for t in named.get(INPUT, ())] == [memory[0].shape]
            one = named.get(MEMORY, ()) if several and streams.apart else ()
            outside = len(one) == 1 and any(one[0] is t for t in memory)
            if outside or (inside and not position):
                return owner, streams
            known = {id(t) for tensors in found[1].named.values() for t in tensors}
            if not {id(t) for tensors in named.values() for t in tensors} <= known:
                break
            continue  # it hands its tensors on
        found = owner, streams
        if not {QUERIES, MEMORY} <= set(named):
            break
    if found:
        return found
    raise refused or call.unsupported("has no floating-point input that its attention depends on")


def stream_names(call: Call) -> list[str]:
    """Return the streams of a call: the input of self-attention, or queries and memory.

    A module that is given one tensor beside masks and positions is taken for self-attention.
    """
    run = call.run
    if call.way == INTERFACE:
        named = {name: v for name, v in run.kwargs.items() if not _is_side_input(name)}
        tensors = [t for t in tree_leaves((run.args, named)) if isinstance(t, Tensor)]
        if len({id(t) for t in tensors if t.is_floating_point()}) == 1:
            return [INPUT]
    try:
        owner, streams = owner_of(call)
    except CaptureError:
        return [INPUT]  # and the reason is told when it is captured
    if INPUT in streams.named and (call.way != INTERFACE or owner.run is run):
        call.run, call.stream = owner.run, streams.named[INPUT][0]
    elif INPUT in streams.named:
        call.reason = f"layer {call.name}: is given several tensors that are made of one outside"
    return list(streams.named)


def of_stream(call: Call, stream: str, padding: "Padding") -> Call:
    """Return a call as one of its streams determines it, with what the others make held fixed.

    Raises:
        CaptureError: the layer makes its queries, keys and values in no way that has a closed form.
    """
    if stream != INPUT:
        owner, streams = owner_of(call, stream)
        own = owner.run.module is call.module and {stream} <= set(streams.named) <= set(SIDES)
        if not own or not streams.apart or len(streams.named[stream]) > 1:
            raise call.unsupported(
                "makes its queries, or its keys and values, of several streams of tokens, or of "
                "some that are not its own inputs"
            )
        tokens = streams.named[stream][0]
        call = replace(call, run=owner.run, stream=tokens, sides=SIDES[stream])
    if call.run.calls > len(call.pieces) or (len(call.pieces) > 1 and call.form is None):
        raise call.unsupported(
            f"calls attention {call.run.calls} times whenever it runs (differential attention, "
            "parts with keys of their own, or outputs that are added)"
        )
    _ = call.x
    if call.changed and from_heads(call) is not None:  # it belongs to the map of their outputs
        call = replace(call, changed="", gated=False, consumer=None)
    if call.changed and not (call.gated and stream == INPUT):
        raise call.unsupported(call.changed)
    if stream != INPUT:
        samples, queries, keys = len(call.q), call.q.shape[-2], call.k.shape[-2]
        call.valid_rows = padding.of_queries(call, samples, queries)
        call.valid_keys = padding.of_keys(call, samples, keys)
    return call


def hidden_keys(call: Call) -> Tensor | None:
    """Return which keys no query may attend to, (samples, M) bool; None where that is not known."""
    scores, samples = call.additive(), len(call.q)
    if call.way == BY_HAND:
        scores = call.scores
        if scores is None or scores.ndim < 3:
            return None
        samples = len(call.out) if call.formed else len(scores)
        scores = scores.reshape(samples, -1, *scores.shape[-2:])
    if scores is None:
        return None
    low = (scores <= HIDDEN).all(-2)
    while low.ndim > 2:
        low = low.all(-2)
    return low.expand(samples, -1)


class Padding:
    """Which tokens of each stream are padding, as the layers themselves treat them.

    Padding belongs to a stream of tokens, and a model has several (an encoder's and a decoder's,
    text and image). What a layer itself does decides which is its own: where some mask of the
    inputs, (samples, any number), marks padding, those tokens are padding that no query may attend
    to.

    Args:
        calls: of self-attention in a pass; their padding is noted.
        inputs: of the model.
    """

    def __init__(self, calls: Collection[Call], inputs: Mapping[str, Any]):
        masks = (t for name, t in inputs.items() if "mask" in name and isinstance(t, Tensor))
        self._marked = any(t.ndim == 2 and bool((t == 0).any()) for t in masks)
        self._known: dict[tuple[str, int, int], Tensor] = {}
        for call in calls if self._marked else ():
            hidden = hidden_keys(call)
            if hidden is not None and bool(hidden.any()):
                self._known.setdefault((_stack_of(call), *hidden.shape), ~hidden)
            call.valid_keys = self.of_keys(call, len(call.q), call.k.shape[-2])
            call.valid_rows = call.valid_keys

    def of_keys(self, call: Call, samples: int, tokens: int) -> Tensor | None:
        """Return which keys of a call are no padding, (samples, tokens), or None for all."""
        hidden = hidden_keys(call) if self._marked else None
        if hidden is None or hidden.shape != (samples, tokens) or not bool(hidden.any()):
            return None
        return ~hidden

    def of_queries(self, call: Call, samples: int, tokens: int) -> Tensor | None:
        """Return which queries of a cross-attention are no padding, or None for all.

        Padding is what self-attention in the same stack of layers hides.
        """
        return self._known.get((_stack_of(call), samples, tokens))


def _stack_of(call: Call) -> str:
    return re.split(r"\.\d+\.", call.name)[0]
