"""Is any bound below the exact norm? Counted in every run, theorem by theorem."""

from typing import Any

import numpy as np
import xarray as xr

from lipbound.bounds.registry import get

SLACK = {"float32": 1e-5, "float64": 1e-9}
"""Relative rounding allowance: below ``exact * (1 - slack)`` a bound is violated."""


def audit(ds: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Compare every bound of a run with the exact norm of its map, head by head.

    Returns:
        Per bound: ``compared`` (heads x samples with an exact norm), ``violations`` (of them, where the bound is below it), ``worst`` (smallest
        bound / exact), ``sound`` (where its assumptions held) and ``broken`` (violations although they held: an error in the theorem
        or in this program).
    """
    slack = SLACK[ds.attrs["dtype"]]
    report = {}
    for name in ds.attrs["bounds"]:
        exact = ds[get(name).exact].values
        value, sound = ds[name].values, ds[f"{name}_sound"].values
        known = np.isfinite(exact) & ~np.isnan(value)
        below = known & (value < exact * (1 - slack))
        positive = known & (exact > 0)
        report[name] = {
            "compared": int(known.sum()),
            "violations": int(below.sum()),
            "worst": float((value[positive] / exact[positive]).min()) if positive.any() else float("nan"),
            "sound": int((known & sound).sum()),
            "broken": int((below & sound).sum()),
        }
    return report
