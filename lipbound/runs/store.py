"""Runs on disk: one Zarr store each."""

import os
import shlex
import shutil
import tempfile
import warnings
from pathlib import Path

import xarray as xr
import zarr

from lipbound.bounds.audit import FORMER_SLACK, compared_with, norm_of
from lipbound.bounds.entry import NORMS
from lipbound.errors import AlteredRunError, DamagedRunWarning, StoreError, UnknownNameError, nearest
from lipbound.runs.provenance import DRAWN, again, damage, own

DAMAGED = ("warn", "refuse", "accept")
WORD, COUNT, NUMBER = (str,), (int,), (int, float)
NEEDED: dict[str, tuple[type, ...]] = {
    "bounds": (list,), "versions": (dict,), "delta": (int, float, type(None)), "tol": NUMBER, "capture_error": NUMBER,
    **dict.fromkeys(("samples", "exact_samples", "tokens", "seed"), COUNT),
    **dict.fromkeys(("model", "architecture", "revision", "data", "data_fingerprint", "map_description", "method", "dtype", "device"), WORD),
    **dict.fromkeys(("python", "date"), WORD),
}  # fmt: skip
"""Attributes that tables, figures and methods paragraphs cannot do without, and their types; `DRAWN` in the Frobenius norm alone."""


def check_target(path: str | Path) -> Path:
    """Whether a run can be written to ``path``, found out before any computing.

    Raises:
        StoreError: it exists already, or its folder cannot be written to.
    """
    path = Path(path).expanduser()
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
    """Write a run as a Zarr store; it appears under its name only when it is complete.

    Raises:
        StoreError: the path exists or cannot be written.
    """
    path = check_target(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        ds.to_zarr(partial, mode="w", consolidated=False)
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreError(f"{path} could not be written: {error.strerror or error}") from error
    except BaseException:  # interrupted; what it is made of is still there
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return path


def load(path: str | Path, *, damaged: str = "warn") -> xr.Dataset:
    """Read a run into memory, as `lipbound.compare` returned it, and set it against its checksums.

    Args:
        path: of the store.
        damaged: what to do with numbers or settings that are not those that were computed: "warn" (a `DamagedRunWarning`), "refuse", or "accept".

    Raises:
        StoreError: there is no run at ``path``.
        AlteredRunError: a part of it is missing or cannot be read, or, with "refuse", is not as it was computed.
    """
    path = Path(path).expanduser()
    if damaged not in DAMAGED:
        raise UnknownNameError(f"damaged is {damaged!r}; {nearest(damaged, DAMAGED)}")
    if not path.exists():
        raise StoreError(f"there is no run {path}; `lipbound compare MODEL --out {shlex.quote(str(path))}` makes one")
    ds = read(path)
    if "lipbound" not in ds.attrs:
        raise StoreError(f"{path} is a Zarr store but not a run of lipbound")
    if "recipe" in ds.attrs and "bounds" not in ds.attrs:
        if damaged == "refuse":
            raise StoreError(f"{path} holds the data of the figure {ds.attrs['recipe']!r}, not a run of `lipbound compare`")
        return ds
    if lacking := _lacking(ds):
        raise AlteredRunError(f"{path} is damaged or was edited: {lacking}; {again(ds)}")
    if damaged != "accept" and (what := damage(ds)):
        message = f"{path} is damaged or was edited: {what}; `lipbound verify {shlex.quote(str(path))}` tells what differs; {again(ds)}"
        if damaged == "refuse":
            raise AlteredRunError(message)
        warnings.warn(message, DamagedRunWarning, stacklevel=2)
    names = ["exact", "exact_upper", "exact_l2", *ds.attrs["bounds"]]
    first = [name for name in names if name in ds]
    return ds[first + [name for name in ds.data_vars if name not in first]]  # a store does not keep their order


def read(path: Path) -> xr.Dataset:
    """Any Dataset that `save` has written.

    Raises:
        StoreError: it is none.
        AlteredRunError: the values of a variable cannot be read.
    """
    for description in sorted(path.glob("*/zarr.json")):  # one by one: zarr, which opens all at once, goes on with the others when one fails
        try:
            zarr.open_array(description.parent, mode="r")
        except Exception as error:
            raise AlteredRunError(f"{path} is damaged: the description of {description.parent.name!r} cannot be read ({_short(error)})") from error
    try:
        ds = xr.open_zarr(path, chunks=None, consolidated=False)
    except Exception as error:  # zarr and xarray raise a zoo of types for a folder that is no store
        raise StoreError(f"{path} is not a run of lipbound: {_short(error)}") from error
    for name, variable in ds.variables.items():
        try:
            variable.load()  # all of it at once, without dask
        except Exception as error:  # whatever a codec makes of bytes that are not its own
            raise AlteredRunError(f"{path} is damaged: the values of {name!r} cannot be read ({type(error).__name__}); {again(ds)}") from error
    return ds


def _short(error: Exception) -> str:
    """An error of another package on one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _lacking(ds: xr.Dataset) -> str:
    """The first part without which a run cannot be shown that is missing or of a wrong kind, in words; else empty."""
    if not isinstance(ds.attrs.get("norm", ""), str) or norm_of(ds) not in NORMS:
        return f"its setting 'norm' is {ds.attrs['norm']!r}"
    for name, kinds in NEEDED.items():
        if name in DRAWN and norm_of(ds) != "frobenius":
            continue
        if name not in ds.attrs or not isinstance(ds.attrs[name], kinds) or isinstance(ds.attrs[name], bool):
            return f"its setting {name!r} is missing" if name not in ds.attrs else f"its setting {name!r} is {ds.attrs[name]!r}"
    if ds.attrs["dtype"] not in FORMER_SLACK:
        return f"its setting 'dtype' is {ds.attrs['dtype']!r}"
    bounds = [str(name) for name in ds.attrs["bounds"]]
    for name in ["sample", "layer", "length", "exact", "exact_converged", *bounds, *(f"{bound}_sound" for bound in bounds)]:
        if name not in ds.variables:
            return f"{name!r} is missing"
    for name in own(ds):
        if ds[name].dims not in (("sample", "layer", "head"), ("sample", "layer")) or ds[name].dtype.kind not in "fib":
            return f"{name!r} is no table of numbers by sample, layer and head"
    for name in bounds:
        if lost := [key for key in ("label", "source") if not isinstance(ds[name].attrs.get(key), str)]:
            return f"the {lost[0]} of {name!r} is missing"
        if compared_with(ds, name) not in ds:
            return f"{compared_with(ds, name)!r} is missing"
    return ""
