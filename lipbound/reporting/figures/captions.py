"""What stands beside a figure: its caption as plain text and for LaTeX, each in a file
of its own."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.formatting import joined, plain
from lipbound.reporting import labels, statistics
from lipbound.reporting.latex import typeset
from lipbound.reporting.reductions import reduction_name
from lipbound.schema import bounds_there

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
    """The caption of `lipbound.plots.heatmaps` with these arguments; ``first``: the panels of the
    first rows, where these have their own scale."""
    each = " (a colour scale for each panel)" if scale == "panel" else ""
    samples = (
        ""
        if ds.sizes["sample"] == 1 or "head" not in ds.dims
        else f", each the {reduction_name(reduce)} over samples"
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
    r"""The caption beside a figure: ``figure.caption.txt``, and ``figure.caption.tex``, which is
    ``\caption{...}`` for a figure environment."""
    contents = {".txt": text, ".tex": f"\\caption{{{latex_caption(text)}}}"}
    return {
        figure.with_name(f"{figure.stem}.caption{kind}"): content + "\n"
        for kind, content in contents.items()
    }
