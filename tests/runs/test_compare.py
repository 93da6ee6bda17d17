import numpy as np
import pytest
import torch
import xarray as xr
from support.commands import refused
from support.models import AFFINE, TEXT, build
from support.oracles import oracle
from support.runs import TEXTS
from transformers import BertConfig, BertModel

import lipbound as lb
from lipbound.bounds.ours import block_norms

OPTIONS = {"max_length": 12, "progress": False}


def test_values_are_those_of_the_layers(bert, wide_layers):
    ds = lb.compare(bert, TEXTS, dtype="float64", tol=1e-9, **OPTIONS)
    assert ds["exact"].dims == ("sample", "layer", "head")
    assert ds["exact"].shape == (4, 2, 4)
    assert ds["length"].values.tolist() == [6, 5, 5, 2]
    for i, att in enumerate(wide_layers):
        np.testing.assert_allclose(ds["exact"][:, i], oracle(att), rtol=1e-8)
        assert bool((oracle(att).numpy() <= ds["exact_upper"][:, i] * (1 + 1e-12)).all())
        for name, value in lb.bounds.evaluate(att).items():
            np.testing.assert_allclose(ds[name][:, i], value, rtol=1e-9)
    assert float((ds["exact_upper"] / ds["exact"]).max()) <= 1 + 1e-9
    assert bool(ds["exact_converged"].all())


@pytest.mark.parametrize("padding", ["right", "left"])
def test_numbers_do_not_depend_on_the_size_of_blocks(padding, bert):
    """Padded texts, one, several or all at a time: rounding of the model's own products apart, and
    what is not measured stays so."""
    torch.manual_seed(0)
    lengths, ids, places = [10, 4, 7, 2, 9], torch.randint(3, 60, (5, 10)), torch.arange(10)
    rows = [places < n if padding == "right" else places >= 10 - n for n in lengths]
    gpt2 = build(AFFINE["gpt2"])
    ready = {"input_ids": ids % gpt2.config.vocab_size, "attention_mask": torch.stack(rows).long()}
    options = {"exact_samples": 3, "bounds": ["yudin", "castin_bias"], **OPTIONS}
    for model, data in ((bert, [*TEXTS, "a ferry"]), (gpt2, ready)):
        sizes = (1, 300_000, "1GB")
        one, *others = (lb.compare(model, data, memory=size, **options) for size in sizes)
        least, some, most = (ds.attrs["block"] for ds in (one, *others))
        assert (least, most) == (1, 5)
        assert 1 < some < 5
        assert others[0].attrs["block_bytes"] <= 300_000 < others[1].attrs["block_bytes"]
        for ds in others:
            np.testing.assert_array_equal(ds["length"], one["length"])
            for name in ("exact", "exact_upper", "yudin", "castin_bias"):
                np.testing.assert_allclose(ds[name], one[name], rtol=2e-6)
            assert bool((ds["exact"].notnull() == one["exact"].notnull()).all())


def test_same_seed_same_numbers(bert):
    first, second = (lb.compare(bert, TEXTS, bounds=["castin"], **OPTIONS) for _ in range(2))
    assert first.drop_attrs().identical(second.drop_attrs())
    other = lb.compare(bert, TEXTS, bounds=["castin"], seed=1, **OPTIONS)
    assert not np.array_equal(first["exact"], other["exact"])
    np.testing.assert_allclose(first["exact"], other["exact"], rtol=1e-3)


def test_exact_samples_layers_and_estimates(bert):
    options = {"exact_samples": 1, "delta": None, **OPTIONS}
    ds = lb.compare(bert, TEXTS, layers=[1], bounds="yudin,kim", **options)
    assert ds["layer"].values.tolist() == [1]
    assert bool(ds["exact"][0].notnull().all())
    assert bool(ds["exact"][1:].isnull().all())
    assert bool(ds["yudin"].notnull().all())
    assert "exact_upper" not in ds
    whole = lb.compare(bert, TEXTS, bounds="yudin", **options)
    # a layer's numbers do not depend on the choice
    np.testing.assert_allclose(ds["exact"][0, 0], whole["exact"][0, 1], rtol=1e-6)
    np.testing.assert_array_equal(ds["exact_steps"][0, 0], whole["exact_steps"][0, 1])
    assert ds.attrs["audit"]["yudin"]["compared"] == 4
    assert "exact_l2" in ds
    assert "exact_l2" not in whole


def test_a_full_disk_does_not_cost_the_run(bert, tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    options = {"bounds": ["castin"], "out": tmp_path / "run.zarr", **OPTIONS}
    with monkeypatch.context() as patch:
        patch.setattr(xr.Dataset, "to_zarr", full)
        with pytest.raises(lb.errors.StoreError, match="No space left on device") as caught:
            lb.compare(bert, TEXTS, **options)
    lost = caught.value.dataset
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr.partial"]
    again = lb.compare(bert, TEXTS, resume=True, **options)
    xr.testing.assert_identical(again.drop_attrs(), lost.drop_attrs())
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


# -- the audit -------------------------------------------------------------------------------------


def doctored(query_bias=0.0, scale=1.0, decoder=False):
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


def run(model, length=20):
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(0))
    return lb.compare(model, {"input_ids": ids}, layers=[0], progress=False)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("specformer", doctored(scale=1e-3)),
        ("castin", doctored(query_bias=300.0)),
        ("yudin_nobias", doctored(query_bias=300.0)),
        ("castin_mean_field", doctored(decoder=True)),
    ],
)
def test_the_audit_catches_unsound_statements(name, model):
    ds = run(model)
    entry = ds.attrs["audit"][name]
    assert entry["violations"] > 0
    assert entry["worst"] < 1
    assert entry["broken"] == 0
    assert ds.attrs["violations"][name] == entry["violations"]
    for other in ("kim", "castin_bias", "yudin", "yudin_g1", "yudin_sqrt_n", "yudin_closed"):
        assert ds.attrs["audit"][other]["violations"] == 0
        assert ds.attrs["audit"][other]["sound"] == 8


def test_bounds_are_left_out_of_inputs_that_are_too_long_for_them(monkeypatch):
    options = {"samples": 1, "max_length": 12, "layers": [0], "progress": False}
    monkeypatch.setattr(block_norms, "STORED", 8.0 * (block_norms.MATRICES + 4) * 11**2)
    ds = lb.compare("builtin:gpt2", **options)
    assert set(ds.attrs["not_applicable"]) == {"lipbound", "lipbound_block"}
    words = "is computed up to 11 tokens of such heads, and there are 12; take exact_upper"
    assert ds.attrs["not_applicable"]["lipbound"].startswith(words)
    assert "yudin_sqrt_n" in ds
    named = lambda: lb.compare("builtin:gpt2", bounds="lipbound", **options)  # noqa: E731
    refused(named, "bound 'lipbound' is computed up to 11 tokens")
