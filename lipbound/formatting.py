"""Numbers to the digits that are known, foreign text that is no markup, HTML, whole files."""

import errno
import math
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from html import escape
from pathlib import Path
from typing import Any

from lipbound.errors import StoreError

ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",
    "[": "{[}",
    **{c: "\\" + c for c in "&%$#_{}"},
}
COMPOSED = {chr(c) for c in range(0xC0, 0x100)} - set("\u00d0\u00d7\u00de\u00f0\u00f7\u00fe")
"""Letters with accents, which LaTeX has whatever the font."""
LEFT, RIGHT = "text-align: left", "text-align: right"
TABLE_ROWS = 24
"""Rows that a table shows; what goes on is counted."""
_FORMULA = re.compile(
    r'(?:[^\\<>&"]|\\[|,;]|\\(?:diag|exp|ge|lambda|le|log|max|mathrm|min|operatorname|phi|sqrt|sum'
    r"|theta|times|to)(?![A-Za-z]))*"
)
"""Formulas with commands that statements use; latex2mathml lets others pass, links for instance."""


def digits(low: float, high: float, most: int = 4) -> int:
    """Count the significant digits of its middle that an enclosure supports, at least one.

    Rounded to them, the last one is off by at most one unit.

    Args:
        low, high: the ends of the enclosure. most: at most so many.

    >>> digits(1.3494, 1.3506), digits(9.46, 9.54), digits(8.9, 10.1), digits(9.5, 9.5)
    (3, 2, 1, 4)
    """
    middle, wide = (float(low) + float(high)) / 2, float(high) - float(low)
    if not wide > 0 or not middle > 0:
        return most
    if not math.isfinite(middle):
        return 1
    return max(1, min(most, math.floor(1 - math.log10(wide) + math.floor(math.log10(middle)))))


def number(x: float, digits: int = 3) -> str:
    """Return a number to some significant digits, without exponent between 0.001 and 100,000.

    >>> number(1386.3), number(0.0123), number(4.79e8), number(4.2, 4), number(9.9996, 4)
    ('1,390', '0.0123', '4.79e8', '4.200', '10.00')
    """
    if not math.isfinite(x):
        return "inf" if x > 0 else "n/a"
    if x == 0:
        return "0"
    rounded = float(f"{x:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if -3 <= exponent < 5:
        return f"{rounded:,.{max(0, digits - 1 - exponent)}f}"
    return re.sub(r"e([+-])0*", lambda m: "e" + m[1].replace("+", ""), f"{x:.{digits - 1}e}")


def enclosed(low: float, high: float, most: int = 4) -> str:
    """Return the middle of an enclosure to the digits that it supports, at most so many.

    Where it supports less than two, both ends, as `outwards` writes them.

    >>> enclosed(1.35, 1.3512), enclosed(1.226, 1.454), enclosed(3.0, math.inf), enclosed(0, 0)
    ('1.35', '1.2 to 1.5', '3.0 to inf', '0')
    """
    known = digits(low, high, most)
    return number((low + high) / 2, known) if known > 1 else outwards(low, high, 2)


def outwards(low: float, high: float, digits: int) -> str:
    """Return both ends of a range to some digits, the lower one rounded down, the upper one up.

    One where they are alike. What twelve digits do not tell apart from a shorter number is that
    number: logarithms differ in the last digits from one processor to another.

    >>> outwards(5.601, 8.31, 1), outwards(2.0, 2.0, 2), outwards(0.3, math.inf, 2)
    ('5 to 9', '2.0', '0.30 to inf')
    """
    return span(*(directed(end, digits, up) for up, end in enumerate((low, high))))


def directed(x: float, digits: int, up: bool | int) -> str:
    """Return a number to some digits, rounded down or up, as `outwards` does.

    >>> directed(1.2621, 3, False), directed(1.2621, 3, True), directed(9.96, 2, True)
    ('1.26', '1.27', '10')
    """
    if not math.isfinite(x) or x == 0:
        return number(x)
    exact = Decimal(f"{x:.12g}")
    unit = Decimal(1).scaleb(exact.adjusted() + 1 - digits)
    return number(float(exact.quantize(unit, ROUND_CEILING if up else ROUND_FLOOR)), digits)


def span(low: str, high: str) -> str:
    """Two ends in words; one where they print alike."""
    return low if low == high else f"{low} to {high}"


def small(x: float) -> str:
    """Return a tolerance or probability as it was given, without a padded exponent.

    >>> small(0.001), small(1e-06), small(2.5e-10)
    ('0.001', '1e-6', '2.5e-10')
    """
    return f"{x:g}".replace("e-0", "e-")


def counted(count: int, what: str) -> str:
    """Return a number of things.

    >>> counted(1, "sample"), counted(2, "sample")
    ('1 sample', '2 samples')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def joined(words: Sequence[str]) -> str:
    """Return several words or phrases as prose lists them.

    >>> joined(["samples", "layers", "heads"]), joined(["samples"])
    ('samples, layers and heads', 'samples')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def plain(text: str) -> str:
    r"""Return foreign text on one line, without control characters.

    These are line ends, terminal escapes, changes of direction and the like.

    >>> plain("a\nb\x1b[31m")
    'a b [31m'
    """
    return "".join(c if c.isprintable() else " " for c in text)


def hanging(text: str, width: float, indent: str = "  ") -> list[str]:
    """A paragraph in lines, all but the first indented."""
    how: Any = {"subsequent_indent": indent, "break_on_hyphens": False}
    return textwrap.wrap(plain(text), int(width), **how) or [""]


def escape_latex(text: str) -> str:
    r"""Return foreign text for LaTeX; characters that its usual fonts lack, by their number.

    >>> escape_latex("50 % of a_b^2\n\\input{x}")
    '50 \\% of a\\_b\\textasciicircum{}2 \\textbackslash{}input\\{x\\}'
    """
    shown = COMPOSED | {"\u2020", "\u2021"}
    known = [c if c.isascii() or c in shown else f"[U+{ord(c):04X}]" for c in plain(text)]
    return "".join(ESCAPED.get(c, c) for c in "".join(known))


def escape_markdown(text: str) -> str:
    r"""Return foreign text for a Markdown table: neither markup nor HTML nor the end of a cell.

    >>> escape_markdown("a|b <script> [x](y) _z_")
    'a\\|b &lt;script&gt; \\[x\\](y) \\_z\\_'
    """
    text = escape(plain(text), quote=False).replace("@", "&#64;").replace("://", "&#58;//")
    return re.sub(r"([\\`*_\[\]|$~])", r"\\\1", text)


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
    row = f'<tr><th style="{LEFT}">{{}}</th><td style="{LEFT}">{{}}</td></tr>'
    body = "".join(row.format(escape(name), value) for name, value in cells.items())
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
    if len(parts) % 2 == 0 or not all(_FORMULA.fullmatch(part) for part in parts[1::2]):
        return escape(text)
    try:
        from latex2mathml.converter import convert  # of the extra ``report``

        parts[::2], parts[1::2] = map(escape, parts[::2]), map(convert, parts[1::2])
        return "".join(parts)
    except Exception:  # not installed, or an error of the package, which has many types
        return escape(text)


def check_folder(file: str | Path) -> None:
    """Refuse a file whose folder is not there.

    Raises:
        StoreError: it is not.
    """
    folder = Path(file).expanduser().parent
    if not folder.is_dir():
        raise StoreError(f"{file} cannot be written: there is no folder {folder}; make it first")


@contextmanager
def replacing(*targets: str | Path) -> Iterator[list[Path]]:
    """Replace files together, once all of them are written, or none of them.

    Where a link leads is replaced, not the link. A target that is no ordinary file, such as a pipe,
    is written to directly.

    Args:
        targets: the files to write.

    Yields:
        A path beside each target to write to.

    Raises:
        StoreError: one of them cannot be written; whatever had these names before is still there.
    """
    ends = [Path(os.path.realpath(Path(target).expanduser())) for target in targets]
    new = {end: end.with_name(f".{end.stem}.{os.getpid()}.partial{end.suffix}") for end in ends}
    new |= {end: end for end in ends if end.exists() and not end.is_file()}
    try:
        for end in ends:
            check_folder(end)
            if end.exists() and not os.access(end, os.W_OK):
                why = os.strerror(errno.EACCES)
                raise StoreError(f"{targets[0]} cannot be written: {why}")
        yield list(new.values())
        moved = {end: path for end, path in new.items() if end != path}
        for path in moved.values():
            with path.open("rb+") as file:
                os.fsync(file.fileno())  # some file systems find out only then that they are full
        for end, path in moved.items():
            if end.exists():
                shutil.copymode(end, path)
            path.replace(end)
    except OSError as error:
        raise StoreError(f"{targets[0]} cannot be written: {error.strerror or error}") from error
    finally:
        for path in {*new.values()} - {*new}:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def plain_data(value: Any) -> Any:
    """Dictionaries, lists, text and numbers that JSON can hold; numpy's numbers as Python's own.

    >>> plain_data({"a": (1.5, float("nan"), float("inf"))})
    {'a': [1.5, None, 'inf']}
    """
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
