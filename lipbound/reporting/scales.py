"""Colour scales of heatmaps: which panels share one, and how values become colours."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage

from lipbound.errors import choice
from lipbound.reporting.labels import extra_title
from lipbound.reporting.statistics import extras, panel, ratio, shared_scale
from lipbound.schema import bounds_there, compared_with

QUANTITY, RATIO = "log10 of the local Lipschitz constant", "log10 of bound / exact"
"""Labels of colour bars: of norms and bounds themselves, and of their ratios."""
OVER = ("exact",)
"""Variables that the values of panels may be divided by."""
COLORMAP = "cividis"
NEAR_COLORMAP = "viridis"
"""Colours of rows with a scale of their own, so that nobody reads them off the other one."""
SCALES = ("rows", "shared", "panel")
DIVERGING = "RdBu_r"
"""Colours of ratios of two runs: blue below one, red above."""
STEPS = (1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2, 4, 10, 100, 1e4, 1e8, 1e16, 1e32)
"""Ratios that are numbered on a diverging bar."""
NEAR = 1.0
"""Decades above the exact norm, in the median, up to which a bound is drawn on the scale of the
exact norm."""
ABOVE, BELOW, MISSING = "#fff7bc", "#cfe0f3", "#dddddd"
"""Beyond the upper end of a scale, beyond the lower end, and where there is no value."""


@dataclass(frozen=True)
class Scale:
    """Panels that are read off one colour bar.

    Attributes:
        names: the panels, in order.
        low, high: ends of the bar, log10.
        colors: name of the colormap.
        quantity: what the bar is labelled with.
    """

    names: tuple[str, ...]
    low: float
    high: float
    colors: str = COLORMAP
    quantity: str = QUANTITY

    def mark(self, bar: Colorbar) -> None:
        """Number a diverging bar by ratios, one in its middle, rather than by logarithms."""
        if self.colors != DIVERGING:
            return
        step = max((one for one in STEPS if 2 * math.log10(one) <= self.high), default=STEPS[0])
        above = [one for one in (step, step**2) if one > 1 and math.log10(one) <= self.high]
        ratios = [1.0, *above, *(1 / one for one in above)]
        bar.set_ticks([math.log10(one) for one in ratios], labels=[f"{one:.4g}" for one in ratios])

    @property
    def norm(self) -> Normalize:
        """From logarithms to [0, 1]."""
        return Normalize(self.low, self.top)

    @property
    def top(self) -> float:
        """Upper end of the bar, so far above the lower one that its numbers are legible."""
        return self.high if self.high > self.low + 1e-4 else self.low + 0.1

    def beyond(self, grid: np.ndarray) -> str:
        """Where most of a panel lies: "above" the bar, "below" it, or "" for on it."""
        known = grid[~np.isnan(grid)]
        # infinite ones have an order, and no mean
        middle = float(np.sort(known)[known.size // 2]) if known.size else self.low
        return "above" if middle > self.top else "below" if middle < self.low else ""

    def extend(self, grids: dict[str, np.ndarray]) -> str:
        """The ends at which something lies beyond the bar, as matplotlib calls them."""
        shown = [grids[name] for name in self.names]
        over = any(bool((grid > self.top).any()) for grid in shown)
        under = any(bool((grid < self.low).any()) for grid in shown)
        return "both" if over and under else "max" if over else "min" if under else "neither"


def log10(
    ds: xr.Dataset, names: Iterable[str], reduce: str | float, over: str | None = None
) -> dict[str, np.ndarray]:
    """Logarithms of the values of panels; -inf for zero, NaN where there is no value.

    Args:
        ds: a run. names: of the panels. reduce: over samples, as in `reduce_samples`.
        over: "exact": of bound / exact, of the bound's own map; None: of the values.
    """
    shown = {name: ds[name] if over is None else ratio(ds, name) for name in names}
    with np.errstate(all="ignore"):
        return {name: np.log10(panel(values, reduce).values) for name, values in shown.items()}


def scales(ds: xr.Dataset, grids: dict[str, np.ndarray], how: str) -> list[Scale]:
    """The colour bars of a figure, in the order in which their panels stand.

    Extras have a bar each, whatever the way.

    Args:
        ds: a run.
        grids: log10 of the values of each panel; they may be infinite or missing. Without "exact"
            among them they are of ratios to it.
        how: "rows" (the exact norm and what is near it on a bar of their own, before the others),
            "shared" (one bar) or "panel" (a bar each).

    Raises:
        UnknownNameError: another way.
    """
    choice("scale", how, SCALES)
    others = [name for name in grids if name in extras(ds)]
    own = [_scale([name], grids, f"log10 of the {extra_title(ds, name)}") for name in others]
    names = [name for name in grids if name not in others]
    if not names:
        return own
    words = QUANTITY if "exact" in grids else RATIO
    if how == "panel":
        return [*(_scale([name], grids, words) for name in names), *own]
    close = [name for name in names if _near(ds, grids, name)]
    far = [name for name in names if name not in close]
    if how == "shared" or not far or not close:
        return [_scale(names, grids, words), *own]
    # The exact norm of another map has bounds of its own map beside it and would take up colours
    # that all others need.
    measured = [name for name in far if name in bounds_there(ds)] or far
    ends = shared_scale({name: grids[name] for name in measured})
    near = _scale(close, grids, words, NEAR_COLORMAP)
    return [near, Scale(tuple(far), *ends, COLORMAP, words), *own]


def image(axes: Axes, grid: np.ndarray, scale: Scale) -> AxesImage:
    """Logarithms as colours; infinite ones beyond the scale, missing ones grey."""
    colors = matplotlib.colormaps[scale.colors]
    shown = np.ma.masked_invalid(np.where(np.isposinf(grid), 1e300, grid))
    colormap = colors.with_extremes(over=ABOVE, bad=MISSING, under=BELOW)
    return axes.imshow(shown, cmap=colormap, norm=scale.norm, aspect="auto")


def _near(ds: xr.Dataset, grids: dict[str, np.ndarray], name: str) -> bool:
    """True for the exact norm, and for bounds on it with a median at most ten times as large."""
    if "exact" not in grids:
        return _median(grids[name]) <= NEAR
    if name not in bounds_there(ds):
        return name == "exact"
    above = _median(grids[name]) - _median(grids["exact"])
    return compared_with(ds, name) == "exact" and above <= NEAR


def _scale(
    names: Sequence[str], grids: dict[str, np.ndarray], words: str, colors: str = COLORMAP
) -> Scale:
    ends = shared_scale({name: grids[name] for name in names})
    return Scale(tuple(names), *ends, colors, words)


def _median(grid: np.ndarray) -> float:
    known = grid[~np.isnan(grid)]
    return float(np.median(known)) if known.size else float("nan")
