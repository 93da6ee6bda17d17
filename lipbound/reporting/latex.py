r"""Tables and text for LaTeX.

Tables are as wide as a column or a page, with numbers by siunitx; formulas stand in mathematics,
foreign text as text.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from lipbound.errors import LipboundError, UnknownNameError, nearest
from lipbound.formatting import escape_latex, plain, small
from lipbound.reporting.layout import Table, fit, folded, measured


class TableRoom(NamedTuple):
    """Points for a table's width, type, lines and notes, and its rows before it is split."""

    room: float
    type: float
    leading: float
    notes: float
    rows: int


WIDTHS = {
    "column": TableRoom(215, 8, 9.5, 7, 40),
    "page": TableRoom(345, 8, 9.5, 7, 40),
    "slide": TableRoom(307, 9, 11, 7, 14),
}
r"""A column of the narrowest classes that are common (219 pt; ``article`` with ``twocolumn`` on A4
has 221 pt), the text of ``article`` at 10 pt, a frame of ``beamer``. The type is that of
\footnotesize there, and the same in a class of larger type, where the table would not fit
otherwise."""
NARROW = 62.0
"""Points at 10 pt that a column of words keeps at least."""
GAP = 8.0
"""Points between two columns."""
MARKS = {"\u2021": "$^\\ddagger$", "\u2020": "$^\\dagger$"}
"""The audit's marks."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FORMULA = re.compile(
    r"\b[xh] -> (?:(?:softmax|layer|norm|k\^T|[xhqkv](?![a-z])|[()+])\s?)+"  # a map
    r"|\|\|(?P<normed>[A-Z]+(?:_[A-Z])?)\|\|(?P<kind>_F)?(?P<power>\^\d)?"
    r"|sqrt\((?P<root>[A-Za-z0-9])\)|\b(?P<primed>[A-Z])'(?!\w)|\b(?P<left>[A-Z]) = "
    r"(?P<right>\d+)\b|\b(?P<product>[A-Z]+)\^T\b"
    r"|(?<![\w.])(?P<digits>\d(?:\.\d+)?)e-(?P<power_of_ten>\d+)\b"
)
"""Mathematics that our statements, labels and descriptions write as plain text."""
HASH = re.compile(r"\b([0-9a-f]{16})[0-9a-f]{16,}\b")
SHORT_HASH = re.compile(r"\b[0-9a-f]{16}\b")
LONG = 24
"""Characters of a word from which on it may be broken at its punctuation."""


def typeset(text: str) -> str:
    r"""Typeset text for LaTeX, with formulas of ours in mathematics and foreign text as text.

    Hashes are cut to their first 16 digits; long names get places to break them.

    >>> typeset("x -> softmax(q k^T) v, up to 2 ||W_V|| of 50 %")
    '$x \\to \\mathrm{softmax}(q k^{T}) v$, up to 2 $\\|W_V\\|$ of 50 \\%'
    """
    text, parts, end = HASH.sub(r"\1", plain(text)), [], 0
    for match in FORMULA.finditer(text):
        found = match[0].rstrip()
        parts += [_words(text[end : match.start()]), f"${_formula(match, found)}$"]
        end = match.start() + len(found)
    return "".join([*parts, _words(text[end:])])


def _words(text: str) -> str:
    """Foreign text without formulas, long words breakable, marks raised."""
    pieces = re.split(r"( +)", text)
    long = (len(piece) > LONG or SHORT_HASH.search(piece) for piece in pieces)
    pairs = zip(pieces, long, strict=True)
    text = "".join(_breakable(piece) if cut else escape_latex(piece) for piece, cut in pairs)
    # before a sentence, not behind a word
    text = re.sub(rf"(?<=\. )({'|'.join(MARKS)})", lambda sign: MARKS[sign[0]], text)
    for sign, command in MARKS.items():
        text = text.replace(f" {sign}", command).replace(sign, command)
    return text


def _breakable(word: str) -> str:
    """Long word with places to break it.

    They are behind punctuation, before capitals, and in the middle of a hash.
    """
    ends = r"[/._:\-]+|(?<=[a-z0-9])(?=[A-Z])|(?<=\b[0-9a-f]{8})(?=[0-9a-f]{8}\b)|$"
    pieces = re.findall(rf".+?(?:{ends})", word)
    return "\\allowbreak{}".join(map(escape_latex, pieces))


def _formula(match: re.Match[str], found: str) -> str:
    """One of `FORMULA`, as mathematics."""
    if match["normed"]:
        return f"\\|{match['normed']}\\|{match['kind'] or ''}{match['power'] or ''}"
    if match["root"]:
        return f"\\sqrt{{{match['root']}}}"
    if match["digits"]:
        return latex_small(float(found)).strip("$")
    if match["primed"] or match["left"]:
        return found
    text = found.replace("->", "\\to").replace("^T", "^{T}")
    return re.sub(r"softmax|layer|norm", lambda m: f"\\mathrm{{{m[0]}}}", text)


def latex_small(x: float) -> str:
    """A tolerance or probability; powers of ten in mathematics."""
    if match := re.fullmatch(r"(.+)e-(\d+)", small(x)):
        factor = "" if match[1] == "1" else f"{match[1]} \\times "
        return f"${factor}10^{{-{match[2]}}}$"
    return small(x)


def latex_complement(x: float) -> str:
    """1 - x, in mathematics."""
    return f"$1 - {latex_small(x).strip('$')}$"


def latex_table(table: Table, width: str | float | None = None) -> str:
    """Tabulars and notes, for a table environment or for running text.

    Args:
        table: to write.
        width: "column" (the default), "page" or "slide", or points; see `WIDTHS`.

    Raises:
        UnknownNameError: another name of a width.
        LipboundError: a width that is not positive.
    """
    width = "column" if width is None else width
    if isinstance(width, str) and width not in WIDTHS:
        raise UnknownNameError(
            f"unknown width {width!r} of a LaTeX table, which has a number of points or a name; "
            f"{nearest(width, WIDTHS)}"
        )
    look = WIDTHS[width] if isinstance(width, str) else WIDTHS["column"]._replace(room=float(width))
    room, rows = look.room, look.rows
    if not room > 0:
        raise LipboundError(
            f"width is {width}; it must be a positive number of points, or one of "
            f"{', '.join(WIDTHS)}"
        )
    size = look.type / 10 * 1.07  # small type is wider

    def of_words(text: str) -> float:
        return size * extent(text)

    def of_numbers(text: str) -> float:
        return size * sum(map(_extent, text.split(" ")))

    table = replace(table, shown=table.shown.drop(columns="name", errors="ignore"))
    columns = measured(table, of_words, size * NARROW, numbers=of_numbers)
    fitted = fit(table, columns, room, GAP, optional=3)
    bodies = [
        _tabular(replace(table, shown=table.shown.iloc[k : k + rows]), block, of_words)
        for k in range(0, max(1, len(table.shown)), rows)
        for block in fitted.blocks
    ]
    fits = f"at most {room:g} pt wide; for a table environment, or running text"
    comments = ["\\usepackage{booktabs, siunitx}", fits, table.caption]
    if fitted.left_out:
        comments.append(f"no room for: {', '.join(fitted.left_out)}; --width page has more")
    said = filter(None, [table.head, *table.remarks(fitted.left_out), *table.notes])
    notes = [*(f"{one[0].upper()}{one[1:]}" for one in said), table.caption]
    lines = [  # no group in braces: a frame of beamer would take it for its subtitle
        *(f"% {plain(line)}" for line in comments),
        f"\\begingroup{_type(look.type, look.leading)}\\setlength{{\\tabcolsep}}{{4pt}}%",
        "\n\n\\smallskip\n".join(bodies),
        "",
        f"\\smallskip{_type(look.notes, look.notes + 1)}\\raggedright\\noindent",
        # one paragraph: long notes must fit below a table in a column
        *(f"{typeset(note)}." for note in notes),
        "\\par\\endgroup",
    ]
    return "\n".join(lines) + "\n"


def _type(size: float, leading: float) -> str:
    return f"\\fontsize{{{size:g}}}{{{leading:g}}}\\selectfont"


def _tabular(table: Table, block: Mapping[str, float], measure: Callable[[str], float]) -> str:
    """Tabular of some columns and rows of a table; columns of words fold to their fitted width."""
    kinds, headings, columns = [], [], []
    for title, width in block.items():
        words, cells = title in table.words, [str(cell) for cell in table.shown[title]]
        lines = [typeset(line) for line in folded(title, width, measure)]
        stacked, kind = "\\\\".join(lines), "l" if words else "r"
        headings.append(stacked if len(lines) == 1 else f"\\shortstack[{kind}]{{{stacked}}}")
        if words and any(measure(cell) > width for cell in cells):
            kind = f">{{\\raggedright\\arraybackslash\\hangindent=0.8em}}p{{{width:.1f}pt}}"
        kinds.append(kind)
        columns.append([typeset(cell) if words else _numbers(cell) for cell in cells])
    rows = [" & ".join(cells) for cells in zip(*columns, strict=True)]
    lines = [
        f"\\noindent\\begin{{tabular}}[b]{{@{{}}{''.join(kinds)}@{{}}}}",
        "\\toprule",
        " & ".join(headings) + " \\\\",
        "\\midrule",
        *(f"{row} \\\\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}\\par",
    ]
    return "\n".join(lines)


def _numbers(text: str) -> str:
    """A cell of numbers, by siunitx."""
    return " ".join(map(_number, text.split(" "))).replace(" to ", "--")


def _number(token: str) -> str:
    """One number or word of a cell."""
    if NUMBER.fullmatch(token):
        return f"\\num{{{token.replace(',', '')}}}"
    return {"inf": "$\\infty$", "n/a": "--"}.get(token) or typeset(token)


def _extent(token: str) -> float:
    """About how many points a number takes, or a word of a cell with the space behind it."""
    mantissa, _, exponent = token.replace(",", "").partition("e")
    if not NUMBER.fullmatch(token):
        return {"inf": 10.0, "to": 5.0}.get(token) or extent(token) + 2 * WIDE[" "]
    power = 23 + 4.2 * len(exponent) if exponent else 0
    return extent(mantissa) + (1.7 if len(mantissa) > 4 else 0) + power


WIDE = {
    **dict.fromkeys("ijl.,:;'|!", 2.9),
    **dict.fromkeys("frst()[]- ", 4.0),
    **dict.fromkeys("ceg", 4.8),
    **dict.fromkeys("0123456789aoz/", 5.1),
    **dict.fromkeys("wm+=<>", 8.4),
    **dict.fromkeys("\u2020\u2021", 4.5),
    "\xa0": 0.0,
    **dict.fromkeys("MW", 10.3),
}
"""Points that characters take in Computer Modern at 10 pt; what is not there takes `SMALL` or
`CAPITAL`."""
SMALL, CAPITAL = 5.6, 7.7


def extent(text: str) -> float:
    """About how many points a text takes in Computer Modern at 10 pt."""
    return sum(WIDE.get(c, SMALL if c.islower() else CAPITAL) for c in text)
