"""Statements of bounds as HTML: words stay text, formulas between dollar signs become MathML."""

import re
from html import escape

from latex2mathml.converter import convert

COMMANDS = (
    "diag",
    "exp",
    "ge",
    "lambda",
    "le",
    "log",
    "max",
    "mathrm",
    "min",
    "operatorname",
    "phi",
    "sqrt",
    "sum",
    "times",
    "to",
)
"""Commands that statements use. The library passes text and links through as they are; nothing of
that kind is among them."""
FORMULA = re.compile(rf"(?:[^\\<>&\"]|\\[|,;]|\\(?:{'|'.join(COMMANDS)})(?![A-Za-z]))*")


def formula(text: str) -> str:
    r"""HTML of a statement; all of it as text where it is none of ours or cannot be read.

    >>> formula(r"$\|x_1\| \le 2$ <b>").count("</math>"), formula("<b>")
    (1, '&lt;b&gt;')
    """
    parts = text.split("$")
    if len(parts) % 2 == 0 or not all(FORMULA.fullmatch(part) for part in parts[1::2]):
        return escape(text)
    try:
        return "".join(
            convert(part) if place % 2 else escape(part) for place, part in enumerate(parts)
        )
    except Exception:  # the library has a type of its own for every fault
        return escape(text)
