"""Many runs from one file."""

import csv

import numpy as np
import pandas as pd
import pytest
import yaml
from support.commands import command, refused
from support.runs import TEXTS

import lipbound as lb
from lipbound.runs.config import RunConfig
from lipbound.runs.sweep import OPTIONS, planned_runs, sweep


def swept(folder, **content):
    """The index of a sweep, as text."""
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    sweep(folder / "sweep.yaml", folder / "runs", progress=False)
    with (folder / "runs" / "index.csv").open() as file:
        return list(csv.DictReader(file))


def test_sweeps(bert, text, tmp_path):
    models = [str(bert), str(tmp_path / "nothing")]
    options = {"data": text, "max_length": [6, 8], "bounds": "yudin", "samples": 2}
    rows = swept(tmp_path, model=models, **options)
    assert [row["status"] for row in rows] == ["done", "done", "failed", "failed"]
    assert rows[2]["error"].startswith("there is no directory")
    columns = "run,model,data,max_length,status,error,samples,layers,norms,not_closed,exact_geomean"
    assert [*rows[0]][:11] == columns.split(",")
    runs = [lb.load(tmp_path / "runs" / row["run"]) for row in rows[:2]]
    assert [ds.attrs["tokens"] for ds in runs] == [6, 8]
    stored = tmp_path / "runs" / rows[0]["run"] / "zarr.json"
    before = stored.stat().st_mtime_ns
    status, out, err = command(f"sweep {tmp_path / 'sweep.yaml'} --out {tmp_path / 'runs'}")
    assert (status, out.count("kept:")) == (2, 2)
    assert err.count("note: 2 of 4 runs in ") == err.count(" were finished before") == 1
    assert "2 runs of the sweep failed" in err
    assert stored.stat().st_mtime_ns == before


def test_the_index_has_the_numbers_of_every_run(bert, text, tmp_path):
    """Set against the values of the stores, with bounds that only some of the runs have."""
    pairs = [{"data": text, "bounds": "yudin"}, {"data": text, "bounds": "yudin,castin"}]
    pairs[1] |= {"layers": [1]}
    rows = swept(tmp_path, pairs=pairs, model=str(bert), samples=2, max_length=6)
    assert [row["layers"] for row in rows] == ["2", "1"]
    assert rows[0]["castin_ratio"] == ""
    for row in rows:
        ds = lb.load(tmp_path / "runs" / row["run"])
        exact = ds["exact"]
        counts = [int(row[name]) for name in ("samples", "norms", "not_closed")]
        assert counts == [2, exact.size, 0]
        geomean = float(np.exp(np.log(exact).mean()))
        assert float(row["exact_geomean"]) == pytest.approx(geomean, rel=1e-12)
        assert float(row["exact_min"]) == float(exact.min())
        assert float(row["exact_max"]) == float(exact.max())
        for name in ds.attrs["bounds"]:
            ratio = float(np.exp(np.log(ds[name] / exact).mean()))
            assert float(row[f"{name}_ratio"]) == pytest.approx(ratio, rel=1e-12)
            assert int(row[f"{name}_violations"]) == int((ds[name] < exact).sum())


def test_names_of_stores(bert, tmp_path):
    """A sign is no dash, and a text is no longer than the name of a file may be."""
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"model": "b-1", "seed": [-1, 1], "layers": [[0, 1], -2]}))
    ends = ["0_1-seed_minus1", "0_1-seed_1", "minus2-seed_minus1", "minus2-seed_1"]
    assert sorted(planned_runs(file)) == sorted(f"b_1-default-128-layers_{end}" for end in ends)
    options = {"max_length": 6, "bounds": "none", "seed": [0, 1], "tol": [0.1, 0.01]}
    data = [("the ferry and the island " * 20)[:-1], "the ferry and the island " * 20 + "clock"]
    rows = swept(tmp_path, model=str(bert), data=data, samples=1, **options)
    assert [row["status"] for row in rows] == ["done"] * 8
    assert len({row["run"] for row in rows}) == 8


def test_pairs(tmp_path):
    file = tmp_path / "sweep.yaml"
    pairs = [
        {"model": "a", "data": "x.txt"},
        {"model": ["b", "c"], "data": "y.txt", "max_length": 6, "samples": 2},
    ]
    file.write_text(yaml.safe_dump({"pairs": pairs, "max_length": [7, 8], "samples": 5}))
    found = {name: (one["max_length"], one["samples"]) for name, one in planned_runs(file).items()}
    assert found == {
        "a-x-7-samples_5": (7, 5),
        "a-x-8-samples_5": (8, 5),
        "b-y-6-samples_2": (6, 2),
        "c-y-6-samples_2": (6, 2),
    }


def test_every_option_may_be_a_list(bert, tmp_path):
    """A run for each, which is said in its name and has a column in the index; what is the same in
    all runs has neither."""
    options = {"data": "the ferry in a clock", "max_length": 5, "bounds": ["yudin"], "samples": 1}
    several = {"seed": [0, 1], "layers": [[0], [0, 1]], "dtype": "float64"}
    rows = swept(tmp_path, model=str(bert), **options, **several)
    columns = ["run", "model", "data", "max_length", "asked_layers", "seed", "status", "error"]
    assert [*rows[0]][:8] == columns
    assert "dtype" not in rows[0]
    found = {(row["run"].rpartition("-5-")[2], row["seed"], row["asked_layers"]) for row in rows}
    assert found == {
        ("layers_0-seed_0.zarr", "0", "[0]"),
        ("layers_0_1-seed_0.zarr", "0", "[0, 1]"),
        ("layers_0-seed_1.zarr", "1", "[0]"),
        ("layers_0_1-seed_1.zarr", "1", "[0, 1]"),
    }
    for row in rows:
        ds = lb.load(tmp_path / "runs" / row["run"])
        assert ds.attrs["seed"] == int(row["seed"])
        assert str(ds.sizes["layer"]) == row["layers"] == str(row["asked_layers"].count(",") + 1)


def test_an_index_on_a_full_disk(bert, tmp_path, monkeypatch):
    """One sentence, and the run is kept."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    options = {"data": "the ferry", "max_length": 4, "bounds": "yudin"}
    words = "index.csv cannot be written: No space left on device"
    refused(lambda: swept(tmp_path, model=str(bert), **options), words)
    assert len(list((tmp_path / "runs").glob("*.zarr"))) == 1


def test_runs_of_a_sweep_have_names_of_their_own(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("model: [a/b, a_b]\ndata: [x/one.txt, y/one.txt]\n")
    names = ["a_b-one-128", "a_b-one-128-2", "a_b-one-128-3", "a_b-one-128-4"]
    assert list(planned_runs(file)) == names


def test_every_option_of_compare_is_one_of_sweeps(tmp_path):
    given = {"seed": 3, "layers": [1], "memory": "1GB", "adapter": "owner/adapter"}
    config = RunConfig("m", **given)
    file = tmp_path / "sweep.yaml"
    options = {name: getattr(config, name) for name in OPTIONS} | given
    file.write_text(yaml.safe_dump({"model": "m"} | options | {"extras": []}))
    (arguments,) = planned_runs(file).values()
    assert RunConfig(**arguments) == config


@pytest.fixture
def text(tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(TEXTS * 3))
    return str(tmp_path / "words.txt")
