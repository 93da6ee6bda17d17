"""A run while it is computed: a Zarr store beside its final place, filled by (block of samples, layer), that another process can take up."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import zarr
from filelock import FileLock, Timeout

from lipbound.errors import StoreError
from lipbound.runs.measure import LayerResult

LENGTH, ERROR, DONE = ".length", ".capture_error", ".done"


def partial_path(path: Path) -> Path:
    """Where the unfinished run that will become ``path`` is kept."""
    return path.with_name(path.name + ".partial")


def _hold(path: Path) -> FileLock:
    """The lock of an unfinished run, which the system lets go when its process ends, however that ends."""
    lock = FileLock(partial_path(path) / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StoreError(f"another process is filling {path} at this moment; wait for it to end, or choose another name") from error
    except OSError as error:
        raise StoreError(f"{partial_path(path)} cannot be written: {error.strerror or error}") from error
    return lock


def unfinished(path: Path) -> StoreError:
    """The error about a run that is there in part, and was not asked for."""
    return StoreError(f"{partial_path(path)} holds an unfinished run; continue it with resume (--resume), or remove it first")


def check_free(path: Path, *, resume: bool) -> None:
    """Whether nobody else fills the run that will be at ``path``, and it is not there in part unless ``resume`` is asked for.

    Raises:
        StoreError: otherwise.
    """
    if partial_path(path).exists():
        _hold(path).release()
        if not resume:
            raise unfinished(path)


class PartialRun:
    """The store of an unfinished run, held by one process at a time.

    A block's values are written first and its mark last, each file whole or not at all: what is marked is there, and a process may be killed
    at any moment.

    Args:
        path: where the finished run will be.
        config: everything that decides its numbers, in JSON's types.
        tables: empty arrays (samples, layers, heads) of the run.
        block: samples in a block.
        resume: take up what is there; otherwise there must be nothing.

    Raises:
        StoreError: something is there and ``resume`` is not asked for; another process fills it; it belongs to another configuration; it cannot
            be written.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], tables: Mapping[str, np.ndarray], block: int, *, resume: bool):
        self._path, self._block = partial_path(path), block
        there = self._path.exists()
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._lock = _hold(path)
        try:
            if there and not resume:
                raise unfinished(path)
            self._group = self._open(config, tables, there)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, config: Mapping[str, Any], tables: Mapping[str, np.ndarray], there: bool) -> zarr.Group:
        try:
            group = zarr.open_group(self._path, mode="a")
            if there and "config" in group.attrs:
                same_configuration(self._path, dict(group.attrs["config"]), dict(config))
                return group
            count, layers, heads = next(iter(tables.values())).shape
            blocks = -(-count // self._block)
            for name, table in tables.items():
                group.create_array(
                    name, shape=table.shape, chunks=(self._block, 1, heads), dtype=table.dtype, fill_value=table.flat[0], overwrite=True
                )
            group.create_array(LENGTH, shape=(count,), chunks=(self._block,), dtype="int64", overwrite=True)
            group.create_array(ERROR, shape=(blocks, layers), chunks=(1, 1), dtype="float64", overwrite=True)
            group.create_array(DONE, shape=(blocks, layers), chunks=(1, 1), dtype="bool", fill_value=False, overwrite=True)
            group.attrs["config"] = dict(config)  # last: a store without it was never begun
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._path} cannot be used for an unfinished run: {error}") from error
        return group

    @property
    def done(self) -> np.ndarray:
        """(blocks, layers) bool."""
        return np.asarray(self._array(DONE)[:])

    def _array(self, name: str) -> zarr.Array:
        array = self._group[name]
        assert isinstance(array, zarr.Array)
        return array

    def write(self, start: int, measured: LayerResult) -> None:
        """Store one layer at the block that starts at sample ``start``."""
        i, block = measured.layer, start // self._block
        try:
            for name, value in measured.values.items():
                self._array(name)[start : start + len(value), i, : value.shape[1]] = value
            self._array(LENGTH)[start : start + len(measured.lengths)] = measured.lengths
            self._array(ERROR)[block, i] = measured.error
            self._array(DONE)[block, i] = True
        except OSError as error:
            raise StoreError(f"{self._path} could not be written: {error.strerror or error}; run again with resume once it can") from error

    def read(self, tables: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
        """Fill the tables with what is stored; lengths of the samples, and the largest error of the capture."""
        for name in tables:
            tables[name][...] = self._array(name)[:]
        return np.asarray(self._array(LENGTH)[:]), float(np.max(np.asarray(self._array(ERROR)[:])))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.close(finished=failure is None)

    def close(self, *, finished: bool) -> None:
        """Let go of the store, and remove it when the run is saved: a ``with`` block that ends without an error."""
        self._lock.release()
        if finished:
            shutil.rmtree(self._path, ignore_errors=True)


def stored_block(path: Path, *, default: int) -> int:
    """Samples in a block of the unfinished run at ``path``; ``default`` where there is none."""
    try:
        config = zarr.open_group(path, mode="r").attrs.get("config", {})
    except (OSError, ValueError):
        return default
    return int(config.get("block", default)) if isinstance(config, Mapping) else default


def same_configuration(path: Path, stored: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise StoreError naming the fields in which a run differs from what is asked for; one without a norm is of before, and Frobenius."""
    stored = {"norm": "frobenius"} | stored
    different = [key for key in {**stored, **asked} if stored.get(key) != asked.get(key)]
    if different:
        what = "; ".join(f"{key} was {stored.get(key)!r} and is now {asked.get(key)!r}" for key in different)
        raise StoreError(f"{path} belongs to another configuration: {what}; use the same arguments, or another name")
