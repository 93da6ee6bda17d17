"""Words of a figure: titles folded to the width of a panel, and the caption in files beside it."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import xarray as xr
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from lipbound.bounds.audit import audit
from lipbound.formatting import joined, plain
from lipbound.reporting import labels, statistics
from lipbound.reporting.latex import typeset
from lipbound.schema import bounds_there

MOST = 2
"""Lines that a label may take; what is longer is cut and ends with an ellipsis."""


def inches(text: str, points: float) -> float:
    """Width of a line in the font in use."""
    return _ems(text, FontProperties().get_name()) * points / 72


@lru_cache(maxsize=4096)
def _ems(text: str, font: str) -> float:
    """Width of a line over the size of its type."""
    face = FontProperties(family=font, size=100)
    return float(text_to_path.get_text_width_height_descent(text, face, ismath=False)[0]) / 100


def folded(text: str, width: float, points: float) -> list[str]:
    """A label in lines of at most ``width`` inches, broken between words."""
    lines = [""]
    text = text.replace(" \u2020", "\u00a0\u2020").replace(" \u2021", "\u00a0\u2021")
    for word in text.split(" "):  # a mark stays with its word
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


MARKS = {
    "\u2020": "its assumptions do not hold on every {} here",
    "\u2021": "it is below the exact norm of some {}",
}


def heatmap_caption(
    ds: xr.Dataset,
    *,
    bounds: Iterable[str] | None = None,
    reduce: str | float = "mean",
    scale: str = "rows",
    first: Sequence[str] = (),
) -> str:
    """Caption of `lipbound.plots.heatmaps` with these arguments.

    ``first``: the panels of the first rows, where these have their own scale.
    """
    each = " (a colour scale for each panel)" if scale == "panel" else ""
    samples = (
        ""
        if ds.sizes["sample"] == 1 or "head" not in ds.dims
        else f", each the {statistics.reduction_name(reduce)} over samples"
    )
    own = (
        f" {joined([ds[name].attrs['label'] for name in first])}: on a colour scale of their own."
        if len(first) > 1
        else ""
    )
    rows = own or (
        f" {ds[first[0]].attrs['label']}: on a colour scale of its own." if first else ""
    )
    entries = audit(ds)
    counts = [entries[name] for name in statistics.panels(ds, bounds) if name in bounds_there(ds)]
    used = ["\u2021"] * any(e["violations"] for e in counts) + ["\u2020"] * any(
        e["sound"] < e["compared"] and not e["violations"] for e in counts
    )
    legend = "".join(
        f" {mark} {MARKS[mark].format('head' if 'head' in ds.dims else 'layer')}." for mark in used
    )
    ratios = (
        " Above the panels: bound / "
        f"exact{', geometric mean' if labels.over(ds) else ''}{labels.over(ds)}."
        if counts
        else ""
    )
    and_bounds = f" and its bound{'s' if len(counts) > 1 else ''}" if counts else ""
    return plain(
        f"log10 of the local Lipschitz constant{and_bounds}{samples}{each}.{rows} "
        f"{labels.run_caption(ds)}.{ratios}{legend}"
    )


def latex_caption(text: str) -> str:
    r"""A caption for LaTeX: formulas in mathematics, foreign text escaped, long names breakable.

    >>> latex_caption("log10 of 50 %")
    '$\\log_{10}$ of 50 \\%'
    """
    return typeset(text).replace("log10 of", "$\\log_{10}$ of")


def caption_files(figure: Path, text: str) -> dict[Path, str]:
    r"""Contents of the two caption files beside a figure, by path.

    ``figure.caption.txt`` is plain text, ``figure.caption.tex`` is ``\caption{...}`` for a figure
    environment.
    """
    contents = {".txt": text, ".tex": f"\\caption{{{latex_caption(text)}}}"}
    return {
        figure.with_name(f"{figure.stem}.caption{kind}"): content + "\n"
        for kind, content in contents.items()
    }
