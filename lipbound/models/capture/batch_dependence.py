"""Telling whether the numbers of a sample depend on what shares its batch, or on a missing cache.

The sample runs alone, or with a cache, and its head outputs are compared.
"""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.errors import CaptureError
from lipbound.models.capture.assembly import about_padding, valid_tokens
from lipbound.models.capture.automatic import stream_names
from lipbound.models.capture.seeing.call import Call
from lipbound.models.capture.seeing.interface import (
    RECORDING_ATTENTION,
    implementation,
    taken,
)
from lipbound.models.capture.seeing.recording import record
from lipbound.schema import INPUT

SAME = 1e-3
"""Relative difference of head outputs up to which they count as the same: rounding, in sums of
another order."""
LEFT = "since it is padded on the left and its positions are counted from there; pad on the right"
LONGEST = (
    "since the longest sample decides for all (rotary tables for long texts, normalisations over "
    "padding); give samples of one length"
)

Outputs = list[tuple[Call, Tensor | None]]
"""Calls of a pass of one sample, with which of their tokens are not padding (None for all)."""


def telling_samples(inputs: Mapping[str, Any]) -> list[int]:
    """Return the samples that show whether numbers depend on what shares the batch.

    They are the one with most padding, and one whose positions begin again.
    """
    found = []
    padding = [(t == 0).sum(-1).cpu() for name, t in inputs.items() if _is_mask(name, t)]
    if padding:
        streams = [counts for counts in padding if len(counts) == len(padding[0])]
        most = torch.stack(streams).amax(0)  # (samples,)
        found += [int(most.argmax())] if bool((most > 0).any()) else []
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and _restarts(positions):
        found.append(int((positions.diff(dim=-1) < 0).any(-1).nonzero()[0]))
    return list(dict.fromkeys(found))


def dependence(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return sentences on what the head outputs of one sample depend on beside its own tokens.

    Args:
        model: of the capture.
        inputs: of this sample alone, with the padding that it has in its batch.
    """
    inputs = taken(model, inputs)
    here, (alone, left) = _outputs(model, inputs), _without_padding(inputs)
    notes = about_padding([call for call, _ in here], [valid for _, valid in here])
    if alone is not None and (off := _difference(here, _outputs(model, alone))) > SAME:
        settable = "position_ids" in inspect.signature(model.forward).parameters
        by_hand = ", or give position_ids" if settable else ""
        notes.append(
            "numbers depend on what shares the batch: head outputs of the sample with most "
            f"padding are up to {off:.1%} off those alone, {LEFT + by_hand if left else LONGEST}"
        )
    if _restarts(inputs.get("position_ids")):
        off = _difference(here, _outputs(model, inputs, cache=True))
        if off > SAME:
            notes.append(
                "position_ids begin again within a sample: without a cache, as it is measured, "
                f"{type(model).__name__} takes that for documents that do not see each other; its "
                f"plain call, with a cache, does not (head outputs differ by up to {off:.1%})"
            )
    return notes


def _restarts(positions: object) -> bool:
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return False
    return bool((positions.diff(dim=-1) < 0).any())


def _outputs(model: nn.Module, inputs: Mapping[str, Any], *, cache: bool = False) -> Outputs:
    with implementation(model, RECORDING_ATTENTION):
        calls = record(model, inputs, cache=cache)
    found: Outputs = []
    for call in calls:
        with suppress(CaptureError):  # of layers that are not chosen
            if stream_names(call) == [INPUT] and len(call.x) == 1:
                found.append((call, valid_tokens(call, inputs)))
    return found


def _difference(some: Outputs, others: Outputs) -> float:
    """Return the largest relative difference of head outputs in two passes, padding left out.

    Layers count that both have for the same tokens.
    """
    found = [0.0]
    for pair in zip(some, others, strict=False):
        a, b = (call.out if valid is None else call.out[valid] for call, valid in pair)
        if a.numel() and a.numel() == b.numel():
            size = a.abs().amax().clamp_min(torch.finfo(a.dtype).tiny)
            found.append(float((a.flatten() - b.flatten()).abs().amax() / size))
    return max(off for off in found if off == off)


def _without_padding(inputs: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """Return one sample without its padding, and whether some of that was on the left.

    The inputs are None where it has none. A mask is about the inputs of its stream, those whose
    names begin as its own does, with as many tokens.
    """
    trimmed, left = dict(inputs), False
    for name, mask in inputs.items():
        if not _is_mask(name, mask) or not bool((mask == 0).any()) or not bool((mask != 0).any()):
            continue
        keep = mask[0] != 0
        left |= not bool(keep[0])
        for other, t in inputs.items():
            same_stream = other.startswith("decoder_") == name.startswith("decoder_")
            if same_stream and isinstance(t, Tensor) and t.ndim > 1 and t.shape[1] == len(keep):
                trimmed[other] = t[:, keep.to(t.device)]
    return (trimmed if any(trimmed[name] is not inputs[name] for name in inputs) else None), left


def _is_mask(name: str, value: Any) -> bool:
    named = name in ("attention_mask", "decoder_attention_mask")
    return named and isinstance(value, Tensor) and value.ndim == 2
