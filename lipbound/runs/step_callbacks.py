"""Numbers that a monitor logs, and callbacks by which Trainers call it and pass them on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xarray as xr

from lipbound.errors import LipboundError, shown
from lipbound.schema import MEANS, STATISTICS

LIGHTNING = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Packages of Lightning, and the modules that hold their callbacks."""

PREFIX = "lipbound"
"""First part of the names under which numbers are logged."""
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


def numbers(ds: xr.Dataset, names: Iterable[str], *, per_head: bool = False) -> dict[str, float]:
    """Reduce a step to the numbers that are logged, by their names there.

    Args:
        ds: a step of a run.
        names: of its variables.
        per_head: also of every head, rather than of layers alone.

    Returns:
        By ``lipbound/layer_L/NAME_max`` and, of norms and bounds, ``..._geomean``, over samples and
        heads; of what is a mean over queries ``..._mean``; and ``lipbound/layer_L/head_H/NAME``,
        over samples. Values that are missing or infinite are left out.
    """
    found: dict[str, float] = {}
    for name in names:
        for i, layer in enumerate(ds["layer"].values.tolist()):
            values, place = ds[name].isel(layer=i).values, f"{PREFIX}/layer_{layer}"
            known = values[np.isfinite(values)]
            if not known.size:
                continue
            if name in MEANS:
                found[f"{place}/{name}_mean"] = float(known.mean())
            else:
                found[f"{place}/{name}_max"] = float(known.max())
            if name not in STATISTICS and (known > 0).all():
                found[f"{place}/{name}_geomean"] = float(np.exp(np.log(known).mean()))
            heads = values.T if per_head and values.ndim > 1 else ()
            for head, one in enumerate(heads):
                value = float(one.mean() if name in MEANS else one.max())
                if np.isfinite(value):
                    found[f"{place}/head_{head}/{name}"] = value
    return found
