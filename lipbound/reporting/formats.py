"""Output formats of tables and of paragraphs.

Another one is a `Formatter` in `FORMATTERS`, and its test.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from lipbound.errors import LipboundError
from lipbound.formatting import escape_markdown, plain, small
from lipbound.reporting.latex import latex_complement, latex_small, latex_table, typeset
from lipbound.reporting.layout import Table, folded, hanging, text_lines


@dataclass(frozen=True)
class Prose:
    """Functions with which a format writes a paragraph.

    Attributes:
        escape: foreign text, as text and not as markup.
        cite: a source, from its BibTeX key, first author and year.
        times: between a number of layers and a number of heads.
        number: a small positive number, such as a tolerance.
        complement: 1 - x, for a small x.
    """

    escape: Callable[[str], str]
    cite: Callable[[str, str, str], str]
    times: str
    number: Callable[[float], str]
    complement: Callable[[float], str]


@dataclass(frozen=True)
class Formatter:
    """An output format.

    Attributes:
        table: writes a table; None for a format that has none, or that has `fitted`.
        fitted: the same, in a width.
        prose: how it writes a methods paragraph; None for a format that has none.
        bibliography: puts a paragraph and BibTeX entries into one file; None for a format of the
            paragraph alone.
    """

    table: Callable[[Table], str] | None = None
    fitted: Callable[[Table, str | float | None], str] | None = None
    prose: Prose | None = None
    bibliography: Callable[[str, str], str] | None = None


def text_table(table: Table, width: str | float | None = None) -> str:
    """Write a table as plain text: caption, columns with spaces between them, notes.

    All is folded to ``width`` characters, where that is given.

    Raises:
        LipboundError: a width that is no positive number.
    """
    if width is not None and (isinstance(width, str) or not width >= 1):
        raise LipboundError(
            f"width is {width!r}; that of text is a number of characters, such as 80"
        )
    words, keys = tuple(map(plain, table.words)), tuple(map(plain, table.keys))
    shown = table.shown.map(plain).rename(columns=plain)
    plainly = replace(table, shown=shown, words=words, keys=keys)
    above = [plain(part) for part in (table.caption, table.head) if part]
    lines = [line for part in above for line in folded(part, width or math.inf)]
    lines += ["", *text_lines(plainly, width), *([""] if table.notes else [])]
    return "\n".join(lines + [line for note in table.notes for line in hanging(plain(note), width)])


def markdown_table(table: Table) -> str:
    """Write a table as Markdown, with its caption above and a line for every note below."""
    cells = table.shown.map(escape_markdown).rename(columns=escape_markdown)
    above = [_markdown_note(part) for part in (table.caption, table.head) if part]
    align = ["left" if title in table.words else "right" for title in table.shown.columns]
    body = str(cells.to_markdown(index=False, disable_numparse=True, colalign=align))
    notes = [f"{_markdown_note(note)}<br>" for note in [*table.remarks(), *table.notes]]
    return "\n".join([*(f"{part}\n" for part in above), body, "", *notes]).rstrip()


def csv_table(table: Table) -> str:
    """Full precision, without notes."""
    numbers = table.numbers.rename(columns=plain)
    if "label" in numbers:
        numbers = numbers.assign(label=numbers["label"].map(plain)).rename(index=plain)
    return str(numbers.to_csv())


def _markdown_note(text: str) -> str:
    r"""Write a note for Markdown, without links or HTML.

    ``_ | * ~ $``, which names and formulas hold, stay as they are.
    """
    return re.sub(r"\\([_|*~$])", r"\1", escape_markdown(text))


def commented(paragraph: str, entries: str) -> str:
    """Put BibTeX entries below a paragraph in a comment.

    BibTeX reads an entry after every @, comment or not, so these are escaped.
    """
    comment = paragraph.replace("@", "{\\char64}")
    return f"% {comment}\n\n{entries}"


def _author(key: str, author: str, year: str) -> str:
    return f"({author} {year})"


def _cite(key: str, author: str, year: str) -> str:
    return f"\\cite{{{key}}}"


TEXT = Prose(plain, _author, "x", small, lambda x: f"1 - {small(x)}")
LATEX = Prose(typeset, _cite, r"$\times$", latex_small, latex_complement)
FORMATTERS = {
    "text": Formatter(fitted=text_table, prose=TEXT),
    "markdown": Formatter(markdown_table),
    "latex": Formatter(fitted=latex_table, prose=LATEX),
    "csv": Formatter(csv_table),
    "bib": Formatter(prose=LATEX, bibliography=commented),
}
"""Every format by its name; `lipbound table` and `lipbound cite` have those that can write what
they print."""
