"""Penalties in ``transformers.Trainer``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.errors import LipboundError, real, shown, tell
from lipbound.models.training import attention_layers, attention_probabilities
from lipbound.regularizers.penalties import LayerPenalty, Specformer


class PenaltyMixin:
    """Adds a penalty to the loss of a ``transformers.Trainer``.

    Write ``class MyTrainer(PenaltyMixin, Trainer)``. The loss of a step is that of the Trainer plus
    ``strength`` times the mean penalty of its batches, however many are accumulated, on however
    many processes. Padding does not count. Where the Trainer logs "loss", "task_loss" and "penalty"
    stand beside it: loss = task_loss + strength * penalty.

    LipboundError is raised for a class that names Trainer first, where the penalty would never be
    added; in training, for a penalty without a strength or the other way round, or what is neither.

    Attributes:
        penalty: `JaSMin`, `Specformer`, `SoundPenalty`, `ExactNorm`, or a function of the list of
            attention probabilities, whose ``valid`` tells padding.
        strength: its factor; 0 trains without the penalty.
        layers: which attention layers it sees; all by default.
    """

    penalty: Callable[..., Tensor] | None = None
    strength: float | None = None
    layers: Sequence[int] | int | str | None = None
    _terms: Tensor | None = None
    """Sums since the last log: of task losses, of penalties, and of shares of a step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1 : cls.__mro__.index(PenaltyMixin)]:
            if "compute_loss" in vars(base) and not issubclass(base, PenaltyMixin):
                raise LipboundError(
                    f"{cls.__name__} inherits from {base.__name__} before PenaltyMixin, so its "
                    f"penalty would never be added; write class {cls.__name__}(PenaltyMixin, "
                    f"{base.__name__})"
                )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the loss of the Trainer, plus the penalty while the model is in training."""
        parent: Any = super()
        strength = self._strength() if model.training else 0.0
        if not strength:
            return parent.compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        extra, loss, outputs = self._penalised(
            model, lambda: parent.compute_loss(model, inputs, return_outputs=True, **kwargs)
        )
        if not extra.requires_grad and torch.is_grad_enabled():
            tell(
                "the penalty depends on no parameter that is trained, so it changes the loss and "
                "not the model"
            )
        trainer: Any = self
        # how many batches are accumulated in this step; whether the Trainer divides by that later
        accumulated = trainer.args.gradient_accumulation_steps
        batches = getattr(trainer, "current_gradient_accumulation_steps", accumulated)
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = kwargs.get("num_items_in_batch") is not None
            scaled = trainer.model_accepts_loss_kwargs and counted
            scaled = scaled or trainer.compute_loss_func is not None
        divided, extra = not scaled, extra.to(loss)
        task = loss.detach() / (batches if divided else 1)
        terms = torch.stack([task, extra.detach() / batches, torch.full_like(task, 1 / batches)])
        self._terms = terms.float() if self._terms is None else self._terms + terms
        loss = loss + strength * extra / (1 if divided else batches)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer, with the terms of its loss, "task_loss" and "penalty", beside it."""
        trainer: Any = self
        if "loss" in logs and self._terms is not None:
            task, extra, steps = trainer.accelerator.reduce(self._terms, "mean").tolist()
            logs |= {"task_loss": task / steps, "penalty": extra / steps}
            self._terms = None
        parent: Any = super()
        parent.log(logs, *args, **kwargs)

    def _strength(self) -> float:
        """Return the factor of the penalty; 0 where there is none.

        Raises:
            LipboundError: a penalty without a strength or the other way round, or what is neither.
        """
        name = type(self).__name__
        if self.penalty is None and self.strength is None:
            tell(
                f"{name} has neither penalty nor strength, so it trains without a penalty; set "
                "both, or strength = 0"
            )
            return 0.0
        if self.strength is None:
            raise LipboundError(
                f"{name} has a penalty but no strength; set strength, such as 1e-3 (0 trains "
                "without the penalty)"
            )
        must = "a finite number, the factor of the penalty, such as 1e-3"
        strength = real("strength", self.strength, must)
        if strength and (not callable(self.penalty) or isinstance(self.penalty, type)):
            raise LipboundError(
                f"{name} has strength {strength:g} but no penalty: penalty is "
                f"{shown(self.penalty)}; give JaSMin(), Specformer(...), SoundPenalty(), "
                "ExactNorm() or a function of attention probabilities"
            )
        return strength

    def _penalised(
        self, model: nn.Module, loss: Callable[[], tuple[Tensor, Any]]
    ) -> tuple[Tensor, Tensor, Any]:
        """Return the penalty of the batch, a scalar, with the loss and the outputs.

        Raises:
            LipboundError: the penalty returns something else.
        """
        assert self.penalty is not None
        if isinstance(self.penalty, Specformer):
            result, extra = loss(), self.penalty(model)
        else:
            whole = isinstance(self.penalty, LayerPenalty)
            finding: Any = attention_layers if whole else attention_probabilities
            with finding(model, self.layers) as found:
                result = loss()
            extra = self.penalty(found)
        if not isinstance(extra, Tensor) or extra.numel() != 1:
            shape = f"a tensor of shape {tuple(extra.shape)}" if isinstance(extra, Tensor) else ""
            raise LipboundError(
                f"the penalty returned {shape or shown(extra)}; it must return a tensor with one "
                "number"
            )
        return extra.reshape(()), *result
