"""Tables of a run: bound / exact per bound, per layer or per head; as text, Markdown, LaTeX or CSV."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import SLACK, audit
from lipbound.errors import UnknownNameError, nearest
from lipbound.formatting import digits, number, plain
from lipbound.formatting import escape_markdown as in_markdown
from lipbound.reporting.citations import bibtex, methods
from lipbound.reporting.formats import HEADINGS, latex_table
from lipbound.reporting.labels import caption, footnotes, holds, mark
from lipbound.reporting.reductions import reduction_name
from lipbound.reporting.statistics import ROWS, breakdown, by_width, extents, present, summary

__all__ = ["FORMATS", "ROWS", "bibtex", "breakdown", "caption", "footnotes", "latex", "methods", "number", "readable", "render", "summary"]


FORMATS = ("text", "markdown", "latex", "csv")


def render(
    ds: xr.Dataset,
    format: str = "text",
    *,
    by: str = "bound",
    bounds: Iterable[str] | None = None,
    reduce: str | float = "geomean",
    values: str = "ratio",
) -> str:
    """`summary` (by "bound") or `breakdown` (by "layer" or "head") as "text", "markdown", "latex" (booktabs, siunitx) or "csv" (full precision).

    Numbers are the middles of their enclosures, to the digits that these support (four at most): the last one is off by at most one unit. Enclosures
    are those of the exact norms, widened by ``exact_rounding``.
    """
    if format not in FORMATS:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, FORMATS)}")
    if by not in ROWS:
        raise UnknownNameError(f"unknown rows {by!r}; {nearest(by, ROWS)}")
    chosen = None if bounds is None else list(bounds)
    if by == "bound":
        whole = summary(ds)
        table = whole if chosen is None else whole.loc[present(ds, chosen)]
        shown = readable(ds).loc[table.index]
        head = ""
    else:
        table = breakdown(ds, by, bounds=chosen, reduce=reduce, values=values)
        shown = _by_place(ds, table, values, reduce)
        over = "samples" if by == "head" or "head" not in ds.dims else "samples and heads"
        what = "bound / exact" if values == "ratio" else "bound"
        head = f"{reduction_name(reduce)} over {over}: exact, its range over samples, {what}"
        if ds.attrs["exact_samples"] != ds.attrs["samples"]:
            bounded = "" if values == "ratio" else f", bounds over all {ds.attrs['samples']}"
            head += f"; exact norms are of the first {ds.attrs['exact_samples']} samples{bounded}"
    if format == "csv":
        if "label" in table:
            table = table.assign(label=table["label"].map(plain))
        return str(table.to_csv())
    notes = footnotes(ds, chosen)
    if format == "latex":
        return latex_table([*filter(None, [head]), caption(ds), *notes], shown)
    if format == "markdown":
        cells = shown.map(in_markdown).rename(columns=in_markdown)
        lines = [head, ""] if head else []
        return "\n".join([*lines, str(cells.to_markdown(index=False, disable_numparse=True)), "", *(f"{note}<br>" for note in notes)]).rstrip()
    text = str(shown.map(plain).rename(columns=plain).to_markdown(index=False, disable_numparse=True, tablefmt="simple"))
    return "\n".join([*filter(None, [head]), text, *notes])


def latex(ds: xr.Dataset, **options: Any) -> str:
    r"""`render` as a LaTeX tabular for ``\usepackage{booktabs, siunitx}``, cells escaped, with the run in a comment above it."""
    return render(ds, "latex", **options)


def readable(ds: xr.Dataset) -> pd.DataFrame:
    """`summary` in words: as many digits as are known, labels with the audit's marks."""
    table, counts = summary(ds), audit(ds)
    shown = pd.DataFrame(index=table.index)
    shown["label"] = [row["label"] + mark(counts[str(name)]) for name, row in table.iterrows()]

    wide = {str(name): extents(ds, str(name)) for name in table.index}

    def column(of: str) -> list[str]:
        return [_written(float(row[of]), wide[str(name)][of], -1) for name, row in table.iterrows()]

    shown["geomean"] = column("geomean")
    shown["samples"] = [f"{a} to {b}" if a != b else a for a, b in zip(column("sample_min"), column("sample_max"), strict=True)]
    shown["min"], shown["max"] = column("min"), column("max")
    shown["violations"], shown["compared"] = table["violations"].astype(str), table["compared"].astype(str)
    shown["sound"] = [holds(int(s), int(c)) for s, c in zip(table["sound"], table["compared"], strict=True)]
    return shown.rename(columns={"label": "bound"} | HEADINGS)


def _by_place(ds: xr.Dataset, table: pd.DataFrame, values: str, reduce: str | float) -> pd.DataFrame:
    """`breakdown` in words."""
    counts = audit(ds)
    shown = pd.DataFrame(index=table.index)
    for level in table.index.names:
        shown[str(level)] = [str(value) for value in table.index.get_level_values(level)]
    whole = by_width(ds, "exact", table.index, reduce)
    shown["exact"] = [_written(x, w, 1) for x, w in zip(table["exact"], whole, strict=True)]
    pairs = zip(table["sample_min"], table["sample_max"], whole, strict=True)
    shown["over samples"] = [f"{_written(a, w, 1)} to {_written(b, w, 1)}" if a != b else _written(a, w, 1) for a, b, w in pairs]
    for name in [str(c) for c in table.columns if c in ds.attrs["bounds"]]:
        wide = by_width(ds, name, table.index, reduce) if values == "ratio" else np.full(len(table), SLACK[ds.attrs["dtype"]])
        side = -1 if values == "ratio" else 0
        shown[ds[name].attrs["label"] + mark(counts[name])] = [_written(x, w, side) for x, w in zip(table[name], wide, strict=True)]
    return shown


def _written(x: float, wide: float, side: int) -> str:
    """A number to the digits that its enclosure supports: x is its lower end (side 1), its upper end (-1) or its middle (0)."""
    x, wide = float(x), float(np.nan_to_num(wide, nan=0.0, posinf=10.0))
    middle = x * (1 + wide / 2) if side > 0 else x / (1 + wide) * (1 + wide / 2) if side < 0 else x
    return number(middle, digits(middle, wide))
