"""Runs that survive: interrupted, out of disk, shared by workers."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import command, refused
from support.runs import OPTIONS, TEXTS, identical

import lipbound as lb
from lipbound.errors import CheckpointError, Notice, StoreError
from lipbound.runs.config import RunConfig
from lipbound.runs.measure import work
from lipbound.runs.store import CONFIGURATION, LayerResult, PartialRun, partial_path


@pytest.mark.each_value(count=(0, 3))
@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_runs_are_taken_up(count, failure, bert, whole, tmp_path, monkeypatch):
    """After ``count`` of 8 (sample, layer) pairs: the others are computed, those are not, and the
    result is that of one go."""
    out, put = tmp_path / "run.zarr", PartialRun.write
    _interrupted(bert, out, count, failure)
    assert not out.exists()
    assert len(_files(partial_path(out))) == count
    refused(lambda: lb.compare(bert, TEXTS, out=out, **OPTIONS), "unfinished run", error=StoreError)

    again = []

    def log(self, measured):
        again.append((measured.start, measured.layer))
        put(self, measured)

    monkeypatch.setattr(PartialRun, "write", log)
    ds = lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    assert len(again) == 8 - count
    assert identical(lb.load(out), whole)
    assert ds["exact"].equals(whole["exact"])
    assert not partial_path(out).exists()


def test_a_finished_run_is_returned_as_it_is(bert, whole, tmp_path, monkeypatch):
    """One that was killed before its first file is begun anew."""
    given = {"data": TEXTS, "out": tmp_path / "run.zarr", **OPTIONS}
    partial_path(given["out"]).mkdir()
    assert identical(lb.compare(bert, resume=True, **given), whole)
    monkeypatch.setattr("lipbound.runs.measure.Measurer._measure", None)
    assert identical(lb.compare(bert, resume=True, **given), whole)
    call = functools.partial(lb.compare, bert, **given)
    refused(lambda: call(resume=True, seed=2), "seed was 0 and is now 2", error=StoreError)
    refused(call, "exists already", error=StoreError)


def test_one_process_at_a_time(bert, tmp_path, monkeypatch):
    inner = []
    call = functools.partial(lb.compare, bert, TEXTS, out=tmp_path / "run.zarr", **OPTIONS)

    def second(*_):
        monkeypatch.undo()
        refused(lambda: call(resume=True), "another process", error=StoreError)
        inner.append("refused")
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialRun, "write", second)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert inner == ["refused"]


def test_workers_measure_what_one_process_measures(bert, whole, tmp_path):
    distributed = pytest.importorskip("dask.distributed")
    out = tmp_path / "run.zarr"
    how = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**how) as cluster, distributed.Client(cluster) as client:
        ds = lb.compare(bert, TEXTS, out=out, client=client, **OPTIONS)
        loaded = functools.partial(lb.compare, lb.load_checkpoint(bert).model, TEXTS, **OPTIONS)
        refused(lambda: loaded(client=client), "name that every worker can load")
    assert identical(ds, whole)
    assert identical(lb.load(out), whole)


def test_workers_refuse_other_weights(bert):
    checkpoint = lb.load_checkpoint(bert)
    job = RunConfig(str(bert), bounds=["yudin"], exact_samples=1, delta=None, device="cpu")
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    assert [m.layer for m in work(job, checkpoint.revision, inputs, 0, {0})] == [1]
    other = functools.partial(work, job, "sha256:other", inputs, 0, ())
    refused(other, "on a worker", error=CheckpointError)


def test_a_partial_run_is_let_go_whatever_fails(bert, whole, tmp_path, monkeypatch):
    """After everything is measured, too."""
    out = tmp_path / "run.zarr"
    with monkeypatch.context() as patch:
        patch.setattr("lipbound.runs.checksums.audit", None)
        with pytest.raises(TypeError):
            lb.compare(bert, TEXTS, out=out, **OPTIONS)
    monkeypatch.setattr("lipbound.runs.measure.Measurer._measure", None)
    assert identical(lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS), whole)


def _interrupted(bert, out, count=5, failure=KeyboardInterrupt):
    """A run that stops after ``count`` of its 8 (sample, layer) pairs, where the next file is put
    in its place."""
    seen = []
    replace = Path.replace

    def fail(self, target):
        if target.suffix == ".npz":
            if len(seen) == count:
                raise failure
            seen.append(target)
        return replace(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else StoreError):
            lb.compare(bert, TEXTS, out=out, **OPTIONS)
    return partial_path(out)


def _files(partial):
    return sorted(partial.glob("[!.]*.npz"))


def _block(k):
    """A layer at a block of 2 samples, with 2 heads."""
    values = {
        "exact": 1.5 + k + np.arange(4.0).reshape(2, 2),
        "bound": 3.5 + k + np.arange(4.0).reshape(2, 2),
        "steps": 7 + k + np.arange(4).reshape(2, 2),
        "sound": np.arange(4).reshape(2, 2) != k,
    }
    return LayerResult(2 * (k % 2), k // 2, values, np.array([5 + k % 2, 6]), 1e-6 * (1 + k))


def _small(out, *, written=0):
    """An unfinished run, which stops after some more blocks: what was there when it was taken
    up."""
    run = PartialRun(out, {"model": "none", "norm": "frobenius"})
    for k in range(written):
        run.write(_block(k))
    run.__exit__(KeyboardInterrupt)
    return run.found


def test_a_flipped_bit_changes_no_value(tmp_path):
    """Wherever it is in the file; or none of it is there. The others are as they were."""
    _small(tmp_path / "run", written=2)
    file, whole = _files(partial_path(tmp_path / "run"))
    content = file.read_bytes()
    places = range(0, len(content), 7)
    for at in places:
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        file.with_name(f"{at}.npz").write_bytes(flipped)
    file.write_bytes(b"")
    damaged = len(places) + 1
    with pytest.warns(Notice, match=f"measured again: {damaged} of {damaged + 1}"):
        (found,) = _small(tmp_path / "run")
    assert whole.name == f"{found.start}-{found.layer}.npz"
    expected = next(one for one in map(_block, range(2)) if one.start == found.start)
    assert (found.layer, found.error) == (expected.layer, expected.error)
    for name, value in (expected.values | {"lengths": expected.lengths}).items():
        kept = found.lengths if name == "lengths" else found.values[name]
        np.testing.assert_array_equal(kept, value)


def test_what_is_damaged_is_measured_again(bert, whole, tmp_path):
    out = tmp_path / "run.zarr"
    first = _files(_interrupted(bert, out))[0]
    first.write_bytes(first.read_bytes()[:-30])
    with pytest.warns(Notice, match="damaged blocks in .* are measured again: 1 of 5"):
        ds = lb.compare(bert, TEXTS, out=out, resume=True, **OPTIONS)
    assert identical(ds, whole)
    assert identical(lb.load(out, damaged="refuse"), whole)


@pytest.mark.parametrize("content", [None, "", "[]", '{"model": '])
def test_a_lost_description_costs_no_values(content, tmp_path):
    """What is beside it is known by its marks."""
    _small(tmp_path / "run", written=5)
    description = partial_path(tmp_path / "run") / CONFIGURATION
    description.unlink() if content is None else description.write_text(content)
    assert len(_small(tmp_path / "run")) == 5


def test_a_run_of_others_without_its_description_is_left_alone(bert, tmp_path):
    out = tmp_path / "run.zarr"
    partial = _interrupted(bert, out)
    (partial / CONFIGURATION).unlink()
    given = OPTIONS | {"out": out, "resume": True, "seed": 1}
    call = lambda: lb.compare(bert, TEXTS, **given)  # noqa: E731
    refused(call, "nothing in it fits this run", error=StoreError)
    assert len(_files(partial)) == 5


def test_unfinished_runs_are_named(bert, tmp_path):
    """By every command that reads runs, with what finishes them."""
    out = tmp_path / "my run.zarr"
    partial = _interrupted(bert, out)
    for path in (partial, out):
        words = "is an unfinished run; ", f"--out '{out}' --resume"
        refused(lambda path=path: lb.load(path), *words, error=StoreError)
    for name in ("info", f"heatmap -o {tmp_path}/x.pdf", "table", f"report -o {tmp_path}/x.html"):
        status, _, err = command(f"{name} '{partial}'")
        assert (status, "is an unfinished run; " in err) == (2, True)


def test_only_the_same_configuration_is_taken_up(bert, whole, tmp_path):
    """With the blocks that it began with: other memory would group samples otherwise, and change
    last digits."""
    given = {"data": TEXTS, "out": tmp_path / "run.zarr", **OPTIONS}
    _interrupted(bert, given["out"], 0)
    given["resume"] = True
    for change, words in (
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"tol": 1e-2}, "tol"),
        ({"norm": "one-token", "bounds": []}, "norm was frobenius and is now one-token"),
        ({"layers": [0]}, "layers"),
        ({"bounds": "kim"}, "bounds"),
        ({"data": TEXTS[::-1]}, "data_fingerprint"),
    ):
        refused(functools.partial(lb.compare, bert, **given | change), words, error=StoreError)
    assert identical(lb.compare(bert, **given | {"memory": "1GB"}), whole)
