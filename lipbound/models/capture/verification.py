"""Whether a capture reproduces the model: rebuilt tensors against those of the forward pass, and
against the model's own eager attention."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError
from lipbound.models.capture.probed_layer import POSITIONS, ProbedLayer
from lipbound.models.capture.probing import CAPTURE_TOLERANCE, ProbedWeights
from lipbound.models.capture.recorder import (
    RECORDING_ATTENTION,
    Call,
    forward,
    hidden_states,
    implementation,
)


def head_error(mine: Tensor, reference: Tensor, floor: Tensor, valid: Tensor | None) -> float:
    """Largest difference of two (samples, heads, N, d) tensors, relative to each head's own largest
    entry, padding left out.

    ``floor`` (samples or 1, heads): size of the numbers a head is computed from, below a thousandth
    of which no head's entries are taken seriously: they are sums that cancel.
    """
    difference, size = (mine - reference).abs(), reference.abs()
    if valid is not None:
        padded = ~valid[:, None, :, None]
        difference, size = difference.masked_fill(padded, 0), size.masked_fill(padded, 0)
    scale = torch.maximum(size.amax((-1, -2)), 1e-3 * floor.to(size.dtype)).clamp_min(
        torch.finfo(size.dtype).tiny
    )
    return float((difference.amax((-1, -2)) / scale).amax())


def check_call(call: Call, valid: Tensor | None) -> None:
    """Raise CaptureError for a call that is not the self-attention of one tensor of tokens,
    ``valid`` of them, or whose output is not a number."""
    hidden_states(call)
    if call.run.calls > 1:
        raise call.unsupported(
            f"calls attention {call.run.calls} times whenever it runs (differential attention, "
            "or tokens part by part)"
        )
    heads = call.out if valid is None else call.out[valid]
    if not bool(heads.isnan().any()):
        return
    hint = ""
    if valid is not None and not bool(valid[:, 0].all()) and call.out.dtype == torch.float64:
        hint = (
            ": in float64, padding on the left attends to nothing, which is 0/0 and spreads; "
            "pad on the right, or take float32"
        )
    raise CaptureError(
        f"layer {call.name}: the outputs of its heads are NaN in the model's own eager pass{hint}"
    )


def check_rebuilt(
    model: PreTrainedModel, call: Call, attention: Attention, weights: ProbedWeights
) -> float:
    """Largest error of rebuilt queries, keys, values and head outputs, on every sample and head of
    a model's recorded forward pass.

    Raises:
        CaptureError: an error above `CAPTURE_TOLERANCE`: the layer is not what `Attention`
            describes.
    """
    valid, groups = attention.valid, call.q.shape[1] // call.k.shape[1]
    reach = torch.linalg.vector_norm(attention.x, dim=-1).amax(-1, keepdim=True)
    order = slice(None) if weights.order is None else weights.order
    error = 0.0
    for name, mine, recorded, w, norm in (
        ("queries", attention.q, call.q[..., order], attention.w_q, weights.norm_q),
        (
            "keys",
            attention.k,
            call.k[..., order].repeat_interleave(groups, 1),
            attention.w_k,
            weights.norm_k,
        ),
        ("values", attention.v, call.v.repeat_interleave(groups, 1), attention.w_v, None),
    ):
        size = reach * torch.linalg.matrix_norm(w) if norm is None else torch.zeros_like(reach)
        difference = head_error(mine, recorded, size, valid)
        if not difference <= CAPTURE_TOLERANCE:
            raise _not_affine(model, call, name, difference)
        error = max(error, difference)
    difference = head_error(
        attention.out, call.out.transpose(1, 2), attention.v.abs().amax((-1, -2)), valid
    )
    if not difference <= CAPTURE_TOLERANCE:
        raise _different(call, difference)
    return max(error, difference)


class EagerAttention(NamedTuple):
    """Output and input of the model's untouched eager attention at one sample; None where they
    cannot be told."""

    outputs: Tensor | None
    x: Tensor | None

    def to(self, device: torch.device) -> "EagerAttention":
        """The same on a device."""
        return EagerAttention(*(None if t is None else t.to(device) for t in self))


def own_outputs(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    calls: Sequence[Call],
    sample: int,
    samples: int,
) -> dict[int, EagerAttention]:
    """Run one sample of ``samples`` through the model's untouched eager attention: `EagerAttention`
    by the identity of each call."""
    seen: dict[int, list[Any]] = {id(c.consumer or c.module): [] for c in calls}
    given: dict[int, list[Any]] = {id(c.module): [] for c in calls}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[id(module)].append(args[0] if args else kwargs.get("hidden_states"))

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[id(module)].append(args[0])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen[id(module)].append(output[0] if isinstance(output, tuple) else output)

    hooks = [
        module.register_forward_pre_hook(enter, with_kwargs=True)
        for module in {id(c.module): c.module for c in calls}.values()
    ]
    for module in {id(m): m for m in (c.consumer or c.module for c in calls)}.values():
        consumer = any(c.consumer is module for c in calls)
        hooks.append(
            module.register_forward_pre_hook(before)
            if consumer
            else module.register_forward_hook(after)
        )
    try:
        boolean = next(
            (call for call in calls if call.boolean), None
        )  # eager attention adds True and False as numbers
        if boolean is not None and not model._supports_sdpa:
            raise boolean.unsupported(
                "takes a mask of True and False for numbers to add to its scores (give an "
                "additive one)"
            )
        with implementation(model, "eager" if boolean is None else "sdpa"):
            forward(model, one_sample(inputs, sample, samples))
    finally:
        for hook in hooks:
            hook.remove()

    def of(found: list[Any], turn: int) -> Tensor | None:
        return found[turn] if turn < len(found) and isinstance(found[turn], Tensor) else None

    return {
        id(call): EagerAttention(
            of(seen[id(call.consumer or call.module)], call.turn),
            of(given[id(call.module)], call.turn),
        )
        for call in calls
    }


def one_sample(
    inputs: Mapping[str, Any], sample: int, samples: int | None = None
) -> dict[str, Any]:
    """The model inputs of one of so many samples; by default as many as the first tensor has."""
    count = samples or next(
        (len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim), 0
    )
    return {
        name: _one_sample(name, t, slice(sample, sample + 1), count) for name, t in inputs.items()
    }


def _one_sample(name: str, value: Any, part: slice, samples: int) -> Any:
    """The part of a model input that belongs to one sample."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if (
        name == "position_ids" and value.ndim == 3
    ):  # one row of positions for time, height and width each
        return value[:, part] if value.shape[1] == samples else value
    return value[part] if len(value) == samples else value


def verify_outputs(call: Call, attention: Attention, seen: EagerAttention, sample: int) -> float:
    """Error of the head outputs of one sample against what the model's untouched eager attention
    passes on there.

    Raises:
        CaptureError: an error above `CAPTURE_TOLERANCE`, or nothing of the right size to compare
            with.
    """
    own = seen.outputs
    part, size = slice(sample, sample + 1), attention.tokens * attention.heads * attention.d_v
    if (
        own is not None
        and own.numel() > size
        and call.consumer is not None
        and not own.numel() % size
    ):
        raise call.unsupported(
            f"is given windows or tiles in place of samples ({attention.samples} in the batch)"
        )
    if own is None or own.numel() != size:
        nowhere = "hands on the outputs of its heads in no form in which they can be checked"
        raise call.unsupported(call.changed or nowhere)
    own = own.reshape(1, attention.tokens, attention.heads, attention.d_v).transpose(1, 2)
    valid = None if attention.valid is None else attention.valid[part]
    difference = head_error(attention.out[part], own, attention.v[part].abs().amax((-1, -2)), valid)
    if not difference <= CAPTURE_TOLERANCE:
        x, own_x = attention.x[part], seen.x
        if (
            own_x is not None
            and own_x.shape == x.shape
            and not head_error(own_x[:, None], x[:, None], 0 * x[:, :1, 0], valid)
            <= CAPTURE_TOLERANCE
        ):
            raise call.unsupported(
                "is given other token vectors when the model runs on one sample of the same "
                "inputs: it draws random numbers in evaluation, or "
                "one sample changes with the others (give it the random numbers where it takes "
                "them as an input, or one sample)"
            )
        raise _different(call, difference)
    return difference


def _different(call: Call, difference: float) -> CaptureError:
    if call.changed and call.consumer is None:
        return call.unsupported(call.changed)
    return CaptureError(
        f"layer {call.name}: rebuilt head outputs differ from the model's own eager attention by "
        f"{difference:.1e} relative "
        f"(allowed {CAPTURE_TOLERANCE:.0e}); its attention is not softmax(scale q k^T + mask) v, "
        "nor a variant of it known here"
    )


def _not_affine(model: PreTrainedModel, call: Call, name: str, difference: float) -> CaptureError:
    with implementation(model, RECORDING_ATTENTION):
        depends = ProbedLayer(call).depends(("queries", "keys", "values").index(name))
    if not depends.on_tokens:
        return call.unsupported(
            f"takes its {name} from another input than its first (cross-attention, or {name} "
            "shared with another layer)"
        )
    if depends.on_others:
        return call.unsupported(f"makes its {name} of several tokens (by a convolution, for one)")
    if depends.on_position:
        return call.unsupported(
            f"makes its {name} depend on the position of a token otherwise than by {POSITIONS}, "
            "where rotations are found (inside the module, or by "
            "an argument of another name)"
        )
    return CaptureError(
        f"layer {call.name} ({type(call.module).__name__}): {name} are not one affine map of the "
        f"layer's input (off by {difference:.1e} relative), "
        "but for a normalisation and a rotation: the layer transforms them in another way "
        "between projection and scores"
    )
