"""Runs on disk, one Zarr store each, and runs as users hand them over."""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import xarray as xr
import zarr

from lipbound.errors import (
    AlteredRunError,
    DamagedRunWarning,
    StoreError,
    choice,
    one_line,
    shown,
    warn,
)
from lipbound.runs.checksums import again, damage
from lipbound.runs.config import check_run_name
from lipbound.runs.partial_store import PARTIAL, measured_blocks, partial_path
from lipbound.schema import (
    AXES,
    LAYER_WORDS,
    RUN,
    RUN_SAMPLE,
    flags,
    lacking_settings,
    lacking_variables,
    sound,
)

F = TypeVar("F", bound=Callable[..., Any])
NETCDF, JSON = ".nc", "json:"
DAMAGED = ("warn", "refuse", "accept")
ALONG = dict.fromkeys(LAYER_WORDS, "layer") | {"length": "sample"}
"""Coordinates that belong to another one's axis."""
ANNOTATED = {RUN: AXES[:2], RUN_SAMPLE: AXES[:1]}
"""Axes of annotations that have not all of them."""


def check_target(path: str | Path) -> Path:
    """Check before any computing that a run can be written to a path, and return it.

    Raises:
        StoreError: it exists already, or its folder cannot be written to.
    """
    path = Path(path).expanduser()
    if path.name.endswith(PARTIAL):
        raise StoreError(
            f"{path} is named as unfinished runs are; choose a name that does not end in {PARTIAL}"
        )
    if path.exists():
        raise StoreError(f"{path} exists already; choose another name, or remove it first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def save(ds: xr.Dataset, path: str | Path) -> Path:
    """Write a run to disk: a Zarr store, or a netCDF file where the name ends in ``.nc``.

    It appears under its name only when it is complete. Parts of a run (``ds.isel(sample=[0])``) and
    what `lipbound.concat` returns can be saved too. In netCDF, attributes that are lists,
    dictionaries or None stand as JSON; `lipbound.load` reads them back.

    Args:
        ds: a run, with its axes; or other data of `lipbound`.
        path: of the store, which must not exist yet.

    Returns:
        The path.

    Raises:
        StoreError: the path exists or cannot be written, or what is given is no run that could be
            loaded again.
        LipboundError: its name is that of a file of another kind, such as ``run.csv``.
    """
    if not isinstance(ds, xr.Dataset):
        raise StoreError(
            f"a run is wanted, not {shown(ds)}; give the Dataset of lipbound.compare or "
            "lipbound.load"
        )
    if "bounds" in ds.attrs and (lacking := lacking_variables(ds)):
        raise StoreError(
            f"the Dataset could not be loaded as a run again: {lacking}; keep the run's axes and "
            "variables, or save it with its own to_zarr"
        )
    path = check_target(path)
    if path.suffix != NETCDF:
        check_run_name(path, "path")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.suffix == NETCDF:
            _plain_attributes(ds).to_netcdf(unfinished)
        else:
            ds.to_zarr(unfinished, mode="w", consolidated=False)
        unfinished.rename(path)
    except OSError as error:
        _remove(unfinished)
        raise StoreError(f"{path} could not be written: {error.strerror or error}") from error
    except BaseException:  # interrupted; what it is made of is still there
        _remove(unfinished)
        raise
    return path


def _remove(path: Path) -> None:
    """Delete a store, a file, or nothing."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _plain_attributes(ds: xr.Dataset) -> xr.Dataset:
    """Copy a Dataset with attributes that netCDF can hold; a word before them marks JSON."""
    plain = ds.copy()
    for attrs in _attributes(plain):
        for name, value in attrs.items():
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                attrs[name] = JSON + json.dumps(value)
    return plain


def _own_attributes(ds: xr.Dataset) -> None:
    """Undo `_plain_attributes`, and the types of numbers that netCDF gives."""
    for attrs in _attributes(ds):
        for name, value in attrs.items():
            if isinstance(value, str) and value.startswith(JSON):
                attrs[name] = json.loads(value.removeprefix(JSON))
            elif isinstance(value, np.generic):
                attrs[name] = value.item()


def _attributes(ds: xr.Dataset) -> list[dict[Any, Any]]:
    """Attributes of a Dataset, and of each of its variables."""
    return [ds.attrs, *(variable.attrs for variable in ds.variables.values())]


def load(path: str | Path, *, damaged: str = "warn") -> xr.Dataset:
    """Read a run into memory, as `lipbound.compare` returned it, and check it by its checksums.

    Args:
        path: of the store, or of a netCDF file that `lipbound.save` wrote.
        damaged: what to do with numbers or settings that are not those that were computed: "warn"
            (a `DamagedRunWarning`), "refuse", or "accept".

    Returns:
        The run; or the data of a figure that `lipbound reproduce` stored.

    Raises:
        StoreError: there is no run at ``path``, or an unfinished one.
        AlteredRunError: a part of it is missing or cannot be read, or, with "refuse", is not as it
            was computed.
    """
    path = Path(path).expanduser()
    choice("damaged", damaged, DAMAGED)
    _check_there(path)
    ds = read(path)
    if "lipbound" not in ds.attrs and {"exact", "exact_converged"} <= {*ds.variables}:
        raise AlteredRunError(
            f"{path} is damaged: its description zarr.json cannot be read (it has no settings)"
        )
    if "lipbound" not in ds.attrs:
        kind = "netCDF file" if path.is_file() else "Zarr store"
        raise StoreError(f"{path} is a {kind} but not a run of lipbound")
    if "recipe" in ds.attrs and "bounds" not in ds.attrs:
        if damaged == "refuse":
            raise StoreError(
                f"{path} holds the data of the figure {ds.attrs['recipe']!r}, not a run of "
                "`lipbound compare`"
            )
        return ds
    if lacking := lacking_settings(ds) or lacking_variables(ds):
        raise AlteredRunError(f"{path} is damaged or was edited: {lacking}; {again(ds.attrs)}")
    if damaged != "accept" and (what := damage(ds)):
        message = (
            f"{path} is damaged or was edited: {what}; `lipbound verify "
            f"{shlex.quote(str(path))}` tells what differs; {again(ds.attrs)}"
        )
        if damaged == "refuse":
            raise AlteredRunError(message)
        warn(message, DamagedRunWarning)
    names = ["exact", "exact_upper", "exact_l2", *ds.attrs["bounds"], *ds.data_vars]
    return ds[[name for name in dict.fromkeys(names) if name in ds]]  # a store sorts them


def _check_there(path: Path) -> None:
    """Refuse a path where no finished run is."""
    try:
        there, partly = path.exists(), bool(path.name) and partial_path(path).exists()
        if path.is_dir():
            next(path.iterdir(), None)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    if path.name.endswith(PARTIAL) and there:
        finished = path.with_name(path.name.removesuffix(PARTIAL))
        raise StoreError(f"{path} is an unfinished run{_so_far(path)}; {_resumed(finished)}")
    if partly and not there:
        raise StoreError(
            f"there is no run {path} yet, but an unfinished one{_so_far(partial_path(path))}; "
            f"{_resumed(path)}"
        )
    if not there and path.name.endswith(PARTIAL):
        finished = path.with_name(path.name.removesuffix(PARTIAL))
        instead = f"; {finished} is finished" if finished.exists() else ""
        raise StoreError(f"there is no unfinished run {path}{instead}")
    if not there:
        raise StoreError(
            f"there is no run {path}; `lipbound compare MODEL --out {shlex.quote(str(path))}` "
            "makes one"
        )


def _so_far(partial: Path) -> str:
    """Measured share of an unfinished run, in brackets."""
    done, count = measured_blocks(partial)
    return f" ({done} of {count} blocks of one layer each are measured)" if count else ""


def _resumed(path: Path) -> str:
    """Say how an unfinished run is finished."""
    return f"the command that began it, with --out {shlex.quote(str(path))} --resume, finishes it"


def read(path: Path) -> xr.Dataset:
    """Read any Dataset that `save` has written.

    Raises:
        StoreError: there is none.
        AlteredRunError: the values of a variable cannot be read.
    """
    netcdf = path.is_file()
    if not netcdf and (what := _no_store(path)):
        raise StoreError(f"{path} is not a run of lipbound: {what}")
    # one by one: zarr, which opens all at once, goes on with the others when one fails
    for description in sorted(path.glob("*/zarr.json")):
        try:
            array = zarr.open_array(description.parent, mode="r")
        except Exception as error:
            raise AlteredRunError(
                f"{path} is damaged: the description of {description.parent.name!r} cannot be "
                f"read ({one_line(error)})"
            ) from error
        if array.ndim == 1:  # coordinates, which are read with the descriptions
            _readable(path, description.parent.name, partial(array.__getitem__, ...))
    try:
        how: dict[str, Any] = {} if netcdf else {"engine": "zarr", "consolidated": False}
        ds = xr.open_dataset(path, **how)
    except Exception as error:  # zarr and xarray raise a zoo of types for a folder that is no store
        if (path / "exact" / "zarr.json").exists():
            raise AlteredRunError(
                f"{path} is damaged: its description zarr.json cannot be read ({one_line(error)})"
            ) from error
        why = "it is a file, and none that netCDF can read" if netcdf else one_line(error)
        raise StoreError(f"{path} is not a run of lipbound: {why}") from error
    with ds:
        for name, variable in ds.variables.items():
            _readable(path, name, variable.load)  # all of it at once, without dask
    if netcdf:
        _own_attributes(ds)
    return ds


def _no_store(path: Path) -> str:
    """Describe a folder that is neither a run nor what is left of one; empty for those."""
    if any((path / name).exists() for name in ("zarr.json", ".zgroup", "exact")):
        return ""
    inside = sorted(one.parent.parent.name for one in path.glob("*/exact/zarr.json"))
    if not inside:
        return "it is a folder"
    more = ", ..." if len(inside) > 5 else ""
    return f"it is a folder of runs ({', '.join(inside[:5])}{more}); name one of them"


def _readable(path: Path, name: object, values: Callable[[], object]) -> None:
    """Refuse a run of which some values cannot be read."""
    try:
        values()
    except Exception as error:  # whatever a codec makes of bytes that are not its own
        what = f"the values of {name!r} cannot be read ({type(error).__name__})"
        attrs = {}
        with suppress(Exception):  # how it was made, if that can be read
            attrs = dict(zarr.open_group(path, mode="r").attrs)
        raise AlteredRunError(f"{path} is damaged: {what}; {again(attrs)}") from error


def takes_run(function: F) -> F:
    """Let a function whose first argument is a run also take its path, and parts of it.

    The axes of such parts may be gone, as after ``ds.isel(layer=0)``.
    """

    @wraps(function)
    def taking(ds: object, *args: Any, **kwargs: Any) -> Any:
        return function(run_of(ds), *args, **kwargs)

    return cast("F", taking)


def whole_run(given: object) -> xr.Dataset:
    """Read a run as `run_of` does, but refuse what has not all its axes."""
    ds = run_of(given)
    if isinstance(given, xr.Dataset) and ds is not given:
        raise StoreError(
            "a part of a run, or one whose axes were moved, cannot be checked; give the whole "
            "run, or its path"
        )
    return ds


def run_of(given: object) -> xr.Dataset:
    """Read or complete a run: axes sample, layer and, unless it is of whole layers, head.

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
    for axis in AXES if given.attrs["made"]["heads"] else AXES[:2]:
        if axis not in given.dims and axis not in given.coords:
            raise StoreError(
                f"the run has no {axis}s any more, as after .mean({axis!r}); give the run itself, "
                "and choose by reduce= what is shown of it"
            )
    bounds = [name for name in given.attrs["bounds"] if name in given.variables]
    needed = ("exact_converged", "length", *map(sound, bounds))
    if lost := [name for name in needed if name not in given.variables]:
        raise StoreError(
            f"the Dataset is no longer a run: {lost[0]!r} is missing, which arithmetic on two "
            "runs drops where it differs; show the runs"
        )
    ds = given
    for axis in AXES:
        if axis not in ds.dims and axis in ds.coords:
            # only data variables get the axis, not coordinates
            notes = [name for name in flags(ds) if axis in ANNOTATED.get(name, AXES)]
            ds = ds.reset_coords(notes).expand_dims(axis).set_coords(notes)
            along = [name for name in ALONG if ALONG[name] == axis and name in ds.coords]
            ds = ds.assign_coords({name: (axis, [ds[name].item()]) for name in along})
        if axis in ds.dims and not ds.sizes[axis]:
            raise StoreError(f"the run has no {axis} left; keep at least one")
    order = [axis for axis in AXES if axis in ds.dims]
    return ds if ds["exact"].dims == tuple(order) else ds.transpose(*order, ...)
