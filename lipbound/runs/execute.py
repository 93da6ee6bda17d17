"""Execution of a plan: blocks of samples measured here, or by the workers of a cluster."""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor

from lipbound.devices import resolve_device
from lipbound.errors import CheckpointError, LipboundError, shown, tell
from lipbound.models.loading import load_checkpoint
from lipbound.runs.config import LOADING, RunConfig
from lipbound.runs.measure import MeasurementSpec, Measurer, capturer_of
from lipbound.runs.partial_store import LayerResult
from lipbound.runs.plan import SampleBlock, Sources


class WorkerSpec(NamedTuple):
    """Everything with which another process makes the same `Measurer`.

    Attributes:
        config: of the run, which says how the model is loaded, without its data.
        revision: of the checkpoint that must be found.
        spec: what is measured.
    """

    config: RunConfig
    revision: str
    spec: MeasurementSpec


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
    config = worker.config
    device = resolve_device(config.device)
    with _TURN:
        if worker not in _MEASURERS:
            _MEASURERS.clear()
            checkpoint = load_checkpoint(config.model, device=device, **config.options(*LOADING))
            if checkpoint.revision != worker.revision:
                found = f"{config.model} is {checkpoint.revision} on a worker"
                raise CheckpointError(f"{found} but {worker.revision} here; give all the same")
            capturer = capturer_of(checkpoint.model, config.chosen_layers, worker.spec.map)
            _MEASURERS[worker] = Measurer(capturer, worker.spec)
        here = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in inputs.items()}
        return list(_MEASURERS[worker].block(here, start, skip))


def check_client(client: Any, config: RunConfig) -> None:
    """Check that the workers of a client can load the model by its name.

    Raises:
        LipboundError: the model has no name, or the client is none.
    """
    if not isinstance(config.model, str | Path):
        raise LipboundError("with a client, model must be a name that every worker can load")
    if not hasattr(client, "submit") or not hasattr(client, "ncores"):
        raise LipboundError(f"client is {shown(client)}; give a dask.distributed.Client")


def measured_here(
    sources: Sources, spec: MeasurementSpec, blocks: Sequence[SampleBlock]
) -> Iterator[LayerResult]:
    """Measure blocks in this process, on the model that is loaded already.

    Args:
        sources: model and inputs.
        spec: what is measured.
        blocks: of samples.

    Yields:
        Layer by layer.
    """
    measurer = Measurer(sources.capturer, spec)
    for start, stop, skip in blocks:
        yield from measurer.block(sources.inputs.block(start, stop, sources.device), start, skip)


def measured_by(
    client: Any,
    config: RunConfig,
    sources: Sources,
    spec: MeasurementSpec,
    blocks: Sequence[SampleBlock],
) -> Iterator[LayerResult]:
    """Have blocks measured by the workers of a dask.distributed client, which load the model.

    Blocks of a worker that dies go to another (dask's own rule: three deaths on one block and it is
    given up).

    Args:
        client: of dask.
        config: of the run.
        sources: model, whose layers are let go, and inputs.
        spec: what is measured.
        blocks: of samples.

    Yields:
        Layer by layer, in the order in which blocks end.

    Raises:
        LipboundError: workers died again and again.
    """
    from dask.distributed import KilledWorker, as_completed

    _tell_of_trimming(client)
    sources.capturer.release()
    alone = replace(config, data=None, out=None, resume=False)
    worker = WorkerSpec(alone, sources.checkpoint.revision, spec)
    futures = [
        client.submit(work, worker, sources.inputs.block(a, b, "cpu"), a, skip, pure=False)
        for a, b, skip in blocks
    ]
    try:
        for future in as_completed(futures):
            yield from future.result()
            future.release()
    except KilledWorker as error:
        what = f"workers of the cluster died again and again ({error.args[0]})"
        raise LipboundError(f"{what}; give them more memory, or a smaller memory=") from error
    finally:
        client.cancel(futures)


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
            f"workers free memory at once ({name}={min(found)}, dask's default), which can make "
            f"them several times slower; set {{{TRIMMING!r}: None}} by dask.config.set before"
        )


def fill(
    tables: dict[str, np.ndarray], results: Iterable[LayerResult], advance: Callable[[int], None]
) -> tuple[np.ndarray, float]:
    """Put results where they belong in the tables.

    Args:
        tables: (samples, layers, heads) each.
        results: of layers at blocks of samples.
        advance: is told how many samples were measured.

    Returns:
        Lengths of all samples, and the largest error of their captures.
    """
    lengths, error = np.zeros(len(tables["exact"]), dtype=np.int64), 0.0
    for one in results:
        rows = slice(one.start, one.start + len(one.lengths))
        for name, value in one.values.items():
            tables[name][rows, one.layer][: len(value), : value.shape[1]] = value
        lengths[rows] = np.maximum(lengths[rows], one.lengths)  # streams may differ in length
        error = max(error, one.error)
        advance(len(one.lengths))
    return lengths, error


@contextmanager
def progress_bar(show: bool, title: str, total: int) -> Iterator[Any]:
    """Show a progress bar over samples x layers.

    Yields:
        Function to call with the number of layers that were measured.
    """
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    silent = not (show and (console.is_terminal or console.is_jupyter))
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        task = bar.add_task(title, total=total)
        yield lambda layers: bar.update(task, advance=layers)
