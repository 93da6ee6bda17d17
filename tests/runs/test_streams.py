"""Runs of models with several streams of tokens, and of layers without a closed form."""

import numpy as np
import pytest
import torch
import transformers as tf
from support.commands import refused
from support.models import LLAMA, T5, build, save_tokenizer

import lipbound as lb

SMALL = {**T5, "initializer_factor": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny T5 in a directory with a tokenizer, measured by text."""
    path = tmp_path_factory.mktemp("t5")
    config = tf.T5Config(**SMALL, decoder_start_token_id=0)
    build(lambda: tf.T5ForConditionalGeneration(config)).save_pretrained(path)
    save_tokenizer(path)
    with pytest.warns(lb.Notice, match="the decoder reads the encoder's tokens, shifted by one"):
        ds = lb.compare(
            path, ["the ferry", "a clock of the island"], samples=2, max_length=8,
            bounds=["kim", "castin", "lipbound"], out=path / "run.zarr", progress=False,
        )  # fmt: skip
    return path, ds


def test_every_stream_has_a_row(run):
    _, ds = run
    assert ds["kind"].values.tolist() == ["self", "self", "cross", "cross"]
    assert ds["stream"].values.tolist() == ["input", "input", "queries", "memory"]
    assert ds["measured"].values.tolist() == ["closed form"] * 4
    assert bool((ds["exact"] > 0).all())
    assert bool((ds["exact_upper"] <= ds["exact"] * (1 + 2e-3)).all())
    assert bool((ds["lipbound"] >= ds["exact"]).all())
    assert np.isnan(ds["castin"].values).all(axis=(0, 2)).tolist() == [False] * 2 + [True] * 2
    assert not ds["castin_sound"].values[:, 2:].any()
    assert np.isnan(ds["exact_l2"].values).all(axis=(0, 2)).tolist() == [False] * 2 + [True] * 2
    assert ds.attrs["audit"]["castin"]["compared"] == 2 * 2 * 4
    assert ds.attrs["audit"]["lipbound"]["compared"] == 2 * 4 * 4


def test_norms_of_tokens_are_of_self_attention():
    """Which is said before anything is measured."""
    model = build(lambda: tf.T5Model(tf.T5Config(**SMALL)))
    ids = torch.tensor([[5, 9, 3, 17, 8]])
    batch = {"input_ids": ids, "decoder_input_ids": ids}
    options = {"norm": "every-token", "progress": False}
    words = "not cover cross-attention, such as layer 2 ("
    refused(lambda: lb.compare(model, batch, **options), words)
    ds = lb.compare(model, batch, layers=[0, 1], **options)
    assert bool((ds["exact_upper"] >= ds["exact"]).all())


def test_runs_with_streams_are_kept_and_verified(run):
    path, ds = run
    back = lb.load(path / "run.zarr", damaged="refuse")
    assert back["stream"].values.tolist() == ds["stream"].values.tolist()
    assert lb.verify(path / "run.zarr", data=["the ferry", "a clock of the island"])
    one, two = ds.isel(layer=[0, 2]), ds.isel(layer=[1, 3])
    assert lb.concat([one, two])["measured"].values.tolist() == ds["measured"].values.tolist()
    assert "2 are of cross-attention" in " ".join(lb.cite(ds).split())


def test_layers_without_closed_form_have_no_bounds():
    model = build(lambda: tf.BitNetModel(tf.BitNetConfig(**LLAMA)))
    ids = {"input_ids": torch.tensor([[5, 9, 3, 17, 8]])}
    ds = lb.compare(model, ids, progress=False)
    assert ds.attrs["bounds"] == []
    said = set(ds.attrs["not_applicable"].values())
    assert said == {"does not cover layers without a closed form"}
    for options, words in (
        ({"bounds": ["lipbound"]}, "bound 'lipbound' does not cover layers without a closed form"),
        ({"norm": "one-token"}, "norm 'one-token' does not cover layers"),
    ):
        refused(lambda options=options: lb.compare(model, ids, progress=False, **options), words)
    layer = lb.capture(model, ids)[0]
    assert isinstance(layer, lb.ModuleAttention)
    for measure in (lb.token_norm, lb.bounds.get("lipbound")):
        words = "needs a layer in closed form", "changes its head outputs"
        refused(lambda measure=measure: measure(layer), *words)


def test_maps_of_layers_without_closed_form():
    """Against the Jacobian of the function that was captured, by torch.func."""
    model = build(lambda: tf.BitNetModel(tf.BitNetConfig(**LLAMA)))
    layer = lb.capture(model, {"input_ids": torch.tensor([[5, 9, 3, 17], [4, 2, 7, 7]])})[0]
    for map in ("head", "head_out", "heads", "layer"):
        norm = lb.spectral_norm(layer, map=map, tol=1e-9, delta=1e-6)
        jacobian = torch.autograd.functional.jacobian(
            lambda x, map=map: layer.outputs(x, map), layer.stream, vectorize=True
        )
        for s in range(2):
            rows = [j.reshape(-1, layer.stream[s].numel()) for j in jacobian[s][..., s, :, :]]
            dense = torch.stack([torch.linalg.matrix_norm(row, 2) for row in rows])
            expected = dense if map in ("head", "head_out") else dense[0]
            torch.testing.assert_close(norm.lower[s], expected, rtol=1e-8, atol=0)
            assert bool((norm.upper[s] >= expected * (1 - 1e-9)).all())


def test_windows_are_one_sample():
    """The norm of a sample is the largest of its windows, which do not see each other."""
    config = tf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[1], num_heads=[2], window_size=4
    )
    model = build(lambda: tf.SwinModel(config))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    options = {"bounds": "lipbound", "extras": "frobenius,condition", "progress": False}
    with pytest.warns(lb.Notice, match="jacobian_condition is missing"):
        ds = lb.compare(model, {"pixel_values": pixels}, **options)
    layer = lb.capture(model, {"pixel_values": pixels})[0]
    assert layer.samples == 8
    each = lb.spectral_norm(layer, tol=1e-6).lower.view(2, 4, 2)
    np.testing.assert_allclose(ds["exact"].values[:, 0], each.amax(1), rtol=1e-3)
    sizes = lb.frobenius_norm(layer).view(2, 4, 2)  # which are added up
    whole = sizes.square().sum(1).sqrt()
    np.testing.assert_allclose(ds["jacobian_frobenius"][:, 0], whole, rtol=1e-5)
    assert bool(ds["jacobian_condition"].isnull().all())
    bound = lb.bounds.get("lipbound")(layer).view(2, 4, 2).amax(1)
    np.testing.assert_allclose(ds["lipbound"].values[:, 0], bound, rtol=1e-5)
    assert bool((ds["exact_upper"] >= ds["exact"]).all() and ds["lipbound_sound"].all())
    assert ds["length"].values.tolist() == [64, 64]


def test_a_report_has_details_of_the_layers_that_have_a_closed_form(run, tmp_path):
    """Cross-attention has none, and no words stand beside tokens of several streams."""
    from lipbound.reporting.page.render import contents, details_or_reason

    path, _ = run
    data = ["the ferry", "a clock of the island"]
    ds = lb.load(path / "run.zarr")
    found = details_or_reason(ds, 0, model=None, data=data, device="cpu")
    page = contents(ds, "T5", "mean", 0, found)
    assert [one is not None for one in page["details"]] == [True, True, False, False]
    assert page["tokens"] == []
    lb.report(path / "run.zarr", tmp_path / "t5.html", data=data)
    assert "is cross-attention" in (tmp_path / "t5.html").read_text(encoding="utf-8")
