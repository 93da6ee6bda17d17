"""Putting a recorded call and the weights that probing found together as an `Attention`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.projections import Projections
from lipbound.attention.scoring import Scoring
from lipbound.errors import CaptureError
from lipbound.models.capture.probing import Weights
from lipbound.models.capture.recorder import Call, hidden_states
from lipbound.models.capture.variants import variants_of


def assemble(call: Call, weights: Weights, inputs: Mapping[str, Tensor]) -> Attention:
    """The `Attention` of a call, in the dtype of its input.

    Raises:
        CaptureError: the model's ``attention_mask`` is not one of the tokens that the layer sees.
    """
    x = hidden_states(call)
    valid = valid_tokens(inputs, x)
    mask = _simplified(_additive(call, x), valid, len(x))
    scale = call.scale if call.scale is not None else call.q.shape[-1] ** -0.5

    def cast(t: Tensor) -> Tensor:
        return t.to(x.dtype)

    w_q, w_k, w_v = (cast(w) for w in weights.w)
    b_q, b_k, b_v = (None if b is None else cast(b) for b in weights.b)
    projections = Projections(w_q, w_k, w_v, b_q, b_k, b_v, None if weights.w_o is None else cast(weights.w_o))
    return Attention.of(x.detach(), projections, Scoring(float(scale), mask, tuple(variants_of(call, weights, x.dtype))), valid=valid)


def valid_tokens(inputs: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Which tokens are not padding, from the model's attention_mask; None when all are real."""
    given = inputs.get("attention_mask")
    if given is None or bool((given != 0).all()):
        return None
    if tuple(given.shape) != tuple(x.shape[:2]):
        raise CaptureError(
            f"attention_mask has shape {tuple(given.shape)} but the attention layers see {tuple(x.shape[:2])} tokens, so padding cannot be told "
            "apart; give inputs without padding"
        )
    return given != 0


def _simplified(mask: Tensor | None, valid: Tensor | None, samples: int) -> Tensor | None:
    """A mask without what padding makes of it (that is `valid`'s business), None if nothing remains, and one for all samples that share it."""
    if mask is None:
        return None
    if valid is not None:
        padded = ~(valid[:, None, :, None] & valid[:, None, None, :])
        mask = mask.expand(samples, *mask.shape[1:]).masked_fill(padded.expand(samples, mask.shape[1], -1, -1), 0.0)
    if bool((mask == 0).all()):
        return None
    if mask.shape[0] > 1 and bool((mask == mask[:1]).all()):
        return mask[:1]
    return mask


def _additive(call: Call, x: Tensor) -> Tensor | None:
    """What a call adds to its scores: its mask, and biases of relative positions."""
    mask, bias = call.mask, call.extras.get("position_bias")
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, -torch.inf)
        mask = mask.to(x.dtype)
    if bias is None:
        return mask
    bias = bias.detach().to(x.dtype)
    return bias if mask is None else (mask + bias).clamp_min(torch.finfo(x.dtype).min)  # the lowest number and a bias may overflow
