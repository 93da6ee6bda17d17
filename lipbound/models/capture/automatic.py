"""Layers without a closed form, as functions of their streams of tokens through their own module.

The module whose inputs determine queries, keys and values is copied to float64 and run again with
these inputs; what its output projection is given is cut out of the pass as the outputs of heads.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import CaptureError, DifferentPositionsError
from lipbound.models.capture.arrangement import arrangement
from lipbound.models.capture.outputs import from_heads, probe_output
from lipbound.models.capture.rerun import CAPTURE_TOLERANCE, relative_error
from lipbound.models.capture.seeing.call import Call, same_numbers
from lipbound.models.capture.seeing.follower import Heads
from lipbound.models.capture.streams import (
    HEADS,
    PROJECTION,
    RETURN,
    Owner,
    Padding,
    owner_of,
)
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
    error = _error(call, *owner(until=until))
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
        return owner(list(zip(tensors, parts, strict=True)), until=until)

    with torch.enable_grad():
        x = tokens.clone().requires_grad_()
        whole, heads = cut(x)
        arrange = _as_they_are if until == HEADS else arrangement(call, x, whole, heads)
        sides = heads[0].form[:2] or (heads[0].q[0], heads[0].k[0])
        made = sides[stream == MEMORY]
        if len(heads) > 1 or (call.form is not None and call.form.turned):
            made = whole  # samples stand elsewhere among these
        axis, count, place = _samples(call, x, arrange(whole), made, call.samples)

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
    valid_out = (padding.of_keys if stream == INPUT else padding.of_queries)(
        call, count, out.shape[1]
    )
    valid = valid_out if stream == QUERIES else padding.of_keys(call, count, width)
    valid = None if joint else valid  # padding moves nothing
    real = out if valid_out is None else out[valid_out]
    if bool(real.isnan().any()):
        raise CaptureError(
            f"layer {call.name or '(the model itself)'}: the outputs of its heads are NaN"
        )
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
    call: Call, owner: Owner, arrange: Callable[[Tensor], Tensor], whole: Tensor, out: Tensor
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


def _as_they_are(t: Tensor) -> Tensor:
    return t


def _until(call: Call) -> str:
    """Return where heads end: where they are projected, together with gates and norms before that.

    Where all that is made of them is one affine map, they end where attention does.
    """
    with suppress(CaptureError):
        own = call.consumer is not None and not call.changed
        return PROJECTION if own or from_heads(call) is None else HEADS
    return PROJECTION


def _details(
    call: Call, owner: Owner, out: Tensor, heads: list[Heads], held: bool
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
