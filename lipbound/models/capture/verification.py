"""Checking that a capture reproduces the model.

Rebuilt tensors are compared with those of the forward pass, and with what the model's own eager
attention makes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError, UnfaithfulPassError
from lipbound.models.capture.output_projection import CAPTURE_TOLERANCE
from lipbound.models.capture.probing import ProbedLayer, ProbedWeights
from lipbound.models.capture.seeing.call import INTERFACE, Call
from lipbound.models.capture.seeing.interface import RECORDING_ATTENTION, forward, implementation

SIDES = ("queries", "keys", "values")


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


def check_call(call: Call) -> None:
    """Check that a call is self-attention of one tensor of tokens.

    Raises:
        CaptureError: it is not.
    """
    _ = call.x
    if call.changed and call.way != INTERFACE and not call.gated:
        raise call.unsupported(call.changed)
    if call.run.calls > 1:
        raise call.unsupported(
            f"calls attention {call.run.calls} times whenever it runs (differential attention, "
            "or tokens part by part)"
        )


def check_defined(call: Call, valid: Tensor | None) -> None:
    """Check that the outputs of a call are numbers.

    Args:
        call: of the layer.
        valid: which of its tokens are not padding, (samples, N) bool, or None.

    Raises:
        CaptureError: they are not.
    """
    heads, hint = call.out if valid is None else call.out[valid], ""
    if not bool(heads.isnan().any()):
        return
    if valid is not None and not bool(valid[:, 0].all()) and call.out.dtype == torch.float64:
        hint = (
            ": in float64, padding on the left attends to nothing, which is 0/0 and spreads; "
            "pad on the right, or take float32"
        )
    raise CaptureError(
        f"layer {call.name}: the outputs of its heads are NaN in the model's own eager pass{hint}"
    )


def check_rebuilt(
    model: nn.Module, call: Call, attention: Attention, weights: ProbedWeights
) -> float:
    """Return the largest error of rebuilt queries, keys, values and head outputs.

    Every sample and head of the model's recorded forward pass is compared; an error above
    `CAPTURE_TOLERANCE` is refused, since the layer is then not what `Attention` describes.
    """
    att, groups = attention, call.q.shape[1] // call.k.shape[1]
    reach = torch.linalg.vector_norm(att.x, dim=-1).amax(-1, keepdim=True)
    order = slice(None) if weights.turns is None else weights.turns.order
    k, v = (t.repeat_interleave(groups, 1) for t in (call.k[..., order], call.v))
    error = 0.0
    for side, mine, own, w, norm, valid in (
        (0, att.q, call.q[..., order], att.w_q, weights.norm_q, att.valid_rows),
        (1, att.k, k, att.w_k, weights.norm_k, att.valid_keys),
        (2, att.v, v, att.w_v, weights.norm_v, att.valid_keys),
    ):
        size = reach * torch.linalg.matrix_norm(w) if norm is None else torch.zeros_like(reach)
        difference = head_error(mine, own, size, valid)
        if not difference <= CAPTURE_TOLERANCE:
            _refuse_projection(model, call, side, difference)
        error = max(error, difference)
    size = att.v.abs().amax((-1, -2))
    difference = head_error(att.ungated, call.out.transpose(1, 2), size, att.valid_rows)
    return max(error, _tolerated(call, difference))


class EagerAttention(NamedTuple):
    """Output and input of a model's own eager attention at one sample; None where unknown."""

    outputs: Tensor | None
    x: Tensor | None


def own_outputs(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    calls: Sequence[Call],
    sample: int,
    samples: int,
) -> dict[int, EagerAttention]:
    """Run one sample through the model's untouched eager attention; all where none uses it.

    Args:
        model: that was captured.
        inputs: of all samples.
        calls: of the layers to compare.
        sample: its number.
        samples: how many there are.

    Returns:
        What was seen by the identity of each call, on the device of its tensors.
    """
    seen: dict[int, list[Any]] = {id(c.consumer or c.module): [] for c in calls}
    given: dict[int, list[Any]] = {id(c.module): [] for c in calls}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[id(module)].append(args[0] if args else kwargs.get("hidden_states"))

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[id(module)].append(args[0])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen[id(module)].append(output[0] if isinstance(output, tuple) else output)

    consumers = {c.consumer for c in calls if c.consumer is not None}
    others = {c.module for c in calls if c.consumer is None} - consumers
    owners = {c.module for c in calls}
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in owners]
    hooks += [module.register_forward_pre_hook(before) for module in consumers]
    hooks += [module.register_forward_hook(after) for module in others]
    # eager attention adds True and False as numbers
    boolean = any(call.boolean for call in calls)
    try:
        with implementation(model, "sdpa" if boolean else "eager"):
            # which axis of others' inputs counts samples is not known
            known = any(call.way == INTERFACE for call in calls)
            whole = not known or samples == 1
            if not whole:
                try:
                    forward(model, one_sample(inputs, sample, samples))
                except CaptureError:  # samples are no samples: codebooks, frames of one film
                    whole = True
                    for found in (*seen.values(), *given.values()):
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
            each = len(own) // samples
            own = own[sample * each : (sample + 1) * each]
        return own.to(call.q.device)

    return {
        id(c): EagerAttention(of(c, seen[id(c.consumer or c.module)]), of(c, given[id(c.module)]))
        for c in calls
    }


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


def verify_outputs(call: Call, attention: Attention, seen: EagerAttention, sample: int) -> float:
    """Return the error of one sample's head outputs against the model's untouched attention.

    An error above `CAPTURE_TOLERANCE` is refused, and where nothing of the right size was seen.

    Args:
        call: of the layer.
        attention: rebuilt.
        seen: of the model's own.
        sample: its number.
    """
    windows = max(1, attention.samples // call.samples)
    own, part = seen.outputs, slice(sample * windows, (sample + 1) * windows)
    size = windows * attention.rows * attention.heads * attention.d_v
    if own is None or own.numel() != size:
        nowhere = "hands on the outputs of its heads in no form in which they can be checked"
        raise call.unsupported(call.changed or nowhere)
    shape = (windows, attention.rows, attention.heads, attention.d_v)
    own = own.reshape(shape).transpose(1, 2)
    valid = None if attention.valid_rows is None else attention.valid_rows[part]
    floor = attention.v[part].abs().amax((-1, -2))
    difference = head_error(attention.out[part], own, floor, valid)
    return _tolerated(call, difference)


def check_pass(call: Call, seen: EagerAttention, sample: int, valid: Tensor | None = None) -> None:
    """Check that the recorded pass is what the model computes on its own.

    Args:
        call: recorded.
        seen: of a pass of one sample through the model's own attention.
        sample: its number.
        valid: which of the tokens of the layer are not padding, (samples, N) bool, or None.

    Raises:
        UnfaithfulPassError: it is not.
    """
    run = call.run
    given = run.args[0] if run.args else run.kwargs.get("hidden_states")
    moved = _apart(call, given, seen.x, sample, valid)
    if moved is not None and not moved <= CAPTURE_TOLERANCE:
        raise call.unsupported(
            "is given other token vectors when the model runs on one sample of the same inputs: it "
            "draws random numbers in evaluation, or one sample changes with the others (give it "
            "the random numbers where it takes them as an input, or one sample)",
            UnfaithfulPassError,
        )
    made = call.projected if call.gated else call.out.flatten(2)
    recorded = run.returned if call.consumer is None else made
    off = _apart(call, recorded, seen.outputs, sample, valid)
    if off is not None and not off <= CAPTURE_TOLERANCE and not call.boolean:
        raise UnfaithfulPassError(
            f"layer {call.name}: what it computes when it is captured differs from the model's own "
            f"eager attention by {off:.1e} relative (allowed {CAPTURE_TOLERANCE:.0e})"
        )


def _apart(
    call: Call, recorded: object, own: object, sample: int, valid: Tensor | None
) -> float | None:
    """Return the relative difference of a sample in two passes, or None where shapes differ."""
    if not isinstance(recorded, Tensor) or not isinstance(own, Tensor) or not own.numel():
        return None
    if not recorded.is_floating_point() or recorded.numel() % own.numel():
        return None
    count, own = recorded.numel() // own.numel(), own.to(recorded)
    if count not in (1, call.samples):
        return None
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
    if call.changed and call.consumer is None:
        raise call.unsupported(call.changed)
    raise CaptureError(
        f"layer {call.name}: rebuilt head outputs differ from the model's own eager attention by "
        f"{difference:.1e} relative (allowed {CAPTURE_TOLERANCE:.0e}); its attention is not "
        "softmax(scale q k^T + mask) v, nor a variant of it known here"
    )


def _refuse_projection(model: nn.Module, call: Call, side: int, difference: float) -> NoReturn:
    """Say why queries (side 0), keys (1) or values (2) are not rebuilt.

    Raises:
        CaptureError: always.
    """
    if call.sides != "qkv":
        raise call.unsupported(f"makes its {SIDES[side]} of more than one stream, or not affinely")
    with implementation(model, RECORDING_ATTENTION):
        depends = ProbedLayer(call).depends(side)
    name = SIDES[side]
    if not depends.on_tokens:
        raise call.unsupported(
            f"takes its {name} from another input than its first (cross-attention, or {name} "
            "shared with another layer)"
        )
    if depends.on_others:
        raise call.unsupported(f"makes its {name} of several tokens (by a convolution, for one)")
    if depends.on_position:
        raise call.unsupported(
            f"makes its {name} depend on the position of a token otherwise than by a rotation of "
            "queries and keys"
        )
    raise CaptureError(
        f"layer {call.name} ({type(call.module).__name__}): {name} are not one affine map of the "
        f"layer's input (off by {difference:.1e} relative), but for a normalisation and a "
        "rotation: the layer transforms them in another way between projection and scores"
    )
