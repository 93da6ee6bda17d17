"""Runs are computed again from what they recorded, and what differs is named."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
import xarray as xr
from PIL import Image
from safetensors.torch import load_file, save_file
from support.models import AFFINE, build, inputs_for
from transformers import BertModel
from typer.testing import CliRunner

import lipbound as lb
from lipbound.cli import app
from lipbound.errors import LipboundError, StoreError
from lipbound.reporting import citations
from lipbound.runs import store
from lipbound.runs.checksums import altered
from lipbound.runs.config import RunConfig
from lipbound.runs.plan import measurement_spec, open_sources, plan
from lipbound.runs.verify import ALLOWED

OPTIONS = {"max_length": 12, "progress": False, "bounds": ["yudin", "lipbound", "kim"]}


@pytest.fixture(scope="module")
def run(bert: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    lb.compare(bert, text, samples=3, exact_samples=2, out=path, **OPTIONS)
    return path


def test_a_run_holds(run: Path) -> None:
    found = lb.verify(lb.load(run), places=100)
    assert found.ok, str(found)
    assert len(found.places) == 6
    exact = {"exact", "exact_upper", "exact_l2", "exact_converged"}
    assert set(found.table.index) == exact | {
        f"{name}{end}" for name in ("yudin", "lipbound", "kim") for end in ("", "_sound")
    }
    assert found.table.loc["exact", "values"] == 2 * 2 * 4  # two of three samples have exact norms
    assert found.table.loc["yudin", "values"] == 3 * 2 * 4
    assert found.table["largest"].max() < ALLOWED["float32"]
    assert "the numbers hold" in str(found)
    assert len(lb.verify(lb.load(run), places=1).places) == 1


def test_in_float64_as_an_oracle_of_float32(run: Path) -> None:
    found = lb.verify(lb.load(run), places=2, dtype="float64")
    assert found.ok, str(found)
    assert 0 < found.table.loc["yudin", "largest"] < 1e-5


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("exact", 1.02),
        ("kim", 0.9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("exact_upper", 0.97), ("yudin", 1.001), ("exact_l2", 1.1))
        ),
    ],
)
def test_an_altered_value_is_named(run: Path, name: str, factor: float) -> None:
    ds = lb.load(run)
    stored = float(ds[name][1, 0, 2])
    ds[name][1, 0, 2] = stored * factor
    assert altered(ds) == [(1, 0)]
    found = lb.verify(ds, places=1)
    assert not found.ok
    assert (
        "sample 1, layer 0: the stored numbers are not those that were computed (checksum)"
        in found.problems
    )
    (sentence,) = [p for p in found.problems if " head " in p]
    assert sentence.startswith(
        f"{name} at sample 1, layer 0, head 2: stored {stored * factor:.8g}, now "
    )
    assert float(sentence.rpartition(" ")[2]) == pytest.approx(stored, rel=2e-3)
    assert set(found.problems) - {"the audit stored with the run is not that of its numbers"} == {
        sentence,
        found.problems[-2],
    }
    assert found.table.loc[name, "off"] == 1


def test_a_change_within_the_tolerance_is_seen_by_the_checksum_alone(run: Path) -> None:
    ds = lb.load(run)
    ds["exact"][0, 1, 3] = np.nextafter(float(ds["exact"][0, 1, 3]), 0)
    found = lb.verify(ds, places=1)
    assert (
        "sample 0, layer 1: the stored numbers are not those that were computed (checksum)"
        in found.problems
    )
    assert not any(" head " in p for p in found.problems)


def test_an_altered_flag_and_a_missing_value(run: Path) -> None:
    ds = lb.load(run)
    ds["yudin_sound"][0, 0, 0] = not bool(ds["yudin_sound"][0, 0, 0])
    ds["lipbound"][2, 1, 1] = np.nan
    found = lb.verify(ds, places=1)
    assert len([p for p in found.problems if " head " in p]) == 2
    assert any(
        p.startswith("yudin_sound at sample 0, layer 0, head 0: stored False, now True")
        for p in found.problems
    )
    assert any(
        p.startswith("lipbound at sample 2, layer 1, head 1: stored nan, now ")
        for p in found.problems
    )


def test_other_weights_are_named(bert: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    BertModel.from_pretrained(bert).save_pretrained(folder)
    for file in bert.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    ds = lb.compare(folder, text, samples=2, **OPTIONS)
    assert lb.verify(ds).ok
    weights = load_file(folder / "model.safetensors")
    key = "encoder.layer.1.attention.self.query.weight"
    weights[key] = weights[key] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = lb.verify(ds, places=100)
    before = f"{folder} (BertModel, {ds.attrs['revision']})"
    assert found.problems[0].startswith(
        f"not the recorded weights: the run is of {before}, {folder} (BertModel) has sha256:"
    )
    assert all(" layer 1," in p for p in found.problems[1:])  # the first layer did not change
    assert found.table["off"].sum() > 8
    assert len(found.problems) == 1 + found.table["off"].sum()
    counts = [
        f"DIFFERS: {name}, {int(row['off'])} of {int(row['values'])} values"
        for name, row in found.table.iterrows()
        if row["off"]
    ]
    assert counts
    assert [line for line in counts if line not in str(found)] == []
    assert len(str(found).splitlines()) < 15


def test_other_data_is_named(bert: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the ferry is in a clock of the keeper and the lighthouse " * 8)
    ds = lb.compare(bert, text, samples=2, **OPTIONS)
    text.write_text("the keeper of a ferry is the lighthouse " * 12)
    found = lb.verify(ds)
    assert found.problems[0].startswith(
        f"not the recorded data: the run has {ds.attrs['data_fingerprint']}, text.txt now gives "
        "sha256:"
    )
    assert len(found.problems) > 1
    text.write_text("the keeper of a ferry")
    assert "the data now has 1 samples, the run 2" in lb.verify(ds).problems


def test_the_configuration_is_read_from_a_run(run: Path, bert: Path, text: Path) -> None:
    """Every field that decides the numbers; the share of delta of a norm is that of the run."""
    ds = lb.load(run)
    config = RunConfig.of(ds)
    assert config == RunConfig(
        str(bert),
        str(text),
        samples=3,
        exact_samples=2,
        layers=(0, 1),
        bounds=("yudin", "lipbound", "kim"),
        max_length=12,
    )
    again = lb.compare(
        config.model,
        config.data,
        samples=3,
        exact_samples=2,
        max_length=12,
        bounds=config.names,
        progress=False,
    )
    assert again.drop_attrs().equals(ds.drop_attrs())
    planned = plan(config, open_sources(config, "cpu"), 1e9, 1)
    assert planned.spec == measurement_spec(config, config.names, 2, ds["exact"][0].shape)
    assert planned.spec.delta == 1e-6 / (2 * 2 * 4)
    ds.attrs["tol"] = 2.0
    found = lb.verify(ds)
    assert not found.ok
    assert "were changed, no run can have them: tol is 2" in str(found)


def test_objects_in_memory_must_be_given_again(bert: Path) -> None:
    model = build(AFFINE["gpt2"])
    inputs = inputs_for(model)
    ds = lb.compare(model, inputs, **OPTIONS)
    with pytest.raises(StoreError, match=r"from a GPT2Model in memory, .* give it as model="):
        lb.verify(ds)
    with pytest.raises(StoreError, match=r"from data .* in memory, .* give it as data="):
        lb.verify(ds, model=model)
    assert lb.verify(ds, model=model, data=inputs).ok
    assert lb.verify(ds, model=build(AFFINE["gpt2"]).double(), data=inputs, dtype="float64").ok
    with pytest.raises(LipboundError, match="places is 0"):
        lb.verify(ds, places=0)


@pytest.mark.parametrize(
    "map",
    ["post_norm", *(pytest.param(map, marks=pytest.mark.slow) for map in ("heads", "head_out"))],
)
def test_other_maps(bert: Path, text: Path, map: str) -> None:
    ds = lb.compare(
        bert,
        text,
        samples=2,
        map=map,
        max_length=12,
        progress=False,
        bounds=["lipbound"] if map == "head_out" else "default",
    )
    found = lb.verify(ds, places=100)
    assert found.ok, str(found)
    ds["exact"][0, 1] = ds["exact"][0, 1] * 2
    assert any(p.startswith("exact at sample 0, layer 1") for p in lb.verify(ds, places=1).problems)


def test_plain_estimates_and_images(vit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(2):
        Image.fromarray(
            np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        ).save(folder / f"{i}.png")
    ds = lb.compare(vit, folder, delta=None, bounds=["castin"], progress=False)
    assert "size" in ds.attrs["preprocessing"]
    assert "image mean" in ds.attrs["preprocessing"]
    found = lb.verify(ds)
    assert found.ok, str(found)
    ds["exact"][0, 0, 0] *= 1.01
    assert any("exact at sample 0, layer 0, head 0" in p for p in lb.verify(ds).problems)


def test_runs_without_checksums_or_source(run: Path) -> None:
    ds = lb.load(run).drop_vars("checksum")
    found = lb.verify(ds, places=1)
    assert found.ok
    assert "no checksums" in found.notes[0]
    ds.attrs["versions"] = ds.attrs["versions"] | {"torch": "1.0", "nothing-of-the-kind": "3"}
    notes = " ".join(lb.verify(ds, places=1).notes)
    assert "torch was 1.0, is " in notes
    assert "nothing-of-the-kind was 3, is not installed" in notes
    ds.attrs["source"] = None
    with pytest.raises(StoreError, match="which no name leads back to"):
        lb.verify(ds)


def test_command_line(run: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["verify", str(run), "--places", "2"])
    assert shown.exit_code == 0
    assert "the numbers hold" in shown.stdout
    ds = lb.load(run)
    ds["yudin"][0, 0, 0] = 1.0
    store.save(ds, tmp_path / "edited.zarr")
    shown = CliRunner().invoke(app, ["verify", str(tmp_path / "edited.zarr")])
    assert shown.exit_code == 1
    assert "DIFFERS: yudin, 1 of " in shown.stdout
    assert " at sample 0, layer 0, head 0: stored 1, now " in shown.stdout
    assert "the numbers hold" not in shown.stdout


def bare(run: Path) -> xr.Dataset:
    """A run whose checksums do not help."""
    return lb.load(run).drop_vars("checksum")


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("exact", 50),
        ("exact_upper", 0.9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("exact", 0.01), ("exact_upper", 1000))
        ),
    ],
)
def test_every_direction_is_seen_without_checksums(run: Path, name: str, factor: float) -> None:
    """What is stored takes no part in how far off it may be."""
    ds = bare(run)
    ds[name][1, 0, 2] = ds[name][1, 0, 2] * factor
    assert any(
        p.startswith(f"{name} at sample 1, layer 0, head 2")
        for p in lb.verify(ds, places=100).problems
    )


def test_forged_norms_flags_and_infinite_bounds(run: Path) -> None:
    ds = bare(run)
    ds["exact"][2, 0, 1] = 123.0  # the third sample has no exact norms
    ds["exact_converged"][0, 1, 1] = False
    ds["yudin"][0, 0, 3] = np.inf
    found = " ".join(lb.verify(ds, places=100).problems)
    for part in (
        "exact at sample 2, layer 0, head 1: stored 123, now nan", "exact_converged at sample 0, "
                                                                   "layer 1, head 1: stored "
                                                                   "False, now True",
        "yudin at sample 0, layer 0, head 3: stored inf, now ",
    ):  # fmt: skip
        assert part in found


def test_infinite_bounds_must_stay_infinite(bert: Path, text: Path) -> None:
    model = BertModel.from_pretrained(bert)
    for layer in model.encoder.layer:
        layer.attention.self.query.weight.data *= 300
    ds = lb.compare(
        model,
        {"input_ids": torch.arange(10)[None]},
        bounds=["castin_mean_field"],
        dtype="float64",
        progress=False,
    )
    assert bool(np.isinf(ds["castin_mean_field"]).any())
    again = {"model": model, "data": {"input_ids": torch.arange(10)[None]}, "places": 100}
    assert lb.verify(ds, **again).ok
    ds["castin_mean_field"][0, 1, 0] = 3.0
    assert any(
        "stored 3, now inf" in p for p in lb.verify(ds.drop_vars("checksum"), **again).problems
    )


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 1e-30},
        {"map_description": "the whole transformer"},
        {"tokens": 4096},
        {"data": "ImageNet"},
    ],
)
def test_altered_settings_are_seen(run: Path, change: dict) -> None:
    ds = lb.load(run)
    ds.attrs |= change
    assert any("settings" in p for p in lb.verify(ds, places=1).problems)


def test_an_altered_audit_is_seen(run: Path) -> None:
    ds = lb.load(run)
    ds.attrs["audit"] = ds.attrs["audit"] | {
        "yudin": ds.attrs["audit"]["yudin"] | {"violations": 3}
    }
    assert (
        "the audit stored with the run is not that of its numbers"
        in lb.verify(ds, places=1).problems
    )


def test_what_users_add_to_a_run_is_theirs(run: Path) -> None:
    ds = lb.load(run)
    ds["ratio"] = ds["yudin"] / ds["exact"]
    ds["mean"] = ds["exact"].mean("sample")
    assert lb.verify(ds, places=2).ok


def test_relative_names_lead_back_from_elsewhere(
    bert: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bert.parent)
    (tmp_path / "other").mkdir()
    ds = lb.compare(bert.name, str(text), samples=1, **OPTIONS)
    assert ds.attrs["model"] == bert.name
    monkeypatch.chdir(tmp_path / "other")
    assert lb.verify(ds, places=1).ok


def test_layers_of_different_heads(tmp_path: Path) -> None:
    model = build(
        lambda: tf.GPT2Model(
            tf.GPT2Config(
                vocab_size=60,
                n_embd=16,
                n_layer=2,
                n_head=4,
                n_positions=32,
                resid_pdrop=0,
                attn_pdrop=0,
            )
        )
    )
    attn = model.h[1].attn
    attn.num_heads, attn.head_dim = 2, 8
    inputs = {"input_ids": torch.arange(10)[None]}
    ds = lb.compare(model, inputs, bounds=["yudin"], progress=False)
    found = lb.verify(ds, model=model, data=inputs, places=9)
    assert found.ok, str(found)
    assert found.table.loc["exact", "values"] == 6
    assert "2 layers x 2 to 4 heads" in citations.methods(ds, "text")


def test_heads_without_values(tmp_path: Path) -> None:
    """Norms of zero have no ratios, which a store keeps as NaN."""
    model = build(AFFINE["bert"])
    for layer in model.encoder.layer:
        layer.attention.self.value.weight.data.zero_()
    inputs = inputs_for(model)
    lb.compare(
        model, inputs, bounds=["yudin", "lipbound"], progress=False, out=tmp_path / "run.zarr"
    )
    found = lb.verify(lb.load(tmp_path / "run.zarr"), model=model, data=inputs)
    assert found.ok, str(found)


def test_another_dtype_tells_and_does_not_blame(run: Path) -> None:
    ds = lb.load(run)
    assert lb.verify(ds, places=6, dtype="float64").ok
    ds["yudin"][0, 0, 0] *= 2
    found = lb.verify(ds, places=6, dtype="float64")
    assert any("yudin at sample 0, layer 0, head 0" in note for note in found.notes)
    assert "note: yudin, 1 of 24 values, most at sample 0, layer 0, head 0: stored " in str(found)
    (holding,) = [line for line in str(found).splitlines() if line.startswith("equal up to")]
    assert "yudin," not in holding
    assert "the numbers hold" not in str(found)


def test_foreign_names_do_not_reach_the_terminal(run: Path) -> None:
    ds = lb.load(run)
    ds.attrs["data_fingerprint"] = "\x1b[2Jx"
    assert "\x1b" not in str(lb.verify(ds, places=1))


def test_provenance_is_plain(run: Path) -> None:
    """A run's attributes are JSON, and say what `lipbound.models.inputs.prepare` was given."""
    ds = lb.load(run)
    attrs = json.loads(json.dumps(ds.attrs))
    assert attrs["source"]["max_length"] == 12
    assert attrs["source"]["data"].endswith("text.txt")
    assert attrs["preprocessing"].endswith("consecutive windows of 12 tokens")
    assert attrs["loaded"] is False
    assert isinstance(xr.Dataset(attrs=attrs), xr.Dataset)


def test_another_model_is_not_the_recorded_one(run: Path, vit: Path) -> None:
    """Whether it takes the run's data or not."""
    found = lb.verify(lb.load(run), model="builtin:gpt2", places=2)
    assert found.problems[0].startswith("not the recorded model: the run is of ")
    assert "builtin:gpt2 (GPT2Model) has sha256:" in found.problems[0]
    assert len(str(found).splitlines()) < 15
    found = lb.verify(lb.load(run), model=vit)
    assert (found.ok, found.places) == (False, ())
    assert str(found).startswith("nothing was computed again\nDIFFERS: not the recorded model: ")


def test_paths_and_parts_whose_axes_are_gone_are_verified(run: Path) -> None:
    assert lb.verify(run, places=1).ok
    found = lb.verify(lb.load(run).isel(layer=1), places=9)
    assert found.ok
    assert found.places == ((0, 1), (1, 1), (2, 1))


def test_numbers_that_zarr_wrote_as_text(tmp_path: Path) -> None:
    """Those that are not finite, of an audit whose norms are zero."""
    model = build(AFFINE["bert"])
    for layer in model.encoder.layer:
        layer.attention.self.value.weight.data.zero_()
    path = tmp_path / "run.zarr"
    lb.compare(model, inputs_for(model), bounds=["yudin"], progress=False, out=path)
    text = (path / "zarr.json").read_text()
    assert '"worst": NaN' in text or '"worst": "NaN"' in text
    (path / "zarr.json").write_text(text.replace('"worst": NaN', '"worst": "NaN"'))
    ds = lb.load(path)
    assert math.isnan(ds.attrs["audit"]["yudin"]["worst"])
    assert lb.verify(ds, model=model, data=inputs_for(model)).ok
