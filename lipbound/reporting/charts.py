"""Charts beside the heatmaps: bounds over exact norms, over balls, and norms of single tokens."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import LogFormatter, MaxNLocator

from lipbound.bounds.registry import get
from lipbound.errors import LipboundError, check_made, choice, shown, whole
from lipbound.formatting import counted, directed, joined, plain, span
from lipbound.reporting import statistics, styles
from lipbound.reporting.labels import extra_title, model_name, over, relabelled, told, told_apart
from lipbound.runs.store import load, run_of, takes_run
from lipbound.schema import ALIKE, EXACT, EXTRAS, STATISTICS, STEP, with_exact

if TYPE_CHECKING:
    from lipbound.jacobians.token_norms.token_norm import TokenProfile


@takes_run
def ratios(
    ds: xr.Dataset,
    *,
    bounds: Iterable[str] | None = None,
    ax: Axes | None = None,
    path: str | Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """Draw bound / exact of every head and sample, a box per bound, on a logarithmic axis.

    Boxes are quartiles; whiskers reach the smallest and the largest ratio.

    Bounds that lie many decades beyond all others are no boxes but words in their rows, which say
    their range, so that the axis stays legible.

    Args:
        ds: a run.
        bounds: which, from top to bottom; all of the run by default.
        ax: where to draw; a new figure by default. path: where to write the figure.
        labels: what to call bounds, by name ("exact" and "exact_l2" among them), and "model" and
            "data".

    Raises:
        LipboundError: a bound that the run has not, a run without bounds.
    """
    ds = relabelled(ds, labels)
    names = statistics.compared(ds, bounds)
    axes = styles.given_or_new(ax, (3.45, 0.9 + 0.22 * len(names)))
    values = {name: statistics.ratio(ds, name).values for name in names}
    kept, (low, high) = statistics.shared_axis(values)
    high = max(high, low + 0.5)  # of less, a logarithmic axis has no legible numbers
    pad = 0.04 * (high - low)
    low, high = low - pad, high + pad
    box: Any = {"orientation": "horizontal", "whis": (0, 100), "widths": 0.6}
    beside: Any = {"ha": "right", "va": "baseline", "fontsize": "x-small", "parse_math": False}
    for row, (name, v) in enumerate(values.items(), start=1):
        if name in kept:
            inside = v[np.isfinite(v) & (v > 0)]
            axes.boxplot([inside], positions=[row], medianprops={"color": "black"}, **box)
        if said := _beyond(v, name in kept, low, high):
            above = row - 0.1 * (name in kept)  # the whisker
            axes.text(0.99, above, said, transform=axes.get_yaxis_transform(), **beside)
    titles = [ds[name].attrs["label"] for name in names]
    axes.set_yticks(range(1, len(names) + 1), titles, parse_math=False)
    axes.axvline(1, color="0.5", lw=0.8, ls=":")
    axes.set(xscale="log", xlabel="bound / exact")
    axes.set(xlim=(10.0**low, 10.0**high), ylim=(len(names) + 0.5, 0.5))
    return styles.written(axes, path)


def by_layer(
    runs: object,
    *,
    labels: Sequence[str] | None = None,
    bounds: Iterable[str] = (),
    reduce: str | float = "geomean",
    ax: Axes | None = None,
    path: str | Path | None = None,
) -> Axes:
    """Draw exact norms against layers, of several runs in one figure, and bounds beside them.

    A bound on another map has the exact norm of its own map beside it. Each value is reduced over
    samples and heads; bands are intervals over samples, or of few samples their range (see
    `lipbound.reporting.statistics.sample_span`), as is said below the axis. Bounds that lie many
    decades beyond all others leave the axis; the same note names them with the range of bound /
    exact.

    Args:
        runs: a run, or several of one map and norm; Datasets or paths.
        labels: names of the runs, by their models by default.
        bounds: names of bounds that all of the runs have.
        reduce: as in `lipbound.reporting.statistics.reduce_samples`.
        ax: where to draw; a new figure by default. path: where to write the figure.

    Raises:
        LipboundError: no run, runs of several maps or norms, another number of labels, a bound that
            a run has not, an unknown reduction.
    """
    several = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    found, names = runs_together(several, labels, "axis")
    chosen = list(dict.fromkeys([bounds] if isinstance(bounds, str) else bounds))
    for ds in found:
        statistics.present(ds, chosen)
    each = {name: [statistics.ratio(ds, name).values.ravel() for ds in found] for name in chosen}
    ratios = {name: np.concatenate(values) for name, values in each.items()}
    kept, _ = statistics.shared_axis(ratios)
    axes = styles.given_or_new(ax, (3.45, 2.8))
    for k, (ds, title) in enumerate(zip(found, names, strict=True)):
        for j, name in enumerate(statistics.panels(ds, kept)):
            label = str(ds[name].attrs["label"])
            label = label if len(found) == 1 else f"{title}: {label}" if kept else title
            look = f"C{k if len(found) > 1 else j}", DASHES[j % len(DASHES)]
            _line(axes, ds[name], reduce, label, *look)
    axes.set(yscale="log", ylabel="local Lipschitz constant")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    _within_ten(axes, *axes.get_ylim())
    points = FontProperties(size="small").get_size_in_points()
    room = 0.75 * axes.figure.get_window_extent().width / axes.figure.dpi
    named, words = axes.get_legend_handles_labels()
    texts = ["\n".join(styles.lines_of(text, room, points)) for text in words]
    above: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}
    axes.legend(named, texts, fontsize="x-small", ncols=1 + (max(map(len, words)) <= 24), **above)
    notes = _layer_notes(found, names, ratios, kept, reduce)
    lines = [line for note in notes for line in styles.lines_of(plain(note), room, points)]
    axes.set_xlabel("\n".join(lines), fontsize="small", parse_math=False)
    return styles.written(axes, path)


def runs_together(
    runs: Sequence[Any], labels: Sequence[str] | None, what: str
) -> tuple[list[xr.Dataset], list[str]]:
    """Several runs that share an axis or a scale, and names of them, by their models by default.

    Raises:
        LipboundError: no run, another number of labels, runs of several maps or norms.
    """
    found = [relabelled(run_of(run)) for run in runs]
    names = told_apart(map(model_name, found)) if labels is None else list(map(plain, labels))
    if not found:
        raise LipboundError("no run was given; give at least one Dataset or saved run")
    if len(names) != len(found):
        raise LipboundError(f"{len(names)} labels were given for {len(found)} runs; give one each")
    for word in ALIKE:
        if len({ds.attrs[word] for ds in found}) > 1:
            said = " and ".join(sorted({str(ds.attrs[word]) for ds in found}))
            raise LipboundError(f"runs of {word} {said} share no {what}; give runs of one {word}")
    return found, names


def _within_ten(axes: Axes, low: float, high: float) -> None:
    """Write numbers on a logarithmic axis in full where a power of ten may not be among them."""
    if high < 10 * low:
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")


def _layer_notes(
    runs: list[xr.Dataset], names: list[str], ratios: Any, kept: list[str], reduce: str | float
) -> list[str]:
    """Words below the axis of `by_layer`: what lines and bands are, what is not drawn, and why."""
    heads = " and heads" * ("head" in runs[0].dims)
    notes = [f"layer ({statistics.reduction_name(reduce)} over samples{heads})"]
    counts = [int(with_exact(ds).sum()) for ds in runs]
    if bands := {statistics.spread_title(n, reduce): n for n in counts if n > 1}:
        notes.append(f"bands: {' or '.join(bands)}")
    if one := [title for title, count in zip(names, counts, strict=True) if count < 2]:
        notes.append(f"{joined(one)}: one sample, no interval")
    for title, count, ds in zip(names, counts, runs, strict=True):
        if kept and count < ds.sizes["sample"]:
            notes.append(f"{title}: exact norms of {counted(count, 'sample')}, bounds of all")
    for name, values in ratios.items():
        label = runs[0][name].attrs["label"]
        least, most = _ends(values)
        if name not in kept:
            notes.append(f"beyond the axis: {label}, {least} to {most} x exact")
        elif np.isinf(values).any():
            notes.append(f"{label}: infinite at some heads; gaps are infinite")
    return notes


DASHES = ("-", "--", ":", "-.")
"""Lines of exact norms, and of bounds in turn."""


def _line(axes: Axes, values: xr.DataArray, reduce: Any, label: str, color: str, ls: str) -> None:
    """One line against layers, with its interval as a band; none where it is infinite."""
    dims = [str(dim) for dim in values.dims if dim != "layer"]
    x, middle = values["layer"].values, statistics.reduce_samples(values, reduce, dims)
    shown = middle.where(np.isfinite(middle))
    axes.plot(x, shown, label=label, color=color, ls=ls, marker=".", ms=4, lw=1)
    ends = statistics.sample_span(values, reduce, dims)
    lower, upper = (end.where(np.isfinite(end)) for end in ends)
    axes.fill_between(x, lower, upper, color=color, alpha=0.2, lw=0)


def _beyond(values: np.ndarray, boxed: bool, low: float, high: float) -> str:
    """Words for the row of a bound that is not all on the axis (from 10^low to 10^high)."""
    ends = statistics.ends(values)
    if np.isnan(ends[0]):
        return "no ratio: no positive exact norm"
    least, most = _ends(values)
    if not boxed:
        return f"beyond: {span(least, most)}"
    down = [f"down to {least}"] * bool(ends[0] < 10**low)
    return ", ".join(down + [f"up to {most}"] * bool(ends[1] > 10**high))


def _ends(values: np.ndarray) -> list[str]:
    """Smallest and largest value in words, rounded outwards."""
    low, high = statistics.ends(values)
    return [end.replace("inf", "\u221e") for end in (directed(low, 2, 0), directed(high, 2, 1))]


def ball_curve(
    ds: xr.Dataset,
    path: str | Path | None = None,
    *,
    sample: int = 0,
    heads: Iterable[int] | None = None,
    title: str = "",
) -> Figure:
    """Draw bounds over balls and the norms an adversary found against the radius.

    A panel for each head; the true supremum lies in the shaded gap.

    Args:
        ds: from `lipbound.radius_curve`; radius 0 is left out of the logarithmic axis.
        path: where to write it. sample, heads: what to show; all heads of sample 0 by default.
            title: what the heads are of, for the caption.

    Raises:
        LipboundError: ``ds`` is no such curve, a file type that cannot be drawn, a file that cannot
            be written.
    """
    check_made(ds, ("radius", "sample", "head"), "lipbound.radius_curve")
    chosen = list(range(ds.sizes["head"])) if heads is None else list(heads)
    across = min(len(chosen), 4)
    down = -(-len(chosen) // across)
    ds = ds.isel(sample=sample).where(ds["radius"] > 0, drop=True)
    radius, there = ds["radius"].values, [name for name in ENDS if name in ds]
    lines = {name: {"lw": 1, "label": get(name).label} for name in ds.attrs["bounds"]}
    lines |= {name: ENDS[name] for name in there}
    with matplotlib.rc_context(styles.BASE | {"font.size": 7.0}):
        figure = styles.Drawing(figsize=(7.1, 1.9 * down + 0.9), layout="constrained")
        panels = np.atleast_1d(figure.subplots(down, across, sharex=True, sharey=True)).ravel()
        for axes, head in zip(panels, chosen, strict=False):
            one = ds.isel(head=head)
            for name, look in lines.items():
                axes.plot(radius, one[name], **look)
            if len(there) == len(ENDS):
                axes.fill_between(radius, *(one[name] for name in there), color="0.85", lw=0)
            axes.set(xscale="log", yscale="log", title=f"head {head}")
        for axes in panels[len(chosen) :]:
            axes.set_axis_off()
        ball = "each token" if ds.attrs["ball"] == "token" else "Frobenius"
        long = f"tokens are {ds.attrs['token_norm']:.3g} long"
        figure.supxlabel(f"radius ({ball}); {long}\n{title}")
        figure.supylabel("local Lipschitz constant")
        named = panels[0].get_legend_handles_labels()
        figure.legend(*named, loc="outside upper center", ncols=3, frameon=False)
        return styles.written(figure, path)


_STEPS = (1, 2, 5, 10)
"""Round distances of ticks, and ten times these, and so on."""
UNITS = {"largest_logit": "score", "entropy": "nats", "first_token": "share of attention"}
UNITS |= {"batch_logit": "score", "qk_clip": "factor"}
"""Units of what is on axes that are not logarithmic."""


def over_steps(
    ds: xr.Dataset | str | Path,
    name: str = "exact",
    path: str | Path | None = None,
    *,
    reduce: str | float | None = None,
    width: str | float = "column",
    font_size: float | None = None,
    labels: Mapping[str, str] | None = None,
) -> Axes:
    """Draw a quantity over the steps of a training, a line for every layer.

    Norms, bounds and most extras are on a logarithmic axis; logits, QK-clip's factor and what is a
    mean over queries are not. With ``path``, the caption is written beside it.

    Args:
        ds: a run over steps, from `lipbound.Monitor` or `lipbound.load`, or its path.
        name: "exact", a bound or an extra of the run, "largest_logit", "entropy" or "first_token".
        path: where to write it.
        reduce: over samples and heads, as in `heatmaps`; by default the maximum of logits, the
            smallest factor of QK-clip (0, a quantile), the mean of what is a mean over queries, and
            the geometric mean of all else.
        width: "page", "column", "slide", or inches. font_size: points. labels: as in `heatmaps`.

    Raises:
        LipboundError: a run without steps, a quantity that it has not, an unknown reduction.
    """
    ds = load(ds) if isinstance(ds, str | Path) else ds
    if STEP not in getattr(ds, "dims", ()):
        raise LipboundError("the run has no steps of training; lb.Monitor makes one that has")
    ds = relabelled(ds, labels)
    known = [one for one in (*EXACT[:3], *STATISTICS, *ds.attrs["bounds"]) if one in ds.data_vars]
    extras = statistics.extras(ds)
    name = choice("quantity", EXTRAS.get(name, name), [*known, *extras])
    logarithmic = name not in UNITS
    how = statistics.USUAL.get(name, "geomean") if reduce is None else reduce
    axes_of_mean = [axis for axis in ("sample", "head") if axis in ds.dims]
    lines = statistics.reduce_samples(ds[name], how, axes_of_mean).transpose("layer", STEP)
    settings, inches, _ = styles.look(None, width, font_size)
    layers = ds["layer"].values.tolist()
    colors = matplotlib.colormaps["viridis"].resampled(len(layers))
    with matplotlib.rc_context(settings):
        figure = styles.Drawing(figsize=(inches, 0.7 * inches), layout="constrained")
        axes = figure.add_subplot()
        for i, layer in enumerate(layers):
            line = lines[i].dropna(STEP)  # steps between norms have extras alone
            axes.plot(line[STEP], line, color=colors(i), lw=1, marker=".", ms=2, label=str(layer))
        axes.set(xlabel="step of training", yscale="log" if logarithmic else "linear")
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=_STEPS, integer=True, min_n_ticks=1))
        if logarithmic:
            _within_ten(axes, *statistics.ends(lines))
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_title(statistics.label_of(ds, name), parse_math=False)
        norm = extra_title(ds, name) if name in extras else "local Lipschitz constant"
        axes.set_ylabel(UNITS.get(name, norm), parse_math=False)
        columns = -(-len(layers) // 12)
        figure.legend(title="layer", loc="outside right upper", ncols=columns, frameon=False)
        if path is None:
            return axes
        means = over(ds, axes_of_mean)
        said = f"{statistics.reduction_name(how)}{means}, " if means else ""
        words = f"{statistics.label_of(ds, name)}: {said}a line for every layer. {told(ds)}."
        return styles.written(axes, path, plain(words))


ENDS: dict[str, Any] = {
    "over_ball": {"color": "black", "lw": 1.5, "label": "lipbound, over the ball"},
    "adversary": {"color": "black", "lw": 1, "ls": ":", "label": "found by an adversary"},
}
"""What encloses the true supremum: variables, and how they are drawn."""
PANELS = ("what this token does to all outputs", "what all tokens do to this output")
_LONGEST = 14
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
    """Draw norms of single tokens: tokens across, by their text, heads down.

    One panel is for tokens that move, one for output tokens.

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
        LipboundError: no profile, a sample or head that there is not, another number of tokens, a
            file that cannot be drawn or written.
    """
    if not hasattr(profile, "output_lower"):
        raise LipboundError(f"profile is {shown(profile)}; give what lb.token_profile returns")
    chosen, grids = _norms(profile, sample, heads)
    rows, count = grids[0].shape
    names = [plain(str(token)) for token in (range(count) if tokens is None else tokens)]
    if len(names) != count:
        raise LipboundError(f"{len(names)} tokens were given for {count}; give the text of each")
    names = [n if len(n) <= _LONGEST else f"{n[: _LONGEST - 1]}\u2026" for n in names]
    settings, inches, points = styles.look(None, width, font_size)
    tall = 0.9 + min(2.6, 0.16 * rows if rows > 1 else 1.0)
    size = (inches, 2 * tall + 0.06 * max(map(len, names), default=1) + 0.3)
    room = max(inches - (0.75 if rows == 1 else 1.35), 0.5)  # beside axes and colour bar
    with matplotlib.rc_context(settings):
        figure = styles.Drawing(figsize=size, layout="constrained")
        panels = figure.subplots(2, 1, sharex=True)
        logs = [np.log10(np.where(grid > 0, grid, np.nan)) for grid in grids]
        low, high = np.nan_to_num(statistics.ends(np.concatenate(logs)))
        options: Any = {"cmap": "viridis", "aspect": "auto", "interpolation": "nearest"}
        for axes, grid, colors, words in zip(panels, grids, logs, PANELS, strict=True):
            lines = "\n".join(styles.in_two_lines(words, room, points))
            axes.set_title(lines, fontsize=points, parse_math=False)
            axes.tick_params(axis="x", length=1.5, width=0.5, pad=1.5, labelsize=points - 0.5)
            if rows == 1:
                axes.bar(range(count), grid[0], color="0.35", width=0.8)
                head = "" if profile.lower.ndim == 2 else f", head {chosen[0]}"
                axes.set(ylabel=f"norm{head}", xlim=(-0.5, count - 0.5))
            else:
                picture = axes.imshow(colors, vmin=low, vmax=high, **options)
                each = slice(None, None, max(1, -(-rows // 12)))
                axes.set_yticks(range(rows)[each], list(map(str, chosen))[each])
                axes.set_ylabel("head")
        if rows > 1:
            bar = figure.colorbar(picture, ax=panels, aspect=40, pad=0.02, fraction=0.08)
            bar.set_label("log10 of the norm", loc="center")
        step = max(1, -(-count // max(1, int(inches * 0.82 * 72 / (1.15 * points)))))
        panels[1].set_xticks(range(0, count, step), names[::step], rotation=90, parse_math=False)
        if step > 1:
            panels[1].set_xlabel(f"one token of {step} is named")
        if title:
            figure.suptitle(title, fontsize=points + 1, parse_math=False)
        return styles.written(figure, path)


def _norms(
    profile: "TokenProfile", sample: int, heads: Iterable[int] | None
) -> tuple[list[int], list[np.ndarray]]:
    """Heads, and (heads, N) of each panel; one row for a whole layer.

    Raises:
        LipboundError: a sample or a head that the profile has not.
    """
    sample, samples = whole("sample", sample), profile.lower.shape[0]
    if not 0 <= sample < samples:
        raise LipboundError(f"sample is {sample}; the profile has samples 0 to {samples - 1}")
    pairs = (profile.lower, profile.upper), (profile.output_lower, profile.output_upper)
    ends = [[np.atleast_2d(end[sample].numpy()) for end in pair] for pair in pairs]
    known = range(len(ends[0][0]))
    chosen = list(known if heads is None else heads)
    if not chosen or not all(type(head) is int and head in known for head in chosen):
        raise LipboundError(f"heads are {shown(chosen)}; they must be among 0 to {len(known) - 1}")
    finite = ((low, np.where(np.isfinite(high), high, np.nan)) for low, high in ends)
    return chosen, [np.sqrt(low * high)[chosen] for low, high in finite]
