"""Callbacks that measure at the steps of a Trainer: of transformers, or of Lightning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lipbound.errors import LipboundError, shown

LIGHTNING = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Packages of Lightning, and the modules that hold their callbacks."""

Step = Callable[[int], object]
"""Function to call with the number of updates so far."""


def attached(step: Step, trainer: Any, set_log: Callable[[Any], None]) -> None:
    """Call a function at the steps of a Trainer, the first before training begins.

    Args:
        step: the function.
        trainer: of transformers or Lightning.
        set_log: is given a function that logs numbers to what the Trainer logs to, at a step.

    Raises:
        LipboundError: it is neither.
    """
    package = _package_of(trainer)
    if package == "transformers":
        _to_transformers(step, trainer, set_log)
    elif package in LIGHTNING:
        _to_lightning(step, trainer, set_log, LIGHTNING[package])
    else:
        raise LipboundError(
            f"trainer is {shown(trainer)}; give a Trainer of transformers or of Lightning, or call "
            "step in a loop of your own"
        )


def _package_of(trainer: Any) -> str:
    """The package that a Trainer, or the class that it inherits from, is of."""
    kinds = [one for one in type(trainer).__mro__ if one.__name__ == "Trainer"]
    return next((one.__module__.partition(".")[0] for one in kinds), "")


def _to_transformers(step: Step, trainer: Any, set_log: Callable[[Any], None]) -> None:
    """By a callback, whose numbers go through ``Trainer.log``."""
    callback: Any = importlib.import_module("transformers").TrainerCallback

    class MonitorCallback(callback):  # type: ignore[misc]
        """Measures before the first update, and after every one."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step(state.global_step)

    def log(numbers: dict[str, float], at: int) -> None:
        wanted = trainer.control.should_log  # which logging ends
        trainer.log(dict(numbers))
        trainer.control.should_log = wanted

    set_log(log)
    trainer.add_callback(MonitorCallback())


def _to_lightning(step: Step, trainer: Any, set_log: Callable[[Any], None], home: str) -> None:
    """By a callback, whose numbers go to all loggers."""
    callback: Any = importlib.import_module(f"{home}.callbacks").Callback

    class LightningMonitorCallback(callback):  # type: ignore[misc]
        """Measures before the first update, and after every one."""

        last = -1

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._once(trainer)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self._once(trainer)

        def _once(self, trainer: Any) -> None:
            # several batches may make one update
            if trainer.global_step != self.last:
                self.last = trainer.global_step
                step(self.last)

    def log(numbers: dict[str, float], at: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(dict(numbers), step=at)

    set_log(log)
    trainer.callbacks.append(LightningMonitorCallback())
