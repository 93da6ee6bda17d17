"""Heatmaps on paper: never taller than it, panels beside one another, titles legible, captions
beside the figure."""

import itertools

import numpy as np
import pytest
from matplotlib.axes import Axes
from support.runs import made_up

from lipbound import plots
from lipbound.reporting.plots import scales
from lipbound.reporting.styles import paper_height
from lipbound.reporting.tables import typeset

WIDTHS = ("column", "page", "slide")


def extents(figure):
    """Every visible text and where it is, in pixels."""
    figure.draw_without_rendering()
    shown = [
        text
        for text in figure.findobj(lambda a: hasattr(a, "get_text"))
        if text.get_visible() and text.get_text().strip()
    ]
    return [(text.get_text(), text.get_window_extent().extents) for text in shown]


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"scale": "panel"}, {"caption": True}])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_or_written_over(ds, width, options):
    figure = plots.heatmaps(ds, width=width, **options)
    captioned = "caption" in options
    limit = paper_height(figure.get_figwidth(), captioned=captioned)
    assert figure.get_figheight() <= limit + 1e-9
    found = extents(figure)
    drawn = figure.get_tightbbox()  # inches
    assert drawn.x0 >= -0.01
    assert drawn.y0 >= -0.01
    assert drawn.x1 <= figure.get_figwidth() + 0.01
    assert drawn.y1 <= figure.get_figheight() + 0.01
    shown = [axes for axes in figure.axes if axes.get_visible()]
    for one, other in itertools.combinations([axes.bbox for axes in shown], 2):
        assert not one.overlaps(other)
    panels = [axes.bbox for axes in shown if axes.images and axes.get_title()]
    assert len(panels) == len(ds.attrs["bounds"]) + 2
    assert len({(round(box.width), round(box.height)) for box in panels}) == 1
    titles = [(text, box) for text, box in found if "exact" in text.lower()]
    assert len(titles) == len(panels) + captioned
    for (a, p), (b, q) in itertools.combinations(titles, 2):
        assert p[2] <= q[0] + 1 or q[2] <= p[0] + 1 or p[3] <= q[1] + 1 or q[3] <= p[1] + 1, (a, b)


def test_what_is_near_the_exact_norm_has_its_own_scale(ds):
    names = ("exact", "exact_l2", *ds.attrs["bounds"])
    grids = {name: np.log10(ds[name].mean("sample").values) for name in names}
    near, far = scales(ds, grids, "rows")
    above = {k: np.median(grids[k]) - np.median(grids["exact"]) for k in ds.attrs["bounds"]}
    assert {*near.names} == {"exact", *(k for k, x in above.items() if x <= 1 and k != "kim")}
    assert {"lipbound", "lipbound_block"} <= set(near.names)
    assert "kim" in far.names  # a bound on another map stands beside the norm of that map
    assert near.low == min(grids[name].min() for name in near.names)
    assert near.high == max(grids[name].max() for name in near.names)
    panels = {
        axes.get_title().splitlines()[0]: axes.images[0]
        for axes in plots.heatmaps(ds).axes
        if axes.images and axes.get_title()
    }
    assert panels["Exact"].cmap.name != panels["Yudin 2025, Thm 3"].cmap.name
    spread = np.ptp(panels["Exact"].norm(panels["Exact"].get_array()))
    # more of the colours than on a scale for all
    assert spread > np.ptp(grids["exact"]) / (far.high - near.low)
    assert [len(scales(ds, grids, how)) for how in ("shared", "panel")] == [1, len(grids)]
    assert "on a colour scale of their own" in plots.caption(ds)
    assert "on a colour scale" not in plots.caption(ds, scale="shared")


def test_captions_stand_beside_the_figure(ds, tmp_path):
    for kind in ("tex", "txt"):
        (tmp_path / f"paper.{kind}").write_text("mine")
    plots.heatmaps(ds, tmp_path / "paper.pdf", bounds=["yudin"], reduce="max")
    said = plots.caption(ds, bounds=["yudin"], reduce="max")
    assert (tmp_path / "paper.caption.txt").read_text() == f"{said}\n"
    assert (tmp_path / "paper.caption.tex").read_text() == f"\\caption{{{typeset(said)}}}\n"
    assert all((tmp_path / f"paper.{kind}").read_text() == "mine" for kind in ("tex", "txt"))


def test_ratios_to_the_exact_norm_as_colours(ds, tmp_path):
    """Bound / exact of each bound's own map, geometric means over samples, as numpy has them."""
    figure = plots.heatmaps(ds, tmp_path / "over.png", bounds=["kim", "lipbound"], over="exact")
    shown = {axes.get_title().partition("\n")[0]: axes for axes in figure.axes if axes.images}
    assert len(shown) == 2
    for name, of in (("kim", "exact_l2"), ("lipbound", "exact")):
        expected = np.log10(ds[name] / ds[of]).mean("sample")
        for axes in (shown[ds[name].attrs["label"]], plots.heatmap(ds, name, over="exact")):
            np.testing.assert_allclose(axes.images[0].get_array(), expected, rtol=1e-9)
    words = (tmp_path / "over.caption.txt").read_text()
    assert words.startswith("log10 of bound / exact, each the geometric mean over samples.")
    arithmetic = plots.heatmap(ds, "lipbound", over="exact", reduce="mean").images[0].get_array()
    expected = np.log10((ds["lipbound"] / ds["exact"]).mean("sample"))
    np.testing.assert_allclose(arithmetic, expected, rtol=1e-9)


def test_several_runs_on_one_colour_scale(ds, tmp_path):
    """Panels are log10 of their runs' values, read off one bar, whatever their sizes are."""
    runs = [ds, ds.isel(layer=[0], head=slice(3)), ds.isel(layer=[1])]
    figure = plots.heatmaps(runs, tmp_path / "all.png", labels=["a", "b", "c"], reduce="max")
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["a", "b", "c"]
    values = [np.log10(run["exact"].max("sample")) for run in runs]
    for axes, wanted in zip(panels, values, strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), wanted)
        limits = axes.images[0].norm.vmin, axes.images[0].norm.vmax
        np.testing.assert_allclose(limits, (values[0].min(), values[0].max()))
    assert len(figure.axes) == 4  # one bar
    words = (tmp_path / "all.caption.txt").read_text()
    assert "each the maximum over samples, on one scale. a: " in words
    assert "; map: one attention head" in words.partition(" c: ")[2]
    several = plots.heatmaps(runs, bounds=["yudin"], limits=(-1, 2), style=None)
    for figure, count in ((several, 6), (plots.heatmaps(ds, bounds=["yudin"], limits=(-1, 2)), 2)):
        drawn = [axes.images[0].norm for axes in figure.axes if axes.images and axes.get_title()]
        assert [(norm.vmin, norm.vmax) for norm in drawn] == [(-1, 2)] * count
    ratios = plots.heatmaps(runs[:2], bounds="yudin", over="exact").axes[1].images[0].get_array()
    wanted = np.log(ds["yudin"] / ds["exact"]).mean("sample") / np.log(10)
    np.testing.assert_allclose(ratios, wanted[:1, :3])


def test_every_plot_writes_a_file_and_returns_what_it_drew(ds, tmp_path):
    """Axes where there is one panel; a figure may be put together of panels without bars."""
    for name in ("heatmap", "ratios", "by_layer"):
        axes = getattr(plots, name)(ds, path=tmp_path / f"{name}.svg")
        assert isinstance(axes, Axes)
        assert axes in axes.figure.axes
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
    alone = plots.heatmap(ds, "yudin", colorbar=False, title="")
    assert (len(alone.figure.axes), alone.get_title()) == (1, "")
    with_bar = plots.heatmap(ds, "yudin", title="mine")
    assert (len(with_bar.figure.axes), with_bar.get_title()) == (2, "mine")


def test_several_runs_against_layers():
    """Lines are reduced values, bands their intervals; what is far off is named, not drawn."""
    first, second = made_up(), made_up()
    second["exact"] = second["exact"] * 2
    second["lipbound"] = second["lipbound"] * 2
    bounds = ["kim", "lipbound", "castin_mean_field"]
    axes = plots.by_layer([first, second], labels=["x", "y"], bounds=bounds)
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert list(lines) == [
        f"{run}: {first[name].attrs['label']}"
        for run in "xy"
        for name in ("exact", "exact_l2", "kim", "lipbound")
    ]
    for ds, run in ((first, "x"), (second, "y")):
        for name in ("exact", "lipbound"):
            values = lines[f"{run}: {ds[name].attrs['label']}"]
            expected = np.exp(np.log(ds[name]).mean(["sample", "head"]))
            np.testing.assert_allclose(values[1:], expected[1:], rtol=1e-9)
            single = np.exp(np.log(ds[name]).mean("head"))[:, 1:]
            bands = [band.get_paths()[0].vertices for band in axes.collections]
            ends = [(band[:, 1].min(), band[:, 1].max()) for band in bands]
            least, most = float(single.min()) * (1 + 1e-9), float(single.max()) / (1 + 1e-9)
            assert any(low <= least and most <= high for low, high in ends)
    note = " ".join(axes.get_xlabel().split())
    assert "beyond the axis: Castin 3.5, mean field, 2.0e302 to \u221e x exact" in note
    one = plots.by_layer(first.isel(sample=[1]), bounds=["lipbound"], reduce="max")
    assert "all-MiniLM-L6-v2: one sample, no interval" in " ".join(one.get_xlabel().split())
    assert not any(path.vertices.size for band in one.collections for path in band.get_paths())
    drawn = one.get_lines()[0].get_ydata()
    np.testing.assert_allclose(drawn, first["exact"][1].max("head"), rtol=1e-12)
    unnamed = plots.by_layer([first, second]).get_legend()
    told = [text.get_text() for text in unnamed.get_texts()]
    assert told == ["all-MiniLM-L6-v2 (1)", "all-MiniLM-L6-v2 (2)"]
