"""Tables of a run: bound / exact per bound, per layer or per head.

They are written as text, Markdown, LaTeX or CSV.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import allowance, audit
from lipbound.errors import LipboundError, choice
from lipbound.formatting import counted, enclosed
from lipbound.reporting import statistics
from lipbound.reporting.citations import bibtex, methods
from lipbound.reporting.diff_tables import diff_table
from lipbound.reporting.labels import (
    extra_title,
    footnotes,
    holds,
    label_of,
    left_out,
    mark,
    over,
    relabelled,
)
from lipbound.reporting.labels import run_caption as caption
from lipbound.reporting.latex import latex_table
from lipbound.reporting.layout import Table, csv_table, markdown_table, text_table
from lipbound.reporting.statistics import ROWS, breakdown, panels, ratio, summary, width, widths
from lipbound.runs.store import takes_diff, takes_run
from lipbound.schema import Contents, bounds_there, with_exact

__all__ = ["FORMATS", "ROWS", "bibtex", "breakdown", "caption", "footnotes", "latex", "left_out"]
__all__ += ["methods", "panels", "ratio", "readable", "render", "summary", "table_of"]
__all__ += ["width", "widths"]

WRITERS: dict[str, Callable[..., str]] = {
    "text": text_table,
    "markdown": markdown_table,
    "latex": latex_table,
    "csv": csv_table,
}
FORMATS, FITTED = tuple(WRITERS), ("text", "latex")
"""Formats by name, and those of them that are written in a width."""
MEAN, RANGE = "geom. mean", "range over samples"
LIKELY = f"{statistics.LEVEL:.0%} interval"
HOLDS, BELOW = "assumptions hold", "below exact"
READABLE = ("bound", MEAN, LIKELY, RANGE, "min", "max", BELOW, "of", HOLDS)
"""Columns of `readable`."""
WORDS = ("bound", "norm", "name", HOLDS)
"""Columns of words."""
SPARE = ("name", HOLDS, BELOW, RANGE, LIKELY, "min", "max")
"""Columns of a table by bound that are left out where there is no room, the first one first: marks
and notes say what the second and the third do."""


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

    Raises:
        LipboundError: unknown names, or a width for a format that has none.
    """
    choice("format", format, FORMATS)
    made = table_of(ds, by, bounds=bounds, reduce=reduce, values=values, labels=labels)
    if format in FITTED:
        return WRITERS[format](made, width)
    if width is not None:
        raise LipboundError(
            f"a width ({width}) was given, but {format} has none; it is for text (characters) "
            "and latex (column, page, slide or points)"
        )
    return WRITERS[format](made)


@takes_diff(diff_table)
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

    ``.numbers`` and ``.shown`` are DataFrames, and notebooks show it as a table. Of a diff of two
    runs it is of both and of B / A (see `lipbound.reporting.diff_tables.diff_table`).

    Raises:
        LipboundError: unknown names; another mean than geometric, or values, for rows by bound.
    """
    choice("rows", by, ROWS)
    if by == "bound" and (reduce, values) != ("geomean", "ratio"):
        raise LipboundError(
            f"rows per bound are geometric means of ratios, and reduce is {reduce!r}, values "
            f"{values!r}; these are for rows by layer or head"
        )
    ds = relabelled(ds, labels)
    chosen = None if bounds is None else statistics.present(ds, bounds)
    return _by_bound(ds, chosen) if by == "bound" else _by_place(ds, by, chosen, reduce, values)


def latex(ds: xr.Dataset, **options: Any) -> str:
    r"""Write `render`'s table as LaTeX tabulars with notes.

    For ``\usepackage{booktabs, siunitx}``; cells are escaped, and the run stands in a comment
    above.
    """
    return render(ds, "latex", **options)


def _table(
    ds: xr.Dataset,
    numbers: pd.DataFrame,
    shown: pd.DataFrame,
    *,
    head: str,
    bounds: list[str] | None,
    keys: Sequence[str],
    mean: str = "geometric mean",
    spare: tuple[str, ...] = SPARE,
    notes: Sequence[str] = (),
) -> Table:
    """A table with its caption and notes, without what is over samples where there is one."""
    samples = int(with_exact(ds).sum())
    if samples <= 1:
        shown = shown.drop(columns=[RANGE, LIKELY])
    likely = statistics.interval_words(samples)
    return Table(
        numbers,
        shown,
        words=WORDS,
        head=head,
        caption=caption(ds),
        notes=[*[likely] * (samples == 1), *notes, *footnotes(ds, bounds)],
        keys=tuple(keys),
        spare=spare,
        meaning={LIKELY: likely, RANGE: f"{RANGE}: smallest to largest {mean} of a single sample"},
    )


def _by_bound(ds: xr.Dataset, chosen: list[str] | None) -> Table:
    """`summary`, ready to be written; of no bounds, what the exact norms are."""
    if not (bounds_there(ds) if chosen is None else chosen):
        numbers = statistics.exact_summary(ds)
        widest = float(np.expm1(np.nanmax(widths(ds), initial=0.0)))
        wide = dict.fromkeys((*statistics.SPREAD, *statistics.INTERVAL), widest)
        wide["geomean"] = width(ds, "exact")
        words = {"norm": ds["exact"].attrs["label"]} | _spread_words(numbers.loc["exact"], wide, 1)
        shown = pd.DataFrame(words, index=numbers.index)
        head, keys = f"exact norm{over(ds)}", ["norm"]
        return _table(ds, numbers, shown, head=head, bounds=[], keys=keys, notes=extra_notes(ds))
    whole = summary(ds)
    numbers = whole if chosen is None else whole.loc[chosen]
    shown = _in_words(ds, whole).loc[numbers.index]
    shown[BELOW] = shown[BELOW] + " of " + shown.pop("of")
    shown.insert(1, "name", [str(name) for name in shown.index])
    head = f"bound / exact{over(ds)}"
    notes = extra_notes(ds)
    return _table(ds, numbers, shown, head=head, bounds=chosen, keys=["bound"], notes=notes)


def extra_notes(ds: xr.Dataset) -> list[str]:
    """A sentence on each of `lipbound.reporting.statistics.extras`: its median and its range."""
    notes = []
    for name in statistics.extras(ds):
        wide, values = statistics.EXTRA_WIDTHS[name], ds[name]
        middle = statistics.reduce_samples(values, "median", list(map(str, values.dims)))
        low, high = (enclosed(end, wide) for end in statistics.ends(values))
        said = f"median {enclosed(float(middle), wide)}{over(ds)}, from {low} to {high}"
        notes.append(f"{extra_title(ds, name)}: {said}")
    return notes


@takes_run
def readable(ds: xr.Dataset) -> pd.DataFrame:
    """`summary` in words: as many digits as are known, labels with the audit's marks."""
    ds = relabelled(ds)
    shown = _in_words(ds, summary(ds))
    return shown if int(with_exact(ds).sum()) > 1 else shown.drop(columns=LIKELY)


def _in_words(ds: xr.Dataset, table: pd.DataFrame) -> pd.DataFrame:
    """`summary` in words, columns `READABLE`."""
    counts, rows = audit(ds), []
    for name, row in table.iterrows():
        said = _spread_words(row, statistics.spread_widths(ds, str(name)), -1)
        said |= {"bound": row["label"] + mark(counts[str(name)]), BELOW: str(row["violations"])}
        rows.append(
            said | {"of": str(row["compared"]), HOLDS: holds(row["sound"], row["compared"])}
        )
    return pd.DataFrame(rows, columns=READABLE, index=table.index)


def _spread_words(row: pd.Series, wide: Mapping[str, float], side: int) -> dict[str, str]:
    """Columns of words on the spread of values, whose enclosures are so wide."""
    said = {column: enclosed(row[column], wide[column], side) for column in wide}
    spans = {LIKELY: statistics.INTERVAL, RANGE: ("sample_min", "sample_max")}
    found = {title: _span(*(said[end] for end in ends)) for title, ends in spans.items()}
    return {MEAN: said["geomean"]} | found | {"min": said["min"], "max": said["max"]}


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _said_of_cells(
    ds: xr.Dataset, bounds: list[str], by: str, values: str, reduce: str | float
) -> str:
    """Line above `breakdown`: the meaning of its cells and the axes of its means."""
    axes = ("sample",) if by == "head" else ("sample", "head")
    means = over(ds, axes, exact=values == "ratio")
    what = ("bound / exact" if values == "ratio" else "bound") if bounds else ""
    others = [extra_title(ds, name) for name in statistics.extras(ds)]
    head = ", ".join(filter(None, ("exact norm", *others, what)))
    head = f"{statistics.reduction_name(reduce)}{means}: {head}" if means else head
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
    counts, names = audit(ds), statistics.present(ds, chosen)

    def column(name: str, wide: np.ndarray, side: int) -> list[str]:
        return [enclosed(x, w, side) for x, w in zip(table[name], wide, strict=True)]

    shown = table.index.to_frame().astype(str)
    wide = statistics.row_widths(ds, "exact", reduce, table.index)
    shown["exact"] = column("exact", wide, 1)
    for title, ends in ((LIKELY, statistics.INTERVAL), (RANGE, ("sample_min", "sample_max"))):
        shown[title] = list(map(_span, *(column(end, wide, 1) for end in ends)))
    for name in statistics.extras(ds):
        wide = np.full(len(table), statistics.EXTRA_WIDTHS[name])
        shown[extra_title(ds, name)] = column(name, wide, 0)
    titles = {*shown.columns}
    for name in names:
        title = label_of(ds, name)
        title = f"{title} ({name})" if title in titles else title
        titles.add(title)
        if values == "ratio":
            cells = column(name, statistics.row_widths(ds, name, reduce, table.index), -1)
        else:
            cells = column(name, np.full(len(table), allowance()), 0)
        shown[title + mark(counts[name])] = cells
    heads = by == "layer" and "head" in ds.dims
    return _table(
        ds,
        table,
        shown,
        head=_said_of_cells(ds, names, by, values, reduce),
        bounds=names,
        keys=table.index.names,
        mean=f"{statistics.reduction_name(reduce)} over heads" if heads else "exact norm",
        spare=(),
    )
