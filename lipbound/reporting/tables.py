"""Tables of a run: bound / exact per bound, per layer or per head.

They are written as text, Markdown, LaTeX or CSV.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.errors import LipboundError, choice, knows_options
from lipbound.formatting import counted, digits, directed, enclosed, outwards
from lipbound.reporting import labels as texts
from lipbound.reporting import statistics
from lipbound.reporting.citations import bibtex, methods
from lipbound.reporting.diff_tables import diff_table
from lipbound.reporting.labels import footnotes, left_out
from lipbound.reporting.labels import run_caption as caption
from lipbound.reporting.latex import latex_table
from lipbound.reporting.layout import Table, csv_table, markdown_table, text_table
from lipbound.reporting.statistics import LIKELY, RANGE, ROWS, breakdown, panels, ratio, summary
from lipbound.runs.store import Run, takes_diff, takes_run
from lipbound.schema import EXTRAS, Contents, bounds_there, with_exact

__all__ = ["FORMATS", "ROWS", "bibtex", "breakdown", "caption", "footnotes", "latex", "left_out"]
__all__ += ["methods", "panels", "ratio", "readable", "render", "summary", "table_of"]


def __dir__() -> list[str]:
    return __all__


WRITERS: dict[str, Callable[..., str]] = {
    "text": text_table,
    "markdown": markdown_table,
    "latex": latex_table,
    "csv": csv_table,
}
FORMATS, FITTED = tuple(WRITERS), ("text", "latex")
"""Formats by name, and those of them that are written in a width."""
MEAN = "geom. mean"
SPANS = {LIKELY: statistics.INTERVAL, RANGE: ("sample_min", "sample_max")}
"""Columns of two ends in words, and those of their ends in numbers."""
HOLDS, BELOW = "assumptions hold", "below exact"
WORDS = ("bound", "norm", "name", HOLDS)
"""Columns of words."""
SPARE = ("max", "min", RANGE, LIKELY, "name", HOLDS, BELOW)
"""Columns of a table by bound that are left out where there is no room, the first one first; of the
two on samples the second one is left."""


@knows_options
def render(
    ds: Run,
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

    Where a line has no room, a table by bound lacks columns, in the order of `SPARE`, which is
    said, and words fold; a table by layer or head goes on below. Numbers stay whole.

    ``width`` is that of "text" in characters (as much as it takes by default), or of "latex":
    "column" (the default, 215 pt, which fits everywhere), "page" (345 pt), "slide" (307 pt, in
    parts of 14 rows), or points.

    Numbers are the middles of their enclosures, to the digits that these support (four at most):
    the last one is off by at most one unit; where less than two are known, both ends stand there.
    Ends of ranges are rounded outwards. Enclosures are those of the exact norms.

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
    ds = texts.relabelled(ds, labels)
    chosen = None if bounds is None else statistics.present(ds, bounds)
    return _by_bound(ds, chosen) if by == "bound" else _by_place(ds, by, chosen, reduce, values)


def latex(ds: Run, **options: Any) -> str:
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
    reduce: str | float = "geomean",
    mean: str = "geometric mean",
    spare: tuple[str, ...] = SPARE,
) -> Table:
    """A table with its caption and notes, without what is over samples where there is one."""
    samples, notes = int(with_exact(ds).sum()), [*extra_notes(ds), *footnotes(ds, bounds)]
    likely = statistics.spread_words(samples, reduce)
    if samples <= 1:
        shown, notes = shown.drop(columns=[RANGE, LIKELY]), [*filter(None, [likely]), *notes]
    elif statistics.spread_title(samples, reduce) == RANGE:
        shown = shown.drop(columns=LIKELY)
    of_range = f"{RANGE}: smallest to largest {mean} of a single sample"
    return Table(
        numbers,
        shown,
        words=WORDS,
        head=head,
        caption=caption(ds),
        notes=notes,
        keys=tuple(keys),
        spare=spare,
        meaning={LIKELY: likely, RANGE: of_range},
    )


def _by_bound(ds: xr.Dataset, chosen: list[str] | None) -> Table:
    """`summary`, ready to be written; of no bounds, what the exact norms are."""
    if not (bounds_there(ds) if chosen is None else chosen):
        numbers = statistics.exact_summary(ds)
        words = {"norm": ds["exact"].attrs["label"]} | _spread_words(ds, "exact")
        shown = pd.DataFrame(words, index=numbers.index)
        head = f"exact norm{texts.over(ds)}"
        return _table(ds, numbers, shown, head=head, bounds=chosen, keys=["norm"])
    counts, rows, numbers = audit(ds), [], summary(ds)
    numbers = numbers if chosen is None else numbers.loc[chosen]
    for name, row in numbers.iterrows():
        called = {"bound": row["label"] + texts.mark(counts[str(name)]), "name": str(name)}
        verdict = {BELOW: f"{row['violations']}/{row['compared']}"}
        verdict[HOLDS] = texts.holds(row["sound"], row["compared"])
        said = _spread_words(ds, str(name))
        mean = {column: said[column] for column in (MEAN, *SPANS) if column in said}
        rows.append(called | mean | verdict | said)  # what is needed first, first
    shown, head = pd.DataFrame(rows, index=numbers.index), f"bound / exact{texts.over(ds)}"
    return _table(ds, numbers, shown, head=head, bounds=chosen, keys=["bound"])


def extra_notes(ds: xr.Dataset) -> list[str]:
    """A sentence on each extra of a run: its median and its range, and where it is not known."""
    notes, extras = [], statistics.extras(ds)
    for name in filter(ds.variables.__contains__, EXTRAS.values()):
        both = [statistics.quantity(ds, name, end) for end in (0, 1)]
        dims = list(map(str, ds[name].dims))
        start, end = (float(statistics.reduce_samples(one, "median", dims)) for one in both)
        known = digits(start, end)
        low = directed(statistics.ends(both[0])[0], known, False)
        high = directed(statistics.ends(both[1])[1], known, True)
        said = f"median {enclosed(start, end)}{texts.over(ds)}, from {low} to {high}"
        said = said.replace("inf", "infinity") * (name in extras)
        words = ", ".join(filter(None, [said, texts.extra_known(ds, name)]))
        notes.append(f"{texts.extra_title(ds, name)}: {words}")
    return notes


def readable(ds: xr.Dataset) -> pd.DataFrame:
    """`summary` in words: as many digits as are known, labels with the audit's marks."""
    return table_of(ds).shown


def _spread_words(ds: xr.Dataset, name: str) -> dict[str, str]:
    """Columns of words on the spread of a quantity: its mean, and ends that are rounded outwards.

    The ends have no more digits than the mean, so that rounding leaves it between them.
    """
    low, high = (statistics.spread_of(ds, name, end) for end in (0, 1))
    known = statistics.digits_of_ends(low["geomean"], high["geomean"])
    said = {MEAN: enclosed(low["geomean"], high["geomean"])}
    said |= {title: outwards(low[a], high[b], known) for title, (a, b) in SPANS.items()}
    ends = {"min": directed(low["min"], known, False), "max": directed(high["max"], known, True)}
    return said | ends


def _said_of_cells(
    ds: xr.Dataset, bounds: list[str], by: str, values: str, reduce: str | float
) -> str:
    """Line above `breakdown`: the meaning of its cells and the axes of its means."""
    axes = ("sample",) if by == "head" else ("sample", "head")
    means = texts.over(ds, axes, exact=values == "ratio")
    what = ("bound / exact" if values == "ratio" else "bound") if bounds else ""
    others = [texts.extra_title(ds, name) for name in statistics.extras(ds)]
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
    low, high = (
        statistics.cells(ds, by, names, reduce, values, end).loc[table.index] for end in (0, 1)
    )

    def column(name: str) -> list[str]:
        return list(map(enclosed, low[name], high[name]))

    shown = table.index.to_frame().astype(str)
    shown["exact"] = column("exact")
    known = list(map(statistics.digits_of_ends, low["exact"], high["exact"]))
    for title, (a, b) in SPANS.items():
        shown[title] = list(map(outwards, low[a], high[b], known))
    for name in statistics.extras(ds):
        shown[texts.extra_title(ds, name)] = column(name)
    titles = {*shown.columns}
    for name in names:
        title = texts.label_of(ds, name)
        title = f"{title} ({name})" if title in titles else title
        titles.add(title)
        shown[title + texts.mark(counts[name])] = column(name)
    heads = by == "layer" and "head" in ds.dims
    return _table(
        ds,
        table,
        shown,
        head=_said_of_cells(ds, names, by, values, reduce),
        bounds=names,
        keys=table.index.names,
        reduce=reduce,
        mean=f"{statistics.reduction_name(reduce)} over heads" if heads else "exact norm",
        spare=(),
    )
