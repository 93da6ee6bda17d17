"""Telling whether the numbers of a sample depend on what shares its batch, or on a missing cache.

The sample runs alone, or with a cache, and its head outputs are compared.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.errors import CaptureError
from lipbound.models.capture.assembly import about_padding
from lipbound.models.capture.seeing.call import Call
from lipbound.models.capture.seeing.interface import RECORDING_ATTENTION, implementation, taken
from lipbound.models.capture.seeing.recording import record
from lipbound.models.capture.streams import Padding, stream_names
from lipbound.schema import INPUT

SAME = 1e-3
"""Relative difference of head outputs up to which they count as the same: rounding, in sums of
another order."""
LEFT = "since it is padded on the left and its positions are counted from there; pad on the right"
LONGEST = (
    "since the longest sample decides for all (rotary tables for long texts, normalisations over "
    "padding); give samples of one length"
)


def telling_samples(inputs: Mapping[str, Any]) -> list[int]:
    """Return the samples that show whether numbers depend on what shares the batch.

    They are the one with most padding, and one whose positions begin again.
    """
    padding = [(t == 0).sum(-1).cpu() for name, t in inputs.items() if _is_mask(name, t)]
    streams = [counts for counts in padding if len(counts) == len(padding[0])]
    counts = torch.stack(streams).amax(0) if streams else torch.zeros(1)  # (samples,)
    found = [int(counts.argmax())] if bool((counts > 0).any()) else []
    restarts = _restarts(inputs.get("position_ids"))  # (samples,)
    found += [int(restarts.nonzero()[0])] if bool(restarts.any()) else []
    return list(dict.fromkeys(found))


def dependence(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return sentences on what the head outputs of one sample depend on beside its own tokens.

    Args:
        model: of the capture.
        inputs: of this sample alone, with the padding that it has in its batch.
    """
    inputs = taken(model, inputs)
    here, (alone, left) = _calls(model, inputs), _without_padding(inputs)
    notes = about_padding(here)
    if alone is not None and (off := _difference(here, _calls(model, alone))) > SAME:
        settable = "position_ids" in inspect.signature(model.forward).parameters
        by_hand = ", or give position_ids" if settable else ""
        notes.append(
            "numbers depend on what shares the batch: head outputs of the sample with most "
            f"padding are up to {off:.1%} off those alone, {LEFT + by_hand if left else LONGEST}"
        )
    if not bool(_restarts(inputs.get("position_ids")).any()):
        return notes
    if (off := _difference(here, _calls(model, inputs, cache=True))) > SAME:
        notes.append(
            "position_ids begin again within a sample: without a cache, as it is measured, "
            f"{type(model).__name__} takes that for documents that do not see each other; its "
            f"plain call, with a cache, does not (head outputs differ by up to {off:.1%})"
        )
    return notes


def _restarts(positions: object) -> Tensor:
    """Return which samples have positions (samples, N) that begin again."""
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return torch.zeros(1, dtype=torch.bool)
    return (positions.diff(dim=-1) < 0).any(-1)


def _calls(model: nn.Module, inputs: Mapping[str, Any], *, cache: bool = False) -> list[Call]:
    """Return the calls of self-attention in a pass of one sample, with their padding."""
    found = []
    with implementation(model, RECORDING_ATTENTION):
        for call in record(model, inputs, cache=cache):
            with suppress(CaptureError):  # of layers that are not chosen
                if stream_names(call) == [INPUT] and len(call.x) == 1:
                    found.append(call)
    Padding(found, inputs)
    return found


def _difference(some: Sequence[Call], others: Sequence[Call]) -> float:
    """Return the largest relative difference of head outputs in two passes, padding left out.

    Layers count that both have for the same tokens.
    """
    found = [0.0]
    for pair in zip(some, others, strict=False):
        a, b = (c.out if c.valid_rows is None else c.out[c.valid_rows] for c in pair)
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
