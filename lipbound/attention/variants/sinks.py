"""A constant that takes part in every softmax of a head."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lipbound.attention.variants.base import Shapes, Variant
from lipbound.errors import AttentionError


@dataclass(frozen=True)
class Sinks(Variant):
    """One more score in every softmax of head h, ``logits[h]``, whose probability is dropped.

    Gpt-oss (2025). Rows of P then sum to less than one. What they attend to besides has the value
    zero, so values are not centred.

    Args:
        logits: (heads,), in the dtype of the layer.
    """

    logits: Tensor

    name = "sinks"
    title = "sink logits"
    stage = 3
    place = 3
    axes: ClassVar = {"logits": "h"}
    shift_invariant = False

    def tensors(self) -> dict[str, Tensor]:
        return {"sinks": self.logits}

    def check(self, shapes: Shapes) -> None:
        if tuple(self.logits.shape) != shapes.w_q[:1]:
            given = f"sinks has shape {tuple(self.logits.shape)}; with x {shapes.x}"
            raise AttentionError(f"{given} and w_q {shapes.w_q} it must be {shapes.w_q[:1]}")
