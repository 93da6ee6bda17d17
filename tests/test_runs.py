"""Runs that survive: interrupted, killed, out of disk, shared by workers, and many from one file."""

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
import zarr
from models import save_bert
from typer.testing import CliRunner

import lipbound as lb
from lipbound.cli import app
from lipbound.errors import CheckpointError, LipboundError, StoreError
from lipbound.models.checkpoints import load_checkpoint
from lipbound.runs import store
from lipbound.runs.config import RunConfig
from lipbound.runs.execute import WorkerSpec, work
from lipbound.runs.measure import LayerResult, MeasurementSpec
from lipbound.runs.partial_store import DONE, PartialRun, partial_path
from lipbound.runs.sweep import OPTIONS as OPTIONS_OF_SWEEPS
from lipbound.runs.sweep import planned_runs, sweep

TEXTS = ["the ferry is in a clock", "the keeper and the lighthouse", "a island of the ferry", "the lighthouse"]
OPTIONS = {"max_length": 12, "progress": False, "memory": 1, "bounds": ["yudin", "lipbound"]}  # one sample at a time


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def whole(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    """The uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "run.zarr"
    lb.compare(bert, TEXTS, out=path, **OPTIONS)
    assert not partial_path(path).exists()
    return store.load(path)


def identical(a: xr.Dataset, b: xr.Dataset) -> bool:
    """Everything but date and command."""
    a, b = a.copy(), b.copy()
    for ds in (a, b):
        ds.attrs = {key: value for key, value in ds.attrs.items() if key not in ("date", "command", "settings_checksum")}
    return a.identical(b)


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


@pytest.mark.slow
def test_killed_runs_end_like_uninterrupted_ones(bert: Path, whole: xr.Dataset, tmp_path: Path) -> None:
    """SIGKILL at random moments; each process logs what it measures."""
    out, log = tmp_path / "run.zarr", tmp_path / "log"
    script = textwrap.dedent(f"""
        import time, lipbound as lb
        from lipbound.unfinished import Unfinished
        put = Unfinished.write
        def write(self, start, measured):
            with open({str(log)!r}, "a") as file:
                file.write(f"{{start}} {{measured.layer}}\\n")
            time.sleep(0.2)
            put(self, start, measured)
        Unfinished.write = write
        lb.compare({str(bert)!r}, {TEXTS!r}, out={str(out)!r}, resume=True, **{OPTIONS!r})
    """)
    dice = random.Random(0)
    for _ in range(3):
        stored = _stored(out)
        log.write_text("")
        process = subprocess.Popen([sys.executable, "-c", script])
        wanted = dice.randint(1, 2)
        while len(log.read_text().splitlines()) < wanted and process.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not stored & {tuple(map(int, line.split())) for line in log.read_text().splitlines()}
    assert _stored(out)
    lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    assert identical(store.load(out), whole)


def _stored(out: Path) -> set[tuple[int, int]]:
    if not partial_path(out).exists():
        return set()
    return {(int(b), int(i)) for b, i in np.argwhere(np.asarray(zarr.open_group(partial_path(out), mode="r")[DONE][:]))}


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


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(bert: Path, tmp_path: Path) -> None:
    """Processes; one of two is killed while it has work."""
    distributed = pytest.importorskip("dask.distributed")
    options = OPTIONS | {"dtype": "float64", "tol": 1e-9, "samples": 8}
    whole = lb.compare(bert, TEXTS * 2, **options)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        killed = []
        write = PartialRun.write

        def kill(self: PartialRun, start: int, measured: LayerResult) -> None:
            if not killed:
                process = next(iter(cluster.workers.values())).process
                killed.append(process.pid)
                subprocess.run(["kill", "-9", str(process.pid)], check=True)
            write(self, start, measured)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialRun, "write", kill)
            ds = lb.compare(bert, TEXTS * 2, client=client, out=tmp_path / "run.zarr", **options)
    assert killed
    np.testing.assert_allclose(ds["exact"], whole["exact"], rtol=1e-9)
    np.testing.assert_allclose(ds["yudin"], whole["yudin"], rtol=1e-12)


@pytest.mark.parametrize("memory", ["much", 0, -1, "4XB"])
def test_bad_memory(memory: object, bert: Path) -> None:
    with pytest.raises(LipboundError, match="4GB"):
        lb.compare(bert, TEXTS, **OPTIONS | {"memory": memory})


def test_resume_needs_a_name(bert: Path) -> None:
    with pytest.raises(LipboundError, match="needs out"):
        lb.compare(bert, TEXTS, resume=True, **OPTIONS)


def test_sweeps(bert: Path, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("\n".join(TEXTS * 3))
    file = tmp_path / "sweep.yaml"
    file.write_text(f"model: [{bert}, {tmp_path / 'nothing'}]\ndata: {text}\nmax_length: [6, 8]\nbounds: yudin\nsamples: 2\n")
    rows = list(sweep(file, tmp_path / "runs", progress=False))
    assert [row["status"] for row in rows] == ["done", "done", "failed", "failed"]
    assert "CheckpointError" in rows[2]["error"]
    index = (tmp_path / "runs" / "index.csv").read_text().splitlines()
    assert len(index) == 5
    assert index[0] == "run,model,data,max_length,status,error"
    runs = [store.load(tmp_path / "runs" / row["run"]) for row in rows[:2]]
    assert [ds.attrs["tokens"] for ds in runs] == [6, 8]
    before = (tmp_path / "runs" / rows[0]["run"] / "zarr.json").stat().st_mtime_ns
    result = CliRunner().invoke(app, ["sweep", str(file), "--out", str(tmp_path / "runs"), "--quiet"])
    assert result.output.count("done:") == 2
    assert "2 runs of the sweep failed" in str(result.exception)
    assert (tmp_path / "runs" / rows[0]["run"] / "zarr.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("content", "message"),
    [("model: [", "cannot be read as YAML"), ("- a\n- b", "is not a sweep"), ("data: x", "at least a model"), ("model: m\nsample: 3", "'samples'")],
)
def test_bad_sweep_files(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(content)
    with pytest.raises(LipboundError, match=message):
        planned_runs(file)


def test_every_option_of_compare_is_one_of_sweeps(tmp_path: Path) -> None:
    given = {"bounds": "yudin", "map": "heads", "samples": 2, "exact_samples": 1, "layers": [1], "split": "test", "column": "text", "revision": "v1"}
    given |= {"tol": 0.01, "delta": None, "device": "cpu", "dtype": "float64", "seed": 3, "memory": "1GB", "weights": "whole"}
    assert set(OPTIONS_OF_SWEEPS) == set(given)
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "max_length": 6} | given))
    (one,) = planned_runs(file)
    config = RunConfig(**one.arguments)
    assert {name: getattr(config, name) for name in given} == given
    assert (config.model, config.data, config.max_length, config.out, config.resume) == ("m", None, 6, None, False)
    file.write_text("model: m\nresume: true\n")
    with pytest.raises(LipboundError, match="unknown key 'resume'"):
        planned_runs(file)


def test_a_partial_run_is_let_go_whatever_fails(bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After everything is measured, too."""
    out = tmp_path / "run.zarr"
    monkeypatch.setattr("lipbound.runs.dataset.audit", None)
    with pytest.raises(TypeError):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr("lipbound.runs.measure._measure", None)
    assert identical(lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS), whole)


def test_runs_of_a_sweep_have_names_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("model: [a/b, a_b]\ndata: [x/one.txt, y/one.txt]\n")
    assert [run.name for run in planned_runs(file)] == ["a_b-one-128", "a_b-one-128-2", "a_b-one-128-3", "a_b-one-128-4"]


def test_schedulers_that_are_none(bert: Path) -> None:
    for scheduler in ("local:none", "local:0"):
        result = CliRunner().invoke(app, ["compare", str(bert), "--scheduler", scheduler])
        assert isinstance(result.exception, LipboundError)
        assert "local:2" in str(result.exception)
