"""Layer x head heatmaps of a run, in the manner of Figure 6 of Yudin et al. 2025."""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from lipbound.bounds.audit import audit
from lipbound.errors import UnknownNameError, nearest, whole
from lipbound.formatting import digits, number, plain
from lipbound.reporting import statistics
from lipbound.reporting.charts import ball_curve, ratios, token_profile
from lipbound.reporting.figures.arrangement import Arrangement, Sheet, arrange
from lipbound.reporting.figures.captions import caption_files, folded, heatmap_caption
from lipbound.reporting.figures.scales import COLORMAP, Scale, check_scale, image, log10, scales
from lipbound.reporting.labels import mark, relabelled
from lipbound.reporting.statistics import reduce_samples, reduction_name, shared_scale
from lipbound.reporting.styles import Drawing, look, write
from lipbound.runs.store import takes_run
from lipbound.schema import bounds_there, compared_with

__all__ = [
    "COLORMAP",
    "Drawing",
    "ball_curve",
    "caption",
    "heatmap",
    "heatmaps",
    "ratios",
    "reduce_samples",
    "shared_scale",
    "token_profile",
    "write",
]
NO_RATIO = ("\u221e for some heads", "no positive norm")
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
    check_scale(scale)
    ds = relabelled(ds, labels)
    settings, inches, points = look(style, width, font_size)
    columns = None if columns is None else whole("columns", columns, least=1)
    panels = statistics.panels(ds, bounds)
    grids = {name: log10(_grid(ds[name], reduce)) for name in panels}
    bars = scales(ds, grids, scale)
    words = _caption(ds, panels, bars, reduce, scale)
    with matplotlib.rc_context(settings):
        figure = _draw(
            ds,
            grids,
            bars,
            scale == "panel",
            columns,
            inches,
            points,
            font_size is None and style is None,
            words if caption else "",
        )
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
        LipboundError: a variable that the run has not, an unknown reduction.
    """
    ds, known = relabelled(ds, labels), statistics.panels(ds)
    if name not in known:
        raise UnknownNameError(f"the run has no {name!r}; {nearest(name, known)}")
    low = ds.sizes["layer"] * 0.35  # inches of the panel; one layer is a strip
    axes = (
        ax
        if ax is not None
        else Drawing(
            figsize=(3.45, 2.8 if low > 2 else 1.3 + low), layout="constrained"
        ).add_subplot()
    )
    grid = log10(_grid(ds[name], reduce))
    shown = scales(ds, {name: grid}, "panel")[0] if limits is None else Scale((name,), *limits)
    picture = image(axes, grid, shown)
    axes.set_title(plain(ds[name].attrs["label"]), parse_math=False)
    axes.set(xlabel=_across(ds), ylabel="layer")
    _ticks(axes, ds)
    samples = (
        ""
        if _across(ds) == "sample" or ds.sizes["sample"] == 1
        else f", {reduction_name(reduce)} over samples"
    )
    side = "bottom" if ax is None and low <= 2 else "right"
    axes.figure.colorbar(
        picture,
        ax=axes,
        extend=shown.extend({name: grid}),
        location=side,
        aspect=20 if side == "right" else 35,
    ).set_label(f"log10{samples}")
    return axes


def _across(ds: xr.Dataset) -> str:
    """Dimension across a panel: heads, or samples for maps of whole layers."""
    return "head" if "head" in ds.dims else "sample"


def _grid(values: xr.DataArray, reduce: str | float) -> xr.DataArray:
    """Values of a panel, (layer, head).

    (layer, sample) for maps of whole layers, which need no reduction.
    """
    if "head" in values.dims:
        return reduce_samples(values, reduce).transpose("layer", "head")
    return values.transpose("layer", "sample")


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
    sheet = Sheet(
        counts=[len(names) for names in sections],
        inches=inches,
        points=points,
        shape=ds.sizes["layer"] / ds.sizes[_across(ds)],
        own_bars=own,
        titles=lambda section, side, size: max(
            len(_folded(titles[name], side, size)) for name in sections[section]
        ),
        caption=len(_wrapped(words, inches, points)),
        layers=ds.sizes["layer"],
    )
    place = arrange(sheet, columns, shrink=shrink)
    points = place.sheet.points
    with matplotlib.rc_context({"font.size": points}):
        figure = Drawing(figsize=(inches, place.total))
        FigureCanvasAgg(figure)
        for index, names in enumerate(sections):
            for k, name in enumerate(names):
                scale, (left, top) = scale_of[name], place.corners[index][k]
                axes = _axes(figure, place, left, top, place.side, place.height)
                picture = _panel(ds, axes, grids[name], scale, place)
                title = "\n".join(_folded(titles[name], place.side, points))
                axes.set_title(title, fontsize=points, pad=3, parse_math=False)
                lowest = k + place.across >= len(names)
                _name_axes(ds, axes, left=k % place.across == 0, lowest=lowest)
                if own:
                    left += place.side + 0.3 * place.line
                    beside = _axes(figure, place, left, top, 0.35 * place.line, place.height)
                    bar = figure.colorbar(picture, cax=beside, extend=scale.extend(grids))
                    bar.ax.tick_params(labelsize=points - 1, width=0.5)
            if not own:
                _bar(figure, place, index, picture, bars[index], grids)
        lines, at = "\n".join(_wrapped(words, inches, points)), 1 - place.bottom / place.total
        figure.text(
            0.5,
            at,
            lines,
            ha="center",
            va="bottom",
            fontsize=points - 0.5,
            linespacing=1.3,
            parse_math=False,
        )
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
    axes.set_xlabel(_across(ds) if lowest else "", labelpad=1)
    axes.set_ylabel("layer" if left else "", labelpad=1)


def _axes(
    figure: Figure, place: Arrangement, left: float, top: float, width: float, height: float
) -> Axes:
    """Axes at a place in inches from the top left corner."""
    x, y = left / place.inches, 1 - (top + height) / place.total
    return figure.add_axes((x, y, width / place.inches, height / place.total))


def _bar(
    figure: Figure,
    place: Arrangement,
    index: int,
    picture: AxesImage,
    scale: Scale,
    grids: dict[str, np.ndarray],
) -> None:
    """The colour bar of a section, on its right or below it."""
    left, top, width, height = place.bars[index]
    upright = height > width
    bar = figure.colorbar(
        picture,
        cax=_axes(figure, place, left, top, width, height),
        orientation="vertical" if upright else "horizontal",
        extend=scale.extend(grids),
    )
    lines = height / place.line / 12 if upright else 1.0
    bar.set_label("log10" if lines < 1 else QUANTITY, labelpad=2)
    bar.ax.tick_params(width=0.5, length=2, pad=1.5)


def _titles(ds: xr.Dataset, names: list[str]) -> dict[str, list[str]]:
    """Title of every panel: label with the audit's mark, and the mean ratio to the exact norm."""
    table, entries = statistics.summary(ds), audit(ds)
    found = {name: [plain(ds[name].attrs["label"])] for name in names}
    for name in (name for name in names if name in bounds_there(ds)):
        found[name][0] += mark(entries[name])
        ratio = table.loc[name, "geomean"]
        wide = statistics.width(ds, name)
        of = "exact" if compared_with(ds, name) == "exact" else "exact L2"
        known = f"{number(ratio / (1 + wide / 2), digits(ratio, wide, most=3))} \u00d7 {of}"
        found[name].append(known if np.isfinite(ratio) else NO_RATIO[bool(np.isnan(ratio))])
    return found


def _folded(title: list[str], side: float, points: float) -> list[str]:
    """A title in lines no wider than a panel."""
    return [*folded(title[0], side, points), *title[1:]]


def _say_beyond(axes: Axes, grid: np.ndarray, scale: Scale) -> None:
    """The range of the values of a panel that lies beyond its colour scale."""
    if side := scale.beyond(grid):
        finite = grid[np.isfinite(grid)]
        ends = ["\u2212\u221e"] * bool(np.isneginf(grid).any()) + (
            [f"{finite.min():.1f}", f"{finite.max():.1f}"] if finite.size else []
        )
        ends += ["\u221e"] * bool(np.isposinf(grid).any())
        text = f"{side} the scale:\n{' to '.join(dict.fromkeys((ends[0], ends[-1])))}".replace(
            "-", "\u2212"
        )
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="black")


def _ticks(axes: Axes, ds: xr.Dataset, most: int = 6) -> None:
    """Numbers of heads, at most about six, and of layers, at most ``most`` too."""
    for axis, ticks, limit in (
        (axes.xaxis, ds[_across(ds)].values, 6),
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
    check_scale(scale)
    ds = relabelled(ds, labels)
    panels = statistics.panels(ds, bounds)
    return _caption(
        ds,
        panels,
        scales(ds, {name: log10(_grid(ds[name], reduce)) for name in panels}, scale),
        reduce,
        scale,
    )


def _caption(
    ds: xr.Dataset, panels: list[str], bars: list[Scale], reduce: str | float, scale: str
) -> str:
    first = bars[0].names if scale == "rows" and len(bars) > 1 else ()
    return heatmap_caption(
        ds,
        bounds=[name for name in panels if name in bounds_there(ds)],
        reduce=reduce,
        scale=scale,
        first=first,
    )
