"""Layer x head heatmaps of a run, in the manner of Figure 6 of Yudin et al. 2025."""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from lipbound.bounds.audit import audit
from lipbound.errors import UnknownNameError, nearest, whole
from lipbound.formatting import enclosed, joined, plain
from lipbound.reporting import statistics
from lipbound.reporting.arrangement import Arrangement, Sheet, arrange
from lipbound.reporting.charts import ball_curve, ratios, token_profile
from lipbound.reporting.labels import label_of, mark, over, relabelled, run_caption
from lipbound.reporting.scales import COLORMAP, Scale, image, log10, scales
from lipbound.reporting.statistics import across, reduce_samples, reduction_name, shared_scale
from lipbound.reporting.styles import Drawing, caption_files, folded, given_or_new, look, write
from lipbound.runs.store import takes_run
from lipbound.schema import compared_with

__all__ = ["COLORMAP", "ball_curve", "caption", "heatmap", "heatmaps", "ratios", "reduce_samples"]
__all__ += ["shared_scale", "token_profile"]

NO_RATIO = ("\u221e for some heads", "no positive norm")
MARKS = {
    "\u2021": "it is below the exact norm of some {}",
    "\u2020": "its assumptions do not hold on every {} here",
}
"""Meaning of the audit's marks, of heads or layers."""
QUANTITY = "log10 of the local Lipschitz constant"


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
    words = _caption(ds, bars, reduce, scale)
    drawn, shrink = words if caption else "", font_size is None and style is None
    with matplotlib.rc_context(settings):
        figure = _draw(ds, grids, bars, scale == "panel", columns, inches, points, shrink, drawn)
        if path is not None:
            write(figure, Path(path), caption_files(Path(path), words))
    return figure


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


def _draw(
    ds: xr.Dataset,
    grids: dict[str, np.ndarray],
    bars: list[Scale],
    own: bool,
    columns: int | None,
    inches: float,
    points: float,
    shrink: bool,
    words: str,
) -> Figure:
    """Draw panels, section by section, each section with its colour bar.

    With ``own``, each panel has its own.
    """
    scale_of = {name: scale for scale in bars for name in scale.names}
    sections = [list(scale_of)] if own else [list(scale.names) for scale in bars]
    titles = _titles(ds, list(scale_of))

    def lines(name: str, side: float, size: float) -> list[str]:
        return [*folded(titles[name][0], side, size), *titles[name][1:]]

    sheet = Sheet(
        counts=[len(names) for names in sections],
        inches=inches,
        points=points,
        shape=ds.sizes["layer"] / ds.sizes[across(ds)],
        own_bars=own,
        titles=lambda k, side, size: max(len(lines(name, side, size)) for name in sections[k]),
        caption=len(_wrapped(words, inches, points)),
        layers=ds.sizes["layer"],
    )
    place = arrange(sheet, columns, shrink=shrink)
    points = place.sheet.points
    with matplotlib.rc_context({"font.size": points}):
        figure = Drawing(figsize=(inches, place.total))
        for index, names in enumerate(sections):
            for k, name in enumerate(names):
                scale, (left, top) = scale_of[name], place.corners[index][k]
                axes = _axes(figure, place, left, top, place.side, place.height)
                picture = _panel(ds, axes, grids[name], scale, place)
                title = "\n".join(lines(name, place.side, points))
                axes.set_title(title, fontsize=points, pad=3, parse_math=False)
                lowest = k + place.across >= len(names)
                _name_axes(ds, axes, left=k % place.across == 0, lowest=lowest)
                if own:
                    left += place.side + 0.3 * place.line
                    beside = _axes(figure, place, left, top, 0.35 * place.line, place.height)
                    bar = figure.colorbar(picture, cax=beside, extend=scale.extend(grids))
                    bar.ax.tick_params(labelsize=points - 1, width=0.5)
            if not own:
                _bar(figure, place, index, picture, bars[index].extend(grids))
        text, at = "\n".join(_wrapped(words, inches, points)), 1 - place.bottom / place.total
        put: Any = {"ha": "center", "va": "bottom", "linespacing": 1.3, "parse_math": False}
        figure.text(0.5, at, text, fontsize=points - 0.5, **put)
    return figure


def _wrapped(words: str, inches: float, points: float) -> list[str]:
    """A caption in lines; none for no words."""
    return textwrap.wrap(words, int(inches * 72 / points * 1.95))


def _panel(
    ds: xr.Dataset, axes: Axes, grid: np.ndarray, scale: Scale, place: Arrangement
) -> AxesImage:
    """Cells and numbers of layers and heads."""
    picture = image(axes, grid, scale)
    _say_beyond(axes, grid, scale)
    _ticks(axes, ds, most=max(1, int(place.height / place.line)))
    axes.tick_params(length=1.5, width=0.5, pad=1.5, labelsize=place.sheet.points - 1)
    return picture


def _name_axes(ds: xr.Dataset, axes: Axes, *, left: bool, lowest: bool) -> None:
    """Numbers and names of layers on the left of a row alone, of heads below a column alone."""
    axes.tick_params(labelbottom=lowest, labelleft=left)
    axes.set_xlabel(across(ds) if lowest else "", labelpad=1)
    axes.set_ylabel("layer" if left else "", labelpad=1)


def _axes(
    figure: Figure, place: Arrangement, left: float, top: float, width: float, height: float
) -> Axes:
    """Axes at a place in inches from the top left corner."""
    x, y = left / place.inches, 1 - (top + height) / place.total
    return figure.add_axes((x, y, width / place.inches, height / place.total))


def _bar(figure: Figure, place: Arrangement, index: int, picture: AxesImage, ends: str) -> None:
    """The colour bar of a section, on its right or below it."""
    left, top, width, height = place.bars[index]
    upright = height > width
    beside = _axes(figure, place, left, top, width, height)
    orientation = "vertical" if upright else "horizontal"
    bar = figure.colorbar(picture, cax=beside, orientation=orientation, extend=ends)
    lines = height / place.line / 12 if upright else 1.0
    bar.set_label("log10" if lines < 1 else QUANTITY, labelpad=2)
    bar.ax.tick_params(width=0.5, length=2, pad=1.5)


def _titles(ds: xr.Dataset, names: list[str]) -> dict[str, list[str]]:
    """Title of every panel: label with the audit's mark, and the mean ratio to the exact norm."""
    table, entries = statistics.summary(ds), audit(ds)
    found = {name: [label_of(ds, name)] for name in names}
    for name, title in found.items():
        if name in entries:
            ratio, wide = table.loc[name, "geomean"], statistics.width(ds, name)
            of = "exact" if compared_with(ds, name) == "exact" else "exact L2"
            known = f"{enclosed(ratio, wide, -1, most=3)} \u00d7 {of}"
            title[0] += mark(entries[name])
            title.append(known if np.isfinite(ratio) else NO_RATIO[bool(np.isnan(ratio))])
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
