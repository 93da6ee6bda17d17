"""Tables before they have a format, how they fit a width, and as text, Markdown and CSV.

Words fold, columns are left out in a stated order or go on below. Numbers stay whole.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from lipbound.errors import LipboundError
from lipbound.formatting import escape_markdown, html_table, plain

if TYPE_CHECKING:
    import pandas as pd

NARROW = 12
"""Characters that a column of words keeps at least; a longer word is broken there."""
LEAST = 15
"""Characters in a line that a table is folded to, or more."""


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
        meaning: what to say of columns that are there, by their titles.
    """

    numbers: pd.DataFrame
    shown: pd.DataFrame
    words: tuple[str, ...]
    head: str
    caption: str
    notes: list[str]
    keys: tuple[str, ...]
    spare: tuple[str, ...] = ()
    meaning: Mapping[str, str] = field(default_factory=dict)

    def remarks(self, left_out: Sequence[str] = ()) -> list[str]:
        """Sentences on columns that are there."""
        there = [title for title in self.shown.columns if title not in left_out]
        return [text for title, text in self.meaning.items() if title in there]

    def plain(self) -> Table:
        """The same table with cells and titles on one line, without control characters."""
        shown = self.shown.astype(str).map(plain).rename(columns=plain)
        words, keys = tuple(map(plain, self.words)), tuple(map(plain, self.keys))
        return replace(self, shown=shown, words=words, keys=keys)

    def data(self) -> dict[str, Any]:
        """Numbers in full precision as plain data.

        They stand in ``rows`` by column, with the run, the meaning of cells and ``notes``.
        """
        return {
            "run": self.caption,
            "cells": self.head,
            "rows": self.numbers.reset_index().to_dict("records"),
            "notes": self.notes,
        }

    def __repr__(self) -> str:
        return text_table(self)

    def _repr_html_(self) -> str:
        made = self.plain()
        return html_table(
            list(made.shown.columns),
            made.shown.values.tolist(),
            title=self.caption,
            notes=[self.head, *self.remarks(), *self.notes],
            words=made.words,
        )


def fit(
    table: Table,
    room: float,
    *,
    gap: float,
    narrow: float,
    optional: int,
    measure: Callable[[str], float] = cell_len,
) -> tuple[list[dict[str, float]], list[str]]:
    """Find widths of the columns of a table, and which of them are left out or go on below.

    Args:
        table: says which columns are keys, and which are spare.
        room: for a line.
        gap: between two columns.
        narrow: least width of the first column where it holds words, which then fold.
        optional: so many of the spare columns are left out before any word is folded.
        measure: of a text.

    Returns:
        Titles and widths of the columns of each block, blocks below one another; and the titles of
        the columns that have no place.
    """
    widths = {title: _width(table, title, narrow, measure) for title in table.shown.columns}
    first, least = next(iter(widths)), 0.0
    folds = first in table.words
    if folds:
        parts = (line for cell in table.shown[first] for line in folded(cell, narrow, measure))
        least = min(widths[first], max(map(measure, (*parts, *first.split()))))

    def lacking(titles: Sequence[str], *, folding: bool = True) -> float:
        spared = widths[first] - least if folding and folds else 0.0
        return sum(widths[title] + gap for title in titles) - gap - spared - room

    kept, left_out = list(widths), list[str]()
    for i, title in enumerate(table.spare):
        if lacking(kept, folding=i >= optional) <= 0:
            break
        if title in kept:
            kept.remove(title)
            left_out.append(title)
    blocks = [kept]
    if not table.spare:
        blocks, keys = [], [title for title in kept if title in table.keys]
        for title in (title for title in kept if title not in keys):
            if not blocks or (len(blocks[-1]) > len(keys) and lacking([*blocks[-1], title]) > 0):
                blocks.append(list(keys))
            blocks[-1].append(title)
    if folds:
        widths[first] -= min(widths[first] - least, max(0.0, lacking(kept, folding=False)))
    return [{title: widths[title] for title in block} for block in blocks], left_out


def _width(table: Table, title: str, narrow: float, measure: Callable[[str], float]) -> float:
    """Width of the cells of a column, and of its title, folded where it is longer."""
    widest = max(map(measure, table.shown[title]), default=0.0)
    if title in table.words:
        return max(widest, measure(title))
    longest = max(min(narrow, measure(word)) for word in unbroken(title))
    heading = max(longest, min(measure(title), 2 * narrow / 3))
    return max([widest, *map(measure, folded(title, max(heading, widest), measure))])


def folded(text: str, width: float, measure: Callable[[str], float] = cell_len) -> list[str]:
    r"""Break a text into lines between words; a word that is too long is broken anywhere.

    Marks stay with their word.

    >>> folded("Castin 3.5, mean field \u2020", 11)
    ['Castin 3.5,', 'mean', 'field \u2020']
    """
    lines: list[str] = []
    for word in unbroken(text):
        if lines and measure(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
            continue
        while len(word) > 1 and measure(word) > width:
            end = max((k for k in range(1, len(word)) if measure(word[:k]) <= width), default=1)
            lines.append(word[:end])
            word = word[end:]
        lines.append(word)
    return [line.replace("\xa0", " ") for line in lines]


def unbroken(text: str) -> list[str]:
    """Split a text into words, with their marks."""
    return text.replace(" \u2020", "\xa0\u2020").replace(" \u2021", "\xa0\u2021").split(" ")


def text_table(table: Table, width: str | float | None = None) -> str:
    """Write a table as plain text: caption, columns with spaces between them, notes.

    All is folded to ``width`` characters, where that is given.

    Raises:
        LipboundError: a width that is no number, or below `LEAST`.
    """
    if width is not None and (isinstance(width, str) or not width >= LEAST):
        raise LipboundError(
            f"width is {width!r}; that of text is a number of characters, at least {LEAST}"
        )
    table, (room, narrow) = table.plain(), (width, NARROW) if width else (math.inf, math.inf)
    blocks, left_out = fit(table, room, gap=2, narrow=narrow, optional=4)
    lines = [line for text in (table.caption, table.head) for line in hanging(text, width, "")]
    for block in blocks:
        lines += ["", *_block(table, {title: int(wide) for title, wide in block.items()})]
    none = [f"no room for: {', '.join(left_out)}"] if left_out else []
    gap = [""] if table.notes else []
    for text in [*table.remarks(left_out), *none, *gap, *table.notes]:
        lines += hanging(text, width)
    return "\n".join(lines)


def hanging(text: str, width: float | None, indent: str = "  ") -> list[str]:
    """A paragraph in lines, all but the first indented."""
    text = plain(text)
    lines = (
        textwrap.wrap(text, int(width), subsequent_indent=indent, break_on_hyphens=False)
        if width
        else [text]
    )
    return lines or [""]


def _block(table: Table, widths: Mapping[str, int]) -> list[str]:
    """Headings, a rule and rows of some columns: words to the left, numbers to the right."""
    rows, lines = [dict(zip(widths, widths, strict=True)), *table.shown.to_dict("records")], []
    for k, row in enumerate(rows):
        cells = {title: folded(row[title], wide) for title, wide in widths.items()}
        high = max(map(len, cells.values()))
        for i in range(high):
            line = []
            for title, parts in cells.items():
                at = i if k else i - high + len(parts)  # headings stand at the bottom
                cell = parts[at] if 0 <= at < len(parts) else ""
                blank = " " * (widths[title] - cell_len(cell))
                line.append(cell + blank if title in table.words else blank + cell)
            lines.append("  ".join(line).rstrip())
        if k == 0:
            lines.append("  ".join("-" * wide for wide in widths.values()))
    return lines


def markdown_table(table: Table) -> str:
    """Write a table as Markdown, with its caption above and a line for every note below."""
    cells = table.shown.map(escape_markdown).rename(columns=escape_markdown)
    above = [_markdown_note(part) for part in (table.caption, table.head) if part]
    align = ["left" if title in table.words else "right" for title in table.shown.columns]
    body = str(cells.to_markdown(index=False, disable_numparse=True, colalign=align))
    notes = [f"{_markdown_note(note)}<br>" for note in [*table.remarks(), *table.notes]]
    return "\n".join([*(f"{part}\n" for part in above), body, "", *notes]).rstrip()


def _markdown_note(text: str) -> str:
    r"""Write a note for Markdown, without links or HTML.

    ``_ | * ~ $``, which names and formulas hold, stay as they are.
    """
    return re.sub(r"\\([_|*~$])", r"\1", escape_markdown(text))


def csv_table(table: Table) -> str:
    """Full precision, without notes."""
    numbers = table.numbers.rename(columns=plain)
    if "label" in numbers:
        numbers = numbers.assign(label=numbers["label"].map(plain)).rename(index=plain)
    return str(numbers.to_csv())
