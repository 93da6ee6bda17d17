"""Tables before they have a format, the columns with room in a line; as text and Markdown.

Words fold, columns are left out in a stated order or go on below. Numbers stay whole.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from lipbound.errors import LipboundError
from lipbound.formatting import escape_markdown, html_table, plain

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
