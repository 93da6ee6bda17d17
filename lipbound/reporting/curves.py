"""Figures that are no heatmaps: ratios of bounds to exact norms, and bounds over balls against the
radius."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lipbound.bounds.registry import get
from lipbound.errors import LipboundError
from lipbound.formatting import number
from lipbound.reporting import statistics
from lipbound.reporting.labels import relabelled
from lipbound.reporting.styles import BASE, Drawing, write
from lipbound.runs.store import takes_run


@takes_run
def ratios(
    ds: xr.Dataset,
    *,
    bounds: Iterable[str] | None = None,
    ax: Axes | None = None,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """How far above: bound / exact of every head and sample, a box per bound (quartiles; whiskers
    to the smallest and the largest), logarithmic.

    Bounds that lie many decades beyond all others are no boxes but words in their rows, which say
    their range, so that the axis stays legible.

    Args:
        ds: a run.
        bounds: which, from top to bottom; all of the run by default.
        ax: where to draw; a new figure by default.
        labels: what to call bounds, by name ("exact" and "exact_l2" among them), and "model" and
            "data".

    Raises:
        LipboundError: a bound that the run has not, a run without bounds.
    """
    ds = relabelled(ds, labels)
    names = statistics.present(ds, bounds)
    if not names:
        raise LipboundError(
            "the run has no bounds, whose ratios to the exact norms are drawn; compare the model "
            "with some"
        )
    axes = (
        ax
        if ax is not None
        else Drawing(figsize=(3.45, 0.9 + 0.22 * len(names)), layout="constrained").add_subplot()
    )
    values = [statistics.ratio(ds, name).values for name in names]
    with np.errstate(divide="ignore"):
        logs = {name: np.log10(v) for name, v in zip(names, values, strict=True)}
    kept, (low, high) = statistics.shared_axis(logs)
    high = max(high, low + 0.5)  # of less, a logarithmic axis has no legible numbers
    pad = 0.04 * (high - low)
    for row, (name, v) in enumerate(zip(names, values, strict=True), start=1):
        inside = v[np.isfinite(v) & (v > 0)]
        if name in kept:
            axes.boxplot(
                [inside],
                positions=[row],
                orientation="horizontal",
                whis=(0, 100),
                widths=0.6,
                medianprops={"color": "black"},
            )
        if said := _beyond(v, name in kept, low - pad, high + pad):
            above = row - 0.1 * (name in kept)  # the whisker
            axes.text(
                0.99,
                above,
                said,
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="baseline",
                fontsize="x-small",
                parse_math=False,
            )
    axes.set_yticks(
        range(1, len(names) + 1), [ds[name].attrs["label"] for name in names], parse_math=False
    )
    axes.axvline(1, color="0.5", lw=0.8, ls=":")
    axes.set(
        xscale="log",
        xlabel="bound / exact",
        xlim=(10.0 ** (low - pad), 10.0 ** (high + pad)),
        ylim=(len(names) + 0.5, 0.5),
    )
    return axes


def _beyond(values: np.ndarray, boxed: bool, low: float, high: float) -> str:
    """Words for the row of a bound of which not everything is on the axis (from 10^low
    to 10^high)."""
    known = values[~np.isnan(values)]
    if not known.size:
        return "no ratio: no positive exact norm"
    least, most = (
        number(float(end), 2).replace("inf", "\u221e") for end in (known.min(), known.max())
    )
    if not boxed:
        return f"beyond: {least} to {most}" if least != most else f"beyond: {least}"
    with np.errstate(divide="ignore"):
        return ", ".join(
            [f"down to {least}"] * bool(np.log10(known.min()) < low)
            + [f"up to {most}"] * bool(np.log10(known.max()) > high)
        )


def ball_curve(
    ds: xr.Dataset,
    path: str | Path | None = None,
    *,
    sample: int = 0,
    heads: Iterable[int] | None = None,
    title: str = "",
) -> Figure:
    """Bounds over balls against the radius, a panel for each head, with what an adversary found:
    the true supremum lies in the shaded gap.

    Args:
        ds: from `lipbound.radius_curve`; radius 0 is left out of the logarithmic axis.
        path: where to write it. sample, heads: what to show; all heads of sample 0 by default.
            title: what the heads are of, for the caption.

    Raises:
        LipboundError: a file type that cannot be drawn, a file that cannot be written.
    """
    chosen = list(range(ds.sizes["head"])) if heads is None else list(heads)
    across = min(len(chosen), 4)
    down = -(-len(chosen) // across)
    ds = ds.isel(sample=sample).where(ds["radius"] > 0, drop=True)
    radius = ds["radius"].values
    with matplotlib.rc_context(BASE | {"font.size": 7.0}):
        figure = Drawing(figsize=(7.1, 1.9 * down + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        panels = np.atleast_1d(figure.subplots(down, across, sharex=True, sharey=True)).ravel()
        for axes, head in zip(panels, chosen, strict=False):
            one = ds.isel(head=head)
            for name in ds.attrs["bounds"]:
                axes.plot(radius, one[name], lw=1, label=get(name).label)
            if "over_ball" in one:
                axes.plot(
                    radius, one["over_ball"], color="black", lw=1.5, label="lipbound, over the ball"
                )
            if "adversary" in one:
                axes.plot(
                    radius,
                    one["adversary"],
                    color="black",
                    lw=1,
                    ls=":",
                    label="found by an adversary",
                )
            if "adversary" in one and "over_ball" in one:
                axes.fill_between(
                    radius, one["adversary"].values, one["over_ball"].values, color="0.85", lw=0
                )
            axes.set(xscale="log", yscale="log", title=f"head {head}")
        for axes in panels[len(chosen) :]:
            axes.set_axis_off()
        figure.supxlabel(
            f"radius ({'each token' if ds.attrs['ball'] == 'token' else 'Frobenius'}); tokens "
            f"are {ds.attrs['token_norm']:.3g} long\n{title}"
        )
        figure.supylabel("local Lipschitz constant")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        if path is not None:
            write(figure, Path(path))
    return figure
