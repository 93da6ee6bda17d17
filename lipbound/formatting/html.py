"""Tables, facts and formulas as HTML, in which foreign text stays text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from latex2mathml.converter import convert

LEFT, RIGHT = "text-align: left", "text-align: right"
ROWS = 24
"""Rows that a table shows; what goes on is counted."""
FORMULA = re.compile(
    r'(?:[^\\<>&"]|\\[|,;]|\\(?:diag|exp|ge|lambda|le|log|max|mathrm|min|operatorname|phi|sqrt|sum'
    r"|times|to)(?![A-Za-z]))*"
)
"""Formulas with commands that statements use; latex2mathml lets others pass, links for instance."""


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    notes: Iterable[str] = (),
    words: Iterable[str] = (),
    most: int | None = None,
) -> str:
    """Build a table with its title above and notes below.

    Args:
        head: titles of columns.
        rows: cells, as text.
        title: what stands above.
        notes: what stands below.
        words: titles of columns of words, which stand to the left as the first column does.
        most: rows that are shown; all by default.

    Returns:
        The HTML.

    >>> html_table(["a"], [["<b>"], ["2"]], most=1).count("&lt;b&gt;")
    1
    """
    left, shown = {*head[:1], *words}, rows if most is None else rows[:most]
    styles = [LEFT if name in left else RIGHT for name in head]

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(styles, cells, strict=True)
        return "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for style, cell in pairs)

    above = f'<caption style="{LEFT}">{escape(title)}</caption>' if title else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in shown)
    more = [f"and {len(rows) - len(shown)} more rows"] if len(shown) < len(rows) else []
    below = "".join(f"<div><small>{escape(note)}</small></div>" for note in [*more, *notes] if note)
    titles = f"<thead><tr>{line('th', head)}</tr></thead>"
    return f"<table>{above}{titles}<tbody>{body}</tbody></table>{below}"


def html_facts(title: str, facts: Mapping[str, str], ready: Mapping[str, str] | None = None) -> str:
    """Build a table of names and values, a row each.

    Args:
        title: what stands above.
        facts: values as text, by name; empty ones are left out.
        ready: values in HTML already, which come first.

    Returns:
        The HTML.
    """
    cells = dict(ready or {}) | {name: escape(value) for name, value in facts.items() if value}
    body = "".join(
        f'<tr><th style="{LEFT}">{escape(name)}</th><td style="{LEFT}">{value}</td></tr>'
        for name, value in cells.items()
    )
    above = f'<caption style="{LEFT}"><b>{escape(title)}</b></caption>'
    return f"<table>{above}<tbody>{body}</tbody></table>"


def formula(text: str) -> str:
    r"""Turn a statement of a bound into HTML, with MathML for formulas between dollar signs.

    Args:
        text: the statement.

    Returns:
        The HTML; all of it as text where it is none of ours or cannot be read.

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
