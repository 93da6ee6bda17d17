"""Figures, tables and citations of a run."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from support.layers import random_attention
from support.models import AFFINE, build, inputs_for

import lipbound as lb
from lipbound.errors import LipboundError, Notice, PaperError, UnknownNameError
from lipbound.formatting import directed, number


def test_summary_is_the_ratio_to_the_norm_of_the_bounds_own_map(ds):
    table = lb.tables.summary(ds)
    assert list(table.index) == lb.bounds.resolve("default")
    for name, exact in (("yudin", "exact"), ("kim", "exact_l2")):
        ratio = (ds[name] / ds[exact]).values
        assert table.loc[name, "geomean"] == pytest.approx(np.exp(np.log(ratio).mean()))
        assert table.loc[name, "min"] == ratio.min()
        assert table.loc[name, "max"] == ratio.max()
    assert table.loc["yudin", "sound"] == table.loc["yudin", "compared"] == 16
    assert table.loc["castin", "sound"] == 0  # GPT-2 has query biases
    row, logs = table.loc["yudin"], np.log((ds["yudin"] / ds["exact"]).values)
    least = float(np.exp(np.log(ds["yudin"] / ds["exact_upper"]).mean()))
    assert row["geomean_lower"] == pytest.approx(least)
    assert row["geomean_lower"] < row["geomean"] <= row["geomean_lower"] * (1 + 1e-3)
    single = np.exp(logs.mean((1, 2)))
    assert (row["sample_min"], row["sample_max"]) == pytest.approx((single.min(), single.max()))
    assert np.isnan(table.loc["kim", "geomean_lower"])


def test_infinite_and_missing_values(ds):
    other = ds.copy(deep=True)
    other["castin"][0, 0, 0], other["exact"][1], other["exact"][0, 0, 1] = np.inf, np.nan, 0.0
    table = lb.tables.summary(other)
    assert (table.loc["castin", "geomean"], table.loc["castin", "compared"]) == (np.inf, 8)
    assert np.isfinite(table.loc["yudin", "geomean"])
    assert "inf" in lb.tables.render(other)


def test_extras_are_in_tables_and_figures(tmp_path):
    model = build(AFFINE["gpt2"])
    options = {"extras": "frobenius,condition", "progress": False}
    ds = lb.compare(model, inputs_for(model), bounds=["yudin"], **options)
    frobenius, condition = ds["jacobian_frobenius"], ds["jacobian_condition"]
    middle = number(float(np.median(frobenius.values)), 4)
    low = directed(float(frobenius.min()) * (1 - 1e-6), 4, False)
    high = directed(float(frobenius.max()) * (1 + 1e-6), 4, True)
    said = f"Frobenius norm of the Jacobian: median {middle} over samples, layers and heads, from "
    for one in (ds, ds.drop_vars(["yudin", "yudin_sound"]).assign_attrs(bounds=[])):
        assert f"{said}{low} to {high}" in lb.tables.render(one)
        assert "condition number of the Jacobian: median" in lb.tables.render(one)
    table = lb.tables.breakdown(ds, "layer", reduce="median")
    for name, values in (("jacobian_frobenius", frobenius), ("jacobian_condition", condition)):
        np.testing.assert_allclose(table[name], values.median(["sample", "head"]))
    shown = lb.tables.table_of(ds, "head").shown
    expected = [number(x, 4) for x in np.exp(np.log(frobenius).mean("sample")).values.ravel()]
    assert shown["Frobenius norm of the Jacobian"].tolist() == expected
    axes = lb.plots.heatmap(ds, "condition")
    np.testing.assert_allclose(axes.images[0].get_array(), np.log10(condition.mean("sample")))
    figure = lb.plots.heatmaps(ds, tmp_path / "all.png")
    titles = [one.get_title() for one in figure.axes if one.images and one.get_title()]
    assert titles[2:] == ["Frobenius norm", "Condition number"]
    words = (tmp_path / "all.caption.txt").read_text()
    assert "log10 of the condition number of the Jacobian, on a scale of its own." in words
    few = lb.plots.heatmaps(ds, bounds=["yudin"])
    assert len([one for one in few.axes if one.images and one.get_title()]) == 2


@pytest.mark.parametrize(
    ("values", "how", "expected"),
    [
        *((None, how, 2.5) for how in ("mean", "median", 0.5)),
        *((None, how, x) for how, x in (("geomean", 2.213364), ("max", 4.0), (0.0, 1.0))),
        *(([1.0, np.inf, np.inf], how, x) for how, x in ((0.9, np.inf), (0.0, 1.0))),
    ],
)
def test_reductions(values, how, expected):
    given = np.array(values or [1.0, 2.0, 3.0, 4.0, np.nan])[:, None, None]
    found = lb.plots.reduce_samples(xr.DataArray(given, dims=("sample", "layer", "head")), how)
    assert float(found.squeeze()) == pytest.approx(expected, rel=1e-6)


def test_cells_show_log10_of_the_reduced_values(ds):
    figure = lb.plots.heatmaps(ds, bounds=["yudin", "kim"], reduce="max", scale="shared")
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title().splitlines()[0] for axes in panels] == [
        "Exact",
        "Yudin 2025, Thm 3",
        "Exact, L2 attention",
        "Kim 2021 (L2 map)",
    ]
    shown = panels[1].images[0].get_array()
    np.testing.assert_allclose(shown, np.log10(ds["yudin"].max("sample")))
    assert len({(axes.images[0].norm.vmin, axes.images[0].norm.vmax) for axes in panels}) == 1
    own = lb.plots.heatmaps(ds, bounds=["yudin"], scale="panel")
    assert len({axes.images[0].norm.vmax for axes in own.axes if axes.images}) == 2


@pytest.mark.parametrize(
    "kind", ["pdf", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("svg", "png"))]
)
def test_files_are_reproducible_and_fonts_embedded(ds, tmp_path, kind):
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    for path in (first, second):
        lb.plots.heatmaps(ds, path, bounds=["yudin", "kim"])
    assert first.read_bytes() == second.read_bytes()
    assert (b"/FontFile2" in first.read_bytes()) == (kind == "pdf")
    assert b"<text" not in first.read_bytes()  # glyphs of svg are outlines


def test_panels_in_axes_of_ones_own(ds, tmp_path):
    figure = Figure(figsize=(6, 3))
    left, right = figure.subplots(1, 2)
    assert lb.plots.heatmap(ds, "yudin", ax=left, reduce="max", limits=(0.0, 1.0)) is left
    np.testing.assert_allclose(left.images[0].get_array(), np.log10(ds["yudin"].max("sample")))
    assert (left.images[0].norm.vmin, left.images[0].norm.vmax) == (0.0, 1.0)
    assert left.get_title() == "Yudin 2025, Thm 3"
    assert lb.plots.ratios(ds, bounds=["lipbound", "kim"], ax=right) is right
    assert [t.get_text() for t in right.get_yticklabels()] == ["lipbound", "Kim 2021 (L2 map)"]
    medians = sorted(
        float(line.get_xdata()[0])
        for line in right.lines
        if line.get_color() == "black" and len(set(line.get_xdata())) == 1
    )
    for name, exact in (("lipbound", "exact"), ("kim", "exact_l2")):
        assert min(abs(m / float((ds[name] / ds[exact]).median()) - 1) for m in medians) < 1e-9
    figure.savefig(tmp_path / "x.png")
    for axes in (lb.plots.heatmap(ds), lb.plots.ratios(ds, bounds=["yudin"])):
        axes.figure.savefig(tmp_path / "y.png")
        assert axes.figure._repr_png_().startswith(b"\x89PNG")


def test_venues(ds, tmp_path):
    for style, width, inches in (
        *(("icml2024", width, x) for width, x in (("column", 3.25), ("page", 6.75), (5.0, 5.0))),
        ("neurips2024", "page", 5.5),
    ):
        figure = lb.plots.heatmaps(ds, bounds=["yudin"], style=style, width=width)
        assert figure.get_figwidth() == pytest.approx(inches)
        assert style != "icml2024" or figure.axes[0].xaxis.label.get_fontsize() == 8.0


def test_pgf_without_latex_says_what_is_missing(ds, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LipboundError, match="needs pdflatex"):
        lb.plots.heatmaps(ds, tmp_path / "x.pgf", bounds=["yudin"])


def test_hostile_text_is_text(ds, tmp_path):
    other = ds.copy(deep=True)
    other.attrs["model"] = r"$\undefined{<script>&$"
    other["yudin"].attrs["label"] = "$x_"
    lb.plots.heatmaps(other, tmp_path / "x.svg", bounds=["yudin"])


def test_ball_curves_are_drawn(tmp_path):
    att = random_attention("biases").select(slice(0, 1))
    curve = lb.radius_curve(att, [0.0, 0.01, 0.1], steps=1, starts=1)
    figure = lb.plots.ball_curve(curve, tmp_path / "ball.pdf", heads=[0, 2])
    assert (tmp_path / "ball.pdf").stat().st_size > 1000
    assert [axes.get_title() for axes in figure.axes] == ["head 0", "head 2"]
    assert len(figure.axes[0].lines) == 5


def test_extras_cost_no_figure(gpt2_run, tmp_path):
    """Where they do not fit beside many bounds, they are left to a figure of their own."""
    condition = gpt2_run["exact"].where(gpt2_run["head"] > 0, np.inf)
    words = {"long_name": "condition number of the Jacobian", "label": "Condition number"}
    ds = gpt2_run.assign(jacobian_condition=condition.assign_attrs(words))
    ds["jacobian_frobenius"] = condition.assign_attrs(words | {"label": "Frobenius norm"})

    def titles(figure):
        return [one.get_title().split("\n")[0] for one in figure.axes if one.images]

    with pytest.warns(Notice, match="do not fit on this figure; bounds='frobenius,condition'"):
        slide = lb.plots.heatmaps(ds, tmp_path / "slide.png", width="slide")
    assert "Condition number" not in titles(slide)
    alone = lb.plots.heatmaps(ds, tmp_path / "own.png", width="slide", bounds="frobenius,condition")
    shown = [title for title in titles(alone) if title]
    assert shown == ["Exact", "Frobenius norm", "Condition number"]
    assert "infinite ones in the colour" in (tmp_path / "own.caption.txt").read_text()
    with pytest.raises(PaperError, match="18 panels in 1 column do not fit"):
        lb.plots.heatmaps(ds, width="slide", columns=1)


@pytest.mark.parametrize("known", [0, 3])
def test_extras_that_are_missing_are_said_to_be(gpt2_run, known):
    """Where some or all exact norms are without a condition number; where none has one, there is
    no panel of it."""
    norms = gpt2_run["exact"].size
    values = np.full(norms, np.nan)
    values[:known] = 2.0
    words = {"long_name": "condition number of the Jacobian", "label": "Condition number"}
    condition = gpt2_run["exact"].copy(data=values.reshape(gpt2_run["exact"].shape))
    ds = gpt2_run.assign(jacobian_condition=condition.assign_attrs(words))
    text = lb.tables.render(ds, width=300)
    said = f"known at {known} of {norms} exact norms"
    middle = "median 2.0 over samples, layers and heads, from 1.9 to 2.1, " * bool(known)
    assert f"condition number of the Jacobian: {middle}{said}" in text
    assert (f"({said})" in lb.cite(ds, "text")) == bool(known)
    assert ("Also computed" in lb.cite(ds, "text")) == bool(known)
    assert ("condition number" in lb.plots.caption(ds)) == bool(known)
    if not known:
        with pytest.raises(UnknownNameError, match="no value of 'condition' is known; shorter"):
            lb.plots.heatmap(ds, "condition")
