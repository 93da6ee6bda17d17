"""Layer x head heatmaps of a run, in the manner of Figure 6 of Yudin et al. 2025."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lipbound.bounds.audit import audit
from lipbound.errors import LipboundError, UnknownNameError, nearest, whole
from lipbound.formatting import counted, enclosed, joined, plain
from lipbound.reporting import statistics
from lipbound.reporting.charts import ball_curve, over_steps, ratios, token_profile
from lipbound.reporting.labels import label_of, mark, over, relabelled, run_caption
from lipbound.reporting.scales import COLORMAP, Scale, image, log10, scales
from lipbound.reporting.statistics import across, reduce_samples, reduction_name, shared_scale
from lipbound.reporting.styles import (
    Drawing,
    caption_files,
    folded,
    given_or_new,
    look,
    paper_height,
    write,
)
from lipbound.runs.store import takes_run
from lipbound.schema import compared_with

__all__ = ["COLORMAP", "ball_curve", "caption", "heatmap", "heatmaps", "ratios", "reduce_samples"]
__all__ += ["over_steps", "shared_scale", "token_profile"]

NO_RATIO = ("\u221e for some heads", "no positive norm")
MARKS = {
    "\u2021": "it is below the exact norm of some {}",
    "\u2020": "its assumptions do not hold on every {} here",
}
"""Meaning of the audit's marks, of heads or layers."""
QUANTITY = "log10 of the local Lipschitz constant"
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


@takes_run
def heatmaps(
    ds: xr.Dataset,
    path: str | Path | None = None,
    *,
    bounds: Iterable[str] | None = None,
    reduce: str | float = "mean",
    scale: str = "rows",
    width: str | float = "page",
    columns: int | None = None,
    font_size: float | None = None,
    style: str | None = None,
    caption: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    r"""Draw a heatmap of the exact norm and one per bound, log10 of the values.

    Head number goes across (sample number for whole layers), layer number down.

    The figure with its caption is never taller than a page of 9 inches, or a slide of 16:9 where it
    is wider than paper. With ``path``, the caption is written beside it, as ``NAME.caption.txt``
    and ``NAME.caption.tex`` (``\input`` that in a figure).

    Args:
        ds: a run, from `lipbound.compare` or `lipbound.load`.
        path: where to write it (.pdf, .svg, .png, .pgf, ...); fonts are embedded, files are
            reproducible.
        bounds: which bounds, in this order; all of the run by default.
        reduce: over samples: "mean", the default, since values are shown and published heatmaps
            have it (Figure 6); "geomean", the default of tables, whose ratios it suits; "max",
            "median" or a quantile in [0, 1].
        scale: "rows" (the exact norm and bounds within a factor of ten of it come first, on a
            colour scale of their own), "shared" (one scale) or "panel" (a scale each). Panels far
            beyond a scale are drawn in the colour beyond it, and say their range.
        width: "page", "column", "slide", or inches.
        columns: panels in a row; as few as fit on the paper by default. font_size: points; 7, and
            12 on a slide, by default, and less where many panels would become too flat.
        style: a venue known to tueplots, such as "icml2024" (extra ``styles``): its fonts and its
            widths of "page" and "column".
        caption: draw the caption into the picture too.
        labels: what to call bounds, by name ("exact" and "exact_l2" among them), and "model" and
            "data".

    Returns:
        A matplotlib Figure that is not registered with pyplot.

    Raises:
        LipboundError: unknown bound, reduction, scale or file type; panels that do not fit on the
            paper; a file that cannot be written.
    """
    ds = relabelled(ds, labels)
    settings, inches, points = look(style, width, font_size)
    columns = None if columns is None else whole("columns", columns, least=1)
    grids, bars = _panels(ds, bounds, reduce, scale)
    words, own = _caption(ds, bars, reduce, scale), scale == "panel"
    counts = [len(grids)] if own else [len(bar.names) for bar in bars]
    with matplotlib.rc_context(settings):
        sheet, across = arrange(
            Sheet(
                counts=counts,
                layers=ds.sizes["layer"],
                columns=ds.sizes[statistics.across(ds)],
                inches=inches,
                points=points,
                own_bars=own,
                caption=words if caption else "",
            ),
            columns,
            shrink=font_size is None and style is None,
        )
        with matplotlib.rc_context({"font.size": sheet.points}):
            figure = _draw(ds, grids, bars, sheet, across)
            if path is not None:
                write(figure, Path(path), caption_files(Path(path), words))
    return figure


def _draw(
    ds: xr.Dataset, grids: dict[str, np.ndarray], bars: list[Scale], sheet: Sheet, across: int
) -> Figure:
    """Draw panels, section by section, each section with its colour bar or each panel with its own.

    Where they stand is left to matplotlib's constrained layout.
    """
    high, rows, done = sheet.height(across), sheet.rows(across), 0
    size = (sheet.inches, sheet.fixed(across) + rows * high)
    pad = 0.4 * sheet.line
    figure = Drawing(figsize=size, layout=ConstrainedLayoutEngine(h_pad=pad, w_pad=pad))
    places = figure.subplots(rows, across, squeeze=False)
    beside = _ratios(ds)
    sections = [bars] if sheet.own_bars else [[bar] for bar in bars]
    for section in sections:
        panels = [(name, scale) for scale in section for name in scale.names]
        block = places[done : done + -(-len(panels) // across)].ravel()
        done += len(block) // across
        for k, ((name, scale), axes) in enumerate(zip(panels, block, strict=False)):
            picture = image(axes, grids[name], scale)
            _say_beyond(axes, grids[name], scale)
            title = folded(_label(ds, name), sheet.side(across), sheet.points)
            title += beside.get(name, [])
            axes.set_title("\n".join(title), fontsize=sheet.points, pad=3, parse_math=False)
            lowest = k + across >= len(panels)
            _number_axes(axes, ds, left=k % across == 0, lowest=lowest, room=high / sheet.line)
            if sheet.own_bars:
                bar = figure.colorbar(picture, ax=axes, extend=scale.extend(grids), aspect=20)
                bar.ax.tick_params(labelsize=sheet.points - 1, width=0.5)
        for axes in block[len(panels) :]:
            axes.set_visible(False)
        if not sheet.own_bars:
            _bar(figure, picture, block.tolist(), sheet, across, section[0].extend(grids))
    if sheet.caption:
        small: Any = {"fontsize": sheet.points - 0.5, "linespacing": 1.3, "parse_math": False}
        figure.supxlabel(sheet.words, **small)
    return figure


def _bar(
    figure: Figure, picture: AxesImage, axes: list[Axes], sheet: Sheet, across: int, ends: str
) -> None:
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
    bar.set_label("log10" if long < 12 * sheet.line else QUANTITY, labelpad=2)
    bar.ax.tick_params(width=0.5, length=2, pad=1.5)


def _number_axes(axes: Axes, ds: xr.Dataset, *, left: bool, lowest: bool, room: float) -> None:
    """Numbers and names of layers on the left of a row alone, of heads below a column alone."""
    _ticks(axes, ds, most=max(1, int(room)))
    small = matplotlib.rcParams["font.size"] - 1
    axes.tick_params(length=1.5, width=0.5, pad=1.5, labelsize=small)
    axes.tick_params(labelbottom=lowest, labelleft=left)
    axes.set_xlabel(across(ds) if lowest else "", labelpad=1)
    axes.set_ylabel("layer" if left else "", labelpad=1)


@takes_run
def heatmap(
    ds: xr.Dataset,
    name: str = "exact",
    *,
    ax: Axes | None = None,
    reduce: str | float = "mean",
    limits: tuple[float, float] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """One panel of `heatmaps` with a colour scale beside it, in axes of yours.

    Args:
        ds: a run.
        name: "exact", "exact_l2" or a bound of the run.
        ax: where to draw; a new figure by default (``.figure`` of what is returned).
        reduce, labels: as in `heatmaps`. limits: of the colour scale, log10; those of the panel by
            default.

    Returns:
        The axes; the layout and the font are the caller's.

    Raises:
        UnknownNameError: a variable that the run has not, an unknown reduction.
    """
    ds = relabelled(ds, labels)
    known = statistics.panels(ds)
    if name not in known:
        raise UnknownNameError(f"the run has no {name!r}; {nearest(name, known)}")
    low = ds.sizes["layer"] * 0.35  # inches of the panel; one layer is a strip
    below = ax is None and low <= 2
    axes = given_or_new(ax, (3.45, 1.3 + low if below else 2.8))
    grids = log10(ds, [name], reduce)
    shown = scales(ds, grids, "panel")[0] if limits is None else Scale((name,), *limits)
    picture = image(axes, grids[name], shown)
    axes.set_title(label_of(ds, name), parse_math=False)
    axes.set(xlabel=across(ds), ylabel="layer")
    _ticks(axes, ds)
    location, aspect = ("bottom", 35) if below else ("right", 20)
    ends = shown.extend(grids)
    bar = axes.figure.colorbar(picture, ax=axes, extend=ends, location=location, aspect=aspect)
    bar.set_label(f"log10{_over_samples(ds, ', ', reduce)}")
    return axes


def _over_samples(ds: xr.Dataset, before: str, reduce: str | float) -> str:
    """Words on how the values of panels are reduced; none where they are not."""
    single = across(ds) == "sample" or ds.sizes["sample"] == 1
    return "" if single else f"{before}{reduction_name(reduce)} over samples"


def _panels(
    ds: xr.Dataset, bounds: Iterable[str] | None, reduce: str | float, scale: str
) -> tuple[dict[str, np.ndarray], list[Scale]]:
    """Values of the panels, log10, and their colour scales."""
    grids = log10(ds, statistics.panels(ds, bounds), reduce)
    return grids, scales(ds, grids, scale)


def _label(ds: xr.Dataset, name: str) -> str:
    """Label of a panel, with the audit's mark."""
    entries = audit(ds)
    return label_of(ds, name) + (mark(entries[name]) if name in entries else "")


def _ratios(ds: xr.Dataset) -> dict[str, list[str]]:
    """A line on the mean ratio of each bound to the exact norm."""
    found = {}
    for name, mean in statistics.summary(ds)["geomean"].items():
        of = "exact" if compared_with(ds, name) == "exact" else "exact L2"
        known = f"{enclosed(mean, statistics.width(ds, name), -1, most=3)} \u00d7 {of}"
        found[name] = [known if np.isfinite(mean) else NO_RATIO[bool(np.isnan(mean))]]
    return found


def _say_beyond(axes: Axes, grid: np.ndarray, scale: Scale) -> None:
    """The range of the values of a panel that lies beyond its colour scale."""
    if side := scale.beyond(grid):
        ends = dict.fromkeys(f"{end:.1f}" for end in statistics.ends(grid))
        said = " to ".join(ends).replace("inf", "\u221e").replace("-", "\u2212")
        at: Any = {"transform": axes.transAxes, "ha": "center", "va": "center", "color": "black"}
        axes.text(0.5, 0.5, f"{side} the scale:\n{said}", **at)


def _ticks(axes: Axes, ds: xr.Dataset, most: int = 6) -> None:
    """Numbers of heads, at most about six, and of layers, at most ``most`` too."""
    for axis, ticks, limit in (
        (axes.xaxis, ds[across(ds)].values, 6),
        (axes.yaxis, ds["layer"].values, min(6, most)),
    ):
        step = max(1, -(-len(ticks) // limit))
        axis.set_ticks(range(0, len(ticks), step), [str(t) for t in ticks[::step]])


@takes_run
def caption(
    ds: xr.Dataset,
    *,
    bounds: Iterable[str] | None = None,
    reduce: str | float = "mean",
    scale: str = "rows",
    labels: Mapping[str, str] | None = None,
) -> str:
    """The caption that `heatmaps` writes beside the figure with these arguments."""
    ds = relabelled(ds, labels)
    return _caption(ds, _panels(ds, bounds, reduce, scale)[1], reduce, scale)


def _caption(ds: xr.Dataset, bars: list[Scale], reduce: str | float, scale: str) -> str:
    """Caption of a figure with these colour bars."""
    each = " (a colour scale for each panel)" if scale == "panel" else ""
    rows, first = "", bars[0].names if scale == "rows" and len(bars) > 1 else ()
    if first:
        own = "scale of their own" if len(first) > 1 else "scale of its own"
        rows = f" {joined([ds[name].attrs['label'] for name in first])}: on a colour {own}."
    shown = [name for bar in bars for name in bar.names]
    marks = [mark(entry).strip() for name, entry in audit(ds).items() if name in shown]
    place = "head" if "head" in ds.dims else "layer"
    meaning = [f" {sign} {MARKS[sign].format(place)}." for sign in MARKS if sign in marks]
    ratios, and_bounds, means = "", "", over(ds)
    if marks:
        ratios = f" Above the panels: bound / exact{', geometric mean' if means else ''}{means}."
        and_bounds = f" and its {'bounds' if len(marks) > 1 else 'bound'}"
    samples = _over_samples(ds, ", each the ", reduce)
    return plain(
        f"{QUANTITY}{and_bounds}{samples}{each}.{rows} {run_caption(ds)}.{ratios}{''.join(meaning)}"
    )
