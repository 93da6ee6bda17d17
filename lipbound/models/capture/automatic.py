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
from lipbound.models.capture.rerun import CAPTURE_TOLERANCE, probe_output, relative_error
from lipbound.models.capture.seeing.call import Call
from lipbound.models.capture.seeing.follower import Heads
from lipbound.models.capture.streams import Owner, Padding, owner_of
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
    error = _error(call, *owner())
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

    def cut(x: Tensor) -> tuple[Tensor, Heads]:
        parts = x.split([t.shape[along] for t in tensors], along)
        return owner(list(zip(tensors, parts, strict=True)))

    with torch.enable_grad():
        x = tokens.clone().requires_grad_()
        whole, heads = cut(x)
        arrange = _arrangement(call, whole, heads, None if stream == MEMORY else x)
        made = (heads.k if stream == MEMORY else heads.q)[0]
        axis, count, place = _samples(call, x, arrange(whole, heads), made, call.samples)

    def function(x: Tensor) -> Tensor:
        return _by_sample(arrange(*cut(x)), place, count)

    out = _by_sample(arrange(whole, heads).detach(), place, count)
    width = tokens[..., 0].numel() // count
    valid_out = (padding.of_keys if stream == INPUT else padding.of_queries)(
        call, count, out.shape[1]
    )
    valid = valid_out if stream == QUERIES else padding.of_keys(call, count, width)
    valid = None if joint else valid  # padding moves nothing
    real = out if valid_out is None else out[valid_out]
    if bool(real.isnan().any()):
        raise CaptureError(f"layer {call.name}: the outputs of its heads are NaN")
    w_o = None
    if call.projection is not None and whole.shape[-1] == out[0, 0].numel():
        with suppress(CaptureError):  # maps that need it say that there is none
            flat = probe_output(call, call.projection, whole.detach()[..., None, :])
            assert flat is not None
            rows = flat.mT.view(*[1] * (whole.ndim - 2), flat.shape[-1], whole.shape[-1])
            w_o = arrange(rows, heads).reshape(-1, *out.shape[-2:]).permute(1, 2, 0)
    shape = out.shape[0], out.shape[1], out.shape[2], out.shape[3]
    kind = "self" if stream == INPUT else "cross"
    windows = 1 if axis else max(1, count // call.samples)
    attention = ModuleAttention(
        tokens, axis, function, shape, w_o, valid, valid_out, kind, stream, windows, reason
    )
    attention = replace(attention, details=_details(call, owner, out, heads, streams.held))
    return attention, error, owner.run.name


def _details(call: Call, owner: Owner, out: Tensor, heads: Heads, held: bool) -> tuple[str, ...]:
    """Return what there is to say of the outputs of heads, in words."""
    found = []
    own, mine = (t.detach().nan_to_num().flatten().sort().values for t in (heads.raw, out))
    if not torch.equal(own, mine) and len(own) == len(mine):
        found = ["what is done to the outputs of heads before their projection is part of them"]
    elif call.changed:
        found = ["outputs of heads are those that attention returns"]
    found += ["other tensors that queries, keys or values are made of are held"] * held
    return (*found, *["what the code detaches moves as well"] * owner.detaches)


def _error(call: Call, cut: Tensor, heads: Heads) -> float:
    """Return how far a pass is from the recorded one, at the output projection where it has one.

    Raises:
        CaptureError: too far.
    """
    own, raw = call.raw, heads.raw
    if call.projected is not None and call.projected.shape == cut.shape:
        own, raw = call.projected, cut  # padding of blocks of tokens is cut off there
    if raw.shape != own.shape:
        raise call.unsupported("computes other attention when it is run by itself")
    own, raw = (t.double().nan_to_num() for t in (own, raw.detach()))
    if not (error := relative_error(raw, own)) <= CAPTURE_TOLERANCE:
        raise call.unsupported(
            f"gives other outputs when it is run by itself (off by {error:.1e} relative): it keeps "
            "a state, or draws random numbers"
        )
    return error


def _arrangement(
    call: Call, cut: Tensor, heads: Heads, x: Tensor | None
) -> Callable[[Tensor, Heads], Tensor]:
    """Return a function from cuts and heads to (..., heads, d_v), each made of one head's outputs.

    Args:
        call: of the layer.
        cut: made of ``x``.
        heads: made of ``x``.
        x: the tokens that outputs belong to, where they are known.

    Raises:
        CaptureError: the heads cannot be told apart.
    """
    raw, axis, width = heads.raw, heads.head_axis, heads.width
    if cut.shape[-1] == width and axis is not None and cut.ndim >= 4:
        places = [axis] if cut.shape == raw.shape else [cut.ndim - 2, 1]
        place = next((i for i in places if cut.shape[i] == raw.shape[axis]), None)
        if place is not None:
            return lambda t, _: t.movedim(place, -2)
    rows = 0 if x is None else x[..., 0].numel()  # groups of heads may be projected apart
    if axis is not None and raw.ndim == 4 and cut[..., 0].numel() != rows:
        whole = raw.numel() == rows * raw.shape[axis] * width
        if whole and cut.numel() == raw.numel():
            return lambda _, heads: heads.raw.movedim(axis, -2)
    if cut.shape[-1] % width and cut.shape[-1] % raw.shape[-2] == 0:
        width = raw.shape[-2]  # channels attend to channels
    if cut.shape[-1] % width:
        raise call.unsupported(
            f"hands on outputs of heads ({width} wide) in a tensor of width {cut.shape[-1]}"
        )

    def one_by_one(t: Tensor, _: Heads) -> Tensor:
        return t.unflatten(-1, (-1, width))

    def interleaved(t: Tensor, _: Heads) -> Tensor:
        return t.unflatten(-1, (width, -1)).mT

    own = max(0.5, _own_share(one_by_one(cut, heads), raw, axis))  # less is chance
    share = _own_share(interleaved(cut, heads), raw, axis)
    return interleaved if share > own + 1e-9 else one_by_one


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
