"""Many values into one: means, maxima, quantiles over samples or heads."""

import warnings
from collections.abc import Sequence

import numpy as np
import xarray as xr

from lipbound.errors import LipboundError, UnknownNameError, is_number, nearest, shown

REDUCTIONS = ("mean", "geomean", "max", "median")


def reduce_samples(
    values: xr.DataArray, how: str | float, dims: Sequence[str] = ("sample",)
) -> xr.DataArray:
    """The mean, geometric mean, maximum, median or a quantile (a number in [0, 1]) over samples, or
    over other dimensions.

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
        top = (
            np.finfo(np.float64).max / 4
        )  # infinite values are ordered like any others, but cannot be interpolated
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
