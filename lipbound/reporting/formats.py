"""Tables as LaTeX."""

import re

import pandas as pd

from lipbound.formatting import escape_latex as in_latex
from lipbound.formatting import plain

HEADINGS = {
    "geomean": "geom. mean", "samples": "over samples", "min": "min", "max": "max", "violations": "below exact", "compared": "of",
    "sound": "assumptions hold",
}  # fmt: skip


SIGNS = {"\u2021": "$^\\ddagger$", "\u2020": "$^\\dagger$"}


def latex_table(comments: list[str], shown: pd.DataFrame) -> str:
    """A tabular: the first column text, then columns of numbers that siunitx aligns, where all of a column is numbers."""
    cells, formats = pd.DataFrame(index=shown.index), []
    for title in shown.columns:
        column = [str(x).replace(",", "") for x in shown[title]]
        parsed = [re.fullmatch(r"(\d+)(?:\.(\d+))?(?:e(-?)(\d+))?", x) for x in column]
        if any(parsed) and all(p or x in ("inf", "n/a") for p, x in zip(parsed, column, strict=True)):
            cells[title] = ["{$\\infty$}" if x == "inf" else "{--}" if x == "n/a" else x for x in column]
            formats.append(_table_format([p for p in parsed if p]))
        else:
            cells[title] = [_signed(x) for x in shown[title]]
            formats.append("l" if title in ("bound", HEADINGS["sound"]) else "r")
    headers = [_signed(str(title)) for title in shown.columns]
    cells.columns = pd.Index(headers)
    styler = cells.reset_index(drop=True).style.hide(axis="index")
    text = str(styler.to_latex(hrules=True, siunitx=True, column_format="".join(formats)))
    return "".join(f"% {plain(line)}\n" for line in ["\\usepackage{booktabs, siunitx}", *comments]) + text


def _table_format(numbers: list[re.Match[str]]) -> str:
    """What siunitx reserves for a column."""
    whole = max(len(m[1]) for m in numbers)
    decimals = max(len(m[2] or "") for m in numbers)
    exponent = max(len(m[4] or "") for m in numbers)
    sign = "-" if any(m[3] for m in numbers) else ""
    return f"S[table-format={whole}.{decimals}{f'e{sign}{exponent}' if exponent else ''}]"


def _signed(text: str) -> str:
    """Foreign text with the audit's marks, for LaTeX."""
    text = in_latex(text)
    for sign, command in SIGNS.items():
        text = text.replace(f" {sign}", command)
    return text
