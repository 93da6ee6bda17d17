"""Putting a recorded call and the weights that probing found together as an `Attention`."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.projections import Projections
from lipbound.attention.scoring import Scoring, four_axes
from lipbound.attention.validation import sees_some_key
from lipbound.attention.variants import Variant
from lipbound.attention.variants.cap import Cap
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.qk_norm import QKNormalised
from lipbound.attention.variants.sinks import Sinks
from lipbound.attention.variants.value_norm import ValueNorm
from lipbound.errors import AttentionError, CaptureError
from lipbound.models.capture.probing import ProbedWeights
from lipbound.models.capture.seeing.call import BY_HAND, HIDDEN, Call


def assemble(
    call: Call,
    weights: ProbedWeights,
    valid: Tensor | None,
    valid_other: Tensor | None = None,
    *,
    late: bool = False,
) -> Attention:
    """Return the `Attention` of a call, in the dtype of its input.

    Args:
        call: of the layer.
        weights: what probing found.
        valid: which tokens are not padding, see `valid_tokens`.
        valid_other: the same of the other stream of cross-attention.
        late: whether queries and keys are normalised after they are turned.

    Raises:
        CaptureError: they do not form an attention layer.
    """
    x, other = call.x.detach(), other_stream(call, valid_other)
    rows, keys = valid, valid
    if other is not None:
        rows, keys = (valid_other, valid) if other.q is not None else (valid, valid_other)
    mask = _simplified(_additive(call), rows, keys, len(x))
    scale = call.scale if call.scale is not None else call.q.shape[-1] ** -0.5

    def cast(t: Tensor | None) -> Any:
        return None if t is None else t.to(x.dtype)

    projections = Projections(*map(cast, (*weights.w, *weights.b, weights.w_o)))
    steps = variants_of(call, weights, x.dtype, late) + ([] if other is None else [other])
    scoring = Scoring(float(scale), mask, tuple(steps))
    try:
        return Attention.of(x, projections, scoring, valid=valid)
    except AttentionError as error:
        raise CaptureError(f"layer {call.name}: {error}") from error


def other_stream(call: Call, valid: Tensor | None) -> OtherStream | None:
    """Return the side of cross-attention that does not move, as it was recorded."""
    if call.sides == "qkv":
        return None
    groups = call.q.shape[1] // call.k.shape[1]

    def given(t: Tensor) -> Tensor:
        return t.detach().to(call.x.dtype).transpose(0, 1)

    if call.sides == "kv":
        return OtherStream(q=given(call.q), valid=valid)
    k, v = (given(t.repeat_interleave(groups, 1)) for t in (call.k, call.v))
    return OtherStream(k=k, v=v, valid=valid)


def variants_of(
    call: Call, weights: ProbedWeights, dtype: torch.dtype, late: bool = False
) -> list[Variant]:
    """Return what a call does to queries, keys and scores beside projecting and scaling.

    ``late``: whether queries and keys are normalised after they are turned.

    A new variant is one more step here, read off the call or off what probing found.
    """
    found: list[Variant] = []
    if weights.turns is not None and weights.turns.rotation is not None:
        found.append(weights.turns.rotation)
    if weights.offsets is not None:
        found.append(weights.offsets.map(lambda t: t.to(dtype)))
    if weights.norm_q is not None or weights.norm_k is not None:
        found.append(QKNormalised(weights.norm_q, weights.norm_k, late).map(lambda t: t.to(dtype)))
    if weights.norm_v is not None:
        found.append(ValueNorm(weights.norm_v).map(lambda t: t.to(dtype)))
    if weights.gate is not None:
        found.append(weights.gate.map(lambda t: t.to(dtype)))
    found += [one.map(lambda t: t.to(dtype)) for one in call.relative]
    if (cap := call.extras.get("softcap")) is not None:
        found.append(Cap(float(cap)))
    if (sinks := call.extras.get("s_aux")) is not None:
        found.append(Sinks(sinks.detach().to(dtype).flatten()))
    return found


def valid_tokens(call: Call, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return which tokens of a layer are not padding, (samples, N) bool; None when all are real.

    Padding belongs to a stream of tokens, and a model has several (an encoder's and a decoder's,
    text and image). What the layer itself does decides which is its own: where some mask of the
    inputs, (samples, any number), marks padding, those tokens of the layer are padding that no
    query may attend to.
    """
    if not any(marks_padding(name, t) for name, t in inputs.items()):
        return None
    hidden = hidden_tokens(call)
    return ~hidden if bool(hidden.any()) else None


def hidden_tokens(call: Call) -> Tensor:
    """Return which tokens of a layer no query may attend to, (samples, N) bool."""
    shape, mask = call.x.shape[:2], _additive(call)
    if call.way == BY_HAND and call.scores is not None:
        mask = call.scores.reshape(len(call.out), -1, *call.scores.shape[-2:])
    if mask is None:
        return torch.zeros(shape, dtype=torch.bool, device=call.x.device)
    return (four_axes(mask) <= HIDDEN).all(2).all(1).expand(shape)


def check_mask(call: Call, valid: Tensor | None) -> None:
    """Check that every token of a layer that is not padding may attend to some token.

    Raises:
        CaptureError: one may not.
    """
    mask = _additive(call)
    if mask is None or sees_some_key(four_axes(mask), call.x.shape[1], valid, valid):
        return
    window = call.extras.get("sliding_window")
    width = "" if window is None else f" (its sliding window is {window} tokens wide)"
    raise CaptureError(
        f"layer {call.name}: its mask forbids some token every key{width}, and what its softmax is "
        "there is up to the model's code; change the model's configuration, or give inputs in "
        "which every token that is no padding may attend to one"
    )


def about_padding(calls: Collection[Call], valid: Collection[Tensor | None]) -> list[str]:
    """Return sentences where it can be doubted which tokens of some layers are padding.

    Args:
        calls: of the layers.
        valid: per call which tokens are not padding, None for all.
    """
    unseen, attended = [], []
    for call, real in zip(calls, valid, strict=True):
        hidden, given = hidden_tokens(call), call.given_mask
        if real is None and bool(hidden.any()):
            unseen.append(call.name)
        if given is not None and given.shape == hidden.shape:
            attended += [call.name] if bool(((given == 0) & ~hidden).any()) else []
    unmarked = (
        "no query may attend to some tokens, which are measured as tokens nevertheless; if they "
        "are padding, say so by 0 in an attention_mask of (samples, tokens)"
    )
    seen = (
        "tokens that attention_mask marks as padding are attended to, and are measured as tokens, "
        "as the model treats them"
    )
    return [
        f"layer {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {said}"
        for names, said in ((unseen, unmarked), (attended, seen))
        if names
    ]


def marks_padding(name: str, value: object) -> bool:
    """Return whether an input of a model is a mask of tokens, some of which are padding."""
    if "mask" not in name or not isinstance(value, Tensor) or value.ndim != 2:
        return False
    return bool((value == 0).any())


def _simplified(
    mask: Tensor | None, rows: Tensor | None, keys: Tensor | None, samples: int
) -> Tensor | None:
    """Return a mask without what padding of queries and of keys makes of it.

    None if nothing remains, and one sample of it where all share it.
    """
    if mask is None:
        return None
    for valid, axis in ((rows, -2), (keys, -1)):
        if valid is not None:
            padded = ~valid[:, None].unsqueeze(-3 - axis)
            shape = torch.broadcast_shapes(mask.shape, padded.shape)
            mask = mask.expand(shape).masked_fill(padded, 0.0)
    if bool((mask == 0).all()):
        return None
    return mask[:1] if bool((mask == mask[:1]).all()) else mask


def _additive(call: Call) -> Tensor | None:
    """Return what a call adds to its scores: its mask, and biases of relative positions."""
    mask, bias, dtype = call.mask, call.extras.get("position_bias"), call.x.dtype
    if mask is not None:
        mask = four_axes(mask[..., : call.k.shape[-2]]).to(dtype)  # one for a cache may be wider
    if bias is None:
        return mask
    bias = bias.detach().to(dtype)
    # the lowest number and a bias may overflow
    return bias if mask is None else (mask + bias).clamp_min(torch.finfo(dtype).min)
