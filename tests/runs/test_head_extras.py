"""Extras of heads themselves, against one-liners of numpy."""

import numpy as np
import pytest
import torch
from support.layers import changed, random_attention
from support.models import AFFINE, MODERN, build, inputs_for
from support.variants import cross
from support.variants import layer as variant_layer
from support.versions import marked

import lipbound as lb
from lipbound.attention.conditioning import conditioning
from lipbound.linalg.matrix_norms import product_norms
from lipbound.runs.head_extras import of_heads
from lipbound.schema import BATCH_LOGIT, OF_HEADS, OF_WEIGHTS

NAMES = [name for name in OF_HEADS if name != BATCH_LOGIT]
TEXTS = ["a b c", "b c d e f"]


def expected(att, s, h, tau):
    """What is defined, of a head at a sample."""
    q, k, v = (w[h].double().numpy() for w in (att.w_q, att.w_k, att.w_v))
    qk, ov = att.scale * q @ k.T, v @ att.w_o[h].double().numpy()
    found = {}
    for name, w in (("wqk", qk), ("wov", ov)):
        found[f"{name}_norm"] = np.linalg.norm(w, 2)
        found[f"{name}_stable_rank"] = np.linalg.norm(w) ** 2 / np.linalg.norm(w, 2) ** 2
    wide = att.double()
    rows = wide.p[s, h].numpy()
    if wide.sinks is not None:
        rows = np.concatenate([rows, 1 - rows.sum(1, keepdims=True)], 1)
    found["row_norm"] = max(np.linalg.norm(np.diag(p) - np.outer(p, p), 2) for p in rows)
    logits = wide.capped(wide.scale * wide.wide_q[s, h] @ wide.wide_k[s, h].T).numpy()
    found["largest_logit"] = logits[wide.p[s, h].numpy() > 0].max()
    found["qk_clip"] = min(1.0, tau / max(found["largest_logit"], 1e-300))
    return found


def check(att, values, tau):
    for s in range(att.samples):
        for h in range(att.heads):
            for name, value in expected(att, s, h, tau).items():
                assert float(values[name][s, h]) == pytest.approx(value, rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("kind", ["plain", "biases", "padded", "window", "sharp", "wide_values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers(kind, dtype):
    att = random_attention(kind, dtype=dtype)
    check(att, of_heads(att, NAMES, 0.7), 0.7)


@pytest.mark.parametrize("has", [("rotation",), ("norm",), ("cap", "sinks"), ("values", "gate")])
def test_variants_take_no_part_in_weights(has):
    att = variant_layer(2, frozenset(has), mask="causal")
    w_o = torch.randn(att.heads, att.d_v, 7, generator=torch.manual_seed(0)).double()
    att = changed(att, w_o=w_o)
    check(att, of_heads(att, NAMES, 1.0), 1.0)


def test_what_is_not_known():
    for stream in ("queries", "memory"):
        found = of_heads(cross(0, stream), NAMES, 1.0)
        assert all(bool(found[name].isnan().all()) for name in OF_WEIGHTS)
        assert bool(found["row_norm"].isfinite().all())
    att = random_attention("plain", w_o=False)
    assert bool(of_heads(att, ["wov_norm"])["wov_norm"].isnan().all())
    huge = changed(att, w_q=1e18 * att.w_q)
    assert bool(of_heads(huge, ["row_norm"])["row_norm"].isnan().all())


def of_numpy(a, b):
    """Norms and stable ranks of products a b^T by their singular values."""
    both = (w.double().nan_to_num(0, 0, 0).numpy() for w in torch.broadcast_tensors(a, b))
    values = np.linalg.svd(np.einsum("...ij,...kj->...ik", *both), compute_uv=False)
    return values[..., 0], (values**2).sum(-1) / values[..., 0] ** 2


@pytest.mark.parametrize(
    "kind", ["random", "rank one", "clustered", "one NaN", "one infinite", "shared"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2])
def test_norms_of_products(kind, dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # which decides who multiplies
    a, b = torch.randn(2, 4, 40, 6, generator=torch.manual_seed(0)).double()
    if kind == "rank one":
        b = b[..., :1] * b[:, :1]
    if kind == "clustered":
        a, b = torch.linalg.qr(a)[0], torch.linalg.qr(b)[0]
        a *= 1 - torch.tensor([0, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5])
    if kind.startswith("one "):
        b[1, 0, 0] = torch.nan if kind == "one NaN" else torch.inf
    if kind == "shared":
        a, b = a[:2, None], b.unflatten(0, (2, 2))
    a, b = a.to(dtype), b.to(dtype)
    known = b.isfinite().all(-1).all(-1).numpy()
    for pair in ((a, b), (b, a)):
        for found, expected in zip(product_norms(*pair), of_numpy(*pair), strict=True):
            np.testing.assert_allclose(found[known], expected[known], rtol=1e-6)
            assert bool(found[~known].isnan().all())


@pytest.mark.parametrize("scale", [1e-200, 1e-150, 1.0, 1e150, 1e200])
def test_norms_of_products_far_from_one(scale):
    a, b = torch.randn(2, 3, 20, 4, generator=torch.manual_seed(0)).double()
    top, expected = of_numpy(a, b)
    for other, both in ((scale, scale * scale), (1 / scale, 1.0)):
        norm, rank = product_norms(scale * a, other * b)
        np.testing.assert_allclose(norm, top * both, rtol=1e-12)  # zero and infinite beyond range
        np.testing.assert_allclose(rank, expected, rtol=1e-12)


def test_products_that_cancel_are_not_known():
    u, v, w = torch.linalg.qr(torch.randn(4, 4, generator=torch.manual_seed(0)).double())[0].T[:3]
    # u v^T - u v^T = 0 but for rounding
    norm, rank = product_norms(torch.stack([u, u], 1), torch.stack([v, -v * (1 + 1e-15)], 1))
    assert bool(norm.isnan())
    assert bool(rank.isnan())
    norm, rank = product_norms(torch.stack([u, w], 1), torch.zeros(3, 2))
    assert float(norm) == 0
    assert bool(rank.isnan())


RUNS = ["bert", "gpt2 scaled by layer", "Llama", "Qwen 3", "Gemma 2"]
LACKING = {"gpt2 scaled by layer": "GPT-2 scales in the function it calls"}


@pytest.mark.parametrize("name", marked(RUNS, LACKING))
def test_runs(name):
    model = build((AFFINE | MODERN)[name])
    inputs = inputs_for(model)
    ds = lb.compare(model, inputs, bounds="none", extras=NAMES, tau=0.5, progress=False)
    for i, att in enumerate(lb.capture(model, inputs)):
        check(att, {one: ds[one].isel(layer=i).values for one in NAMES}, 0.5)
    assert ds.attrs["tau"] == 0.5
    assert all("source" in ds[one].attrs for one in NAMES)


def test_they_go_with_every_norm_and_argument_and_are_verified(bert, tmp_path):
    options = {"max_length": 8, "bounds": "none", "progress": False}
    options |= {"extras": NAMES, "tau": 1}
    plain = lb.compare(bert, TEXTS, exact_samples=1, out=tmp_path / "run.zarr", **options)
    assert bool(plain["row_norm"].notnull().all())  # also where there is no exact norm
    assert lb.verify(tmp_path / "run.zarr", data=TEXTS, places=2).ok
    for other in ({"norm": "one-token"}, {"wrt": "keys"}, {"map": "head_out"}):
        ds = lb.compare(bert, TEXTS, **options, **other)
        for name in NAMES:
            np.testing.assert_array_equal(ds[name], plain[name])
    plain["wqk_norm"][0, 0, 0] *= 1.001
    found = lb.verify(plain, data=TEXTS, places=8)
    assert any("wqk_norm" in str(problem) for problem in found.problems)


def test_what_is_missing_is_told():
    att = random_attention("plain", w_o=False)
    with pytest.warns(lb.Notice, match="wov_norm is missing at 6 of 6 .* no output projection"):
        lb.compare([att], bounds="none", extras="wov_norm", dtype="float64", progress=False)


def test_tables_have_the_largest_logits_and_smallest_factors_of_places(bert):
    options = {"bounds": "none", "extras": ["largest_logit", "qk_clip"], "tau": 1e3}
    ds = lb.compare(bert, TEXTS, max_length=8, progress=False, **options)
    assert lb.tables.extra_notes(ds)[1].endswith("from 1.000 to 1.000")
    assert r"(\cite{kimi2025k2}, section 2.1)" in lb.cite(ds, "latex")
    ds["largest_logit"][:], ds["qk_clip"][0, 0, 0] = -2.0, 0.5
    ds["largest_logit"][0, 0, 0] = -1.0
    assert lb.tables.breakdown(ds)[options["extras"]].values[0].tolist() == [-1, 0.5]


def test_a_monitor_follows_them():
    model, logged = build(AFFINE["gpt2"]), dict[int, dict[str, float]]()
    how = {"extras": ["wqk_norm", "qk_clip", "largest_logit", "kappa_softmax", "rho_ln"]}
    how |= {"log": lambda numbers, step: logged.__setitem__(step, numbers)}
    how |= {"tau": 0.1, "threshold": {"wqk_norm": 1e6}}
    monitor = lb.Monitor(model, inputs_for(model), every=1, **how)
    for step in range(2):
        monitor.step(step)
        with torch.no_grad():
            model.h[0].attn.c_attn.weight.mul_(2)
    run = monitor.run
    with torch.no_grad():  # as it was at the last step
        model.h[0].attn.c_attn.weight.div_(2)
    first = next(iter(lb.capture(model, inputs_for(model), around=True)))
    for name in ("kappa_softmax", "rho_ln"):  # the latter by the LayerNorm in front
        expected = conditioning(first, name).expand(-1, first.heads)
        np.testing.assert_allclose(run[name][1, :, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(run["wqk_norm"][1, :, 0], 4 * run["wqk_norm"][0, :, 0], rtol=1e-6)
    for step in range(2):
        place = run.isel(step=step, layer=0)
        assert logged[step]["lipbound/layer_0/qk_clip_min"] == float(place["qk_clip"].min())
        assert logged[step]["lipbound/layer_0/wqk_norm_max"] == float(place["wqk_norm"].max())
    assert "lipbound/layer_0/qk_clip_max" not in logged[0]
