"""Runs of heads as functions of their keys, values or queries: numbers, refusals, words, checks."""

import numpy as np
import pytest
import torch
from support.commands import refused
from support.models import MODERN, build
from support.runs import TEXTS

import lipbound as lb
from lipbound.reporting.labels import facts, left_out
from lipbound.reporting.tables import methods
from lipbound.runs.config import RunConfig
from lipbound.schema import WRT

OPTIONS = {"max_length": 12, "progress": False}
ALONE = tuple(name for name in WRT if name != "input")
GROUPED = pytest.mark.parametrize("kind", ["Llama", "Qwen 3"])
"""Query heads share heads of keys and values, rotated; of the latter keys are normalised, too."""


@pytest.fixture(scope="module")
def run(bert, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    lb.compare(bert, text, samples=2, wrt="keys", out=path, **OPTIONS)
    return path


@GROUPED
def test_keys_and_values_are_those_of_the_models_cache(kind):
    model, ids = build(MODERN[kind]), torch.arange(14).view(2, 7)
    layers = lb.capture(model, {"input_ids": ids})
    cache = model(ids, use_cache=True).past_key_values
    for layer, kept in zip(layers, cache.layers, strict=True):
        for own, cached in ((layer.k, kept.keys), (layer.v, kept.values)):
            assert torch.allclose(own, cached.repeat_interleave(2, 1), atol=1e-5)


@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("wrt", ALONE)
def test_numbers_are_those_of_spectral_norm(wrt, map, bert, wide_layers):
    ds = lb.compare(bert, TEXTS, wrt=wrt, map=map, dtype="float64", layers=[1], **OPTIONS)
    exact = lb.spectral_norm(wide_layers[1], wrt=wrt, map=map, method="dense")
    assert ds["exact"].dims == ("sample", "layer", "head")
    assert bool((ds["exact"][:, 0].values <= exact.upper.numpy()).all())
    assert bool((ds["exact_upper"][:, 0].values >= exact.lower.numpy()).all())
    np.testing.assert_allclose(ds["exact"][:, 0], exact.lower, rtol=1e-3)
    assert bool(ds["exact_converged"].all())
    assert list(ds.attrs["bounds"]) == []
    assert set(ds.attrs["not_applicable"]) == set(lb.bounds.names())


def test_a_run_says_what_heads_are_functions_of(run, bert, text):
    ds = lb.load(run)
    words = "as a function of its keys alone, as they enter the scores and a cache holds them"
    assert ds.attrs["wrt"] == "keys"
    assert ds.attrs["map_description"].endswith(words)
    for said_there in (lb.plots.caption(ds), methods(ds, "text"), lb.tables.latex(ds)):
        assert words in said_there
    assert "stated for functions of the input and were left out" in methods(ds, "text")
    assert ds["exact"].attrs["long_name"].endswith("as a function of keys")
    assert facts(ds)["function of"] == WRT["keys"]
    assert "heads as functions of their input" in left_out(ds)[0]
    assert RunConfig.of(ds).wrt == "keys"
    options = {"samples": 2, "out": run, "resume": True, **OPTIONS}
    assert lb.compare(bert, text, wrt="keys", **options).identical(ds)
    call = lambda: lb.compare(bert, text, wrt="values", **options)  # noqa: E731
    refused(call, "wrt was keys and is now values", error=lb.errors.StoreError)


def test_a_run_is_computed_again(run):
    ds = lb.load(run)
    assert lb.verify(ds, places=4).ok
    refused(lambda: lb.verify(ds, automatic=True), "automatic=True differentiates by the input")
    ds["exact"][1, 0, 2] *= 0.9
    assert not lb.verify(ds, places=1).ok


def test_layers_without_a_closed_form_are_refused_before_anything_is_measured():
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    given = lb.capture(model, {"query": x, "key": x, "value": x}, closed=False)
    run = lambda: lb.compare(given, wrt="keys", progress=False)  # noqa: E731
    refused(run, "wrt='keys' does not cover layers that are measured")
    norm = lambda: lb.spectral_norm(given[0], wrt="keys")  # noqa: E731
    refused(norm, "wrt='keys' needs a layer in closed form")


@GROUPED
def test_an_error_in_the_models_cache_moves_outputs_by_no_more_than_the_norm(kind):
    """Moved along the steepest direction, a key of the cache moves a head's output by the norm."""
    model, ids = build(MODERN[kind]), torch.arange(7)[None]
    att = lb.capture(model, {"input_ids": ids})[1].double()
    norm = lb.spectral_norm(att, wrt="keys", tol=1e-10, vectors=True)
    h, step = 3, 1e-5
    scores = att.scale * att.q[0, h] @ (att.k[0, h] + step * norm.right[0, h]).mT + att.mask[0, 0]
    moved = torch.softmax(scores, -1) @ att.v[0, h] - att.out[0, h]
    assert float(moved.norm()) / step == pytest.approx(float(norm.lower[0, h]), rel=1e-3)
