"""Heatmaps of panels, layer x head: colour scales that panels share, sheets that fit on paper."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lipbound.errors import LipboundError, PaperError, choice, flag, shown, whole
from lipbound.formatting import counted
from lipbound.reporting import statistics, styles
from lipbound.reporting.labels import extra_title
from lipbound.reporting.statistics import across, extras, panel, ratio, shared_scale
from lipbound.schema import bounds_there, compared_with

QUANTITY, RATIO = "log10 of the local Lipschitz constant", "log10 of bound / exact"
"""Labels of colour bars: of norms and bounds themselves, and of their ratios."""
Grids = dict[str, np.ndarray]
"""log10 of the values of panels, by name."""
Limits = tuple[float, float] | None
"""Ends of a colour scale, log10; None for those of its values."""
COLORMAP = "cividis"
NEAR_COLORMAP = "viridis"
"""Colours of rows with a scale of their own, so that nobody reads them off the other one."""
DIVERGING = "RdBu_r"
"""Colours of ratios of two runs: blue below one, red above."""
NEAR = 1.0
"""Decades above the exact norm, in the median, up to which a bound is drawn on the scale of the
exact norm."""
ABOVE, BELOW, MISSING = "#fff7bc", "#cfe0f3", "#dddddd"
"""Beyond the upper end of a scale, beyond the lower end, and where there is no value."""


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

    def mark(self, bar: Colorbar) -> None:
        """Number a diverging bar by ratios rather than by logarithms."""
        if self.colors == DIVERGING:
            places = np.linspace(-0.8, 0.8, 5) * self.high  # its label is at the end
            bar.set_ticks(list(places), labels=[f"{10**place:.4g}" for place in places])

    @property
    def short(self) -> str:
        """The label without what the logarithms are of."""
        return self.quantity.partition(" of ")[0]

    @property
    def top(self) -> float:
        """Upper end of the bar, so far above the lower one that its numbers are legible."""
        return self.high if self.high > self.low + 1e-4 else self.low + 0.1

    def extend(self, grids: dict[str, np.ndarray]) -> str:
        """The ends at which something lies beyond the bar, as matplotlib calls them."""
        shown = [grids[name] for name in self.names]
        over = any(bool((grid > self.top).any()) for grid in shown)
        under = any(bool((grid < self.low).any()) for grid in shown)
        return "both" if over and under else "max" if over else "min" if under else "neither"


def log10(
    ds: xr.Dataset, names: Iterable[str], reduce: str | float, over: str | None = None
) -> dict[str, np.ndarray]:
    """Logarithms of the values of panels; -inf for zero, NaN where there is no value.

    Args:
        ds: a run. names: of the panels. reduce: over samples, as in `reduce_samples`.
        over: "exact": of bound / exact, of the bound's own map; None: of the values.
    """
    shown = {name: ds[name] if over is None else ratio(ds, name) for name in names}
    with np.errstate(all="ignore"):
        return {name: np.log10(panel(values, reduce).values) for name, values in shown.items()}


def scales(ds: xr.Dataset, grids: Grids, how: str, limits: Limits = None) -> list[Scale]:
    """The colour bars of a figure, in the order in which their panels stand.

    Extras have a bar each, whatever the way.

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
    own = [scale_of([one], grids, f"log10 of the {extra_title(ds, one)}", ends) for one in others]
    if not names:
        return own
    words = QUANTITY if "exact" in grids else RATIO
    if how == "panel":
        return [*(scale_of([name], grids, words, limits) for name in names), *own]
    close = [name for name in names if _near(ds, grids, name)]
    far = [name for name in names if name not in close]
    if how == "shared" or limits or not far or not close:
        return [scale_of(names, grids, words, limits), *own]
    # The exact norm of another map has bounds of its own map beside it and would take up colours
    # that all others need.
    measured = [name for name in far if name in bounds_there(ds)] or far
    rest = replace(scale_of(measured, grids, words), names=tuple(far))
    return [replace(scale_of(close, grids, words), colors=NEAR_COLORMAP), rest, *own]


def image(axes: Axes, grid: np.ndarray, scale: Scale) -> AxesImage:
    """Logarithms as colours; infinite ones beyond the scale, missing ones grey."""
    colors = matplotlib.colormaps[scale.colors]
    shown = np.ma.masked_invalid(np.where(np.isposinf(grid), 1e300, grid))
    colormap = colors.with_extremes(over=ABOVE, bad=MISSING, under=BELOW)
    return axes.imshow(shown, cmap=colormap, norm=Normalize(scale.low, scale.top), aspect="auto")


def _near(ds: xr.Dataset, grids: dict[str, np.ndarray], name: str) -> bool:
    """True for the exact norm, and for bounds on it with a median at most ten times as large."""
    if "exact" not in grids:
        return _median(grids[name]) <= NEAR
    if name not in bounds_there(ds):
        return name == "exact"
    above = _median(grids[name]) - _median(grids["exact"])
    return compared_with(ds, name) == "exact" and above <= NEAR


def scale_of(names: Sequence[str], grids: Grids, words: str, limits: Limits = None) -> Scale:
    """A colour bar of some panels, from end to end of their values or between limits.

    Raises:
        LipboundError: limits that are no two numbers, the lower one first.
    """
    low, high = shared_scale({name: grids[name] for name in names})
    if limits is not None:
        try:
            low, high = map(float, limits)
        except (TypeError, ValueError):
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise LipboundError(
                f"limits is {shown(limits)}; give log10 of both ends of the colour scale, the "
                "lower one first, such as (0, 2)"
            )
    return Scale(tuple(names), low, high, COLORMAP, words)


def _median(grid: np.ndarray) -> float:
    known = grid[~np.isnan(grid)]
    return float(np.median(known)) if known.size else float("nan")


LINE = 1.35
"""Height of a line of type over its size."""
NARROW, FLAT = 6.0, 2.0
"""Least width and height of a panel, in lines of type."""
WIDE = 36.0
"""Width of a figure, in lines of type, from which on colour bars stand on the right of their panels
rather than below them."""


@dataclass(frozen=True)
class Sheet:
    """Panels that a figure has to hold, and what it is drawn on.

    Attributes:
        counts: panels of each section; sections stand below one another.
        layers: rows of a panel. columns: its columns.
        inches: width of the figure. points: size of its type.
        own_bars: every panel has a colour bar, rather than every section.
        caption: the caption that is drawn into the picture, if any.
    """

    counts: Sequence[int]
    layers: int
    columns: int
    inches: float
    points: float
    own_bars: bool = False
    caption: str = ""

    @property
    def line(self) -> float:
        """Height of a line of type, in inches."""
        return self.points / 72 * LINE

    @property
    def beside(self) -> bool:
        """True where colour bars stand on the right, for which strips are too low."""
        strips = self.layers <= 2 or self.layers < 0.2 * self.columns
        return self.own_bars or (self.inches / self.line >= WIDE and not strips)

    @property
    def words(self) -> str:
        """The caption, in lines."""
        return textwrap.fill(self.caption, int(self.inches * 72 / self.points * 1.95))

    def side(self, across: int) -> float:
        """Width of a panel, in inches, where so many stand in a row."""
        around = 3.8 if self.own_bars else 0.9
        right = 4.4 if self.beside and not self.own_bars else 0.0
        return (self.inches - (3.2 + right) * self.line) / across - around * self.line

    def natural(self, across: int) -> float:
        """Height of a panel whose cells are square, or nearly so, in inches."""
        shape = self.layers / self.columns
        high = self.side(across) * min(max(shape, min(0.55, 3 * shape)), 1.25)
        return max(1.25 * FLAT * self.line, min(high, 3.5 * self.layers * self.line))

    def rows(self, across: int) -> int:
        """Rows of panels in all sections."""
        return sum(-(-count // across) for count in self.counts)

    def fixed(self, across: int) -> float:
        """Height of all that is no panel, in inches: titles, numbers, colour bars, the caption."""
        folds = self.side(across) < 10 * self.line  # long labels, into two lines
        titles = 1.15 * (3 if folds else 2) + 0.6
        below = len(self.counts) * (2.8 if self.beside else 6.4)
        below += 2.4 * sum(count > across and count % across > 0 for count in self.counts)
        words = self.words.count("\n") + 2 if self.caption else 0
        return (titles * self.rows(across) + below + 1.25 * words + 0.3) * self.line

    @property
    def limit(self) -> float:
        """Height of the paper, in inches."""
        return styles.paper_height(self.inches, captioned=bool(self.caption))

    def height(self, across: int) -> float:
        """Height of a panel, in inches: its natural one, where there is room."""
        room = (self.limit - self.fixed(across)) / self.rows(across)
        return min(self.natural(across), room)


def arrange(sheet: Sheet, columns: int | None = None, *, shrink: bool = False) -> tuple[Sheet, int]:
    """Choose the panels in a row, and the size of type, so that a figure fits on the paper.

    Args:
        sheet: the panels, the paper and the type.
        columns: panels in a row, where they are asked for; else the fewest with which panels keep
            their natural height, or those with which they are largest.
        shrink: whether smaller type may be taken where panels would become too flat.

    Raises:
        PaperError: so many panels in so few columns are taller than the paper.
    """
    for share in (1.0, 0.9, 0.8, 0.7) if shrink else (1.0,):
        small = replace(sheet, points=share * sheet.points)
        most = min(max(sheet.counts), max(1, int(small.side(1) / (NARROW + 1) / small.line)))
        usual = max(1, min(most, round(sheet.inches * 4 / small.points)))
        choices = [columns] if columns else range(usual, most + 1)
        across = max(choices, key=lambda n: (small.height(n) / small.natural(n), -n))
        if small.height(across) >= FLAT * small.line and small.side(across) >= 2 * small.line:
            return small, across
    many = counted(columns, "column") if columns else "as many columns as are legible"
    raise PaperError(
        f"{sum(sheet.counts)} panels in {many} do not fit on a figure of {sheet.inches:g} x "
        f"{sheet.limit:.3g} inches; ask for {'other columns, ' if columns else ''}a larger width, "
        "another style or fewer bounds"
    )


Panels = tuple[Mapping[str, xr.Dataset], Grids, list[Scale], Mapping[str, Sequence[str]], str]
"""By panel: its run or diff, log10 of its values; the colour bars with their panels in order; by
panel: a label, which is folded, and lines below it. Then the caption."""
Dots = Grids | None
Paper = tuple[str | float, int | None, float | None, str | None, bool]
"""Width, columns, font_size, style and caption of `lipbound.reporting.plots.heatmaps`."""


def figure_of(
    panels: Panels, path: str | Path | None, paper: Paper, *, dots: Dots = None, own_bars: bool
) -> Figure:
    """Draw panels on a sheet of their own, and write it with its caption.

    Args:
        panels: what is drawn, and the caption.
        path: where to write both; None for nowhere.
        dots: by panel, whether a cell has a dot.
        paper: what both are drawn on.
        own_bars: every panel has a colour bar, rather than every section.
    """
    _, grids, bars, _, words = panels
    width, columns, font_size, style, captioned = paper
    settings, inches, points = styles.look(style, width, font_size)
    columns = None if columns is None else whole("columns", columns, least=1)
    counts = [len(grids)] if own_bars else [len(bar.names) for bar in bars]
    shape = [max(sizes) for sizes in zip(*(grid.shape for grid in grids.values()), strict=True)]
    with matplotlib.rc_context(settings):
        drawn = words if captioned else ""
        wanted = Sheet(counts, shape[0], shape[1], inches, points, own_bars, drawn)
        sheet, abreast = arrange(wanted, columns, shrink=font_size is None and style is None)
        with matplotlib.rc_context({"font.size": sheet.points}):
            figure = _draw(panels, sheet, abreast, dots or {})
            return styles.written(figure, path, words)


def _draw(panels: Panels, sheet: Sheet, across: int, dots: Grids) -> styles.Drawing:
    """Draw panels, section by section, each section with its colour bar or each panel with its own.

    Where they stand is left to matplotlib's constrained layout.
    """
    runs, grids, bars, titles, _ = panels
    high, rows, done = sheet.height(across), sheet.rows(across), 0
    size = (sheet.inches, sheet.fixed(across) + rows * high)
    pad = 0.4 * sheet.line
    figure = styles.Drawing(figsize=size, layout=ConstrainedLayoutEngine(h_pad=pad, w_pad=pad))
    places = figure.subplots(rows, across, squeeze=False)
    alike = len({grid.shape for grid in grids.values()}) == 1
    sections = [bars] if sheet.own_bars else [[bar] for bar in bars]
    for section in sections:
        shown = [(name, scale) for scale in section for name in scale.names]
        block = places[done : done + -(-len(shown) // across)].ravel()
        done += len(block) // across
        for k, ((name, scale), axes) in enumerate(zip(shown, block, strict=False)):
            picture = image(axes, grids[name], scale)
            if name in dots:
                down, right = np.nonzero(dots[name])
                axes.scatter(right, down, s=4, color="black", linewidths=0)
            _say_beyond(axes, grids[name], scale)
            label, *below = titles[name]
            title = [*styles.folded(label, sheet.side(across), sheet.points), *below]
            axes.set_title("\n".join(title), fontsize=sheet.points, pad=3, parse_math=False)
            left, lowest = k % across == 0 or not alike, k + across >= len(shown) or not alike
            _number_axes(axes, runs[name], max(1, int(high / sheet.line)))
            axes.tick_params(length=1.5, width=0.5, pad=1.5, labelsize=sheet.points - 1)
            axes.tick_params(labelbottom=lowest, labelleft=left)
            axes.set_xlabel(axes.get_xlabel() if lowest else "", labelpad=1)
            axes.set_ylabel("layer" if left else "", labelpad=1)
            if sheet.own_bars:
                bar = figure.colorbar(picture, ax=axes, extend=scale.extend(grids), aspect=20)
                bar.ax.tick_params(labelsize=sheet.points - 1, width=0.5)
                small: Any = {"fontsize": sheet.points - 1, "labelpad": 2, "parse_math": False}
                bar.ax.set_xlabel(scale.short, **small)  # below: beside is the next panel
                scale.mark(bar)
        for axes in block[len(shown) :]:
            axes.set_visible(False)
        if not sheet.own_bars:
            tall, wide = len(block) / across * high, 0.9 * sheet.inches
            long, thick = (tall, wide) if sheet.beside else (wide, tall)
            at: Any = {"location": "right" if sheet.beside else "bottom"}
            at |= {"fraction": 1.5 * sheet.line / thick, "pad": 0.5 * sheet.line / thick}
            at |= {"aspect": long / (0.7 * sheet.line), "extend": scale.extend(grids)}
            bar = figure.colorbar(picture, ax=block.tolist(), **at)
            short = long < 12 * sheet.line
            bar.set_label(scale.short if short else scale.quantity, labelpad=2)
            bar.ax.tick_params(width=0.5, length=2, pad=1.5)
    if sheet.caption:
        look: Any = {"fontsize": sheet.points - 0.5, "linespacing": 1.3, "parse_math": False}
        figure.supxlabel(sheet.words, **look)
    return figure


def one_panel(
    ds: xr.Dataset, grids: Grids, scale: Scale, title: str, ax: Any, path: Any, colorbar: bool
) -> Axes:
    """Draw a panel with its colour bar, labelled in words, in axes given or of a new figure."""
    (name,) = scale.names
    low = ds.sizes["layer"] * 0.35  # inches of the panel; one layer is a strip
    below = ax is None and low <= 2
    axes = styles.given_or_new(ax, (3.45, 1.3 + low if below else 2.8))
    picture = image(axes, grids[name], scale)
    axes.set_title(title, parse_math=False)
    _number_axes(axes, ds)
    if flag("colorbar", colorbar):
        at: Any = {"location": "bottom", "aspect": 35} if below else {"aspect": 20}
        bar = axes.figure.colorbar(picture, ax=axes, extend=scale.extend(grids), **at)
        bar.set_label(scale.quantity)
        scale.mark(bar)
    return styles.written(axes, path)


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
