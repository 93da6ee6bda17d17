"""Where the panels of a figure stand: as large as the paper allows, never beyond it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lipbound.errors import LipboundError
from lipbound.formatting import counted
from lipbound.reporting.styles import paper_height

LINE = 1.35
"""Height of a line of type over its size."""
SIDE = 6.0
"""Least width of a panel, in lines of type: narrower ones have no room for their titles."""
FLAT = 2.0
"""Least height of a panel, in lines of type."""
USUAL, TALL, THICK = 0.55, 3.0, 3.5
"""Height over width of a panel of few layers; of its cells, at most; and the most lines of type
that a row of cells takes: one layer is a strip."""
WIDE = 36.0
"""Width of a figure, in lines of type, from which on colour bars stand on the right of their panels
rather than below them."""
ENOUGH = 0.45
"""Share of the height with which its cells are square that a panel should keep; smaller type is
tried before it has less."""
SMALLEST, SHRUNK = 5.9, 0.7
"""Points of the smallest type that is tried in place of the usual one, and its share of that one.
"""
LEFT, GAP, TICKS, BELOW, BETWEEN = 3.2, 0.9, 2.5, 3.6, 0.4
"""In lines of type: left of the panels, between them, below them (numbers and name of heads), for a
colour bar below, between sections."""


@dataclass(frozen=True)
class Arrangement:
    """Where everything stands; all lengths in inches, from the top left corner.

    Attributes:
        sheet: what is arranged, with the size of its type.
        total: height of the figure.
        side, height: of a panel.
        across: panels in a row.
        corners: of each panel, left and top, section by section.
        bars: of the colour bar of each section: left, top, width, height; none where panels have
            bars of their own.
        bottom: lower end of the caption.
    """

    sheet: "Sheet"
    total: float
    side: float
    height: float
    across: int
    corners: list[list[tuple[float, float]]]
    bars: list[tuple[float, float, float, float]]
    bottom: float

    @property
    def line(self) -> float:
        """Height of a line of type."""
        return self.sheet.line

    @property
    def inches(self) -> float:
        """Width of the figure."""
        return self.sheet.inches


@dataclass(frozen=True)
class Sheet:
    """Panels to arrange, the paper's width and the size of type.

    Attributes:
        counts: panels of each section; sections stand below one another, each with a colour bar.
        inches: width of the figure. points: size of its type.
        shape: rows over columns of a panel's grid.
        own_bars: every panel has a colour bar of its own instead.
        titles: lines of the longest title of a section, for panels of some width in inches and type
            of some size.
        caption: lines of the caption in the picture.
        layers: rows of a panel's grid.
    """

    counts: Sequence[int]
    inches: float
    points: float
    shape: float
    own_bars: bool
    titles: Callable[[int, float, float], int]
    caption: int
    layers: int = 12

    @property
    def line(self) -> float:
        """Height of a line of type, in inches."""
        return self.points / 72 * LINE

    @property
    def limit(self) -> float:
        """The height of the paper, in inches."""
        return paper_height(self.inches, captioned=self.caption > 0)

    @property
    def beside(self) -> bool:
        """True where colour bars stand on the right, for which strips are too low."""
        return (
            not self.own_bars
            and self.inches / self.line >= WIDE
            and self.shape * TALL >= USUAL
            and self.layers > 2
        )

    @property
    def gap(self) -> float:
        """Between panels, in inches."""
        return (3.6 if self.own_bars else GAP) * self.line

    @property
    def room(self) -> float:
        """Width for panels and the gaps between them, in inches."""
        right = 5.2 if self.beside else 3.0 if self.own_bars else 0.4
        return self.inches - (LEFT + right) * self.line

    def most(self) -> int:
        """Panels in a row that are still wide enough."""
        fitting = math.floor((self.room + self.gap) / (SIDE * self.line + self.gap))
        return max(1, min(max(self.counts), fitting))

    def rows(self, across: int) -> int:
        """Rows of panels in all sections."""
        return sum(-(-count // across) for count in self.counts)

    def side(self, across: int) -> float:
        """Width of a panel, in inches."""
        return (self.room - (across - 1) * self.gap) / across

    def title(self, section: int, across: int) -> float:
        """Height above a panel, in inches."""
        return (1.15 * self.titles(section, self.side(across), self.points) + 0.5) * self.line

    def below(self) -> float:
        """Height below the last row of a section, in inches."""
        return (TICKS + BETWEEN + (0.0 if self.beside or self.own_bars else BELOW)) * self.line

    def fixed(self, across: int) -> float:
        """Height of all that is no panel, in inches."""
        titles = 0.0
        for section, count in enumerate(self.counts):
            titles += -(-count // across) * self.title(section, across)
        return titles + len(self.counts) * self.below() + (1.25 * self.caption + 0.3) * self.line

    def natural(self, across: int) -> float:
        """Height of a panel whose cells are square, or nearly so, in inches."""
        side = self.side(across)
        shape = max(self.shape, min(USUAL, TALL * self.shape))
        wanted = min(shape * side, THICK * self.layers * self.line)
        # what lies beyond a scale is said in two lines
        return min(max(wanted, 1.25 * FLAT * self.line), 1.25 * side)


def arrange(sheet: Sheet, columns: int | None = None, *, shrink: bool = False) -> Arrangement:
    """Arrange panels so that the figure fits on the paper.

    Takes the fewest panels in a row with which it fits, flatter ones where it fits with none; or
    ``columns`` of them.

    Args:
        sheet: the panels and the type.
        columns: panels in a row, where they are asked for.
        shrink: whether smaller type may be taken where panels would become too flat.

    Raises:
        LipboundError: so many panels in so few columns are taller than the paper.
    """
    least = max(SHRUNK, min(1.0, SMALLEST / sheet.points)) if shrink else 1.0
    shares = [share for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7) if share >= least]
    possible = []
    for share in shares:
        place = _best(replace(sheet, points=sheet.points * share), columns)
        if place.height >= FLAT * place.line and place.side >= 2 * place.line:
            possible.append(place)
            if place.height >= ENOUGH * place.sheet.natural(place.across):
                break
    if not possible:
        many = counted(columns, "column") if columns else "as many columns as are legible"
        paper = f"{sheet.inches:g} x {sheet.limit:.3g} inches"
        raise LipboundError(
            f"{sum(sheet.counts)} panels in {many} do not fit on a figure of {paper}; ask for "
            f"{'other columns, ' if columns else ''}a larger width, another style or fewer bounds"
        )
    return possible[-1]


def _best(sheet: Sheet, columns: int | None) -> Arrangement:
    """The arrangement for type of one size, which may have no room for its panels."""
    most = sheet.most()
    usual = max(1, min(most, round(sheet.inches * 7 / sheet.points / 1.75)))
    choices = [columns] if columns else range(usual, most + 1)
    room = {n: (sheet.limit - sheet.fixed(n)) / sheet.rows(n) for n in choices}
    fitting = [n for n in choices if room[n] >= sheet.natural(n)]
    if fitting:
        return _placed(sheet, fitting[0], sheet.natural(fitting[0]))
    across = max(choices, key=lambda n: room[n] * (sheet.side(n) if room[n] > 0 else 1))
    return _placed(sheet, across, room[across])


def _placed(sheet: Sheet, across: int, height: float) -> Arrangement:
    """Corners of panels and bars, from top to bottom."""
    line, side, gap = sheet.line, sheet.side(across), sheet.gap
    start, top = LEFT * line, 0.3 * line
    corners: list[list[tuple[float, float]]] = []
    bars = []
    for section, count in enumerate(sheet.counts):
        title = sheet.title(section, across)
        first = top + title
        lefts = [start + k % across * (side + gap) for k in range(count)]
        tops = [first + k // across * (height + title) for k in range(count)]
        corners.append(list(zip(lefts, tops, strict=True)))
        end, right = corners[-1][-1][1] + height, start + min(count, across) * (side + gap) - gap
        if sheet.beside:
            bars.append((right + 0.9 * line, first, 0.7 * line, end - first))
        elif not sheet.own_bars:
            # numbers at its ends need room
            width = min(max(right - start, 0.6 * sheet.inches), sheet.room) - 2 * line
            bars.append((start + line, end + (TICKS + BETWEEN) * line, width, 0.7 * line))
        top = end + sheet.below()
    total = top + 1.25 * sheet.caption * line
    return Arrangement(sheet, total, side, height, across, corners, bars, total - 0.3 * line)
