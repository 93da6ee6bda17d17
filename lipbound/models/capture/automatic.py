"""Layers without a closed form, as functions of their streams of tokens through their own module.

The module whose inputs determine queries, keys and values is copied to float64 and run again with
these inputs; what its output projection is given is cut out of the pass as the outputs of heads.
Which entries of that are the outputs of which head is found by derivatives, whatever the layout: an
entry moves with the outputs of its head.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import CaptureError, DifferentPositionsError
from lipbound.models.capture.rerun import (
    CAPTURE_TOLERANCE,
    HEADS,
    PROJECTION,
    RETURN,
    ModuleCopy,
    from_heads,
    probe_output,
    relative_error,
)
from lipbound.models.capture.seeing.call import Call, same_numbers
from lipbound.models.capture.seeing.follower import Heads
from lipbound.models.capture.streams import Padding, owner_of
from lipbound.schema import INPUT, MEMORY, QUERIES


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
    error = _error(call, *owner.again(place=until))
    if stream not in streams.named and stream == INPUT:  # keys of an earlier layer, that are kept
        stream = next(iter(streams.named))
    if stream not in streams.named:
        raise call.unsupported(f"depends on no stream of {stream}")
    tensors, joint = streams.named[stream], streams.joint
    along = 1 if joint else -1  # keys and values of two tensors have the same tokens
    try:
        tokens = torch.cat([t.detach().double() for t in tensors], along)
    except RuntimeError as error:
        raise call.unsupported("makes keys and values of tensors of two layouts") from error

    def cut(x: Tensor, until: str = until) -> tuple[Tensor, list[Heads]]:
        parts = x.split([t.shape[along] for t in tensors], along)
        return owner.again(list(zip(tensors, parts, strict=True)), until)

    with torch.enable_grad():
        x = tokens.clone().requires_grad_()
        whole, heads = cut(x)
        arrange = (lambda t: t) if until == HEADS else arrangement(call, x, whole, heads)
        sides = heads[0].form[:2] or (heads[0].q[0], heads[0].k[0])
        made = sides[stream == MEMORY]
        if len(heads) > 1 or (call.form is not None and call.form.turned):
            made = whole  # samples stand elsewhere among these
        axis, count, place = _samples(call, x, arrange(whole), made)

    out = _by_sample(arrange(whole.detach()), place, count)
    # channels may stand before the tokens
    rest, size = range(tokens.ndim - 1, 0, -1), tokens.numel() // (count * out.shape[1])
    last = -1 if stream == MEMORY else next((i for i in rest if tokens.shape[i] == size), -1)
    tokens = tokens.movedim(last, -1)

    def function(x: Tensor) -> Tensor:
        return _by_sample(arrange(cut(x.movedim(-1, last))[0]), place, count)

    def projected(x: Tensor) -> Tensor:
        whole = cut(x.movedim(-1, last), RETURN)[0]
        return _by_sample(whole[..., None, :], place, count)[..., 0, :]

    width = tokens[..., 0].numel() // count
    of_outputs = padding.of_keys if stream == INPUT else padding.of_queries
    valid_out = of_outputs(call, count, out.shape[1])
    valid = valid_out if stream == QUERIES else padding.of_keys(call, count, width)
    valid = None if joint else valid  # padding moves nothing
    real = out if valid_out is None else out[valid_out]
    if bool(real.isnan().any()):
        raise CaptureError(f"layer {call.name or '(the model itself)'}: its heads' outputs are NaN")
    w_o, is_affine = _output(call, owner, arrange, whole.detach(), out)
    layer = None if is_affine else projected
    shape = out.shape[0], out.shape[1], out.shape[2], out.shape[3]
    kind = "self" if stream == INPUT else "cross"
    windows = 1 if axis else max(1, count // call.samples)
    attention = ModuleAttention(
        tokens, axis, function, shape, w_o, valid, valid_out, kind, stream, windows, reason, layer
    )
    attention = replace(attention, details=_details(call, owner, out, heads, streams.held))
    return attention, error, owner.run.name


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
        if w_o is None and arrange(whole).flatten(-2).shape == whole.shape:
            flat = probe_output(call, whole[..., None, :])
            if flat is not None:
                rows = flat.mT.view(*[1] * (whole.ndim - 2), flat.shape[-1], whole.shape[-1])
                w_o = arrange(rows).reshape(-1, *out.shape[-2:]).permute(1, 2, 0)
        return w_o, True
    except CaptureError:  # it is not affine
        same = owner.run.module is call.module and not same_numbers(owner.run.returned, call.out)
        return None, not same


def _until(call: Call) -> str:
    """Return where heads end: where they are projected, together with gates and norms before that.

    Where all that is made of them is one affine map, they end where attention does.
    """
    with suppress(CaptureError):
        own = call.consumer is not None and not call.changed
        return PROJECTION if own or from_heads(call) is None else HEADS
    return PROJECTION


def _details(
    call: Call, owner: ModuleCopy, out: Tensor, heads: list[Heads], held: bool
) -> tuple[str, ...]:
    """Return what there is to say of the outputs of heads, in words."""
    found, raws = [], torch.cat([one.raw.flatten() for one in heads])
    own, mine = (t.detach().nan_to_num().flatten().sort().values for t in (raws, out))
    if len(mine) <= len(own) and not bool(torch.isin(mine, own).all()):
        found = ["what is done to the outputs of heads before their projection is part of them"]
    elif call.changed:
        found = ["outputs of heads are those that attention returns"]
    found += ["other tensors that queries, keys or values are made of are held"] * held
    return (*found, *["what the code detaches moves as well"] * owner.detaches)


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
    errors = [relative_error(*(t.detach().double().nan_to_num() for t in pair)) for pair in pairs]
    if not (error := min(errors)) <= CAPTURE_TOLERANCE:
        raise call.unsupported(
            f"gives other outputs when it is run by itself (off by {error:.1e} relative): it keeps "
            "a state, or draws random numbers"
        )
    if not errors[0] <= CAPTURE_TOLERANCE:  # more than the heads were given to it
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
    raise call.unsupported(
        "is given all samples in one tensor that does not tell them apart (capture one at a time)",
        DifferentPositionsError,
    )


def _is_alone(made: Tensor, x: Tensor, axis: int) -> bool:
    """Return whether what is made of a stream depends on nothing but the first entry of an axis."""
    (grad,) = torch.autograd.grad(made.square().sum(), x, retain_graph=True, allow_unused=True)
    return grad is None or not bool((grad.movedim(axis, 0)[1:] != 0).any())


MOST = 256
"""Number of places of an axis of outputs that are looked at; samples and heads may share it.

Where there are more, half of them are its first and half stand evenly on it, so that heads are met
whether samples or heads stand first.
"""

Arrange = Callable[[Tensor], Tensor]
"""A function that brings outputs of heads to (..., heads, d_v)."""
Places = frozenset[int]
"""Places of an axis at which a tensor is not zero."""


def arrangement(call: Call, x: Tensor, cut: Tensor, calls: Sequence[Heads]) -> Arrange:
    """Return a function from cuts to (..., heads, d_v).

    Args:
        call: of the layer, which errors name.
        x: the stream of tokens that ``cut`` is a function of.
        cut: what its output projection is given, made of the outputs of ``calls`` with gradients.
        calls: what these outputs are put together from.

    Raises:
        CaptureError: the heads cannot be told apart.
    """
    calls, last = [one for one in calls if one.raw.requires_grad], cut.ndim - 1
    cotangent, raws = torch.zeros_like(cut, requires_grad=True), [one.raw for one in calls]
    pulled = torch.autograd.grad(cut, raws, cotangent, create_graph=True, materialize_grads=True)
    raw, known = raws[0], calls[0].head_axis
    known = None if known is None or _of_other_tokens(x, calls[0]) else known
    if cut.numel() < sum(map(Tensor.numel, raws)) and not _all_move(cut, calls):
        raise call.unsupported("projects the outputs of its heads in parts")
    # calls with the same scores are one head with parts of its values
    made_of = [(one.q[0], one.k[0]) for one in calls]
    same = [[all(map(torch.equal, one, other)) for one in made_of] for other in made_of]
    owners = [row.index(True) for row in same]

    def moved(i: int, axis: int, place: int) -> list[Places]:
        """Return which places of each axis of the cut move with a call's outputs at a place."""
        tangent, found = torch.zeros_like(raws[i]), torch.zeros_like(cut)
        some = tangent.select(axis, place)
        some.copy_(torch.randn(some.shape, generator=torch.Generator().manual_seed(0)))
        if pulled[i].requires_grad:
            (found,) = torch.autograd.grad(pulled[i], cotangent, tangent, retain_graph=True)
        return _places(found)

    @cache
    def made(axis: int) -> list[list[list[Places]]]:
        """Return the same for each call and all places of an axis of its outputs."""
        found: dict[int, list[list[Places]]] = {}
        for i, owner in enumerate(owners):
            some = [moved(i, axis, place) for place in _looked_at(raws[i].shape[axis])]
            pairs = zip(found.get(owner, some), some, strict=True)
            found[owner] = [[*map(frozenset.union, *pair)] for pair in pairs]
        return [*found.values()]

    several = known is not None and raw.shape[known] > 1
    one, other = (moved(0, calls[0].width_axis, place) for place in (0, -1))
    # activations may keep the derivative of some tokens alone, not of the same for all channels
    wide = {axis for axis in range(cut.ndim) if one[axis].isdisjoint(other[axis])}
    places = made(known or 0)[0] if several else []
    first, *rest = [some for some in places if some[0]] or [[]]
    along = {axis for axis, some in enumerate(first) if any(some.isdisjoint(p[axis]) for p in rest)}
    if len(wide | along) > 1 and (len(wide) > 1 or wide & along):  # groups of heads, say
        axes, back = sorted(wide | along), [*range(-len(wide | along), 0)]
        inner = arrangement(call, x, cut.movedim(axes, back).flatten(back[0]), calls)
        return lambda t: inner(t.movedim(axes, back).flatten(back[0]))
    width = max(wide, default=None)
    end = last if width is None else width
    tried = [(a, end, len(calls)) for a in dict.fromkeys([known or 0, *range(raw.ndim - 2)])]
    # calls that are chunks of queries move other tokens
    tried += [(known or 0, axis, 1) for axis in range(last, -1, -1) if several]
    for of_raw, axis, count in tried:
        found = [[some[axis] for some in one] for one in made(of_raw)]
        groups = _groups(found, found[:count], cut.shape[axis], several)
        if not groups and axis == end:
            groups = _completed([*chain(*found)], cut.shape[axis], calls[0].width)
        if groups:
            order = torch.tensor([*chain(*map(sorted, groups))], device=cut.device)
            if axis == last or len(groups[0]) > 1:
                return lambda t: t.movedim(axis, -1)[..., order].unflatten(-1, (len(groups), -1))
            ends = axis, last if end == axis else end
            return lambda t: t.index_select(axis, order).movedim(ends, (-2, -1))
    d_v = calls[0].width  # heads are normalised together, say
    if not several and width is not None and cut.shape[width] == d_v:
        places = made(0)[0] if len(calls) == 1 and raw.ndim == 3 else []
        named = dict(zip(_looked_at(len(raw)), places, strict=False))
        if (of_heads := _axis_of_heads(x, calls[0].v, named)) is not None:
            return lambda t: t.movedim((of_heads, width), (-2, -1))
        return lambda t: t.movedim(width, -1).unsqueeze(-2)  # one head
    return _together(call, cut, raw, known, d_v)


def _axis_of_heads(x: Tensor, v: Tensor, places: Mapping[int, list[Places]]) -> int | None:
    """Return the axis of a cut on which heads stand; None where there is one head.

    Windows may share the first axis of outputs with heads, whose values are made of the same
    tokens.

    Args:
        x: the stream of tokens.
        v: values of each head and window, (heads and windows, M, d_v).
        places: of the cut, on each of its axes, by places of that axis.
    """
    if v.ndim != 3 or not v.requires_grad or len(places) < 2:
        return None
    for i, its in places.items():
        pairs = enumerate(zip(places[0], its, strict=True))
        axes = [axis for axis, (one, other) in pairs if one.isdisjoint(other)]
        if len(axes) == 1 and _tokens(x, v[0]) == _tokens(x, v[min(i, len(v) - 1)]):
            return axes[0]
    return None


def _tokens(x: Tensor, made: Tensor) -> list[Places]:
    """Return the places of the tokens that something is made of, on each axis of their stream."""
    weights = torch.linspace(1, 2, made.numel()).to(made).view_as(made)
    return _places(torch.autograd.grad((made * weights).sum(), x, retain_graph=True)[0])


def _together(call: Call, cut: Tensor, raw: Tensor, known: int | None, d_v: int) -> Arrange:
    """Return the layout of heads on the last axis that are all made of all outputs of heads."""
    if cut.shape[-1] % d_v:
        raise call.unsupported(f"hands on heads ({d_v} wide) in a tensor of width {cut.shape[-1]}")
    layouts: list[Arrange] = [
        lambda t: t.unflatten(-1, (-1, d_v)),
        lambda t: t.unflatten(-1, (d_v, -1)).mT,
    ]
    shares = [_own_share(layout(cut), raw, known) for layout in layouts]
    return layouts[shares[1] > max(0.5, shares[0]) + 1e-9]  # less is chance


def _own_share(out: Tensor, raw: Tensor, axis: int | None) -> float:
    """Return which part of what the first of the heads is made of belongs to it.

    Args:
        out: outputs (..., heads, d_v), made of ``raw``.
        raw: outputs as they were computed.
        axis: of ``raw`` that counts heads; None where samples and heads share the first.
    """
    count = out.shape[-2]
    if len(raw) % count if axis is None else raw.shape[axis] != count:
        return 0.0
    made = (out[..., 0, :].nan_to_num() * torch.linspace(1, 2, out.shape[-1]).to(out)).sum()
    (grad,) = torch.autograd.grad(made, raw, retain_graph=True, materialize_grads=True)
    grad = grad.unflatten(0, (-1, count)) if axis is None else grad
    inside = grad.select(1 if axis is None else axis, 0)
    return float(inside.square().sum() / grad.square().sum())


def _looked_at(size: int) -> Sequence[int]:
    """Return places of an axis of that size: all, or `MOST` of them."""
    if size <= MOST:
        return range(size)
    half = MOST // 2
    return sorted({*range(half), *torch.linspace(0, size - 1, half).long().tolist()})


def _places(t: Tensor) -> list[Places]:
    some, axes = t != 0, range(t.ndim)
    found = (some.any([other for other in axes if other != axis]) for axis in axes)
    return [frozenset(places.nonzero().flatten().tolist()) for places in found]


def _apart(some: Sequence[Places], size: int) -> bool:
    """Return whether places of an axis, each as many, are different ones, but not one for all."""
    groups = {places for places in some if places}
    counts, every = [len(places) for places in groups], frozenset[int]().union(*groups)
    parts = len(groups) > 1 or len(every) < size
    return parts and len({*counts}) == 1 and len(every) == sum(counts)


def _groups(
    found: Sequence[Sequence[Places]], told: Sequence[Sequence[Places]], size: int, several: bool
) -> list[Places]:
    """Return the places of heads on an axis of that size, or nothing.

    Args:
        found: of each call, place by place of its own axis.
        told: those that tell heads apart.
        size: of the axis.
        several: whether there must be more than one head among these, not tokens of a chunk.
    """
    every, some = [*chain(*found)], [*chain(*told)]
    if (several and len({*filter(None, some)}) < 2) or not _apart(some, size):
        return []
    return [*filter(None, dict.fromkeys(every))] if _apart(every, size) else []


def _completed(groups: Sequence[Places], size: int, width: int) -> list[Places]:
    """Return the places of heads of some width of which some do not move, or nothing.

    An activation between heads and their projection may have no derivative at some places.
    """
    every, count = range(size), size // width
    blocks = [frozenset(every[i * width : (i + 1) * width]) for i in range(count)]
    for parts in (blocks, [frozenset(every[i::count]) for i in range(count)]):
        met = [sum(not some.isdisjoint(part) for part in parts) for some in groups if some]
        if {*met} <= {1} and count > 1 and count * width == size:
            return parts
    return []


def _all_move(cut: Tensor, calls: Sequence[Heads]) -> bool:
    """Return whether the outputs of every head enter what is made of them."""
    weights = torch.linspace(1, 2, cut.numel()).to(cut).view_as(cut)
    raws = [one.raw for one in calls]
    made = (cut.nan_to_num() * weights).sum()
    grads = torch.autograd.grad(made, raws, retain_graph=True, materialize_grads=True)
    pairs = zip(grads, calls, strict=True)
    ends = (t.movedim((one.head_axis or 0, one.width_axis), (0, 1)) for t, one in pairs)
    return all(bool((t.flatten(2) != 0).any(2).all()) for t in ends)


def _of_other_tokens(x: Tensor, call: Heads) -> bool:
    """Return whether what seem to be heads are made of other tokens each: windows, or samples."""
    sides = (t for t in call.form[:2] if t is not None and t.requires_grad and t.ndim > 3)
    t = next((t for t in sides if t.shape[-3] > 1), None)
    if t is None:
        return False
    firsts = [t.select(-3, i).select(-2, 0) for i in range(2)]
    weights = torch.linspace(1, 2, t.shape[-1], dtype=t.dtype, device=t.device)
    grads = (torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in firsts)
    first, second = map(_places, grads)
    wide = max(range(x.ndim), key=lambda axis: len(first[axis]))
    return any(first[axis] != second[axis] for axis in range(x.ndim) if axis != wide)
