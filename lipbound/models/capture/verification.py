"""Checking that a capture reproduces the model, and that the numbers of a sample are its own.

Rebuilt tensors are compared with those of the forward pass, and with what the model's own eager
attention makes. A sample also runs alone, or with a cache, and its head outputs are compared.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError, UnfaithfulPassError
from lipbound.models.capture.assembly import about_padding
from lipbound.models.capture.outputs import from_heads
from lipbound.models.capture.probing import ProbedWeights
from lipbound.models.capture.rerun import CAPTURE_TOLERANCE, relative_error
from lipbound.models.capture.seeing import interface
from lipbound.models.capture.seeing.call import INTERFACE, Call, first_tensor
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


def head_error(mine: Tensor, reference: Tensor, floor: Tensor, valid: Tensor | None) -> float:
    """Return the largest difference of two tensors, relative to each head's largest entry.

    Args:
        mine: (samples, heads, N, d).
        reference: (samples, heads, N, d).
        floor: (samples or 1, heads), size of the numbers a head is computed from, below a
            thousandth of which no head's entries are taken seriously: they are sums that cancel.
        valid: (samples, N) bool, False at padding, which is left out; or None.
    """
    difference, size = (mine - reference).abs(), reference.abs()
    if valid is not None:
        padded = ~valid[:, None, :, None]
        difference, size = difference.masked_fill(padded, 0), size.masked_fill(padded, 0)
    scale = torch.maximum(size.amax((-1, -2)), 1e-3 * floor.to(size.dtype))
    scale = scale.clamp_min(torch.finfo(size.dtype).tiny)
    return float((difference.amax((-1, -2)) / scale).amax())


def check_rebuilt(call: Call, attention: Attention, weights: ProbedWeights) -> float:
    """Return the largest error of rebuilt queries, keys, values and head outputs.

    Every sample and head of the model's recorded forward pass is compared; an error above
    `CAPTURE_TOLERANCE` is refused, since the layer is then not what `Attention` describes.
    """
    att, groups = attention, call.q.shape[1] // call.k.shape[1]
    reach = torch.linalg.vector_norm(att.x, dim=-1).amax(-1, keepdim=True)
    order = slice(None) if weights.turns is None else weights.turns.order
    k, v = (t.repeat_interleave(groups, 1) for t in (call.k[..., order], call.v))
    error = 0.0
    for name, mine, own, w, norm, valid in (
        ("queries", att.q, call.q[..., order], att.w_q, weights.norms[0], att.valid_rows),
        ("keys", att.k, k, att.w_k, weights.norms[1], att.valid_keys),
        ("values", att.v, v, att.w_v, weights.norms[2], att.valid_keys),
    ):
        size = reach * torch.linalg.matrix_norm(w) if norm is None else torch.zeros_like(reach)
        difference = head_error(mine, own, size, valid)
        if not difference <= CAPTURE_TOLERANCE:
            raise CaptureError(
                f"layer {call.name} ({type(call.module).__name__}): {name} are not one affine map "
                f"of the layer's tokens (off by {difference:.1e} relative), but for a "
                "normalisation and a rotation: they are made of several tokens, of another input, "
                "or in another way"
            )
        error = max(error, difference)
    size = att.v.abs().amax((-1, -2))
    difference = head_error(att.ungated, call.out.transpose(1, 2), size, att.valid_rows)
    return max(error, _tolerated(call, difference))


class OwnOutputs(NamedTuple):
    """Output and input of a model's own eager attention at a sample; None where unknown."""

    outputs: Tensor | None
    x: Tensor | None
    sample: int


def own_outputs(
    model: nn.Module, inputs: Mapping[str, Tensor], calls: Sequence[Call], sample: int
) -> list[OwnOutputs]:
    """Run one sample through the model's untouched eager attention; all where none uses it.

    Args:
        model: that was captured.
        inputs: of all samples.
        calls: of the layers to compare.
        sample: its number.

    Returns:
        What was seen for each call, on the device of its tensors.
    """
    entered: dict[nn.Module, list[Any]] = {c.consumer: [] for c in calls if c.consumer is not None}
    entered |= {c.module: [] for c in calls}
    returned: dict[nn.Module, list[Any]] = {c.module: [] for c in calls}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[module].append(args[0] if args else kwargs.get("hidden_states"))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        returned[module].append(first_tensor(output))

    samples = calls[0].samples
    # which axis of others' inputs counts samples is not known
    known = any(call.way == INTERFACE for call in calls)
    whole = not known or samples == 1
    # eager attention adds True and False as numbers
    name = "sdpa" if any(call.boolean for call in calls) else "eager"
    with interface.implementation(model, name), ExitStack() as hooks:
        for module in entered:
            hook = module.register_forward_pre_hook
            hooks.enter_context(hook(before, with_kwargs=True, prepend=True))
        for module in returned:
            hooks.enter_context(module.register_forward_hook(after))
        if not whole:
            try:
                interface.forward(model, one_sample(inputs, sample, samples))
            except CaptureError:  # samples are no samples: codebooks, frames of one film
                whole = True
                for found in (*entered.values(), *returned.values()):
                    found.clear()
        if whole:
            interface.forward(model, inputs)

    def of(call: Call, found: list[Any]) -> Tensor | None:
        own = found[call.turn] if call.turn < len(found) else None
        if not isinstance(own, Tensor):
            return None
        if whole and known and own.ndim > 1 and not len(own) % samples:
            own = own.unflatten(0, (samples, -1))[sample]
        return own.to(call.q.device)

    outputs = [returned[c.module] if c.consumer is None else entered[c.consumer] for c in calls]
    return [
        OwnOutputs(of(call, found), of(call, entered[call.module]), sample)
        for call, found in zip(calls, outputs, strict=True)
    ]


def one_sample(
    inputs: Mapping[str, Any], sample: int, samples: int | None = None
) -> dict[str, Any]:
    """Return the model inputs of one of so many samples; by default as many as a tensor has."""
    lengths = (len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim)
    count, part = samples or next(lengths, 0), slice(sample, sample + 1)

    def of(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        # positions have a row each for time, height and width
        if name == "position_ids" and value.ndim == 3:
            return value[:, part] if value.shape[1] == count else value
        return value[part] if len(value) == count else value

    return {name: of(name, value) for name, value in inputs.items()}


def verify_outputs(call: Call, attention: Attention, own: OwnOutputs) -> float:
    """Return the error of one sample's head outputs against the model's untouched attention.

    An error above `CAPTURE_TOLERANCE` is refused, and where nothing of the right size was seen.

    Args:
        call: of the layer.
        attention: rebuilt.
        own: the model's own.
    """
    if call.consumer is None and from_heads(call) is not None:
        return 0.0  # what its module returns was compared in both passes
    windows = max(1, attention.samples // call.samples)
    part = slice(own.sample * windows, (own.sample + 1) * windows)
    mine = attention.out[part]
    if own.outputs is None or own.outputs.numel() != mine.numel():
        raise call.unsupported(
            "hands on the outputs of its heads in no form in which they can be checked"
        )
    reference = own.outputs.reshape(mine.transpose(1, 2).shape).transpose(1, 2)
    valid = None if attention.valid_rows is None else attention.valid_rows[part]
    floor = attention.v[part].abs().amax((-1, -2))
    return _tolerated(call, head_error(mine, reference, floor, valid))


def check_pass(call: Call, own: OwnOutputs) -> None:
    """Check that the recorded pass is what the model computes on its own.

    Args:
        call: recorded.
        own: of a pass of one sample through the model's own attention.

    Raises:
        UnfaithfulPassError: it is not.
    """
    run = call.run
    given = run.args[0] if run.args else run.kwargs.get("hidden_states")
    moved = _apart(call, given, own.x, own.sample)
    if moved > CAPTURE_TOLERANCE:
        raise call.unsupported(
            "is given other token vectors when the model runs on one sample of the same inputs: it "
            "draws random numbers in evaluation, or one sample changes with the others (give it "
            "the random numbers where it takes them as an input, or one sample)",
            UnfaithfulPassError,
        )
    made = call.projected if call.gated else call.out
    off = _apart(call, run.returned if call.consumer is None else made, own.outputs, own.sample)
    if off > CAPTURE_TOLERANCE and not call.boolean:
        raise UnfaithfulPassError(
            f"layer {call.name}: what it computes when it is captured differs from the model's own "
            f"eager attention by {off:.1e} relative (allowed {CAPTURE_TOLERANCE:.0e})"
        )


def _apart(call: Call, recorded: object, own: object, sample: int) -> float:
    """Return the relative difference of a sample in two passes, padding left out.

    It is 0 where shapes differ, so that they cannot be compared.
    """
    if not isinstance(recorded, Tensor) or not isinstance(own, Tensor) or not own.numel():
        return 0.0
    (count, rest), valid = divmod(recorded.numel(), own.numel()), call.valid_rows
    if rest or count not in (1, call.samples) or not recorded.is_floating_point():
        return 0.0
    part, own = recorded.reshape(count, *own.shape)[sample if count > 1 else 0], own.to(recorded)
    if valid is not None and own.ndim == 3 and own.shape[1] == valid.shape[1]:
        part, own = part[:, valid[sample]], own[:, valid[sample]]
    size = own.nan_to_num().abs().amax().clamp_min(torch.finfo(own.dtype).tiny)
    return float((part - own).nan_to_num().abs().amax() / size)


def _tolerated(call: Call, difference: float) -> float:
    """Return an error of head outputs that is within `CAPTURE_TOLERANCE`.

    Raises:
        CaptureError: it is not.
    """
    if difference <= CAPTURE_TOLERANCE:
        return difference
    raise CaptureError(
        f"layer {call.name}: rebuilt head outputs differ from the model's own eager attention by "
        f"{difference:.1e} relative (allowed {CAPTURE_TOLERANCE:.0e}); its attention is not "
        "softmax(scale q k^T + mask) v, nor a variant of it known here"
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
    inputs = interface.taken(model, inputs)
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
    with interface.implementation(model, interface.RECORDING_ATTENTION):
        for call in record(model, inputs, cache=cache)[0]:
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
            found.append(relative_error(b.flatten(), a.flatten()))
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
