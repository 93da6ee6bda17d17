"""Whether a capture reproduces the model: rebuilt tensors against those of the forward pass, and against the model's own eager attention."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError
from lipbound.models.capture.probing import CAPTURE_TOLERANCE, Weights
from lipbound.models.capture.recorder import Call, forward, implementation


def head_error(mine: Tensor, reference: Tensor, floor: Tensor, valid: Tensor | None) -> float:
    """Largest difference of two (samples, heads, N, d) tensors, relative to each head's own largest entry, padding left out.

    ``floor`` (samples or 1, heads): size of the numbers a head is computed from, below a thousandth of which no head's entries are taken
    seriously: they are sums that cancel.
    """
    difference, size = (mine - reference).abs(), reference.abs()
    if valid is not None:
        padded = ~valid[:, None, :, None]
        difference, size = difference.masked_fill(padded, 0), size.masked_fill(padded, 0)
    scale = torch.maximum(size.amax((-1, -2)), 1e-3 * floor.to(size.dtype)).clamp_min(torch.finfo(size.dtype).tiny)
    return float((difference.amax((-1, -2)) / scale).amax())


def check_rebuilt(call: Call, attention: Attention, weights: Weights) -> float:
    """Largest error of rebuilt queries, keys, values and head outputs, on every sample and head of the recorded forward pass.

    Raises:
        CaptureError: an error above `CAPTURE_TOLERANCE`: the layer is not what `Attention` describes.
    """
    valid, groups = attention.valid, call.q.shape[1] // call.k.shape[1]
    reach = torch.linalg.vector_norm(attention.x, dim=-1).amax(-1, keepdim=True)
    order = slice(None) if weights.order is None else weights.order
    error = 0.0
    for name, mine, model, w, norm in (
        ("queries", attention.q, call.q[..., order], attention.w_q, weights.norm_q),
        ("keys", attention.k, call.k[..., order].repeat_interleave(groups, 1), attention.w_k, weights.norm_k),
        ("values", attention.v, call.v.repeat_interleave(groups, 1), attention.w_v, None),
    ):
        size = reach * torch.linalg.matrix_norm(w) if norm is None else torch.zeros_like(reach)
        difference = head_error(mine, model, size, valid)
        if not difference <= CAPTURE_TOLERANCE:
            raise CaptureError(_not_affine(call, name, difference))
        error = max(error, difference)
    difference = head_error(attention.out, call.out.transpose(1, 2), attention.v.abs().amax((-1, -2)), valid)
    if not difference <= CAPTURE_TOLERANCE:
        raise CaptureError(_different(call.name, difference))
    return max(error, difference)


def own_outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor], calls: Sequence[Call], sample: int, samples: int) -> dict[int, Tensor]:
    """What the model's untouched eager attention passes on at one sample of ``samples``, by the identity of each call."""
    part = slice(sample, sample + 1)
    seen: dict[int, list[Tensor]] = {id(c.consumer or c.module): [] for c in calls}

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[id(module)].append(args[0])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen[id(module)].append(output[0] if isinstance(output, tuple) else output)

    hooks = []
    for module in {id(m): m for m in (c.consumer or c.module for c in calls)}.values():
        consumer = any(c.consumer is module for c in calls)
        hooks.append(module.register_forward_pre_hook(before) if consumer else module.register_forward_hook(after))
    try:
        with implementation(model, "eager"):
            forward(model, {name: _one_sample(name, t, part, samples) for name, t in inputs.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return {id(call): seen[id(call.consumer or call.module)][call.turn] for call in calls}


def _one_sample(name: str, value: Any, part: slice, samples: int) -> Any:
    """The part of a model input that belongs to one sample."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if name == "position_ids" and value.ndim == 3:  # one row of positions for time, height and width each
        return value[:, part] if value.shape[1] == samples else value
    return value[part] if len(value) == samples else value


def verify_outputs(call: Call, attention: Attention, own: Tensor, sample: int) -> float:
    """Error of the head outputs of one sample against what the model's untouched eager attention passes on there, ``own``.

    Raises:
        CaptureError: an error above `CAPTURE_TOLERANCE`, or nothing of the right size to compare with.
    """
    part = slice(sample, sample + 1)
    if own.numel() != attention.tokens * attention.heads * attention.d_v:
        raise CaptureError(f"layer {call.name}: no point of the model could be found where its head outputs can be checked")
    own = own.reshape(1, attention.tokens, attention.heads, attention.d_v).transpose(1, 2)
    valid = None if attention.valid is None else attention.valid[part]
    difference = head_error(attention.out[part], own, attention.v[part].abs().amax((-1, -2)), valid)
    if not difference <= CAPTURE_TOLERANCE:
        raise CaptureError(_different(call.name, difference))
    return difference


def _different(name: str, difference: float) -> str:
    return (
        f"layer {name}: rebuilt head outputs differ from the model's own eager attention by {difference:.1e} relative "
        f"(allowed {CAPTURE_TOLERANCE:.0e}); its attention is not softmax(scale q k^T + mask) v, nor a variant of it known here"
    )


def _not_affine(call: Call, name: str, difference: float) -> str:
    what = f"layer {call.name} ({type(call.module).__name__}): {name} are not one affine map of the layer's input (off by {difference:.1e} relative)"
    return (
        f"{what}, but for a normalisation and a rotation: the layer transforms them in another way between projection and scores, or takes them from "
        "another input (cross-attention)"
    )
