r"""Tables of a run, its methods paragraph and its citations: what of it goes into a paper as text.

Tables have bound / exact per bound, per layer or per head, as text, Markdown, LaTeX or CSV. Where a
line has no room, words fold, columns are left out in a stated order or go on below; numbers stay
whole. For LaTeX, tables are as wide as a column or a page, with numbers by siunitx; formulas stand
in mathematics, foreign text as text.
"""

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from lipbound import formatting, schema
from lipbound.bounds.audit import audit
from lipbound.bounds.ours import CITATION
from lipbound.bounds.registry import bibliography, get
from lipbound.errors import LipboundError, choice, knows_options
from lipbound.formatting import digits, directed, enclosed, hanging, html_table, outwards, plain
from lipbound.reporting import labels as texts
from lipbound.reporting import statistics
from lipbound.reporting.labels import diff_notes, diff_words, footnotes, left_out, opened, ratio_run
from lipbound.reporting.labels import run_caption as caption
from lipbound.reporting.statistics import BY, LIKELY, RANGE, breakdown, panels, ratio, summary
from lipbound.runs.checksums import edited
from lipbound.runs.store import Run, both_runs, run_of, takes_run

__all__ = ["BY", "FORMATS", "Table", "bibtex", "breakdown", "caption", "footnotes", "latex"]
__all__ += ["left_out", "methods", "panels", "ratio", "readable", "render", "summary", "table_of"]


def __dir__() -> list[str]:
    return __all__


# -- a table before it has a format, and as text, Markdown and HTML --------------------------------


NARROW, SHORT = 13, 8
"""Characters that a column of words keeps at least, where a longer word is broken; and those of a
line of a heading, or more."""
LEAST, ENDLESS = 15, 100_000
"""Characters in a line that a table is folded to, or more; and of one that is long enough."""


@dataclass(frozen=True, repr=False)
class Table:
    """A table of a run. Cells, titles and notes may hold foreign text.

    Attributes:
        numbers: in full precision; the index says the bound, the layer, or the layer and the head.
        shown: the same as text, to the digits that are known.
        head: what the cells are.
        caption: what run this is.
        notes: lines below the table.
    """

    numbers: pd.DataFrame
    shown: pd.DataFrame
    head: str
    caption: str
    notes: list[str]

    def data(self) -> dict[str, Any]:
        """Numbers in full precision as plain data.

        They stand in ``rows`` by column, with the run, the meaning of cells and ``notes``.
        """
        rows = self.numbers.reset_index().to_dict("records")
        return {"run": self.caption, "cells": self.head, "rows": rows, "notes": self.notes}

    def __repr__(self) -> str:
        return text_table(self)

    def _repr_html_(self) -> str:
        titles, cells = list(self.shown.columns), self.shown.values.tolist()
        notes = [self.head, *self.notes]
        return html_table(titles, cells, title=self.caption, notes=notes, words=WORDS)


def fit(
    table: Table, widths: Mapping[str, float], room: float, *, gap: float, narrow: float
) -> tuple[list[dict[str, float]], list[str]]:
    """Choose the columns of a table that have room in a line.

    Of a table by bound, `SPARE_COLUMNS` may be left out; of one by place, columns that do not fit
    go on below, where those that say what a row is are repeated.

    Args:
        table: any.
        widths: of its columns, by their titles.
        room: for a line.
        gap: between two columns.
        narrow: least width of the first column where it holds words, which then fold.

    Returns:
        Titles and widths of the columns of each block, blocks below one another; and the titles of
        the columns that have no place.
    """
    first, kept, left_out = next(iter(widths)), list(widths), list[str]()
    least = min(widths[first], narrow) if first in WORDS else widths[first]
    keys = [str(title) for title in table.numbers.index.names]
    spare = () if "layer" in keys else SPARE_COLUMNS

    def over(titles: Sequence[str]) -> float:
        return least + sum(gap + widths[title] for title in titles[1:]) - room

    for title in spare:
        if title in kept and over(kept) > 0:
            kept.remove(title)
            left_out.append(title)
    blocks = [kept] if spare or keys == kept else list[list[str]]()
    for title in () if blocks else kept[len(keys) :]:
        if not blocks or (len(blocks[-1]) > len(keys) and over([*blocks[-1], title]) > 0):
            blocks.append(list(keys))
        blocks[-1].append(title)
    fitted = {**widths, first: max(least, min(widths[first], least - over(kept)))}
    return [{title: fitted[title] for title in block} for block in blocks], left_out


def heading(title: str, width: float) -> list[str]:
    """Break the title of a column into lines, of its cells' width or that of a short word."""
    longest = max(map(len, title.split()), default=0)
    wide = max(int(width), SHORT, min(NARROW, longest))
    return wrapped(title, wide)


def wrapped(text: str, letters: int) -> list[str]:
    """Break a text into lines of so many letters; the audit's marks stay with their word."""
    lines = textwrap.wrap(re.sub(" ([\u2020\u2021])", "\xa0\\1", text), letters)
    return [line.replace("\xa0", " ") for line in lines] or [""]


def text_table(table: Table, width: str | float | None = None) -> str:
    """Write a table as plain text: caption, columns with spaces between them, notes.

    All is folded to ``width`` characters, where that is given.

    Raises:
        LipboundError: a width that is no number, or below `LEAST`.
    """
    if width is not None and (isinstance(width, str) or not width >= LEAST):
        raise LipboundError(f"width is {width!r}; give a number of characters, at least {LEAST}")
    room = int(width) if width and width < ENDLESS else ENDLESS
    widths = {}
    for title in table.shown.columns:
        cells = max(map(cell_len, table.shown[title]), default=0)
        widths[title] = max(cells, *map(cell_len, heading(title, cells) if width else [title]))
    blocks, left_out = fit(table, widths, room, gap=2, narrow=NARROW)
    none = [f"no room for: {', '.join(left_out)}"] if left_out else []
    lines = [line for text in (table.caption, table.head) for line in hanging(text, room, "")]
    lines += [line for block in blocks for line in ("", *_block(table, block))]
    for text in [*none, *([""] if table.notes else []), *table.notes]:
        lines += hanging(text, room)
    return "\n".join(lines)


def _block(table: Table, widths: Mapping[str, float]) -> list[str]:
    """Headings, a rule and rows of some columns: words to the left, numbers to the right."""
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for title, wide in widths.items():
        said = Text("\n".join(heading(title, wide)))
        side: Any = "left" if title in WORDS else "right"
        grid.add_column(said, justify=side, width=int(wide), overflow="fold")
    rule = ["-" * int(wide) for wide in widths.values()]
    for row in (rule, *table.shown[list(widths)].itertuples(index=False)):
        grid.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=ENDLESS)
    lines = console.render_lines(grid, pad=False)
    return ["".join(part.text for part in line).rstrip() for line in lines]


def markdown_table(table: Table) -> str:
    """Write a table as Markdown, with its caption above and a line for every note below."""
    rule = ["---" if title in WORDS else "--:" for title in table.shown]
    cells = map(formatting.escape_markdown, [*table.shown, *rule, *table.shown.values.ravel()])
    rows = [f"| {' | '.join(row)} |" for row in zip(*[cells] * len(rule), strict=True)]
    above = [f"{_markdown_note(part)}\n" for part in (table.caption, table.head) if part]
    notes = [f"{_markdown_note(note)}<br>" for note in table.notes]
    return "\n".join([*above, *rows, "", *notes]).rstrip()


def _markdown_note(text: str) -> str:
    r"""Write a note for Markdown, without links or HTML.

    ``_ | * ~ $``, which names and formulas hold, stay as they are.
    """
    return re.sub(r"\\([_|*~$])", r"\1", formatting.escape_markdown(text))


# -- LaTeX -----------------------------------------------------------------------------------------


SIZES = {"column": (215.0, 8, 40), "page": (345.0, 8, 40), "slide": (307.0, 9, 14)}
r"""Points for a table's width and its type, and its rows before it is split.

"column" is one of the narrowest classes that are common (219 pt; ``article`` with ``twocolumn`` on
A4 has 221 pt), "page" the text of ``article`` at 10 pt, "slide" a frame of ``beamer``. The type is
that of \footnotesize there, and the same in a class of larger type, where the table would not fit
otherwise."""
LEAST_POINTS = 120
"""Points that the narrowest table takes: a column of words beside one of numbers."""
NARROW_POINTS, GAP, NOTES = 62.0, 8.0, 7.0
"""Points at 10 pt that a column of words keeps at least, points between two columns, and the type
of notes."""
MARKS = {"\u2021": "$^\\ddagger$", "\u2020": "$^\\dagger$"}
"""The audit's marks."""
CELL_WORDS = {"inf": "$\\infty$", "n/a": "--", "to": "--"}
"""Words in cells of numbers."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FORMULA = re.compile(
    r"(\b[xh] ->(?: ?(?:softmax|layer|norm|k\^T|[xhqkv](?![a-z])|[()+]))+"  # a map
    r"|\|\|[A-Z]+(?:_[A-Z])?\|\|(?:_F)?(?:\^\d)?|sqrt\([A-Za-z0-9]\)|\b[A-Z]'(?!\w)"
    r"|\b[A-Z] = \d+\b|\b[A-Z]+\^T\b|(?<![\w./-])(?:W_[A-Z] )?W_[A-Z](?:\^T)?(?!\w)"
    r"|(?<=layers )x(?= \d)|(?<![\w.])(?:1 [+-] )?\d(?:\.\d+)?e-\d+\b|\blog10\b)"
)
"""Mathematics that our statements, labels and descriptions write as plain text."""
SYMBOLS = {"x": "\\times", "log10": "\\log_{10}"}
HASH = re.compile(r"\b([0-9a-f]{16})[0-9a-f]{16,}\b")
_LONG = 22
"""Characters of a word from which on it may be broken."""
SLIM = "fijlrst.,:;'|!()[]- "
"""Characters that are narrow in Computer Modern."""


def typeset(text: str) -> str:
    r"""Typeset text for LaTeX, with formulas of ours in mathematics and foreign text as text.

    Hashes are cut to their first 16 digits; long names get places to break them.

    >>> typeset("x -> softmax(q k^T) v, up to 2 ||W_V|| of 50 %")
    '$x \\to \\mathrm{softmax}(q k^{T}) v$, up to 2 $\\|W_V\\|$ of 50 \\%'
    >>> typeset("norms of W_Q W_K^T and of W_V W_O, not of my/W_K")
    'norms of $W_Q W_K^{T}$ and of $W_V W_O$, not of my/W\\_K'
    """
    parts = FORMULA.split(HASH.sub(r"\1", plain(text)))
    parts[::2] = map(_words, parts[::2])
    parts[1::2] = (f"${_formula(part)}$" for part in parts[1::2])
    return "".join(parts)


def _words(text: str) -> str:
    """Foreign text without formulas, long words breakable, marks raised."""
    text = "".join(map(_breakable, re.split(r"( +)", text)))
    # before a sentence, not behind a word
    text = re.sub(rf"(?<=\. )({'|'.join(MARKS)})", lambda sign: MARKS[sign[0]], text)
    for sign, command in MARKS.items():
        text = text.replace(f" {sign}", command).replace(sign, command)
    return text


def _breakable(word: str) -> str:
    """A word, with places to break a long one: behind punctuation, or after twelve letters."""
    pieces = re.findall(r"[^/._:-]{1,12}[/._:-]*|[/._:-]+", word) if len(word) > _LONG else [word]
    return "\\allowbreak{}".join(map(formatting.escape_latex, pieces))


def _formula(text: str) -> str:
    """One of `FORMULA`, as mathematics."""
    if power := re.fullmatch(r"(1 [+-] )?(.*)e-(\d+)", text):
        factor = "" if power[2] == "1" else f"{power[2]} \\times "
        return f"{power[1] or ''}{factor}10^{{-{power[3]}}}"
    if text in SYMBOLS:
        return SYMBOLS[text]
    text = text.replace("->", "\\to").replace("||", "\\|").replace("^T", "^{T}")
    text = re.sub(r"sqrt\((\w)\)", r"\\sqrt{\1}", text)
    return re.sub(r"softmax|layer|norm", lambda word: f"\\mathrm{{{word[0]}}}", text)


def latex_table(table: Table, width: str | float | None = None) -> str:
    """Tabulars and notes, for a table environment or for running text.

    Args:
        table: to write.
        width: "column" (the default), "page" or "slide", or points; see `SIZES`.

    Raises:
        UnknownNameError: another name of a width.
        LipboundError: a width below 120 points.
    """
    width = "column" if width is None else width
    named = isinstance(width, str)
    room, points, rows = SIZES[choice("width", width, SIZES)] if named else (float(width), 8, 40)
    if not room >= LEAST_POINTS:
        what = f"width is {width}; it must be a number of points, at least {LEAST_POINTS}"
        raise LipboundError(f"{what}, or one of {', '.join(SIZES)}")
    size = points / 10 * 1.07  # small type is wider

    table = replace(table, shown=table.shown.drop(columns="name", errors="ignore"))
    widths = {
        title: size * max(map(extent, [*table.shown[title], *title_lines(table, title)]))
        for title in table.shown.columns
    }
    blocks, left_out = fit(table, widths, room, gap=GAP, narrow=size * NARROW_POINTS)
    bodies = [
        _tabular(replace(table, shown=table.shown.iloc[k : k + rows]), block, widths)
        for k in range(0, max(1, len(table.shown)), rows)
        for block in blocks
    ]
    fits = f"at most {room:g} pt wide; for a table environment, or running text"
    none = [f"no room for: {', '.join(left_out)}; --width page has more"] if left_out else []
    comments = ["\\usepackage{booktabs, siunitx}", fits, table.caption, *none]
    said = filter(None, [table.head, *table.notes])
    notes = [*(f"{one[0].upper()}{one[1:]}" for one in said), table.caption]
    lines = [  # no group in braces: a frame of beamer would take it for its subtitle
        *(f"% {plain(line)}" for line in comments),
        f"\\begingroup{_type(points)}\\setlength{{\\tabcolsep}}{{4pt}}%",
        "\n\n\\smallskip\n".join(bodies),
        "",
        f"\\smallskip{_type(NOTES)}\\raggedright\\noindent",
        # one paragraph: long notes must fit below a table in a column
        *(f"{typeset(note)}." for note in notes),
        "\\par\\endgroup",
    ]
    return "\n".join(lines) + "\n"


def _type(size: float) -> str:
    return f"\\fontsize{{{size:g}}}{{{1.2 * size:g}}}\\selectfont"


def title_lines(table: Table, title: str) -> list[str]:
    """A heading in lines; the first column's, which itself may fold, in one."""
    first = title == table.shown.columns[0]
    return [title] if first else heading(title, max(map(len, table.shown[title]), default=0))


def _tabular(table: Table, widths: Mapping[str, float], natural: Mapping[str, float]) -> str:
    """Tabular of some columns and rows of a table; columns of words fold to their fitted width."""
    shown, kinds, headings = table.shown[list(widths)].copy(), [], []
    for title, width in widths.items():
        words = title in WORDS
        lines, kind = list(map(typeset, title_lines(table, title))), "rl"[words]
        stacked = "\\\\".join(lines)
        headings.append(stacked if len(lines) == 1 else f"\\shortstack[{kind}]{{{stacked}}}")
        if width < natural[title]:
            kind = f">{{\\raggedright\\arraybackslash\\hangindent=0.8em}}p{{{width:.1f}pt}}"
        kinds.append(kind)
        shown[title] = shown[title].map(typeset if words else _numbers)
    style = shown.set_axis(headings, axis=1).style.hide(axis="index")
    text = style.to_latex(column_format=f"@{{}}{''.join(kinds)}@{{}}", hrules=True)
    return f"\\noindent{text.replace('{tabular}', '{tabular}[b]', 1).rstrip()}\\par"


def _numbers(text: str) -> str:
    """A cell of numbers, by siunitx."""
    parts = []
    for token in re.split("([ /])", text):
        known = f"\\num{{{token.replace(',', '')}}}" if NUMBER.fullmatch(token) else typeset(token)
        parts.append(CELL_WORDS.get(token, known))
    return "".join(parts).replace(" -- ", "--")


def extent(text: str) -> float:
    """About how many points a text takes in Computer Modern at 10 pt, powers of ten set as such."""
    text = re.sub(r"(?<=\d)e(?=-?\d)", " x 10", text.replace(" \u2020", "\u2020"))
    return sum(3.7 if c in SLIM else 7.7 if c.isupper() or c in "mw+=<>" else 5.2 for c in text)


# -- tables of a run -------------------------------------------------------------------------------


WRITERS: dict[str, Callable[..., str]] = {"text": text_table, "markdown": markdown_table}
WRITERS |= {"latex": latex_table, "csv": lambda table: str(table.numbers.to_csv())}
FORMATS, FITTED = tuple(WRITERS), ("text", "latex")
"""Formats by name, and those of them that are written in a width."""
MEAN, NO_SPREAD = "geom. mean", "one sample: no interval over samples"
HOLDS, BELOW = "assumptions hold", "below exact"
WORDS = ("bound", "norm", "name", HOLDS)
"""Columns of words."""
SPARE_COLUMNS = ("max", "min", RANGE, LIKELY, "name", HOLDS, BELOW)
"""Columns of a table by bound that are left out where there is no room, the first one first; of the
two on samples the second one is left."""
Names = list[str] | None
"""Names of bounds; None for all."""
RATIO_TOLD = "told"
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

    Where a line has no room, a table by bound lacks columns, in the order of `SPARE_COLUMNS`, as it
    says, and words fold; a table by layer or head goes on below. Numbers stay whole.

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
    if not schema.is_diff(given):
        run = texts.relabelled(run_of(given), labels)
        chosen = None if bounds is None else statistics.present(run, bounds)
        if by == "bound":
            return _by_bound(run, chosen)
        return _by_place(run, by, chosen, reduce, values)
    told = diff_words(given, labels), diff_notes(given, labels)
    run = ratio_run(given, labels).assign_attrs({RATIO_TOLD: told})
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
    samples = int(schema.with_exact(ds).sum())
    known = ds.attrs.get(RATIO_TOLD)
    said, notes = known or (caption(ds), [*extra_notes(ds), *footnotes(ds, bounds)])
    spread = [f"{RANGE}: smallest to largest {mean} of a single sample"]
    if samples <= 1:
        shown, spread = shown.drop(columns=[RANGE, LIKELY]), [NO_SPREAD] * samples
    elif statistics.spread_title(samples, reduce) == RANGE:
        shown = shown.drop(columns=LIKELY)
    else:
        spread.insert(0, f"{LIKELY}: Student's t over {samples} samples, on logarithms")
    shown = shown.map(plain).rename(columns=plain)
    return Table(numbers, shown, head, said, [*spread, *notes])


def _by_bound(ds: xr.Dataset, chosen: Names) -> Table:
    """`summary`, ready to be written; of no bounds, what the exact norms are."""
    counts, names = audit(ds), schema.bounds_there(ds) if chosen is None else chosen
    if not names:
        norms = statistics.extras(ds) if schema.of_weights_alone(ds) else ["exact"]
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
    what = "numbers of weights" if schema.of_weights_alone(ds) else "exact norm"
    head = f"{'exact norms and their ratio' if RATIO_TOLD in ds.attrs else what}{texts.over(ds)}"
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
    for name in schema.extras_there(ds):
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


def _by_place(ds: xr.Dataset, by: str, chosen: Names, reduce: str | float, values: str) -> Table:
    """`breakdown`, ready to be written."""
    table = breakdown(ds, by, bounds=chosen, reduce=reduce, values=values)
    counts, names = audit(ds), statistics.present(ds, chosen)
    ends = (statistics.cells(ds, by, names, reduce, values, end) for end in (0, 1))
    low, high = (end[end.index.isin(table.index)] for end in ends)
    column = {name: list(map(enclosed, low[name], high[name])) for name in table.columns}
    exact = statistics.label_of(ds, "exact") if RATIO_TOLD in ds.attrs else "exact norm"
    norms = {exact.removesuffix(" norm"): column["exact"]} | _spread_columns(low, high, "exact")
    if schema.of_weights_alone(ds):
        del norms["exact"]
        exact = ""
    shown = table.index.to_frame().astype(str).assign(**norms)
    others = {name: texts.extra_title(ds, name) for name in statistics.extras(ds)}
    shown = shown.assign(**{title: column[name] for name, title in others.items()})
    labels = [*shown, *(statistics.label_of(ds, name) for name in names)]
    for name in names:
        label = statistics.label_of(ds, name)
        title = f"{label} ({name})" if labels.count(label) > 1 else label
        shown[title + texts.mark(counts[name])] = column[name]
    heads, name = by == "layer" and "head" in ds.dims, statistics.reduction_name(reduce)
    mean = f"{name} over heads" if heads else exact
    what = ("bound / exact" if values == "ratio" else "bound") if names else ""
    axes = ("sample",) if by == "head" else ("sample", "head")
    means = texts.over(ds, axes, exact=values == "ratio")
    own = statistics.usual(reduce) if means else {}
    alike = (title for name, title in others.items() if name not in own)
    head = ", ".join(filter(None, (exact, *alike, what)))
    if means:
        apart = [
            f"{statistics.reduction_name(own[k])} of the {others[k]}" for k in others if k in own
        ]
        head = "; ".join([f"{name}{means}: {head}", *apart])
    there = schema.Contents.of(ds)
    if there.norms and there.exact_samples != there.samples:
        bounded = "" if values == "ratio" else f", bounds of all {there.samples}"
        head += f"; exact norms are of {formatting.counted(there.exact_samples, 'sample')}{bounded}"
    return _table(ds, table, shown, head=head, bounds=names, reduce=reduce, mean=mean)


# -- citations, and a paragraph on how the numbers were made ---------------------------------------


COMMANDS = {"latex": "cite", "natbib": "citep"}
"""Commands of LaTeX that cite, by format."""
WITHIN = {"latex": "cite", "natbib": "citealp"}
"""The same in parentheses that say more."""
PARAGRAPH_FORMATS = (*COMMANDS, "text")
CITATION_FORMATS = ("bib", *PARAGRAPH_FORMATS)

_OTHERS = Path(__file__).with_name("sources.bib").read_text(encoding="utf-8").strip().split("\n\n")
EXTRA_SOURCES = {one.partition("{")[2].partition(",")[0]: one for one in _OTHERS}
"""BibTeX entries of what no bound, but an extra, comes from, by key."""


def citation_keys(ds: xr.Dataset) -> list[str]:
    """BibTeX keys of every source of a run's bounds and extras, and of lipbound."""
    # from the registry: a run's own key could be any text, without an entry
    known = [get(name).citation for name in schema.bounds_there(ds)]
    return list(dict.fromkeys([*known, *_extra_keys(ds), CITATION]))


def _extra_keys(ds: xr.Dataset) -> list[str]:
    """BibTeX keys of every source of a run's extras."""
    said = " ".join(ds[name].attrs.get("source", "") for name in statistics.extras(ds))
    return [key for key in bibliography() | EXTRA_SOURCES if _cited(key)[1:-1] in said]


@takes_run
def bibtex(ds: xr.Dataset) -> str:
    """BibTeX entries of every source of a run's bounds and extras, and of lipbound."""
    entries = bibliography() | EXTRA_SOURCES
    return "\n\n".join(entries[key] for key in citation_keys(ds)) + "\n"


@takes_run
def cite(ds: xr.Dataset, format: str = "bib", *, labels: Mapping[str, str] | None = None) -> str:
    """Text to put into a paper: citations and a methods paragraph.

    "bib" gives the entries with the `methods` paragraph in comments; "latex", "natbib" and "text"
    give the paragraph alone.

    Args:
        ds: a run. format: of what is written.
        labels: what to call bounds, by name, and "model" and "data".

    Raises:
        UnknownNameError: another format, a label for what the run has not.
    """
    if choice("format", format, CITATION_FORMATS) != "bib":
        return f"{methods(ds, format, labels=labels)}\n"
    # BibTeX reads an entry after every @, comment or not
    comment = methods(ds, labels=labels).replace("@", "{\\char64}")
    return f"% {comment}\n\n{bibtex(ds)}"


@takes_run
def methods(
    ds: xr.Dataset, format: str = "latex", *, labels: Mapping[str, str] | None = None
) -> str:
    r"""Write one paragraph for a methods section from the run's own settings.

    It says what was computed, by which method, how surely, from which model and data, with which
    software.

    Args:
        ds: a run.
        format: "latex" (foreign text escaped, ``\cite`` with the keys of `bibtex`), "natbib" (the
            same with ``\citep``) or "text" (author and year).
        labels: as in `cite`.

    Raises:
        UnknownNameError: another format, a label for what the run has not.
    """
    import jinja2  # tables start without it

    choice("format", format, PARAGRAPH_FORMATS)
    ds = texts.relabelled(ds, labels)
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = Path(__file__).with_name("methods.txt").read_text(encoding="utf-8")
    rendered = environment.from_string(template).render(_facts(ds))
    text = plain(" ".join(filter(None, map(str.strip, rendered.splitlines()))))
    if format == "text":
        return text
    text = typeset(text)
    for key in citation_keys(ds):
        text = text.replace(_cited(key), f"\\{COMMANDS[format]}{{{key}}}")
    for key in _extra_keys(ds):  # in parentheses with more
        text = text.replace(_cited(key)[1:-1], f"\\{WITHIN[format]}{{{key}}}")
    return text


def _facts(ds: xr.Dataset) -> dict[str, Any]:
    """Return the values that the template of `methods` is filled with, by name."""
    names, audited = schema.bounds_there(ds), audit(ds)
    norm, _, meaning = texts.norm_words(ds).partition(" ")
    variants, sources = ds.attrs.get("variants"), dict[str, list[str]]()
    if variants:
        from lipbound.attention.variants import titles  # it needs torch

        variants = titles(variants)
    for name in names:
        label = f"{ds[name].attrs['label']} [{ds[name].attrs['source']}]"
        sources.setdefault(_cited(get(name).citation), []).append(label)
    across = ds["kind"] == "cross" if "kind" in ds.coords else ds["layer"].isnull()
    return {
        "ds": ds,
        "run": schema.RunInfo.of(ds),
        "there": schema.Contents.of(ds),
        "said": texts,
        "norm": norm,
        "meaning": meaning,
        "software": _cited(CITATION),
        "variants": variants,
        "crossing": int(across.sum()),
        "bounds": names,
        "reaching": [name for name in names if bool(ds[name].where(across).notnull().any())],
        "edited": edited(ds),
        "weights": schema.of_weights_alone(ds),
        "automatic": bool(schema.automatic(ds).any()),
        "sources": sources,
        "labels": lambda names: [str(ds[name].attrs["label"]) for name in names],
        "audited": audited,
        "failing": [k for k, entry in audited.items() if texts.mark(entry) == " \u2020"],
        "left_out": [get(name).label for name in ds.attrs.get("not_applicable") or ()],
        "others": [name for name in names if schema.compared_with(ds, name) != "exact"],
        "extras": [_extra(ds, name) for name in statistics.extras(ds)],
        "environments": dict.fromkeys(map(_environment, schema.origins(ds))),
        "state": texts.state_words(ds),
    }


def _extra(ds: xr.Dataset, name: str) -> str:
    """The name of an extra, where it comes from, and how accurate it is."""
    error = f" to a relative error of {formatting.small(statistics.EXTRA_WIDTHS[name] / 2)}"
    error *= not (edited(ds) or name in schema.OF_HEADS)
    lost = ", infinite where rounding hides whether the smallest singular value is zero"
    infinite = lost * (name == schema.EXTRAS["condition"] and bool(np.isinf(ds[name]).any()))
    known = f" ({some})" if (some := texts.extra_known(ds, name)) else ""
    source = f" ({ds[name].attrs['source']})" if "source" in ds[name].attrs else ""
    return f"the {texts.extra_title(ds, name)}{source}{error}{infinite}{known}"


def _environment(run: Mapping[str, Any]) -> str:
    """Device, versions and date of a run."""
    known = [name for name in ("torch", "transformers") if name in run["versions"]]
    versions = [*(f"{name} {run['versions'][name]}" for name in known), f"Python {run['python']}"]
    return f"on {run['device']} with {', '.join(versions)}, on {run['date'][:10]}"


def _cited(key: str) -> str:
    """A source in running text: its authors, or the first of more than two, and year."""
    entry = (bibliography() | EXTRA_SOURCES)[key]
    authors = re.search(r"author\s*=\s*\{+(.*?)\}+,\n", entry, re.DOTALL)
    year = re.search(r"year\s*=\s*\{?(\d{4})", entry)
    names = [one.split(",")[0].strip() for one in (authors[1] if authors else key).split(" and ")]
    first = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
    return f"({first} {year[1] if year else ''})"
