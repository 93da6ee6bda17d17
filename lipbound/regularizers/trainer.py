"""Penalties in ``transformers.Trainer``."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lipbound.models.capture.differentiable import attention_layers, attention_probabilities
from lipbound.regularizers.bound_penalty import SoundPenalty
from lipbound.regularizers.jasmin import JaSMin
from lipbound.regularizers.specformer import Specformer


class PenaltyMixin:
    """For ``transformers.Trainer``: adds ``strength`` times ``penalty`` to the loss. ``class MyTrainer(PenaltyMixin, Trainer)``.

    Attributes:
        penalty: `JaSMin`, `Specformer`, `SoundPenalty`, or a function of the list of attention probabilities.
        strength: its factor. layers: which attention layers it sees; all by default.
    """

    penalty: Callable[..., Tensor] | None = None
    strength: float = 0.0
    layers: Sequence[int] | None = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """The loss of the Trainer, plus the penalty while the model is in training."""
        parent: Any = super()
        if self.penalty is None or not self.strength or not model.training:
            return parent.compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        inner = getattr(model, "module", model)
        valid = inputs.get("attention_mask")
        if isinstance(self.penalty, Specformer):
            loss, outputs = parent.compute_loss(model, inputs, return_outputs=True, **kwargs)
            extra = self.penalty(inner)
        elif isinstance(self.penalty, SoundPenalty):
            with attention_layers(inner, self.layers) as found:
                loss, outputs = parent.compute_loss(model, inputs, return_outputs=True, **kwargs)
            extra = self.penalty(found).to(loss.dtype)
        else:
            with attention_probabilities(inner, self.layers) as attentions:
                loss, outputs = parent.compute_loss(model, inputs, return_outputs=True, **kwargs)
            extra = self.penalty(attentions, valid) if isinstance(self.penalty, JaSMin) else self.penalty(attentions)
        loss = loss + self.strength * extra
        return (loss, outputs) if return_outputs else loss
