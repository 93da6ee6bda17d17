"""Carrying out a plan: blocks of samples measured here, or by the workers of a cluster."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from lipbound.devices import resolve_device
from lipbound.errors import CheckpointError, LipboundError
from lipbound.models.checkpoints import load_checkpoint
from lipbound.runs.measure import LayerResult, MeasurementSpec, Measurer
from lipbound.runs.partial_store import PartialRun


class WorkerSpec(NamedTuple):
    """How another process makes the same `Measurer`; ``weights`` is the `lipbound.models.checkpoints.Checkpoint.revision` that it must find.

    ``loading`` is its argument ``weights``.
    """

    model: str
    revision: str | None
    weights: str
    dtype: str
    device: str
    layers: tuple[int, ...] | None
    job: MeasurementSpec
    loading: str = "auto"


_MEASURERS: dict[WorkerSpec, Measurer] = {}


_TURN = threading.Lock()


def work(recipe: WorkerSpec, inputs: Mapping[str, Tensor], start: int, skip: Collection[int] = ()) -> list[LayerResult]:
    """`Measurer.block` in a process of its own, which loads the checkpoint once; threads of one process take turns, since they share the model."""
    device = resolve_device(recipe.device)
    with _TURN:
        if recipe not in _MEASURERS:
            _MEASURERS.clear()
            checkpoint = load_checkpoint(recipe.model, revision=recipe.revision, dtype=recipe.dtype, device=device, weights=recipe.loading)
            if checkpoint.revision != recipe.weights:
                raise CheckpointError(f"{recipe.model} is {checkpoint.revision} on a worker but {recipe.weights} here; give all the same checkpoint")
            _MEASURERS[recipe] = Measurer(checkpoint.model, recipe.layers, recipe.job)
        return list(_MEASURERS[recipe].block({name: t.to(device) for name, t in inputs.items()}, start, skip))


def fill(
    tables: dict[str, np.ndarray], results: Iterator[tuple[int, LayerResult]], unfinished: PartialRun | None, advance: Callable[[int], None]
) -> tuple[np.ndarray, float]:
    """Put results where they belong, in the tables and in the unfinished run; lengths of all samples, and the largest error of their captures."""
    lengths, error = np.zeros(len(tables["exact"]), dtype=np.int64), 0.0
    try:
        for start, measured in results:
            if unfinished is not None:
                unfinished.write(start, measured)
            for name, value in measured.values.items():
                tables[name][start : start + len(value), measured.layer, : value.shape[1]] = value
            lengths[start : start + len(measured.lengths)] = measured.lengths
            error = max(error, measured.error)
            advance(len(measured.lengths))
        return (lengths, error) if unfinished is None else unfinished.read(tables)
    except BaseException:
        if unfinished is not None:
            unfinished.close(finished=False)
        raise


def distribute(client: Any, recipe: WorkerSpec, blocks: list[tuple[dict[str, Tensor], int, frozenset[int]]]) -> Iterator[tuple[int, LayerResult]]:
    """Blocks measured by the workers of a dask.distributed client, in the order in which they end; this process alone writes what they return.

    Blocks of a worker that dies go to another (dask's own rule: three deaths on one block and it is given up).
    """
    from dask.distributed import KilledWorker, as_completed

    futures = {client.submit(work, recipe, x, start, skip, pure=False): start for x, start, skip in blocks}
    try:
        for future in as_completed(futures):
            for measured in future.result():
                yield futures[future], measured
            future.release()
    except KilledWorker as error:
        raise LipboundError(f"workers of the cluster died again and again ({error.args[0]}); give them more memory, or a smaller memory=") from error
    finally:
        client.cancel(list(futures))


@contextmanager
def progress_bar(show: bool, title: str, total: int) -> Iterator[Any]:
    """A progress bar over samples x layers; yields ``advance(layers)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(show_speed=True))
    console = Console(stderr=True)
    silent = not (show and (console.is_terminal or console.is_jupyter))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, disable=silent) as bar:
        task = bar.add_task(title, total=total)
        yield lambda layers: bar.update(task, advance=layers)
