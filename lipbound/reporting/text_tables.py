r"""Tables before they have a format, the columns with room in a line; as text, Markdown, LaTeX.

Words fold, columns are left out in a stated order or go on below. Numbers stay whole. For LaTeX,
tables are as wide as a column or a page, with numbers by siunitx; formulas stand in mathematics,
foreign text as text.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from lipbound.errors import LipboundError, choice
from lipbound.formatting import escape_latex, escape_markdown, html_table, plain

if TYPE_CHECKING:
    import pandas as pd

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
        words: titles of columns of ``shown`` that hold words, which stand to the left.
        head: what the cells are.
        caption: what run this is.
        notes: lines below the table.
        keys: titles of the columns that say what a row is; they are repeated where columns go on
            below.
        spare: titles of columns that may be left out, the first one first. Without any, columns
            that do not fit go on below.
    """

    numbers: pd.DataFrame
    shown: pd.DataFrame
    words: tuple[str, ...]
    head: str
    caption: str
    notes: list[str]
    keys: tuple[str, ...]
    spare: tuple[str, ...] = ()

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
        return html_table(titles, cells, title=self.caption, notes=notes, words=self.words)


def fit(
    table: Table, widths: Mapping[str, float], room: float, *, gap: float, narrow: float
) -> tuple[list[dict[str, float]], list[str]]:
    """Choose the columns of a table that have room in a line.

    Args:
        table: says which columns are keys, and which are spare.
        widths: of its columns, by their titles.
        room: for a line.
        gap: between two columns.
        narrow: least width of the first column where it holds words, which then fold.

    Returns:
        Titles and widths of the columns of each block, blocks below one another; and the titles of
        the columns that have no place.
    """
    first, kept, left_out = next(iter(widths)), list(widths), list[str]()
    least = min(widths[first], narrow) if first in table.words else widths[first]

    def over(titles: Sequence[str]) -> float:
        return least + sum(gap + widths[title] for title in titles[1:]) - room

    for title in table.spare:
        if title in kept and over(kept) > 0:
            kept.remove(title)
            left_out.append(title)
    keys = [title for title in kept if title in table.keys]
    blocks = [kept] if table.spare or keys == kept else list[list[str]]()
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


def hanging(text: str, width: float, indent: str = "  ") -> list[str]:
    """A paragraph in lines, all but the first indented."""
    how: Any = {"subsequent_indent": indent, "break_on_hyphens": False}
    return textwrap.wrap(plain(text), int(width), **how) or [""]


def _block(table: Table, widths: Mapping[str, float]) -> list[str]:
    """Headings, a rule and rows of some columns: words to the left, numbers to the right."""
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title, wide in widths.items():
        said = Text("\n".join(heading(title, wide)))
        side: Any = "left" if title in table.words else "right"
        grid.add_column(said, justify=side, width=int(wide), overflow="fold")
    rule = ["-" * int(wide) for wide in widths.values()]
    for row in (rule, *table.shown[list(widths)].itertuples(index=False)):
        grid.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=ENDLESS)
    lines = console.render_lines(grid, pad=False)
    return ["".join(part.text for part in line).rstrip() for line in lines]


def markdown_table(table: Table) -> str:
    """Write a table as Markdown, with its caption above and a line for every note below."""
    rule = ["---" if title in table.words else "--:" for title in table.shown]
    cells = map(escape_markdown, [*table.shown, *rule, *table.shown.values.ravel()])
    rows = [f"| {' | '.join(row)} |" for row in zip(*[cells] * len(rule), strict=True)]
    above = [f"{_markdown_note(part)}\n" for part in (table.caption, table.head) if part]
    notes = [f"{_markdown_note(note)}<br>" for note in table.notes]
    return "\n".join([*above, *rows, "", *notes]).rstrip()


def _markdown_note(text: str) -> str:
    r"""Write a note for Markdown, without links or HTML.

    ``_ | * ~ $``, which names and formulas hold, stay as they are.
    """
    return re.sub(r"\\([_|*~$])", r"\1", escape_markdown(text))


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
_WORDS = {"inf": "$\\infty$", "n/a": "--", "to": "--"}
"""Words in cells of numbers."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FORMULA = re.compile(
    r"(\b[xh] ->(?: ?(?:softmax|layer|norm|k\^T|[xhqkv](?![a-z])|[()+]))+"  # a map
    r"|\|\|[A-Z]+(?:_[A-Z])?\|\|(?:_F)?(?:\^\d)?|sqrt\([A-Za-z0-9]\)|\b[A-Z]'(?!\w)"
    r"|\b[A-Z] = \d+\b|\b[A-Z]+\^T\b|(?<=layers )x(?= \d)"
    r"|(?<![\w.])(?:1 [+-] )?\d(?:\.\d+)?e-\d+\b|\blog10\b)"
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
    return "\\allowbreak{}".join(map(escape_latex, pieces))


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
        what = (
            f"it must be a number of points, at least {LEAST_POINTS}, or one of {', '.join(SIZES)}"
        )
        raise LipboundError(f"width is {width}; {what}")
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
    comments = ["\\usepackage{booktabs, siunitx}", fits, table.caption]
    if left_out:
        comments.append(f"no room for: {', '.join(left_out)}; --width page has more")
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
        words = title in table.words
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
        parts.append(_WORDS.get(token, known))
    return "".join(parts).replace(" -- ", "--")


def extent(text: str) -> float:
    """About how many points a text takes in Computer Modern at 10 pt, powers of ten set as such."""
    text = re.sub(r"(?<=\d)e(?=-?\d)", " x 10", text.replace(" \u2020", "\u2020"))
    return sum(3.7 if c in SLIM else 7.7 if c.isupper() or c in "mw+=<>" else 5.2 for c in text)
