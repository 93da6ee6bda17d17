"""Runs are computed again from what they recorded, and what differs is named."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file
from support.commands import command, refused, said
from support.models import AFFINE, build, inputs_for
from transformers import BertModel

import lipbound as lb
from lipbound.errors import StoreError
from lipbound.reporting import tables as citations
from lipbound.runs.checksums import altered
from lipbound.runs.compare import open_sources, plan
from lipbound.runs.config import RunConfig
from lipbound.runs.verify import ALLOWED

BOUNDS = ("yudin", "lipbound", "kim")
OPTIONS = {"max_length": 12, "progress": False, "bounds": BOUNDS}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def run(bert, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    lb.compare(bert, text, samples=3, exact_samples=2, out=path, **OPTIONS)
    return path


def test_a_run_holds(run):
    found = lb.verify(lb.load(run), places=100)
    assert found.ok, str(found)
    assert len(found.places) == 6
    exact = {"exact", "exact_upper", "exact_l2", "exact_converged"}
    assert set(found.table.index) == exact | {*BOUNDS, *(f"{name}_sound" for name in BOUNDS)}
    assert found.table.loc["exact", "values"] == 2 * 2 * 4  # two of three samples have exact norms
    assert found.table.loc["yudin", "values"] == 3 * 2 * 4
    assert found.table["largest"].max() < ALLOWED["float32"]
    assert "the numbers hold" in str(found)
    assert len(lb.verify(run, places=1).places) == 1


def test_in_float64_as_an_oracle_of_float32(run):
    """What does not agree is told there, and is no fault."""
    ds = lb.load(run)
    found = lb.verify(ds, places=6, dtype="float64")
    assert found.ok, str(found)
    assert 0 < found.table.loc["yudin", "largest"] < 1e-5
    ds["yudin"][0, 0, 0] *= 2
    found = lb.verify(ds, places=6, dtype="float64")
    assert any("yudin at sample 0, layer 0, head 0" in note for note in found.notes)
    assert "note: yudin, 1 of 24 values, most at sample 0, layer 0, head 0: stored " in str(found)
    (holding,) = [line for line in str(found).splitlines() if line.startswith("equal up to")]
    assert "yudin," not in holding
    assert "the numbers hold" not in str(found)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("exact", 1.02),
        ("exact", 50),
        ("exact_upper", 0.9),
        ("kim", 0.9),
        pytest.param("exact", 0.01, marks=slow),
        pytest.param("exact_upper", 0.97, marks=slow),
        pytest.param("exact_upper", 1000, marks=slow),
        pytest.param("yudin", 1.001, marks=slow),
        pytest.param("exact_l2", 1.1, marks=slow),
    ],
)
def test_an_altered_value_is_named(run, name, factor):
    """What is stored takes no part in how far off it may be, and nor do checksums."""
    ds = lb.load(run)
    stored = float(ds[name][1, 0, 2])
    ds[name][1, 0, 2] = stored * factor
    assert altered(ds) == [(1, 0)]
    found = lb.verify(ds, places=1)
    whole = "its numbers at sample 1 layer 0 are not those that were computed"
    (sentence,) = [p for p in found.problems if " head " in p]
    before = f"{name} at sample 1, layer 0, head 2: stored {stored * factor:.8g}, now "
    assert sentence.startswith(before)
    assert float(sentence.rpartition(" ")[2]) == pytest.approx(stored, rel=2e-3)
    assert {whole, sentence} == set(found.problems)
    assert found.table.loc[name, "off"] == 1
    problems = lb.verify(ds.drop_vars("checksum"), places=100).problems
    assert {"the checksums of its numbers are missing", sentence} == set(problems)


def test_a_change_within_the_tolerance_is_seen_by_the_checksum_alone(run):
    ds = lb.load(run)
    ds["exact"][0, 1, 3] = np.nextafter(float(ds["exact"][0, 1, 3]), 0)
    found = lb.verify(ds, places=1)
    assert "its numbers at sample 0 layer 1 are not those that were computed" in found.problems
    assert not any(" head " in p for p in found.problems)


FORGED = {
    "yudin_sound": ((0, 0, 0), "yudin_sound at sample 0, layer 0, head 0: stored True, now False"),
    "lipbound": ((2, 1, 1), "lipbound at sample 2, layer 1, head 1: stored nan, now "),
    "exact": ((2, 0, 1), "exact at sample 2, layer 0, head 1: stored 123, now nan"),
    "exact_converged": ((0, 1, 1), "at sample 0, layer 1, head 1: stored False, now True"),
    "yudin": ((0, 0, 3), "yudin at sample 0, layer 0, head 3: stored inf, now "),
}


def test_forged_values_flags_and_infinite_bounds(run):
    """The third sample has no exact norms."""
    ds = lb.load(run)
    flag = bool(ds["yudin_sound"][0, 0, 0])
    values = {"lipbound": np.nan, "exact": 123.0, "exact_converged": False, "yudin": np.inf}
    for name, value in ({"yudin_sound": not flag} | values).items():
        ds[name][FORGED[name][0]] = value
    problems = lb.verify(ds, places=1).problems
    assert len([p for p in problems if " head " in p]) == 5
    for _, sentence in FORGED.values():
        sentence = sentence.replace("True, now False", f"{not flag}, now {flag}")
        assert any(sentence in p for p in problems), sentence


def test_infinite_bounds_must_stay_infinite(bert):
    model, inputs = BertModel.from_pretrained(bert), {"input_ids": torch.arange(10)[None]}
    for layer in model.encoder.layer:
        layer.attention.self.query.weight.data *= 300
    options = {"bounds": ["castin_mean_field"], "dtype": "float64", "progress": False}
    ds = lb.compare(model, inputs, **options)
    assert bool(np.isinf(ds["castin_mean_field"]).any())
    again = {"model": model, "data": inputs, "places": 100}
    assert lb.verify(ds, **again).ok
    ds["castin_mean_field"][0, 1, 0] = 3.0
    problems = lb.verify(ds.drop_vars("checksum"), **again).problems
    assert any("stored 3, now inf" in p for p in problems)


def test_other_weights_are_named(bert, text, tmp_path):
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    ds = lb.compare(folder, text, samples=2, **OPTIONS)
    assert lb.verify(ds).ok
    weights = load_file(folder / "model.safetensors")
    key = "encoder.layer.1.attention.self.query.weight"
    weights[key] = weights[key] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = lb.verify(ds, places=100)
    before = f"{folder} (BertModel, {ds.attrs['revision']}), {folder} (BertModel) has sha256:"
    assert found.problems[0].startswith(f"not the recorded weights: the run is of {before}")
    assert all(" layer 1," in p for p in found.problems[1:])  # the first layer did not change
    wrong = found.table[found.table["off"] > 0]
    assert len(found.problems) == 1 + wrong["off"].sum() > 9
    for name, row in wrong.iterrows():
        assert f"DIFFERS: {name}, {int(row['off'])} of {int(row['values'])} values" in str(found)
    assert len(str(found).splitlines()) < 15


def test_other_data_is_named(bert, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the ferry is in a clock of the keeper and the lighthouse " * 8)
    ds = lb.compare(bert, text, samples=2, **OPTIONS)
    text.write_text("the keeper of a ferry is the lighthouse " * 12)
    found = lb.verify(ds)
    before = f"the run has {ds.attrs['data_fingerprint']}, text.txt now gives sha256:"
    assert found.problems[0].startswith(f"not the recorded data: {before}")
    assert len(found.problems) > 1
    text.write_text("the keeper of a ferry")
    assert "the data now has 1 samples, the run 2" in lb.verify(ds).problems


def test_the_configuration_is_read_from_a_run(run, bert, text):
    """Every field that decides the numbers; the share of delta of a norm is that of the run."""
    ds = lb.load(run)
    config = RunConfig.of(ds)
    options = {"samples": 3, "exact_samples": 2, "max_length": 12, "bounds": BOUNDS}
    assert config == RunConfig(str(bert), str(text), layers=(0, 1), **options)
    again = lb.compare(config.model, config.data, progress=False, **options)
    assert again.drop_attrs().equals(ds.drop_attrs())
    planned = plan(config, open_sources(config, "cpu"), 1e9, 1)
    assert planned.spec == config.of_places(config.names, 2, ds["exact"][0].shape)
    assert planned.spec.delta == 1e-6 / (2 * 2 * 4)
    ds.attrs["tol"] = 2.0
    found = lb.verify(ds)
    assert not found.ok
    assert "were changed, no run can have them: tol is 2" in str(found)


def test_what_no_name_leads_back_to_must_be_given_again(run):
    model = build(AFFINE["gpt2"])
    inputs = inputs_for(model)
    ds, named = lb.compare(model, inputs, **OPTIONS), lb.load(run)
    named.attrs["source"] = None
    for call, words in (
        (lambda: lb.verify(ds), ("from a GPT2Model in memory", "give it as model=")),
        (lambda: lb.verify(ds, model=model), ("from data", "give it as data=")),
        (lambda: lb.verify(named), ("which no name leads back to",)),
        (lambda: lb.verify(ds, places=0), ("places is 0",)),
    ):
        refused(call, *words, error=StoreError if "places is 0" not in words else lb.LipboundError)
    assert lb.verify(ds, model=model, data=inputs).ok
    assert lb.verify(ds, model=build(AFFINE["gpt2"]).double(), data=inputs, dtype="float64").ok


@pytest.mark.parametrize(
    "map", ["post_norm", pytest.param("heads", marks=slow), pytest.param("head_out", marks=slow)]
)
def test_other_maps(bert, text, map):
    bounds = ["lipbound"] if map == "head_out" else "default"
    ds = lb.compare(bert, text, samples=2, map=map, **OPTIONS | {"bounds": bounds})
    found = lb.verify(ds, places=100)
    assert found.ok, str(found)
    ds["exact"][0, 1] = ds["exact"][0, 1] * 2
    assert any(p.startswith("exact at sample 0, layer 1") for p in lb.verify(ds, places=1).problems)


def test_plain_estimates_and_images(vit, tmp_path):
    for i in range(2):
        shades = np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(shades).save(tmp_path / f"{i}.png")
    ds = lb.compare(vit, tmp_path, delta=None, bounds=["castin"], progress=False)
    assert "size" in ds.attrs["preprocessing"]
    assert "image mean" in ds.attrs["preprocessing"]
    found = lb.verify(ds)
    assert found.ok, str(found)
    ds["exact"][0, 0, 0] *= 1.01
    assert any("exact at sample 0, layer 0, head 0" in p for p in lb.verify(ds).problems)


def test_other_versions_are_noted(run):
    ds = lb.load(run)
    ds.attrs["versions"] = ds.attrs["versions"] | {"torch": "1.0", "nothing-of-the-kind": "3"}
    notes = " ".join(lb.verify(ds, places=1).notes)
    assert "torch was 1.0, is " in notes
    assert "nothing-of-the-kind was 3, is not installed" in notes


def test_command_line(run, tmp_path):
    assert "the numbers hold" in said(f"verify {run} --places 2")
    ds = lb.load(run)
    ds["yudin"][0, 0, 0] = 1.0
    lb.save(ds, tmp_path / "edited.zarr")
    status, out, _ = command(f"verify {tmp_path / 'edited.zarr'}")
    assert status == 1
    assert "DIFFERS: yudin, 1 of " in out
    assert " at sample 0, layer 0, head 0: stored 1, now " in out
    assert "the numbers hold" not in out


def test_relative_names_lead_back_from_elsewhere(bert, text, tmp_path, monkeypatch):
    monkeypatch.chdir(bert.parent)
    ds = lb.compare(bert.name, str(text), samples=1, **OPTIONS)
    assert ds.attrs["model"] == bert.name
    monkeypatch.chdir(tmp_path)
    assert lb.verify(ds, places=1).ok


def test_layers_of_different_heads():
    sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = tf.GPT2Config(**sizes, resid_pdrop=0, attn_pdrop=0)
    model = build(lambda: tf.GPT2Model(config))
    model.h[1].attn.num_heads, model.h[1].attn.head_dim = 2, 8
    inputs = {"input_ids": torch.arange(10)[None]}
    ds = lb.compare(model, inputs, bounds=["yudin"], progress=False)
    found = lb.verify(ds, model=model, data=inputs, places=9)
    assert found.ok, str(found)
    assert found.table.loc["exact", "values"] == 6
    assert "2 layers x 2 to 4 heads" in citations.methods(ds, "text")


def test_norms_of_zero(tmp_path):
    """They have no ratios, which a store keeps as NaN; zarr before 3.1 writes that as text."""
    model = build(AFFINE["bert"])
    for layer in model.encoder.layer:
        layer.attention.self.value.weight.data.zero_()
    path, options = tmp_path / "run.zarr", {"bounds": ["yudin", "lipbound"], "progress": False}
    lb.compare(model, inputs_for(model), out=path, **options)
    text = (path / "zarr.json").read_text()
    assert '"worst": NaN' in text or '"worst": "NaN"' in text
    (path / "zarr.json").write_text(text.replace('"worst": NaN', '"worst": "NaN"'))
    ds = lb.load(path)
    assert math.isnan(ds.attrs["audit"]["yudin"]["worst"])
    found = lb.verify(ds, model=model, data=inputs_for(model))
    assert found.ok, str(found)
    assert float(ds["exact"].max()) == 0.0
    assert not ds.attrs["violations"]["yudin"]
    lb.plots.heatmaps(ds.isel(layer=[0], head=[0]), tmp_path / "x.png")
    assert "n/a" in lb.tables.render(ds)


def test_another_model_is_not_the_recorded_one(run, vit):
    """Whether it takes the run's data or not."""
    found = lb.verify(run, model="builtin:gpt2", places=2)
    assert found.problems[0].startswith("not the recorded model: the run is of ")
    assert "builtin:gpt2 (GPT2Model) has sha256:" in found.problems[0]
    assert len(str(found).splitlines()) < 15
    found = lb.verify(run, model=vit)
    assert (found.ok, found.places) == (False, [])
    assert str(found).startswith("nothing was computed again\nDIFFERS: not the recorded model: ")


def test_parts_whose_axes_are_gone_are_verified(run):
    found = lb.verify(lb.load(run).isel(layer=1), places=9)
    assert found.ok
    assert found.places == [(0, 1), (1, 1), (2, 1)]
