"""Runs that survive: interrupted, out of disk, shared by workers."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from support.runs import OPTIONS, TEXTS, identical
from typer.testing import CliRunner

import lipbound as lb
from lipbound.cli import app
from lipbound.errors import CheckpointError, LipboundError, Notice, StoreError
from lipbound.models.loading import load_checkpoint
from lipbound.runs import store
from lipbound.runs.config import RunConfig
from lipbound.runs.measure import MeasurementSpec, work
from lipbound.runs.partial_store import (
    CONFIGURATION,
    LayerResult,
    PartialRun,
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
    replace, seen = Path.replace, []

    def fail(self: Path, target: Path) -> Path:
        if target.suffix == ".npz":
            if len(seen) == count:
                raise failure
            seen.append(target)
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else StoreError):
            lb.compare(bert, TEXTS, out=out, **OPTIONS)
    assert not out.exists()
    assert len(_files(partial_path(out))) == count
    with pytest.raises(StoreError, match="unfinished run"):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)

    again: list[tuple[int, int]] = []
    put = PartialRun.write

    def log(self: PartialRun, measured: LayerResult) -> None:
        again.append((measured.start, measured.layer))
        put(self, measured)

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
    config = RunConfig(str(bert), device="cpu")
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    assert [m.layer for m in work(config, checkpoint.revision, job, inputs, 0, {0})] == [1]
    with pytest.raises(CheckpointError, match="on a worker"):
        work(config, "sha256:other", job, inputs, 0)


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
    monkeypatch.setattr("lipbound.runs.checksums.audit", None)
    with pytest.raises(TypeError):
        lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr("lipbound.runs.measure._measure", None)
    assert identical(lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS), whole)


def _interrupted(bert: Path, out: Path, count: int = 5) -> Path:
    """A run that stops after ``count`` of its 8 (sample, layer) pairs."""
    left = [count]
    plain = PartialRun.write

    def write(self: PartialRun, measured: LayerResult) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        plain(self, measured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialRun, "write", write)
        with pytest.raises(KeyboardInterrupt):
            lb.compare(bert, TEXTS, out=out, **OPTIONS)
    return partial_path(out)


def _files(partial: Path) -> list[Path]:
    return sorted(partial.glob("[!.]*.npz"))


def _emptied(partial: Path) -> None:
    _files(partial)[0].write_bytes(b"")


def _cut(partial: Path) -> None:
    file = _files(partial)[0]
    file.write_bytes(file.read_bytes()[:-30])


def _edited(name: str) -> Callable[[Path], None]:
    """One array of a file, which is otherwise whole."""

    def edit(partial: Path) -> None:
        file = _files(partial)[0]
        with np.load(file) as stored:
            parts = dict(stored)
        parts[name] = parts[name] ^ 1 if parts[name].dtype == bool else parts[name] + 1
        np.savez(file, **parts)

    return edit


def _renamed(partial: Path) -> None:
    """Values of a variable under the name of another."""
    file = _files(partial)[0]
    with np.load(file) as stored:
        parts = dict(stored)
    parts["exact"], parts["bound"] = parts["bound"], parts["exact"]
    np.savez(file, **parts)


def _of_another_run(partial: Path) -> None:
    """A block of other settings, whole by itself."""
    with PartialRun(partial.with_name("other"), {"model": "other"}) as other:
        other.write(_block(0))
        _files(partial)[0].write_bytes(
            _files(partial_path(partial.with_name("other")))[0].read_bytes()
        )


def _block(k: int) -> LayerResult:
    """A layer at a block of 2 samples, with 2 heads."""
    values = {
        "exact": 1.5 + k + np.arange(4.0).reshape(2, 2),
        "bound": 3.5 + k + np.arange(4.0).reshape(2, 2),
        "steps": 7 + k + np.arange(4).reshape(2, 2),
        "sound": np.arange(4).reshape(2, 2) != k,
    }
    return LayerResult(2 * (k % 2), k // 2, values, np.array([5 + k % 2, 6]), 1e-6 * (1 + k))


def _small(out: Path, *, written: int = 0) -> list[LayerResult]:
    """An unfinished run, which stops after some more blocks: what was there when it was taken
    up."""
    run = PartialRun(out, {"model": "none", "norm": "frobenius"})
    for k in range(written):
        run.write(_block(k))
    run.__exit__(KeyboardInterrupt)
    return run.found


def _same(one: LayerResult, other: LayerResult) -> bool:
    arrays = [part.values | {"lengths": part.lengths} for part in (one, other)]
    return (one.start, one.layer, one.error) == (other.start, other.layer, other.error) and all(
        np.array_equal(arrays[0][name], arrays[1][name]) for name in {**arrays[0], **arrays[1]}
    )


@pytest.mark.parametrize(
    "harm",
    [
        _emptied,
        _cut,
        _renamed,
        _of_another_run,
        *map(
            _edited, ("exact", "steps", "sound", ".lengths", ".capture_error", ".start", ".layer")
        ),
    ],
)
def test_nothing_damaged_is_taken_up(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """Not one value of an unfinished run is taken over that is not as it was written; what is not,
    is told."""
    _small(tmp_path / "run", written=5)
    harm(partial_path(tmp_path / "run"))
    message = "1 of the 5 measured blocks of one layer each in .* is damaged, and measured again"
    with pytest.warns(Notice, match=message):
        found = _small(tmp_path / "run")
    assert [(one.start, one.layer) for one in found] == [(0, 1), (0, 2), (2, 0), (2, 1)]
    expected = {(one.start, one.layer): one for one in map(_block, range(5))}
    assert all(_same(one, expected[one.start, one.layer]) for one in found)


def test_a_flipped_bit_changes_no_value(tmp_path: Path) -> None:
    """Wherever it is in the file."""
    _small(tmp_path / "run", written=1)
    (file,) = _files(partial_path(tmp_path / "run"))
    content = file.read_bytes()
    refused = 0
    for at in range(0, len(content), 7):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Notice)
            found = _small(tmp_path / "run")
        assert not found or _same(found[0], _block(0))
        refused += not found
    assert refused > len(content) / 7 / 4


def test_what_is_whole_is_taken_up(tmp_path: Path) -> None:
    _small(tmp_path / "run", written=5)
    found = {(one.start, one.layer): one for one in _small(tmp_path / "run")}
    assert len(found) == 5
    assert all(_same(found[one.start, one.layer], one) for one in map(_block, range(5)))


def test_what_is_damaged_is_measured_again(bert: Path, whole: xr.Dataset, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    partial = _interrupted(bert, out)
    _cut(partial)
    with pytest.warns(
        Notice,
        match="1 of the 5 measured blocks of one layer each in .* is damaged, and measured again",
    ):
        ds = lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    assert identical(ds, whole)
    assert identical(store.load(out, damaged="refuse"), whole)


@pytest.mark.parametrize("content", [None, "", "[]", '{"model": '])
def test_a_lost_description_costs_no_values(content: str | None, tmp_path: Path) -> None:
    """What is beside it is known by its marks."""
    _small(tmp_path / "run", written=5)
    description = partial_path(tmp_path / "run") / CONFIGURATION
    description.unlink() if content is None else description.write_text(content)
    assert len(_small(tmp_path / "run")) == 5


def test_a_run_of_others_without_its_description_is_left_alone(bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    partial = _interrupted(bert, out)
    description = (partial / CONFIGURATION).read_bytes()
    (partial / CONFIGURATION).unlink()
    with pytest.raises(StoreError, match="nothing in it fits this run"):
        lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS | {"seed": 1})
    (partial / CONFIGURATION).write_bytes(description)
    assert len(_files(partial)) == 5


def test_unfinished_runs_are_named(bert: Path, tmp_path: Path) -> None:
    """By every command that reads runs, with what finishes them."""
    out = tmp_path / "my run.zarr"
    partial = _interrupted(bert, out)
    sentence = r"is an unfinished run; .*--out '.*my run.zarr' --resume, finishes it"
    for path in (partial, out):
        with pytest.raises(StoreError, match=sentence):
            lb.load(path)
    for command in (
        ["info"],
        ["heatmap", "-o", str(tmp_path / "x.pdf")],
        ["table"],
        ["report", "-o", str(tmp_path / "x.html")],
        ["verify"],
    ):
        result = CliRunner().invoke(app, [command[0], str(partial), *command[1:]])
        assert "is an unfinished run; " in str(result.exception)
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
