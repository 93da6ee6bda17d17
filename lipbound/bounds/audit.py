"""Counts of bounds below the exact norm, theorem by theorem.

They are made from what a run says about its bounds, so that reading one needs neither the registry
nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lipbound.errors import LipboundError
from lipbound.schema import RUN, automatic, bounds_there, compared_with, sound

if TYPE_CHECKING:
    import xarray as xr

L2_SLACK = 1e-9
"""Relative allowance for norms of L2 attention, which are float64 values without an enclosure."""


def audit(ds: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Compare every bound of a run with the exact norm of its map, head by head.

    Args:
        ds: the run.

    Returns:
        Per bound: ``compared`` (heads x samples with an exact norm and a value of the bound),
        ``violations`` (of them, where the bound is below the norm), ``worst`` (smallest bound /
        exact), ``sound`` (where its assumptions held), ``broken`` (violations although they held:
        an error in the theorem or in this program) and ``why`` (where its assumptions did not hold:
        why the statement is then no bound; else empty).

    Raises:
        LipboundError: the run lacks where the assumptions of one of its bounds hold.
    """
    report = {}
    for name in bounds_there(ds):
        exact = ds[compared_with(ds, name)].values
        slack = allowance(compared_with(ds, name))
        if sound(name) not in ds.variables:
            raise LipboundError(
                f"{sound(name)}, which says where the assumptions of {name} hold, was left out of "
                "the run; keep it"
            )
        value, holds = ds[name].values, ds[sound(name)].values
        # a value that is not there accuses nobody; what cannot be evaluated is infinite
        known = np.isfinite(exact) & ~np.isnan(value)
        below = known & ~(value >= exact * (1 - slack))
        positive = known & (exact > 0)
        ratios = value[positive] / exact[positive]
        report[name] = {
            "compared": int(known.sum()),
            "violations": int(below.sum()),
            "worst": float(ratios.min()) if positive.any() else float("nan"),
            "sound": int((known & holds).sum()),
            "broken": int((below & holds).sum()),
            "why": "" if bool(holds[known].all()) else str(ds[name].attrs["caveat"]),
        }
    return report


def missing(ds: xr.Dataset, name: str) -> int:
    """Count the places without a value of a bound where its exact norm has one.

    For "exact", those where that lacks one. Only files that were lost or edited leave such places.
    """
    if name != "exact":
        exact = ds[compared_with(ds, name)].values
        has_bounds = ~automatic(ds).values
        if "head" in ds.dims:
            has_bounds = has_bounds[:, None]
        return int((np.isfinite(exact) & np.isnan(ds[name].values) & has_bounds).sum())
    bounded = np.zeros(ds["exact"].shape, dtype=bool)
    for other in bounds_there(ds):
        bounded |= ~np.isnan(ds[other].values)
    lost = np.isnan(ds["exact"].values) & bounded
    found = (~np.isnan(ds["exact"].values)).any(tuple(range(1, ds["exact"].ndim)))
    if RUN not in ds.variables:  # samples of runs that were put together have other numbers
        found |= ds["sample"].values < int(ds.attrs["exact_samples"])
    return int(lost[found].sum())


def allowance(exact: str = "exact") -> float:
    """Return by how much, relatively, an exact norm of a run may exceed the true one.

    By nothing where it is the lower end of an enclosure.

    Args:
        exact: the variable that holds it.
    """
    return L2_SLACK if exact == "exact_l2" else 0.0
