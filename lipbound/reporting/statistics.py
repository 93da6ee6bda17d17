"""Statistics of a run, computed once for tables, figures and the page."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import xarray as xr

from lipbound import schema
from lipbound.bounds.audit import allowance, audit
from lipbound.bounds.registry import get, resolve
from lipbound.errors import LipboundError, UnknownNameError, choice, is_number, nearest, shown
from lipbound.formatting import plain
from lipbound.runs.store import takes_run

REDUCTIONS = ("mean", "geomean", "max", "median")
Reduction = str | float
"""One of these, or a quantile in [0, 1]."""
USUAL: dict[str, Reduction] = {"largest_logit": "max", "batch_logit": "max", "qk_clip": 0.0}
USUAL |= dict.fromkeys(schema.MEANS, "mean")
"""Reductions of quantities for which a geometric mean makes no sense, by name."""
End = int | None
"""An end of enclosures: 0 the lower one, 1 the upper one; None for the values themselves."""
V = TypeVar("V", xr.DataArray, xr.Variable)
"""Values with named axes. Those without coordinates (``Variable``) are what numbers are made from
here: xarray compares all coordinates in every step of arithmetic, which takes longer than it."""


def reduce_samples(values: V, how: str | float, dims: Sequence[str] = ("sample",)) -> V:
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
    if not isinstance(values, xr.DataArray | xr.Variable) or not {*dims} <= {*values.dims}:
        there = f"one over {', '.join(map(str, values.dims))}" if hasattr(values, "dims") else ""
        what = f"a variable over {', '.join(dims)} is wanted, not {there or shown(values)}"
        raise LipboundError(f'{what}; give one of a run, such as ds["exact"]')
    quantile = not isinstance(how, str | bool) and is_number(how) and 0 <= float(how) <= 1
    if not quantile and how not in REDUCTIONS:
        said = f"unknown reduction {shown(how)}, and no quantile between 0 and 1"
        raise UnknownNameError(f"{said}; {nearest(how, REDUCTIONS)}")
    holes = bool(values.isnull().any())  # to look for them takes numpy many times as long
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of places without any value
        if how == "geomean":
            logs: Any = xr.apply_ufunc(np.log, values)
            reduced: Any = xr.apply_ufunc(np.exp, logs.mean(dims, skipna=True))
            return reduced.where(~(values < 0).any(dims))  # which have no geometric mean
        if isinstance(how, str):
            return getattr(values, how)(dims, skipna=holes)
        # infinite values are ordered like any others, but cannot be interpolated
        top = np.finfo(np.float64).max / 4
        finite: Any = np.minimum(values, top)
        reduced = finite.quantile(how, dims, skipna=holes)
        return reduced.where(~(reduced > top * 1e-6), np.inf)


def interval(
    values: V, how: str | float = "geomean", dims: Sequence[str] = ("sample",)
) -> tuple[V, V]:
    """Find the interval over samples of a geometric mean, as `reduce_samples` gives it.

    It is Student's t of the mean logarithms of single samples. It takes samples as independent
    draws from a population, whose mean lies in the interval with the probability `LEVEL`.

    Args:
        values: to reduce, with the dimension "sample"; samples without any value do not count.
        how: as in `reduce_samples`.
        dims: the same, "sample" among them.

    Returns:
        Lower and upper ends, without these dimensions; NaN for other reductions, where fewer than
        `FEW` samples have values, and where one is zero or infinite.

    Raises:
        UnknownNameError: an unknown reduction.
    """
    empty = reduce_samples(values, how, dims) * np.nan
    if how != "geomean":
        return empty, empty
    from scipy.special import stdtrit  # its import takes longer than most tables

    inner = [dim for dim in values.dims if dim in dims and dim != "sample"]
    with np.errstate(all="ignore"):
        logs: Any = xr.apply_ufunc(np.log, values)
        totals, counts = logs.fillna(0).sum(inner, skipna=False), logs.notnull().sum(inner)
        samples, places = (counts > 0).sum("sample"), counts.sum("sample")
        mean = totals.sum("sample") / places
        # of a ratio of sums, since samples may have different numbers of values
        off = ((totals - mean * counts) ** 2).sum("sample", skipna=False)
        few = samples < FEW
        reach = np.sqrt(off * samples / (samples - 1).where(~few)) / places
        reach = reach * stdtrit(samples.where(~few, FEW) - 1, (1 + LEVEL) / 2)
        return np.exp(mean - reach), np.exp(mean + reach)


def sample_span(
    values: V, how: str | float = "geomean", dims: Sequence[str] = ("sample",)
) -> tuple[V, V]:
    """Find the `interval` of so many samples as have one, else the range over single samples.

    Arguments as in `interval`; `spread_title` says which it is; NaN of one sample.
    """
    samples = samples_with_values(values)
    if spread_title(samples, how) == LIKELY:
        return interval(values, how, dims)
    inner = [str(dim) for dim in values.dims if dim in dims and dim != "sample"]
    single: Any = reduce_samples(values, how, inner) if inner else values
    single = single.where(samples > 1)
    return single.min("sample"), single.max("sample")


def samples_with_values(values: xr.DataArray | xr.Variable) -> int:
    """Count the samples that have any value."""
    return int(values.notnull().any([dim for dim in values.dims if dim != "sample"]).sum())


def spread_title(samples: int, how: str | float = "geomean") -> str:
    """Title of what `sample_span` gives of so many samples."""
    return LIKELY if samples >= FEW and how == "geomean" else RANGE


def across(ds: xr.Dataset | xr.DataArray | xr.Variable) -> str:
    """Dimension across a panel of a heatmap: heads, or samples for maps of whole layers."""
    return "head" if "head" in ds.dims else "sample"


def panel(values: V, how: str | float) -> V:
    """Values of a panel of a heatmap, (layer, head), reduced over samples.

    (layer, sample) for maps of whole layers, which need no reduction.
    """
    over = across(values)
    return (reduce_samples(values, how) if over == "head" else values).transpose("layer", over)


def usual(how: Reduction) -> dict[str, Reduction]:
    """Return the quantities that are reduced in another way than others, and in which."""
    return USUAL if how == "geomean" else {}


def reduction_name(how: str | float) -> str:
    """A reduction in words."""
    names = {"mean": "arithmetic mean", "geomean": "geometric mean", "max": "maximum", 0: "minimum"}
    return names.get(how, how if isinstance(how, str) else f"{how:g}-quantile")


BY = ("bound", "layer", "head")
VALUES = ("ratio", "value")
SPREAD = ("geomean", "sample_min", "sample_max", "min", "max")
"""Columns about the spread of values: their geometric mean, the ends of the geometric means of
single samples, and their own."""
INTERVAL = ("interval_lower", "interval_upper")
"""Columns with the ends of `interval`."""
LEVEL, FEW = 0.95, 5
"""Level of intervals, and the least number of samples that have one."""
LIKELY, RANGE = f"{LEVEL:.0%} interval", "range over samples"
"""Titles of their columns, and of those of the range of single samples."""
SPANS = {LIKELY: INTERVAL, RANGE: ("sample_min", "sample_max")}
"""Columns of two ends in words, and those of their ends in numbers."""
AUDITED = ("compared", "sound", "violations")
"""Columns that count places of the audit."""
EXTRA_WIDTHS = dict.fromkeys(schema.EXTRAS.values(), 2e-6) | {schema.EXTRAS["condition"]: 0.04}
"""Relative widths to which the extras of runs are known."""
MOST = {"row_norm": 0.5, "qk_clip": 1.0}
"""Values that extras cannot exceed; one that is exactly there is told as that, without a width."""
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
    mean against ``exact_upper``: the true one lies between the two (see `quantity`; NaN for
    estimates without upper ends); ``interval_lower, interval_upper``, the interval of the geometric
    mean (see `interval`; NaN for few samples); ``sample_min, sample_max``, smallest and largest
    geometric mean of single samples; ``violations, compared, sound``: ``sound`` counts where the
    bound's assumptions held, ``violations`` where it is below the exact norm (of its own map: L2
    attention for ``kim``).
    Heads whose exact norm is zero have no ratio.
    """
    check_numbers(ds)
    names, counts, rows = schema.bounds_there(ds), audit(ds), []
    for name in names:
        lower = geomean(quantity(ds, name, 0)) if has_upper(ds, name) else float("nan")
        row = {"label": label_of(ds, name), "geomean_lower": lower}
        rows.append(row | spread_of(ds, name) | counts[name])
    # of which pandas shows the first two and the last two in 80 characters
    columns = ["geomean", "min", "max", *SPREAD[1:3], "label", "geomean_lower", *INTERVAL, *AUDITED]
    return pd.DataFrame(rows, columns=columns, index=pd.Index(names, name="bound"))


def check_numbers(ds: xr.Dataset) -> None:
    """Refuse norms below zero, which no run has.

    Raises:
        LipboundError: there are some.
    """
    if bool((ds["exact"] < 0).any()):
        what = "some exact norms are negative, as in the difference of two runs, which is no run"
        raise LipboundError(f"{what}; give the runs themselves")


def label_of(ds: xr.Dataset, name: str) -> str:
    """Label of a variable, on one line."""
    return plain(str(ds[name].attrs["label"]))


def spread_of(ds: xr.Dataset, name: str, end: End = None) -> dict[str, float]:
    """Columns `SPREAD` and `INTERVAL` of `quantity`; NaN where there are no values."""
    values = quantity(ds, name, end)
    single = [geomean(values.isel(sample=s)) for s in range(values.sizes["sample"])]
    found = (geomean(values), *ends(np.array(single)), *ends(values))
    limits = map(float, interval(values, "geomean", list(map(str, values.dims))))
    return dict(zip((*SPREAD, *INTERVAL), (*found, *limits), strict=True))


def ends(values: xr.DataArray | xr.Variable | np.ndarray) -> tuple[float, float]:
    """Smallest and largest of some values; NaN where there are none."""
    known = _known(values)
    return (float(known.min()), float(known.max())) if known.size else (float("nan"),) * 2


def geomean(values: xr.DataArray | xr.Variable) -> float:
    """Geometric mean of all values that are there; NaN where there are none."""
    known = _known(values)
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(known).mean())) if known.size else float("nan")


def _known(values: xr.DataArray | xr.Variable | np.ndarray) -> np.ndarray:
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
            layers). Beside geometric means stand the largest logit and the smallest factor of
            QK-clip.
        values: "ratio" (bound / exact) or "value".

    Returns:
        Columns ``exact``, ``exact_upper`` (where the run has it), ``interval_lower,
        interval_upper`` (of the exact norm, see `interval`), ``sample_min, sample_max`` (of the
        exact norm, reduced over heads alone), the extras of the run (``jacobian_frobenius``,
        ``jacobian_condition``), and one per bound.

    Raises:
        LipboundError: unknown names; heads of a run on whole layers.
    """
    choice("rows", by, BY[1:])
    choice("values", values, VALUES)
    if by == "head" and "head" not in ds.dims:
        raise LipboundError("a run of whole layers has no heads; ask for a table by layer")
    check_numbers(ds)
    names = present(ds, bounds)
    table = cells(ds, by, names, reduce, values)
    # layers of fewer heads have empty places
    there = extras(ds) if schema.of_weights_alone(ds) else ["exact", *names]
    return table.loc[~table[there].isna().all(axis=1)]


def cells(
    ds: xr.Dataset, by: str, names: list[str], reduce: Reduction, values: str, end: End = None
) -> pd.DataFrame:
    """`breakdown` of all places: of values, or of the lower or upper ends of their enclosures."""
    levels = ["layer", "head"][: BY.index(by)]
    exact = quantity(ds, "exact", end)
    inner = [str(dim) for dim in exact.dims if dim not in ("sample", *levels)]
    single = reduce_samples(exact, reduce, inner) if inner else exact
    shown = {"exact": exact}
    shown |= {one: ds.variables[one] for one in ("exact_lower", "exact_upper") if one in ds}
    order = [*shown, *INTERVAL, "sample_min", "sample_max", *extras(ds), *names]
    shown |= {name: quantity(ds, name, end) for name in extras(ds)}
    for name in names:
        shown[name] = quantity(ds, name, end) if values == "ratio" else ds.variables[name]
    own, over = usual(reduce), ["sample", *inner]
    found = {name: reduce_samples(t, own.get(name, reduce), over) for name, t in shown.items()}
    found |= {"sample_min": single.min("sample"), "sample_max": single.max("sample")}
    found |= zip(INTERVAL, interval(exact, reduce, over), strict=True)
    columns = {name: found[name].transpose(*levels).values.ravel() for name in order}
    return pd.DataFrame(columns, ds[levels].coords.to_index(levels))


def present(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Names of bounds that a run has, all by default.

    Raises:
        UnknownNameError: others, those that no bound has before those that the run lacks.
    """
    names = schema.bounds_there(ds) if bounds is None else requested(ds, bounds)
    if missing := [name for name in names if name not in schema.bounds_there(ds)]:
        missing = [get(name).name for name in missing]
        known = ", ".join(schema.bounds_there(ds)) or "none"
        raise UnknownNameError(f"the run has no bound {missing[0]!r}; it has {known}")
    return names


def compared(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Names of bounds whose ratios to the exact norms are drawn, as of `present`.

    Raises:
        LipboundError: there are none.
    """
    if names := present(ds, bounds):
        return names
    raise LipboundError("the run has no bounds, whose ratios are drawn; compare with some")


def requested(ds: xr.Dataset, bounds: str | Iterable[str]) -> list[str]:
    """Names of bounds, and of extras of the run, from a list, or text separated by commas.

    Text is read as `lipbound.bounds.resolve` does in the run's norm; names of the run need no
    registry, and so no torch.
    """
    if not isinstance(bounds, str):
        return list(bounds)
    names = [part.strip() for part in bounds.split(",") if part.strip()]
    if names and all(name in (*schema.bounds_there(ds), *schema.EXTRAS) for name in names):
        return list(dict.fromkeys(names))
    return resolve(bounds, schema.norm_of(ds))


@takes_run
def panels(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Variables in the order of figures.

    The exact norm, then bounds, each behind the exact norm of its own map.
    """
    pairs = ((schema.compared_with(ds, name), name) for name in present(ds, bounds))
    own = ["exact"] * (not schema.of_weights_alone(ds))
    return list(dict.fromkeys([*own, *(name for pair in pairs for name in pair)]))


def extras(ds: xr.Dataset) -> list[str]:
    """Extras of a run that have values; of a diff the norms of its runs."""
    there = [*schema.extras_there(ds), *(side for side in schema.SIDES if side in ds.variables)]
    return [name for name in there if ds[name].notnull().any()]


def shared_scale(grids: dict[str, np.ndarray]) -> tuple[float, float]:
    """Limits of the common colour scale.

    It spans all panels, except those whose median lies decades above every other one.

    Args:
        grids: log10 of the values of each panel, by name.
    """
    known = {name: np.where(np.isneginf(grid), np.nan, grid) for name, grid in grids.items()}
    medians = {n: float(np.nanmedian(v)) for n, v in known.items() if np.isfinite(v).any()}
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
    known = {name: np.log10(v[np.isfinite(v) & (v > 0)]) for name, v in ratios.items()}
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
def ratio(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Bound / exact, of the bound's own map, where that is positive."""
    found = quantity(ds, name)
    return xr.DataArray(found.values, ds[name].coords, found.dims)


def has_upper(ds: xr.Dataset, name: str) -> bool:
    """True if the exact norm a bound is compared with (or "exact" itself) has an upper end."""
    return "exact_upper" in ds and (name == "exact" or schema.compared_with(ds, name) == "exact")


def quantity(ds: xr.Dataset, name: str, end: End = None) -> xr.Variable:
    """Values that tables are of, or an end of their enclosures, at every place.

    Args:
        ds: a run.
        name: "exact" or one of `extras`, or of a bound, whose ratio to the exact norm is meant.
        end: None for the values, 0 for lower ends, 1 for upper ones. Estimates without an upper end
            count as if they were ``tol`` wide. Where the assumptions of a bound hold, its ratio is
            not below one, unless it is so against the lower end of the norm.
    """
    there: Any = ds.variables
    if f"{name}_lower" in there:  # of a diff
        return there[name if end is None else f"{name}_{('lower', 'upper')[end]}"]
    if name in EXTRA_WIDTHS:
        width = 0 if end is None else (end - 0.5) * EXTRA_WIDTHS[name]
        most, value = MOST.get(name, np.inf), there[name]
        return (value + width * abs(value)).clip(max=most).where(value != most, most)
    of = "exact" if name == "exact" else schema.compared_with(ds, name)
    exact = there[of]
    norms = [exact * (1 - allowance(of)), exact * (1 + float(ds.attrs["tol"]))]
    if has_upper(ds, name):
        norms[1] = there["exact_upper"]
    if name == "exact":
        return exact if end is None else norms[end]
    known = np.isfinite(exact) & (exact > 0)
    with np.errstate(all="ignore"):
        found = (there[name] / exact).where(known).transpose(*exact.dims)
        if end is not None:
            least = found.clip(max=1).where(there[schema.sound(name)], 0.0) if end == 0 else found
            other = found * (exact / norms[1 - end])
            found = least.where(~(other > least), other).where(found.notnull())
    return found


def mean_ends(ds: xr.Dataset, name: str) -> tuple[float, float]:
    """Enclosure of the geometric mean of `quantity`."""
    return geomean(quantity(ds, name, 0)), geomean(quantity(ds, name, 1))


def cell_widths(ds: xr.Dataset, name: str, reduce: str | float) -> xr.Variable:
    """Relative widths of the enclosures of the values of a panel of a heatmap."""
    low, high = (panel(quantity(ds, name, end), reduce) for end in (0, 1))
    with np.errstate(all="ignore"):
        return high / low - 1
