"""Runs on disk: one Zarr store each."""

import json
import os
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from lipbound.bounds.audit import compared_with, norm_of
from lipbound.bounds.bound import NORMS
from lipbound.errors import (
    AlteredRunError,
    DamagedRunWarning,
    StoreError,
    UnknownNameError,
    nearest,
    one_line,
    shown,
)
from lipbound.runs.config import check_run_name
from lipbound.runs.partial_store import PARTIAL, measured_blocks, partial_path
from lipbound.runs.provenance import DRAWN, RUN, RUN_SAMPLE, again, damage, flags, own

NETCDF, JSON = ".nc", "json:"
DAMAGED = ("warn", "refuse", "accept")
WORD, COUNT, NUMBER = (str,), (int,), (int, float)
NEEDED: dict[str, tuple[type, ...]] = {
    "bounds": (list,),
    "versions": (dict,),
    "delta": (int, float, type(None)),
    "tol": NUMBER,
    "capture_error": NUMBER,
    **dict.fromkeys(("samples", "exact_samples", "tokens", "seed"), COUNT),
    **dict.fromkeys(
        (
            "model",
            "architecture",
            "revision",
            "data",
            "data_fingerprint",
            "map_description",
            "method",
            "dtype",
            "device",
        ),
        WORD,
    ),
    **dict.fromkeys(("python", "date"), WORD),
}
"""Attributes that tables, figures and methods paragraphs cannot do without, and their types;
`DRAWN` in the Frobenius norm alone."""


def check_target(path: str | Path) -> Path:
    """Whether a run can be written to ``path``, found out before any computing.

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
    """Write a run to disk: a Zarr store, or, where the name ends in ``.nc``, a netCDF file; it
    appears under its name only when it is complete.

    Parts of a run (``ds.isel(sample=[0])``) and what `lipbound.concat` returns can be saved too. In
    netCDF, attributes that are lists, dictionaries or None stand as JSON; `lipbound.load` reads
    them back.

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
    if "bounds" in ds.attrs and (lacking := _lacking_variables(ds)):
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
    """The same with attributes that netCDF can hold; a word before them tells JSON from text."""
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
    """Attributes of a Dataset and of its variables."""
    return [ds.attrs, *(variable.attrs for variable in ds.variables.values())]


def load(path: str | Path, *, damaged: str = "warn") -> xr.Dataset:
    """Read a run into memory, as `lipbound.compare` returned it, and set it against its checksums.

    Args:
        path: of the store, or of a netCDF file that `lipbound.save` wrote.
        damaged: what to do with numbers or settings that are not those that were computed: "warn"
            (a `DamagedRunWarning`), "refuse", or "accept".

    Raises:
        StoreError: there is no run at ``path``, or an unfinished one.
        AlteredRunError: a part of it is missing or cannot be read, or, with "refuse", is not as it
            was computed.
    """
    path = Path(path).expanduser()
    if damaged not in DAMAGED:
        raise UnknownNameError(f"damaged is {damaged!r}; {nearest(damaged, DAMAGED)}")
    _check_there(path)
    ds = read(path)
    if "lipbound" not in ds.attrs and {"exact", "exact_converged"} <= {*ds.variables}:
        raise AlteredRunError(
            f"{path} is damaged: its description zarr.json cannot be read (it has no settings)"
        )
    if "lipbound" not in ds.attrs:
        raise StoreError(
            f"{path} is a {'netCDF file' if path.is_file() else 'Zarr store'} but not a run of "
            "lipbound"
        )
    if "recipe" in ds.attrs and "bounds" not in ds.attrs:
        if damaged == "refuse":
            raise StoreError(
                f"{path} holds the data of the figure {ds.attrs['recipe']!r}, not a run of "
                "`lipbound compare`"
            )
        return ds
    if lacking := lacking_settings(ds) or _lacking_variables(ds):
        raise AlteredRunError(f"{path} is damaged or was edited: {lacking}; {again(ds)}")
    if damaged != "accept" and (what := damage(ds)):
        message = (
            f"{path} is damaged or was edited: {what}; `lipbound verify "
            f"{shlex.quote(str(path))}` tells what differs; {again(ds)}"
        )
        if damaged == "refuse":
            raise AlteredRunError(message)
        warnings.warn(message, DamagedRunWarning, stacklevel=2)
    names = ["exact", "exact_upper", "exact_l2", *ds.attrs["bounds"]]
    first = [name for name in names if name in ds]
    ds = ds.set_coords(flags(ds))
    return ds[
        first + [name for name in ds.data_vars if name not in first]
    ]  # a store does not keep their order


def _check_there(path: Path) -> None:
    """Raise StoreError where no finished run is."""
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
        raise StoreError(
            f"there is no unfinished run {path}"
            + (f"; {finished} is finished" if finished.exists() else "")
        )
    if not there:
        raise StoreError(
            f"there is no run {path}; `lipbound compare MODEL --out {shlex.quote(str(path))}` "
            "makes one"
        )


def _so_far(partial: Path) -> str:
    """The measured share of an unfinished run, in brackets."""
    done, count = measured_blocks(partial)
    return f" ({done} of {count} blocks of one layer each are measured)" if count else ""


def _resumed(path: Path) -> str:
    return f"the command that began it, with --out {shlex.quote(str(path))} --resume, finishes it"


def read(path: Path) -> xr.Dataset:
    """Any Dataset that `save` has written.

    Raises:
        StoreError: it is none.
        AlteredRunError: the values of a variable cannot be read.
    """
    netcdf = path.is_file()
    if not netcdf and (what := _no_store(path)):
        raise StoreError(f"{path} is not a run of lipbound: {what}")
    for description in sorted(
        path.glob("*/zarr.json")
    ):  # one by one: zarr, which opens all at once, goes on with the others when one fails
        try:
            array = zarr.open_array(description.parent, mode="r")
        except Exception as error:
            raise AlteredRunError(
                f"{path} is damaged: the description of {description.parent.name!r} cannot be "
                f"read ({one_line(error)})"
            ) from error
        if array.ndim == 1:  # coordinates, which are read with the descriptions
            _readable(path, description.parent.name, partial(_all, array))
    try:
        ds = (
            xr.open_dataset(path) if netcdf else xr.open_zarr(path, chunks=None, consolidated=False)
        )
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
    """That a folder is neither a run nor what is left of one, and which runs are in it, in words;
    else empty."""
    if any((path / name).exists() for name in ("zarr.json", ".zgroup", "exact")):
        return ""
    inside = sorted(one.parent.parent.name for one in path.glob("*/exact/zarr.json"))
    return "it is a folder" + (
        f" of runs ({', '.join(inside[:5])}{', ...' if len(inside) > 5 else ''}); name one of them"
        if inside
        else ""
    )


def _all(array: zarr.Array) -> object:
    return array[...]


def _readable(path: Path, name: object, values: Callable[[], object]) -> None:
    """Raise AlteredRunError where values cannot be read."""
    try:
        values()
    except Exception as error:  # whatever a codec makes of bytes that are not its own
        what = f"the values of {name!r} cannot be read ({type(error).__name__})"
        attrs = {}
        with suppress(Exception):  # how it was made, if that can be read
            attrs = dict(zarr.open_group(path, mode="r").attrs)
        raise AlteredRunError(
            f"{path} is damaged: {what}; {again(xr.Dataset(attrs=attrs))}"
        ) from error


def _missing_settings(ds: xr.Dataset) -> list[str]:
    """Settings without which a run cannot be shown that are not there."""
    return [
        name
        for name in NEEDED
        if name not in ds.attrs and (name not in DRAWN or norm_of(ds) == "frobenius")
    ]


def lacking_settings(ds: xr.Dataset) -> str:
    """The first setting without which a run cannot be shown that is missing or of a wrong kind, in
    words; else empty."""
    if not isinstance(ds.attrs.get("norm", ""), str) or norm_of(ds) not in NORMS:
        return f"its setting 'norm' is {ds.attrs['norm']!r}"
    if lost := _missing_settings(ds):
        return f"its setting {lost[0]!r} is missing"
    for name, kinds in NEEDED.items():
        if name in ds.attrs and (
            not isinstance(ds.attrs[name], kinds) or isinstance(ds.attrs[name], bool)
        ):
            return f"its setting {name!r} is {ds.attrs[name]!r}"
    if ds.attrs["dtype"] not in ("float32", "float64"):
        return f"its setting 'dtype' is {ds.attrs['dtype']!r}"
    return "the record of what it was made with is damaged" if _made_is_damaged(ds) else ""


def _made_is_damaged(ds: xr.Dataset) -> bool:
    """Tell whether attrs["made"], and attrs["runs"] of runs put together, are not what
    `lipbound.runs.provenance.sealed` writes."""
    if "made" not in ds.attrs:
        return False
    made, runs = ds.attrs["made"], ds.attrs.get("runs", [])
    kinds: dict[str, Any] = {
        "samples": int,
        "exact_samples": int,
        "layers": list,
        "variables": list,
        "identity": str,
    }
    kinds |= dict.fromkeys(("heads", "model_layers"), (int, type(None)))
    good = isinstance(made, dict) and all(
        name in made and isinstance(made[name], kind) for name, kind in kinds.items()
    )
    return not good or not isinstance(runs, list) or not all(isinstance(one, dict) for one in runs)


def _lacking_variables(ds: xr.Dataset) -> str:
    """The first variable or coordinate that is missing or of a wrong kind, in words; else empty."""
    bounds = [str(name) for name in ds.attrs["bounds"]]
    for name in [
        "sample",
        "layer",
        "length",
        "exact",
        "exact_converged",
        *bounds,
        *(f"{bound}_sound" for bound in bounds),
    ]:
        if name not in ds.variables:
            return f"{name!r} is missing"
    for name in own(ds):
        if (
            ds[name].dims not in (("sample", "layer", "head"), ("sample", "layer"))
            or ds[name].dtype.kind not in "fib"
        ):
            return f"{name!r} is no table of numbers by sample, layer and head"
    if "runs" in ds.attrs and any(name not in ds.variables for name in (RUN, RUN_SAMPLE)):
        return "which of its places are from which run is missing"
    for name in bounds:
        if lost := [
            key for key in ("label", "source") if not isinstance(ds[name].attrs.get(key), str)
        ]:
            return f"the {lost[0]} of {name!r} is missing"
        if compared_with(ds, name) not in ds:
            return f"{compared_with(ds, name)!r} is missing"
    return ""
