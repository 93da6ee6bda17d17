"""Runs and workers that are killed end like those that are not."""

import os
import random
import signal
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from support.processes import CONTEXT
from support.runs import OPTIONS, TEXTS, identical

import lipbound as lb
from lipbound.cli.measuring import TRIMMING, cluster
from lipbound.errors import Notice
from lipbound.runs import store
from lipbound.runs.partial_store import LayerResult, PartialRun, partial_path


def logging(log: Path) -> None:
    """Write down what is measured, before it is stored."""
    put = PartialRun.write

    def write(self: PartialRun, measured: LayerResult) -> None:
        with log.open("a") as file:
            file.write(f"{measured.start} {measured.layer}\n")
        time.sleep(0.2)
        put(self, measured)

    PartialRun.write = write  # type: ignore[method-assign]


@pytest.mark.slow
def test_killed_runs_end_like_uninterrupted_ones(
    bert: Path, whole: xr.Dataset, tmp_path: Path
) -> None:
    """SIGKILL at random moments; each process logs what it measures."""
    out, log = tmp_path / "run.zarr", tmp_path / "log"
    dice = random.Random(0)
    for _ in range(3):
        stored = _stored(out)
        log.write_text("")
        process = CONTEXT.Process(target=_resumed, args=(bert, out, log))
        process.start()
        wanted = dice.randint(1, 2)
        while len(log.read_text().splitlines()) < wanted and process.is_alive():
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.3))
        process.kill()
        process.join()
        assert not stored & {tuple(map(int, line.split())) for line in log.read_text().splitlines()}
    assert _stored(out)
    lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    assert identical(store.load(out), whole)


def _resumed(bert: Path, out: Path, log: Path) -> None:
    logging(log)
    lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)


def _stored(out: Path) -> set[tuple[int, int]]:
    """First samples and layers of the blocks that are kept."""
    files = partial_path(out).glob("[!.]*.npz")
    return {(int(a), int(b)) for a, b in (file.stem.split("-") for file in files)}


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_a_run_that_opens(tmp_path: Path) -> None:
    """SIGKILL at random moments; the next training takes up what can be seen."""
    out, dice = tmp_path / "run.zarr", random.Random(0)
    reached = 0
    for _ in range(3):
        process = CONTEXT.Process(target=_trained, args=(out, reached))
        process.start()
        wanted = reached + dice.randint(2, 5)
        while process.is_alive() and (not out.exists() or _steps(out)[-1] < wanted):
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.2))
        process.kill()
        process.join()
        steps = _steps(out)
        assert steps == list(range(len(steps)))
        assert steps[-1] >= wanted
        reached = steps[-1] + 1


def _steps(out: Path) -> list[int]:
    return store.load(out, damaged="refuse")["step"].values.tolist()


def _trained(out: Path, start: int) -> None:
    import torch
    from support.models import AFFINE, build

    model = build(AFFINE["gpt2"])
    monitor = lb.Monitor(model, torch.arange(8)[None], every=1, out=out, resume=True)
    for step in range(start, start + 1000):
        monitor.step(step)
        with torch.no_grad():
            model.wte.weight.mul_(1.01)


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(bert: Path, tmp_path: Path) -> None:
    """Processes; one of two is killed while it has work."""
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("dask.distributed")
    options = OPTIONS | {"dtype": "float64", "tol": 1e-9, "samples": 8}
    whole = lb.compare(bert, TEXTS * 2, **options)
    # with what is imported there; what dask asks of it later comes too late
    forkserver.ensure_running()
    method = {"distributed.worker.multiprocessing-method": "forkserver", TRIMMING: None}
    with (
        dask.config.set(method),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as workers,
        distributed.Client(workers) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        killed, write = [], PartialRun.write

        def kill(self: PartialRun, measured: LayerResult) -> None:
            if not killed:
                killed.append(next(iter(workers.workers.values())).process.pid)
                os.kill(killed[0], signal.SIGKILL)
            write(self, measured)

        patch.setattr(PartialRun, "write", kill)
        ds = lb.compare(bert, TEXTS * 2, client=client, out=tmp_path / "run.zarr", **options)
    assert killed
    np.testing.assert_allclose(ds["exact"], whole["exact"], rtol=1e-9)
    np.testing.assert_allclose(ds["yudin"], whole["yudin"], rtol=1e-12)


@pytest.mark.slow
def test_workers_of_the_command_line_keep_freed_memory(bert: Path) -> None:
    """Dask's own do not, and take several times as long."""
    pytest.importorskip("dask.distributed")
    name = TRIMMING.rpartition(".")[2]
    forkserver.ensure_running()
    options = OPTIONS | {"samples": 1, "memory": "auto"}
    with pytest.MonkeyPatch.context() as patch:  # dask leaves it behind
        patch.setenv(name, "")
        patch.delenv(name)
        with cluster("local:1") as client, warnings.catch_warnings():
            warnings.simplefilter("error", Notice)
            lb.compare(bert, TEXTS, client=client, **options)
            assert set(client.run(os.environ.get, name).values()) == {None}
