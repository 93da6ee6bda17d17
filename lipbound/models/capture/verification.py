"""Checking that a capture reproduces the model.

Rebuilt tensors are compared with those of the forward pass, and with what the model's own eager
attention makes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError, UnfaithfulPassError
from lipbound.models.capture.head_outputs import CAPTURE_TOLERANCE
from lipbound.models.capture.probing import ProbedWeights
from lipbound.models.capture.seeing.call import INTERFACE, Call
from lipbound.models.capture.seeing.interface import forward, implementation


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
                "normalisation, and a rotation or an offset for each position: they are made of "
                "several tokens, of another input, or in another way"
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
        returned[module].append(output[0] if isinstance(output, tuple) else output)

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in entered]
    hooks += [module.register_forward_hook(after) for module in returned]
    samples = calls[0].samples
    # which axis of others' inputs counts samples is not known
    known = any(call.way == INTERFACE for call in calls)
    whole = not known or samples == 1
    try:
        # eager attention adds True and False as numbers
        with implementation(model, "sdpa" if any(call.boolean for call in calls) else "eager"):
            if not whole:
                try:
                    forward(model, one_sample(inputs, sample, samples))
                except CaptureError:  # samples are no samples: codebooks, frames of one film
                    whole = True
                    for found in (*entered.values(), *returned.values()):
                        found.clear()
            if whole:
                forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()

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
    made = call.projected if call.gated else call.out.flatten(2)
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
    count, own, valid = recorded.numel() // own.numel(), own.to(recorded), call.valid_rows
    if not recorded.is_floating_point() or count not in (1, call.samples):
        return 0.0
    if recorded.numel() % own.numel():
        return 0.0
    part = recorded.reshape(count, *own.shape)[sample if count > 1 else 0]
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
