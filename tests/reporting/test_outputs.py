"""Figures, tables and citations of a run."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import transformers as tf
import xarray as xr
from matplotlib.figure import Figure
from support.layers import random_attention
from support.models import AFFINE, build, inputs_for

import lipbound as lb
from lipbound import plots, tables
from lipbound.analysis import cache_bits
from lipbound.errors import LipboundError, Notice, PaperError, StoreError, UnknownNameError
from lipbound.formatting import directed, number
from lipbound.reporting import statistics


@pytest.fixture(scope="module")
def ds(gpt2_run: xr.Dataset) -> xr.Dataset:
    return gpt2_run.copy(deep=True)


def test_summary_is_the_ratio_to_the_norm_of_the_bounds_own_map(ds: xr.Dataset) -> None:
    table = tables.summary(ds)
    assert list(table.index) == lb.bounds.resolve("default")
    for name, exact in (("yudin", "exact"), ("kim", "exact_l2")):
        ratio = (ds[name] / ds[exact]).values
        assert table.loc[name, "geomean"] == pytest.approx(np.exp(np.log(ratio).mean()))
        assert table.loc[name, "min"] == ratio.min()
        assert table.loc[name, "max"] == ratio.max()
    assert table.loc["yudin", "sound"] == table.loc["yudin", "compared"] == 16
    assert table.loc["castin", "sound"] == 0  # GPT-2 has query biases


def test_infinite_and_missing_values(ds: xr.Dataset) -> None:
    other = ds.copy(deep=True)
    other["castin"][0, 0, 0], other["exact"][1], other["exact"][0, 0, 1] = np.inf, np.nan, 0.0
    table = tables.summary(other)
    assert (table.loc["castin", "geomean"], table.loc["castin", "compared"]) == (np.inf, 8)
    assert np.isfinite(table.loc["yudin", "geomean"])
    assert "inf" in tables.render(other)


def test_extras_are_in_tables_and_figures(tmp_path: Path) -> None:
    model = build(AFFINE["gpt2"])
    ds = lb.compare(
        model, inputs_for(model), bounds=["yudin"], extras="frobenius,condition", progress=False
    )
    frobenius, condition = ds["jacobian_frobenius"], ds["jacobian_condition"]
    middle = number(float(np.median(frobenius.values)), 4)
    low = directed(float(frobenius.min()) * (1 - 1e-6), 4, False)
    high = directed(float(frobenius.max()) * (1 + 1e-6), 4, True)
    said = f"Frobenius norm of the Jacobian: median {middle} over samples, layers and heads, from "
    for one in (ds, ds.drop_vars(["yudin", "yudin_sound"]).assign_attrs(bounds=[])):
        assert f"{said}{low} to {high}" in tables.render(one)
        assert "condition number of the Jacobian: median" in tables.render(one)
    table = tables.breakdown(ds, "layer", reduce="median")
    for name, values in (("jacobian_frobenius", frobenius), ("jacobian_condition", condition)):
        np.testing.assert_allclose(table[name], values.median(["sample", "head"]))
    shown = tables.table_of(ds, "head").shown
    expected = [number(x, 4) for x in np.exp(np.log(frobenius).mean("sample")).values.ravel()]
    assert shown["Frobenius norm of the Jacobian"].tolist() == expected
    axes = plots.heatmap(ds, "condition")
    np.testing.assert_allclose(axes.images[0].get_array(), np.log10(condition.mean("sample")))
    figure = plots.heatmaps(ds, tmp_path / "all.png")
    titles = [one.get_title() for one in figure.axes if one.images and one.get_title()]
    assert titles[2:] == ["Frobenius norm", "Condition number"]
    words = (tmp_path / "all.caption.txt").read_text()
    assert "log10 of the condition number of the Jacobian, on a scale of its own." in words
    assert "Exact: on a colour scale of its own." in words
    with pytest.raises(LipboundError, match="the run has no bound 'yudin'; it has none"):
        tables.render(ds.assign_attrs(bounds=[]), bounds=["yudin"])
    few = plots.heatmaps(ds, bounds=["yudin"])
    assert len([one for one in few.axes if one.images and one.get_title()]) == 2
    with pytest.raises(LipboundError, match="the run has no 'frobenius'; compare the model with"):
        plots.heatmap(lb.compare(model, inputs_for(model), bounds=[], progress=False), "frobenius")


def test_csv_has_full_precision(ds: xr.Dataset) -> None:
    read = pd.read_csv(io.StringIO(tables.render(ds, "csv")), index_col="bound")
    exact = tables.summary(ds)["geomean"]
    np.testing.assert_allclose(read["geomean"], exact, rtol=1e-15)


def test_latex_escapes(ds: xr.Dataset) -> None:
    other = ds.copy(deep=True)
    other["castin"].attrs["label"] = r"50 % of A_i & \B"
    other.attrs["model"] = "evil\n\\input{x}"
    text = tables.latex(other)
    assert r"50 \% of A\_i \& \textbackslash{}B" in text
    assert any(line.startswith("% evil") for line in text.splitlines())
    assert "\\toprule" in text


def test_bibtex_has_every_source_once(ds: xr.Dataset) -> None:
    text = tables.bibtex(ds)
    keys = "kim2021lipschitz hu2024specformer castin2024smooth yudin2025pay lipbound2026"
    for key in keys.split():
        assert text.count(f"{{{key},") == 1


@pytest.mark.parametrize(
    ("values", "how", "expected"),
    [
        *((None, how, 2.5) for how in ("mean", "median", 0.5)),
        *((None, how, x) for how, x in (("geomean", 2.213364), ("max", 4.0), (0.0, 1.0))),
        *(([1.0, np.inf, np.inf], how, x) for how, x in ((0.9, np.inf), (0.0, 1.0))),
    ],
)
def test_reductions(values: list[float] | None, how: str | float, expected: float) -> None:
    given = np.array(values or [1.0, 2.0, 3.0, 4.0, np.nan])[:, None, None]
    found = plots.reduce_samples(xr.DataArray(given, dims=("sample", "layer", "head")), how)
    assert float(found.squeeze()) == pytest.approx(expected, rel=1e-6)


def test_cells_show_log10_of_the_reduced_values(ds: xr.Dataset) -> None:
    figure = plots.heatmaps(ds, bounds=["yudin", "kim"], reduce="max", scale="shared")
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
    own = plots.heatmaps(ds, bounds=["yudin"], scale="panel")
    assert len({axes.images[0].norm.vmax for axes in own.axes if axes.images}) == 2


def test_shared_scale_leaves_out_what_would_wash_it_out() -> None:
    grids = {"exact": [[0.0, 1.0]], "a": [[3.0, 4.0]], "b": [[80.0, np.inf]]}
    grids = {name: np.array(grid) for name, grid in grids.items()}
    assert statistics.shared_scale(grids) == (0.0, 4.0)
    assert statistics.shared_scale({"exact": np.array([[-np.inf, -np.inf]])}) == (0.0, 0.0)


def test_caption_says_what_it_is(ds: xr.Dataset) -> None:
    """In the picture on request."""
    bare, drawn = (plots.heatmaps(ds, caption=drawn).texts for drawn in (False, True))
    assert [t.get_text() for t in bare if t.get_text()] == []
    text = "\n".join(t.get_text() for t in drawn).replace("\n", " ")
    assert text == plots.caption(ds)
    parts = ("GPT2Model", "without output projection", "ready model inputs", "2 samples", "float32")
    for part in (*parts, "each the arithmetic mean over samples"):
        assert part in text


@pytest.mark.parametrize(
    "kind", ["pdf", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("svg", "png"))]
)
def test_files_are_reproducible_and_fonts_embedded(
    ds: xr.Dataset, tmp_path: Path, kind: str
) -> None:
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    for path in (first, second):
        plots.heatmaps(ds, path, bounds=["yudin", "kim"])
    assert first.read_bytes() == second.read_bytes()
    assert (b"/FontFile2" in first.read_bytes()) == (kind == "pdf")
    assert b"<text" not in first.read_bytes()  # glyphs of svg are outlines


def test_panels_in_axes_of_ones_own(ds: xr.Dataset, tmp_path: Path) -> None:
    figure = Figure(figsize=(6, 3))
    left, right = figure.subplots(1, 2)
    assert plots.heatmap(ds, "yudin", ax=left, reduce="max", limits=(0.0, 1.0)) is left
    np.testing.assert_allclose(left.images[0].get_array(), np.log10(ds["yudin"].max("sample")))
    assert (left.images[0].norm.vmin, left.images[0].norm.vmax) == (0.0, 1.0)
    assert left.get_title() == "Yudin 2025, Thm 3"
    assert plots.ratios(ds, bounds=["lipbound", "kim"], ax=right) is right
    assert [t.get_text() for t in right.get_yticklabels()] == ["lipbound", "Kim 2021 (L2 map)"]
    medians = sorted(
        float(line.get_xdata()[0])
        for line in right.lines
        if line.get_color() == "black" and len(set(line.get_xdata())) == 1
    )
    for name, exact in (("lipbound", "exact"), ("kim", "exact_l2")):
        assert min(abs(m / float((ds[name] / ds[exact]).median()) - 1) for m in medians) < 1e-9
    figure.savefig(tmp_path / "x.png")
    for axes in (plots.heatmap(ds), plots.ratios(ds)):
        axes.figure.savefig(tmp_path / "y.png")
        assert axes.figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(LipboundError, match="the run has no 'yudn'; did you mean"):
        plots.heatmap(ds, "yudn")


def test_venues(ds: xr.Dataset, tmp_path: Path) -> None:
    for style, width, inches in (
        *(("icml2024", width, x) for width, x in (("column", 3.25), ("page", 6.75), (5.0, 5.0))),
        ("neurips2024", "page", 5.5),
    ):
        figure = plots.heatmaps(ds, bounds=["yudin"], style=style, width=width)
        assert figure.get_figwidth() == pytest.approx(inches)
        assert style != "icml2024" or figure.axes[0].xaxis.label.get_fontsize() == 8.0


def test_pgf_without_latex_says_what_is_missing(
    ds: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LipboundError, match="needs pdflatex"):
        plots.heatmaps(ds, tmp_path / "x.pgf")


def test_hostile_text_is_text(ds: xr.Dataset, tmp_path: Path) -> None:
    other = ds.copy(deep=True)
    other.attrs["model"] = r"$\undefined{<script>&$"
    other["yudin"].attrs["label"] = "$x_"
    plots.heatmaps(other, tmp_path / "x.svg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce": "meen"}, "did you mean 'mean'"),
        ({"reduce": 1.5}, "between 0 and 1"),
        ({"scale": "pannel"}, "did you mean 'panel'"),
        ({"style": "icml204"}, "unknown style 'icml204'; did you mean 'icml2024'"),
        ({"width": -1}, "width is -1"),
        ({"width": "poster"}, "width is 'poster'; it must be a number of inches"),
        ({"font_size": 0}, "font_size is 0; it must be a number of points"),
        ({"labels": ["a"]}, r"labels is \['a'\]; give a text for each name"),
        ({"bounds": ["yudn"]}, "did you mean"),
        ({"bounds": ["newhouse"]}, "the run has no bound 'newhouse'"),
        ({"path": "x.docx"}, "no file type that can be drawn"),
        ({"path": "setup.cfg/x.png"}, "cannot be written"),
    ],
)
def test_errors(ds: xr.Dataset, options: dict, message: str) -> None:
    with pytest.raises(LipboundError, match=message):
        plots.heatmaps(ds, **{"bounds": ["yudin"]} | options)


@pytest.mark.parametrize("draw", [plots.heatmap, plots.by_layer, plots.ratios])
def test_what_are_no_axes(ds: xr.Dataset, draw: Any) -> None:
    with pytest.raises(LipboundError, match="ax is of type Figure; give one matplotlib Axes"):
        draw(ds, ax=Figure())


def test_one_head_one_layer_and_zero_norms(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 60}
    config = tf.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
    model = build(lambda: tf.BertModel(config))
    for parameter in model.encoder.layer[0].attention.self.value.parameters():
        parameter.data.zero_()
    ds = lb.compare(model, inputs_for(model), progress=False)
    assert float(ds["exact"].max()) == 0.0
    assert not ds.attrs["violations"]["yudin"]
    plots.heatmaps(ds, tmp_path / "x.png")
    assert "n/a" in tables.render(ds)


def test_tables_say_why_a_statement_is_no_bound(ds: xr.Dataset) -> None:
    entry = ds.attrs["audit"]["castin"]
    assert entry["sound"] < entry["compared"]
    assert "query bias" in entry["why"]
    assert ds.attrs["audit"]["lipbound"]["why"] == ""
    for format in ("text", "markdown", "latex"):
        assert "Castin 2024, 3.3 (castin), Castin 2024, C.3" in tables.render(ds, format)
        assert ": it ignores the query bias" in tables.render(ds, format)
    assert "Castin 2024, 3.3$^\\dagger$" in tables.latex(ds)


def test_ball_curves_are_drawn(tmp_path: Path) -> None:
    att = random_attention("biases").select(slice(0, 1))
    curve = lb.radius_curve(att, [0.0, 0.01, 0.1], steps=1, starts=1)
    figure = lb.plots.ball_curve(curve, tmp_path / "ball.pdf", heads=[0, 2])
    assert (tmp_path / "ball.pdf").stat().st_size > 1000
    assert [axes.get_title() for axes in figure.axes] == ["head 0", "head 2"]
    assert len(figure.axes[0].lines) == 5


def test_what_is_no_ball_curve(gpt2_run: xr.Dataset) -> None:
    with pytest.raises(LipboundError, match=r"has no 'radius'; give what lipbound\.radius_curve"):
        lb.plots.ball_curve(gpt2_run)


def test_extras_cost_no_figure(gpt2_run: xr.Dataset, tmp_path: Path) -> None:
    """Where they do not fit beside many bounds, they are left to a figure of their own."""
    condition = gpt2_run["exact"].where(gpt2_run["head"] > 0, np.inf)
    words = {"long_name": "condition number of the Jacobian", "label": "Condition number"}
    ds = gpt2_run.assign(jacobian_condition=condition.assign_attrs(words))
    ds["jacobian_frobenius"] = condition.assign_attrs(words | {"label": "Frobenius norm"})

    def titles(figure: Figure) -> list[str]:
        return [one.get_title().split("\n")[0] for one in figure.axes if one.images]

    with pytest.warns(Notice, match="do not fit on this figure; bounds='frobenius,condition'"):
        slide = plots.heatmaps(ds, tmp_path / "slide.png", width="slide")
    assert titles(slide) == titles(plots.heatmaps(gpt2_run, width="slide"))
    assert "Condition number" not in (tmp_path / "slide.caption.txt").read_text()
    alone = plots.heatmaps(ds, tmp_path / "own.png", width="slide", bounds="frobenius,condition")
    shown = [title for title in titles(alone) if title]
    assert shown == ["Exact", "Frobenius norm", "Condition number"]
    said = "on a scale of its own, infinite ones in the colour beyond it."
    assert said in (tmp_path / "own.caption.txt").read_text()
    both = plots.heatmaps(ds, bounds=["yudin", "condition"])
    assert [title for title in titles(both) if title][-1] == "Condition number"
    for bounds in ("condition", ["yudin", "condition"]):
        with pytest.raises(UnknownNameError, match="no 'condition'; compare the model with extras"):
            plots.heatmaps(gpt2_run, bounds=bounds)
    assert "to infinity" in tables.render(ds, width=200)
    paragraph = lb.cite(ds.assign_attrs(checksum=None), "text")
    assert "Also computed were the condition number of the Jacobian" in paragraph
    assert "infinite where rounding hides whether" in paragraph
    assert "Also computed" not in lb.cite(gpt2_run, "text")
    called = plots.heatmaps(ds, bounds="condition", labels={"condition": "Kappa"})
    assert [title for title in titles(called) if title] == ["Exact", "Kappa"]
    with pytest.raises(PaperError, match="17 panels in 1 column do not fit"):
        plots.heatmaps(ds, width="slide", columns=1)


@pytest.mark.parametrize("known", [0, 3])
def test_extras_that_are_missing_are_said_to_be(gpt2_run: xr.Dataset, known: int) -> None:
    """Where some or all exact norms are without a condition number; where none has one, there is
    no panel of it."""
    norms = gpt2_run["exact"].size
    values = np.full(norms, np.nan)
    values[:known] = 2.0
    words = {"long_name": "condition number of the Jacobian", "label": "Condition number"}
    condition = gpt2_run["exact"].copy(data=values.reshape(gpt2_run["exact"].shape))
    ds = gpt2_run.assign(jacobian_condition=condition.assign_attrs(words))
    text = tables.render(ds, width=300)
    said = f"known at {known} of {norms} exact norms"
    middle = "median 2.0 over samples, layers and heads, from 1.9 to 2.1, " * bool(known)
    assert f"condition number of the Jacobian: {middle}{said}" in text
    assert (f"({said})" in lb.cite(ds, "text")) == bool(known)
    assert ("Also computed" in lb.cite(ds, "text")) == bool(known)
    assert ("condition number" in plots.caption(ds)) == bool(known)
    if not known:
        with pytest.raises(UnknownNameError, match="no value of 'condition' is known; shorter"):
            plots.heatmap(ds, "condition")


@pytest.mark.parametrize("given", [3, None, xr.Dataset({"a": ("x", [1.0])})])
def test_what_is_no_run_is_refused_in_a_sentence(given: object, tmp_path: Path) -> None:
    """Where a number, nothing or another Dataset is given in place of a run or of its parts."""
    other: Any = given
    kind = "of type Dataset" if isinstance(given, xr.Dataset) else str(given)
    with pytest.raises(LipboundError, match=f"profile is {kind}; give what lipbound.token_prof"):
        plots.token_profile(other)
    with pytest.raises(StoreError, match=f"path is {kind}; give the path of a stored run"):
        lb.load(other)
    with pytest.raises(LipboundError, match="a variable over sample is wanted, not"):
        plots.reduce_samples(other, "mean")
    with pytest.raises(LipboundError, match=r"no steps of training|a run is wanted, not"):
        plots.over_steps(other)
    with pytest.raises(StoreError, match=r"a run is wanted, not|it is no run, or no longer one"):
        lb.report(other, tmp_path / "page.html")
    for function in (cache_bits.ranking, cache_bits.agreement):
        with pytest.raises(LipboundError, match=r"give what lipbound\.cache_bits returns"):
            function(other)
