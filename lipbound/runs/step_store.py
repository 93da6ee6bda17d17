"""Runs over the steps of a training: put together in memory, and a Zarr store that grows with them.

The store can be read, and its training be killed, at any moment. A step is written behind those
that are there, chunks of its own; then one file, which holds the shapes of all arrays and is
replaced whole, lets readers see it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from lipbound.errors import StoreError, one_line
from lipbound.runs.store import save
from lipbound.schema import AXES, STEP

WITHOUT = ("audit", "violations")
"""Attributes of one run that a run over steps has not: bounds may fall below at some of them."""


def stacked(steps: Sequence[xr.Dataset]) -> xr.Dataset:
    """Put steps of one training together, along an axis before all others.

    Args:
        steps: runs of one kind, at least one, with a coordinate `STEP` each, ascending. Settings
            are those of the last.
    """
    last = steps[-1]
    along = [name for name, one in last.variables.items() if one.dims[:2] == AXES[:2]]
    ds = last.assign_coords({STEP: [int(one[STEP]) for one in steps]})
    for name in along:
        values = np.stack([one[name].values for one in steps])
        ds[name] = ((STEP, *last[name].dims), values, last[name].attrs)
    attrs = {name: value for name, value in last.attrs.items() if name not in WITHOUT}
    return ds.drop_attrs(deep=False).assign_attrs(attrs)


class StepStore:
    """A run over steps on disk.

    Args:
        path: of the store, which need not exist yet.
        count: how many steps of it count; those behind are written over.
    """

    def __init__(self, path: Path, count: int = 0):
        self._path, self._count = path, count

    def write(self, ds: xr.Dataset, position: int) -> None:
        """Write a step behind the first so many, and let go of those that stood there.

        Args:
            ds: one step.
            position: how many steps stand before it, at most as many as there are.

        Raises:
            StoreError: it cannot be written; what was there can still be read.
        """
        grown = stacked([ds])
        try:
            if position == 0:
                if self._count:
                    shutil.rmtree(self._path)
                    self._count = 0
                self._create(grown)
            else:
                if position < self._count:
                    self._append(grown, {}, position)
                    self._count = position
                names = [name for name, one in grown.variables.items() if STEP in one.dims]
                rows = {str(name): grown.variables[name].values[0] for name in names}
                self._append(grown, rows, position + 1)
        except OSError as error:
            what = f"step {int(ds[STEP])} could not be written to {self._path}: {one_line(error)}"
            raise StoreError(what) from error
        self._count = position + 1

    def _create(self, ds: xr.Dataset) -> None:
        """Make the store, with a chunk for every step, so that none is written twice."""
        for one in ds.variables.values():
            if STEP in one.dims:
                one.encoding["chunks"] = one.shape
        save(ds, self._path)

    def _append(self, ds: xr.Dataset, rows: Mapping[str, np.ndarray], count: int) -> None:
        """Fill the last of so many steps, and show that many, with the attributes of ``ds``."""
        group = zarr.open_group(self._path, mode="r+", use_consolidated=True)
        arrays: dict[str, Any] = dict(group.arrays())
        for name, one in ds.variables.items():
            if STEP in one.dims:
                array = arrays[str(name)]
                array.resize((count, *array.shape[1:]))
                if str(name) in rows:
                    array[count - 1] = rows[str(name)].astype(array.dtype)
        if group.attrs.asdict() != ds.attrs:
            group.update_attributes(ds.attrs)  # in one write
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other readers of this format may not know the file
            zarr.consolidate_metadata(group.store)
