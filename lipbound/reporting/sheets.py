"""Sheets of panels, layer x head: how they fit on paper, and how they are drawn."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lipbound.errors import LipboundError, whole
from lipbound.formatting import counted
from lipbound.reporting import statistics
from lipbound.reporting.scales import Scale, image
from lipbound.reporting.statistics import across
from lipbound.reporting.styles import (
    Drawing,
    caption_files,
    folded,
    given_or_new,
    look,
    paper_height,
    write,
)

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

    def room(self, across: int) -> float:
        """Height for a panel on paper, in inches."""
        limit = paper_height(self.inches, captioned=bool(self.caption))
        return (limit - self.fixed(across)) / self.rows(across)

    def height(self, across: int) -> float:
        """Height of a panel, in inches: its natural one, where there is room."""
        return min(self.natural(across), self.room(across))


def arrange(sheet: Sheet, columns: int | None = None, *, shrink: bool = False) -> tuple[Sheet, int]:
    """Choose the panels in a row, and the size of type, so that a figure fits on the paper.

    Args:
        sheet: the panels, the paper and the type.
        columns: panels in a row, where they are asked for; else the fewest with which panels keep
            their natural height, or those with which they are largest.
        shrink: whether smaller type may be taken where panels would become too flat.

    Raises:
        LipboundError: so many panels in so few columns are taller than the paper.
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
    limit = paper_height(sheet.inches, captioned=bool(sheet.caption))
    raise LipboundError(
        f"{sum(sheet.counts)} panels in {many} do not fit on a figure of {sheet.inches:g} x "
        f"{limit:.3g} inches; ask for {'other columns, ' if columns else ''}a larger width, "
        "another style or fewer bounds"
    )


def figure_of(
    ds: xr.Dataset,
    grids: dict[str, np.ndarray],
    bars: list[Scale],
    titles: Mapping[str, Sequence[str]],
    words: str,
    path: str | Path | None,
    *,
    dots: Mapping[str, np.ndarray] | None = None,
    own_bars: bool = False,
    width: str | float = "page",
    columns: int | None = None,
    font_size: float | None = None,
    style: str | None = None,
    caption: bool = False,
) -> Figure:
    """Draw panels on a sheet of their own, and write it with its caption.

    Args:
        ds: a run or a diff, for the numbers of its layers and heads.
        grids: log10 of the values of each panel.
        bars: the colour bars, with their panels in order.
        titles: of the panels: a label, which is folded, and lines below it.
        words: the caption.
        path: where to write both; None for nowhere.
        dots: by panel, whether a cell has a dot.
        own_bars: every panel has a colour bar, rather than every section.
        width, columns, font_size, style, caption: as in `lipbound.reporting.plots.heatmaps`.
    """
    settings, inches, points = look(style, width, font_size)
    columns = None if columns is None else whole("columns", columns, least=1)
    counts = [len(grids)] if own_bars else [len(bar.names) for bar in bars]
    shape = (ds.sizes["layer"], ds.sizes[statistics.across(ds)])
    with matplotlib.rc_context(settings):
        wanted = Sheet(counts, *shape, inches, points, own_bars, words if caption else "")
        sheet, across = arrange(wanted, columns, shrink=font_size is None and style is None)
        with matplotlib.rc_context({"font.size": sheet.points}):
            figure = _draw(ds, grids, bars, sheet, across, titles, dots or {})
            if path is not None:
                write(figure, Path(path), caption_files(Path(path), words))
    return figure


def _draw(
    ds: xr.Dataset,
    grids: dict[str, np.ndarray],
    bars: list[Scale],
    sheet: Sheet,
    across: int,
    titles: Mapping[str, Sequence[str]],
    dots: Mapping[str, np.ndarray],
) -> Figure:
    """Draw panels, section by section, each section with its colour bar or each panel with its own.

    Where they stand is left to matplotlib's constrained layout.
    """
    high, rows, done = sheet.height(across), sheet.rows(across), 0
    size = (sheet.inches, sheet.fixed(across) + rows * high)
    pad = 0.4 * sheet.line
    figure = Drawing(figsize=size, layout=ConstrainedLayoutEngine(h_pad=pad, w_pad=pad))
    places = figure.subplots(rows, across, squeeze=False)
    sections = [bars] if sheet.own_bars else [[bar] for bar in bars]
    for section in sections:
        panels = [(name, scale) for scale in section for name in scale.names]
        block = places[done : done + -(-len(panels) // across)].ravel()
        done += len(block) // across
        for k, ((name, scale), axes) in enumerate(zip(panels, block, strict=False)):
            picture = image(axes, grids[name], scale)
            if name in dots:
                down, right = np.nonzero(dots[name])
                axes.scatter(right, down, s=4, color="black", linewidths=0)
            _say_beyond(axes, grids[name], scale)
            label, *below = titles[name]
            title = [*folded(label, sheet.side(across), sheet.points), *below]
            axes.set_title("\n".join(title), fontsize=sheet.points, pad=3, parse_math=False)
            lowest = k + across >= len(panels)
            _number_axes(axes, ds, left=k % across == 0, lowest=lowest, room=high / sheet.line)
            if sheet.own_bars:
                bar = figure.colorbar(picture, ax=axes, extend=scale.extend(grids), aspect=20)
                bar.ax.tick_params(labelsize=sheet.points - 1, width=0.5)
                scale.mark(bar)
        for axes in block[len(panels) :]:
            axes.set_visible(False)
        if not sheet.own_bars:
            ends = section[0].extend(grids)
            bar = _bar(figure, picture, block.tolist(), sheet, across, ends, section[0].quantity)
    if sheet.caption:
        small: Any = {"fontsize": sheet.points - 0.5, "linespacing": 1.3, "parse_math": False}
        figure.supxlabel(sheet.words, **small)
    return figure


def _bar(
    figure: Figure,
    picture: AxesImage,
    axes: list[Axes],
    sheet: Sheet,
    across: int,
    ends: str,
    quantity: str,
) -> Colorbar:
    """The colour bar of a section, on its right or below it."""
    high, wide = len(axes) / across * sheet.height(across), 0.9 * sheet.inches
    long, thick = (high, wide) if sheet.beside else (wide, high)
    bar = figure.colorbar(
        picture,
        ax=axes,
        location="right" if sheet.beside else "bottom",
        aspect=long / (0.7 * sheet.line),
        fraction=1.5 * sheet.line / thick,
        pad=0.5 * sheet.line / thick,
        extend=ends,
    )
    short = quantity.partition(" of ")[0]
    bar.set_label(short if long < 12 * sheet.line else quantity, labelpad=2)
    bar.ax.tick_params(width=0.5, length=2, pad=1.5)
    return bar


def _number_axes(axes: Axes, ds: xr.Dataset, *, left: bool, lowest: bool, room: float) -> None:
    """Numbers and names of layers on the left of a row alone, of heads below a column alone."""
    number_ticks(axes, ds, most=max(1, int(room)))
    small = matplotlib.rcParams["font.size"] - 1
    axes.tick_params(length=1.5, width=0.5, pad=1.5, labelsize=small)
    axes.tick_params(labelbottom=lowest, labelleft=left)
    axes.set_xlabel(across(ds) if lowest else "", labelpad=1)
    axes.set_ylabel("layer" if left else "", labelpad=1)


def one_panel(
    ds: xr.Dataset,
    grids: dict[str, np.ndarray],
    scale: Scale,
    title: str,
    words: str,
    ax: Axes | None,
) -> Axes:
    """Draw a panel with its colour bar, labelled in words, in axes given or of a new figure."""
    (name,) = scale.names
    low = ds.sizes["layer"] * 0.35  # inches of the panel; one layer is a strip
    below = ax is None and low <= 2
    axes = given_or_new(ax, (3.45, 1.3 + low if below else 2.8))
    picture = image(axes, grids[name], scale)
    axes.set_title(title, parse_math=False)
    axes.set(xlabel=across(ds), ylabel="layer")
    number_ticks(axes, ds)
    location, aspect = ("bottom", 35) if below else ("right", 20)
    ends = scale.extend(grids)
    bar = axes.figure.colorbar(picture, ax=axes, extend=ends, location=location, aspect=aspect)
    bar.set_label(words)
    scale.mark(bar)
    return axes


def _say_beyond(axes: Axes, grid: np.ndarray, scale: Scale) -> None:
    """The range of the values of a panel that lies beyond its colour scale."""
    if side := scale.beyond(grid):
        ends = dict.fromkeys(f"{end:.1f}" for end in statistics.ends(grid))
        said = " to ".join(ends).replace("inf", "\u221e").replace("-", "\u2212")
        at: Any = {"transform": axes.transAxes, "ha": "center", "va": "center", "color": "black"}
        axes.text(0.5, 0.5, f"{side} the scale:\n{said}", **at)


def number_ticks(axes: Axes, ds: xr.Dataset, most: int = 6) -> None:
    """Numbers of heads, at most about six, and of layers, at most ``most`` too."""
    for axis, ticks, limit in (
        (axes.xaxis, ds[across(ds)].values, 6),
        (axes.yaxis, ds["layer"].values, min(6, most)),
    ):
        step = max(1, -(-len(ticks) // limit))
        axis.set_ticks(range(0, len(ticks), step), [str(t) for t in ticks[::step]])
