"""Output formats: what each makes of a table and of a paragraph. Another one is a `Formatter` in `FORMATTERS`, and its test."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from lipbound.formatting import escape_latex, escape_markdown, plain


@dataclass(frozen=True)
class Table:
    """A table of a run, before it has a format. Cells, titles and notes may hold foreign text.

    Attributes:
        numbers: in full precision; the index says the bound, the layer, or the layer and the head.
        shown: the same as text, to the digits that are known.
        words: titles of columns of ``shown`` that hold words, which stand to the left.
        head: what the cells are, where the titles do not say it; else empty.
        caption: what run this is.
        notes: lines below the table.
    """

    numbers: pd.DataFrame
    shown: pd.DataFrame
    words: tuple[str, ...]
    head: str
    caption: str
    notes: list[str]


@dataclass(frozen=True)
class Prose:
    """How a paragraph is written.

    Attributes:
        escape: foreign text, as text and not as markup.
        cite: a source, from its BibTeX key, first author and year.
        times: between a number of layers and a number of heads.
        complement: 1 - x, for a small x.
    """

    escape: Callable[[str], str]
    cite: Callable[[str, str, str], str]
    times: str
    complement: Callable[[float], str]


@dataclass(frozen=True)
class Formatter:
    """An output format.

    Attributes:
        table: writes a table; None for a format that has none.
        prose: how it writes a methods paragraph; None for a format that has none.
        bibliography: puts a paragraph and BibTeX entries into one file; None for a format of the paragraph alone.
    """

    table: Callable[[Table], str] | None = None
    prose: Prose | None = None
    bibliography: Callable[[str, str], str] | None = None


def text_table(table: Table) -> str:
    """Columns with spaces between them, for a terminal."""
    text = str(table.shown.map(plain).rename(columns=plain).to_markdown(index=False, disable_numparse=True, tablefmt="simple"))
    return "\n".join([*filter(None, [table.head]), text, *map(plain, table.notes)])


def markdown_table(table: Table) -> str:
    """A Markdown table; every note ends its line."""
    cells = table.shown.map(escape_markdown).rename(columns=escape_markdown)
    lines = [table.head, ""] if table.head else []
    notes = [f"{_markdown_note(note)}<br>" for note in table.notes]
    return "\n".join([*lines, str(cells.to_markdown(index=False, disable_numparse=True)), "", *notes]).rstrip()


def csv_table(table: Table) -> str:
    """Full precision, without notes."""
    numbers = table.numbers.rename(columns=plain)
    if "label" in numbers:
        numbers = numbers.assign(label=numbers["label"].map(plain)).rename(index=plain)
    return str(numbers.to_csv())


def latex_table(table: Table) -> str:
    """A tabular with the run in comments above it: columns of words, and columns of numbers that siunitx aligns, where all of a column is numbers."""
    cells, formats = pd.DataFrame(index=table.shown.index), []
    for title in table.shown.columns:
        column = [str(x).replace(",", "") for x in table.shown[title]]
        parsed = [re.fullmatch(r"(\d+)(?:\.(\d+))?(?:e(-?)(\d+))?", x) for x in column]
        if any(parsed) and all(p or x in ("inf", "n/a") for p, x in zip(parsed, column, strict=True)):
            cells[title] = ["{$\\infty$}" if x == "inf" else "{--}" if x == "n/a" else x for x in column]
            formats.append(_number_column([p for p in parsed if p]))
        else:
            cells[title] = [_latex_marked(x) for x in table.shown[title]]
            formats.append("l" if title in table.words else "r")
    headers = [_latex_marked(str(title)) for title in table.shown.columns]
    cells.columns = pd.Index(headers)
    styler = cells.reset_index(drop=True).style.hide(axis="index")
    text = str(styler.to_latex(hrules=True, siunitx=True, column_format="".join(formats)))
    comments = ["\\usepackage{booktabs, siunitx}", *filter(None, [table.head]), table.caption, *table.notes]
    return "".join(f"% {plain(line)}\n" for line in comments) + text


def _markdown_note(text: str) -> str:
    r"""A note for Markdown, without links or HTML; ``_ | * ~ $``, which names and formulas hold, stay as they are."""
    return re.sub(r"\\([_|*~$])", r"\1", escape_markdown(text))


def _number_column(numbers: list[re.Match[str]]) -> str:
    """What siunitx reserves for a column."""
    whole = max(len(m[1]) for m in numbers)
    decimals = max(len(m[2] or "") for m in numbers)
    exponent = max(len(m[4] or "") for m in numbers)
    sign = "-" if any(m[3] for m in numbers) else ""
    return f"S[table-format={whole}.{decimals}{f'e{sign}{exponent}' if exponent else ''}]"


LATEX_SIGNS = {"\u2021": "$^\\ddagger$", "\u2020": "$^\\dagger$"}
"""The audit's marks."""


def _latex_marked(text: str) -> str:
    """Foreign text with the audit's marks, for LaTeX."""
    text = escape_latex(text)
    for sign, command in LATEX_SIGNS.items():
        text = text.replace(f" {sign}", command)
    return text


def _latex_complement(x: float) -> str:
    """1 - x, with x as a power of ten where it is small."""
    text = f"{x:g}"
    if match := re.fullmatch(r"(.+)e-0*(\d+)", text):
        factor = "" if match[1] == "1" else f"{match[1]} \\cdot "
        text = f"{factor}10^{{-{match[2]}}}"
    return f"$1 - {text}$"


def commented(paragraph: str, entries: str) -> str:
    """BibTeX entries under a paragraph in a comment; BibTeX reads an entry after every @, comment or not."""
    comment = paragraph.replace("@", "{\\char64}")
    return f"% {comment}\n\n{entries}"


TEXT = Prose(plain, lambda key, author, year: f"({author} {year})", "x", lambda x: f"1 - {x:g}".replace("e-0", "e-"))
LATEX = Prose(escape_latex, lambda key, author, year: f"\\cite{{{key}}}", r"$\times$", _latex_complement)
FORMATTERS = {
    "text": Formatter(text_table, TEXT),
    "markdown": Formatter(markdown_table),
    "latex": Formatter(latex_table, LATEX),
    "csv": Formatter(csv_table),
    "bib": Formatter(prose=LATEX, bibliography=commented),
}
"""Every format by its name; `lipbound table` and `lipbound cite` have those that can write what they print."""
