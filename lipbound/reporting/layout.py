"""Tables before they have a format, and how they fit a width.

Words fold, columns are left out in a stated order or go on below. Numbers stay whole.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lipbound.formatting import html_table, plain

if TYPE_CHECKING:
    import pandas as pd

NARROW = 12
"""Characters that a column of words keeps at least; a longer word is broken there."""


@dataclass(frozen=True)
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
        instead: what to say in place of a column that is left out. meaning: what to say of a column
            that is there.
    """

    numbers: pd.DataFrame
    shown: pd.DataFrame
    words: tuple[str, ...]
    head: str
    caption: str
    notes: list[str]
    keys: tuple[str, ...]
    spare: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    meaning: Mapping[str, str] = field(default_factory=dict)

    def remarks(self, left_out: Sequence[str] = ()) -> list[str]:
        """Sentences on columns that are there, and in place of those that are left out."""
        there = [title for title in self.shown.columns if title not in left_out]
        said = [text for title, text in self.meaning.items() if title in there]
        return said + [self.instead[title] for title in left_out if self.instead.get(title)]

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

    def _repr_html_(self) -> str:
        return html_table(
            [plain(str(title)) for title in self.shown.columns],
            [[plain(str(cell)) for cell in row] for row in self.shown.values],
            title=self.caption,
            notes=[self.head, *self.remarks(), *self.notes],
            words=self.words,
        )


class ColumnWidths(NamedTuple):
    """Title of a column, its kind, the width that it takes, and the width to which it can fold."""

    title: str
    words: bool
    natural: float
    least: float


class Fitted(NamedTuple):
    """Columns of a table after fitting.

    Attributes:
        blocks: titles and widths of the columns of each block; blocks stand below one another.
        left_out: titles of the columns that have no place.
    """

    blocks: list[dict[str, float]]
    left_out: list[str]


def fit(
    table: Table,
    columns: Sequence[ColumnWidths],
    room: float | None,
    gap: float,
    *,
    optional: int = 0,
) -> Fitted:
    """Widths of the columns of a table, and which of them are left out or go on below.

    Args:
        table: says which columns are keys, and which are spare.
        columns: all of its columns, in their order.
        room: for a line; None for as much as it takes.
        gap: between two columns.
        optional: so many of the spare columns are left out before any word is folded.
    """

    def taken(some: Sequence[ColumnWidths], *, folded: bool = True) -> float:
        return sum(c.least if folded else c.natural for c in some) + gap * (len(some) - 1)

    if room is None:
        return Fitted([{c.title: c.natural for c in columns}], [])
    kept, left_out = list(columns), []
    for i, title in enumerate(table.spare):
        if taken(kept, folded=i >= optional) <= room:
            break
        if any(c.title == title for c in kept):
            left_out.append(title)
            kept = [c for c in kept if c.title != title]
    if table.spare or taken(kept) <= room:
        return Fitted([_shared_out(kept, room - taken(kept))], left_out)
    keys = [c for c in kept if c.title in table.keys]
    blocks, now = [], list(keys)
    for column in (c for c in kept if c.title not in table.keys):
        if len(now) > len(keys) and taken([*now, column]) > room:
            blocks.append(now)
            now = list(keys)
        now.append(column)
    return Fitted([_shared_out(block, room - taken(block)) for block in [*blocks, now]], left_out)


def _shared_out(columns: Sequence[ColumnWidths], spare: float) -> dict[str, float]:
    """The least widths, and what is left over to the first columns that can use it."""
    widths = {}
    for column in columns:
        more = min(max(spare, 0), column.natural - column.least)
        widths[column.title] = column.least + more
        spare -= more
    return widths


def cells(text: str) -> int:
    """Columns of a terminal that a text takes: two for wide characters, none for combining ones."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def folded(text: str, width: float, measure: Callable[[str], float] = cells) -> list[str]:
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
    return [line.replace("\xa0", " ") for line in lines] or [""]


def unbroken(text: str) -> list[str]:
    """Split a text into words, with their marks."""
    return text.replace(" \u2020", "\xa0\u2020").replace(" \u2021", "\xa0\u2021").split(" ")


def measured(
    table: Table,
    of: Callable[[str], float],
    narrow: float,
    *,
    numbers: Callable[[str], float] | None = None,
) -> list[ColumnWidths]:
    """Measure the columns of a table with a measure of text.

    ``numbers`` measures cells of numbers, where that is another.
    """
    found = []
    for title, values in table.shown.astype(str).items():
        title, words = str(title), title in table.words
        natural = max([of(title) if words else 0.0, *map(of if words else numbers or of, values)])
        least = natural
        if words:
            parts = (line for value in values for line in folded(value, narrow, of))
            least = max(map(of, parts), default=of(""))
        widest = max(min(narrow, of(word)) for word in unbroken(title))
        heading = max(widest, min(of(title), 2 * narrow / 3))
        if least < heading:
            least = max(least, *(of(line) for line in folded(title, heading, of)))
        found.append(ColumnWidths(title, words, max(natural, least), least))
    return found


def text_lines(table: Table, room: float | None) -> list[str]:
    """Lines of a plain-text table: blocks of columns under folded headings.

    Words stand to the left and numbers to the right; what was left out comes last.
    """
    columns = measured(table, cells, NARROW)
    if room is None:  # headings on one line
        columns = [one._replace(natural=max(one.natural, cells(one.title))) for one in columns]
    fitted = fit(table, columns, room, 2, optional=4)
    lines: list[str] = []
    for block in fitted.blocks:
        lines += [""] if lines else []
        lines += _block(table, {title: int(width) for title, width in block.items()})
    said = table.remarks(fitted.left_out)
    if fitted.left_out:
        said.append(f"no room for: {', '.join(fitted.left_out)}")
    return lines + [line for text in said for line in hanging(text, room)]


def hanging(text: str, room: float | None) -> list[str]:
    """A paragraph in lines, all but the first indented."""
    if room is None:
        return [text]
    first, *others = folded(text, room)
    return [first, *(f"  {line}" for line in folded(" ".join(others), room - 2) if others)]


def _block(table: Table, widths: Mapping[str, int]) -> list[str]:
    """Headings, a rule and rows of some columns."""

    def row(texts: Mapping[str, str], *, top: bool) -> list[str]:
        lines = {title: folded(texts[title], width) for title, width in widths.items()}
        return _row(lines, widths, table, top=top)

    lines = row({title: title for title in widths}, top=False)
    lines.append("  ".join("-" * width for width in widths.values()))
    for _, texts in table.shown.astype(str).iterrows():
        lines += row(dict(texts), top=True)
    return lines


def _row(
    lines: Mapping[str, list[str]], widths: Mapping[str, int], table: Table, *, top: bool
) -> list[str]:
    """Cells of several lines side by side, at the top or at the bottom of the row."""
    height, columns = max(map(len, lines.values())), []
    for title, width in widths.items():
        empty = [""] * (height - len(lines[title]))
        column = [*lines[title], *empty] if top else [*empty, *lines[title]]
        blanks = [" " * (width - cells(cell)) for cell in column]
        pairs = zip(column, blanks, strict=True)
        left = title in table.words
        columns.append([cell + blank if left else blank + cell for cell, blank in pairs])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
