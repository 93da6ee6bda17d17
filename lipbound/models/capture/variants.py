"""The variants of a recorded call: one function each, which returns None where the call has none of
it."""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.variants import Variant
from lipbound.attention.variants.cap import Cap
from lipbound.attention.variants.qk_norm import QKNormalised
from lipbound.attention.variants.sinks import Sinks
from lipbound.models.capture.probing import ProbedWeights
from lipbound.models.capture.recorder import Call

VariantReader = Callable[[Call, ProbedWeights, torch.dtype], Variant | None]


def rotation(call: Call, weights: ProbedWeights, dtype: torch.dtype) -> Variant | None:
    """The rotation that probing fitted."""
    return weights.rotation


def qk_norm(call: Call, weights: ProbedWeights, dtype: torch.dtype) -> Variant | None:
    """The normalisations that probing read off."""
    if weights.norm_q is None and weights.norm_k is None:
        return None
    return QKNormalised(weights.norm_q, weights.norm_k).map(lambda t: t.to(dtype))


def cap(call: Call, weights: ProbedWeights, dtype: torch.dtype) -> Variant | None:
    """What the attention interface is handed as ``softcap``."""
    value = call.extras.get("softcap")
    return None if value is None else Cap(float(value))


def sinks(call: Call, weights: ProbedWeights, dtype: torch.dtype) -> Variant | None:
    """What the attention interface is handed as ``s_aux``."""
    logits: Tensor | None = call.extras.get("s_aux")
    return None if logits is None else Sinks(logits.detach().to(dtype).flatten())


VARIANT_READERS: tuple[VariantReader, ...] = (rotation, qk_norm, cap, sinks)


def variants_of(call: Call, weights: ProbedWeights, dtype: torch.dtype) -> list[Variant]:
    """All variants of a call, their tensors in the dtype of the layer."""
    found = (read(call, weights, dtype) for read in VARIANT_READERS)
    return [variant for variant in found if variant is not None]
