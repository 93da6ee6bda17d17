"""Two runs, or two checkpoints on the same inputs, side by side."""

import functools
import itertools
import json
import shutil
import tempfile

import numpy as np
import pytest
import torch
import xarray as xr
from support.commands import command, refused, said
from support.layers import random_attention
from support.models import AFFINE, TEXT, build, inputs_for
from support.oracles import dense_norms, jacobians
from support.runs import OPTIONS, TEXTS
from transformers import BertConfig, BertModel

import lipbound as lb
from lipbound import plots, tables
from lipbound.attention.layer import Attention
from lipbound.errors import AlteredRunError, Notice, StoreError
from lipbound.models.loading import GivenLayers, load_checkpoint
from lipbound.reporting.plots import DIVERGING
from lipbound.runs import diff as runs_diff
from lipbound.runs.checksums import faults
from lipbound.runs.store import GIVEN, both_runs, diff_of


@pytest.fixture(scope="module")
def tuned(bert, tmp_path_factory):
    """The small BERT with other queries in its second layer, and nothing else."""
    folder = tmp_path_factory.mktemp("tuned") / "bert"
    shutil.copytree(bert, folder)
    model = BertModel.from_pretrained(folder)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight.mul_(3.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def after(tuned):
    return lb.compare(tuned, TEXTS, **OPTIONS)


@pytest.fixture(scope="module")
def ds(whole, after):
    return lb.diff(whole, after)


def scaled(att, factor):
    """The same inputs, other queries."""
    names = ("w_k", "w_v", "b_q", "b_k", "b_v", "w_o", "scale", "mask")
    return Attention(att.x, att.w_q * factor, **{name: getattr(att, name) for name in names})


def svd_norms(att, map):
    """By autograd and float64 SVD: of every head, or of all heads of the layer side by side."""
    if map == "head":
        return dense_norms(att).numpy()
    rows = [jacobians(att, sample).flatten(0, 2) for sample in range(att.samples)]
    return torch.stack([torch.linalg.svdvals(row)[0] for row in rows]).numpy()


@pytest.mark.parametrize("map", ["head", "heads"])
def test_ratios_enclose_those_of_dense_norms(map):
    """Against the float64 SVD of autograd Jacobians."""
    before = random_attention("bias").double()
    pair, options = (before, scaled(before, 2.5)), {"dtype": "float64", "tol": 1e-6}
    runs = [lb.compare([att], bounds="none", map=map, progress=False, **options) for att in pair]
    with pytest.warns(Notice, match="inputs of their own, which are not compared"):
        ds = lb.diff(*runs)
    a, b = (svd_norms(att, map) for att in pair)
    expected = np.reshape(b / a, ds["ratio"].shape)
    assert (ds["ratio_lower"].values <= expected).all()
    assert (expected <= ds["ratio_upper"].values).all()
    assert (ds["ratio_upper"] <= ds["ratio_lower"] * (1 + 3e-6)).all()
    assert (ds["ratio_lower"] <= ds["ratio"]).all()
    assert (ds["ratio"] <= ds["ratio_upper"]).all()
    assert GivenLayers.__name__ == GIVEN


def test_both_runs_are_kept_whole(ds, whole, after, tmp_path):
    np.testing.assert_array_equal(ds["ratio"], after["exact"] / whole["exact"])
    np.testing.assert_array_equal(ds["yudin_b"], after["yudin"])
    assert float(abs(ds["ratio"].sel(layer=0) - 1).max()) < 1e-3
    assert float(abs(ds["ratio"].sel(layer=1) - 1).min()) > 1e-3
    for name in ("diff.zarr", "diff.nc"):
        stored = lb.load(lb.save(ds, tmp_path / name), damaged="refuse")
        assert stored.equals(ds)
        assert stored.attrs == ds.attrs
        for run, given in zip(both_runs(stored), (whole, after), strict=True):
            assert (faults(run), run.attrs) == ([], given.attrs)
            assert run.equals(given)
    part = diff_of(ds.isel(layer=1, sample=[0, 3]))
    np.testing.assert_array_equal(part["ratio"][:, 0], ds["ratio"][[0, 3], 1])
    assert [faults(run) for run in both_runs(part)] == [[], []]


def test_without_both_upper_ends_there_is_no_enclosure(whole, tuned):
    estimate = lb.compare(tuned, TEXTS, **OPTIONS | {"delta": None})
    with pytest.warns(Notice, match="delta is 1e-06 in a and None in b"):
        ds = lb.diff(whole, estimate)
    assert "ratio_lower" not in ds
    said = " ".join(tables.table_of(ds).notes)
    assert "ratios are estimates without an enclosure" in said
    assert "is smaller than" not in said


def test_zero_has_no_ratio(whole):
    plain = random_attention("plain").double()
    zero = Attention(plain.x, plain.w_q, plain.w_k, plain.w_v * 0)
    runs = [lb.compare([one], bounds="none", progress=False) for one in (zero, plain)]
    with pytest.warns(Notice):
        ds = lb.diff(*runs)
    assert ds["ratio"].isnull().all()
    assert "places have no ratio" in " ".join(tables.table_of(ds).notes)
    with pytest.warns(Notice):
        assert (lb.diff(*runs[::-1])["ratio"] == 0).all()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"map": "layer", "bounds": "none"}, ["map is 'head' in a and 'layer' in b; measure both"]),
        ({"norm": "one-token", "bounds": "none"}, ["norm is 'frobenius' in a and 'one-token' in"]),
        ({"data": TEXTS[::-1]}, ["other samples, or other tokens or pixels"]),
        (lambda run: run.isel(sample=[0, 1]), ["other samples, or other tokens"]),
        (lambda run: run.isel(layer=[1]), ["layer is [0, 1] in a and [1] in b; measure both"]),
        (lambda run: run.isel(head=[1]), ["head is ", " in a and [1] in b"]),
        (lambda run: run.assign(exact=run["exact"] * 2), ["b (", "is not as it was computed: its"]),
        (lambda run: run.drop_vars("yudin"), ["variables that it was made with were left out"]),
    ],
)
def test_what_is_not_of_the_same_thing_is_refused(other, words, bert, whole):
    options = {"data": TEXTS, **OPTIONS}
    run = other(whole) if callable(other) else lb.compare(bert, **options | other)
    refused(lambda: lb.diff(whole, run), *words, error=StoreError)


def test_arguments_that_do_not_go_together(bert, whole, tmp_path):
    for given, options, words in (
        ((whole, bert), {}, "one is a run, one a checkpoint; give two of a kind"),
        ((bert, whole), {}, "one is a run, one a checkpoint"),
        ((whole, whole), {"samples": 2}, "a and b are runs, measured already; leave out samples"),
        ((whole, whole), {"inputs": torch.ones(1, 8)}, "measured already; leave out inputs"),
        ((whole, whole), {"seed": 0}, "measured already; leave out seed"),
        ((bert, bert), {"sample": 2}, "unknown option of a diff 'sample'; did you mean 'samples'"),
        ((bert, bert), {"model": "x"}, "unknown option of a diff 'model'"),
        ((tmp_path / "no.zarr", whole), {}, "there is no run"),
    ):
        refused(lambda given=given, options=options: lb.diff(*given, **options), words)


def test_damage_is_told(ds, tmp_path):
    def loaded(ds, name):
        return lb.load(lb.save(ds, tmp_path / name), damaged="refuse")

    for name, value in (("ratio", 3.0), ("exact_a", 3.0)):
        wrong = ds.copy(deep=True)
        wrong[name][0, 0, 0] = value
        call = functools.partial(loaded, wrong, f"{name}.zarr")
        refused(call, "damaged or was edited: ", "ratio is not that of", error=AlteredRunError)
    refused(lambda: tables.render(wrong), "a (", "is not as it was computed", error=StoreError)
    lost, words = ds.drop_vars("exact_b"), "of one of its two runs, 'exact' is missing"
    refused(lambda: loaded(lost, "lost.zarr"), words, error=AlteredRunError)
    for wants_a_run in (lb.cite, lb.verify, tables.summary, plots.ratios):
        refused(functools.partial(wants_a_run, ds), "is a diff of two runs, and one run is wanted")
    refused(lambda: plots.heatmaps(ds, scale="shared"), "scale is not for a dif")


def test_two_checkpoints_on_the_same_inputs(bert, tuned, ds, tmp_path):
    options = {"data": TEXTS, "out": tmp_path / "diff.zarr", **OPTIONS}
    found = lb.diff(bert, tuned, **options)
    np.testing.assert_array_equal(found["ratio"], ds["ratio"])
    assert lb.load(options["out"], damaged="refuse").equals(found)
    for run, side in zip(both_runs(found), "ab", strict=True):
        assert lb.load(tmp_path / f"diff-{side}.zarr").equals(run)
    assert lb.verify(tmp_path / "diff-b.zarr", data=TEXTS, places=1).ok
    refused(lambda: lb.diff(bert, tuned, **options), "exists already", error=StoreError)
    shutil.rmtree(options["out"])
    dates = [lb.load(tmp_path / f"diff-{side}.zarr").attrs["date"] for side in "ab"]
    again = lb.diff(bert, tuned, resume=True, **options)
    assert [run.attrs["date"] for run in both_runs(again)] == dates


def test_two_models_of_one_layout_whose_modules_have_other_names():
    """Layers are compared by their numbers, in tables and figures."""
    models = [build(AFFINE[name]).eval() for name in ("gpt2", "opt")]
    inputs = inputs_for(models[0])
    found = lb.diff(*models, inputs=inputs, bounds=["lipbound"], progress=False)
    runs = [lb.compare(model, inputs=inputs, bounds=[], progress=False) for model in models]
    assert runs[0]["layer_name"].values.tolist() != runs[1]["layer_name"].values.tolist()
    wanted = (runs[1]["exact"] / runs[0]["exact"]).reset_coords(drop=True)
    xr.testing.assert_allclose(found["ratio"].reset_coords(drop=True), wanted, rtol=1e-12)
    for by, axes in (("layer", ["sample", "head"]), ("head", ["sample"])):
        assert tables.render(found, by=by)
        rows = tables.table_of(found, by).numbers["ratio"]
        means = np.exp(np.log(wanted).mean(axes)).values
        np.testing.assert_allclose(rows, means.ravel(), rtol=1e-12)
    assert plots.heatmaps(found)


def test_the_same_tokens_are_the_same_however_they_are_given(bert):
    """With a mask that masks nothing or without it, as text, as numbers or as ready inputs."""
    ids = load_checkpoint(str(bert)).tokenizer()(TEXTS[:1], return_tensors="pt")["input_ids"]
    options = {"bounds": [], "progress": False}
    given = (
        {"data": TEXTS[:1]},
        {"data": ids},
        {"inputs": {"input_ids": ids}},
        {"inputs": {"input_ids": ids.int(), "attention_mask": torch.ones_like(ids).bool()}},
    )
    runs = [lb.compare(bert, **options, **one) for one in given]
    assert len({run.attrs["data_fingerprint"] for run in runs}) == 1
    for run in runs[1:]:
        assert (lb.diff(runs[0], run)["ratio"] == 1).all()
    both = {"data": TEXTS, "inputs": {"input_ids": ids}}
    refused(lambda: lb.diff(bert, bert, **both), "data and inputs are both given")
    padded = torch.nn.functional.pad(ids, (0, 2))
    mask = (torch.arange(padded.shape[1]) < ids.shape[1]).long()[None]
    other = lb.compare(bert, inputs={"input_ids": padded, "attention_mask": mask}, **options)
    refused(lambda: lb.diff(runs[0], other), "data is '1 given text", " in a and 'ready model in")


def test_finished_work_is_kept_where_the_second_run_fails(bert, tuned, tmp_path, monkeypatch):
    measured = runs_diff.run

    def failing(config, **options):
        if config.model == tuned:
            raise MemoryError("no room")
        return measured(config, **options)

    monkeypatch.setattr(runs_diff, "run", failing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(Notice, match="the run of a was finished"), pytest.raises(MemoryError):
        lb.diff(bert, tuned, TEXTS, **OPTIONS)
    (kept,) = tmp_path.glob("lipbound-*/a.zarr")
    assert lb.load(kept).attrs["model"] == str(bert)


@pytest.mark.parametrize("by", ["bound", "layer", "head"])
def test_tables_by_plain_numpy(ds, whole, after, by):
    """Geometric means, their enclosures and counts, and ranges over the four samples."""
    numbers = tables.table_of(ds, by).numbers
    values = {name: after[name] / whole[name] for name in whole.attrs["bounds"]}
    values |= {"a": whole["exact"], "b": after["exact"], "ratio": after["exact"] / whole["exact"]}
    values["ratio_lower"] = after["exact"] / whole["exact_upper"]
    values["ratio_upper"] = after["exact_upper"] / whole["exact"]

    def means(name, at, axes):
        return np.exp(np.log(values[name].sel(at).values).mean(axes))

    if by == "bound":
        assert [*numbers.index] == ["a", "b", "exact", *whole.attrs["bounds"]]
        for name, row in numbers.rename(index={"exact": "ratio"}).iterrows():
            single, there = means(str(name), {}, (1, 2)), values[str(name)].values
            expected = [means(str(name), {}, (0, 1, 2)), single.min(), single.max()]
            expected += [there.min(), there.max()]
            columns = ["geomean", "sample_min", "sample_max", "min", "max"]
            np.testing.assert_allclose(row[columns].astype(float), expected, rtol=1e-12)
        return
    assert len(numbers) == {"layer": 2, "head": 8}[by]
    for place, row in numbers.iterrows():
        at = dict(zip(("layer", "head"), np.atleast_1d(place).tolist(), strict=False))
        inner = tuple(range(3 - len(at)))
        for name in ("a", "b", "ratio", "ratio_lower", "ratio_upper"):
            assert row[name] == pytest.approx(means(name, at, inner), rel=1e-12)
        single = means("ratio", at, inner[1:])
        for end, limit in (("sample_min", single.min()), ("sample_max", single.max())):
            assert row[end] == pytest.approx(limit, rel=1e-12)


def test_places_where_the_enclosures_decide_are_counted(ds, whole, after):
    smaller = int((after["exact_upper"] < whole["exact"]).sum())
    larger = int((after["exact"] > whole["exact_upper"]).sum())
    said = f"after is smaller than A at {smaller} of 32 places, and larger at {larger}"
    assert said in " ".join(tables.table_of(ds, labels={"b": "after"}).notes)


def test_tables_in_every_format(ds):
    for form, by in itertools.product(tables.FORMATS, tables.BY):
        assert tables.render(ds, form, by=by)
    columns = tables.render(ds, "csv", by="head").splitlines()[0].split(",")
    assert columns[:5] == ["layer", "head", "ratio", "ratio_lower", "ratio_upper"]
    text = tables.render(ds, width=80, labels={"a": "before", "b": "after"})
    assert "after / before" in text
    assert "all enclosures together with failure probability 2e-6" in " ".join(text.split())
    one = tables.render(ds.isel(sample=[0]))
    assert "one sample: no interval over samples" in one
    assert "95% interval" not in one
    for wrong, words in (
        ({"bounds": ["kim"]}, "unknown bound 'kim'"),
        ({"labels": {"c": "x"}}, "those of a diff are of a and b"),
        ({"by": "layer", "bounds": ["yudin"]}, "bounds are for rows by bound"),
        ({"values": "value", "by": "layer"}, "values is not for a diff"),
        ({"reduce": "max"}, "reduce and values are for rows by layer"),
        ({"by": "heads"}, "did you mean 'head'"),
    ):
        refused(lambda wrong=wrong: tables.table_of(ds, **wrong), words)


def pictures(figure):
    return [axes for axes in figure.axes if axes.images]


def test_heatmaps_diverge_from_one(ds, tmp_path):
    figure = plots.heatmaps(ds, tmp_path / "diff.svg")
    first, second, ratio = pictures(figure)
    assert first.images[0].norm.vmin == second.images[0].norm.vmin
    assert first.images[0].norm.vmax == second.images[0].norm.vmax
    picture = ratio.images[0]
    assert picture.norm.vmin == -picture.norm.vmax
    assert picture.cmap.name == DIVERGING
    expected = np.log10(np.exp(np.log(ds["ratio"]).mean("sample")))
    np.testing.assert_allclose(picture.get_array(), expected, rtol=1e-9)
    numbers = tables.table_of(ds, "head").numbers
    open_ = (numbers["sample_min"] <= 1) & (numbers["sample_max"] >= 1)
    dots = [tuple(map(int, at[::-1])) for at in ratio.collections[0].get_offsets()]
    assert dots == numbers.index[open_].to_list()
    caption = (tmp_path / "diff.caption.txt").read_text().strip()
    assert caption == plots.caption(ds)
    assert "B / A on a logarithmic colour scale centred on 1" in caption
    assert ("Dots: " in caption) == bool(dots)
    ticks = [float(tick.get_text()) for tick in figure.axes[-1].get_yticklabels()]
    assert ticks[len(ticks) // 2] == 1
    np.testing.assert_allclose(ticks, 10.0 ** figure.axes[-1].get_yticks(), rtol=5e-4)
    alone = plots.heatmap(ds)
    np.testing.assert_array_equal(alone.images[0].get_array(), picture.get_array())


def test_command_line(bert, tuned, text, tmp_path):
    out = tmp_path / "diff.zarr"
    options = f"--data {text} --samples 2 --max-length 8 --bounds yudin --quiet --out {out}"
    printed = said(f"diff {bert} {tuned} {options}")
    for part in ("B / A", "layer", f"saved {out}", said(f"table {out}")):
        assert part in printed
    assert "B / A" in said(f"diff {tmp_path / 'diff-a.zarr'} {tmp_path / 'diff-b.zarr'}")
    for bounds, count in (("yudin", 4), ("none", 3)):
        rows = json.loads(said(f"table {out} --json --bounds {bounds}"))["rows"]
        assert len(rows) == count
    ratios = np.log(lb.load(out)["ratio"])
    assert rows[2]["geomean"] == pytest.approx(float(np.exp(ratios.mean())))
    facts = json.loads(said(f"info {out} --json"))
    assert (facts["kind"], facts["checksums"]) == ("diff of two runs", "hold")
    assert facts["b / a"] == rows[2]["geomean"]
    said(f"heatmap {out} -o {tmp_path / 'diff.pdf'} --label b=tuned")
    said(f"report {out} -o {tmp_path / 'diff.html'} --no-details")
    for line in (f"cite {out}", f"verify {out}", f"diff {out} {out}"):
        status, _, err = command(line)
        assert (status, "is a diff of two runs, and one run is wanted" in err) == (2, True)


def test_runs_put_together_are_matched_place_by_place(whole, after, ds):
    """In whatever order they were put together; samples in another order are others."""
    first = lb.concat([whole.isel(layer=[0]), whole.isel(layer=[1])])
    second = lb.concat([after.isel(layer=[1]), after.isel(layer=[0])])
    np.testing.assert_array_equal(lb.diff(first, second)["ratio"], ds["ratio"])
    halves = lb.concat([after.isel(sample=[2, 3]), after.isel(sample=[0, 1])])
    refused(lambda: lb.diff(first, halves), "other samples", error=StoreError)


def test_whole_layers(bert, tuned):
    ds = lb.diff(bert, tuned, TEXTS, **OPTIONS | {"map": "layer", "bounds": "none"})
    assert ds["ratio"].dims == ("sample", "layer")
    numbers = tables.table_of(ds, "layer").numbers
    np.testing.assert_allclose(numbers["ratio"], np.exp(np.log(ds["ratio"]).mean("sample")))
    grid = pictures(plots.heatmaps(ds))[2].images[0].get_array()
    np.testing.assert_allclose(grid, np.log10(ds["ratio"]).T, atol=1e-12)
    assert "over samples" not in plots.caption(ds).partition(". ")[0]
    refused(lambda: tables.render(ds, by="head"), "has no heads")


def test_other_layouts_and_inputs_are_refused_before_anything_is_measured(bert, vit, monkeypatch):
    few = BertModel(BertConfig(**TEXT | {"num_hidden_layers": 1})).eval()
    wide = BertModel(BertConfig(**TEXT | {"num_attention_heads": 2})).eval()
    model = build(AFFINE["bert"])
    options = {"inputs": inputs_for(model), "progress": False}
    whole = lb.diff(model, wide, map="layer", bounds=[], **options)
    assert dict(whole["ratio"].sizes) == {"sample": 2, "layer": 2}
    part = lb.diff(model, few, layers=[0], bounds=[], **options)
    assert part["ratio"].sizes["layer"] == 1
    monkeypatch.setattr(runs_diff, "run", lambda *_, **__: pytest.fail("measured"))
    for other, words in (
        (few, ["layer is [0, 1] in a and [0] in b; measure both alike, select what both"]),
        (wide, ["head is [0, 1, 2, 3] in a and [0, 1] in b; ", "or take map='layer'"]),
    ):
        refused(lambda other=other: lb.diff(model, other, **options), *words, error=StoreError)
    call = functools.partial(lb.diff, bert, vit, max_length=8, progress=False)
    refused(call, "data is '", "' in a and 'photographs", "in b", error=StoreError)


def test_reports_have_both_runs_and_their_ratios(bert, tuned, text, ds, tmp_path):
    """With bounds and without."""
    options = {"samples": 2, "max_length": 12, "wrt": "values", "progress": False}
    bare = lb.diff(bert, tuned, text, **options)
    for one, words in ((ds, "B over A"), (bare, "as a function of its values alone")):
        lb.report(one, tmp_path / "diff.html", details=False)
        page = (tmp_path / "diff.html").read_text()
        assert page.count('<h2 id="h-compare">') == 1
        assert "data:image/svg+xml;base64," in page
        assert words in page
        assert tables.table_of(one).shown["geom. mean"].iloc[2] in page
    for run in both_runs(bare):
        assert f"<td>{tables.table_of(run).shown['geom. mean'].item()}</td>" in page
