"""Values as notebooks show them: small HTML tables, in which foreign text stays text."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

LEFT, RIGHT = "text-align: left", "text-align: right"
ROWS = 24
"""Rows that a table shows; what goes on is counted."""


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    notes: Iterable[str] = (),
    words: Iterable[str] = (),
    most: int | None = None,
) -> str:
    """A table with its title above and notes below.

    Args:
        head: titles of columns. rows: cells, as text.
        title, notes: what stands above and below.
        words: titles of columns of words, which stand to the left as the first column does.
        most: rows that are shown; all by default.

    >>> html_table(["a"], [["<b>"], ["2"]], most=1).count("&lt;b&gt;")
    1
    """
    left = {head[0], *words} if head else set()
    shown = rows if most is None else rows[:most]
    style = {name: LEFT if name in left else RIGHT for name in head}
    above = f'<caption style="{LEFT}">{escape(title)}</caption>' if title else ""
    titles = "".join(f'<th style="{style[name]}">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{style[name]}">{escape(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in shown
    )
    more = [f"and {len(rows) - len(shown)} more rows"] if len(shown) < len(rows) else []
    below = "".join(f"<div><small>{escape(note)}</small></div>" for note in [*more, *notes] if note)
    return f"<table>{above}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{below}"


def html_facts(title: str, facts: Mapping[str, str], ready: Mapping[str, str] | None = None) -> str:
    """Names and what they are, a row each; ``ready`` are facts in HTML already, which
    come first."""
    cells = dict(ready or {}) | {name: escape(value) for name, value in facts.items() if value}
    body = "".join(
        f'<tr><th style="{LEFT}">{escape(name)}</th><td style="{LEFT}">{value}</td></tr>'
        for name, value in cells.items()
    )
    return (
        "<table><caption "
        f'style="{LEFT}"><b>{escape(title)}</b></caption><tbody>{body}</tbody></table>'
    )
