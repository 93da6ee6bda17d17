"""Runs that survive: interrupted, out of disk, shared by workers."""

import warnings
from collections.abc import Callable
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
from lipbound.errors import CheckpointError, LipboundError, Notice, StoreError
from lipbound.models.loading import load_checkpoint
from lipbound.runs import store
from lipbound.runs.execute import WorkerSpec, work
from lipbound.runs.measure import LayerResult, MeasurementSpec
from lipbound.runs.partial_store import (
    DONE,
    PartialRun,
    measured_blocks,
    partial_path,
    same_configuration,
)


@pytest.mark.each_value(count=(0, 3))
@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_runs_are_taken_up(
    count: int,
    failure: BaseException,
    bert: Path,
    whole: xr.Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After ``count`` of 8 (sample, layer) pairs: the others are computed, those are not, and the
    result is that of one go."""
    out = tmp_path / "run.zarr"
    write, seen = zarr.Array.__setitem__, []

    def fail(self: zarr.Array, where: object, values: object) -> None:
        if self.basename == "yudin" and len(seen) == count:
            raise failure
        if self.basename == DONE:
            seen.append(where)
        write(self, where, values)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", fail)
        with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else StoreError):
            lb.compare(bert, TEXTS, out=out, **OPTIONS)
    assert not out.exists()
    assert measured_blocks(partial_path(out)) == (count, 8)
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


def test_the_block_of_an_unfinished_run_is_kept(
    bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other memory would group samples otherwise, and change last digits."""
    out = tmp_path / "run.zarr"
    monkeypatch.setattr(PartialRun, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.undo()
    assert identical(
        lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS | {"memory": "1GB"}), whole
    )


def test_a_run_killed_before_its_first_file_is_begun_anew(
    bert: Path, whole: xr.Dataset, tmp_path: Path
) -> None:
    partial_path(tmp_path / "run.zarr").mkdir()
    assert identical(
        lb.compare(bert, TEXTS, out=tmp_path / "run.zarr", resume=True, **OPTIONS), whole
    )


def test_other_configurations_are_refused(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_finished_run_is_returned_as_it_is(
    bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_workers_measure_what_one_process_measures(
    bert: Path, whole: xr.Dataset, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("dask.distributed")
    out = tmp_path / "run.zarr"
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
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


def test_a_partial_run_is_let_go_whatever_fails(
    bert: Path, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After everything is measured, too."""
    out = tmp_path / "run.zarr"
    monkeypatch.setattr("lipbound.runs.dataset.audit", None)
    with pytest.raises(TypeError):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr("lipbound.runs.measure._measure", None)
    assert identical(lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS), whole)


def _interrupted(bert: Path, out: Path, count: int = 5) -> Path:
    """A run that stops after ``count`` of its 8 (sample, layer) pairs."""
    left = [count]
    plain = PartialRun.write

    def write(self: PartialRun, start: int, measured: LayerResult) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        plain(self, start, measured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialRun, "write", write)
        with pytest.raises(KeyboardInterrupt):
            lb.compare(bert, TEXTS, out=out, **OPTIONS)
    return partial_path(out)


def _files(partial: Path, name: str) -> list[Path]:
    return sorted(file for file in (partial / name / "c").rglob("*") if file.is_file())


def _lost(partial: Path, name: str) -> None:
    _files(partial, name)[0].unlink()


def _emptied(partial: Path, name: str) -> None:
    _files(partial, name)[0].write_bytes(b"")


def _cut(partial: Path, name: str) -> None:
    file = _files(partial, name)[0]
    file.write_bytes(file.read_bytes()[:9])


def _flipped(partial: Path, name: str) -> None:
    """One bit of the last byte."""
    file = _files(partial, name)[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _edited(partial: Path, name: str) -> None:
    array = zarr.open_array(partial / name, mode="a")
    array[...] = array[...] ^ 1 if array.dtype == bool else array[...] + 1


def _swapped(partial: Path, name: str) -> None:
    """Values of two blocks change places."""
    array = zarr.open_array(partial / name, mode="a")
    values = array[:]
    array[:] = values[::-1]


def _small(
    out: Path, tables: dict[str, np.ndarray], *, resume: bool, written: int = 0
) -> PartialRun:
    """The unfinished run of 2 blocks of 2 samples, 3 layers and 2 heads, of which ``written`` pairs
    of block and layer are measured."""
    tables |= {
        "exact": np.full((4, 3, 2), np.nan),
        "steps": np.zeros((4, 3, 2), dtype=np.int32),
        "sound": np.zeros((4, 3, 2), dtype=bool),
    }
    run = PartialRun(out, {"model": "none", "norm": "frobenius"}, tables, 2, resume=resume)
    for k in range(written):
        rows, layer = slice(2 * (k % 2), 2 * (k % 2) + 2), k // 2
        values = {
            "exact": 1.5 + k + np.arange(4.0).reshape(2, 2),
            "steps": 7 + k + np.arange(4).reshape(2, 2),
            "sound": np.arange(4).reshape(2, 2) != k,
        }
        for name, value in values.items():
            tables[name][rows, layer] = value
        run.write(rows.start, LayerResult(layer, values, np.array([5 + k % 2, 6]), 1e-6 * (1 + k)))
    run.close(finished=False)
    return run


@pytest.mark.parametrize("name", ["exact", "steps", "sound", ".length", ".capture_error"])
@pytest.mark.parametrize("harm", [_lost, _emptied, _cut, _flipped, _edited, _swapped])
def test_nothing_damaged_is_taken_up(
    harm: Callable[[Path, str], None], name: str, tmp_path: Path
) -> None:
    """Not one value of an unfinished run is taken over that is not as it was written; what is not,
    is told."""
    before: dict[str, np.ndarray] = {}
    _small(tmp_path / "run", before, resume=False, written=5)
    harm(partial_path(tmp_path / "run"), name)
    after: dict[str, np.ndarray] = {}
    with pytest.warns(
        Notice,
        match="[1-5] of the 5 measured blocks of one layer each in .* (is|are) lost or damaged, "
        "and measured again",
    ):
        run = _small(tmp_path / "run", after, resume=True)
    assert run.done.sum() < 5
    done = np.repeat(run.done, 2, axis=0)
    for key, table in after.items():
        np.testing.assert_array_equal(table[done], before[key][done])
        assert bool(np.isnan(table[~done]).all() if key == "exact" else not table[~done].any())
    assert run.lengths[np.repeat(run.done.any(1), 2)].all()


def test_what_is_whole_is_taken_up(tmp_path: Path) -> None:
    before: dict[str, np.ndarray] = {}
    _small(tmp_path / "run", before, resume=False, written=5)
    after: dict[str, np.ndarray] = {}
    run = _small(tmp_path / "run", after, resume=True)
    assert run.done.tolist() == [[True, True, True], [True, True, False]]
    assert (run.lengths.tolist(), run.error) == ([5, 6, 6, 6], pytest.approx(5e-6))
    for key, table in after.items():
        np.testing.assert_array_equal(table, before[key])


def test_what_is_damaged_is_measured_again(bert: Path, whole: xr.Dataset, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    partial = _interrupted(bert, out)
    _lost(partial, "yudin")
    with pytest.warns(
        Notice,
        match="1 of the 5 measured blocks of one layer each in .* is lost or damaged, and "
        "measured again",
    ):
        ds = lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    assert identical(ds, whole)
    assert identical(store.load(out, damaged="refuse"), whole)


@pytest.mark.parametrize("harm", [_lost, _emptied, _cut])
def test_lost_marks_cost_time_alone(harm: Callable[[Path, str], None], tmp_path: Path) -> None:
    _small(tmp_path / "run", {}, resume=False, written=5)
    harm(partial_path(tmp_path / "run"), DONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)  # a mark that is not there is none
        assert _small(tmp_path / "run", {}, resume=True).done.sum() == 4


@pytest.mark.parametrize("content", [None, "", "{}", '{"zarr_format": 3'])
@pytest.mark.parametrize("name", ["exact", ".length", DONE, "."])
def test_a_lost_description_costs_no_values(name: str, content: str | None, tmp_path: Path) -> None:
    """What is beside it is known by its marks."""
    before: dict[str, np.ndarray] = {}
    _small(tmp_path / "run", before, resume=False, written=5)
    description = partial_path(tmp_path / "run") / name / "zarr.json"
    description.unlink() if content is None else description.write_text(content)
    after: dict[str, np.ndarray] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        assert _small(tmp_path / "run", after, resume=True).done.sum() == 5
    np.testing.assert_array_equal(after["exact"], before["exact"])


def test_a_run_of_others_without_its_description_is_left_alone(bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    partial = _interrupted(bert, out)
    (partial / "zarr.json").unlink()
    with pytest.raises(StoreError, match="nothing in it fits this run"):
        lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS | {"seed": 1})
    assert measured_blocks(partial) == (5, 8)


def test_unfinished_runs_are_named(bert: Path, tmp_path: Path) -> None:
    """By every command that reads runs, with what finishes them."""
    out = tmp_path / "my run.zarr"
    partial = _interrupted(bert, out)
    for path, words in (
        (partial, "is an unfinished run"),
        (out, "there is no run .* yet, but an unfinished one"),
    ):
        with pytest.raises(
            StoreError,
            match=rf"{words}.* \(5 of 8 blocks .*--out '.*my run.zarr' --resume, finishes it",
        ):
            lb.load(path)
    for command in (
        ["info"],
        ["heatmap", "-o", str(tmp_path / "x.pdf")],
        ["table"],
        ["report", "-o", str(tmp_path / "x.html")],
        ["verify"],
    ):
        result = CliRunner().invoke(app, [command[0], str(partial), *command[1:]])
        assert "is an unfinished run (5 of 8 blocks" in str(result.exception)
        assert isinstance(result.exception, StoreError)


def test_what_differs_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError,
        match="bounds was yudin, kim and is now none; data was a story and is now none; use the "
        "same",
    ):
        same_configuration(
            tmp_path,
            {"bounds": ["yudin", "kim"], "data": "a story", "seed": 0},
            {"bounds": [], "data": None, "seed": 0},
        )
