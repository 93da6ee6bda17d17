from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from support.models import AFFINE, TEXT, build, inputs_for
from support.oracles import oracle
from transformers import BertConfig, BertModel

import lipbound as lb
from lipbound.bounds.audit import audit
from lipbound.errors import LipboundError, StoreError
from lipbound.models.capture import capture
from lipbound.runs import plan, store

TEXTS = ["the ferry is in a clock", "the keeper and the lighthouse", "a island of the ferry"]
OPTIONS = {"max_length": 12, "progress": False}


def test_values_are_those_of_the_layers(bert: Path) -> None:
    ds = lb.compare(bert, TEXTS, dtype="float64", tol=1e-9, **OPTIONS)
    assert ds["exact"].dims == ("sample", "layer", "head")
    assert ds["exact"].shape == (3, 2, 4)
    assert ds["length"].values.tolist() == [6, 5, 5]
    model = BertModel.from_pretrained(bert).double()
    from lipbound.models.loading import load_checkpoint

    batch = dict(load_checkpoint(bert).tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    for i, att in enumerate(lb.capture(model, batch)):
        np.testing.assert_allclose(ds["exact"][:, i], oracle(att), rtol=1e-8)
        assert bool((oracle(att).numpy() <= ds["exact_upper"][:, i] * (1 + 1e-12)).all())
        for name, value in lb.bounds.evaluate(att).items():
            np.testing.assert_allclose(ds[name][:, i], value, rtol=1e-9)
    assert float((ds["exact_upper"] / ds["exact"]).max()) <= 1 + 1e-9
    assert bool(ds["exact_converged"].all())


def test_blocks_do_not_change_results(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    whole = lb.compare(bert, TEXTS, bounds=["yudin"], tol=1e-6, **OPTIONS)
    monkeypatch.setattr(plan, "BLOCK_BYTES", 1)
    single = lb.compare(bert, TEXTS, bounds=["yudin"], tol=1e-6, **OPTIONS)
    for name in ("exact", "yudin", "exact_upper"):
        np.testing.assert_allclose(whole[name], single[name], rtol=1e-5)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_numbers_do_not_depend_on_the_size_of_blocks(padding: str, bert: Path) -> None:
    """Padded texts, one, several or all at a time: rounding of the model's own products apart, and
    what is not measured stays so."""
    torch.manual_seed(0)
    lengths, ids = [10, 4, 7, 2, 9], torch.randint(3, 60, (5, 10))
    mask = torch.stack(
        [
            torch.arange(10) < n if padding == "right" else torch.arange(10) >= 10 - n
            for n in lengths
        ]
    ).long()
    gpt2 = build(AFFINE["gpt2"])
    for model, data in (
        (bert, [*TEXTS, "the clock", "a ferry"]),
        (gpt2, {"input_ids": ids % gpt2.config.vocab_size, "attention_mask": mask}),
    ):
        one, *others = (
            lb.compare(
                model,
                data,
                memory=memory,
                exact_samples=3,
                bounds=["yudin", "castin_bias"],
                **OPTIONS,
            )
            for memory in (1, 80_000, "1GB")
        )
        assert [ds.attrs["block"] for ds in (one, *others)][::2] == [1, 5]
        for ds in others:
            np.testing.assert_array_equal(ds["length"], one["length"])
            for name in ("exact", "exact_upper", "yudin", "castin_bias"):
                np.testing.assert_allclose(ds[name], one[name], rtol=2e-6)
            assert bool((ds["exact"].notnull() == one["exact"].notnull()).all())


def test_every_layer_is_probed_once(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    probe = capture.probe
    monkeypatch.setattr(
        capture, "probe", lambda call, known: (probed.append(call.name), probe(call, known))[1]
    )
    ds = lb.compare(
        bert,
        ["one text", "another one", "and a third"],
        memory=1,
        max_length=4,
        bounds=["lipbound_block"],
        progress=False,
    )
    assert len(probed) == len(set(probed)) == ds.sizes["layer"]


def test_same_seed_same_numbers(bert: Path) -> None:
    first, second = (lb.compare(bert, TEXTS, bounds=["castin"], **OPTIONS) for _ in range(2))
    assert first.drop_attrs().identical(second.drop_attrs())
    other = lb.compare(bert, TEXTS, bounds=["castin"], seed=1, **OPTIONS)
    assert not np.array_equal(first["exact"], other["exact"])
    np.testing.assert_allclose(first["exact"], other["exact"], rtol=1e-3)


def test_exact_samples_layers_and_estimates(bert: Path) -> None:
    ds = lb.compare(
        bert, TEXTS, exact_samples=1, layers=[1], delta=None, bounds="yudin,kim", **OPTIONS
    )
    assert ds["layer"].values.tolist() == [1]
    assert bool(ds["exact"][0].notnull().all())
    assert bool(ds["exact"][1:].isnull().all())
    assert bool(ds["yudin"].notnull().all())
    assert "exact_upper" not in ds
    whole = lb.compare(bert, TEXTS, exact_samples=1, delta=None, bounds="yudin", **OPTIONS)
    # a layer's numbers do not depend on the choice
    np.testing.assert_allclose(ds["exact"][0, 0], whole["exact"][0, 1], rtol=1e-6)
    assert ds["exact_steps"][0, 0].equals(
        whole["exact_steps"][0, 1].assign_coords(ds["exact_steps"][0, 0].coords)
    )
    assert ds.attrs["audit"]["yudin"]["compared"] == 4
    assert "exact_l2" in ds
    assert "exact_l2" not in lb.compare(bert, TEXTS, bounds="yudin", **OPTIONS)


def test_head_out_is_the_head_with_its_output_slice(bert: Path) -> None:
    ds = lb.compare(bert, TEXTS[:1], map="head_out", dtype="float64", bounds="yudin", **OPTIONS)
    model = BertModel.from_pretrained(bert).double()
    from lipbound.models.loading import load_checkpoint

    att = lb.capture(
        model, dict(load_checkpoint(bert).tokenizer()(TEXTS[:1], return_tensors="pt"))
    )[0]
    np.testing.assert_allclose(
        ds["exact"][:, 0], lb.spectral_norm(att, map="head_out", tol=1e-9).lower, rtol=1e-3
    )
    assert ds.attrs["map"] == "head_out"
    assert float((ds["yudin"] / ds["exact"]).min()) > 1


def test_loaded_model_and_ready_inputs() -> None:
    model = build(AFFINE["gpt2"])
    ds = lb.compare(model, inputs_for(model, padded=True), bounds=["castin_bias"], progress=False)
    assert ds.attrs["model"] == "GPT2Model"
    assert ds["length"].values.tolist() == [9, 6]
    assert ds.attrs["violations"] == {"castin_bias": 0}


def test_provenance(bert: Path) -> None:
    a = lb.compare(bert, TEXTS, bounds=["castin"], **OPTIONS).attrs
    for key in (
        "model",
        "revision",
        "data",
        "data_fingerprint",
        "map",
        "dtype",
        "device",
        "seed",
        "tol",
        "delta",
        "date",
        "command",
        "versions",
    ):
        assert key in a
    assert a["revision"].startswith("sha256:")
    assert a["versions"]["torch"] == torch.__version__


def test_runs_are_saved_and_read_back(bert: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "run.zarr"
    ds = lb.compare(bert, TEXTS, out=target, **OPTIONS)
    again = lb.load(target)
    xr.testing.assert_equal(ds, again)
    assert again.attrs == ds.attrs
    assert list(again.data_vars)[:3] == ["exact", "exact_upper", "exact_l2"]
    with pytest.raises(StoreError, match="exists already"):
        lb.compare(bert, TEXTS, out=target, **OPTIONS)
    assert [p.name for p in target.parent.iterdir()] == ["run.zarr"]


def test_a_full_disk_does_not_cost_the_run(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: xr.Dataset, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", full)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        lb.compare(bert, TEXTS, bounds=["castin"], out=tmp_path / "run.zarr", **OPTIONS)
    assert caught.value.dataset["exact"].shape == (3, 2, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr.partial"]
    monkeypatch.undo()
    again = lb.compare(
        bert, TEXTS, bounds=["castin"], out=tmp_path / "run.zarr", resume=True, **OPTIONS
    )
    xr.testing.assert_identical(again.drop_attrs(), caught.value.dataset.drop_attrs())
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_errors_come_before_the_work(bert: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for options, message in [
        ({"bounds": "yudn"}, "did you mean"),
        ({"map": "layers"}, "did you mean .layer."),
        ({"map": "layer", "bounds": "kim"}, "use map=.head. or leave it out"),
        ({"tol": 0}, "tol is 0"),
        ({"exact_samples": 0}, "exact_samples is 0"),
        ({"device": "cuda:77"}, "cannot be used here"),
        ({"out": blocked / "run.zarr"}, "cannot be written"),
        ({"layers": [5]}, r"layers \[5\] do not exist"),
    ]:
        with pytest.raises(LipboundError, match=message):
            lb.compare(bert, TEXTS, **(OPTIONS | options))


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no run"):
        lb.load(tmp_path / "none.zarr")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="is not a run of lipbound"):
        lb.load(tmp_path / "folder")
    xr.Dataset({"a": ("x", [1.0])}).to_zarr(tmp_path / "other.zarr")
    with pytest.raises(StoreError, match="not a run of lipbound"):
        lb.load(tmp_path / "other.zarr")
    with pytest.raises(StoreError, match=r"cannot be written|exists"):
        store.check_target("/proc/none/run.zarr")


# -- the audit -------------------------------------------------------------------------------------


def doctored(query_bias: float = 0.0, scale: float = 1.0, decoder: bool = False) -> BertModel:
    """A tiny BERT whose first layer breaks published statements: small or biased inputs, a causal
    mask."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TEXT, is_decoder=decoder)).eval()
    with torch.no_grad():
        model.embeddings.LayerNorm.weight.fill_(scale)
        for layer in model.encoder.layer:
            own = layer.attention.self
            own.query.weight.mul_(0.0 if decoder or query_bias else 1.0)
            own.query.bias.fill_(query_bias)
    return model


def run(model: BertModel, length: int = 20) -> xr.Dataset:
    ids = {
        "input_ids": torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(0))
    }
    return lb.compare(model, ids, layers=[0], progress=False)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("specformer", doctored(scale=1e-3)),
        ("castin", doctored(query_bias=300.0)),
        ("yudin_nobias", doctored(query_bias=300.0)),
        ("castin_mean_field", doctored(decoder=True)),
    ],
)
def test_the_audit_catches_unsound_statements(name: str, model: BertModel) -> None:
    ds = run(model)
    entry = ds.attrs["audit"][name]
    assert entry["violations"] > 0
    assert entry["worst"] < 1
    assert entry["broken"] == 0
    assert ds.attrs["violations"][name] == entry["violations"]
    for other in ("kim", "castin_bias", "yudin", "yudin_g1", "yudin_sqrt_n", "yudin_closed"):
        assert ds.attrs["audit"][other]["violations"] == 0
        assert ds.attrs["audit"][other]["sound"] == 8


def test_the_audit_counts_broken_theorems() -> None:
    ds = run(doctored())
    ds["yudin"][0, 0, 1] = 0.5 * ds["exact"][0, 0, 1]
    entry = audit(ds)["yudin"]
    assert (entry["violations"], entry["broken"], entry["compared"]) == (1, 1, 8)
    assert entry["worst"] == pytest.approx(0.5)
