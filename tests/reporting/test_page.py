"""The page of a run: its numbers are the Dataset's, its details are those of dense Jacobians, and
foreign text stays text."""

import base64
import gzip
import json
import re
import sys
from functools import partial

import numpy as np
import pytest
import torch
from support import token_oracle
from support.layers import HARD, KINDS, random_attention
from support.models import AFFINE, build, inputs_for
from support.reference import head_function

import lipbound as lb
from lipbound.attention import softmax
from lipbound.bounds.registry import get
from lipbound.reporting.page.render import BINS, SINGLE, of_layer, report

HOSTILE = "</script><img src=x onerror=alert(1)> {{7*7}} \" ' & \x1b\u202e"


def unpacked(page, name):
    (text,) = re.findall(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    return gzip.decompress(base64.b64decode(text))


def data_of(page):
    return json.loads(unpacked(page.read_text(), "data"))


def without_data(page):
    """What a browser shows before a script runs."""
    text = page.read_text()
    return re.sub(r'<script type="text/plain".*?</script>', "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def ds(bert, text):
    return lb.compare(bert, text, samples=3, max_length=12, progress=False)


@pytest.fixture(scope="module")
def page(ds, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert report(ds, path) == []
    return path


def test_numbers_are_those_of_the_run(ds, page):
    (run,) = data_of(page)
    geomean = lambda x: np.exp(np.log(x).mean("sample")).values  # noqa: E731
    for name in ("exact", "exact_l2", *ds.attrs["bounds"]):
        np.testing.assert_allclose(run["grids"][name], geomean(ds[name]), rtol=1e-5)
        np.testing.assert_allclose(run["values"][name], ds[name].values, rtol=1e-5)
    for name in ds.attrs["bounds"]:
        ratio = ds[name] / ds["exact_l2" if name == "kim" else "exact"]
        np.testing.assert_allclose(run["ratios"][name], geomean(ratio), rtol=1e-5)
        found = run["histograms"][name]
        assert (sum(found["counts"]), len(found["counts"])) == (ratio.size, BINS)
        expected, _ = np.histogram(np.log10(ratio.values), bins=found["edges"])
        assert np.abs(expected - found["counts"]).sum() <= 2  # edges are rounded
    np.testing.assert_allclose(run["upper"], geomean(ds["exact_upper"]), rtol=1e-5)
    assert [row[0] for row in run["summary"]["rows"]] == ds.attrs["bounds"]
    assert run["summary"]["rows"][0][2] == lb.tables.readable(ds)["geom. mean"].iloc[0]
    assert ["revision", ds.attrs["revision"]] in run["provenance"]


def test_details_are_on_the_page(ds, page, bert):
    (run,) = data_of(page)
    packed = np.frombuffer(unpacked(page.read_text(), "attention-data"), dtype=np.uint8)
    attention = packed.reshape(2, 4, 12, 12)
    checkpoint = lb.load_checkpoint(bert)
    inputs = lb.prepare(checkpoint, ds.attrs["source"]["data"], samples=3, max_length=12)
    for layer, att in enumerate(lb.capture(checkpoint.model, inputs.block(0, 1, "cpu"))):
        np.testing.assert_allclose((attention[layer] / 255.0) ** 2, att.p[0], atol=0.005)
        detail, norm = run["details"][layer], lb.spectral_norm(att, tol=1e-8, vectors=True)
        rows, profile = softmax.jacobian_norm(att.p[0]).upper, lb.token_profile(att)
        np.testing.assert_allclose(detail["right"], (norm.right[0] ** 2).sum(-1), atol=5e-3)
        np.testing.assert_allclose(detail["softmax_norm"], rows, rtol=1e-4)
        np.testing.assert_allclose(detail["alone"], profile.lower[0], rtol=1e-3)
        np.testing.assert_allclose(detail["reached"], profile.output_lower[0], rtol=1e-3)
    assert len(run["tokens"]) == 12
    assert "ferry" in run["tokens"]


@pytest.mark.parametrize("norm", ["every-token", "one-token"])
def test_runs_in_norms_of_tokens_have_details(norm, bert, text, tmp_path):
    ds = lb.compare(bert, text, samples=1, max_length=12, norm=norm, progress=False)
    path = tmp_path / "x.html"
    assert report(ds, path) == []
    (run,) = data_of(path)
    assert len(run["details"]) == 2
    for layer in run["details"]:
        shares = np.array(layer["left" if norm == "every-token" else "right"])
        assert (shares.max(-1) == 1).all()
        assert (np.array(layer["right" if norm == "every-token" else "left"]).max(-1) < 1).all()
    assert run["norm_name"] == norm
    words = f'"{norm}": "{norm.split("-")[0].capitalize()} token moves'
    assert words in path.read_text()
    other = ds.copy()
    other["exact"] = ds["exact"] * 1.1
    (reason,) = report(other, tmp_path / "y.html")
    assert "are not those of the run" in reason


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_of_dense_jacobians(kind, map):
    """u^T J v splits into what passes through values, keys and queries: by autograd with two of the
    three held fixed."""
    whole = random_attention(kind)
    att = whole.select(slice(1, 2)).unpadded(0)
    names = ["lipbound", "lipbound_block", "yudin", "castin_bias", "specformer", "kim"]
    found = of_layer(att, map, names)
    assert np.allclose(sum(found.parts.values()), 1) or not lb.spectral_norm(att).lower.any()
    norm = lb.spectral_norm(att, map=map, method="dense", vectors=True)
    np.testing.assert_allclose(found.right.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(found.left.sum(-1), 1, rtol=1e-6)
    for h in range(att.heads):
        u, v = norm.left[0, h], norm.right[0, h]
        u = u if map == "head" else u @ att.w_o[h].mT
        sigma = float(norm.lower[0, h])
        head, sides = head_function(att, 0, h), {side: getattr(att, side)[0, h] for side in "qkv"}
        pieces = {}
        for moving, name in zip("qkv", ("queries", "keys", "values"), strict=True):
            held = {side: t for side, t in sides.items() if side != moving}
            _, along = torch.func.jvp(partial(head, **held), (att.x[0],), (v,))
            pieces[name] = float((u * along).sum()) / sigma
        assert sum(pieces.values()) == pytest.approx(1, rel=1e-6)
        for name, share in pieces.items():
            assert found.parts[name][h] == pytest.approx(share, abs=1e-5)
    for name, terms in found.bounds.items():
        np.testing.assert_allclose(sum(terms.values()), 1, rtol=1e-6, err_msg=name)
        assert min(v.min() for v in terms.values()) >= 0
    assert "kim" not in found.bounds


@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("norm", ["frobenius", "every-token", "one-token"])
@pytest.mark.parametrize("kind", ["biases", "causal", "padded"])
def test_tokens_are_those_of_dense_jacobians(kind, norm, map):
    """What each token has in u^T J v, and its profile, by blocks of the autograd Jacobian; in every
    norm."""
    att = random_attention(kind).select(slice(1, 2)).unpadded(0)
    found = of_layer(att, map, ["lipbound"] if norm == "frobenius" else lb.bounds.names(norm), norm)
    blocks = token_oracle.blocks(att, 0, map)  # (heads, i, j, r, D)
    if norm == "frobenius":
        steepest = lb.spectral_norm(att, map=map, method="dense", vectors=True)
    else:
        steepest = lb.token_norm(att, norm, map=map, vectors=True)
    u, v = steepest.left[0].double(), steepest.right[0].double()
    flow = torch.einsum("hir,hijrx,hjx->hij", u, blocks, v)
    np.testing.assert_allclose(found.right, flow.sum(1) / flow.sum((1, 2))[:, None], atol=1e-5)
    np.testing.assert_allclose(found.left, flow.sum(2) / flow.sum((1, 2))[:, None], atol=1e-5)
    np.testing.assert_allclose(found.norm, flow.sum((1, 2)), rtol=1e-5)
    columns = torch.linalg.matrix_norm(blocks.transpose(1, 2).flatten(2, 3), 2)
    np.testing.assert_allclose(found.alone, columns, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.reached, token_oracle.rows(blocks), rtol=1e-6, atol=1e-6)
    if norm != "frobenius":  # one output, or one token
        whole = found.right if norm == "one-token" else found.left
        np.testing.assert_allclose(whole.max(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(sum(found.parts.values()), 1, rtol=1e-9)


@pytest.mark.parametrize("kind", ["plain", "biases", "causal", "sharp"])
def test_shares_of_values_are_what_bounds_are_without_softmax(kind):
    """With queries and keys shrunk to nothing and P kept, the published bounds are their value
    terms."""
    att = random_attention(kind)
    names = "yudin yudin_g1 yudin_nobias yudin_sqrt_n yudin_closed castin castin_bias castin_c3"
    b_q = None if att.b_q is None else 0 * att.b_q
    for name in names.split():
        parts = {"b_q": b_q, "b_k": att.b_k, "b_v": att.b_v, "mask": att.mask}
        still = lb.Attention(att.x, 0 * att.w_q, att.w_k, att.w_v, **parts)
        still.cache.keep("p", att.p)
        power = 2 if name.startswith("castin") else 1
        expected = (lb.bounds.get(name)(still) / lb.bounds.get(name)(att)) ** power
        torch.testing.assert_close(get(name).terms(att)["values"], expected, rtol=1e-6, atol=1e-12)


def test_the_page_is_alone(page):
    text, outside = page.read_text(), without_data(page)
    assert len(text) < 6e6
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", outside)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket", outside)
    assert "default-src 'none'" in outside
    assert unpacked(text, "plotly").startswith(b"/**\n* plotly.js")


def test_hostile_text_stays_text(ds, tmp_path):
    other = ds.copy(deep=True)
    names = ("model", "data", "architecture", "command", "map_description", "preprocessing")
    other.attrs |= dict.fromkeys(names, HOSTILE)
    other["yudin"].attrs |= dict.fromkeys(("label", "statement", "source"), HOSTILE)
    for entry in (other, [other, ds]):
        report(entry, tmp_path / "x.html", details=False)
        text = without_data(tmp_path / "x.html")
        assert "<img" not in text
        assert "&lt;img src=x onerror=alert(1)&gt; {{7*7}}" in text
        assert "\x1b" not in text
        assert text.count("<script") == 1


@pytest.mark.parametrize("name", ["plotly", "latex2mathml"])
def test_what_is_not_installed_is_named(ds, tmp_path, name, monkeypatch):
    """Bounds are still shown, their formulas as text."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(lb.LipboundError, match=rf"needs {name}; pip install 'lipbound\[report\]'"):
        report(ds, tmp_path / "x.html", details=False)
    monkeypatch.setitem(sys.modules, "latex2mathml.converter", None)
    assert "norm" in get("yudin")._repr_html_()


def test_what_cannot_be_shown_is_said(ds, tmp_path, bert):
    path = tmp_path / "x.html"
    moved = ds.copy()
    moved.attrs = ds.attrs | {"source": ds.attrs["source"] | {"model": str(tmp_path / "nowhere")}}
    (notice,) = report(moved, path)
    assert "there is no directory" in notice
    (run,) = data_of(path)
    assert run["details"] is None
    assert "there is no directory" in run["reason"]
    changed = ds.copy()
    changed.attrs = ds.attrs | {"revision": "sha256:0"}
    assert "not the recorded weights" in report(changed, path)[0]
    model = build(AFFINE["gpt2"])
    memory = lb.compare(model, inputs_for(model), bounds=["yudin"], progress=False)
    assert "give it as model=" in report(memory, path)[0]
    assert report(memory, path, model=model, data=inputs_for(model)) == []
    assert data_of(path)[0]["tokens"] == []
    layers = lb.compare(model, inputs_for(model), map="layer", bounds=["lipbound"], progress=False)
    assert "whole layers" in report(layers, path)[0]
    assert data_of(path)[0]["across"] == "sample"
    assert report(ds, path, details=False) == []  # what nobody wanted is not missed


def test_other_weights_do_not_pass_for_the_runs(ds, bert, tmp_path):
    model = lb.load_checkpoint(bert).model
    assert report(ds, tmp_path / "x.html", model=model) == []
    model.encoder.layer[1].attention.self.query.weight.data *= 1.7
    (notice,) = report(ds, tmp_path / "x.html", model=model)
    assert "the norms of layers 1 are not those of the run: other weights" in notice


def test_runs_without_bounds_have_pages(bert, text, tmp_path):
    """Of functions of the input, with details and extras, and of keys, with neither; also both."""
    options = {"samples": 2, "max_length": 8, "bounds": "none", "progress": False}
    alone = lb.compare(bert, text, extras="frobenius,condition", **options)
    keys = lb.compare(bert, text, wrt="keys", **options | {"bounds": "default"})
    assert report(alone, tmp_path / "alone.html") == []
    (reason,) = report(keys, tmp_path / "keys.html")
    assert "functions of the input, not of keys" in reason
    report([alone, keys], tmp_path / "both.html", details=False)
    for ds, name in ((alone, "alone"), (keys, "keys")):
        (run,) = data_of(tmp_path / f"{name}.html")
        expected = np.exp(np.log(ds["exact"]).mean("sample"))
        np.testing.assert_allclose(run["grids"]["exact"], expected, rtol=1e-5)
        page = (tmp_path / f"{name}.html").read_text().partition('<script type="text/plain"')[0]
        mean = lb.tables.table_of(ds).shown["geom. mean"].item()
        assert f"<td>{mean}</td>" in page
        assert f"<td>{mean}</td>" in (tmp_path / "both.html").read_text()
        assert ("as a function of its keys alone" in page) == (name == "keys")
    (run,) = data_of(tmp_path / "alone.html")
    assert run["panels"] == ["exact", "jacobian_frobenius", "jacobian_condition"]
    assert [len(scale["names"]) for scale in run["scales"]] == [1, 1, 1]
    shown = np.array(run["values"]["jacobian_frobenius"])
    np.testing.assert_allclose(shown, alone["jacobian_frobenius"], rtol=1e-5)
    assert len(run["details"]) == 2


def test_runs_side_by_side_have_daggers_and_tell_what_differs(ds, bert, text, tmp_path):
    options = {"samples": 3, "bounds": ["castin", "lipbound"], "progress": False}
    short = lb.compare(bert, text, max_length=6, **options)
    report([ds, short], tmp_path / "x.html", details=False)
    page = (tmp_path / "x.html").read_text()
    cells = [
        re.findall(r"<td>(.*?)</td>", re.findall(f'"row">{label}</th>(.*?)</tr>', page)[0])
        for label in ("Castin 2024, 3.3", "Yudin 2025, Thm 3")
    ]
    shown = [lb.tables.readable(run).loc["castin", "geom. mean"] for run in (ds, short)]
    assert cells[0] == [f"{x} \u2020" for x in shown]
    assert cells[1][1] == "not computed"
    notices = re.findall(r'<p class="notice">(.*?)</p>', page)
    differ = [line.split(":")[0] for line in notices if "differ" in line]
    assert differ == ["Lengths in tokens differ"]
    report([ds, ds], tmp_path / "same.html", details=False)
    same = (tmp_path / "same.html").read_text()
    assert "differ:" not in re.sub(r"<script.*?</script>", "", same, flags=re.DOTALL)


def test_panels_are_those_of_the_figures(ds, page):
    (run,) = data_of(page)
    assert run["panels"] == [name for scale in run["scales"] for name in scale["names"]]
    assert run["scales"][0]["names"][:1] == ["exact"]
    assert {"lipbound", "lipbound_block"} <= set(run["scales"][0]["names"])
    near = [np.log10(run["grids"][name]) for name in run["scales"][0]["names"]]
    assert run["scales"][0]["low"] == pytest.approx(np.min(near), abs=1e-3)
    assert run["scales"][0]["high"] == pytest.approx(np.max(near), abs=1e-3)
    assert "<msqrt>" in page.read_text()  # statements are typeset


def test_infinite_and_missing_numbers_and_many_samples(ds, tmp_path):
    other = ds.copy(deep=True)
    other["castin"][:, 0, 0] = np.inf
    other["exact"][:, 1, 1] = np.nan
    many = other.isel(sample=[*range(3)] * 8).assign_coords(sample=range(24))
    report(many, tmp_path / "x.html", details=False)
    (run,) = data_of(tmp_path / "x.html")
    assert run["grids"]["castin"][0][0] == "inf"
    assert run["grids"]["exact"][1][1] is None
    assert run["ratios"]["yudin"][1][1] is None
    assert run["histograms"]["castin"]["infinite"] == 24
    assert len(run["values"]["exact"]) == SINGLE
    assert run["samples"] == 24
