"""Fonts, widths, files and text of figures: titles in lines, captions beside them.

Looks are ours or those of a conference by tueplots.
"""

import inspect
import io
import pickle
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from lipbound.errors import LipboundError, choice, file_path, is_number, real, shown, tell
from lipbound.formatting import escape_latex, replacing
from lipbound.reporting.tables import typeset, wrapped

WIDTHS = {"page": 7.1, "column": 3.45, "slide": 12.0}
"""Figure widths in inches: across two columns of a paper, one column, a slide."""
PAPER, TEXT = 8.5, 9.0
"""Inches: the widest figure that is for paper, and the height of the text on its pages."""
CAPTION = 8.6
"""Square inches that the caption of a figure takes, at 10 points."""
SLIDE = 0.54
"""Height over width of what is wider than paper: a slide of 16:9, less its title."""
FILES: Any = {
    "pdf.fonttype": 42,  # TrueType, embedded and editable; conferences refuse Type 3
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "lipbound",  # the same figure is the same file
    "pgf.rcfonts": False,  # the document's fonts
    "pgf.texsystem": "pdflatex",
}
"""Settings with which figures become files."""
BASE: Any = FILES | {"font.family": "sans-serif", "axes.linewidth": 0.5}
TUEPLOTS_COLUMNS = {"page": "full", "column": "half"}
"""Names in tueplots of our widths, for journals of two columns."""
_SPARE = {"serif": "STIXGeneral", "sans-serif": "DejaVu Sans"}
"""Fonts that are always there, for machines without the venue's."""
LETTERS = 1.65
"""Letters in a line over its width, in sizes of its type."""
D = TypeVar("D", Axes, Figure)


def look(
    style: str | None, width: str | float, font_size: float | None
) -> tuple[Any, float, float]:
    """Settings of matplotlib for a figure, its width in inches, size of its type in points.

    Args:
        style: None, or the name of a bundle of tueplots such as "icml2024" or "neurips2024" (extra
            ``styles``): fonts and widths of that venue.
        width: "page", "column", "slide" or inches; names mean the venue's widths where a style is
            given.
        font_size: points, in place of the style's (7 without one, 12 on a slide).

    Raises:
        UnknownNameError: unknown style.
        LipboundError: a width that is no known name, too small or too large; tueplots not
            installed.
    """
    if font_size is not None:
        real("font_size", font_size, "a number of points", above=0)
    inches = float(WIDTHS.get(str(width), width if is_number(width) else 0.0))
    if not 1 <= inches <= 100:
        what = "it must be a number of inches, from 1 to 100"
        raise LipboundError(f"width is {shown(width)}; {what}, or one of {', '.join(WIDTHS)}")
    if style is None:
        points = font_size or (12.0 if width == "slide" else 7.0)
        return BASE | {"font.size": points}, inches, points
    try:
        from tueplots import bundles
    except ImportError as error:
        what = f"style {style!r} needs tueplots; pip install 'lipbound[styles]'"
        raise LipboundError(what) from error
    known = [name for name in dir(bundles) if name[-4:].isdigit()]
    make = getattr(bundles, choice("style", style, known))
    wanted = {"column": TUEPLOTS_COLUMNS.get(str(width), "full"), "usetex": False}
    # venues of one column have no such choice, others none of TeX
    options = inspect.signature(make).parameters
    found = make(**{name: value for name, value in wanted.items() if name in options})
    inches = float(found["figure.figsize"][0]) if width in TUEPLOTS_COLUMNS else inches
    points = font_size or float(found["font.size"])
    kept = {key: found[key] for key in found if not key.startswith(("figure.", "text."))}
    kept |= {"font.family": _font(style, found), "font.size": points}
    return BASE | kept, inches, points


def _font(style: str, found: dict[str, Any]) -> str:
    """The first font of a venue that is installed; else a like one, which is told."""
    family = found["font.family"]
    fonts = found.get(f"font.{family}", []) if family in _SPARE else [family]
    if there := [font for font in fonts if font in font_manager.get_font_names()]:
        return str(there[0])
    spare = _SPARE.get(family, "DejaVu Sans")
    named = ", ".join(fonts) or "left to TeX"
    tell(f"style {style!r}: none of its fonts ({named}) is installed; {spare} is taken")
    return spare


def paper_height(inches: float, *, captioned: bool = False) -> float:
    """Largest height of a figure of this width, in inches, with room below it for its caption.

    ``captioned``: the caption is part of the figure.
    """
    if inches > PAPER:
        return SLIDE * inches
    return TEXT if captioned else max(TEXT / 2, TEXT - CAPTION / inches)


def lines_of(text: str, width: float, points: float) -> list[str]:
    """A text in lines of about ``width`` inches."""
    return wrapped(text, max(1, int(LETTERS * width * 72 / points)))


def in_two_lines(text: str, width: float, points: float) -> list[str]:
    """A label in lines of about ``width`` inches; of more than two, the second ends with dots."""
    first, *others = lines_of(text, width, points)
    return [first, *others] if len(others) < 2 else [first, f"{others[0][:-2]}\u2026"]


class Drawing(Figure):
    """Figure that notebooks show although pyplot does not know of it.

    Its files have the fonts that it was made with.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        FigureCanvasAgg(self)
        self._fonts = dict(matplotlib.rcParams.find_all(r"^(font|mathtext)\."))

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Write it, as `matplotlib.figure.Figure.savefig` does, with fonts that papers take."""
        with matplotlib.rc_context(self._fonts | FILES):
            super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()


def given_or_new(axes: Axes | None, inches: tuple[float, float]) -> Axes:
    """Axes to draw into: those that were given, or those of a new figure of this size."""
    if not isinstance(axes, Axes | None):
        raise LipboundError(f"ax is {shown(axes)}; give one matplotlib Axes, such as plt.gca()")
    return axes or Drawing(figsize=inches, layout="constrained").add_subplot()


def written(drawn: D, path: str | Path | None, caption: str = "") -> D:
    r"""A figure or axes, after the figure was written to a file, where one is given.

    The same figure gives the same file. A caption goes beside ``figure.pdf`` as plain text,
    ``figure.caption.txt``, and as ``\caption{...}`` for a figure environment,
    ``figure.caption.tex``. All of them take the places of older ones together, when they are
    whole. Text in .pgf is escaped for LaTeX, which must be installed for it.

    Raises:
        LipboundError: a file type that cannot be drawn.
        StoreError: a file that cannot be written; older ones are still there.
    """
    if path is None:
        return drawn
    figure: Any = drawn.figure
    file = file_path(path, "figure.pdf")
    kind = file.suffix.removeprefix(".").lower()
    supported = figure.canvas.get_supported_filetypes()
    if kind not in supported:
        known = ", ".join(sorted(supported))
        raise LipboundError(f"{file} has no file type that can be drawn; use one of {known}")
    texts = {"txt": f"{caption}\n", "tex": f"\\caption{{{typeset(caption)}}}\n"} if caption else {}
    if latex := kind == "pgf":
        figure = pickle.loads(pickle.dumps(figure))  # whose text is escaped, not the caller's
        for text in figure.findobj(Text):
            text.set_text("\n".join(map(escape_latex, text.get_text().split("\n"))))
    dates = {"svg": {"metadata": {"Date": None}}, "pdf": {"metadata": {"CreationDate": None}}}
    options: Any = {"format": kind, "dpi": 300} | dates.get(kind, {})
    beside = [file.with_name(f"{file.stem}.caption.{ending}") for ending in texts]
    with replacing(file, *beside) as (target, *others):
        # in memory first: on a full disk, matplotlib's PDF fails with an error of its own
        whole = io.BytesIO()
        try:
            figure.savefig(target if latex else whole, **options)
        except RuntimeError as error:
            raise LipboundError(f"{file} needs pdflatex, to measure text; draw a .pdf") from error
        if not latex:
            target.write_bytes(whole.getvalue())
        for other, words in zip(others, texts.values(), strict=True):
            other.write_text(words, encoding="utf-8")
    return drawn
