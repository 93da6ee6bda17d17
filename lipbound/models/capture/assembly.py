"""Putting a recorded call and the weights that probing found together as an `Attention`."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.projections import Projections
from lipbound.attention.scoring import Scoring
from lipbound.attention.validation import sees_some_key
from lipbound.attention.variants import Variant
from lipbound.attention.variants.cap import Cap
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.qk_norm import QKNormalised
from lipbound.attention.variants.sinks import Sinks
from lipbound.attention.variants.value_norm import ValueNorm
from lipbound.errors import AttentionError, CaptureError
from lipbound.models.capture.probing import ProbedWeights
from lipbound.models.capture.seeing.call import Call, listed
from lipbound.models.capture.streams import hidden_keys


def assemble(call: Call, weights: ProbedWeights, *, late: bool = False) -> Attention:
    """Return the `Attention` of a call, in the dtype of its input.

    Args:
        call: of the layer, as `lipbound.models.capture.streams.of_stream` returns it.
        weights: what probing found.
        late: whether queries and keys are normalised after they are turned.

    Raises:
        CaptureError: they do not form an attention layer.
    """
    x, scale = call.x.detach(), call.scale

    def cast(t: Tensor | None) -> Any:
        return None if t is None else t.to(x.dtype)

    projections = Projections(*map(cast, (*weights.w, *weights.b, weights.w_o)))
    scale = call.q.shape[-1] ** -0.5 if scale is None else float(scale)
    scoring = Scoring(scale, cast(_simplified(call)), tuple(variants_of(call, weights, late)))
    valid = call.valid_keys if call.sides == "kv" else call.valid_rows
    try:
        return Attention.of(x, projections, scoring, valid=valid)
    except AttentionError as error:
        raise CaptureError(f"layer {call.name}: {error}") from error


def variants_of(call: Call, weights: ProbedWeights, late: bool = False) -> list[Variant]:
    """Return what a call does to queries, keys and scores beside projecting and scaling.

    A new variant is one more step here, read off the call or off what probing found.

    Args:
        call: of the layer.
        weights: what probing found.
        late: whether queries and keys are normalised after they are turned.
    """
    dtype = call.x.dtype
    found: list[Variant | None] = [weights.gate]
    norm_q, norm_k, norm_v = weights.norms
    if norm_q is not None or norm_k is not None:
        found.append(QKNormalised(norm_q, norm_k, late))
    if norm_v is not None:
        found.append(ValueNorm(norm_v))
    if (cap := call.extras.get("softcap")) is not None:
        found.append(Cap(float(cap)))
    if (sinks := call.extras.get("s_aux")) is not None:
        found.append(Sinks(sinks.detach().flatten()))
    steps = [step.map(lambda t: t.to(dtype)) for step in found if step is not None]
    if weights.turns is not None and weights.turns.rotation is not None:
        steps.append(weights.turns.rotation)  # its angles stay in float64
    return steps if call.sides == "qkv" else [*steps, _other_stream(call)]


def _other_stream(call: Call) -> OtherStream:
    """Return the side of cross-attention that does not move, as it was recorded."""
    groups = call.q.shape[1] // call.k.shape[1]

    def given(t: Tensor) -> Tensor:
        return t.detach().to(call.x.dtype).transpose(0, 1)

    if call.sides == "kv":
        return OtherStream(q=given(call.q), valid=call.valid_rows)
    k, v = (given(t.repeat_interleave(groups, 1)) for t in (call.k, call.v))
    return OtherStream(k=k, v=v, valid=call.valid_keys)


def forbidden(call: Call) -> str:
    """Return that some token that is not padding may attend to none, where that is so."""
    mask, rows, keys = call.additive(), call.valid_rows, call.valid_keys
    if mask is None or sees_some_key(mask, call.k.shape[-2], keys, rows):
        return ""
    window = call.extras.get("sliding_window")
    width = "" if window is None else f" (its sliding window is {window} tokens wide)"
    return (
        f"layer {call.name}: its mask forbids some token every key{width}, and what its softmax is "
        "there is up to the model's code; change the model's configuration, or give inputs in "
        "which every token that is no padding may attend to one"
    )


def check_defined(call: Call) -> None:
    """Check that the outputs of a call are numbers.

    Raises:
        CaptureError: they are not; a mask that forbids some token every key is the better reason.
    """
    valid, hint = call.valid_rows, ""
    if not bool(call.out.isnan().any()):
        return
    if why := forbidden(call):
        raise CaptureError(why)
    if not bool((call.out if valid is None else call.out[valid]).isnan().any()):
        return
    if valid is not None and not bool(valid[:, 0].all()) and call.out.dtype == torch.float64:
        hint = (
            ": in float64, padding on the left attends to nothing, which is 0/0 and spreads; "
            "pad on the right, or take float32"
        )
    what = f"layer {call.name or '(the model itself)'}: the outputs of its heads are NaN"
    raise CaptureError(f"{what} in the model's own eager pass{hint}")


def about_padding(calls: Collection[Call]) -> list[str]:
    """Return sentences where it can be doubted which tokens of some layers are padding.

    Args:
        calls: of self-attention, with their padding.
    """
    unseen, attended = [], []
    for call in calls:
        hidden, given = hidden_keys(call), call.given_mask
        if hidden is None:
            hidden = torch.zeros(call.x.shape[:2], dtype=torch.bool, device=call.x.device)
        if call.valid_keys is None and bool(hidden.any()):
            unseen.append(call.name)
        if given is not None and given.shape == hidden.shape:
            attended += [call.name] if bool(((given == 0) & ~hidden).any()) else []
    unmarked = (
        "no query may attend to some tokens, which are measured as tokens nevertheless; if they "
        "are padding, say so by 0 in an attention_mask of (samples, tokens) among the inputs, "
        "which a model that finds its padding by itself need not take"
    )
    seen = (
        "tokens that attention_mask marks as padding are attended to, and are measured as tokens, "
        "as the model treats them"
    )
    pairs = (unseen, unmarked), (attended, seen)
    return [f"layer {listed(names)}: {said}" for names, said in pairs if names]


def about_zeros(calls: Collection[Call]) -> list[str]:
    """Return a sentence where layers are given tokens that are zero.

    Args:
        calls: of attention, with their padding.
    """
    given = [(call.name, call.given) for call in calls if call.valid_keys is None]
    tokens = [(name, t) for name, t in given if isinstance(t, Tensor) and t.ndim > 2]
    found = [name for name, t in tokens if bool((t == 0).all(-1).any())]
    said = (
        "some tokens are zero, such as those that fill up windows at the edges of a picture; they "
        "are measured like the others: they are moved, and their outputs count"
    )
    return [f"layer {listed(found)}: {said}"] if found else []


def _simplified(call: Call) -> Tensor | None:
    """Return a mask without what padding of queries and of keys makes of it.

    None if nothing remains, and one sample of it where all share it.
    """
    mask = call.additive()
    if mask is None:
        return None
    for valid, axis in ((call.valid_rows, -2), (call.valid_keys, -1)):
        if valid is not None:
            padded = ~valid[:, None].unsqueeze(-3 - axis)
            shape = torch.broadcast_shapes(mask.shape, padded.shape)
            mask = mask.expand(shape).masked_fill(padded, 0.0)
    if bool((mask == 0).all()):
        return None
    return mask[:1] if bool((mask == mask[:1]).all()) else mask
