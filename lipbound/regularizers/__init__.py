"""Penalties that make attention smoother, for use in any training loop.

In two lines of a training step (`lipbound.models.training`)::

    with attention_probabilities(model) as attentions:
        loss = model(**batch).loss
    (loss + 1e-3 * JaSMin(k=10)(attentions)).backward()

With ``transformers.Trainer``: ``class MyTrainer(PenaltyMixin, Trainer)``, then
``trainer.penalty = JaSMin(); trainer.strength = 1e-3``.
"""

from lipbound.regularizers.penalties import ExactNorm, JaSMin, SoundPenalty, Specformer
from lipbound.regularizers.trainer import PenaltyMixin

__all__ = ["ExactNorm", "JaSMin", "PenaltyMixin", "SoundPenalty", "Specformer"]


def __dir__() -> list[str]:
    return __all__
