"""Statistics of a run, computed once for tables, figures and the page."""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import allowance, audit
from lipbound.errors import LipboundError, UnknownNameError, choice, is_number, nearest, shown
from lipbound.reporting.labels import check_numbers
from lipbound.runs.pair import sides
from lipbound.runs.store import takes_run
from lipbound.schema import EXTRAS, bounds_there, compared_with, is_diff, norm_of

REDUCTIONS = ("mean", "geomean", "max", "median")


def reduce_samples(
    values: xr.DataArray, how: str | float, dims: Sequence[str] = ("sample",)
) -> xr.DataArray:
    """Reduce values over samples, or over other dimensions.

    Args:
        values: to reduce; entries without a value (NaN) do not count.
        how: "mean", "geomean", "max", "median" or a quantile in [0, 1].
        dims: the dimensions.

    Returns:
        The values without these dimensions; NaN where there are none.

    Raises:
        UnknownNameError: another name, or a number outside of [0, 1].
        LipboundError: values that are no DataArray with these dimensions.
    """
    if not isinstance(values, xr.DataArray) or not {*dims} <= {*values.dims}:
        there = f"one over {', '.join(map(str, values.dims))}" if hasattr(values, "dims") else ""
        raise LipboundError(
            f"a variable over {', '.join(dims)} is wanted, not {there or shown(values)}; give one "
            'of a run, such as ds["exact"]'
        )
    quantile = not isinstance(how, str | bool) and is_number(how) and 0 <= float(how) <= 1
    if not quantile and how not in REDUCTIONS:
        raise UnknownNameError(
            f"unknown reduction {shown(how)}; {nearest(how, REDUCTIONS)}, or a quantile between 0 "
            "and 1"
        )
    holes = bool(values.isnull().any())  # to look for them takes numpy many times as long
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of places without any value
        reduced: xr.DataArray
        if how == "geomean":
            logs: xr.DataArray = xr.apply_ufunc(np.log, values)
            reduced = xr.apply_ufunc(np.exp, logs.mean(dims, skipna=True))
        elif isinstance(how, str):
            reduced = getattr(values, how)(dims, skipna=holes)
        else:
            # infinite values are ordered like any others, but cannot be interpolated
            top = np.finfo(np.float64).max / 4
            reduced = values.clip(max=top).quantile(how, dims, skipna=holes)
            reduced = reduced.where(~(reduced > top * 1e-6), np.inf)
    return reduced


def interval(
    values: xr.DataArray, how: str | float = "geomean", dims: Sequence[str] = ("sample",)
) -> tuple[xr.DataArray, xr.DataArray]:
    """Find the bootstrap interval over samples of what `reduce_samples` gives.

    Samples are drawn again, with replacement, as many as there are: `RESAMPLES` times, the same
    draws for all places. The ends are percentiles of what their reductions are, to hold with the
    probability `LEVEL`. That treats samples as independent draws from a population; of few samples
    the interval is too narrow.

    Args:
        values: to reduce, with the dimension "sample"; samples without any value are not drawn.
        how: as in `reduce_samples`.
        dims: the same, "sample" among them; other dimensions are reduced within every resample.

    Returns:
        Lower and upper ends, without these dimensions; NaN where fewer than two samples have
        values, or a resample has none.

    Raises:
        UnknownNameError: an unknown reduction.
    """
    there = values.notnull().any([dim for dim in values.dims if dim != "sample"])
    values = values.isel(sample=np.flatnonzero(there.values))
    empty = reduce_samples(values, how, dims) * np.nan
    if values.sizes["sample"] < 2:
        return empty, empty
    from scipy.stats import bootstrap  # its import takes longer than most tables

    inner = [str(dim) for dim in values.dims if dim in dims and dim != "sample"]
    order = [*inner, *empty.dims, "sample"]
    numbers = values.transpose(*order).values
    numbers = numbers.reshape(-1, *numbers.shape[len(inner) :])  # (inner, ..., samples)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of places without any value
        drawn = bootstrap(
            tuple(_totals(numbers, how)),
            lambda *parts, axis: _of_totals(parts, how),
            paired=True,
            vectorized=True,
            axis=-1,
            n_resamples=RESAMPLES,
            batch=max(1, int(4e6 / numbers.size)),
            method="percentile",
            random_state=np.random.default_rng(SEED),  # rng since scipy 1.15
        ).bootstrap_distribution
        # percentiles that are values of resamples, so that infinite ones have them
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        ends = np.quantile(drawn, tails, axis=-1, method="inverted_cdf")
    lower, upper = (empty.copy(data=end) for end in ends)
    return lower, upper


def _totals(numbers: np.ndarray, how: str | float) -> Iterable[np.ndarray]:
    """Return each sample's part in a reduction, (..., samples) each: sum and count for means."""
    if how not in ("mean", "geomean"):
        return numbers
    logs = np.log(numbers) if how == "geomean" else numbers
    return np.nansum(logs, axis=0), (~np.isnan(numbers)).sum(axis=0).astype(float)


def _of_totals(parts: Sequence[np.ndarray], how: str | float) -> np.ndarray:
    """Reduce the last axis of `_totals`."""
    if how in ("mean", "geomean"):
        total, count = (part.sum(-1) for part in parts)
        return np.exp(total / count) if how == "geomean" else np.asarray(total / count)
    stacked = np.stack(parts, axis=-1)
    names = [f"axis {k}" for k in range(stacked.ndim)]
    return reduce_samples(xr.DataArray(stacked, dims=names), how, names[-2:]).values


def interval_words(samples: int) -> str:
    """Say what the intervals over so many samples are, or why there are none."""
    if samples < 2:
        return "one sample: no interval over samples" if samples else ""
    few = ", too narrow with so few" if samples < FEW else ""
    return f"{LIKELY}: percentile bootstrap over {samples} samples{few}"


def span(low: str, high: str) -> str:
    """Two ends in words; one where they print alike."""
    return low if low == high else f"{low} to {high}"


def across(ds: xr.Dataset | xr.DataArray) -> str:
    """Dimension across a panel of a heatmap: heads, or samples for maps of whole layers."""
    return "head" if "head" in ds.dims else "sample"


def panel(values: xr.DataArray, how: str | float) -> xr.DataArray:
    """Values of a panel of a heatmap, (layer, head), reduced over samples.

    (layer, sample) for maps of whole layers, which need no reduction.
    """
    over = across(values)
    return (reduce_samples(values, how) if over == "head" else values).transpose("layer", over)


def reduction_name(how: str | float) -> str:
    """A reduction in words."""
    if not isinstance(how, str):
        return f"{how:g}-quantile"
    return {"mean": "arithmetic mean", "geomean": "geometric mean", "max": "maximum"}.get(how, how)


ROWS = ("bound", "layer", "head")
VALUES = ("ratio", "value")
SPREAD = ("geomean", "min", "max", "sample_min", "sample_max")
"""Columns about the spread of values: their geometric mean and ends, and the ends of the geometric
means of single samples."""
INTERVAL = ("interval_lower", "interval_upper")
"""Columns with the ends of `interval`."""
LEVEL, RESAMPLES, SEED = 0.95, 2000, 0
"""Level of bootstrap intervals, how many resamples they are from, and the seed of these."""
LIKELY = f"{LEVEL:.0%} interval"
"""Title of their columns."""
FEW = 20
"""Samples below which bootstrap intervals are noticeably too narrow."""
AUDITED = ("violations", "compared", "sound")
"""Columns that count places of the audit."""
EXTRA_WIDTHS = {EXTRAS["frobenius"]: 2e-6, EXTRAS["condition"]: 0.04}
"""Relative widths to which the extras of runs are known."""
OFF_SCALE = 4.0
"""Decades by which a panel's median may exceed every other panel's before it leaves the shared
scale."""
APART, FARTHEST = 8.0, 40.0
"""Decades between a bound's median ratio and the next one's, and from one, beyond which it leaves
an axis of ratios."""


@takes_run
def summary(ds: xr.Dataset) -> pd.DataFrame:
    """Per bound: bound / exact over samples, layers and heads, and the audit.

    Columns ``label``; ``geomean, min, max`` of bound / ``exact``; ``geomean_lower``, the geometric
    mean against ``exact_upper``: the true one lies between the two (NaN for estimates without upper
    ends); ``interval_lower, interval_upper``, the bootstrap interval of the geometric mean (see
    `interval`); ``sample_min, sample_max``, smallest and largest geometric mean of single samples;
    ``violations, compared, sound``: ``sound`` counts where the bound's assumptions held,
    ``violations`` where it is below the exact norm (of its own map: L2 attention for ``kim``).
    Heads whose exact norm is zero have no ratio.
    """
    check_numbers(ds)
    names, counts, rows = bounds_there(ds), audit(ds), []
    for name in names:
        upper = geomean(ratio(ds, name, upper=True)) if has_upper(ds, name) else float("nan")
        row = {"label": ds[name].attrs["label"], "geomean_lower": upper}
        rows.append(row | _spread(ratio(ds, name)) | counts[name])
    columns = ["label", *SPREAD[:3], "geomean_lower", *INTERVAL, *SPREAD[3:], *AUDITED]
    return pd.DataFrame(rows, columns=columns, index=pd.Index(names, name="bound"))


def exact_summary(ds: xr.Dataset) -> pd.DataFrame:
    """Columns `SPREAD` and `INTERVAL` of all exact norms, in one row."""
    return pd.DataFrame([_spread(ds["exact"])], index=pd.Index(["exact"], name="norm"))


def _spread(values: xr.DataArray) -> dict[str, float]:
    """Columns `SPREAD` and `INTERVAL` of values with samples; NaN where there are none."""
    single = [geomean(values.isel(sample=s)) for s in range(values.sizes["sample"])]
    found = (geomean(values), *ends(values), *ends(np.array(single)))
    limits = map(float, interval(values, "geomean", list(map(str, values.dims))))
    return dict(zip((*SPREAD, *INTERVAL), (*found, *limits), strict=True))


def ends(values: xr.DataArray | np.ndarray) -> tuple[float, float]:
    """Smallest and largest of some values; NaN where there are none."""
    known = _known(values)
    return (float(known.min()), float(known.max())) if known.size else (float("nan"),) * 2


def geomean(values: xr.DataArray) -> float:
    """Geometric mean of all values that are there; NaN where there are none."""
    known = _known(values)
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(known).mean())) if known.size else float("nan")


def _known(values: xr.DataArray | np.ndarray) -> np.ndarray:
    found = np.asarray(values)
    return found[~np.isnan(found)]


@takes_run
def breakdown(
    ds: xr.Dataset,
    by: str = "layer",
    *,
    bounds: Iterable[str] | None = None,
    reduce: str | float = "geomean",
    values: str = "ratio",
) -> pd.DataFrame:
    """Per layer, or per layer and head: the exact norm, and every bound or its ratio to it.

    Args:
        ds: a run.
        by: "layer" or "head".
        bounds: which; all of the run by default.
        reduce: "geomean", "mean", "max", "median" or a quantile, over samples (and heads, for
            layers).
        values: "ratio" (bound / exact) or "value".

    Returns:
        Columns ``exact``, ``exact_upper`` (where the run has it), ``interval_lower,
        interval_upper`` (of the exact norm, see `interval`), ``sample_min, sample_max`` (of the
        exact norm, reduced over heads alone), the extras of the run (``jacobian_frobenius``,
        ``jacobian_condition``), and one per bound.

    Raises:
        LipboundError: unknown names; heads of a run on whole layers.
    """
    choice("rows", by, ROWS[1:])
    choice("values", values, VALUES)
    if by == "head" and "head" not in ds.dims:
        raise LipboundError(
            "the run is about whole layers and has no heads; ask for a table by layer"
        )
    check_numbers(ds)
    names, levels = present(ds, bounds), ["layer", "head"][: ROWS.index(by)]
    inner = [str(dim) for dim in ds["exact"].dims if dim not in ("sample", *levels)]
    single = reduce_samples(ds["exact"], reduce, inner) if inner else ds["exact"]
    shown = {name: ds[name] for name in ("exact", "exact_upper") if name in ds}
    order = [*shown, *INTERVAL, "sample_min", "sample_max", *extras(ds), *names]
    shown |= {name: ds[name] for name in extras(ds)}
    shown |= {name: ratio(ds, name) if values == "ratio" else ds[name] for name in names}
    cells = {name: reduce_samples(one, reduce, ["sample", *inner]) for name, one in shown.items()}
    cells |= {"sample_min": single.min("sample"), "sample_max": single.max("sample")}
    cells |= zip(INTERVAL, interval(ds["exact"], reduce, ["sample", *inner]), strict=True)
    table = pd.DataFrame({name: cells[name].transpose(*levels).to_series() for name in order})
    # layers of fewer heads have empty places
    return table.loc[~table[["exact", *names]].isna().all(axis=1)]


def present(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Names of bounds that a run has, all by default.

    Raises:
        UnknownNameError: others, those that no bound has before those that the run lacks.
    """
    given = [bounds] if isinstance(bounds, str) else bounds
    names = bounds_there(ds) if given is None else list(given)
    missing = [name for name in names if name not in bounds_there(ds)]
    if missing:
        from lipbound.bounds.registry import get  # it needs torch, which names of the run do not

        missing = [get(name).name for name in missing]
        raise UnknownNameError(
            f"the run has no bound {missing[0]!r}; it has {', '.join(bounds_there(ds)) or 'none'}"
        )
    return names


def compared(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Names of bounds whose ratios to the exact norms are drawn, as of `present`.

    Raises:
        LipboundError: there are none.
    """
    if names := present(ds, bounds):
        return names
    raise LipboundError(
        "the run has no bounds, whose ratios to the exact norms are drawn; compare the model with "
        "some"
    )


def requested(ds: xr.Dataset, bounds: str) -> list[str]:
    """Names of bounds, and of extras of the run, from a list separated by commas.

    Read as `lipbound.bounds.resolve` does in the run's norm; those of the run need no registry, and
    so no torch.
    """
    ds = sides(ds)[0] if is_diff(ds) else ds
    names = [part.strip() for part in bounds.split(",") if part.strip()]
    if names and all(name in (*bounds_there(ds), *EXTRAS) for name in names):
        return list(dict.fromkeys(names))
    from lipbound.bounds.registry import resolve

    return resolve(bounds, norm_of(ds))


@takes_run
def panels(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Variables in the order of figures.

    The exact norm, then bounds, each behind the exact norm of its own map.
    """
    pairs = ((compared_with(ds, name), name) for name in present(ds, bounds))
    return list(dict.fromkeys(["exact", *(name for pair in pairs for name in pair)]))


def extras(ds: xr.Dataset) -> list[str]:
    """Variables of a run with values on its Jacobians besides norms, see `EXTRA_WIDTHS`."""
    return [name for name in EXTRA_WIDTHS if name in ds.variables and ds[name].notnull().any()]


def shared_scale(grids: dict[str, np.ndarray]) -> tuple[float, float]:
    """Limits of the common colour scale.

    It spans all panels, except those whose median lies decades above every other one.

    Args:
        grids: log10 of the values of each panel, by name.

    Raises:
        LipboundError: something else.
    """
    if not isinstance(grids, dict):
        raise LipboundError(
            f"grids is {shown(grids)}; give a dict of the panels, log10 of their values by name"
        )
    medians = {
        name: float(np.nanmedian(np.where(np.isneginf(grid), np.nan, grid)))
        for name, grid in grids.items()
        if np.isfinite(grid).any()
    }
    kept = _together(medians, min(medians.values(), default=0.0), OFF_SCALE)
    finite = [grids[name][np.isfinite(grids[name])] for name in kept]
    return ends(np.concatenate(finite or [np.zeros(1)]))


def shared_axis(ratios: dict[str, np.ndarray]) -> tuple[list[str], tuple[float, float]]:
    """Choose the bounds that share an axis of ratios, and its ends (log10).

    From ratios near one outwards, up to a gap of `APART` decades.

    Args:
        ratios: of each bound; zero, infinite ones and NaN do not count.

    Returns:
        Names in their order, and the ends, one among them. Single values far beyond the medians of
        all do not stretch it.
    """
    there = {name: values[np.isfinite(values) & (values > 0)] for name, values in ratios.items()}
    known = {name: np.log10(values) for name, values in there.items()}
    medians = {name: float(np.median(values)) for name, values in known.items() if values.size}
    near = {name: median for name, median in medians.items() if abs(median) <= FARTHEST}
    kept = _together(near, 0.0, APART)
    middles = [0.0, *(near[name] for name in kept)]
    low, high = min(middles) - OFF_SCALE, max(middles) + OFF_SCALE
    drawn = np.concatenate([np.zeros(1), *(known[name] for name in kept)])
    return [name for name in ratios if name in kept], ends(drawn[(drawn >= low) & (drawn <= high)])


def _together(medians: dict[str, float], start: float, gap: float) -> list[str]:
    """Names whose medians follow one another from a start outwards, without a gap so wide."""
    kept: list[str] = []
    for name in sorted(medians, key=lambda name: abs(medians[name] - start)):
        if not kept or min(abs(medians[name] - medians[other]) for other in kept) <= gap:
            kept.append(name)
    return kept


@takes_run
def widths(ds: xr.Dataset, name: str = "exact") -> xr.DataArray:
    """Logarithm of upper over lower end of a bound's exact norms, by sample, layer, head.

    The exact norms are those that a bound (or "exact" itself) is compared with.

    Estimates without an upper end count as if they were ``tol`` wide. NaN where there is no norm.
    """
    of = "exact" if name == "exact" else compared_with(ds, name)
    slack, lower = allowance(of), ds[of]
    upper = ds["exact_upper"] if has_upper(ds, name) else ds[of] * (1 + float(ds.attrs["tol"]))
    with np.errstate(all="ignore"):
        width: xr.DataArray = xr.apply_ufunc(np.log, upper / lower.where(lower > 0, 0.0)) + slack
    return width.where(ds[of] > 0)


@takes_run
def width(ds: xr.Dataset, name: str) -> float:
    """Relative width of the enclosure of the geometric mean of a bound's ratios.

    Or of exact norms; over everything.
    """
    known = _known(widths(ds, name))
    return float(np.expm1(known.mean())) if known.size else 0.0


def has_upper(ds: xr.Dataset, name: str) -> bool:
    """True if the exact norm a bound is compared with (or "exact" itself) has an upper end."""
    return "exact_upper" in ds and (name == "exact" or compared_with(ds, name) == "exact")


@takes_run
def ratio(ds: xr.Dataset, name: str, *, upper: bool = False) -> xr.DataArray:
    """Bound / exact, of the bound's own map, where that is positive.

    With ``upper``, against the upper end, at the same places.
    """
    exact = ds[compared_with(ds, name)]
    known, values = exact.values, ds[name].transpose(*exact.dims).values
    of = ds["exact_upper"].transpose(*exact.dims).values if upper else known
    with np.errstate(all="ignore"):
        quotient = np.where(np.isfinite(known) & (known > 0), values / of, np.nan)
    return xr.DataArray(quotient, coords=exact.coords, dims=exact.dims)


def cell_widths(ds: xr.Dataset, name: str, reduce: str | float, levels: list[str]) -> xr.DataArray:
    """Relative widths of the enclosures of values that `reduce_samples` gives.

    The mean logarithm for geometric means, else the largest.

    Args:
        ds: a run. name: of a bound, or "exact". reduce: as in `reduce_samples`.
        levels: the dimensions that are left.
    """
    wide, how = widths(ds, name), "mean" if reduce == "geomean" else "max"
    inner = [str(dim) for dim in wide.dims if dim not in levels]
    cells = reduce_samples(wide, how, inner).transpose(*levels)
    found: xr.DataArray = xr.apply_ufunc(np.expm1, cells)
    return found


def spread_widths(ds: xr.Dataset, name: str) -> dict[str, float]:
    """Relative widths of the enclosures of a row of `summary`: of `SPREAD` and `INTERVAL`."""
    columns, wide, quotient = (*SPREAD, *INTERVAL), widths(ds, name).values, ratio(ds, name).values
    if np.isnan(quotient).all():
        return dict.fromkeys(columns, 0.0)
    lowest, highest = wide.flat[np.nanargmin(quotient)], wide.flat[np.nanargmax(quotient)]
    widest = max(np.nanmean(one) for one in wide if not np.isnan(one).all())
    found = (np.nanmean(wide), lowest, highest, *[widest] * 4)
    return {column: float(np.expm1(value)) for column, value in zip(columns, found, strict=True)}
