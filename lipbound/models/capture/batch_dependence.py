"""Runs of one sample alone, or with a cache, that show whether its numbers depend on what shares
its batch, or on the missing cache."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lipbound.errors import CaptureError
from lipbound.models.capture.assembly import about_padding, valid_tokens
from lipbound.models.capture.recorder import (
    RECORDING_ATTENTION,
    Call,
    hidden_states,
    implementation,
    record,
    taken,
)

SAME = 1e-3
"""Relative difference of head outputs up to which they count as the same: rounding, in sums of
another order."""

LEFT = "since it is padded on the left and its positions are counted from there; pad on the right"
LONGEST = (
    "since the longest sample decides for all (rotary tables for long texts, "
    "normalisations over padding); give samples of one length"
)


def telling_samples(inputs: Mapping[str, Any]) -> list[int]:
    """The samples that show whether numbers depend on what shares the batch: the one with most
    padding, and one whose positions begin again."""
    found = []
    padding = [(t == 0).sum(-1).cpu() for name, t in inputs.items() if _is_mask(name, t)]
    if padding:
        most = torch.stack([counts for counts in padding if len(counts) == len(padding[0])]).amax(
            0
        )  # of the streams, (samples,)
        found += [int(most.argmax())] if bool((most > 0).any()) else []
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and _restarts(positions):
        found.append(int((positions.diff(dim=-1) < 0).any(-1).nonzero()[0]))
    return list(dict.fromkeys(found))


def dependence(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[str]:
    """Sentences on what the head outputs of one sample depend on beside its own tokens.

    Args:
        model: of the capture.
        inputs: of this sample alone, with the padding that it has in its batch.
    """
    inputs = taken(model, inputs)
    calls = _calls(model, inputs)
    here, (alone, left) = _outputs(calls, inputs), _without_padding(inputs)
    notes = about_padding([call for call, _ in here], [valid for _, valid in here])
    if alone is not None:
        off = _difference(here, _outputs(_calls(model, alone), alone))
        if off > SAME:
            by_hand = (
                ", or give position_ids"
                if "position_ids" in inspect.signature(model.forward).parameters
                else ""
            )
            why = LEFT + by_hand if left else LONGEST
            notes.append(
                "numbers depend on what shares the batch: head outputs of the sample with most "
                f"padding are up to {off:.1%} off those alone, {why}"
            )
    if _restarts(inputs.get("position_ids")):
        off = _difference(here, _outputs(_calls(model, inputs, cache=True), inputs))
        if off > SAME:
            notes.append(
                "position_ids begin again within a sample: without a cache, as it is measured, "
                f"{type(model).__name__} takes that for documents that "
                "do not see each other; its plain call, with a cache, does not (head outputs "
                f"differ by up to {off:.1%})"
            )
    return notes


def _restarts(positions: object) -> bool:
    return (
        isinstance(positions, Tensor)
        and positions.ndim == 2
        and bool((positions.diff(dim=-1) < 0).any())
    )


def _calls(model: PreTrainedModel, inputs: Mapping[str, Any], *, cache: bool = False) -> list[Call]:
    with implementation(model, RECORDING_ATTENTION):
        return record(model, inputs, cache=cache)


def _outputs(calls: list[Call], inputs: Mapping[str, Any]) -> list[tuple[Call, Tensor | None]]:
    """The calls of layers of one sample, with which of their tokens are not padding."""
    found = []
    for call in calls:
        with suppress(CaptureError):  # of layers that are not chosen
            if len(hidden_states(call)) == 1:
                found.append((call, valid_tokens(call, inputs)))
    return found


def _difference(
    some: list[tuple[Call, Tensor | None]], others: list[tuple[Call, Tensor | None]]
) -> float:
    """The largest relative difference of head outputs in two passes, padding left out, of the
    layers that both have for the same tokens."""
    found = [0.0]
    for a, b in zip(some, others, strict=False):
        left, right = (call.out if valid is None else call.out[valid] for call, valid in (a, b))
        if left.numel() and left.numel() == right.numel():
            found.append(
                float(
                    (left.flatten() - right.flatten()).abs().amax()
                    / left.abs().amax().clamp_min(torch.finfo(left.dtype).tiny)
                )
            )
    return max(off for off in found if off == off)


def _without_padding(inputs: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The inputs of one sample without its padding, None where it has none, and whether some of
    that was on the left.

    A mask is about the inputs of its stream, those whose names begin as its own does, with as many
    tokens.
    """
    trimmed, left = dict(inputs), False
    for name, mask in inputs.items():
        if not _is_mask(name, mask) or not bool((mask == 0).any()) or not bool((mask != 0).any()):
            continue
        keep = mask[0] != 0
        left |= not bool(keep[0])
        for other, t in inputs.items():
            if (
                isinstance(t, Tensor)
                and t.ndim > 1
                and t.shape[1] == len(keep)
                and other.startswith("decoder_") == name.startswith("decoder_")
            ):
                trimmed[other] = t[:, keep.to(t.device)]
    return (trimmed if any(trimmed[name] is not inputs[name] for name in inputs) else None), left


def _is_mask(name: str, value: Any) -> bool:
    return (
        name in ("attention_mask", "decoder_attention_mask")
        and isinstance(value, Tensor)
        and value.ndim == 2
    )
