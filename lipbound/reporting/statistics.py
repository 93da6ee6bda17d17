"""Statistics of a run, computed once for tables, figures and the page."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import allowance, audit
from lipbound.errors import LipboundError, UnknownNameError, is_number, nearest, shown
from lipbound.reporting.labels import check_numbers
from lipbound.runs.store import takes_run
from lipbound.schema import bounds_there, compared_with, norm_of

REDUCTIONS = ("mean", "geomean", "max", "median")


def reduce_samples(
    values: xr.DataArray, how: str | float, dims: Sequence[str] = ("sample",)
) -> xr.DataArray:
    """Reduce values over samples, or over other dimensions.

    ``how`` is the mean, geometric mean, maximum, median or a quantile (a number in [0, 1]).

    Entries without a value (NaN) do not count.
    """
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of places without any value
        return _reduced(values, how, dims)


def _reduced(values: xr.DataArray, how: str | float, dims: Sequence[str]) -> xr.DataArray:
    if not isinstance(how, str):
        if isinstance(how, bool) or not is_number(how) or not 0 <= float(how) <= 1:
            raise LipboundError(
                f"reduce is {shown(how)}; a quantile lies between 0 and 1, and allowed are "
                f"{', '.join(REDUCTIONS)}"
            )
        # infinite values are ordered like any others, but cannot be interpolated
        top = np.finfo(np.float64).max / 4
        quantile = values.clip(max=top).quantile(how, dims, skipna=True)
        return quantile.where(~(quantile > top * 1e-6), np.inf)
    if how == "geomean":
        logs: xr.DataArray = xr.apply_ufunc(np.log, values)
        return xr.apply_ufunc(np.exp, logs.mean(dims, skipna=True))
    if how not in REDUCTIONS:
        raise UnknownNameError(
            f"unknown reduction {how!r}; {nearest(how, REDUCTIONS)}, or a quantile between 0 and 1"
        )
    reduced: xr.DataArray = getattr(values, how)(dims, skipna=True)
    return reduced


def reduction_name(how: str | float) -> str:
    """A reduction in words."""
    if not isinstance(how, str):
        return f"{how:g}-quantile"
    return {"mean": "arithmetic mean", "geomean": "geometric mean", "max": "maximum"}.get(how, how)


ROWS = ("bound", "layer", "head")
VALUES = ("ratio", "value")
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
    ends); ``sample_min, sample_max``, smallest and largest geometric mean of single samples;
    ``violations, compared, sound``: ``sound`` counts where the bound's assumptions held,
    ``violations`` where it is below the exact norm (of its own map: L2 attention for ``kim``).
    Heads whose exact norm is zero have no ratio.
    """
    check_numbers(ds)
    rows = []
    counts = audit(ds)
    for name in bounds_there(ds):
        quotient = ratio(ds, name)
        values = quotient.values[~np.isnan(quotient.values)]
        single = _geomeans(quotient)
        known = single[~np.isnan(single)]
        lower = (
            float(_geomean(ratio(ds, name, upper=True).values))
            if has_upper(ds, name)
            else float("nan")
        )
        low, high = (
            (float(values.min()), float(values.max()))
            if values.size
            else (float("nan"), float("nan"))
        )
        least, most = (
            (float(known.min()), float(known.max())) if known.size else (float("nan"), float("nan"))
        )
        entry = counts[name]
        rows.append(
            (
                name,
                ds[name].attrs["label"],
                _geomean(values),
                low,
                high,
                lower,
                least,
                most,
                entry["violations"],
                entry["compared"],
                entry["sound"],
            )
        )
    columns = [
        "bound",
        "label",
        "geomean",
        "min",
        "max",
        "geomean_lower",
        "sample_min",
        "sample_max",
        "violations",
        "compared",
        "sound",
    ]
    return pd.DataFrame(rows, columns=columns).set_index("bound")


def exact_summary(ds: xr.Dataset) -> pd.DataFrame:
    """Geometric mean of the exact norms over samples, layers and heads, in one row.

    Beside it stand their ends and the extreme means of single samples.
    """
    check_numbers(ds)
    exact = ds["exact"]
    every, single = exact.values[~np.isnan(exact.values)], _geomeans(exact)
    single = single[~np.isnan(single)]
    ends = [
        float(pick(values)) if values.size else float("nan")
        for values in (every, single)
        for pick in (np.min, np.max)
    ]
    columns = ["geomean", "min", "max", "sample_min", "sample_max"]
    return pd.DataFrame(
        [[_geomean(every), *ends]], columns=columns, index=pd.Index(["exact"], name="norm")
    )


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
        Columns ``exact``, ``exact_upper`` (where the run has it), ``sample_min, sample_max`` (of
        the exact norm, reduced over heads alone), and one per bound.

    Raises:
        LipboundError: unknown names; heads of a run on whole layers.
    """
    if by not in ROWS[1:]:
        raise UnknownNameError(f"unknown rows {by!r}; {nearest(by, ROWS)}")
    if values not in VALUES:
        raise UnknownNameError(f"unknown values {values!r}; {nearest(values, VALUES)}")
    if by == "head" and "head" not in ds.dims:
        raise LipboundError(
            "the run is about whole layers and has no heads; ask for a table by layer"
        )
    check_numbers(ds)
    names = present(ds, bounds)
    inner = tuple(dim for dim in ("head",) if dim in ds.dims and by == "layer")

    def reduced(array: xr.DataArray) -> np.ndarray:
        with np.errstate(all="ignore"):
            result = reduce_samples(array, reduce, ("sample", *inner))
        return result.transpose("layer", ...).values.ravel()

    with np.errstate(all="ignore"):
        single = reduce_samples(ds["exact"], reduce, inner) if inner else ds["exact"]
    keep = ("layer",) if by == "layer" else ("layer", "head")
    columns = {"exact": reduced(ds["exact"])} | (
        {"exact_upper": reduced(ds["exact_upper"])} if "exact_upper" in ds else {}
    )
    for name, extreme in (
        ("sample_min", single.min("sample")),
        ("sample_max", single.max("sample")),
    ):
        columns[name] = extreme.transpose(*keep).values.ravel()
    columns |= {name: reduced(ratio(ds, name) if values == "ratio" else ds[name]) for name in names}
    index: Any = pd.Index(ds["layer"].values, name="layer")
    if by == "head":
        index = pd.MultiIndex.from_product(
            [ds["layer"].values, ds["head"].values], names=["layer", "head"]
        )
    table = pd.DataFrame(columns, index=index)
    # layers of fewer heads have empty places
    return table.loc[~table[["exact", *names]].isna().all(axis=1)]


def present(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Names of bounds that a run has, all by default.

    Others raise, those that no bound has before those that the run lacks.
    """
    names = (
        bounds_there(ds)
        if bounds is None
        else [bounds]
        if isinstance(bounds, str)
        else list(bounds)
    )
    missing = [name for name in names if name not in bounds_there(ds)]
    if missing:
        from lipbound.bounds.registry import get  # it needs torch, which names of the run do not

        missing = [get(name).name for name in missing]
        raise UnknownNameError(
            f"the run has no bound {missing[0]!r}; it has {', '.join(bounds_there(ds))}"
        )
    return names


def requested(ds: xr.Dataset, bounds: str) -> list[str]:
    """Names of bounds from a list separated by commas.

    Read as `lipbound.bounds.resolve` does in the run's norm; those of the run need no registry, and
    so no torch.
    """
    names = [part.strip() for part in bounds.split(",") if part.strip()]
    if names and all(name in bounds_there(ds) for name in names):
        return list(dict.fromkeys(names))
    from lipbound.bounds.registry import resolve

    return resolve(bounds, norm_of(ds))


@takes_run
def panels(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Variables in the order of figures.

    The exact norm, then bounds, each behind the exact norm of its own map.
    """
    names = ["exact"]
    for name in present(ds, bounds):
        if compared_with(ds, name) not in names:
            # a bound on another map stands next to the exact norm of that map
            names.append(compared_with(ds, name))
        names.append(name)
    return names


def shared_scale(grids: dict[str, np.ndarray]) -> tuple[float, float]:
    """Limits of the common colour scale.

    It spans all panels, except those whose median lies decades above every other one.
    """
    medians = {
        name: float(np.nanmedian(np.where(np.isneginf(grid), np.nan, grid)))
        for name, grid in grids.items()
        if np.isfinite(grid).any()
    }
    kept: list[str] = []
    for name in sorted(medians, key=lambda n: medians[n]):
        if kept and medians[name] > max(medians[n] for n in kept) + OFF_SCALE:
            break
        kept.append(name)
    finite = (
        np.concatenate([grids[name][np.isfinite(grids[name])] for name in kept])
        if kept
        else np.zeros(1)
    )
    return float(finite.min()), float(finite.max())


def shared_axis(logs: dict[str, np.ndarray]) -> tuple[list[str], tuple[float, float]]:
    """Choose the bounds that share an axis of ratios, and its ends (log10).

    From ratios near one outwards, up to a gap of `APART` decades.

    Args:
        logs: log10 of the ratios of each bound; infinite ones and NaN do not count.

    Returns:
        Names in their order, and the ends, one among them. Single values far beyond the medians of
        all do not stretch it.
    """
    known = {name: values[np.isfinite(values)] for name, values in logs.items()}
    middle = {name: float(np.median(values)) for name, values in known.items() if values.size}
    kept: dict[str, float] = {}
    for name in sorted(middle, key=lambda n: abs(middle[n])):
        near = [abs(middle[name] - other) for other in kept.values()] or [0.0]
        if min(near) <= APART and abs(middle[name]) <= FARTHEST:
            kept[name] = middle[name]
    ends = [0.0, *kept.values()]
    low, high = min(ends) - OFF_SCALE, max(ends) + OFF_SCALE
    inside = np.concatenate(
        [
            np.zeros(1),
            *(
                values[(values >= low) & (values <= high)]
                for name, values in known.items()
                if name in kept
            ),
        ]
    )
    return [name for name in logs if name in kept], (float(inside.min()), float(inside.max()))


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
    values = widths(ds, name).values
    known = values[~np.isnan(values)]
    return float(np.expm1(known.mean())) if known.size else 0.0


def has_upper(ds: xr.Dataset, name: str) -> bool:
    """True if the exact norm a bound is compared with (or "exact" itself) has an upper end."""
    return "exact_upper" in ds and (name == "exact" or compared_with(ds, name) == "exact")


@takes_run
def ratio(ds: xr.Dataset, name: str, *, upper: bool = False) -> xr.DataArray:
    """Bound / exact, of the bound's own map, where that is positive.

    With ``upper``, against the upper end.
    """
    exact = ds["exact_upper" if upper else compared_with(ds, name)]
    known, values = exact.values, ds[name].transpose(*exact.dims).values
    with np.errstate(all="ignore"):
        quotient = np.where(np.isfinite(known) & (known > 0), values / known, np.nan)
    return xr.DataArray(quotient, coords=exact.coords, dims=exact.dims)


def _geomean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(values).mean())) if values.size else float("nan")


def _geomeans(values: xr.DataArray) -> np.ndarray:
    """Geometric mean of every sample."""
    return np.array([_geomean(values.isel(sample=s).values) for s in range(values.sizes["sample"])])


def by_width(ds: xr.Dataset, name: str, index: pd.Index, reduce: str | float) -> np.ndarray:
    """Relative widths of the enclosures of the rows of `breakdown`.

    The mean logarithm for geometric means, else the largest of a row.
    """
    wide = widths(ds, name)
    dims = [dim for dim in wide.dims if dim not in index.names]
    with warnings.catch_warnings():  # places without a head
        warnings.simplefilter("ignore", RuntimeWarning)
        one = wide.mean(dims) if reduce == "geomean" else wide.max(dims)
    values = one.transpose(*index.names).values.ravel()
    every = (
        pd.MultiIndex.from_product([ds[level].values for level in index.names])
        if len(index.names) > 1
        else pd.Index(ds["layer"].values)
    )
    return np.expm1(values)[every.get_indexer(index)]


def extents(ds: xr.Dataset, name: str) -> dict[str, float]:
    """Relative widths of the enclosures of a row of `summary`, by column."""
    wide, quotient = widths(ds, name).values, ratio(ds, name).values
    if not (~np.isnan(quotient)).any():
        return dict.fromkeys(("geomean", "sample_min", "sample_max", "min", "max"), 0.0)
    single = [np.nanmean(w) for w in wide if (~np.isnan(w)).any()]
    ends = {"min": wide.flat[np.nanargmin(quotient)], "max": wide.flat[np.nanargmax(quotient)]}
    found = ends | {
        "geomean": np.nanmean(wide),
        "sample_min": max(single),
        "sample_max": max(single),
    }
    return {column: float(np.expm1(value)) for column, value in found.items()}
