"""Titles of panels, folded to the width of a panel by measuring them."""

from functools import lru_cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

MOST = 2
"""Lines that a label may take; what is longer is cut and ends with an ellipsis."""


def inches(text: str, points: float) -> float:
    """Width of a line in the font in use."""
    return _ems(text, FontProperties().get_name()) * points / 72


@lru_cache(maxsize=4096)
def _ems(text: str, font: str) -> float:
    """Width of a line over the size of its type."""
    return (
        float(
            text_to_path.get_text_width_height_descent(
                text, FontProperties(family=font, size=100), ismath=False
            )[0]
        )
        / 100
    )


def folded(text: str, width: float, points: float) -> list[str]:
    """A label in lines of at most ``width`` inches, broken between words."""
    lines = [""]
    for word in (
        text.replace(" \u2020", "\u00a0\u2020").replace(" \u2021", "\u00a0\u2021").split(" ")
    ):  # a mark stays with its word
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and inches(longer, points) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    if len(lines) > MOST:
        lines = [*lines[: MOST - 1], " ".join(lines[MOST - 1 :])]
    return [_cut(line, width, points) for line in lines]


def _cut(line: str, width: float, points: float) -> str:
    """A line that is too wide, with an ellipsis in place of its end."""
    if inches(line, points) <= width:
        return line
    while line and inches(f"{line}\u2026", points) > width:
        line = line[:-1]
    return f"{line.rstrip()}\u2026"
