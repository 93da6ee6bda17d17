"""A run as users hand it over: a Dataset, one layer or head of it, or where it is stored."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import xarray as xr

from lipbound.errors import StoreError, shown
from lipbound.runs.provenance import RUN, RUN_SAMPLE, flags
from lipbound.runs.store import lacking_settings, load

F = TypeVar("F", bound=Callable[..., Any])
AXES = ("sample", "layer", "head")
ALONG = {"layer_name": "layer", "length": "sample"}
"""Coordinates that belong to another one's axis."""
ANNOTATED = {RUN: ("sample", "layer"), RUN_SAMPLE: ("sample",)}
"""Axes of annotations that have not all of them."""


def takes_run(function: F) -> F:
    """Decorator of functions whose first argument is a run: they also take its path, and parts of
    it whose axes are gone."""

    @wraps(function)
    def taking(ds: object, *args: Any, **kwargs: Any) -> Any:
        return function(run_of(ds), *args, **kwargs)

    return cast("F", taking)


def whole_run(given: object) -> xr.Dataset:
    """The same without repairing anything: a run that has all its axes, or its path; raises
    StoreError for anything else."""
    ds = run_of(given)
    if isinstance(given, xr.Dataset) and ds is not given:
        raise StoreError(
            "a part of a run, or one whose axes were moved, cannot be checked; give the whole "
            "run, or its path"
        )
    return ds


def run_of(given: object) -> xr.Dataset:
    """A run with the axes sample, layer and, unless it is of whole layers, head, in this order.

    Args:
        given: a run, a part of it such as ``ds.isel(layer=0)``, or the path of a stored one.

    Raises:
        StoreError: there is no run at the path, it is no run, an axis was reduced or is empty.
    """
    if isinstance(given, str | Path):
        return load(given)
    if not isinstance(given, xr.Dataset):
        kind = f"the variable {given.name}" if isinstance(given, xr.DataArray) else shown(given)
        raise StoreError(
            f"a run is wanted, not {kind}; give the Dataset of lipbound.compare or "
            "lipbound.load, or its path"
        )
    if "exact" not in given or "bounds" not in given.attrs or "map" not in given.attrs:
        raise StoreError(
            "the Dataset is not a run of lipbound, or its attributes were dropped; keep them "
            "(xarray.set_options(keep_attrs=True))"
        )
    if what := lacking_settings(given):
        what += ", as after arithmetic on two runs" if "missing" in what else ""
        raise StoreError(
            f"the Dataset is no longer a run: {what}; show the runs, or draw the result with xarray"
        )
    for axis in AXES if given.attrs.get("made", {}).get("heads") else AXES[:2]:
        if axis not in given.dims and axis not in given.coords:
            raise StoreError(
                f"the run has no {axis}s any more, as after .mean({axis!r}); give the run itself, "
                "and choose by reduce= what is shown of it"
            )
    needed = (
        "exact_converged",
        *(f"{bound}_sound" for bound in given.attrs["bounds"] if bound in given.variables),
    )
    if lost := [name for name in needed if name not in given.variables]:
        raise StoreError(
            f"the Dataset is no longer a run: {lost[0]!r} is missing, which arithmetic on two "
            "runs drops where it differs; show the runs"
        )
    ds = given
    for axis in AXES:
        if axis not in ds.dims and axis in ds.coords:
            notes = [
                name for name in flags(ds) if axis in ANNOTATED.get(name, AXES)
            ]  # of coordinates, only data variables get the axis
            ds = ds.reset_coords(notes).expand_dims(axis).set_coords(notes)
            ds = ds.assign_coords(
                {
                    name: (axis, [ds[name].item()])
                    for name, along in ALONG.items()
                    if along == axis and name in ds.coords
                }
            )
        if axis in ds.dims and not ds.sizes[axis]:
            raise StoreError(f"the run has no {axis} left; keep at least one")
    order = [axis for axis in AXES if axis in ds.dims]
    return ds if ds["exact"].dims == tuple(order) else ds.transpose(*order, ...)
