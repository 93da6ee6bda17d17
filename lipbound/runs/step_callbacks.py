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
Log = Callable[[dict[str, float], int], object]
"""Function that logs numbers by name, at a step."""


def attached(step: Step, trainer: Any) -> Log:
    """Call a function at the steps of a Trainer, the first before training begins.

    Args:
        step: the function.
        trainer: of transformers or Lightning.

    Returns:
        A function that logs numbers to what the Trainer logs to.

    Raises:
        LipboundError: it is neither.
    """
    kinds = [one for one in type(trainer).__mro__ if one.__name__ == "Trainer"]
    package = next((one.__module__.partition(".")[0] for one in kinds), "")
    if package == "transformers":
        return _to_transformers(step, trainer)
    if package in LIGHTNING:
        return _to_lightning(step, trainer, LIGHTNING[package])
    raise LipboundError(
        f"trainer is {shown(trainer)}; give a Trainer of transformers or of Lightning, or call "
        "step in a loop of your own"
    )


def _to_transformers(step: Step, trainer: Any) -> Log:
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

    trainer.add_callback(MonitorCallback())
    return log


def _to_lightning(step: Step, trainer: Any, home: str) -> Log:
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

    trainer.callbacks.append(LightningMonitorCallback())
    return log
