"""Runs that survive: interrupted, out of disk, shared by workers."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from support.runs import OPTIONS, TEXTS, identical
from typer.testing import CliRunner

import lipbound as lb
from lipbound.cli import app
from lipbound.errors import CheckpointError, LipboundError, StoreError
from lipbound.models.checkpoints import load_checkpoint
from lipbound.runs import store
from lipbound.runs.execute import WorkerSpec, work
from lipbound.runs.measure import LayerResult, MeasurementSpec
from lipbound.runs.partial_store import DONE, PartialRun, partial_path


@pytest.mark.each_value(count=(0, 3))
@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_runs_are_taken_up(
    count: int, failure: BaseException, bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``count`` of 8 (sample, layer) pairs: the others are computed, those are not, and the result is that of one go."""
    out = tmp_path / "run.zarr"
    write, seen = PartialRun._array, []

    def fail(self: PartialRun, name: str) -> zarr.Array:
        if name == "yudin" and len(seen) == count:
            raise failure
        if name == DONE:
            seen.append(name)
        return write(self, name)

    with monkeypatch.context() as patch:
        seen.append(DONE)  # the first look at the marks
        seen.clear()
        patch.setattr(PartialRun, "_array", fail)
        patch.setattr(PartialRun, "done", property(lambda self: np.asarray(self._group[DONE][:])))
        with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else StoreError):
            lb.compare(bert, TEXTS, out=out, **OPTIONS)
    assert not out.exists()
    assert int(np.asarray(zarr.open_group(partial_path(out), mode="r")[DONE][:]).sum()) == count
    with pytest.raises(StoreError, match="unfinished run"):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)

    again: list[tuple[int, int]] = []
    put = PartialRun.write

    def log(self: PartialRun, start: int, measured: LayerResult) -> None:
        again.append((start, measured.layer))
        put(self, start, measured)

    monkeypatch.setattr(PartialRun, "write", log)
    ds = lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    assert len(again) == 8 - count
    assert identical(store.load(out), whole)
    assert ds["exact"].equals(whole["exact"])
    assert not partial_path(out).exists()


def test_the_block_of_an_unfinished_run_is_kept(bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory would group samples otherwise, and change last digits."""
    out = tmp_path / "run.zarr"
    monkeypatch.setattr(PartialRun, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.undo()
    assert identical(lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS | {"memory": "1GB"}), whole)


def test_a_run_killed_before_its_first_file_is_begun_anew(bert: Path, whole: xr.Dataset, tmp_path: Path) -> None:
    partial_path(tmp_path / "run.zarr").mkdir()
    assert identical(lb.compare(bert, TEXTS, out=tmp_path / "run.zarr", resume=True, **OPTIONS), whole)


def test_other_configurations_are_refused(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.zarr"
    monkeypatch.setattr(PartialRun, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.undo()
    for change, field in (
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"tol": 1e-2}, "tol"),
        ({"layers": [0]}, "layers"),
        ({"bounds": "kim"}, "bounds"),
    ):
        with pytest.raises(StoreError, match=field):
            lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS | change)
    with pytest.raises(StoreError, match="data_fingerprint"):
        lb.compare(bert, TEXTS[::-1], out=out, resume=True, **OPTIONS)


def test_a_finished_run_is_returned_as_it_is(bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.zarr"
    lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    monkeypatch.setattr("lipbound.runs.measure._measure", None)
    assert identical(lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS), whole)
    with pytest.raises(StoreError, match="seed was 0 and is now 2"):
        lb.compare(bert, TEXTS, out=out, resume=True, seed=2, **OPTIONS)
    with pytest.raises(StoreError, match="exists already"):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)


def test_one_process_at_a_time(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.zarr"
    inner: list[str] = []

    def second(*_: object) -> None:
        monkeypatch.undo()
        with pytest.raises(StoreError, match="another process"):
            lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
        inner.append("refused")
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialRun, "write", second)
    with pytest.raises(KeyboardInterrupt):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    assert inner == ["refused"]


def test_workers_measure_what_one_process_measures(bert: Path, whole: xr.Dataset, tmp_path: Path) -> None:
    distributed = pytest.importorskip("dask.distributed")
    out = tmp_path / "run.zarr"
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        ds = lb.compare(bert, TEXTS, out=out, client=client, **OPTIONS)
        with pytest.raises(LipboundError, match="name that every worker can load"):
            lb.compare(lb.load_checkpoint(bert).model, TEXTS, client=client, **OPTIONS)
    assert identical(ds, whole)
    assert identical(store.load(out), whole)


def test_workers_refuse_other_weights(bert: Path) -> None:
    checkpoint = load_checkpoint(bert)
    job = MeasurementSpec(("yudin",), "head", 1e-3, None, 0, 1)
    recipe = WorkerSpec(str(bert), None, checkpoint.revision, "float32", "cpu", None, job)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    assert [m.layer for m in work(recipe, inputs, 0, {0})] == [1]
    with pytest.raises(CheckpointError, match="on a worker"):
        work(recipe._replace(weights="sha256:other"), inputs, 0)


@pytest.mark.parametrize("memory", ["much", 0, -1, "4XB"])
def test_bad_memory(memory: object, bert: Path) -> None:
    with pytest.raises(LipboundError, match="4GB"):
        lb.compare(bert, TEXTS, **OPTIONS | {"memory": memory})


def test_resume_needs_a_name(bert: Path) -> None:
    with pytest.raises(LipboundError, match="needs out"):
        lb.compare(bert, TEXTS, resume=True, **OPTIONS)


def test_schedulers_that_are_none(bert: Path) -> None:
    for scheduler in ("local:none", "local:0"):
        result = CliRunner().invoke(app, ["compare", str(bert), "--scheduler", scheduler])
        assert isinstance(result.exception, LipboundError)
        assert "local:2" in str(result.exception)


def test_a_partial_run_is_let_go_whatever_fails(bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After everything is measured, too."""
    out = tmp_path / "run.zarr"
    monkeypatch.setattr("lipbound.runs.dataset.audit", None)
    with pytest.raises(TypeError):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr("lipbound.runs.measure._measure", None)
    assert identical(lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS), whole)
