"""Fonts and widths of figures: ours, or those of a conference by tueplots."""

from typing import Any, NamedTuple

from matplotlib import font_manager

from lipbound.errors import LipboundError, UnknownNameError, nearest

WIDTHS = {"page": 7.1, "column": 3.45, "slide": 12.0}
"""Figure widths in inches: across two columns of a paper, one column, a slide."""
BASE: Any = {
    "pdf.fonttype": 42,  # TrueType, embedded and editable
    "svg.fonttype": "path",
    "svg.hashsalt": "lipbound",  # the same figure is the same file
    "pgf.rcfonts": False,  # the document's fonts
    "pgf.texsystem": "pdflatex",
    "font.family": "sans-serif",
    "axes.linewidth": 0.5,
}
COLUMNS = {"page": "full", "column": "half"}
"""What tueplots calls our widths, for journals of two columns."""


SPARE = {"serif": "STIXGeneral"}
"""Like Times, and always there: for machines without the venue's fonts."""


class Look(NamedTuple):
    """Settings of matplotlib, the width of a figure in inches, and the size of its type in points."""

    settings: Any
    inches: float
    points: float


def look(style: str | None, width: str | float, font_size: float | None) -> Look:
    """How a figure looks.

    Args:
        style: None, or the name of a bundle of tueplots such as "icml2024" or "neurips2024" (extra ``styles``): fonts and widths of that venue.
        width: "page", "column", "slide" or inches; names mean the venue's widths where a style is given.
        font_size: points, in place of the style's (7 without one, 12 on a slide).

    Raises:
        LipboundError: unknown width or style, tueplots not installed.
    """
    if isinstance(width, str) and width not in WIDTHS:
        raise UnknownNameError(f"unknown width {width!r}; {nearest(width, WIDTHS)}, or a number of inches")
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    if not inches > 0:
        raise LipboundError(f"width is {width}; it must be a positive number of inches")
    if style is None:
        points = font_size or (12.0 if width == "slide" else 7.0)
        return Look(BASE | {"font.size": points}, inches, points)
    try:
        from tueplots import bundles
    except ImportError as error:
        raise LipboundError(f"style {style!r} needs tueplots; pip install 'lipbound[styles]'") from error
    known = [name for name in dir(bundles) if name[-4:].isdigit()]
    if style not in known:
        raise UnknownNameError(f"unknown style {style!r}; {nearest(style, known)}")
    make = getattr(bundles, style)
    try:
        found = make(column=COLUMNS.get(str(width), "full"), usetex=False)
    except TypeError:  # a venue of one column
        found = make(usetex=False)
    layout = ("figure.constrained_layout.use", "figure.autolayout", "figure.figsize", "text.usetex")
    kept = {key: value for key, value in found.items() if key not in layout}
    wanted = found[f"font.{found['font.family']}"] if found["font.family"] in ("serif", "sans-serif") else [found["font.family"]]
    kept["font.family"] = next((font for font in wanted if font in font_manager.get_font_names()), SPARE.get(found["font.family"], "DejaVu Sans"))
    inches = float(found["figure.figsize"][0]) if width in COLUMNS else inches
    points = font_size or float(found["font.size"])
    return Look(BASE | kept | {"font.size": points}, inches, points)
