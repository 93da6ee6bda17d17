"""Runs put together, with the provenance of each."""

import numpy as np
import pytest
from support.commands import refused
from support.runs import OPTIONS, TEXTS, identical

import lipbound as lb
from lipbound import schema, tables
from lipbound.runs.checksums import checksums, edited
from lipbound.runs.concat import split
from lipbound.runs.config import RunConfig
from lipbound.schema import Contents, origins

OTHERS = ["a ferry of the island", "the clock"]


@pytest.fixture(scope="module")
def other(bert):
    """A run on other texts."""
    return lb.compare(bert, OTHERS, **OPTIONS)


def test_only_the_data_of_what_is_shown_are_named(whole, other):
    ds = lb.concat([whole, other])
    for words in (tables.caption, tables.methods):
        names = [run.attrs["data"] for run in (whole, other)]
        assert " and ".join(names) in words(ds)
        alone = words(ds.isel(sample=[5]))
        assert names[1] in alone
        assert names[0] not in alone


def test_samples_of_two_runs(whole, other, tmp_path):
    ds = lb.concat([whole, other])
    for name in (*schema.own(whole), "length", "checksum"):
        np.testing.assert_array_equal(ds[name], np.concatenate([whole[name], other[name]]))
    assert ds["sample"].values.tolist() == [0, 1, 2, 3, 4, 5]
    assert ds["run_sample"].values.tolist() == [0, 1, 2, 3, 0, 1]
    assert ds["run"].values.tolist() == [[0, 0]] * 4 + [[1, 1]] * 2
    assert (ds.attrs["samples"], ds.attrs["delta"], ds.attrs["tokens"]) == (6, 2e-6, 6)
    both = [run.attrs["data_fingerprint"] for run in (whole, other)]
    assert ds.attrs["data_fingerprint"] == "; ".join(both)
    assert origins(ds) == [whole.attrs, other.attrs]
    assert (edited(ds), len(origins(ds)), Contents.of(ds).made.samples) == (False, 2, 6)
    assert lb.load(lb.save(ds, tmp_path / "run.zarr"), damaged="refuse").identical(ds)
    assert [identical(a, b) for a, b in zip(split(ds), (whole, other), strict=True)] == [True, True]
    part = ds.isel(sample=[1, 5])
    assert (edited(part), len(origins(part))) == (False, 2)
    assert len(origins(ds.isel(sample=[5]))) == 1
    assert edited(ds * 2) is True
    assert len(tables.summary(ds)) == 2


def test_layers_of_two_runs_make_the_run_of_both(bert, whole):
    parts = [lb.compare(bert, TEXTS, **OPTIONS | {"layers": [layer]}) for layer in (1, 0)]
    ds = lb.concat(parts)
    assert ds["layer"].values.tolist() == [0, 1]
    assert ds["run"].values.tolist() == [[1, 0]] * 4
    for name in ("yudin", "lipbound", "layer_name", "length"):
        np.testing.assert_array_equal(ds[name], whole[name])
    np.testing.assert_allclose(ds["exact"], whole["exact"], rtol=1e-6)
    assert (Contents.of(ds).made.model_layers, ds.attrs["samples"]) == (ds.sizes["layer"], 4)


def test_samples_and_layers_and_runs_put_together_before(whole, other):
    first, second = ([run.sel(layer=[k]) for k in (0, 1)] for run in (whole, other))
    ds = lb.concat([lb.concat(first), lb.concat(second[::-1])])
    expected = lb.concat([whole, other])
    assert ds["exact"].identical(expected["exact"])
    # parts of one run are from one run
    assert (len(ds.attrs["runs"]), ds.attrs["delta"]) == (2, 2e-6)
    halves = lb.concat([whole.isel(sample=[2, 3]), whole.isel(sample=[0, 1])])
    assert halves["run_sample"].values.tolist() == [2, 3, 0, 1]
    assert (len(origins(halves)), halves.attrs["delta"]) == (1, 1e-6)


def test_samples_with_exact_norms_come_first(bert):
    options = OPTIONS | {"exact_samples": 1}
    ds = lb.concat([lb.compare(bert, texts, **options) for texts in (TEXTS[:2], OTHERS)])
    known = ds["exact"].notnull().any(["layer", "head"])
    assert known.values.tolist() == [True, True, False, False]
    assert ds["run_sample"].values.tolist() == [0, 0, 1, 1]
    assert ds.attrs["exact_samples"] == 2


def test_heads_of_layers_with_fewer(whole):
    """The run of the layer with fewer heads has no places for those that it lacks."""
    less, more = whole.isel(layer=[0], head=[0, 1]), whole.isel(layer=[1])
    ds = lb.concat([less, more])
    assert bool(ds["exact"][:, 0, 2:].isnull().all())
    assert Contents.of(ds).heads == (2, 4)
    assert edited(ds) is False
    fewer = whole.isel(layer=[0], head=[1])
    refused(lambda: lb.concat([fewer, more]), "heads is", error=lb.errors.StoreError)


def test_runs_that_do_not_agree(bert, whole, other):
    parts = whole.isel(layer=[0]), whole.isel(layer=[1], sample=[0])
    others = [{"seed": 1}, {"tol": 1e-2}, {"dtype": "float64"}]
    others += [{"bounds": "yudin"}, {"extras": "frobenius"}, {"wrt": "values", "bounds": "none"}]
    for runs, words in (
        ([whole], "runs is no list of two at least"),
        (whole, "runs is no list of two at least"),
        ([whole, whole], "is in 2 of the runs, and must be in one; select"),
        (parts, "layer 1 of sample 1 of the data sha256:"),
        ([whole, other * 2], "is not as it was computed: its numbers at every sample and layer"),
        ([lb.concat([whole, other]), other * 2], "run 2 of those given"),
        ([whole, other[["exact", "yudin"]]], "variables that it was made with were left out"),
        ([whole, other.drop_vars("checksum")], "the checksums of its numbers are missing"),
        *(
            (
                [whole, lb.compare(bert, OTHERS[:1], **OPTIONS | changes)],
                f"the runs do not agree: {next(iter(changes))} is",
            )
            for changes in others
        ),
    ):
        refused(lambda runs=runs: lb.concat(runs), words, error=lb.errors.StoreError)
    ds = lb.concat([whole, other])
    refused(lambda: RunConfig.of(ds), "cannot be computed again as one", error=lb.errors.StoreError)


def test_every_run_is_verified(bert, tmp_path):
    texts, options = [tmp_path / "one.txt", tmp_path / "two.txt"], {"max_length": 6, "samples": 1}
    for file, lines in zip(texts, (TEXTS, OTHERS), strict=True):
        file.write_text("\n".join(lines))
    options |= {"bounds": ["yudin"], "progress": False}
    ds = lb.concat([lb.compare(bert, file, **options) for file in texts])
    found = lb.verify(lb.save(ds, tmp_path / "both.zarr"), places=1)
    assert found.ok, str(found)
    assert (found.runs, len(found.places), int(found.table.loc["yudin", "values"])) == (2, 2, 8)
    assert "of 2 runs that were put together" in str(found)
    ds["yudin"][1, 0, 2] *= 1.5
    text = "; ".join(lb.verify(ds, places=1).problems)
    assert "run 1: its numbers at sample 0 layer 0 are not those that were computed" in text
    assert "yudin at run 1: sample 0, layer 0, head 2" in text
    assert "run 0: " not in text


def test_parts_are_verified(bert, tmp_path):
    """By the numbers that they had in the run, with its shares of delta, heads and samples."""
    (tmp_path / "one.txt").write_text("\n".join(TEXTS * 3))
    options = {"max_length": 6, "samples": 2, "bounds": ["yudin"], "progress": False}
    ds = lb.compare(bert, tmp_path / "one.txt", **options)
    part = ds.isel(sample=[1], layer=[1], head=[2, 3])
    found = lb.verify(part, places=1)
    assert found.ok, str(found)
    assert found.places == [(1, 1)]
    assert float(found.table.loc["exact_upper", "largest"]) < 1e-6
    changed = part.copy(deep=True)
    changed["exact"][0, 0, 1] *= 1.01
    problems = lb.verify(changed, places=1).problems
    assert any(one.startswith("exact at sample 1, layer 1, head 3: stored") for one in problems)
    moved = lb.verify(ds.assign_coords(sample=[0, 5]), places=1).faults
    assert any("the coordinates sample cannot be those of the run" in fault for fault in moved)
    assert checksums(part).values.tolist() == ds["checksum"].values[1:, 1:, 2:].tolist()
