"""Counts of bounds below the exact norm, theorem by theorem.

Made for every run by what it says about its bounds in the attributes of its variables, so that
reading one needs neither the registry nor torch. What a run does not say comes from the registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lipbound.errors import LipboundError

if TYPE_CHECKING:
    import xarray as xr

    from lipbound.bounds.bound import Bound

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
        if f"{name}_sound" not in ds.variables:
            raise LipboundError(
                f"{name}_sound, which says where the assumptions of {name} hold, was left out of "
                "the run; keep it"
            )
        value, sound = ds[name].values, ds[f"{name}_sound"].values
        # a value that is not there accuses nobody; what cannot be evaluated is infinite
        known = np.isfinite(exact) & ~np.isnan(value)
        below = known & ~(value >= exact * (1 - slack))
        positive = known & (exact > 0)
        ratios = value[positive] / exact[positive]
        worst = float(ratios.min()) if positive.any() else float("nan")
        report[name] = {
            "compared": int(known.sum()),
            "violations": int(below.sum()),
            "worst": worst,
            "sound": int((known & sound).sum()),
            "broken": int((below & sound).sum()),
            "why": "" if bool(sound[known].all()) else caveat(ds, name),
        }
    return report


def bounds_there(ds: xr.Dataset) -> list[str]:
    """Names of the bounds that are there with the exact norms of their maps.

    Some of a run's variables may have been left out.
    """
    return [
        str(name)
        for name in ds.attrs["bounds"]
        if name in ds.variables and compared_with(ds, name) in ds.variables
    ]


def missing(ds: xr.Dataset, name: str) -> int:
    """Count the places without a value of a bound where its exact norm has one.

    For "exact", those where that lacks one. Only files that were lost or edited leave such places.
    """
    if name != "exact":
        exact = ds[compared_with(ds, name)].values
        return int((np.isfinite(exact) & np.isnan(ds[name].values)).sum())
    bounded = np.zeros(ds["exact"].shape, dtype=bool)
    for other in bounds_there(ds):
        bounded |= ~np.isnan(ds[other].values)
    lost = np.isnan(ds["exact"].values) & bounded
    found = (~np.isnan(ds["exact"].values)).any(tuple(range(1, ds["exact"].ndim)))
    if "run" not in ds.variables:  # samples of runs that were put together have other numbers
        found |= ds["sample"].values < int(ds.attrs["exact_samples"])
    return int(lost[found].sum())


def allowance(exact: str = "exact") -> float:
    """Relative allowance for exact norms of a run above the true ones.

    Not at all where they are ends of enclosures.
    """
    return L2_SLACK if exact == "exact_l2" else 0.0


def label(ds: xr.Dataset, name: str) -> str:
    """A bound's short label for figures and tables."""
    return str(ds[name].attrs["label"]) if "label" in ds[name].attrs else _registered(name).label


def compared_with(ds: xr.Dataset, name: str) -> str:
    """The variable with the exact norm that a bound is compared with: that of its own map."""
    said = ds[name].attrs.get("compared_with")
    return str(said) if said in ("exact", "exact_l2") and said in ds else _registered(name).exact


def caveat(ds: xr.Dataset, name: str) -> str:
    """Reason why a statement is no bound where its assumptions fail; empty if they always hold."""
    return str(ds[name].attrs["caveat"]) if "caveat" in ds[name].attrs else _registered(name).caveat


def norm_of(ds: xr.Dataset) -> str:
    """Norm of a run's numbers, of `lipbound.bounds.bound.NORMS`; Frobenius where it says none."""
    return str(ds.attrs.get("norm", "frobenius"))


def _registered(name: str) -> Bound:
    """The registry's entry. It is imported here, since it needs torch."""
    from lipbound.bounds.registry import get

    return get(name)
