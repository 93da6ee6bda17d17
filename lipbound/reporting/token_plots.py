"""Figures of single tokens: which of them make a head steep."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lipbound.errors import LipboundError, shown, whole
from lipbound.formatting import plain
from lipbound.reporting.figures.titles import folded
from lipbound.reporting.styles import Drawing, look, write

if TYPE_CHECKING:
    from lipbound.jacobians.token_norms.profile import TokenProfile

PANELS = {
    "moved": "what this token does to all outputs",
    "output": "what all tokens do to this output",
}
LONGEST = 14
"""Letters of a token that are written."""


def token_profile(
    profile: "TokenProfile",
    tokens: Sequence[str] | None = None,
    path: str | Path | None = None,
    *,
    sample: int = 0,
    heads: Iterable[int] | None = None,
    width: str | float = "page",
    font_size: float | None = None,
    title: str = "",
) -> Figure:
    """Norms of single tokens: tokens across, by their text, heads down; one panel for tokens that
    move, one for output tokens.

    Where all outputs count, or all tokens move, it is by Frobenius norm. A single head is drawn as
    bars, several as colours (log10, one scale for both panels). What is drawn is the geometric mean
    of both ends, which agree to rounding.

    Args:
        profile: from `lipbound.token_profile`.
        tokens: their text; numbers by default. Where not all fit, some are left out of the axis,
            and none of the figure.
        path: where to write it. sample, heads: what to show; all heads of the first sample by
            default.
        width: "page", "column", "slide", or inches. font_size: points. title: what the heads are
            of.

    Raises:
        LipboundError: a sample or head that there is not, another number of tokens, a file that
            cannot be drawn or written.
    """
    values = _values(profile, sample, None if heads is None else list(heads))
    count = next(iter(values.values())).shape[1]
    names = (
        [str(j) for j in range(count)]
        if tokens is None
        else [plain(str(token)) for token in tokens]
    )
    if len(names) != count:
        raise LipboundError(
            f"{len(names)} tokens were given for a profile of {count}; give the text of every token"
        )
    names = [name if len(name) <= LONGEST else name[: LONGEST - 1] + "\u2026" for name in names]
    settings, inches, points = look(None, width, font_size)
    rows = next(iter(values.values())).shape[0]
    chosen = list(range(rows)) if heads is None else list(heads)
    with matplotlib.rc_context(settings):
        height = (
            2 * (0.9 + min(2.6, 0.16 * rows if rows > 1 else 1.0))
            + 0.06 * max(map(len, names), default=1)
            + 0.3
        )
        figure = Drawing(figsize=(inches, height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 1, sharex=True)
        room = inches - (0.75 if rows == 1 else 1.35)  # beside axes and colour bar
        one = "norm" if profile.lower.ndim == 2 else f"norm, head {chosen[0]}"
        for axes, (name, grid) in zip(panels, values.items(), strict=True):
            axes.set_title(
                "\n".join(folded(PANELS[name], max(room, 0.5), points)),
                fontsize=points,
                parse_math=False,
            )
            if rows == 1:
                axes.bar(range(count), grid[0], color="0.35", width=0.8)
                axes.set(ylabel=one, xlim=(-0.5, count - 0.5))
            else:
                picture = _colours(axes, grid, values, chosen)
        if rows > 1:
            bar = figure.colorbar(picture, ax=panels, aspect=40, pad=0.02, fraction=0.08)
            bar.set_label("log10 of the norm", loc="center")
        _name(panels[-1], names, inches, points)
        if title:
            figure.suptitle(title, fontsize=points + 1, parse_math=False)
        if path is not None:
            write(figure, Path(path))
    return figure


def _values(profile: "TokenProfile", sample: int, heads: list[int] | None) -> dict[str, np.ndarray]:
    """(heads, N) of each panel; one row for a whole layer."""
    ends = {
        "moved": (profile.lower, profile.upper),
        "output": (profile.output_lower, profile.output_upper),
    }
    sample, samples = whole("sample", sample), profile.lower.shape[0]
    if not 0 <= sample < samples:
        raise LipboundError(f"sample is {sample}; the profile has samples 0 to {samples - 1}")
    out = {}
    for name, (lower, upper) in ends.items():
        grid = np.atleast_2d(
            np.sqrt(
                lower[sample].numpy()
                * np.where(np.isfinite(upper[sample].numpy()), upper[sample].numpy(), np.nan)
            )
        )
        if heads is not None:
            if not heads or any(
                isinstance(h, bool) or not isinstance(h, int) or not 0 <= h < len(grid)
                for h in heads
            ):
                raise LipboundError(
                    f"heads are {shown(heads)}; they must be among 0 to {len(grid) - 1}"
                )
            grid = grid[heads]
        out[name] = grid
    return out


def _colours(
    axes: Axes, grid: np.ndarray, values: dict[str, np.ndarray], heads: list[int]
) -> matplotlib.image.AxesImage:
    """One cell for every head and token."""
    logs = [np.log10(np.where(one > 0, one, np.nan)) for one in values.values()]
    known = np.concatenate([one[np.isfinite(one)] for one in logs])
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    picture = axes.imshow(
        np.log10(np.where(grid > 0, grid, np.nan)),
        aspect="auto",
        cmap="viridis",
        vmin=low,
        vmax=high,
        interpolation="nearest",
    )
    step = max(1, -(-len(heads) // 12))
    axes.set_yticks(range(0, len(heads), step), [str(h) for h in heads[::step]])
    axes.set_ylabel("head")
    return picture


def _name(axes: Axes, names: list[str], inches: float, points: float) -> None:
    """Tokens below the last panel, upright, as many as there is room for."""
    room = max(1, int(inches * 0.82 * 72 / (1.15 * points)))
    step = max(1, -(-len(names) // room))
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=90, parse_math=False)
    for panel in axes.figure.axes:
        panel.tick_params(axis="x", length=1.5, width=0.5, pad=1.5, labelsize=points - 0.5)
    if step > 1:
        axes.set_xlabel(
            f"every {step}th token is named"
            if step > 3
            else f"every {('', '', 'second', 'third')[step]} token is named"
        )
