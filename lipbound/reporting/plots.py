"""Layer x head heatmaps of a run, in the manner of Figure 6 of Yudin et al. 2025."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lipbound.bounds.audit import audit
from lipbound.errors import PaperError, UnknownNameError, choice, nearest, tell
from lipbound.formatting import enclosed, joined, plain
from lipbound.reporting import charts, sheets, statistics
from lipbound.reporting import labels as texts
from lipbound.reporting.charts import ball_curve, by_layer, over_steps, ratios, token_profile
from lipbound.reporting.diffs import diff_notes, diff_words, ratio_run, side_names
from lipbound.reporting.sheets import COLORMAP
from lipbound.reporting.statistics import reduce_samples
from lipbound.runs.store import Run, run_of, sides, takes_diff, takes_run
from lipbound.schema import EXTRAS, bounds_there, compared_with

__all__ = ["COLORMAP", "ball_curve", "by_layer", "caption", "heatmap", "heatmaps", "ratios"]
__all__ += ["over_steps", "reduce_samples", "token_profile"]


def __dir__() -> list[str]:
    return __all__


Bounds = Iterable[str] | None
How = statistics.Reduction | None
NO_RATIO = ("\u221e for some heads", "no positive norm")
MARKS = {
    "\u2021": "it is below the exact norm of some {}",
    "\u2020": "its assumptions do not hold on every {} here",
}
"""Meaning of the audit's marks, of heads or layers."""


def diff_heatmaps(
    ds: xr.Dataset,
    path: str | Path | None = None,
    *,
    reduce: str | float | None = None,
    width: str | float = "page",
    columns: int | None = None,
    font_size: float | None = None,
    style: str | None = None,
    caption: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """Draw exact norms of both runs on one scale, and their ratio on one centred on 1.

    Dots mark heads whose interval over samples, or range of few samples, contains 1.

    Args:
        ds: a diff.
        path, width, columns, font_size, style, caption: as in `lipbound.reporting.plots.heatmaps`.
        reduce: over samples; the geometric mean by default.
        labels: names of the runs, by "a" and "b".

    Raises:
        LipboundError: see `lipbound.reporting.plots.heatmaps`.
    """
    how, names = "geomean" if reduce is None else reduce, side_names(labels)
    given, models = labels or {}, dict(zip(names, map(texts.model_name, sides(ds)), strict=False))
    called = [names[k] if k in given else plain(f"{names[k]}: {models[k]}") for k in models]
    runs, grids, bars, titles, _ = _of_several(sides(ds), None, how, None, None, called)
    ratio, bar = _ratio_panel(ds, how, names["ratio"])
    mean = enclosed(*statistics.mean_ends(ratio_run(ds), "exact"))
    titles["ratio"], runs["ratio"] = [f"{names['ratio']}: {mean}"], ds
    words = diff_caption(ds, reduce=reduce, labels=labels)
    panels = runs, grids | ratio, [*bars, bar], titles, words
    paper, dots = (width, columns, font_size, style, caption), _undecided(ds["ratio"], how)
    return sheets.figure_of(panels, path, paper, dots={"ratio": dots}, own_bars=True)


def diff_heatmap(
    ds: xr.Dataset,
    *,
    ax: Axes | None = None,
    path: str | Path | None = None,
    reduce: str | float | None = None,
    colorbar: bool = True,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """Draw the ratio of two runs alone; arguments as in `heatmap` and `diff_heatmaps`."""
    how, name = "geomean" if reduce is None else reduce, side_names(labels)["ratio"]
    words, above = name + _over_samples(ds, ", ", how), name if title is None else title
    return sheets.one_panel(ds, *_ratio_panel(ds, how, words), above, ax, path, colorbar)


def diff_caption(
    ds: xr.Dataset,
    *,
    reduce: str | float | None = None,
    labels: Mapping[str, str] | None = None,
) -> str:
    """The caption that `diff_heatmaps` writes beside the figure."""
    how, (a, b, ratio) = "geomean" if reduce is None else reduce, side_names(labels).values()
    spread = statistics.spread_title(statistics.samples_of(ds["ratio"]), how)
    dots = f" Dots: the {spread} of the cell contains 1." * bool(_undecided(ds["ratio"], how).any())
    notes = "".join(f" {note[:1].upper()}{note[1:]}." for note in diff_notes(ds, labels))
    return plain(
        f"log10 of the local Lipschitz constants of {a} and {b}, and {ratio} on a logarithmic "
        f"colour scale centred on 1{_over_samples(ds, ', each the ', how)}; above it its geometric "
        f"mean over everything. {diff_words(ds, labels)}.{dots}{notes}"
    )


def _ratio_panel(
    ds: xr.Dataset, how: str | float, words: str
) -> tuple[dict[str, np.ndarray], sheets.Scale]:
    """Logarithms of the ratios of a diff, and a scale with 1 in its middle."""
    with np.errstate(all="ignore"):
        grid = np.log10(statistics.panel(ds["ratio"], how).values)
    most = max(map(abs, statistics.ends(grid[np.isfinite(grid)])), default=0.0)
    most = max(most, 1e-3) if np.isfinite(most) else 1.0
    return {"ratio": grid}, sheets.Scale(("ratio",), -most, most, sheets.DIVERGING, words)


def _undecided(ratio: xr.DataArray, how: str | float) -> np.ndarray:
    """Cells whose interval or range contains 1, (layer, head); none for whole layers."""
    if statistics.across(ratio) == "sample" or statistics.samples_of(ratio) < 2:
        return np.zeros((ratio.sizes["layer"], ratio.sizes["sample"]), dtype=bool)
    lower, upper = (end.transpose("layer", "head") for end in statistics.spread(ratio, how))
    return ((lower <= 1) & (upper >= 1)).values


@takes_diff(diff_heatmaps)
def heatmaps(
    ds: xr.Dataset | Sequence[Run],
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

    Of a diff of two runs, their exact norms and the ratio are drawn (see
    `lipbound.reporting.plots.diff_heatmaps`); of a list of runs, such as several checkpoints for a
    paper, the exact norm of each, and bounds that are asked for, all on one colour scale.

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
            "data"; of a list of runs a list of names of their models.

    Returns:
        A matplotlib Figure that is not registered with pyplot; ``.axes`` are its panels and bars.

    Raises:
        LipboundError: unknown bound, reduction, scale or file type; panels that do not fit on the
            paper; a file that cannot be written.
    """
    paper, each = (width, columns, font_size, style, caption), scale == "panel"
    if isinstance(ds, list | tuple):
        several = _of_several(ds, bounds, reduce, limits, over, labels)
        return sheets.figure_of(several, path, paper, own_bars=False)
    ds = texts.relabelled(run_of(ds), labels)
    own = statistics.extras(ds)

    def drawn(bounds: Iterable[str] | None) -> Figure:
        grids, bars, how = _panels(ds, bounds, reduce, scale, over, limits)
        words, runs = _caption(ds, bars, how, scale), dict.fromkeys(grids, ds)
        panels = runs, grids, bars, _titles(ds, grids), words
        return sheets.figure_of(panels, path, paper, own_bars=each)

    try:
        return drawn(bounds)
    except PaperError:
        if bounds is not None or not own:
            raise
    figure = drawn(bounds_there(ds))
    names = ",".join(name for name in EXTRAS if EXTRAS[name] in own)
    tell(f"the extras of the run do not fit on this figure; bounds='{names}' draws one of them")
    return figure


@takes_diff(diff_heatmap)
@takes_run
def heatmap(
    ds: xr.Dataset,
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
        ds: a run.
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
    ds = texts.relabelled(ds, labels)
    reduce = _reduction(reduce, over)
    known = [*statistics.panels(ds), *statistics.extras(ds)]
    known = statistics.compared(ds) if over else known
    wanted = name if over or name not in EXTRAS else _extra(ds, name)
    if wanted not in known:
        what = f"the run has no {name!r}" if over is None else f"{name!r} is no bound of the run"
        raise UnknownNameError(f"{what}; {nearest(name, known)}")
    grids = sheets.log10(ds, [wanted], reduce, over)
    (shown,) = sheets.scales(ds, grids, "panel", limits)
    words = (sheets.RATIO if over else "log10") + _over_samples(ds, ", ", reduce)
    above = texts.label_of(ds, wanted) if title is None else title
    return sheets.one_panel(ds, grids, replace(shown, quantity=words), above, ax, path, colorbar)


def _of_several(
    given: Any, bounds: Bounds, reduce: How, limits: sheets.Limits, over: str | None, labels: Any
) -> tuple[dict[str, xr.Dataset], sheets.Grids, list[sheets.Scale], dict[str, Any], str]:
    """Runs, values, colour scale and titles of the panels of several runs, and their caption."""
    found, names = charts.together(given, labels, "colour scale")
    how, runs, titles = _reduction(reduce, over), {}, {}
    grids: sheets.Grids = {}
    for k, (ds, name) in enumerate(zip(found, names, strict=True)):
        of = statistics.compared(ds, bounds) if over else statistics.panels(ds, bounds or ())
        own, called = sheets.log10(ds, of, how, over), _titles(ds, of)
        for one, (label, *below) in called.items():
            key, title = f"{k} {one}", name if len(of) == 1 else f"{name}: {label}"
            runs[key], grids[key], titles[key] = ds, own[one], [title, *below]
    bar = sheets.scale_of(list(grids), grids, sheets.RATIO if over else sheets.QUANTITY, limits)
    each = _over_samples(found[0], ", each the ", how)
    pairs = zip(names, map(texts.run_caption, found), strict=True)
    told = " ".join(f"{name}: {words}." if labels else f"{words}." for name, words in pairs)
    return runs, grids, [bar], titles, plain(f"{bar.quantity}{each}, on one scale. {told}")


def _extra(ds: xr.Dataset, name: str) -> str:
    """Name the variable of an extra.

    Raises:
        UnknownNameError: the run has it not.
    """
    if EXTRAS[name] in statistics.extras(ds):
        return EXTRAS[name]
    if EXTRAS[name] in ds:
        raise UnknownNameError(f"no value of {name!r} is known; shorter inputs may have some")
    raise UnknownNameError(f"the run has no {name!r}; compare the model with extras={name!r}")


def _over_samples(ds: xr.Dataset, before: str, reduce: str | float) -> str:
    """Words on how the values of panels are reduced; none where they are not."""
    single = statistics.across(ds) == "sample" or ds.sizes["sample"] == 1
    return "" if single else f"{before}{statistics.reduction_name(reduce)} over samples"


def _reduction(reduce: str | float | None, over: str | None) -> str | float:
    """The reduction over samples, where none was asked for that of values or of ratios."""
    if over is not None:
        choice("over", over, ("exact",))
    return ("mean" if over is None else "geomean") if reduce is None else reduce


def _panels(
    ds: xr.Dataset, bounds: Bounds, reduce: How, scale: str, over: str | None, limits: sheets.Limits
) -> tuple[dict[str, np.ndarray], list[sheets.Scale], str | float]:
    """Values of the panels, log10, their colour scales, and how they are reduced."""
    reduce = _reduction(reduce, over)
    if isinstance(bounds, str):
        bounds = [part.strip() for part in bounds.split(",")]
    if over:
        names = statistics.compared(ds, bounds)
    elif bounds is None:
        names = [*statistics.panels(ds), *statistics.extras(ds)]
    else:
        chosen = list(bounds)
        own = [_extra(ds, name) for name in chosen if name in EXTRAS]
        names = [*statistics.panels(ds, [one for one in chosen if one not in EXTRAS]), *own]
    grids = sheets.log10(ds, names, reduce, over)
    return grids, sheets.scales(ds, grids, scale, limits), reduce


def _titles(ds: xr.Dataset, names: Iterable[str]) -> dict[str, list[str]]:
    """Labels of panels with the audit's marks, and mean ratios of bounds below them."""
    titles = {name: [texts.label_of(ds, name)] for name in names}
    for name, entry in audit(ds).items():
        if name in titles:
            ends = statistics.mean_ends(ds, name)
            of = "exact" if compared_with(ds, name) == "exact" else "exact L2"
            known = f"{enclosed(*ends, most=3)} \u00d7 {of}"
            below = known if np.isfinite(ends[1]) else NO_RATIO[bool(np.isnan(ends[1]))]
            titles[name] = [titles[name][0] + texts.mark(entry), below]
    return titles


@takes_diff(diff_caption)
@takes_run
def caption(
    ds: xr.Dataset,
    *,
    bounds: Iterable[str] | None = None,
    over: str | None = None,
    reduce: str | float | None = None,
    scale: str = "rows",
    labels: Mapping[str, str] | None = None,
) -> str:
    """The caption that `heatmaps` writes beside the figure with these arguments."""
    ds = texts.relabelled(ds, labels)
    _, bars, reduce = _panels(ds, bounds, reduce, scale, over, None)
    return _caption(ds, bars, reduce, scale)


def _caption(ds: xr.Dataset, bars: list[sheets.Scale], reduce: str | float, scale: str) -> str:
    """Caption of a figure with these colour bars."""
    each = " (a colour scale for each panel)" if scale == "panel" else ""
    shown = [name for bar in bars for name in bar.names]
    several = [bar for bar in bars if bar.quantity == bars[0].quantity]
    rows, first = "", bars[0].names if scale == "rows" and len(several) > 1 else ()
    if first:
        own = "scale of their own" if len(first) > 1 else "scale of its own"
        rows = f" {joined([ds[name].attrs['label'] for name in first])}: on a colour {own}."
    for name in filter(statistics.extras(ds).__contains__, shown):
        infinite = ", infinite ones in the colour beyond it" * bool(np.isinf(ds[name]).any())
        label, title = texts.label_of(ds, name), texts.extra_title(ds, name)
        rows += f" {label}: log10 of the {title}, on a scale of its own{infinite}."
    marks = [texts.mark(entry).strip() for name, entry in audit(ds).items() if name in shown]
    place = "head" if "head" in ds.dims else "layer"
    meaning = [f" {sign} {MARKS[sign].format(place)}." for sign in MARKS if sign in marks]
    ratios, and_bounds, means = "", "", texts.over(ds)
    if marks:
        ratios = f" Above the panels: bound / exact{', geometric mean' if means else ''}{means}."
        if bars[0].quantity == sheets.QUANTITY:
            and_bounds = f" and its {'bounds' if len(marks) > 1 else 'bound'}"
    shown_is = f"{bars[0].quantity}{and_bounds}{_over_samples(ds, ', each the ', reduce)}{each}"
    return plain(f"{shown_is}.{rows} {texts.run_caption(ds)}.{ratios}{''.join(meaning)}")
