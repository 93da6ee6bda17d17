r"""Tables and text for LaTeX.

Tables are as wide as a column or a page, with numbers by siunitx; formulas stand in mathematics,
foreign text as text.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from lipbound.errors import LipboundError, choice
from lipbound.formatting import escape_latex, plain
from lipbound.reporting.text_tables import Table, fit, heading

SIZES = {"column": (215.0, 8, 40), "page": (345.0, 8, 40), "slide": (307.0, 9, 14)}
r"""Points for a table's width and its type, and its rows before it is split.

"column" is one of the narrowest classes that are common (219 pt; ``article`` with ``twocolumn`` on
A4 has 221 pt), "page" the text of ``article`` at 10 pt, "slide" a frame of ``beamer``. The type is
that of \footnotesize there, and the same in a class of larger type, where the table would not fit
otherwise."""
_LEAST = 120
"""Points that the narrowest table takes: a column of words beside one of numbers."""
NARROW, GAP, NOTES = 62.0, 8.0, 7.0
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
    if not room >= _LEAST:
        what = f"it must be a number of points, at least {_LEAST}, or one of {', '.join(SIZES)}"
        raise LipboundError(f"width is {width}; {what}")
    size = points / 10 * 1.07  # small type is wider

    table = replace(table, shown=table.shown.drop(columns="name", errors="ignore"))
    widths = {
        title: size * max(map(extent, [*table.shown[title], *title_lines(table, title)]))
        for title in table.shown.columns
    }
    blocks, left_out = fit(table, widths, room, gap=GAP, narrow=size * NARROW)
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
