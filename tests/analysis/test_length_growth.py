"""The study of local constants against sequence length."""

import numpy as np
import pytest
import torch
import transformers as tf
import xarray as xr
from castin2024 import least_bound_ratio
from support.models import AFFINE, build, inputs_for

import lipbound as lb
from lipbound.analysis.length_growth import decoder, exponents, sequence_growth
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.readers import stream


@pytest.fixture(scope="module")
def study():
    """A small study of the shipped GPT-2."""
    return sequence_growth("builtin:gpt2", lengths=(2, 5), sequences=2, tol=1e-6)


@pytest.mark.slow
def test_values_are_those_of_the_model_at_the_cut_text(study):
    checkpoint = lb.load_checkpoint("builtin:gpt2")
    tokens, _ = stream(checkpoint, None, 2 * 16)
    # the sequences of length 5 follow those of length 2
    ids = tokens[2 * 2 : 2 * 2 + 2 * 5].view(2, 5)
    layers = lb.capture(checkpoint.model, {"input_ids": ids})
    for i, att in enumerate(layers):
        part = study.sel(length=5).isel(layer=i)
        for map, how in (("head", {"method": "dense"}), ("layer", {"tol": 1e-8})):
            expected = spectral_norm(att.double(), map=map, **how).lower
            np.testing.assert_allclose(part[f"{map}_exact"], expected, rtol=1e-5)
        np.testing.assert_allclose(part["magnitude"], att.x.norm(dim=-1).mean(-1), rtol=1e-6)


def test_every_bound_is_above(study):
    assert study.attrs["causal"] == 1
    assert least_bound_ratio(study) >= 1 - 1e-5
    assert bool((study["adversarial_head"] <= study["adversarial_upper"]).all())
    np.testing.assert_allclose(study["radius"], study["magnitude"].mean(("sequence", "length")))


def test_encoder_run_as_a_decoder():
    model = build(AFFINE["bert"])
    ids = inputs_for(model)["input_ids"]
    ready = tf.BertModel(tf.BertConfig(**{**model.config.to_dict(), "is_decoder": True}))
    ready.load_state_dict(model.state_dict())
    with decoder(model, True):
        mine = lb.capture(model, {"input_ids": ids})
    theirs = lb.capture(ready.eval(), {"input_ids": ids})
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.p, b.p)
        assert float(a.p[..., 0, 1:].abs().max()) == 0
    assert not model.config.is_decoder


def test_exponents_of_a_power_law():
    n = np.arange(10, 101, 2)
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (5, len(n), 2))
    values = xr.DataArray(
        n[None, :, None] ** 0.3 * np.exp(noise) * [1, 7],
        dims=("sequence", "length", "head"),
        coords={"length": n},
    )
    fit = exponents(values)
    assert bool((abs(fit["exponent"] - 0.3) < fit["high"] - fit["low"]).all())
    assert bool((fit["high"] - fit["low"] < 0.01).all())
    np.testing.assert_allclose(fit["exponent"], 0.3, atol=0.01)


def test_csv_without_a_line_of_names(tmp_path):
    path = tmp_path / "news.csv"
    rows = '"3","first title","the lighthouse keeper"', '"4","second title","the clock of the sea"'
    path.write_text("\n".join(rows))
    tokens, description = stream(lb.load_checkpoint("builtin:gpt2"), str(path), 6, column="2")
    text = lb.load_checkpoint("builtin:gpt2").tokenizer().decode(tokens)
    assert "the lighthouse keeper".startswith(text.strip()[:12])
    assert description == "news.csv"
