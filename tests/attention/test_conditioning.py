"""Condition numbers of attention in low precision: numpy one-liners on captured heads."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from support.checks import close, normal, refused
from support.layers import KINDS, changed, places, random_attention
from support.models import AFFINE, MODERN, build, inputs_for
from support.variants import layer as variant_layer

import lipbound as lb
from lipbound import devices
from lipbound.attention.conditioning import conditioning, row_norm
from lipbound.attention.softmax import jacobian_norm
from lipbound.schema import CONDITIONING

OF_HEADS = CONDITIONING[:3]
CANCELS = 1e-12
"""What rounding may leave of a Jacobian's entries p - p p in the one-liners, at one-hot rows."""


def parts(att, s, h):
    """S (NaN where attention is forbidden), P, Q, K and V of a head at an input without padding."""
    one = att.unpadded(s)
    q, k, v = (t[0, h].double().numpy() for t in (one.wide_q, one.wide_k, one.wide_v))
    scores = one.scale * q @ k.T
    scores = scores if one.cap is None else one.cap * np.tanh(scores / one.cap)
    if one.mask is not None:
        scores = scores + one.mask.double().expand(1, one.heads, *scores.shape)[0, h].numpy()
    p = np.exp(scores - scores.max(1, keepdims=True))
    scores[scores < -1e30] = np.nan
    return [scores, p / p.sum(1, keepdims=True), q, k, v]


def naive(att, s, heads):
    """Of some heads together."""
    found = [parts(att, s, h) for h in range(att.heads)[heads]]
    scores, p, q, k, v = (list(several) for several in zip(*found, strict=True))
    row = max(np.linalg.norm(np.diag(r) - np.outer(r, r), 2) for one in p for r in one)
    sizes = [math.sqrt(sum(np.nansum(t**2) for t in several)) for several in (scores, p, q, k)]
    out = math.sqrt(sum(np.sum((a @ b) ** 2) for a, b in zip(p, v, strict=True)))
    return {
        "kappa_softmax": sizes[0] / sizes[1] * row,
        "chi_score": sizes[2] * sizes[3] * abs(att.scale) / sizes[1] * row,
        "kappa_val": sizes[1] * max(np.linalg.norm(t, 2) for t in v) / out,
    }


def check(att, rel):
    of_heads, whole = (
        {name: conditioning(att, name, whole=together) for name in OF_HEADS}
        for together in (False, True)
    )
    for s, h in places(att):
        for name, expected in naive(att, s, slice(h, h + 1)).items():
            found = of_heads[name]
            assert found.shape == (att.samples, att.heads)
            assert float(found[s, h]) == pytest.approx(expected, rel=rel, abs=CANCELS), name
    for s in range(att.samples):
        of_all = {name: float(found[s, 0]) for name, found in whole.items()}
        assert of_all == pytest.approx(naive(att, s, slice(None)), rel=rel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_they_are_their_definitions(kind, dtype):
    check(random_attention(kind, dtype=dtype), 1e-9 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("has", [{"cap"}, {"rotation"}, {"rotation", "qk_norm", "cap"}])
def test_scores_are_those_that_enter_the_softmax(has):
    check(variant_layer(0, frozenset(has), mask="causal"), 1e-9)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_on_captured_heads(name):
    model = build(AFFINE[name])
    for att in lb.capture(model, inputs_for(model)):
        check(att, 1e-6)


def test_the_largest_row_is_that_of_all_rows():
    att = random_attention("sharp")
    close(row_norm(att), jacobian_norm(att.p).upper.amax(-1), 1e-12)


def test_outputs_that_cancel_are_known_or_missing():
    """P of nearly equal entries and values whose mean is zero: float32 probabilities lose P V."""
    draw = normal()
    x = draw(1, 16, 8)
    q, v = 1e-3 * draw(1, 8, 4), draw(1, 8, 4)
    att = lb.Attention((x - x.mean(1, keepdim=True)).float(), q.float(), q.float(), v.float())
    kappa = conditioning(att, "kappa_val")
    assert float(kappa) == pytest.approx(naive(att.double(), 0, slice(None))["kappa_val"], rel=1e-6)
    assert float(kappa) > 1e4
    hidden = changed(att, w_q=0 * att.w_q)  # P V is rounding of the mean alone
    assert bool(conditioning(hidden.double(), "kappa_val").isnan().all())


def test_what_rounding_of_the_averages_does():
    """Relative errors of P reach outputs as kappa_val says at most, and it is at least 1."""
    att, draw = random_attention("biases"), normal()
    kappa = conditioning(att, "kappa_val")
    assert bool((kappa >= 1 - 1e-12).all())
    error = draw(50, *att.p.shape)
    moved = (error @ att.v).norm(dim=(-1, -2)) / att.out.norm(dim=(-1, -2))
    allowed = kappa * error.norm(dim=(-1, -2)) / att.p.norm(dim=(-1, -2))
    assert bool((moved <= allowed * (1 + 1e-12)).all())


@pytest.mark.parametrize("unit", [1e-300, 1e-161, 1e155, 1e250])
@pytest.mark.parametrize("whole", [False, True])
def test_the_unit_of_values_does_not_matter(unit, whole):
    """Whose squares would leave the range of float64."""
    att = random_attention("plain")
    kappa = conditioning(changed(att, w_v=unit * att.w_v), "kappa_val", whole=whole)
    close(kappa, conditioning(att, "kappa_val", whole=whole), 1e-12)


@pytest.mark.parametrize("name", OF_HEADS[:2])
@pytest.mark.parametrize("whole", [False, True])
def test_sizes_whose_squares_underflow(name: str, whole: bool) -> None:
    """P is uniform, and both are linear in what next to vanishes."""
    att = random_attention("plain")
    small, tiny = (changed(att, w_q=unit * att.w_q) for unit in (1e-100, 1e-200))
    found, expected = (conditioning(one, name, whole=whole) for one in (tiny, small))
    close(found * 1e100, expected, 1e-12)
    assert bool((found > 0).all())


def test_what_errors_of_scores_do():
    """To first order, relative errors of S reach P as kappa_softmax says at most."""
    att, draw, step = random_attention("plain"), normal(), 1e-6
    scores = att.scale * att.q @ att.k.mT
    error = draw(50, *scores.shape)
    moved = (torch.softmax(scores + step * error, -1) - att.p).norm(dim=(-1, -2)) / step
    allowed = conditioning(att, "kappa_softmax") * error.norm(dim=(-1, -2))
    allowed = allowed / scores.norm(dim=(-1, -2)) * att.p.norm(dim=(-1, -2))
    assert bool((moved <= allowed * (1 + 1e-5)).all())


def test_what_there_is_not_is_missing():
    sinks = variant_layer(0, frozenset({"sinks"}))
    for name, there in zip(CONDITIONING, (False, False, True, False), strict=True):
        assert bool(conditioning(sinks, name).isfinite().all()) == there, name
    att = random_attention("plain")
    nothing = changed(att, w_v=0 * att.w_v)
    assert bool(conditioning(nothing, "kappa_val").isnan().all())
    with pytest.raises(lb.errors.UnknownNameError, match="unknown condition number 'kappa'"):
        conditioning(att, "kappa")


def test_they_are_extras_of_a_run(tmp_path):
    """``rho_ln`` by the hidden states that transformers itself hands out."""
    model, path = build(AFFINE["gpt2"]), tmp_path / "run.zarr"
    inputs = inputs_for(model)
    options = {"bounds": "yudin", "extras": ",".join(CONDITIONING), "dtype": "float64"}
    ds = lb.compare(model, inputs, out=path, progress=False, **options)
    states = model.double()(**inputs, output_hidden_states=True).hidden_states
    for i, att in enumerate(lb.capture(model, inputs)):
        x, norm = states[i].detach().numpy(), model.h[i].ln_1
        rho = x.var(-1).mean(-1) / norm.eps * x.shape[-1] * 2.0**-8
        for s, h in places(att):
            np.testing.assert_allclose(ds["rho_ln"].values[s, i, h], rho[s], rtol=1e-9)
            for name, value in naive(att, s, slice(h, h + 1)).items():
                assert float(ds[name][s, i, h]) == pytest.approx(value, rel=1e-9), name
    assert lb.verify(path, data=inputs, model=model, places=4).ok
    assert "condition number of the softmax: median" in lb.tables.render(ds)
    assert "indicator of the LayerNorm in front" in lb.cite(ds, "text")
    assert "smallest singular value" not in lb.cite(ds, "text")
    assert "(Baek 2026)" in lb.cite(ds, "text")
    assert "@inproceedings{baek2026numerical," in lb.cite(ds)
    assert "baek" not in lb.cite(ds.drop_vars(CONDITIONING, errors="ignore"))
    assert lb.plots.heatmaps(ds, bounds="kappa_softmax,rho_ln").axes[1].get_title()


def test_whole_layers_have_one_of_each():
    model = build(AFFINE["gpt2"])
    inputs = inputs_for(model)
    options = {"extras": list(CONDITIONING), "bounds": "none", "progress": False}
    whole = lb.compare(model, inputs, map="layer", **options)
    heads = lb.compare(model, inputs, **options)
    for name in CONDITIONING:
        assert whole[name].dims == ("sample", "layer")
        assert bool(whole[name].notnull().all())
    np.testing.assert_allclose(whole["rho_ln"], heads["rho_ln"].isel(head=0), rtol=1e-12)
    assert bool((whole["kappa_softmax"] >= heads["kappa_softmax"].min("head")).all())


def test_a_model_without_layer_norm_says_so():
    model = build(MODERN["Llama"])
    options = {"bounds": "none", "extras": "rho_ln,kappa_val", "progress": False}
    words = "rho_ln is missing at .*: no closed form, sinks, or no LayerNorm"
    with pytest.warns(lb.Notice, match=words):
        ds = lb.compare(model, inputs_for(model), **options)
    assert bool(ds["rho_ln"].isnull().all())
    assert bool(ds["kappa_val"].notnull().all())


def test_memory_that_is_not_free_is_refused_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda device: 1000.0)
    att = random_attention("plain")
    for name in OF_HEADS:
        refused(partial(conditioning, att, name), "at 6 tokens", "leave it out")
    assert bool(conditioning(att, "rho_ln").isnan().all())
