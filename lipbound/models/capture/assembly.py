"""Putting a recorded call and the weights that probing found together as an `Attention`."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.projections import Projections
from lipbound.attention.scoring import Scoring, four_axes
from lipbound.attention.validation import sees_some_key
from lipbound.errors import AttentionError, CaptureError
from lipbound.models.capture.probing import ProbedWeights
from lipbound.models.capture.recorder import Call, hidden_states
from lipbound.models.capture.variants import variants_of

HIDDEN = -9999.0
"""Additive mask entries at or below this value hide a key: some models write -10000 for the lowest
number."""


def assemble(call: Call, weights: ProbedWeights, valid: Tensor | None) -> Attention:
    """The `Attention` of a call, in the dtype of its input.

    Args:
        call: of the layer. weights: what probing found. valid: which tokens are not padding, see
            `valid_tokens`.
    """
    x = hidden_states(call)
    mask = _simplified(_additive(call, x), valid, len(x))
    scale = call.scale if call.scale is not None else call.q.shape[-1] ** -0.5

    def cast(t: Tensor) -> Tensor:
        return t.to(x.dtype)

    w_q, w_k, w_v = (cast(w) for w in weights.w)
    b_q, b_k, b_v = (None if b is None else cast(b) for b in weights.b)
    projections = Projections(
        w_q, w_k, w_v, b_q, b_k, b_v, None if weights.w_o is None else cast(weights.w_o)
    )
    scoring = Scoring(float(scale), mask, tuple(variants_of(call, weights, x.dtype)))
    try:
        return Attention.of(x.detach(), projections, scoring, valid=valid)
    except AttentionError as error:
        raise CaptureError(f"layer {call.name}: {error}") from error


def valid_tokens(call: Call, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Tokens of a layer that are not padding, (samples, N) bool; None when all are real.

    Padding belongs to a stream of tokens, and a model has several (an encoder's and a decoder's,
    text and image). What the layer itself does decides which is its own: where some mask of the
    inputs, (samples, any number), marks padding, those tokens of the layer are padding that no
    query may attend to.
    """
    if not any(_marks_padding(name, t) for name, t in inputs.items()):
        return None
    hidden = hidden_tokens(call)
    return ~hidden if bool(hidden.any()) else None


def hidden_tokens(call: Call) -> Tensor:
    """Tokens of a layer that no query may attend to, (samples, N) bool."""
    x = hidden_states(call)
    mask = _additive(call, x)
    if mask is None:
        return torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    return (four_axes(mask) <= HIDDEN).all(2).all(1).expand(x.shape[:2])


def check_mask(call: Call, valid: Tensor | None) -> None:
    """Raise CaptureError where some token of a layer that is not padding may attend to none."""
    x = hidden_states(call)
    mask = _additive(call, x)
    if mask is None or sees_some_key(four_axes(mask), x.shape[1], valid):
        return
    window = call.extras.get("sliding_window")
    width = "" if window is None else f" (its sliding window is {window} tokens wide)"
    raise CaptureError(
        f"layer {call.name}: its mask forbids some token every key{width}, so its softmax is "
        "undefined; change the model's configuration, or "
        "give inputs in which every token that is no padding may attend to one"
    )


def about_padding(calls: Collection[Call], valid: Collection[Tensor | None]) -> list[str]:
    """Sentences where it can be doubted which tokens of the layers of some calls are padding;
    ``valid``: which are not, None for all."""
    unseen, attended = [], []
    for call, real in zip(calls, valid, strict=True):
        hidden, given = hidden_tokens(call), call.given_mask
        if real is None and bool(hidden.any()):
            unseen.append(call.name)
        if (
            given is not None
            and given.shape == hidden.shape
            and bool(((given == 0) & ~hidden).any())
        ):
            attended.append(call.name)
    return [
        f"layer {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {what}"
        for names, what in (
            (unseen, "no query may attend to some tokens, which are measured as tokens "
                     "nevertheless; if they are padding, say so by 0 in an "
             "attention_mask of (samples, tokens)"),
            (attended, "tokens that attention_mask marks as padding are attended to, and are "
                       "measured as tokens, as the model treats them"),
        ) if names
    ]  # fmt: skip


def _marks_padding(name: str, value: object) -> bool:
    return (
        "mask" in name
        and isinstance(value, Tensor)
        and value.ndim == 2
        and bool((value == 0).any())
    )


def _simplified(mask: Tensor | None, valid: Tensor | None, samples: int) -> Tensor | None:
    """A mask without what padding makes of it (that is `valid`'s business), None if nothing
    remains, and one for all samples that share it."""
    if mask is None:
        return None
    if valid is not None:
        padded = ~(valid[:, None, :, None] & valid[:, None, None, :])
        mask = mask.expand(samples, *mask.shape[1:-2], *[valid.shape[1]] * 2).masked_fill(
            padded.expand(samples, mask.shape[1], -1, -1), 0.0
        )
    if bool((mask == 0).all()):
        return None
    if mask.shape[0] > 1 and bool((mask == mask[:1]).all()):
        return mask[:1]
    return mask


def _additive(call: Call, x: Tensor) -> Tensor | None:
    """What a call adds to its scores: its mask, and biases of relative positions."""
    mask, bias = call.mask, call.extras.get("position_bias")
    if mask is not None:
        mask = four_axes(mask[..., : x.shape[1]])  # one made for a cache may be wider
        mask = mask.to(x.dtype)
    if bias is None:
        return mask
    bias = bias.detach().to(x.dtype)
    return (
        bias if mask is None else (mask + bias).clamp_min(torch.finfo(x.dtype).min)
    )  # the lowest number and a bias may overflow
