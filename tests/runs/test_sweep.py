"""Many runs from one file."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.runs import TEXTS
from typer.testing import CliRunner

from lipbound.cli import app
from lipbound.errors import LipboundError
from lipbound.runs import store
from lipbound.runs.config import RunConfig
from lipbound.runs.sweep import OPTIONS, planned_runs, sweep


def test_sweeps(bert: Path, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("\n".join(TEXTS * 3))
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"model: [{bert}, {tmp_path / 'nothing'}]\ndata: {text}\nmax_length: [6, 8]\nbounds: "
        "yudin\nsamples: 2\n"
    )
    rows = list(sweep(file, tmp_path / "runs", progress=False))
    assert [row["status"] for row in rows] == ["done", "done", "failed", "failed"]
    assert rows[2]["error"].startswith("there is no directory")
    index = (tmp_path / "runs" / "index.csv").read_text().splitlines()
    assert len(index) == 5
    assert index[0].startswith(
        "run,model,data,max_length,status,error,samples,layers,norms,not_closed,exact_geomean,"
    )
    runs = [store.load(tmp_path / "runs" / row["run"]) for row in rows[:2]]
    assert [ds.attrs["tokens"] for ds in runs] == [6, 8]
    before = (tmp_path / "runs" / rows[0]["run"] / "zarr.json").stat().st_mtime_ns
    result = CliRunner().invoke(app, ["sweep", str(file), "--out", str(tmp_path / "runs")])
    assert result.output.count("kept:") == 2
    assert "note: 2 of 4 runs were finished before and are kept as they are" in result.output
    assert "2 runs of the sweep failed" in str(result.exception)
    assert (tmp_path / "runs" / rows[0]["run"] / "zarr.json").stat().st_mtime_ns == before


def test_the_index_has_the_numbers_of_every_run(bert: Path, tmp_path: Path) -> None:
    """Set against the values of the stores, with bounds that only some of the runs have."""
    text = tmp_path / "words.txt"
    text.write_text("\n".join(TEXTS * 3))
    file = tmp_path / "sweep.yaml"
    pairs = [
        {"data": str(text), "bounds": "yudin"},
        {"data": str(text), "bounds": "yudin,castin", "layers": [1]},
    ]
    file.write_text(
        yaml.safe_dump({"pairs": pairs, "model": str(bert), "samples": 2, "max_length": 6})
    )
    list(sweep(file, tmp_path / "runs", progress=False))
    rows = list(csv.DictReader((tmp_path / "runs" / "index.csv").open()))
    assert [row["layers"] for row in rows] == ["2", "1"]
    assert rows[0]["castin_ratio"] == ""
    for row in rows:
        ds = store.load(tmp_path / "runs" / row["run"])
        assert [int(row[name]) for name in ("samples", "norms", "not_closed")] == [
            2,
            ds["exact"].size,
            0,
        ]
        assert float(row["exact_geomean"]) == pytest.approx(
            float(np.exp(np.log(ds["exact"]).mean())), rel=1e-12
        )
        assert [float(row["exact_min"]), float(row["exact_max"])] == [
            float(ds["exact"].min()),
            float(ds["exact"].max()),
        ]
        for name in ds.attrs["bounds"]:
            assert float(row[f"{name}_ratio"]) == pytest.approx(
                float(np.exp(np.log(ds[name] / ds["exact"]).mean())), rel=1e-12
            )
            assert int(row[f"{name}_violations"]) == int((ds[name] < ds["exact"]).sum())


def test_pairs(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "pairs:\n- {model: a, data: x.txt}\n- {model: [b, c], data: y.txt, max_length: 6, "
        "samples: 2}\nmax_length: [7, 8]\nsamples: 5\n"
    )
    found = [
        (name, arguments["max_length"], arguments["samples"])
        for name, arguments in planned_runs(file).items()
    ]
    assert found == [
        ("a-x-7-samples_5", 7, 5),
        ("a-x-8-samples_5", 8, 5),
        ("b-y-6-samples_2", 6, 2),
        ("c-y-6-samples_2", 6, 2),
    ]


def test_every_option_may_be_a_list(bert: Path, tmp_path: Path) -> None:
    """A run for each, which is said in its name and has a column in the index; what is the same in
    all runs has neither."""
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"model: {bert}\ndata: the ferry in a clock\nmax_length: 5\nbounds: [yudin]\nseed: [0, 1]\n"
        "layers: [[0], [0, 1]]\nsamples: 1\ndtype: float64\n"
    )
    list(sweep(file, tmp_path / "runs", progress=False))
    rows = list(csv.DictReader((tmp_path / "runs" / "index.csv").open()))
    assert list(rows[0])[:8] == [
        *("run", "model", "data", "max_length", "asked_layers", "seed", "status", "error")
    ]
    assert "dtype" not in rows[0]
    found = [(row["run"].rpartition("-5-")[2], row["seed"], row["asked_layers"]) for row in rows]
    assert found == [
        ("layers_0-seed_0.zarr", "0", "[0]"),
        ("layers_0_1-seed_0.zarr", "0", "[0, 1]"),
        ("layers_0-seed_1.zarr", "1", "[0]"),
        ("layers_0_1-seed_1.zarr", "1", "[0, 1]"),
    ]
    for row, seed, layers in zip(rows, (0, 0, 1, 1), (1, 2, 1, 2), strict=True):
        ds = store.load(tmp_path / "runs" / row["run"])
        assert (ds.attrs["seed"], ds.sizes["layer"]) == (seed, layers)
        assert row["layers"] == str(layers)
    file.write_text("model: m\nseed: []\n")
    with pytest.raises(LipboundError, match="empty list of seed; give a value at least"):
        planned_runs(file)
    with pytest.raises(LipboundError, match=r"path is {'model': 'm'}; give the name of a YAML"):
        sweep({"model": "m"}, tmp_path / "none")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pairs: x", "no list of mappings"),
        ("pairs: []", "no list of mappings"),
        ("pairs: [a]", "no list of mappings"),
        ("pairs: [{data: x}, {model: m}]", r"no model for \{'data': 'x'\}"),
        ("pairs: [{model: m, sample: 3}]", "did you mean 'samples'"),
        ("pairs: [{model: m, pairs: []}]", "unknown key 'pairs'"),
    ],
)
def test_bad_pairs(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(content)
    with pytest.raises(LipboundError, match=message):
        planned_runs(file)


def test_an_index_on_a_full_disk(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, and the run is kept."""
    file = tmp_path / "sweep.yaml"
    file.write_text(f"model: {bert}\ndata: the ferry\nmax_length: 4\nbounds: yudin\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writeheader", full)
    with pytest.raises(
        LipboundError,
        match=r"index\.csv cannot be written: No space left on device; the runs beside it are "
        r"kept",
    ):
        list(sweep(file, tmp_path / "runs", progress=False))
    assert len(list((tmp_path / "runs").glob("*.zarr"))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: [", "cannot be read as YAML"),
        ("- a\n- b", "is not a sweep"),
        ("data: x", "has no model for its runs"),
        ("model: m\nsample: 3", "'samples'"),
    ],
)
def test_bad_sweep_files(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(content)
    with pytest.raises(LipboundError, match=message):
        planned_runs(file)


def test_runs_of_a_sweep_have_names_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("model: [a/b, a_b]\ndata: [x/one.txt, y/one.txt]\n")
    assert list(planned_runs(file)) == [
        "a_b-one-128",
        "a_b-one-128-2",
        "a_b-one-128-3",
        "a_b-one-128-4",
    ]


def test_every_option_of_compare_is_one_of_sweeps(tmp_path: Path) -> None:
    given = {
        "bounds": "yudin",
        "map": "heads",
        "norm": "frobenius",
        "wrt": "input",
        "samples": 2,
        "exact_samples": 1,
        "layers": [1],
        "split": "test",
        "column": "text",
        "revision": "v1",
    }
    given |= {
        "tol": 0.01,
        "delta": None,
        "device": "cpu",
        "dtype": "float64",
        "seed": 3,
        "memory": "1GB",
        "weights": "whole",
        "gguf_file": "a.gguf",
    }
    given |= {"shuffle": 2, "tokenizer": "words", "processor": "pictures"}
    given |= {"adapter": "owner/adapter", "extras": ()}
    assert set(OPTIONS) == set(given)
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "max_length": 6} | given))
    (arguments,) = planned_runs(file).values()
    config = RunConfig(**arguments)
    assert {name: getattr(config, name) for name in given} == given | {
        "layers": (1,),
        "memory": 1e9,
    }
    assert (config.model, config.data, config.max_length, config.out, config.resume) == (
        "m",
        None,
        6,
        None,
        False,
    )
    file.write_text("model: m\nresume: true\n")
    with pytest.raises(LipboundError, match="unknown key 'resume'"):
        planned_runs(file)
