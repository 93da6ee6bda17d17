"""Which samples, tokenizer and processor a run takes: recorded, replayed, verified, swept, and
options of the command line."""

import shutil

import pandas as pd
import pytest
from PIL import Image
from support.commands import refused

import lipbound as lb
from lipbound.runs.config import RunConfig

FEW = {"layers": 0, "delta": None, "tol": 0.05, "max_length": 8}
QUICK = {"bounds": ["castin"], "progress": False} | FEW


@pytest.fixture
def table(tmp_path):
    """A table of 12 texts."""
    texts = [f"w{k} the ferry w{k + 1}" for k in range(12)]
    pd.DataFrame({"text": texts}).to_csv(tmp_path / "texts.csv", index=False)
    return tmp_path / "texts.csv"


def without(model, folder, *names):
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(*names))
    return folder


@pytest.mark.parametrize("seed", [0, 5])
def test_shuffled_runs_are_replayed(seed, bert, table, tmp_path):
    options = {"samples": 3, "out": tmp_path / "run.zarr", **QUICK}
    ds = lb.compare(bert, table, shuffle=seed, **options)
    assert ds.attrs["source"]["shuffle"] == seed
    assert ds.attrs["data"] == f"texts.csv, shuffled with seed {seed}"
    assert "notes" not in ds.attrs
    stored = lb.load(tmp_path / "run.zarr")
    config = RunConfig.of(stored)
    assert (config.samples, config.shuffle) == (3, seed)
    assert lb.verify(stored).ok
    options["resume"] = True
    refused(lambda: lb.compare(bert, table, shuffle=6, **options), "data_fingerprint")
    assert lb.compare(bert, table, shuffle=seed, **options).identical(stored)
    every = lb.compare(bert, table, samples="all", **QUICK)
    assert every.attrs["source"]["shuffle"] is None
    assert every.sizes["sample"] == every.attrs["samples"] == 12
    assert "notes" not in every.attrs
    assert lb.verify(every).ok


def test_tokenizers_and_processors_by_name_are_replayed(bert, table, vit, tmp_path):
    bare = without(bert, tmp_path / "bare", "token*", "special*")
    blind = without(vit, tmp_path / "blind", "*processor*")
    Image.effect_mandelbrot((20, 20), (-2, -1, 1, 1), 50).save(tmp_path / "x.png")
    for model, data, name, whole in (
        (bare, table, "tokenizer", bert),
        (blind, tmp_path / "x.png", "processor", vit),
    ):
        options = {"samples": 1, **QUICK}
        words = f"name another {name} with {name}="
        refused(lambda m=model, d=data, o=options: lb.compare(m, d, **o), words)
        ds = lb.compare(model, data, **options | {name: whole})
        assert ds.attrs["source"][name] == str(whole)
        assert lb.verify(ds).ok
        assert getattr(RunConfig.of(ds), name) == str(whole)
