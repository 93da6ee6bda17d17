"""Is any bound below the exact norm? Counted in every run, theorem by theorem."""

from typing import Any

import numpy as np
import xarray as xr

from lipbound.bounds.registry import get

SLACK = {"float32": 1e-5, "float64": 1e-9}
"""Relative rounding allowance: a bound below ``exact * (1 - slack) - exact_rounding`` is violated."""


def audit(ds: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Compare every bound of a run with the exact norm of its map, head by head.

    Returns:
        Per bound: ``compared`` (heads x samples with an exact norm), ``violations`` (of them, where the bound is below it), ``worst`` (smallest
        bound / exact), ``sound`` (where its assumptions held), ``broken`` (violations although they held: an error in the theorem
        or in this program) and ``why`` (where its assumptions did not hold: why the statement is then no bound; else empty).
    """
    slack = SLACK[ds.attrs["dtype"]]
    rounding = ds["exact_rounding"].values
    report = {}
    for name in ds.attrs["bounds"]:
        exact = ds[get(name).exact].values
        value, sound = ds[name].values, ds[f"{name}_sound"].values
        known = np.isfinite(exact)
        below = known & ~(value >= exact * (1 - slack) - rounding)  # no number is no bound either
        positive = known & (exact > 0) & ~np.isnan(value)
        report[name] = {
            "compared": int(known.sum()),
            "violations": int(below.sum()),
            "worst": float((value[positive] / exact[positive]).min()) if positive.any() else float("nan"),
            "sound": int((known & sound).sum()),
            "broken": int((below & sound).sum()),
            "why": "" if bool(sound[known].all()) else get(name).caveat,
        }
    return report
