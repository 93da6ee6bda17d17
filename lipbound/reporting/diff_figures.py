"""Heatmaps of a diff of two runs: A, B, and B / A in colours that diverge from one."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lipbound.formatting import plain
from lipbound.reporting.diff_tables import change, diff_table, side_names
from lipbound.reporting.labels import model_name
from lipbound.reporting.scales import DIVERGING, Scale
from lipbound.reporting.sheets import figure_of, one_panel
from lipbound.reporting.statistics import (
    LIKELY,
    across,
    ends,
    interval,
    panel,
    reduction_name,
    shared_scale,
)
from lipbound.runs.pair import sides


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

    Dots mark heads whose bootstrap interval over samples contains 1.

    Args:
        ds: a diff.
        path, width, columns, font_size, style, caption: as in `lipbound.reporting.plots.heatmaps`.
        reduce: over samples; the geometric mean by default.
        labels: names of the runs, by "a" and "b".

    Raises:
        LipboundError: see `lipbound.reporting.plots.heatmaps`.
    """
    how = "geomean" if reduce is None else reduce
    parts, names = change(ds), side_names(labels)
    grids = _grids(ds, how)
    low, high = shared_scale({side: grids[side] for side in names})
    bars = [Scale(("a", "b"), low, high), _ratio_scale(grids["ratio"], _over(names))]
    models = dict(zip(names, map(model_name, sides(ds)), strict=True))
    titles = {
        side: [name if side in (labels or {}) else plain(f"{name}: {models[side]}")]
        for side, name in names.items()
    }
    row = diff_table(ds, bounds=[], labels=labels).shown.iloc[0]
    titles["ratio"] = [f"{_over(names)}: {row[_over(names)]}"]
    return figure_of(
        ds,
        grids,
        bars,
        titles,
        diff_caption(ds, reduce=reduce, labels=labels),
        path,
        dots={"ratio": _undecided(parts["ratio"], how)},
        own_bars=True,
        width=width,
        columns=columns,
        font_size=font_size,
        style=style,
        caption=caption,
    )


def diff_heatmap(
    ds: xr.Dataset,
    *,
    ax: Axes | None = None,
    reduce: str | float | None = None,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """Draw the ratio of two runs alone, in axes of yours; arguments as in `diff_heatmaps`."""
    how = "geomean" if reduce is None else reduce
    grids, title = {"ratio": _grids(ds, how)["ratio"]}, _over(side_names(labels))
    words = title + ("" if _single(ds) else f", {reduction_name(how)} over samples")
    return one_panel(ds, grids, _ratio_scale(grids["ratio"], words), title, words, ax)


def diff_caption(
    ds: xr.Dataset,
    *,
    reduce: str | float | None = None,
    labels: Mapping[str, str] | None = None,
) -> str:
    """The caption that `diff_heatmaps` writes beside the figure."""
    how, names = "geomean" if reduce is None else reduce, side_names(labels)
    a, b = names.values()
    each = "" if _single(ds) else f", each the {reduction_name(how)} over samples"
    table = diff_table(ds, bounds=[], labels=labels)
    row = table.shown.iloc[0].to_dict()
    of_all = f"{_over(names)} over everything: {row[_over(names)]} (geometric mean"
    of_all += f", {LIKELY} over samples {row[LIKELY]})" if LIKELY in row else ")"
    marked = bool(_undecided(ds["ratio"], how).any())
    dots = f" Dots: the {LIKELY} of the cell contains 1." * marked
    said = [table.meaning[LIKELY]] if LIKELY in row else []
    notes = "".join(f" {note[:1].upper()}{note[1:]}." for note in [*said, *table.notes])
    return plain(
        f"log10 of the local Lipschitz constants of {a} and {b}, and {_over(names)} on a "
        f"logarithmic colour scale centred on 1{each}. {table.caption}. {of_all}.{dots}{notes}"
    )


def _over(names: Mapping[str, str]) -> str:
    """The ratio in words, such as B / A."""
    return f"{names['b']} / {names['a']}"


def _single(ds: xr.Dataset) -> bool:
    """True where cells are of one sample."""
    return across(ds) == "sample" or ds.sizes["sample"] == 1


def _grids(ds: xr.Dataset, how: str | float) -> dict[str, np.ndarray]:
    """Logarithms of the panels."""
    parts = change(ds)
    with np.errstate(all="ignore"):
        return {name: np.log10(panel(parts[name], how).values) for name in ("a", "b", "ratio")}


def _ratio_scale(grid: np.ndarray, words: str) -> Scale:
    """A scale with 1 in its middle."""
    most = max(map(abs, ends(grid[np.isfinite(grid)])), default=0.0)
    most = max(most, 1e-3) if np.isfinite(most) else 1.0
    return Scale(("ratio",), -most, most, DIVERGING, words)


def _undecided(ratio: xr.DataArray, how: str | float) -> np.ndarray:
    """Cells whose bootstrap interval contains 1, (layer, head); none for whole layers."""
    if across(ratio) == "sample":
        return np.zeros((ratio.sizes["layer"], ratio.sizes["sample"]), dtype=bool)
    lower, upper = (end.transpose("layer", "head") for end in interval(ratio, how))
    return ((lower <= 1) & (upper >= 1)).values
