"""Layer x head heatmaps of runs, in the manner of Figure 6 of Yudin et al. 2025.

Panels share colour scales, figures fit on paper; the other charts of ``lipbound.plots`` are in
`lipbound.reporting.charts`.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lipbound import errors
from lipbound.bounds.audit import audit
from lipbound.errors import LipboundError, PaperError, UnknownNameError, choice, knows_options
from lipbound.formatting import counted, enclosed, joined, plain
from lipbound.reporting import charts, statistics, styles
from lipbound.reporting import labels as texts
from lipbound.reporting.charts import ball_curve, by_layer, over_steps, ratios, token_profile
from lipbound.reporting.labels import diff_notes, diff_words, opened, ratio_run, side_names
from lipbound.reporting.statistics import across, extras, label_of, panel, ratio, reduce_samples
from lipbound.runs.store import Run, both_runs, run_of
from lipbound.schema import EXTRAS, bounds_there, compared_with, is_diff, of_weights_alone

__all__ = ["COLORMAP", "ball_curve", "by_layer", "caption", "heatmap", "heatmaps", "ratios"]
__all__ += ["over_steps", "reduce_samples", "token_profile"]


def __dir__() -> list[str]:
    return __all__


QUANTITY, RATIO = "log10 of the local Lipschitz constant", "log10 of bound / exact"
"""Labels of colour bars: of norms and bounds themselves, and of their ratios."""
Grids = dict[str, np.ndarray]
"""log10 of the values of panels, by name."""
Limits = tuple[float, float] | None
"""Ends of a colour scale, log10; None for those of its values."""
Bounds = Iterable[str] | None
How = statistics.Reduction | None
Over = str | None
COLORMAP = "cividis"
DIVERGING = "RdBu_r"
"""Colours of ratios of two runs: blue below one, red above."""
_NEAR = 1.0
"""Decades above the exact norm, in the median, up to which a bound is drawn on the scale of the
exact norm."""
ABOVE, BELOW, MISSING = "#fff7bc", "#cfe0f3", "#dddddd"
"""Beyond the upper end of a scale, beyond the lower end, and where there is no value."""
NO_RATIO = ("\u221e for some heads", "no positive norm")
LINE = 1.35
"""Height of a line of type over its size."""
NARROW, FLAT = 6.0, 2.0
"""Least width and height of a panel, in lines of type."""


# -- colour scales ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Panels that are read off one colour bar.

    Attributes:
        names: the panels, in order.
        low, high: ends of the bar, log10.
        colors: name of the colormap.
        quantity: what the bar is labelled with.
    """

    names: tuple[str, ...]
    low: float
    high: float
    colors: str = COLORMAP
    quantity: str = QUANTITY

    def bar(self, picture: AxesImage, axes: Any, grids: Grids, **at: Any) -> Colorbar:
        """Draw the colour bar of a picture beside axes; a diverging one is numbered by ratios."""
        bar = picture.figure.colorbar(picture, ax=axes, extend=self.extend(grids), **at)
        if self.colors == DIVERGING:
            places = np.linspace(-0.8, 0.8, 5) * self.high  # its label is at the end
            bar.set_ticks(list(places), labels=[f"{10**place:.4g}" for place in places])
        return bar

    @property
    def short(self) -> str:
        """The label without what the logarithms are of."""
        return self.quantity.partition(" of ")[0]

    @property
    def top(self) -> float:
        """Upper end of the bar, so far above the lower one that its numbers are legible."""
        return self.high if self.high > self.low + 1e-4 else self.low + 0.1

    def extend(self, grids: Grids) -> str:
        """The ends at which something lies beyond the bar, as matplotlib calls them."""
        values = np.concatenate([grids[name].ravel() for name in self.names])
        over, under = bool((values > self.top).any()), bool((values < self.low).any())
        return "both" if over and under else "max" if over else "min" if under else "neither"


def log10(ds: xr.Dataset, names: Iterable[str], reduce: str | float, over: Over = None) -> Grids:
    """Logarithms of the values of panels; -inf for zero, NaN where there is no value.

    Args:
        ds: a run. names: of the panels. reduce: over samples, as in `reduce_samples`.
        over: "exact": of bound / exact, of the bound's own map; None: of the values.
    """
    values = {name: ds[name] if over is None else ratio(ds, name) for name in names}
    with np.errstate(all="ignore"):
        return {name: np.log10(panel(one, reduce).values) for name, one in values.items()}


def scales(ds: xr.Dataset, grids: Grids, how: str, limits: Limits = None) -> list[Scale]:
    """The colour bars of a figure, in the order in which their panels stand.

    Extras have a bar each, whatever ``how`` is.

    Args:
        ds: a run.
        grids: log10 of the values of each panel; they may be infinite or missing. Without "exact"
            among them they are of ratios to it.
        how: "rows" (the exact norm and what is near it on a bar of their own, before the others),
            "shared" (one bar) or "panel" (a bar each).
        limits: ends of the bars, log10, of one bar in place of "rows"; of those of extras, where
            these are alone.

    Raises:
        UnknownNameError: another way.
    """
    choice("scale", how, ("rows", "shared", "panel"))
    others = [name for name in grids if name in extras(ds)]
    names = [name for name in grids if name not in others]
    ends = None if names else limits
    said = {one: f"log10 of the {texts.extra_title(ds, one)}" for one in others}
    own = [scale_of([one], grids, said[one], ends) for one in others]
    words = QUANTITY if "exact" in grids else RATIO
    if how == "panel" or not names:
        return [*(scale_of([name], grids, words, limits) for name in names), *own]
    close = [name for name in names if _near(ds, grids, name)]
    far = [name for name in names if name not in close]
    if how == "shared" or limits or not far or not close:
        return [scale_of(names, grids, words, limits), *own]
    # The exact norm of another map has bounds of its own map beside it and would take up colours
    # that all others need.
    measured = [name for name in far if name in bounds_there(ds)] or far
    rest = replace(scale_of(measured, grids, words), names=tuple(far))
    # other colours, so that nobody reads them off the other bar
    return [replace(scale_of(close, grids, words), colors="viridis"), rest, *own]


def _near(ds: xr.Dataset, grids: Grids, name: str) -> bool:
    """True for the exact norm, and for bounds on it with a median at most ten times as large."""
    if "exact" not in grids:
        return _median(grids[name]) <= _NEAR
    if name not in bounds_there(ds):
        return name == "exact"
    above = _median(grids[name]) - _median(grids["exact"])
    return compared_with(ds, name) == "exact" and above <= _NEAR


def _median(grid: np.ndarray) -> float:
    known = grid[~np.isnan(grid)]
    return float(np.median(known)) if known.size else math.nan


def scale_of(names: Sequence[str], grids: Grids, words: str, limits: Limits = None) -> Scale:
    """A colour bar of some panels, from end to end of their values or between limits.

    Raises:
        LipboundError: limits that are no two numbers, the lower one first.
    """
    low, high = statistics.shared_scale({name: grids[name] for name in names})
    if limits is not None:
        try:
            low, high = map(float, limits)
        except (TypeError, ValueError):
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            what = "give log10 of both ends of the colour scale, in order, such as (0, 2)"
            raise LipboundError(f"limits is {errors.shown(limits)}; {what}")
    return Scale(tuple(names), low, high, COLORMAP, words)


# -- figures that fit on paper ---------------------------------------------------------------------


class Panels(NamedTuple):
    """What a figure is of.

    Attributes:
        runs: by panel, its run or diff. grids: by panel, log10 of its values.
        bars: the colour bars, with their panels in order.
        titles: by panel, a label, which is folded, and lines below it.
        caption: of the figure.
        own_bars: every panel has a colour bar beside it, rather than every scale one.
        dots: by panel, whether a cell has a dot.
    """

    runs: Mapping[str, xr.Dataset]
    grids: Grids
    bars: list[Scale]
    titles: Mapping[str, Sequence[str]]
    caption: str
    own_bars: bool = False
    dots: Mapping[str, np.ndarray] = {}

    @property
    def sections(self) -> list[list[Scale]]:
        """Colour bars by sections of panels, which stand below one another."""
        return [self.bars] if self.own_bars else [[bar] for bar in self.bars]


class Layout(NamedTuple):
    """Sizes of a figure that fits on the paper, in inches, and of its type, in points.

    Attributes:
        points, line: size of the type, and height of a line of it.
        across: panels in a row. rows: of each section.
        side, high: width and height of a panel. tall: of the figure.
        beside: colour bars stand on the right of their panels.
        words: the caption that is drawn, in lines.
    """

    points: float
    line: float
    across: int
    rows: list[int]
    side: float
    high: float
    tall: float
    beside: bool
    words: str


def arrange(
    panels: Panels, inches: float, points: float, columns: int | None, shrink: bool, caption: str
) -> Layout:
    """Choose the panels in a row, and the size of type, so that a figure fits on the paper.

    Args:
        panels: of the figure. inches: its width. points: size of its type.
        columns: panels in a row, where they are asked for; else the fewest with which panels keep
            their natural height, or those with which they are largest.
        shrink: whether smaller type may be taken where panels would become too flat.
        caption: what is drawn into the picture.

    Raises:
        PaperError: so many panels in so few columns are taller than the paper.
    """
    own_bars, shapes = panels.own_bars, [grid.shape for grid in panels.grids.values()]
    layers, cells = map(max, zip(*shapes, strict=True))
    counts = [sum(len(bar.names) for bar in section) for section in panels.sections]
    limit = styles.paper_height(inches, captioned=bool(caption))
    for size in (points * share for share in ((1.0, 0.9, 0.8, 0.7) if shrink else (1.0,))):
        line = size / 72 * LINE
        # on narrow figures, and on strips, which are too low, colour bars stand below
        strips = layers <= 2 or layers < 0.2 * cells
        beside = own_bars or (inches / line >= 36 and not strips)
        around, right = (3.8, 0.0) if own_bars else (0.9, 4.4 * beside)
        words = textwrap.fill(caption, int(inches * 72 / size * 1.95))
        room = inches - (3.2 + right) * line
        most = min(max(counts), max(1, int((room - around * line) / (NARROW + 1) / line)))
        usual = max(1, min(most, round(inches * 4 / size)))
        found: list[tuple[float, Layout]] = []
        for abreast in [columns] if columns else range(usual, most + 1):
            side = room / abreast - around * line
            # cells are square, or nearly so
            square = side * min(max(layers / cells, min(0.55, 3 * layers / cells)), 1.25)
            natural = max(1.25 * FLAT * line, min(square, 3.5 * layers * line))
            rows = [-(-count // abreast) for count in counts]
            # titles (long labels in two lines), numbers below panels, colour bars, the caption
            lines = (1.15 * (3 if side < 10 * line else 2) + 0.6) * sum(rows)
            lines += len(counts) * (2.8 if beside else 6.4)
            lines += 2.4 * sum(count > abreast and count % abreast > 0 for count in counts)
            lines += 1.25 * (words.count("\n") + 2) * bool(caption) + 0.3
            high = min(natural, (limit - lines * line) / sum(rows))
            tall = lines * line + sum(rows) * high
            one = Layout(size, line, abreast, rows, side, high, tall, beside, words)
            found.append((high / natural, one))
        _, best = max(found, key=lambda one: one[0])  # of equals the first
        if best.high >= FLAT * line and best.side >= 2 * line:
            return best
    many = f"{sum(counts)} panels" + (f" in {counted(columns, 'column')}" if columns else "")
    what = f"{many} do not fit on a figure of {inches:g} x {limit:.3g} inches"
    raise PaperError(f"{what}; ask for another width, columns or style, or fewer bounds")


Paper = tuple[str | float, int | None, float | None, str | None, bool]
"""Width, columns, font_size, style and caption of `heatmaps`."""


def figure_of(panels: Panels, path: str | Path | None, paper: Paper) -> Figure:
    """Draw panels on a sheet of their own, and write it with its caption.

    Args:
        panels: what is drawn. path: where to write it; None for nowhere. paper: what it is drawn
            on.
    """
    width, columns, font_size, style, captioned = paper
    settings, inches, points = styles.look(style, width, font_size)
    columns = None if columns is None else errors.whole("columns", columns, least=1)
    shrink, words = font_size is None and style is None, panels.caption if captioned else ""
    layout = arrange(panels, inches, points, columns, shrink, words)
    with matplotlib.rc_context(settings | {"font.size": layout.points}):
        engine = ConstrainedLayoutEngine(h_pad=0.4 * layout.line, w_pad=0.4 * layout.line)
        figure = styles.Drawing(figsize=(inches, layout.tall), layout=engine)
        places = figure.subplots(sum(layout.rows), layout.across, squeeze=False)
        blocks = np.split(places, np.cumsum(layout.rows)[:-1])
        for section, block in zip(panels.sections, blocks, strict=True):
            _draw_section(panels, layout, section, block.ravel())
        if layout.words:
            look: Any = {"linespacing": 1.3, "parse_math": False}
            figure.supxlabel(layout.words, fontsize=layout.points - 0.5, **look)
        return styles.written(figure, path, panels.caption)


def _draw_section(panels: Panels, layout: Layout, bars: list[Scale], block: np.ndarray) -> None:
    """Draw panels in rows of axes, with one colour bar for all of them or one for each."""
    grids, size, line = panels.grids, layout.points, layout.line
    alike = len({grid.shape for grid in grids.values()}) == 1
    named = [(name, scale) for scale in bars for name in scale.names]
    count = len(named)
    for k, ((name, scale), axes) in enumerate(zip(named, block, strict=False)):
        picture = image(axes, grids[name], scale)
        if name in panels.dots:
            down, right = np.nonzero(panels.dots[name])
            axes.scatter(right, down, s=4, color="black", linewidths=0)
        _say_beyond(axes, grids[name], scale)
        label, *below = panels.titles[name]
        title = [*styles.in_two_lines(label, layout.side, size), *below]
        axes.set_title("\n".join(title), fontsize=size, pad=3, parse_math=False)
        left = k % layout.across == 0 or not alike
        lowest = k + layout.across >= count or not alike
        _number_axes(axes, panels.runs[name], max(1, int(layout.high / line)))
        axes.tick_params(length=1.5, width=0.5, pad=1.5, labelsize=size - 1)
        axes.tick_params(labelbottom=lowest, labelleft=left)
        axes.set_xlabel(axes.get_xlabel() if lowest else "", labelpad=1)
        axes.set_ylabel("layer" if left else "", labelpad=1)
        if panels.own_bars:
            bar = scale.bar(picture, axes, grids, aspect=20)
            bar.ax.tick_params(labelsize=size - 1, width=0.5)
            small: Any = {"fontsize": size - 1, "labelpad": 2, "parse_math": False}
            bar.ax.set_xlabel(scale.short, **small)  # below: beside is the next panel
    for axes in block[count:]:
        axes.set_visible(False)
    if not panels.own_bars:
        sides = len(block) / layout.across * layout.high, 0.9 * block[0].figure.get_figwidth()
        long, thick = sides if layout.beside else sides[::-1]
        at: Any = {"location": "right" if layout.beside else "bottom"}
        at |= {"fraction": 1.5 * line / thick, "pad": 0.5 * line / thick}
        bar = scale.bar(picture, block.tolist(), grids, aspect=long / (0.7 * line), **at)
        bar.set_label(scale.short if long < 12 * line else scale.quantity, labelpad=2)
        bar.ax.tick_params(width=0.5, length=2, pad=1.5)


def image(axes: Axes, grid: np.ndarray, scale: Scale) -> AxesImage:
    """Logarithms as colours; infinite ones beyond the scale, missing ones grey."""
    values = np.ma.masked_invalid(np.where(np.isposinf(grid), 1e300, grid))
    colors = matplotlib.colormaps[scale.colors]
    colormap = colors.with_extremes(over=ABOVE, bad=MISSING, under=BELOW)
    return axes.imshow(values, cmap=colormap, norm=Normalize(scale.low, scale.top), aspect="auto")


def _say_beyond(axes: Axes, grid: np.ndarray, scale: Scale) -> None:
    """The range of the values of a panel most of which lies beyond its colour scale."""
    known = grid[~np.isnan(grid)]
    # infinite ones have an order, and no mean
    middle = float(np.sort(known)[known.size // 2]) if known.size else scale.low
    if side := "above" if middle > scale.top else "below" if middle < scale.low else "":
        low, high = statistics.ends(grid)
        ends = dict.fromkeys(f"{end / 10:.1f}" for end in (np.floor(10 * low), np.ceil(10 * high)))
        said = " to ".join(ends).replace("inf", "\u221e").replace("-", "\u2212")
        at: Any = {"transform": axes.transAxes, "ha": "center", "va": "center", "color": "black"}
        axes.text(0.5, 0.5, f"{side} the scale:\n{said}", **at)


def _number_axes(axes: Axes, ds: xr.Dataset, most: int = 6) -> None:
    """Numbers of heads, at most about six, and of layers, at most ``most`` too."""
    axes.set(xlabel=across(ds), ylabel="layer")
    for axis, name, limit in ((axes.xaxis, across(ds), 6), (axes.yaxis, "layer", min(6, most))):
        ticks = ds[name].values
        step = max(1, -(-len(ticks) // limit))
        axis.set_ticks(range(0, len(ticks), step), [str(t) for t in ticks[::step]])


# -- figures of a run, of several runs, of a diff --------------------------------------------------


def _panels(
    given: Any, bounds: Bounds, reduce: How, scale: str, over: Over, limits: Limits, labels: Any
) -> Panels:
    """Return the panels of a figure of a run, of several runs, or of a diff."""
    given = opened(given, bounds=bounds, over=over, scale=scale != "rows" and scale, limits=limits)
    if is_diff(given):
        return _of_diff(given, reduce, labels)
    how = _reduction(reduce, over)
    if isinstance(given, list | tuple):
        return _of_several(given, bounds, how, limits, over, labels)
    ds = texts.relabelled(run_of(given), labels)
    if over:
        names = statistics.compared(ds, bounds)
    elif bounds is None:
        names = [*statistics.panels(ds), *extras(ds)]
    else:
        chosen = statistics.requested(ds, bounds)
        own = [_extra(ds, name) for name in chosen if name in EXTRAS]
        names = [*statistics.panels(ds, [one for one in chosen if one not in EXTRAS]), *own]
    grids = log10(ds, names, how, over)
    bars = scales(ds, grids, scale, limits)
    words = _caption(ds, bars, how, scale)
    runs, titles = dict.fromkeys(grids, ds), _titles(ds, names)
    return Panels(runs, grids, bars, titles, words, scale == "panel")


def _of_several(
    given: Any, bounds: Bounds, how: str | float, limits: Limits, over: str | None, labels: Any
) -> Panels:
    """Panels of several runs on one colour scale."""
    found, names = charts.runs_together(given, labels, "colour scale")
    runs, titles, grids = {}, {}, dict[str, np.ndarray]()
    for k, (ds, name) in enumerate(zip(found, names, strict=True)):
        of = statistics.compared(ds, bounds) if over else statistics.panels(ds, bounds or ())
        own, called = log10(ds, of, how, over), _titles(ds, of)
        for one, (label, *below) in called.items():
            key, title = f"{k} {one}", name if len(of) == 1 else f"{name}: {label}"
            runs[key], grids[key], titles[key] = ds, own[one], [title, *below]
    bar = scale_of(list(grids), grids, RATIO if over else QUANTITY, limits)
    each = _over_samples(found[0], ", each the ", how)
    pairs = zip(names, map(texts.run_caption, found), strict=True)
    told = " ".join(f"{name}: {words}." if labels else f"{words}." for name, words in pairs)
    return Panels(runs, grids, [bar], titles, plain(f"{bar.quantity}{each}, on one scale. {told}"))


def _of_diff(ds: xr.Dataset, reduce: How, labels: Mapping[str, str] | None) -> Panels:
    """Panels of the norms of both runs of a diff, and of their ratio, the last one."""
    how, names = "geomean" if reduce is None else reduce, side_names(labels)
    a, b, name = names.values()
    models = dict(zip(names, map(texts.model_name, both_runs(ds)), strict=False))
    given = labels or {}
    called = [names[k] if k in given else plain(f"{names[k]}: {models[k]}") for k in models]
    both = _of_several(both_runs(ds), (), how, None, None, called)
    with np.errstate(all="ignore"):
        grid = np.log10(panel(ds["ratio"], how).values)
    most = max(map(abs, statistics.ends(grid[np.isfinite(grid)])), default=0.0)
    most = max(most, 1e-3) if np.isfinite(most) else 1.0
    undecided = np.zeros(grid.shape, dtype=bool)
    if across(ds) == "head":
        lower, upper = statistics.sample_span(ds["ratio"].transpose("sample", "layer", "head"), how)
        undecided = ((lower <= 1) & (upper >= 1)).values
    spread = statistics.spread_title(statistics.samples_with_values(ds["ratio"]), how)
    dots = f" Dots: the {spread} of the cell contains 1." * bool(undecided.any())
    notes = "".join(f" {note[:1].upper()}{note[1:]}." for note in diff_notes(ds, labels))
    words = plain(
        f"log10 of the local Lipschitz constants of {a} and {b}, and {name} on a logarithmic "
        f"colour scale centred on 1{_over_samples(ds, ', each the ', how)}; above it its geometric "
        f"mean over everything. {diff_words(ds, labels)}.{dots}{notes}"
    )
    mean = enclosed(*statistics.mean_ends(ratio_run(ds), "exact"))
    runs, grids = {**both.runs, "ratio": ds}, both.grids | {"ratio": grid}
    bars = [*both.bars, Scale(("ratio",), -most, most, DIVERGING, name)]
    titles = {**both.titles, "ratio": [f"{name}: {mean}"]}
    return Panels(runs, grids, bars, titles, words, own_bars=True, dots={"ratio": undecided})


@knows_options
def heatmaps(
    ds: Run | Sequence[Run],
    path: str | Path | None = None,
    *,
    bounds: Iterable[str] | None = None,
    over: str | None = None,
    reduce: str | float | None = None,
    scale: str = "rows",
    limits: tuple[float, float] | None = None,
    width: str | float = "page",
    columns: int | None = None,
    font_size: float | None = None,
    style: str | None = None,
    caption: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    r"""Draw a heatmap of the exact norm, one per bound, and one per extra, log10 of the values.

    Extras of the run (its Frobenius norms and condition numbers) have a colour scale each. Head
    number goes across (sample number for whole layers), layer number down.

    The figure with its caption is never taller than a page of 9 inches, or a slide of 16:9 where it
    is wider than paper. With ``path``, the caption is written beside it, as ``NAME.caption.txt``
    and ``NAME.caption.tex`` (``\input`` that in a figure).

    Of a diff of two runs, their exact norms are drawn on one scale, and their ratio on one centred
    on 1; dots mark heads whose interval over samples, or range of few samples, contains 1. Of a
    list of runs, such as several checkpoints for a paper, the exact norm of each is drawn, and
    bounds that are asked for, all on one colour scale.

    Args:
        ds: a run, from `lipbound.compare` or `lipbound.load`, or a list of runs of one map and
            norm; or a diff, from `lipbound.diff`.
        path: where to write it (.pdf, .svg, .png, .pgf, ...); fonts are embedded, files are
            reproducible.
        bounds: which bounds and extras, in this order, as a list or separated by commas; all of the
            run by default, with its extras where these fit on the paper too.
        over: "exact": draw bound / exact, each bound over the exact norm of its own map; None:
            values.
        reduce: over samples: "mean", the default of values, since published heatmaps have it
            (Figure 6); "geomean", the default of ratios and tables; "max", "median" or a quantile
            in [0, 1].
        scale: "rows" (the exact norm and bounds within a factor of ten of it come first, on a
            colour scale of their own), "shared" (one scale) or "panel" (a scale each). Panels far
            beyond a scale are drawn in the colour beyond it, and say their range.
        limits: ends of one colour scale for all panels (each its own with "panel"), log10: figures
            with the same limits can be compared.
        width: "page", "column", "slide", or inches.
        columns: panels in a row; as few as fit on the paper by default. font_size: points; 7, and
            12 on a slide, by default, and less where many panels would become too flat.
        style: a venue known to tueplots, such as "icml2024" (extra ``styles``): its fonts and its
            widths of "page" and "column".
        caption: draw the caption into the picture too.
        labels: what to call bounds, by name ("exact" and "exact_l2" among them), and "model" and
            "data"; of a list of runs names of their models; of a diff those of its "a" and "b".

    Returns:
        A matplotlib Figure that is not registered with pyplot; ``.axes`` are its panels and bars.

    Raises:
        LipboundError: unknown bound, reduction, scale or file type; panels that do not fit on the
            paper; a file that cannot be written.
    """
    paper, how = (width, columns, font_size, style, caption), (reduce, scale, over, limits, labels)
    panels = _panels(ds, bounds, *how)
    own = [name for name in EXTRAS if EXTRAS[name] in panels.grids]
    try:
        return figure_of(panels, path, paper)
    except PaperError:
        if bounds is not None or not own or "exact" not in panels.runs:
            raise
    figure = figure_of(_panels(ds, bounds_there(panels.runs["exact"]), *how), path, paper)
    draws = f"bounds='{','.join(own)}' draws one of them"
    errors.tell(f"the extras of the run do not fit on this figure; {draws}")
    return figure


@knows_options
def heatmap(
    ds: Run,
    name: str = "exact",
    *,
    over: str | None = None,
    ax: Axes | None = None,
    path: str | Path | None = None,
    reduce: str | float | None = None,
    limits: tuple[float, float] | None = None,
    colorbar: bool = True,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """One panel of `heatmaps` with a colour scale beside it, in axes of yours.

    Args:
        ds: a run, or a diff, whose ratio is drawn.
        name: "exact", "exact_l2", a bound of the run, or "frobenius" or "condition", of runs with
            these ``extras``.
        over: "exact": bound / exact, as in `heatmaps`.
        ax: where to draw; a new figure by default (``.figure`` of what is returned).
        path: where to write the figure.
        reduce, labels: as in `heatmaps`. limits: of the colour scale, log10; those of the panel by
            default.
        colorbar: False for panels that share one of yours (``.images[0]`` of what is returned).
        title: in place of the label.

    Returns:
        The axes; the layout and the font are the caller's.

    Raises:
        UnknownNameError: a variable that the run has not, an unknown reduction.
    """
    given = opened(ds, name=name != "exact" and name, over=over, limits=limits)
    if is_diff(given):
        panels, how = _of_diff(given, reduce, labels), "geomean" if reduce is None else reduce
        wanted, grids, bar = "ratio", panels.grids, panels.bars[-1]
        words = label = bar.quantity
    else:
        given, how = texts.relabelled(run_of(given), labels), _reduction(reduce, over)
        known = statistics.compared(given) if over else [*statistics.panels(given), *extras(given)]
        wanted = name if over or name not in EXTRAS else _extra(given, name)
        choice("panel of the run", wanted, known)
        grids = log10(given, [wanted], how, over)
        (bar,) = scales(given, grids, "panel", limits)
        words, label = RATIO if over else "log10", label_of(given, wanted)
    low = given.sizes["layer"] * 0.35  # inches of the panel; one layer is a strip
    below = ax is None and low <= 2
    axes = styles.given_or_new(ax, (3.45, 1.3 + low if below else 2.8))
    picture = image(axes, grids[wanted], bar)
    axes.set_title(label if title is None else title, parse_math=False)
    _number_axes(axes, given)
    if errors.flag("colorbar", colorbar):
        at: Any = {"location": "bottom", "aspect": 35} if below else {"aspect": 20}
        bar.bar(picture, axes, grids, **at).set_label(words + _over_samples(given, ", ", how))
    return styles.written(axes, path)


def _extra(ds: xr.Dataset, name: str) -> str:
    """Name the variable of an extra.

    Raises:
        UnknownNameError: the run has it not.
    """
    if EXTRAS[name] in extras(ds):
        return EXTRAS[name]
    if EXTRAS[name] in ds:
        raise UnknownNameError(f"no value of {name!r} is known; shorter inputs may have some")
    raise UnknownNameError(f"the run has no {name!r}; compare the model with extras={name!r}")


def _over_samples(ds: xr.Dataset, before: str, reduce: str | float) -> str:
    """Words on how the values of panels are reduced; none where they are not."""
    single = across(ds) == "sample" or ds.sizes["sample"] == 1
    return "" if single else f"{before}{statistics.reduction_name(reduce)} over samples"


def _reduction(reduce: str | float | None, over: str | None) -> str | float:
    """The reduction over samples, where none was asked for that of values or of ratios."""
    if over is not None:
        choice("over", over, ("exact",))
    return ("mean" if over is None else "geomean") if reduce is None else reduce


def _titles(ds: xr.Dataset, names: Iterable[str]) -> dict[str, list[str]]:
    """Labels of panels with the audit's marks, and mean ratios of bounds below them."""
    titles = {name: [label_of(ds, name)] for name in names}
    for name, entry in audit(ds).items():
        if name in titles:
            ends = statistics.mean_ends(ds, name)
            of = "exact" if compared_with(ds, name) == "exact" else "exact L2"
            known = f"{enclosed(*ends, most=3)} \u00d7 {of}"
            below = known if np.isfinite(ends[1]) else NO_RATIO[bool(np.isnan(ends[1]))]
            titles[name] = [titles[name][0] + texts.mark(entry), below]
    return titles


@knows_options
def caption(
    ds: Run,
    *,
    bounds: Iterable[str] | None = None,
    over: str | None = None,
    reduce: str | float | None = None,
    scale: str = "rows",
    labels: Mapping[str, str] | None = None,
) -> str:
    """The caption that `heatmaps` writes beside the figure with these arguments."""
    return _panels(ds, bounds, reduce, scale, over, None, labels).caption


def _caption(ds: xr.Dataset, bars: list[Scale], reduce: str | float, scale: str) -> str:
    """Caption of a figure with these colour bars."""
    each = " (a colour scale for each panel)" if scale == "panel" else ""
    names = [name for bar in bars for name in bar.names]
    several = [bar for bar in bars if bar.quantity == bars[0].quantity]
    rows, first = "", bars[0].names if scale == "rows" and len(several) > 1 else ()
    if first:
        own = "scale of their own" if len(first) > 1 else "scale of its own"
        rows = f" {joined([ds[name].attrs['label'] for name in first])}: on a colour {own}."
    for name in filter(extras(ds).__contains__, names):
        infinite = ", infinite ones in the colour beyond it" * bool(np.isinf(ds[name]).any())
        infinite += ", missing where it is not positive" * bool((ds[name] < 0).any())
        label, title = label_of(ds, name), texts.extra_title(ds, name)
        rows += f" {label}: log10 of the {title}, on a scale of its own{infinite}."
    marks = [texts.mark(entry).strip() for name, entry in audit(ds).items() if name in names]
    meaning = [f" {sign} {words}." for sign, words in texts.meanings(ds, marks).items()]
    ratios, and_bounds, means = "", "", texts.over(ds)
    if marks:
        ratios = f" Above the panels: bound / exact{', geometric mean' if means else ''}{means}."
        if bars[0].quantity == QUANTITY:
            and_bounds = f" and its {'bounds' if len(marks) > 1 else 'bound'}"
    what = "Numbers of weights" if of_weights_alone(ds) else f"{bars[0].quantity}{and_bounds}"
    shown_is = f"{what}{_over_samples(ds, ', each the ', reduce)}{each}"
    return plain(f"{shown_is}.{rows} {texts.run_caption(ds)}.{ratios}{''.join(meaning)}")
