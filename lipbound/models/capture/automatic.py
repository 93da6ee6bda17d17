"""Layers without a closed form, as functions of their streams of tokens through their own module.

The module whose inputs determine queries, keys and values is copied to float64 and run again with
these inputs; what its output projection is given is cut out of the pass as the outputs of heads.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import CaptureError, DifferentPositionsError
from lipbound.models.capture.assembly import marks_padding
from lipbound.models.capture.output_projection import CAPTURE_TOLERANCE, probe_output
from lipbound.models.capture.owner_function import OwnerFunction, OwnerPass
from lipbound.models.capture.seeing.by_hand import HeadOutputs
from lipbound.models.capture.seeing.call import BY_HAND, HIDDEN, INTERFACE, Call
from lipbound.schema import INPUT, MEMORY, QUERIES


@dataclass
class Streams:
    """The inputs of an owner that its queries, and its keys and values, are made of.

    Attributes:
        queries: what queries are made of.
        memory: what keys and values are made of.
        learned: inputs that are made of parameters alone.
        joint: inputs of which queries, keys and values all have some (image and text together).
        apart: whether no input is made into queries and into keys or values both.
    """

    queries: list[Tensor]
    memory: list[Tensor]
    learned: list[Tensor]
    joint: list[Tensor]
    apart: bool


def _streams(owner: OwnerFunction) -> tuple[Streams, bool]:
    """Return the streams of tokens of an owner, and whether each is one tensor."""
    leaves = [t.detach().double().requires_grad_() for t in owner.inputs]
    with torch.enable_grad():
        seen = owner(list(zip(owner.inputs, leaves, strict=True))).outputs
        sides = [_sources(side, leaves) for side in (seen.q, seen.k, (seen.v,))]
    q, k, v = ([owner.inputs[i] for i in side] for side in sides)
    named = owner.run.kwargs.items()
    beside = tree_leaves([value for name, value in named if _is_side_input(name)])
    joint = [t for t in q if all(any(t is s for s in side) for side in (k, v))]
    joint = [t for t in joint if all(t is not s for s in beside)]
    joint = [t for t in joint if t.ndim == 3 and t.shape[-1] == joint[0].shape[-1]]
    of_keys = [side[0] for side in (v, k) if side]
    memory = list({id(t): t for t in of_keys}.values())
    shared = next((t for t in q if any(t is m for m in memory)), None)
    queries = q[:1] if shared is None else [shared]
    single = len(memory) == 1 or any(memory[0] is t for t in k)
    memory = memory[:1] if single else memory
    others = [t for t in (*k, *v) if all(t is not s for s in beside)]
    apart = not any(t is s for t in q for s in others)
    joint = joint if len(joint) > 1 else []
    return Streams(queries, memory, owner.run.learned, joint, apart), single


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


def owner_of(call: Call) -> tuple[OwnerFunction, Streams]:
    """Return the innermost module whose inputs determine a call's queries, keys and values.

    Raises:
        CaptureError: no module around the call can be run by itself, or depends on its inputs.
    """
    found: list[tuple[OwnerFunction, Streams]] = []
    refused: CaptureError | None = None
    for level, (run, position) in enumerate(call.around):
        if level and position:  # another attention stands between
            break
        try:
            owner = OwnerFunction(run, position, call)
            streams, single = _streams(owner)
        except CaptureError as error:
            refused = refused or error
            continue
        if streams.queries or streams.memory:
            found.append((owner, streams))
            if single and streams.memory:
                return found[-1]
    if found:
        return found[0]
    raise refused or call.unsupported("has no floating-point input that its attention depends on")


def _is_side_input(name: str) -> bool:
    return any(word in name for word in ("mask", "pos", "bias", "cos", "sin", "rot", "freq"))


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
    named = named_streams(streams)
    if call.way != INTERFACE and INPUT in named:
        call.run, call.stream = owner.run, named[INPUT][0]
    return list(named)


def named_streams(streams: Streams) -> dict[str, list[Tensor]]:
    """Return the tensors of each stream, by name."""
    if streams.joint:
        return {INPUT: streams.joint}
    if any(q is m for q in streams.queries for m in streams.memory):
        return {INPUT: streams.memory}
    learned = any(q is t for q in streams.queries for t in streams.learned)
    named = {QUERIES: [] if learned else streams.queries, MEMORY: streams.memory}
    return {name: tensors for name, tensors in named.items() if tensors}


class Padding:
    """Which tokens of each stream are padding, as the layers themselves treat them.

    Args:
        calls: of self-attention in a pass.
        inputs: of the model.
    """

    def __init__(self, calls: Collection[Call], inputs: Mapping[str, Any]):
        self._marked = any(marks_padding(name, t) for name, t in inputs.items())
        self._known: dict[tuple[str, int, int], Tensor] = {}
        for call in calls if self._marked else ():
            hidden = hidden_keys(call)
            if hidden is not None and bool(hidden.any()):
                self._known.setdefault((_stack_of(call), *hidden.shape), ~hidden)

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


def hidden_keys(call: Call) -> Tensor | None:
    """Return which keys no query may attend to, (samples, M) bool; None where that is not known."""
    if call.way == BY_HAND:
        scores = call.scores
        if scores is None or scores.ndim < 3:
            return None
        samples = len(call.out) if call.formed else len(scores)
        scores = scores.reshape(samples, -1, *scores.shape[-2:])
    else:
        scores, samples = call.mask, call.q.shape[0]
        if scores is None:
            return None
    low = scores <= HIDDEN
    while low.ndim > 2:
        low = low.all(-2)
    return low.expand(samples, -1)


def through_module(
    call: Call, stream: str, padding: Padding, reason: str
) -> tuple[ModuleAttention, float, str]:
    """Return a layer as a function of one of its streams.

    Beside it are its error against the model's pass, and the name of the module whose input the
    stream is.

    Args:
        call: of the layer.
        stream: of `stream_names`.
        padding: of the pass.
        reason: why there is no closed form.

    Raises:
        CaptureError: the module cannot be run by itself, or does not reproduce the pass.
    """
    owner, streams = owner_of(call)
    error = _error(call, owner())
    named = named_streams(streams)
    if stream not in named and stream == INPUT:  # keys of an earlier layer, that are kept
        stream = next(iter(named))
    if stream not in named:
        raise call.unsupported(f"depends on no stream of {stream}")
    joint = stream == INPUT and bool(streams.joint)
    attention = _attention(call, owner, named, stream, joint, padding, reason)
    return attention, error, owner.run.name


def _error(call: Call, seen: OwnerPass) -> float:
    """Return how far a pass is from the recorded one, at the output projection where it has one.

    Raises:
        CaptureError: too far.
    """
    own, raw = call.recorded, seen.outputs.raw
    if call.projected is not None and call.projected.shape == seen.cut.shape:
        own, raw = call.projected, seen.cut  # padding of blocks of tokens is cut off there
    if raw.shape != own.shape:
        raise call.unsupported("computes other attention when it is run by itself")
    own, raw = (t.double().nan_to_num() for t in (own, raw.detach()))
    size = own.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    error = float((own - raw).abs().amax() / size)
    if not error <= CAPTURE_TOLERANCE:
        raise call.unsupported(
            f"gives other outputs when it is run by itself (off by {error:.1e} relative): it keeps "
            "a state, or draws random numbers"
        )
    return error


def _attention(
    call: Call,
    owner: OwnerFunction,
    named: Mapping[str, list[Tensor]],
    name: str,
    joint: bool,
    padding: Padding,
    reason: str,
) -> ModuleAttention:
    tensors = named[name]
    stream = tensors[0].detach().double()
    same = [t for t in tensors[1:] if t.shape == stream.shape and not joint]
    offsets = [(t, t.detach().double() - stream) for t in same]
    if joint:
        stream = torch.cat([t.detach().double() for t in tensors], 1)

    def cut(x: Tensor) -> tuple[Tensor, HeadOutputs]:
        changed = [(tensors[0], x), *((t, x + offset) for t, offset in offsets)]
        if joint:
            parts = x.split([t.shape[1] for t in tensors], 1)
            changed = list(zip(tensors, parts, strict=True))
        seen = owner(changed)
        return seen.cut, seen.outputs

    with torch.enable_grad():
        x = stream.clone().requires_grad_()
        whole, outputs = cut(x)
        arrange = _arrangement(call, whole, outputs)
        made = (outputs.k if name == MEMORY else outputs.q)[0]
        axis, count, place = _samples(call, x, arrange(whole), made, call.samples)
    out = _by_sample(arrange(whole), place, count)
    samples, queries, heads, d_v = out.shape

    def function(x: Tensor) -> Tensor:
        return _by_sample(arrange(cut(x)[0]), place, count)

    if name == INPUT:
        width = stream[..., 0].numel() // count
        valid = None if joint else padding.of_keys(call, count, width)  # padding moves nothing
        valid_out = padding.of_keys(call, count, queries)
    else:
        valid_out = padding.of_queries(call, count, queries)
        width = stream[..., 0].numel() // count
        valid = valid_out if name == QUERIES else padding.of_keys(call, count, width)
    real = out if valid_out is None else out[valid_out]
    if bool(real.isnan().any()):
        raise CaptureError(f"layer {call.name}: the outputs of its heads are NaN")
    w_o = None
    if call.projection is not None and whole.shape[-1] == heads * d_v:
        with suppress(CaptureError):  # maps that need it say that there is none
            w_o = probe_output(call, call.projection, out.detach())
    return ModuleAttention(
        stream,
        axis,
        function,
        (samples, queries, heads, d_v),
        w_o,
        valid,
        valid_out,
        "self" if name == INPUT else "cross",
        name,
        1 if axis else max(1, count // call.samples),
        reason,
    )


def _arrangement(call: Call, cut: Tensor, outputs: HeadOutputs) -> Callable[[Tensor], Tensor]:
    """Return a function from cuts to (..., heads, d_v).

    Raises:
        CaptureError: the heads cannot be told apart.
    """
    d_v, raw, axis = outputs.width, outputs.raw, outputs.head_axis
    if cut.shape[-1] == d_v and axis is not None and cut.ndim >= 4:
        heads = raw.shape[axis]
        places = [axis] if cut.shape == raw.shape else [cut.ndim - 2, 1]
        place = next((i for i in places if cut.shape[i] == heads), None)
        if place is not None:
            return lambda t: t.movedim(place, -2)
    if cut.shape[-1] % d_v and cut.shape[-1] % raw.shape[-2] == 0:
        d_v = raw.shape[-2]  # channels attend to channels
    if cut.shape[-1] % d_v:
        raise call.unsupported(
            f"hands on outputs of heads ({d_v} wide) in a tensor of width {cut.shape[-1]}"
        )
    return lambda t: t.unflatten(-1, (-1, d_v))


def _by_sample(out: Tensor, axis: int, count: int) -> Tensor:
    """Return outputs (..., heads, d_v), whose samples are on an axis, as (samples, N, heads, d_v).

    Tokens and samples may share an axis.
    """
    if axis:
        out = (out.unflatten(0, (-1, count)) if out.ndim == 3 else out).movedim(axis, 0)
    return out.reshape(count, -1, *out.shape[-2:])


def _samples(
    call: Call, x: Tensor, out: Tensor, made: Tensor, samples: int
) -> tuple[int | None, int, int]:
    """Return the axis of a stream that counts samples (or windows of them), and how many.

    The third number is their axis among the outputs. They are found by derivatives: what is made of
    one depends on no other.

    Args:
        call: of the layer.
        x: the stream.
        out: outputs, (..., heads, d_v), made of it.
        made: queries or keys, made of it.
        samples: of the pass.

    Raises:
        DifferentPositionsError: samples cannot be told apart.
    """
    for axis in (0, 1) if x.ndim > 2 else ():
        count = x.shape[axis]
        fits = count % samples == 0 if axis == 0 else True
        if not fits or count == 1 or len(made) % count or not _is_alone(made[0], x, axis):
            continue
        for place in (0, 1):
            in_rows = place == 0 or out.ndim == 3
            splits = out.shape[0] % count == 0 if in_rows else out.shape[1] == count
            if splits and _is_alone(_by_sample(out, place, count)[0], x, axis):
                return axis, count, place
    if samples == 1 or (x.ndim == 2 and len(x) == samples):  # those are tokens
        return (0 if x.ndim > 2 and x.shape[0] == 1 else None), 1, 0
    raise call.unsupported(
        "is given the tokens of all samples in one tensor in which they cannot be told apart "
        "(capture them one at a time)",
        DifferentPositionsError,
    )


def _is_alone(made: Tensor, x: Tensor, axis: int) -> bool:
    """Return whether what is made of a stream depends on nothing but the first entry of an axis."""
    (grad,) = torch.autograd.grad(made.square().sum(), x, retain_graph=True, allow_unused=True)
    return grad is None or not bool((grad.movedim(axis, 0)[1:] != 0).any())
