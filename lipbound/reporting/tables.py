"""Tables of a run: bound / exact per bound, per layer or per head.

They are written as text, Markdown, LaTeX or CSV.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import allowance, audit
from lipbound.errors import LipboundError, UnknownNameError, nearest
from lipbound.formatting import digits, number, plain
from lipbound.reporting.citations import bibtex, methods
from lipbound.reporting.formats import FORMATTERS
from lipbound.reporting.labels import counted, footnotes, holds, left_out, mark, over, relabelled
from lipbound.reporting.labels import run_caption as caption
from lipbound.reporting.layout import Table
from lipbound.reporting.statistics import (
    OFF_SCALE,
    ROWS,
    VALUES,
    breakdown,
    by_width,
    exact_summary,
    extents,
    panels,
    present,
    ratio,
    reduction_name,
    shared_scale,
    summary,
    width,
    widths,
)
from lipbound.runs.store import takes_run
from lipbound.schema import Contents, bounds_there, with_exact

__all__ = [
    "FORMATS",
    "OFF_SCALE",
    "ROWS",
    "VALUES",
    "bibtex",
    "breakdown",
    "by_width",
    "caption",
    "footnotes",
    "holds",
    "latex",
    "left_out",
    "mark",
    "methods",
    "number",
    "panels",
    "ratio",
    "readable",
    "render",
    "shared_scale",
    "summary",
    "table_of",
    "width",
    "widths",
]
FORMATS = tuple(
    name for name, formatter in FORMATTERS.items() if formatter.table or formatter.fitted
)
HOLDS, BELOW = "assumptions hold", "below exact"
RANGE = "range over samples"
SPARE = ("name", HOLDS, BELOW, RANGE, "min", "max")
"""Columns of a table by bound that are left out where there is no room, the first one first: marks
and notes say what the second and the third do."""
HEADINGS = {
    "geomean": "geom. mean",
    "samples": RANGE,
    "min": "min",
    "max": "max",
    "violations": "below exact",
    "compared": "of",
    "sound": "assumptions hold",
}


@takes_run
def render(
    ds: xr.Dataset,
    format: str = "text",
    *,
    by: str = "bound",
    bounds: Iterable[str] | None = None,
    reduce: str | float = "geomean",
    values: str = "ratio",
    width: str | float | None = None,
    labels: Mapping[str, str] | None = None,
) -> str:
    """Write `summary` (by "bound") or `breakdown` (by "layer" or "head") in a format.

    "text", "markdown", "latex" (booktabs, siunitx) or "csv" (full precision).

    What does not fit the width is folded between words; then a table by bound lacks columns, in the
    order of `SPARE`, which is said, and a table by layer or head goes on below. Numbers stay whole.

    ``width`` is that of "text" in characters (as much as it takes by default), or of "latex":
    "column" (the default, 215 pt, which fits everywhere), "page" (345 pt), "slide" (307 pt, in
    parts of 14 rows), or points.

    Numbers are the middles of their enclosures, to the digits that these support (four at most):
    the last one is off by at most one unit. Enclosures are those of the exact norms.

    ``labels`` says what to call bounds, by name ("exact" and "exact_l2" among them), and "model"
    and "data".
    """
    if format not in FORMATS:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, FORMATS)}")
    made = table_of(ds, by, bounds=bounds, reduce=reduce, values=values, labels=labels)
    formatter = FORMATTERS[format]
    if formatter.fitted is not None:
        return formatter.fitted(made, width)
    if width is not None:
        raise LipboundError(
            f"a width ({width}) was given, but {format} has none; it is for text (characters) "
            "and latex (column, page, slide or points)"
        )
    assert formatter.table is not None
    return formatter.table(made)


@takes_run
def table_of(
    ds: xr.Dataset,
    by: str = "bound",
    *,
    bounds: Iterable[str] | None = None,
    reduce: str | float = "geomean",
    values: str = "ratio",
    labels: Mapping[str, str] | None = None,
) -> Table:
    """Table that `render` writes, before it has a format.

    ``.numbers`` and ``.shown`` are DataFrames, and notebooks show it as a table.
    """
    if by not in ROWS:
        raise UnknownNameError(f"unknown rows {by!r}; {nearest(by, ROWS)}")
    if by == "bound" and (reduce, values) != ("geomean", "ratio"):
        raise LipboundError(
            f"rows per bound are geometric means of ratios, and reduce is {reduce!r}, values "
            f"{values!r}; these are for rows by layer or head"
        )
    ds = relabelled(ds, labels)
    chosen = None if bounds is None else present(ds, bounds)
    return _by_bound(ds, chosen) if by == "bound" else _by_place(ds, by, chosen, reduce, values)


@takes_run
def latex(ds: xr.Dataset, **options: Any) -> str:
    r"""Write `render`'s table as LaTeX tabulars with notes.

    For ``\usepackage{booktabs, siunitx}``; cells are escaped, and the run stands in a comment
    above.
    """
    return render(ds, "latex", **options)


def _by_bound(ds: xr.Dataset, chosen: list[str] | None) -> Table:
    """`summary`, ready to be written; of no bounds, what the exact norms are."""
    if not (bounds_there(ds) if chosen is None else chosen):
        return _of_exact(ds)
    whole = summary(ds)
    numbers = whole if chosen is None else whole.loc[chosen]
    shown = _said_of_bounds(ds, whole).loc[numbers.index]
    shown[BELOW] = shown[BELOW] + " of " + shown.pop("of")
    shown.insert(1, "name", [str(name) for name in shown.index])
    none = f"none is below the exact norm in any of {int(numbers['compared'].max())} comparisons"
    if int(with_exact(ds).sum()) < 2:
        shown = shown.drop(columns=RANGE)
    return Table(
        numbers,
        shown,
        ("bound", "name", HOLDS),
        f"bound / exact{over(ds)}",
        caption(ds),
        footnotes(ds, chosen),
        ("bound",),
        SPARE,
        {} if numbers["violations"].any() else {BELOW: none},
        {RANGE: f"{RANGE}: smallest to largest geometric mean of a single sample"},
    )


def _of_exact(ds: xr.Dataset) -> Table:
    """Exact norms alone, as `summary` has ratios."""
    numbers = exact_summary(ds)
    wide = {
        column: width(ds, "exact")
        if column == "geomean"
        else float(np.expm1(np.nanmax(widths(ds), initial=0.0)))
        for column in numbers
    }
    said = {
        column: [_written(value, wide[column], 1) for value in numbers[column]]
        for column in numbers
    }
    pairs = zip(said["sample_min"], said["sample_max"], strict=True)
    shown = pd.DataFrame(
        {"norm": [str(ds["exact"].attrs["label"])], HEADINGS["geomean"]: said["geomean"]},
        index=numbers.index,
    )
    if int(with_exact(ds).sum()) > 1:
        shown[RANGE] = [f"{a} to {b}" if a != b else a for a, b in pairs]
    shown["min"], shown["max"] = said["min"], said["max"]
    meaning = {RANGE: f"{RANGE}: smallest to largest geometric mean of a single sample"}
    return Table(
        numbers,
        shown,
        ("norm",),
        f"exact norm{over(ds)}",
        caption(ds),
        footnotes(ds, []),
        ("norm",),
        SPARE,
        meaning=meaning,
    )


@takes_run
def readable(ds: xr.Dataset) -> pd.DataFrame:
    """`summary` in words: as many digits as are known, labels with the audit's marks."""
    ds = relabelled(ds)
    return _said_of_bounds(ds, summary(ds))


def _said_of_bounds(ds: xr.Dataset, table: pd.DataFrame) -> pd.DataFrame:
    """`summary` in words."""
    counts = audit(ds)
    shown = pd.DataFrame(index=table.index)
    shown["label"] = [row["label"] + mark(counts[str(name)]) for name, row in table.iterrows()]

    wide = {str(name): extents(ds, str(name)) for name in table.index}

    def column(of: str) -> list[str]:
        return [_written(float(row[of]), wide[str(name)][of], -1) for name, row in table.iterrows()]

    shown["geomean"] = column("geomean")
    shown["samples"] = [
        f"{a} to {b}" if a != b else a
        for a, b in zip(column("sample_min"), column("sample_max"), strict=True)
    ]
    shown["min"], shown["max"] = column("min"), column("max")
    shown["violations"], shown["compared"] = (
        table["violations"].astype(str),
        table["compared"].astype(str),
    )
    shown["sound"] = [
        holds(int(s), int(c)) for s, c in zip(table["sound"], table["compared"], strict=True)
    ]
    return shown.rename(columns={"label": "bound"} | HEADINGS)


def _said_of_cells(
    ds: xr.Dataset, bounds: list[str], by: str, values: str, reduce: str | float
) -> str:
    """Line above `breakdown`: the meaning of its cells and the axes of its means."""
    axes = ("sample",) if by == "head" else ("sample", "head")
    means = over(ds, axes, exact=values == "ratio")
    what = ("bound / exact" if values == "ratio" else "bound") if bounds else ""
    head = ", ".join(filter(None, ("exact norm", what)))
    head = f"{reduction_name(reduce)}{means}: {head}" if means else head
    there = Contents.of(ds)
    if there.exact_samples != there.samples:
        bounded = "" if values == "ratio" else f", bounds of all {there.samples}"
        head += f"; exact norms are of {counted(there.exact_samples, 'sample')}{bounded}"
    return head


def _by_place(
    ds: xr.Dataset, by: str, chosen: list[str] | None, reduce: str | float, values: str
) -> Table:
    """`breakdown`, ready to be written."""
    table = breakdown(ds, by, bounds=chosen, reduce=reduce, values=values)
    counts = audit(ds)
    shown = pd.DataFrame(index=table.index)
    for level in table.index.names:
        shown[str(level)] = [str(value) for value in table.index.get_level_values(level)]
    whole = by_width(ds, "exact", table.index, reduce)
    shown["exact"] = [_written(x, w, 1) for x, w in zip(table["exact"], whole, strict=True)]
    pairs = zip(table["sample_min"], table["sample_max"], whole, strict=True)
    if int(with_exact(ds).sum()) > 1:
        shown[RANGE] = [
            f"{_written(a, w, 1)} to {_written(b, w, 1)}" if a != b else _written(a, w, 1)
            for a, b, w in pairs
        ]
    for name in present(ds, chosen):
        wide = (
            by_width(ds, name, table.index, reduce)
            if values == "ratio"
            else np.full(len(table), allowance())
        )
        side = -1 if values == "ratio" else 0
        title = plain(ds[name].attrs["label"])
        title = (
            f"{title} ({name})"
            if any(
                other == title or other.startswith(f"{title} \u2020")
                for other in map(str, shown.columns)
            )
            else title
        )
        shown[title + mark(counts[name])] = [
            _written(x, w, side) for x, w in zip(table[name], wide, strict=True)
        ]
    head, notes, keys = (
        _said_of_cells(ds, present(ds, chosen), by, values, reduce),
        footnotes(ds, present(ds, chosen)),
        tuple(map(str, table.index.names)),
    )
    kind = (
        "exact norm"
        if by == "head" or "head" not in ds.dims
        else f"{reduction_name(reduce)} over heads"
    )
    meaning = {RANGE: f"{RANGE}: smallest to largest {kind} of a single sample"}
    return Table(table, shown, (), head, caption(ds), notes, keys, meaning=meaning)


def _written(x: float, wide: float, side: int) -> str:
    """Write a number to the digits that its enclosure supports.

    x is its lower end (side 1), its upper end (-1) or its middle (0).
    """
    x, wide = float(x), float(np.nan_to_num(wide, nan=0.0, posinf=10.0))
    middle = x * (1 + wide / 2) if side > 0 else x / (1 + wide) * (1 + wide / 2) if side < 0 else x
    return number(middle, digits(middle, wide))
