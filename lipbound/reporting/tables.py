"""Tables of a run: bound / exact per bound, per layer or per head.

They are written as text, Markdown, LaTeX or CSV.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.errors import LipboundError, choice, knows_options
from lipbound.formatting import counted, digits, directed, enclosed, outwards, plain
from lipbound.reporting import labels as texts
from lipbound.reporting import statistics
from lipbound.reporting.citations import bibtex, methods
from lipbound.reporting.labels import diff_notes, diff_words, footnotes, left_out, opened, ratio_run
from lipbound.reporting.labels import run_caption as caption
from lipbound.reporting.statistics import BY, LIKELY, RANGE, breakdown, panels, ratio, summary
from lipbound.reporting.text_tables import Table, latex_table, markdown_table, text_table
from lipbound.runs.store import Run, both_runs, run_of
from lipbound.schema import EXTRAS, Contents, bounds_there, is_diff, of_weights_alone, with_exact

__all__ = ["BY", "FORMATS", "bibtex", "breakdown", "caption", "footnotes", "latex", "left_out"]
__all__ += ["methods", "panels", "ratio", "readable", "render", "summary", "table_of"]


def __dir__() -> list[str]:
    return __all__


WRITERS: dict[str, Callable[..., str]] = {"text": text_table, "markdown": markdown_table}
WRITERS |= {"latex": latex_table, "csv": lambda table: str(table.numbers.to_csv())}
FORMATS, FITTED = tuple(WRITERS), ("text", "latex")
"""Formats by name, and those of them that are written in a width."""
MEAN, NO_SPREAD = "geom. mean", "one sample: no interval over samples"
HOLDS, BELOW = "assumptions hold", "below exact"
_WORDS = ("bound", "norm", "name", HOLDS)
"""Columns of words."""
SPARE = ("max", "min", RANGE, LIKELY, "name", HOLDS, BELOW)
"""Columns of a table by bound that are left out where there is no room, the first one first; of the
two on samples the second one is left."""
Names = list[str] | None
"""Names of bounds; None for all."""
TOLD = "told"
"""Attribute with the caption and the notes of a table, where they are not those of its run."""


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
    if width is not None and format not in FITTED:
        raise LipboundError(f"width is {width}, and {format} has none; it is for text and latex")
    return WRITERS[format](made, width) if format in FITTED else WRITERS[format](made)


@knows_options
def table_of(
    ds: Run,
    by: str = "bound",
    *,
    bounds: Iterable[str] | None = None,
    reduce: str | float = "geomean",
    values: str = "ratio",
    labels: Mapping[str, str] | None = None,
) -> Table:
    """Table that `render` writes, before it has a format.

    ``.numbers`` and ``.shown`` are DataFrames, and notebooks show it as a table. Of a diff of two
    runs it is of the norms of both and of their ratio B / A, over everything or by place;
    ``bounds`` are then those whose ratios stand there too (all that both have by default), and
    ``labels`` names of the runs, by "a" and "b".

    Raises:
        LipboundError: unknown names, heads of whole layers; another mean than geometric, or values,
            for rows by bound.
    """
    choice("rows", by, BY)
    if by == "bound" and (reduce, values) != ("geomean", "ratio"):
        what = "rows per bound are geometric means of ratios"
        raise LipboundError(f"{what}; reduce and values are for rows by layer or head")
    given = opened(ds, values=values != "ratio" and values)
    if not is_diff(given):
        run = texts.relabelled(run_of(given), labels)
        chosen = None if bounds is None else statistics.present(run, bounds)
        if by == "bound":
            return _by_bound(run, chosen)
        return _by_place(run, by, chosen, reduce, values)
    told = diff_words(given, labels), diff_notes(given, labels)
    run = ratio_run(given, labels).assign_attrs({TOLD: told})
    if by == "bound":
        norms = ["a", "b", "exact"]
        both = [k for k in map(str, run.data_vars) if f"{k}_upper" in run and k not in norms]
        wanted = both if bounds is None else statistics.requested(both_runs(given)[0], bounds)
        return _of_norms(run, [*norms, *(choice("bound", one, both) for one in wanted)])
    if bounds is not None:
        raise LipboundError("bounds are for rows by bound; rows by place are of exact norms")
    made = _by_place(run, by, [], reduce, "ratio")
    names = {f"exact{end}": f"ratio{end}" for end in ("", "_lower", "_upper")}
    return replace(made, numbers=made.numbers.rename(columns=names))


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
    bounds: Names,
    reduce: str | float = "geomean",
    mean: str = "geometric mean",
) -> Table:
    """A table with its caption and notes, without what is over samples where there is one."""
    samples = int(with_exact(ds).sum())
    known = ds.attrs.get(TOLD)
    said, notes = known or (caption(ds), [*extra_notes(ds), *footnotes(ds, bounds)])
    spread = [f"{RANGE}: smallest to largest {mean} of a single sample"]
    if samples <= 1:
        shown, spread = shown.drop(columns=[RANGE, LIKELY]), [NO_SPREAD] * samples
    elif statistics.spread_title(samples, reduce) == RANGE:
        shown = shown.drop(columns=LIKELY)
    else:
        spread.insert(0, f"{LIKELY}: Student's t over {samples} samples, on logarithms")
    shown = shown.map(plain).rename(columns=plain)
    keys = tuple(numbers.index.names)
    spare = () if "layer" in keys else SPARE
    return Table(numbers, shown, _WORDS, head, said, [*spread, *notes], keys, spare)


def _by_bound(ds: xr.Dataset, chosen: Names) -> Table:
    """`summary`, ready to be written; of no bounds, what the exact norms are."""
    counts, names = audit(ds), bounds_there(ds) if chosen is None else chosen
    if not names:
        norms = statistics.extras(ds) if of_weights_alone(ds) else ["exact"]
        return _of_norms(ds, norms, bounds=chosen)
    numbers = summary(ds).loc[names]
    columns = _of_each(ds, names) | {
        "bound": [statistics.label_of(ds, name) + texts.mark(counts[name]) for name in names],
        "name": names,
        BELOW: numbers["violations"].astype(str) + "/" + numbers["compared"].astype(str),
        HOLDS: list(map(texts.holds, numbers["sound"], numbers["compared"])),
    }
    order = ["bound", "name", MEAN, LIKELY, RANGE, BELOW, HOLDS, "min", "max"]
    shown, head = pd.DataFrame(columns, names)[order], f"bound / exact{texts.over(ds)}"
    return _table(ds, numbers, shown, head=head, bounds=chosen)


def _of_norms(ds: xr.Dataset, names: Sequence[str], bounds: Names = None) -> Table:
    """A table of norms rather than of bounds, a row each."""
    rows = [statistics.spread_of(ds, name) for name in names]
    numbers = pd.DataFrame(rows, pd.Index(names, name="norm"))
    labels = {"norm": [statistics.label_of(ds, name) for name in names]}
    shown = pd.DataFrame(labels | _of_each(ds, names))
    what = "numbers of weights" if of_weights_alone(ds) else "exact norm"
    head = f"{'exact norms and their ratio' if TOLD in ds.attrs else what}{texts.over(ds)}"
    return _table(ds, numbers, shown, head=head, bounds=bounds)


def _of_each(ds: xr.Dataset, names: Sequence[str]) -> dict[str, Any]:
    """Columns of words on the mean of each quantity over everything, and on its spread."""
    ends = [[statistics.spread_of(ds, name, end) for name in names] for end in (0, 1)]
    low, high = map(pd.DataFrame, ends)
    mean = list(map(enclosed, low["geomean"], high["geomean"]))
    return {MEAN: mean} | _spread_columns(low, high, "geomean")


def extra_notes(ds: xr.Dataset) -> list[str]:
    """A sentence on each extra of a run: its median and its range, and where it is not known."""
    notes, extras = [], statistics.extras(ds)
    for name in filter(ds.variables.__contains__, EXTRAS.values()):
        both = [statistics.quantity(ds, name, end) for end in (0, 1)]
        dims = list(map(str, ds[name].dims))
        start, end = (float(statistics.reduce_samples(one, "median", dims)) for one in both)
        known = digits(start, end)
        low, high = (directed(statistics.ends(one)[k], known, k) for k, one in enumerate(both))
        said = f"median {enclosed(start, end)}{texts.over(ds)}, from {low} to {high}"
        said = said.replace("inf", "infinity") * (name in extras)
        words = ", ".join(filter(None, [said, texts.extra_known(ds, name)]))
        notes.append(f"{texts.extra_title(ds, name)}: {words}")
    return notes


def readable(ds: xr.Dataset) -> pd.DataFrame:
    """`summary` in words: as many digits as are known, labels with the audit's marks."""
    return table_of(ds).shown


def _spread_columns(low: pd.DataFrame, high: pd.DataFrame, name: str) -> dict[str, list[str]]:
    """Columns of words on the spread of a mean, by its ends: ranges are rounded outwards.

    They have no more digits than the mean, so that rounding leaves it between them.
    """
    known = [max(2, min(3, digits(*ends))) for ends in zip(low[name], high[name], strict=True)]
    found = {}
    for title, (least, most) in statistics.SPANS.items():
        found[title] = list(map(outwards, low[least], high[most], known))
    for end, ends in (("min", low), ("max", high)):
        if end in ends:
            found[end] = list(map(directed, ends[end], known, [end == "max"] * len(known)))
    return found


def _said_of_cells(
    ds: xr.Dataset, bounds: list[str], by: str, values: str, reduce: str | float, exact: str
) -> str:
    """Line above `breakdown`: the meaning of its cells and the axes of its means."""
    axes = ("sample",) if by == "head" else ("sample", "head")
    means = texts.over(ds, axes, exact=values == "ratio")
    what = ("bound / exact" if values == "ratio" else "bound") if bounds else ""
    others = [texts.extra_title(ds, name) for name in statistics.extras(ds)]
    head = ", ".join(filter(None, (exact, *others, what)))
    head = f"{statistics.reduction_name(reduce)}{means}: {head}" if means else head
    there = Contents.of(ds)
    if there.norms and there.exact_samples != there.samples:
        bounded = "" if values == "ratio" else f", bounds of all {there.samples}"
        head += f"; exact norms are of {counted(there.exact_samples, 'sample')}{bounded}"
    return head


def _by_place(ds: xr.Dataset, by: str, chosen: Names, reduce: str | float, values: str) -> Table:
    """`breakdown`, ready to be written."""
    table = breakdown(ds, by, bounds=chosen, reduce=reduce, values=values)
    counts, names = audit(ds), statistics.present(ds, chosen)
    ends = (statistics.cells(ds, by, names, reduce, values, end) for end in (0, 1))
    low, high = (end.loc[table.index] for end in ends)
    column = {name: list(map(enclosed, low[name], high[name])) for name in table.columns}
    exact = statistics.label_of(ds, "exact") if TOLD in ds.attrs else "exact norm"
    norms = {exact.removesuffix(" norm"): column["exact"]} | _spread_columns(low, high, "exact")
    if of_weights_alone(ds):
        del norms["exact"]
        exact = ""
    shown = table.index.to_frame().astype(str).assign(**norms)
    for name in statistics.extras(ds):
        shown[texts.extra_title(ds, name)] = column[name]
    labels = [*shown, *(statistics.label_of(ds, name) for name in names)]
    for name in names:
        label = statistics.label_of(ds, name)
        title = f"{label} ({name})" if labels.count(label) > 1 else label
        shown[title + texts.mark(counts[name])] = column[name]
    heads, name = by == "layer" and "head" in ds.dims, statistics.reduction_name(reduce)
    head = _said_of_cells(ds, names, by, values, reduce, exact)
    mean = f"{name} over heads" if heads else exact
    return _table(ds, table, shown, head=head, bounds=names, reduce=reduce, mean=mean)
