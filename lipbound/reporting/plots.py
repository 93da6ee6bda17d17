"""Layer x head heatmaps of a run, in the manner of Figure 6 of Yudin et al. 2025."""

import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from lipbound.bounds.audit import audit, compared_with
from lipbound.errors import UnknownNameError, nearest, whole
from lipbound.formatting import digits, number
from lipbound.reporting import labels, statistics
from lipbound.reporting.curves import ball_curve, ratios
from lipbound.reporting.reductions import reduce_samples, reduction_name
from lipbound.reporting.statistics import shared_scale
from lipbound.reporting.styles import Drawing, look, write
from lipbound.runs.given import takes_run

__all__ = ["COLORMAP", "Drawing", "ball_curve", "caption", "heatmap", "heatmaps", "ratios", "reduce_samples", "shared_scale", "write"]
COLORMAP = "cividis"
NO_RATIO = ("infinite for some heads", "no positive norm")


@takes_run
def heatmaps(
    ds: xr.Dataset,
    path: str | Path | None = None,
    *,
    bounds: Iterable[str] | None = None,
    reduce: str | float = "mean",
    scale: str = "shared",
    width: str | float = "page",
    columns: int | None = None,
    font_size: float | None = None,
    style: str | None = None,
) -> Figure:
    """A panel for the exact norm and one per bound: head number across (sample number for whole layers), layer number down, log10 of the values.

    Args:
        ds: a run, from `lipbound.compare` or `lipbound.load`.
        path: where to write it (.pdf, .svg, .png, .pgf, ...); fonts are embedded, files are reproducible.
        bounds: which bounds, in this order; all of the run by default.
        reduce: "mean" (as in Figure 6), "geomean", "max", "median" or a quantile in [0, 1], over samples.
        scale: "shared" (one colour scale; panels far above all others are drawn in the colour beyond it) or "panel" (a scale each).
        width: "page", "column", "slide", or inches.
        columns: panels in a row. font_size: points; 7, and 12 on a slide.
        style: a venue known to tueplots, such as "icml2024" (extra ``styles``): its fonts and its widths of "page" and "column".

    Returns:
        A matplotlib Figure that is not registered with pyplot.

    Raises:
        LipboundError: unknown bound, reduction, scale or file type; a file that cannot be written.
    """
    if scale not in ("shared", "panel"):
        raise UnknownNameError(f"unknown scale {scale!r}; {nearest(scale, ['shared', 'panel'])}")
    settings, inches, points = look(style, width, font_size)
    columns = None if columns is None else whole("columns", columns, least=1)
    panels = statistics.panels(ds, bounds)
    with np.errstate(divide="ignore"):
        grids = {name: np.log10(_grid(ds[name], reduce).values) for name in panels}
    across = columns or max(1, min(len(panels), round(inches * 7 / points / 1.75)))
    with matplotlib.rc_context(settings):
        figure = _draw(ds, panels, grids, across, inches, points, scale, reduce)
        if path is not None:
            write(figure, Path(path))
    return figure


@takes_run
def heatmap(
    ds: xr.Dataset, name: str = "exact", *, ax: Axes | None = None, reduce: str | float = "mean", limits: tuple[float, float] | None = None
) -> Axes:
    """One panel of `heatmaps` with a colour scale beside it, in axes of yours.

    Args:
        ds: a run.
        name: "exact", "exact_l2" or a bound of the run.
        ax: where to draw; a new figure by default (``.figure`` of what is returned).
        reduce: as in `heatmaps`. limits: of the colour scale, log10; those of the panel by default.

    Returns:
        The axes; the layout and the font are the caller's.

    Raises:
        LipboundError: a variable that the run has not, an unknown reduction.
    """
    known = statistics.panels(ds)
    if name not in known:
        raise UnknownNameError(f"the run has no {name!r}; {nearest(name, known)}")
    axes = ax if ax is not None else Drawing(figsize=(3.45, 2.8), layout="constrained").add_subplot()
    with np.errstate(divide="ignore"):
        grid = np.log10(_grid(ds[name], reduce).values)
    finite = grid[np.isfinite(grid)]
    low, high = limits or ((float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0))
    image = _image(axes, grid, low, high)
    axes.set_title(ds[name].attrs["label"], parse_math=False)
    axes.set(xlabel=_across(ds), ylabel="layer")
    _ticks(axes, ds)
    over = bool((grid > image.norm.vmax).any())
    samples = "" if _across(ds) == "sample" or ds.sizes["sample"] == 1 else f", {reduction_name(reduce)} over samples"
    axes.figure.colorbar(image, ax=axes, extend="max" if over else "neither").set_label(f"log10{samples}")
    return axes


def _across(ds: xr.Dataset) -> str:
    """What stands next to each other in a panel: heads, or samples for maps of whole layers."""
    return "head" if "head" in ds.dims else "sample"


def _grid(values: xr.DataArray, reduce: str | float) -> xr.DataArray:
    """The values of a panel, (layer, head), or (layer, sample) for maps of whole layers, which need no reduction."""
    if "head" in values.dims:
        return reduce_samples(values, reduce).transpose("layer", "head")
    return values.transpose("layer", "sample")


def _draw(
    ds: xr.Dataset, panels: list[str], grids: dict[str, np.ndarray], across: int, inches: float, points: float, scale: str, reduce: str | float
) -> Figure:
    down = -(-len(panels) // across)
    layers, heads = ds.sizes["layer"], ds.sizes[_across(ds)]
    line = points / 72 * 1.35
    text = caption(ds, bounds=[name for name in panels if name in ds.attrs["bounds"]], reduce=reduce, scale=scale)
    wrapped = textwrap.wrap(text, int(inches * 72 / points * 1.95))
    bar = 0.16 * inches / 7 + 2.6 * line if scale == "shared" else 0.0
    cell = inches / across
    side = cell - 4.2 * line - (2.6 * line if scale == "panel" else 0.0)
    height = min(max(side * layers / heads, 0.55 * side), 1.25 * side)
    row = height + 4.1 * line
    total = down * row + bar + (len(wrapped) + 2.4) * line
    figure = Drawing(figsize=(inches, total))
    FigureCanvasAgg(figure)
    limits = shared_scale(grids) if scale == "shared" else None
    image = None
    for k, name in enumerate(panels):
        left = (k % across) * cell + 3.0 * line
        bottom = total - (k // across) * row - 2.6 * line - height
        axes = figure.add_axes((left / inches, bottom / total, side / inches, height / total))
        grid = grids[name]
        finite = grid[np.isfinite(grid)]
        low, high = limits or ((float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0))
        image = _image(axes, grid, low, high)
        _label(axes, ds, name, grid, max(high, low + 1e-6), points)
        axes.set_xlabel(_across(ds) if k + across >= len(panels) else "", labelpad=1)
        axes.set_ylabel("layer" if k % across == 0 else "", labelpad=1)
        if scale == "panel":
            own = figure.add_axes(((left + side + 0.3 * line) / inches, bottom / total, 0.35 * line / inches, height / total))
            figure.colorbar(image, cax=own, extend="max" if np.isposinf(grid).any() else "neither").ax.tick_params(labelsize=points - 1, width=0.5)
    if scale == "shared" and image is not None:
        over = any((grid > image.norm.vmax).any() for grid in grids.values())
        below = (len(wrapped) + 4.0) * line
        axes = figure.add_axes((0.2, below / total, 0.6, 0.11 * inches / 7 / total))
        colorbar = figure.colorbar(image, cax=axes, orientation="horizontal", extend="max" if over else "neither")
        colorbar.set_label("log10 of the local Lipschitz constant and its bounds", labelpad=2)
        colorbar.ax.tick_params(width=0.5, length=2)
    figure.text(0.5, 0.6 * line / total, "\n".join(wrapped), ha="center", va="bottom", fontsize=points - 0.5, linespacing=1.3, parse_math=False)
    return figure


def _label(axes: Axes, ds: xr.Dataset, name: str, grid: np.ndarray, high: float, points: float) -> None:
    """Title with the mean ratio to the exact norm and the audit's marks, ticks, and the range of values beyond the colour scale."""
    lines = [ds[name].attrs["label"]]
    if name in ds.attrs["bounds"]:
        entry = audit(ds)[name]
        lines[0] += labels.mark(entry)
        ratio = statistics.summary(ds).loc[name, "geomean"]
        wide = statistics.width(ds, name)
        of = "exact" if compared_with(ds, name) == "exact" else "exact L2"
        lines.append(
            f"{number(ratio / (1 + wide / 2), digits(ratio, wide, most=3))} \u00d7 {of}" if np.isfinite(ratio) else NO_RATIO[bool(np.isnan(ratio))]
        )
        finite = grid[np.isfinite(grid)]
        if finite.size and np.median(finite) > high:
            upper = "\u221e" if np.isposinf(grid).any() else f"{finite.max():.1f}"
            axes.text(0.5, 0.5, f"off scale:\n{finite.min():.1f} to {upper}", transform=axes.transAxes, ha="center", va="center", color="black")
    axes.set_title("\n".join(lines), fontsize=points, pad=3, parse_math=False)
    _ticks(axes, ds)
    axes.tick_params(length=1.5, width=0.5, pad=1.5, labelsize=points - 1)


def _image(axes: Axes, grid: np.ndarray, low: float, high: float) -> AxesImage:
    """Logarithms as colours; infinite ones beyond the scale, missing ones grey."""
    colormap = matplotlib.colormaps[COLORMAP].with_extremes(over="#fff7bc", bad="#dddddd", under="#000000")
    norm = Normalize(low, max(high, low + 1e-6))
    return axes.imshow(np.ma.masked_invalid(np.where(np.isposinf(grid), 1e300, grid)), cmap=colormap, norm=norm, aspect="auto")


def _ticks(axes: Axes, ds: xr.Dataset) -> None:
    """Numbers of layers and heads, at most about six of each."""
    for axis, ticks in ((axes.xaxis, ds[_across(ds)].values), (axes.yaxis, ds["layer"].values)):
        step = max(1, -(-len(ticks) // 6))
        axis.set_ticks(range(0, len(ticks), step), [str(t) for t in ticks[::step]])


@takes_run
def caption(ds: xr.Dataset, *, bounds: Iterable[str] | None = None, reduce: str | float = "mean", scale: str = "shared") -> str:
    """The caption that `heatmaps` writes under the figure with these arguments."""
    what = reduction_name(reduce)
    each = "" if scale == "shared" else " (a colour scale for each panel)"
    samples = "" if ds.attrs["samples"] == 1 or _across(ds) == "sample" else f", {what} over samples"
    marks = {"\u2020": "its assumptions do not hold on every head here", "\u2021": "it is below the exact norm of some head"}
    entries = audit(ds)
    counts = [entries[name] for name in statistics.panels(ds, bounds) if name in ds.attrs["bounds"]]
    used = ["\u2021"] * any(e["violations"] for e in counts) + ["\u2020"] * any(e["sound"] < e["compared"] and not e["violations"] for e in counts)
    legend = "".join(f" {mark} {marks[mark]}." for mark in used)
    return f"log10 of the local Lipschitz constant and its bounds{samples}{each}. {labels.run_caption(ds)}; ratios are geometric means.{legend}"
