"""The streams of tokens that attention is made of, and layers as functions of one of them.

Padding belongs to a stream. A layer without a closed form is measured through its own module: that
whose inputs determine queries, keys and values is copied to float64 and run again with other
tokens, and what its output projection is given is cut out of the pass as the outputs of heads.
Each is moved by the outputs of its own head, by which their layout is found.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import CaptureError, DifferentPositionsError
from lipbound.models.capture import rerun
from lipbound.models.capture.rerun import PROJECTION, ModuleCopy, from_heads
from lipbound.models.capture.seeing.follower import BY_HAND, INTERFACE, Heads
from lipbound.models.capture.seeing.recording import HIDDEN, Call, same_numbers
from lipbound.models.other_libraries import explained
from lipbound.schema import INPUT, MEMORY, QUERIES

_SIDES = {INPUT: "qkv", QUERIES: "q", MEMORY: "kv"}
"""The sides that are made of each stream: of cross-attention queries, or keys and values."""


@dataclass
class Streams:
    """The inputs of an owner that its queries, and its keys and values, are made of.

    Attributes:
        named: tensors of each stream, by its name: the input, of which queries, keys and values are
            all made (several tensors, where all have some of each: image and text together); or
            what queries are made of, and the memory, which is everything else that keys and values
            are made of.
        apart: whether no input is made into queries and into keys or values both.
        held: whether something is also made of tensors that are in no stream.
    """

    named: dict[str, list[Tensor]]
    apart: bool
    held: bool


def _streams(owner: ModuleCopy) -> Streams:
    inputs, every = owner.inputs, range(len(owner.inputs))
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    with torch.enable_grad():
        parts = owner.again(list(zip(inputs, leaves, strict=True)))[1]
        some = zip(*((one.left, one.right, (one.v,)) for one in parts), strict=True)
        q, k, v = ({i for t in chain(*side) for i in _sources(t, leaves)} for side in some)
    others = tree_leaves([v for name, v in owner.run.kwargs.items() if _is_side_input(name)])
    beside = {i for i in every if any(inputs[i] is t for t in others)}
    learned = {i for i in every if any(inputs[i] is t for t in owner.run.learned)}
    tokens, sides = sorted(q - beside), [side for side in (k, v) if side]  # keys may be constant
    whole = [i for i in tokens if sides and all(i in side for side in sides)]
    like = [(inputs[i].ndim, inputs[i].shape[-1]) for i in whole]
    joint = [i for i, one in zip(whole, like, strict=True) if one == (3, like[0][1])]
    memory = [i for i in sorted(v & k) or [*sorted(v), *sorted(k - v)] if i not in q | beside]
    queries = whole or [i for i in tokens if i in k | v] or tokens or sorted(q)
    found = {QUERIES: queries[:1], MEMORY: memory}
    if len(joint) > 1:
        found = {INPUT: joint}
    elif whole and not memory:
        found = {INPUT: whole[:1]}
    elif learned.intersection(queries[:1]):
        found = {MEMORY: memory}
    held = not {*tokens, *memory} <= {*chain(*found.values())}
    named = {name: [inputs[i] for i in places] for name, places in found.items() if places}
    return Streams(named, not (k | v).intersection(tokens), held)


def _sources(made: Tensor, leaves: list[Tensor]) -> list[int]:
    """Return which leaves a tensor depends on."""
    grads = _sensitivity(made, leaves) if made.requires_grad and leaves else ()
    return [i for i, g in enumerate(grads) if bool((g != 0).any())]


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
            inside = [t.shape[-2:-1] for t in named.get(INPUT, ())] == [memory[0].shape[-2:-1]]
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
        own = owner.run.module is call.module and {stream} <= set(streams.named) <= set(_SIDES)
        if not own or not streams.apart or len(streams.named[stream]) > 1:
            what = "makes its queries, or its keys and values, of several streams of tokens"
            raise call.unsupported(f"{what}, or of some that are not its own inputs")
        tokens = streams.named[stream][0]
        call = replace(call, run=owner.run, stream=tokens, sides=_SIDES[stream])
    if call.run.calls > len(call.pieces) or (len(call.pieces) > 1 and call.form is None):
        parts = "differential attention, parts with keys of their own, or outputs that are added"
        raise call.unsupported(f"calls attention {call.run.calls} times whenever it runs ({parts})")
    _ = call.x
    if call.changed and from_heads(call) is not None:  # it belongs to the map of their outputs
        call = replace(call, changed="", gated=False, consumer=None)
    if call.changed and not (call.gated and stream == INPUT):
        raise call.unsupported(call.changed)
    if stream != INPUT:
        call.valid_rows = padding.of_queries(call, len(call.q), call.q.shape[-2])
        call.valid_keys = padding.of_keys(call, len(call.q), call.k.shape[-2])
    return call


def hidden_keys(call: Call) -> Tensor | None:
    """Return which keys no query may attend to, (samples, M) bool; None for none that is known."""
    by_hand, samples = call.way == BY_HAND, len(call.q)
    scores = call.scores if by_hand else call.additive()
    if scores is None or (by_hand and scores.ndim < 3):
        return None
    if by_hand:
        samples = len(call.out) if call.formed else len(scores)
        scores = scores.reshape(samples, -1, *scores.shape[-2:])
    low = (scores if scores.ndim > 2 else scores[None]) <= HIDDEN
    hidden = low.flatten(1, -2).all(1).expand(samples, -1)
    return hidden if bool(hidden.any()) else None


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
        marked = (t == 0 for n, t in inputs.items() if "mask" in n and getattr(t, "ndim", 0) == 2)
        self._padded = [t for zeros in marked if bool(zeros.any()) for t in (zeros, ~zeros)]
        self._calls = calls
        for call in calls:
            call.valid_keys = self.of_keys(call, len(call.q), call.k.shape[-2])
            call.valid_rows = self.of_keys(call, len(call.q), call.q.shape[-2])

    def of_keys(self, call: Call, samples: int, tokens: int) -> Tensor | None:
        """Return which keys of a call are no padding, (samples, tokens), or None for all.

        Beside those of its tokens may stand keys of a cache, or learned ones, which are no tokens.
        """
        hidden = hidden_keys(call) if self._padded else None
        if hidden is None or hidden.shape == (samples, tokens):
            return None if hidden is None else ~hidden
        places = hidden.unfold(1, tokens, 1).unbind(1) if tokens < hidden.shape[1] else ()
        some = (t for t in (t[:, -tokens:] for t in self._padded) if bool(t.any() ^ t.all()))
        return next((~t for t in some if any(torch.equal(t, place) for place in places)), None)

    def of_queries(self, call: Call, samples: int, tokens: int) -> Tensor | None:
        """Return which queries of a cross-attention are no padding, or None for all.

        Padding is what self-attention in the same stack of layers hides.
        """
        stack = (one.valid_rows for one in self._calls if _stack_of(one) == _stack_of(call))
        return next((t for t in stack if t is not None and t.shape == (samples, tokens)), None)


def _stack_of(call: Call) -> str:
    return re.split(r"\.\d+\.", call.name)[0]


def through_module(
    call: Call, stream: str, padding: Padding, reason: str
) -> tuple[ModuleAttention, float, str]:
    """Return a layer as a function of one of its streams.

    Beside it are its error against the model's pass, and the name of the module whose input the
    stream is.

    Args:
        call: of the layer.
        stream: of `lipbound.models.capture.streams.stream_names`.
        padding: of the pass.
        reason: why there is no closed form.

    Raises:
        CaptureError: the module cannot be run by itself, or does not reproduce the pass.
    """
    owner, streams = owner_of(call, stream)
    until = _until(call)
    if stream not in streams.named and stream == INPUT:  # keys of an earlier layer, that are kept
        stream = next(iter(streams.named))
    if stream not in streams.named:
        raise call.unsupported(f"depends on no stream of {stream}")
    tensors = streams.named[stream]
    # keys and values of two tensors have the same tokens
    along = 1 if len(tensors) > 1 and stream == INPUT else -1
    misfit = str(call.unsupported("makes keys and values of tensors of two layouts"))
    with explained(CaptureError, misfit, why=lambda error: ""):
        tokens = torch.cat([t.detach().double() for t in tensors], along)

    def cut(x: Tensor, until: str = until) -> tuple[Tensor, list[Heads]]:
        parts = x.split([t.shape[along] for t in tensors], along)
        return owner.again(list(zip(tensors, parts, strict=True)), until)

    with torch.enable_grad():
        x = tokens.clone().requires_grad_()
        whole, heads = cut(x)
        error = _error(call, whole, heads)
        arrange = (lambda t: t) if until == rerun.HEADS else arrangement(call, whole, heads)
        sides = heads[0].known[:2] or (heads[0].left[0], heads[0].right[0])
        made = sides[stream == MEMORY]
        if len(heads) > 1 or (call.form is not None and call.form.turned):
            made = whole  # samples stand elsewhere among these
        axis, count, place = _samples(call, x, arrange(whole), made)

    out = _by_sample(arrange(whole.detach()), place, count)
    if call.way != INTERFACE and until != rerun.HEADS and not _fits(call, stream, out, tokens):
        raise call.unsupported("hands on its heads in an order that is not known")
    # channels may stand before the tokens
    rest, size = range(tokens.ndim - 1, 0, -1), tokens.numel() // (count * out.shape[1])
    last = -1 if stream == MEMORY else next((i for i in rest if tokens.shape[i] == size), -1)
    tokens = tokens.movedim(last, -1)

    def function(x: Tensor) -> Tensor:
        return _by_sample(arrange(cut(x.movedim(-1, last))[0]), place, count)

    def projected(x: Tensor) -> Tensor:
        whole = cut(x.movedim(-1, last), rerun.RETURN)[0]
        return _by_sample(whole[..., None, :], place, count)[..., 0, :]

    width = tokens[..., 0].numel() // count
    of_outputs = padding.of_keys if stream == INPUT else padding.of_queries
    valid_out = of_outputs(call, count, out.shape[1])
    valid = valid_out if stream == QUERIES else padding.of_keys(call, count, width)
    valid = None if along == 1 else valid  # padding moves nothing
    real = out if valid_out is None else out[valid_out]
    if bool(real.isnan().any()):
        raise CaptureError(f"layer {call.name or '(the model itself)'}: its heads' outputs are NaN")
    w_o, is_affine = _output(call, owner, arrange, whole.detach(), out)
    shape = out.shape[0], out.shape[1], out.shape[2], out.shape[3]
    kind = "self" if stream == INPUT else "cross"
    windows = 1 if axis else max(1, count // call.samples)
    attention = ModuleAttention(
        tokens, axis, function, shape, w_o, valid, valid_out, kind, stream, windows, reason
    )
    followed = w_o is not None or not is_affine or until == PROJECTION
    details = _details(call, owner, out, heads, streams.held, followed)
    attention = replace(attention, layer=None if is_affine else projected, details=details)
    return attention, error, owner.run.name


def _fits(call: Call, stream: str, out: Tensor, tokens: Tensor) -> bool:
    """Return whether outputs, (samples, N, heads, d_v), take no heads for tokens."""
    kept = call.formed and out.shape[1:3] == call.out.shape[1:3]
    return kept if stream == MEMORY else out.shape[1] <= tokens[..., 0].numel() // len(out)


def _output(
    call: Call, owner: ModuleCopy, arrange: "Arrange", whole: Tensor, out: Tensor
) -> tuple[Tensor | None, bool]:
    """Return slices of the output projection where known, and whether no other map follows.

    Args:
        call: of the layer.
        owner: of its streams.
        arrange: from what the projection is given to (..., heads, d_v).
        whole: what it is given.
        out: outputs of heads, (samples, N, heads, d_v).
    """
    try:
        w_o = from_heads(call)
        if w_o is None and call.consumer is not None and not call.changed:
            w_o = rerun.probe_output(call, out)
        elif w_o is None and arrange(whole).flatten(-2).shape == whole.shape:
            flat = rerun.probe_output(call, whole[..., None, :])
            if flat is not None:
                rows = flat.mT.view(*[1] * (whole.ndim - 2), flat.shape[-1], whole.shape[-1])
                w_o = arrange(rows).reshape(-1, *out.shape[-2:]).permute(1, 2, 0)
        return w_o, True
    except CaptureError:  # it is not affine
        same = owner.run.module is call.module and not same_numbers(owner.run.returned, call.out)
        return None, not same


def _until(call: Call) -> str:
    """Return where heads end: where they are projected, together with gates and norms before that.

    Where nothing is done to them before, or one affine map, they end where attention does; so they
    do where several modules project them, as those of image and of text.
    """
    with suppress(CaptureError):
        known = len(call.pieces) == 1 and call.way == INTERFACE and not call.changed
        untouched = call.formed and bool(call.apart) and all(call.apart)
        if known or untouched or from_heads(call) is not None:
            return rerun.HEADS
    return PROJECTION


def _details(
    call: Call, owner: ModuleCopy, out: Tensor, heads: list[Heads], held: bool, followed: bool
) -> tuple[str, ...]:
    """Return what there is to say of the outputs of heads, in words."""
    found, raws = [], torch.cat([one.raw.flatten() for one in heads])
    own, mine = (t.detach().nan_to_num().flatten().sort().values for t in (raws, out))
    if len(mine) <= len(own) and not bool(torch.isin(mine, own).all()):
        found = ["what is done to the outputs of heads before their projection is part of them"]
    elif call.changed or not followed:
        found = ["outputs of heads are those that attention returns"]
    found += ["other tensors that queries, keys or values are made of are held"] * held
    return (*found, *["what the code detaches moves as well"] * owner.casts.detached)


def _error(call: Call, cut: Tensor, heads: list[Heads]) -> float:
    """Return how far a pass is from the recorded one, at the output projection where it has one.

    Raises:
        CaptureError: too far.
    """
    # padding of blocks of tokens is cut off where they are projected
    seen = (call.projected, cut), (call.raw, heads[0].raw)
    pairs = [(a, b) for a, b in seen if a is not None and a.shape == b.shape]
    if not pairs:
        raise call.unsupported("computes other attention when it is run by itself")
    plain = [[t.detach().double().nan_to_num() for t in pair] for pair in pairs]
    errors = [rerun.relative_error(made, own) for made, own in plain]
    if not (error := min(errors)) <= rerun.CAPTURE_TOLERANCE:
        why = "it keeps a state, or draws random numbers"
        raise call.unsupported(f"gives other outputs when run alone (off by {error:.1e}): {why}")
    if not errors[0] <= rerun.CAPTURE_TOLERANCE:  # more than the heads were given to it
        call.projection = None
    return error


def _by_sample(out: Tensor, axis: int, count: int) -> Tensor:
    """Return outputs (..., heads, d_v), whose samples are on an axis, as (samples, N, heads, d_v).

    Tokens and samples may share an axis.
    """
    if axis:
        out = (out.unflatten(0, (-1, count)) if out.ndim == 3 else out).movedim(axis, 0)
    return out.reshape(count, -1, *out.shape[-2:])


def _samples(call: Call, x: Tensor, out: Tensor, made: Tensor) -> tuple[int | None, int, int]:
    """Return the axis of a stream that counts samples (or windows of them), and how many.

    The third number is their axis among the outputs. They are found by derivatives: what is made of
    one depends on no other.

    Args:
        call: of the layer.
        x: the stream.
        out: outputs, (..., heads, d_v), made of it.
        made: queries or keys, made of it.

    Raises:
        DifferentPositionsError: samples cannot be told apart.
    """
    samples = call.samples
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
    what = "is given samples in one tensor that does not tell them apart (capture one at a time)"
    raise call.unsupported(what, DifferentPositionsError)


def _is_alone(made: Tensor, x: Tensor, axis: int) -> bool:
    """Return whether what is made of a stream depends on nothing but the first entry of an axis."""
    (grad,) = _sensitivity(made, [x])
    return not bool((grad.movedim(axis, 0)[1:] != 0).any())


Arrange = Callable[[Tensor], Tensor]
"""A function that brings outputs of heads to (..., heads, d_v)."""


def arrangement(call: Call, cut: Tensor, calls: Sequence[Heads]) -> Arrange:
    """Return a function from cuts to (..., heads, d_v).

    Heads stand side by side or interleaved, channels last or behind the samples, or on an axis of
    their own; which of these it is, derivatives tell.

    Args:
        call: of the layer, which errors name.
        cut: what its output projection is given, made of the outputs of ``calls`` with gradients.
        calls: what these outputs are put together from.

    Raises:
        CaptureError: the heads stand otherwise.
    """
    raws, (first, *_) = [one.raw for one in calls], calls
    if call.apart or (cut.numel() < sum(map(Tensor.numel, raws)) and not _all_move(cut, calls)):
        raise call.unsupported("projects the outputs of its heads in parts")
    # calls with the same scores are heads with parts of their values
    factors = [(one.left[0], one.right[0]) for one in calls]
    alike = (map(torch.equal, some, factors[0]) for some in factors)
    width = first.width * sum(map(all, alike))
    views: list[Arrange] = []
    if cut.shape == first.raw.shape and first.head_axis == cut.ndim - 2:
        views = [lambda t: t.flatten(-2)]
    elif cut.shape[-1] % width == 0:
        views = [lambda t: t, lambda t: t.unflatten(-1, (width, -1)).mT.flatten(-2)]
    if cut.ndim > 2 and cut.shape[1] % width == 0 and width > 1:
        views.append(lambda t: t.movedim(1, -1))
    for view in views:
        kept = _side_by_side(view(cut).unflatten(-1, (-1, width)), calls)
        whole = call.way == INTERFACE and len(calls) == 1
        if kept and (not whole or len(kept) == call.out.shape[2]):
            return lambda t: view(t).unflatten(-1, (-1, width))[..., kept, :]
    raise call.unsupported("hands on its heads in a layout in which they cannot be told apart")


def _side_by_side(out: Tensor, calls: Sequence[Heads]) -> list[int]:
    """Return which parts of (..., parts, d_v) are heads; none where they are not all told apart.

    Each is made of outputs of its own, of all channels of them, or mostly of these where heads are
    normalised together; other parts are made of something else.
    """
    sizes, raws, width = [], [one.raw for one in calls], calls[0].width

    def moving(made: Tensor) -> Tensor:
        pairs = zip(_sensitivity(made.nan_to_num(), raws), calls, strict=True)
        wide = (g.movedim(one.width_axis, -1).reshape(-1, width) for g, one in pairs)
        return torch.cat([*wide]).square()

    best = out.new_zeros(sum(map(Tensor.numel, raws)) // width, width)
    owner = torch.zeros_like(best)
    for i, head in enumerate(out.unbind(-2)):
        moved = moving(head)
        owner = owner.where(moved <= best, i)
        best = best.maximum(moved)
        sizes.append(moved.sum())
    kept = [i for i, size in enumerate(sizes) if size > 0]
    apart = ((best * (owner == i), sizes[i]) for i in kept)
    if not all(own.sum() > size / 2 and bool((own != 0).any(0).all()) for own, size in apart):
        return []
    channel = moving(out[..., kept[:1], 0])  # and no tokens are taken for channels
    return kept if bool(2 * channel[:, 0].sum() > channel.sum()) else []


def _all_move(cut: Tensor, calls: Sequence[Heads]) -> bool:
    """Return whether the outputs of every head enter what is made of them."""
    grads = _sensitivity(cut.nan_to_num(), [one.raw for one in calls])
    pairs = zip(grads, calls, strict=True)
    ends = (t.movedim((one.head_axis or 0, one.width_axis), (0, 1)) for t, one in pairs)
    return all(bool((t.flatten(2) != 0).any(2).all()) for t in ends)


def _sensitivity(made: Tensor, to: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return derivatives of a sum over what is made of some tensors, with weights."""
    weights = torch.linspace(1, 2, made.numel()).to(made).view(made.shape)
    total = (made * weights).sum()
    return torch.autograd.grad(total, to, retain_graph=True, materialize_grads=True)
