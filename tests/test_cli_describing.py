"""What the command line says of models and runs, for people and for programs."""

import json
import math

import numpy as np
import pytest
import torch
from support.commands import said
from support.layers import random_attention

import lipbound as lb
from lipbound.formatting import plain_data
from lipbound.models.catalogue import BUILTINS, Builtin, describe


@pytest.fixture(scope="module")
def run(bert, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    options = {"samples": 2, "max_length": 8, "progress": False, "out": path}
    lb.compare(bert, text, bounds=["yudin", "castin", "lipbound"], **options)
    return path


def data(line):
    return json.loads(
        said(f"{line} --json"), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )


def test_models_are_what_their_files_say():
    listed = data("models")
    assert [one["name"] for one in listed] == [f"builtin:{name}" for name in BUILTINS]
    for one in listed:
        name = one["name"].removeprefix("builtin:")
        found = [one[word] for word in ("layers", "heads", "reads", "license")]
        if name == "smollm2":  # its file, read in tests/models/test_gguf.py
            assert (found, one["width"]) == ([30, 9, "text", "apache-2.0"], 576)
            continue
        config = json.loads((BUILTINS[name].place(name) / "config.json").read_text())
        assert found[0] == config.get("num_hidden_layers", config.get("n_layer"))
        assert found[1] == config.get("num_attention_heads", config.get("n_head"))
        assert found[2] == ("images" if "patch_size" in config else "text")
        assert found[3] in ("mit", "apache-2.0")
    text = said("models")
    for part in ("A small GPT-2", "6 layers x 4 heads, width 128; reads text", "licence apache-2"):
        assert part in text


def test_a_model_that_is_not_installed_is_listed_as_such(monkeypatch):
    monkeypatch.setitem(BUILTINS, "minilm", Builtin("no-such-package", "1", "demo", "0"))
    assert describe("minilm").missing
    assert "not installed: builtin:minilm needs the package no-such-package" in said("models")


def test_info_says_what_a_run_holds(run, tmp_path):
    ds, found = lb.load(run), data(f"info {run}")
    for name in ("model", "revision", "samples", "method", "dtype", "bounds"):
        assert found[name] == ds.attrs[name]
    assert found["layers"] == ds["layer"].values.tolist()
    assert found["exact to"] == float(ds["exact"].max())
    assert found["checksums"] == "hold"
    files = (file for file in run.rglob("*") if file.is_file())
    assert found["bytes on disk"] == sum(file.stat().st_size for file in files)
    text = said(f"info {run}")
    assert f"model             {ds.attrs['model']}\n" in text
    edited = ds.copy(deep=True)
    edited["yudin"][0, 0, 0] *= 2
    edited.to_zarr(tmp_path / "edited.zarr", consolidated=False)
    checksums = data(f"info {tmp_path / 'edited.zarr'}")["checksums"]
    assert "are not those that were computed" in checksums


def test_tables_for_programs(run):
    ds, found = lb.load(run), data(f"table {run}")
    for row, (name, expected) in zip(found["rows"], lb.tables.summary(ds).iterrows(), strict=True):
        assert row["bound"] == name
        assert row["geomean"] == expected["geomean"]  # full precision
    by_head = data(f"table {run} --by head --bounds yudin --values value")["rows"]
    assert len(by_head) == ds["exact"][0].size
    assert by_head[0]["yudin"] == pytest.approx(float(np.exp(np.log(ds["yudin"][:, 0, 0]).mean())))
    assert found["run"] == lb.tables.caption(ds)


def test_bounds_and_verification_for_programs(run):
    listed = data("bounds")
    assert [one["name"] for one in listed] == lb.bounds.names(None)
    assert {one["norm"] for one in listed} == {"frobenius", "every-token", "one-token"}
    assert listed[0]["statement"] == lb.bounds.get(listed[0]["name"]).statement
    found = data(f"verify {run} --places 1")
    assert found["ok"] is True
    assert found["problems"] == []
    assert {row["variable"] for row in found["table"]} >= {"exact", "yudin"}


def test_numbers_that_json_has_not():
    assert plain_data({"a": [np.float64("inf"), -math.inf, math.nan, np.int64(3), True, "x"]}) == {
        "a": ["inf", "-inf", None, 3, True, "x"]
    }


def test_values_are_tables_in_notebooks(run):
    att = random_attention("biases")
    norm = lb.spectral_norm(att, delta=1e-6)
    html = norm._repr_html_()
    assert html.count("<tr>") == 1 + norm.lower.numel()
    assert f">{float(norm.lower[1, 2]):.6g}<".rstrip("0<") in html
    many = lb.Norm(*(torch.ones(40, 3, dtype=torch.float64) for _ in range(5)))
    assert "and 96 more rows" in many._repr_html_()
    assert "b_q" in att._repr_html_()
    assert "<math " in lb.bounds.get("yudin")._repr_html_()
    ds = lb.load(run)
    ds["yudin"].attrs["label"] = "<script>"
    table = lb.tables.table_of(ds)._repr_html_()
    assert "<script>" not in table
    assert "&lt;script&gt;" in table
    assert lb.tables.readable(ds)["geom. mean"].iloc[0] in table
