"""Runs on disk: one Zarr store each."""

import os
import shutil
import tempfile
from pathlib import Path

import xarray as xr

from lipbound.errors import StoreError


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


def load(path: str | Path) -> xr.Dataset:
    """Read a run into memory, as `lipbound.compare` returned it.

    Raises:
        StoreError: there is no run at ``path``.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise StoreError(f"there is no run {path}; `lipbound compare MODEL --out {path}` makes one")
    ds = read(path)
    if "lipbound" not in ds.attrs:
        raise StoreError(f"{path} is a Zarr store but not a run of lipbound")
    names = ["exact", "exact_upper", "exact_l2", *ds.attrs.get("bounds", [])]
    first = [name for name in names if name in ds]
    return ds[first + [name for name in ds.data_vars if name not in first]]  # a store does not keep their order


def read(path: Path) -> xr.Dataset:
    """Any Dataset that `save` has written."""
    try:
        return xr.open_zarr(path, chunks=None, consolidated=False).load()  # all of it at once, without dask
    except Exception as error:  # zarr and xarray raise a zoo of types for a folder that is no store
        raise StoreError(f"{path} is not a run of lipbound: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
