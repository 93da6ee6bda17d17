"""Execution of a plan: blocks of samples measured here, or by the workers of a cluster."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from lipbound.devices import resolve_device
from lipbound.errors import CheckpointError, LipboundError, shown, tell
from lipbound.models.loading import load_checkpoint
from lipbound.runs.config import RunConfig
from lipbound.runs.measure import LayerResult, MeasurementSpec, Measurer, capturer_of
from lipbound.runs.partial_store import PartialRun
from lipbound.runs.plan import Plan, SampleBlock, Sources


class WorkerSpec(NamedTuple):
    """Everything with which another process makes the same `Measurer`.

    Attributes:
        model, revision, dtype, device, gguf_file, adapter: as in `lipbound.compare`.
        weights: the ``revision`` of the checkpoint that must be found.
        layers: numbers of the layers; None for all.
        spec: what is measured.
        loading: how weights are loaded, the argument ``weights`` of `lipbound.compare`.
    """

    model: str
    revision: str | None
    weights: str
    dtype: str
    device: str
    layers: tuple[int, ...] | None
    spec: MeasurementSpec
    loading: str = "auto"
    gguf_file: str | None = None
    adapter: str | None = None


TRIMMING = "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_"
"""Setting of dask for what its workers' allocators do with freed memory.

By default they give all of it back to the system, and fresh memory costs more than the arithmetic
on it; None leaves them as they are.
"""

_MEASURERS: dict[WorkerSpec, Measurer] = {}
_TURN = threading.Lock()


def work(
    worker: WorkerSpec, inputs: Mapping[str, Tensor], start: int, skip: Collection[int] = ()
) -> list[LayerResult]:
    """Run `Measurer.block` in a process of its own, which loads the checkpoint once.

    Threads of one process take turns, since they share the model.

    Args:
        worker: what to load and to measure.
        inputs: of the model, for the samples of the block.
        start: number of the first of them.
        skip: positions of layers that are measured already.

    Returns:
        Layer by layer.

    Raises:
        CheckpointError: the checkpoint found here is another one.
    """
    device = resolve_device(worker.device)
    with _TURN:
        if worker not in _MEASURERS:
            _MEASURERS.clear()
            checkpoint = load_checkpoint(
                worker.model,
                revision=worker.revision,
                dtype=worker.dtype,
                device=device,
                weights=worker.loading,
                gguf_file=worker.gguf_file,
                adapter=worker.adapter,
            )
            if checkpoint.revision != worker.weights:
                raise CheckpointError(
                    f"{worker.model} is {checkpoint.revision} on a worker but {worker.weights} "
                    "here; give all the same checkpoint"
                )
            _MEASURERS[worker] = Measurer(
                capturer_of(checkpoint.model, worker.layers, worker.spec.map), worker.spec
            )
        here = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in inputs.items()}
        return list(_MEASURERS[worker].block(here, start, skip))


class Executor(ABC):
    """Who measures the blocks of a plan, and where."""

    @abstractmethod
    def parts(self) -> int:
        """Least number of blocks that keeps it busy."""

    @abstractmethod
    def device(self, config: RunConfig, sources: Sources) -> str:
        """Name the device that identifies an unfinished run, which is continued on the same one."""

    @abstractmethod
    def results(
        self, config: RunConfig, sources: Sources, plan: Plan, blocks: Sequence[SampleBlock]
    ) -> Iterator[tuple[int, LayerResult]]:
        """Measure blocks.

        Yields:
            First sample of a block and one of its layers, in the order in which they are measured.
        """


class SerialExecutor(Executor):
    """Measurement in this process, on the model that is loaded already."""

    def parts(self) -> int:
        return 1

    def device(self, config: RunConfig, sources: Sources) -> str:
        return sources.device

    def results(
        self, config: RunConfig, sources: Sources, plan: Plan, blocks: Sequence[SampleBlock]
    ) -> Iterator[tuple[int, LayerResult]]:
        measurer = Measurer(sources.capturer, plan.spec)
        for start, stop, skip in blocks:
            inputs = sources.inputs.block(start, stop, sources.device)
            for measured in measurer.block(inputs, start, skip):
                yield start, measured


class DaskExecutor(Executor):
    """Measurement by dask workers, each of which loads the checkpoint by its name.

    Raises:
        LipboundError: the model has no name, or the client is none.
    """

    def __init__(self, client: Any, config: RunConfig):
        if not isinstance(config.model, (str, Path)):
            raise LipboundError(
                "with a client, model must be a name that every worker can load (hub id, "
                "directory or builtin), not a loaded model"
            )
        if not hasattr(client, "submit") or not hasattr(client, "ncores"):
            raise LipboundError(f"client is {shown(client)}; give a dask.distributed.Client")
        self._client = client

    def parts(self) -> int:
        return 4 * max(1, len(self._client.ncores()))

    def device(self, config: RunConfig, sources: Sources) -> str:
        return config.device  # as it was asked for: "auto" may be another one on every worker

    def results(
        self, config: RunConfig, sources: Sources, plan: Plan, blocks: Sequence[SampleBlock]
    ) -> Iterator[tuple[int, LayerResult]]:
        _tell_of_trimming(self._client)
        revision = sources.checkpoint.revision
        sources.capturer.release()  # workers read the layers themselves
        worker = WorkerSpec(
            str(config.model),
            config.revision,
            revision,
            config.dtype,
            config.device,
            config.chosen_layers,
            plan.spec,
            config.weights,
            config.gguf_file,
            None if config.adapter is None else str(config.adapter),
        )
        tasks = [(sources.inputs.block(a, b, "cpu"), a, skip) for a, b, skip in blocks]
        return distribute(self._client, worker, tasks)


def _tell_of_trimming(client: Any) -> None:
    """Warn where workers have dask's own setting of `TRIMMING`."""
    name = TRIMMING.rpartition(".")[2]
    found = {
        value
        for value in client.run(os.environ.get, name).values()
        if value is not None and value.isdigit() and int(value) < 2**20
    }
    if found:
        tell(
            f"workers give freed memory back to the system at once ({name}={min(found)}, dask's "
            "default), which can make them several times slower; "
            f"dask.config.set({{{TRIMMING!r}: None}}) before they start leaves it off"
        )


def fill(
    tables: dict[str, np.ndarray],
    results: Iterator[tuple[int, LayerResult]],
    partial: PartialRun | None,
    advance: Callable[[int], None],
) -> tuple[np.ndarray, float]:
    """Put results where they belong, in the tables and in the partial run.

    Args:
        tables: (samples, layers, heads) each.
        results: first sample of a block, and one of its layers.
        partial: where results are kept meanwhile, if at all.
        advance: is told how many samples were measured.

    Returns:
        Lengths of all samples, and the largest error of their captures.
    """
    lengths, error = np.zeros(len(tables["exact"]), dtype=np.int64), 0.0
    for start, measured in results:
        for name, value in measured.values.items():
            tables[name][start : start + len(value), measured.layer, : value.shape[1]] = value
        if partial is not None:
            partial.write(start, measured)
        rows = slice(start, start + len(measured.lengths))  # streams may differ in length
        lengths[rows] = np.maximum(lengths[rows], measured.lengths)
        error = max(error, measured.error)
        advance(len(measured.lengths))
    return (lengths, error) if partial is None else (partial.lengths, partial.error)


def distribute(
    client: Any, worker: WorkerSpec, blocks: list[tuple[dict[str, Tensor], int, frozenset[int]]]
) -> Iterator[tuple[int, LayerResult]]:
    """Have blocks measured by the workers of a dask.distributed client.

    Blocks of a worker that dies go to another (dask's own rule: three deaths on one block and it is
    given up).

    Args:
        client: of dask.
        worker: what workers load and measure.
        blocks: inputs, first sample and layers to skip.

    Yields:
        First sample of a block and one of its layers, in the order in which blocks end.

    Raises:
        LipboundError: workers died again and again.
    """
    from dask.distributed import KilledWorker, as_completed

    futures = {
        client.submit(work, worker, x, start, skip, pure=False): start for x, start, skip in blocks
    }
    try:
        for future in as_completed(futures):
            for measured in future.result():
                yield futures[future], measured
            future.release()
    except KilledWorker as error:
        raise LipboundError(
            f"workers of the cluster died again and again ({error.args[0]}); give them more "
            "memory, or a smaller memory="
        ) from error
    finally:
        client.cancel(list(futures))


@contextmanager
def progress_bar(show: bool, title: str, total: int) -> Iterator[Any]:
    """Show a progress bar over samples x layers.

    Yields:
        Function to call with the number of layers that were measured.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    silent = not (show and (console.is_terminal or console.is_jupyter))
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        task = bar.add_task(title, total=total)
        yield lambda layers: bar.update(task, advance=layers)
