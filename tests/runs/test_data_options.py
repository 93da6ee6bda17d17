"""Which samples, tokenizer and processor a run takes: recorded, replayed, verified, swept, and
options of the command line."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from PIL import Image
from support.commands import call

import lipbound as lb
from lipbound.errors import LipboundError, Notice
from lipbound.runs.config import RunConfig
from lipbound.runs.sweep import sweep

QUICK = {
    "bounds": ["castin"],
    "layers": 0,
    "delta": None,
    "tol": 0.05,
    "max_length": 8,
    "progress": False,
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of 12 texts, the first six of one class."""
    frame = pd.DataFrame(
        {"text": [f"w{k} the ferry w{k + 1}" for k in range(12)], "label": ["a"] * 6 + ["b"] * 6}
    )
    frame.to_csv(tmp_path / "texts.csv", index=False)
    return tmp_path / "texts.csv"


def without(model: Path, folder: Path, *names: str) -> Path:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(*names))
    return folder


@pytest.mark.parametrize("seed", [0, 5])
def test_shuffled_runs_are_replayed(seed: int, bert: Path, table: Path, tmp_path: Path) -> None:
    ds = lb.compare(bert, table, samples=3, shuffle=seed, out=tmp_path / "run.zarr", **QUICK)
    assert ds.attrs["source"]["shuffle"] == seed
    assert ds.attrs["data"] == f"texts.csv, shuffled with seed {seed}"
    assert "notes" not in ds.attrs
    stored = lb.load(tmp_path / "run.zarr")
    config = RunConfig.of(stored)
    assert (config.samples, config.shuffle) == (3, seed)
    assert lb.verify(stored).ok
    with pytest.raises(LipboundError, match="data_fingerprint"):
        lb.compare(
            bert, table, samples=3, shuffle=6, out=tmp_path / "run.zarr", resume=True, **QUICK
        )
    assert lb.compare(
        bert, table, samples=3, shuffle=seed, out=tmp_path / "run.zarr", resume=True, **QUICK
    ).identical(stored)
    with pytest.warns(Notice, match="sorted by class, and the first 3 are of 1 of 2 classes"):
        plain = lb.compare(bert, table, samples=3, **QUICK)
    assert any("sorted by class" in note for note in plain.attrs["notes"])
    assert plain.attrs["source"]["shuffle"] is None


def test_all_samples(bert: Path, table: Path) -> None:
    ds = lb.compare(bert, table, samples="all", **QUICK)
    assert ds.sizes["sample"] == ds.attrs["samples"] == 12
    assert "notes" not in ds.attrs
    assert lb.verify(ds).ok


def test_a_tokenizer_by_name_is_replayed(bert: Path, table: Path, tmp_path: Path) -> None:
    bare = without(bert, tmp_path / "bare", "token*", "special*")
    with pytest.raises(
        LipboundError,
        match=r"has no files of its tokenizer .*name another tokenizer with tokenizer=",
    ):
        lb.compare(bare, table, samples=2, **QUICK)
    with pytest.warns(Notice, match="sorted by class"):
        ds = lb.compare(bare, table, samples=2, tokenizer=bert, **QUICK)
    assert ds.attrs["source"]["tokenizer"] == str(bert)
    assert lb.verify(ds).ok
    assert RunConfig.of(ds).tokenizer == str(bert)


def test_a_processor_by_name_is_replayed(vit: Path, tmp_path: Path) -> None:
    bare = without(vit, tmp_path / "bare", "*processor*")
    Image.effect_mandelbrot((20, 20), (-2, -1, 1, 1), 50).save(tmp_path / "x.png")
    with pytest.raises(LipboundError, match="name another processor with processor="):
        lb.compare(bare, tmp_path / "x.png", samples=1, **QUICK)
    ds = lb.compare(bare, tmp_path / "x.png", samples=1, processor=vit, **QUICK)
    assert ds.attrs["source"]["processor"] == str(vit)
    assert lb.verify(ds).ok


def test_sweeps_know_them(bert: Path, table: Path, tmp_path: Path) -> None:
    bare = without(bert, tmp_path / "bare", "token*", "special*")
    common = {"bounds": "castin", "layers": 0, "delta": None, "tol": 0.05, "max_length": 8}
    file = tmp_path / "sweep.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "model": str(bare),
                "data": str(table),
                "samples": "all",
                "shuffle": 2,
                "tokenizer": str(bert),
            }
            | common
        )
    )
    (row,) = sweep(file, tmp_path / "runs", progress=False)
    assert (row["status"], row["error"]) == ("done", "")
    ds = lb.load(tmp_path / "runs" / row["run"])
    assert (ds.sizes["sample"], ds.attrs["source"]["shuffle"]) == (12, 2)


def test_options_of_the_command_line(
    bert: Path,
    table: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = without(bert, tmp_path / "bare", "token*", "special*")
    options = (
        "--max-length",
        8,
        "--bounds",
        "castin",
        "--layers",
        0,
        "--delta",
        0,
        "--tol",
        0.05,
        "--quiet",
    )
    run = tmp_path / "run.zarr"
    status, _, err = call(
        capsys,
        monkeypatch,
        "compare",
        bare,
        "--data",
        table,
        "--samples",
        "all",
        "--shuffle",
        4,
        "--tokenizer",
        bert,
        "--out",
        run,
        *options,
    )
    assert status == 0, err
    attrs = lb.load(run).attrs
    assert (attrs["samples"], attrs["source"]["shuffle"], attrs["source"]["tokenizer"]) == (
        12,
        4,
        str(bert),
    )
    for given, sentence in (
        ("some", "samples is 'some'; it must be a whole number, at least 1, or 'all'"),
        ("0", "samples is 0; it must be"),
    ):
        status, _, err = call(
            capsys, monkeypatch, "compare", bert, "--data", table, "--samples", given, *options
        )
        assert status == 2
        assert sentence in " ".join(err.split())
    status, _, err = call(
        capsys,
        monkeypatch,
        "compare",
        bert,
        "--data",
        table,
        "--tokenizer",
        tmp_path / "none",
        *options,
    )
    assert status == 2
    assert "/none has no usable tokenizer" in " ".join(err.split())
