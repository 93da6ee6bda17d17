"""Unfinished runs: Zarr stores filled block by block, that another process can take up."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import zarr
from filelock import FileLock, Timeout

from lipbound.errors import StoreError, one_line, tell

if TYPE_CHECKING:  # saying that a run is unfinished needs no torch
    from lipbound.runs.measure import LayerResult

PARTIAL = ".partial"
LENGTH, ERROR, DONE = ".length", ".capture_error", ".done"


def partial_path(path: Path) -> Path:
    """Name the store of the unfinished run that will become ``path``."""
    return path.with_name(path.name + PARTIAL)


def _hold(path: Path) -> FileLock:
    """Take the lock of an unfinished run, which the system lets go when its process ends."""
    lock = FileLock(partial_path(path) / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StoreError(
            f"another process is filling {path} at this moment; wait for it to end, or choose "
            "another name"
        ) from error
    except OSError as error:
        raise _unwritable(partial_path(path), error) from error
    return lock


def _unwritable(path: Path, error: OSError) -> StoreError:
    """Describe a place that cannot be written to."""
    return StoreError(f"{path} cannot be written: {error.strerror or error}")


def unfinished(path: Path) -> StoreError:
    """Describe a run that is there in part, and was not asked for."""
    return StoreError(
        f"{partial_path(path)} holds an unfinished run; continue it with resume (--resume), or "
        "remove it first"
    )


def check_free(path: Path, *, resume: bool) -> None:
    """Check that a run can be begun, or taken up where ``resume`` is asked for.

    Raises:
        StoreError: another process fills it, or it is there in part.
    """
    if partial_path(path).exists():
        _hold(path).release()
        if not resume:
            raise unfinished(path)


class PartialRun:
    """Store of an unfinished run, held by one process at a time.

    A block's values are written first and its mark last, each file whole or not at all: what is
    marked is there, and a process may be killed at any moment. The mark of a layer at a block is a
    hash over everything that was written for it and over the configuration; what does not fit its
    mark when a run is taken up counts as not measured.

    Args:
        path: where the finished run will be.
        config: everything that decides its numbers, in JSON's types.
        tables: empty arrays (samples, layers, heads) of the run; filled with what is there already,
            and by `write`.
        block: samples in a block.
        resume: take up what is there; otherwise there must be nothing.

    Attributes:
        done: (blocks, layers) bool: what was there already, and as it was written.
        lengths: (samples,) tokens of the samples; 0 where no layer is measured yet.
        error: the largest error of the captures.

    Raises:
        StoreError: something is there and ``resume`` is not asked for; another process fills it; it
            belongs to another configuration; it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        tables: Mapping[str, np.ndarray],
        block: int,
        *,
        resume: bool,
    ):
        self._path, self._block, self._tables = partial_path(path), block, tables
        count, layers = next(iter(tables.values())).shape[:2]
        self.done = np.zeros((-(-count // block), layers), dtype=bool)
        self.lengths, self.error = np.zeros(count, dtype=np.int64), 0.0
        there = self._path.exists()
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._path, error) from error
        self._lock = _hold(path)
        try:
            if there and not resume:
                raise unfinished(path)
            self._open(dict(config))
        except BaseException:
            self._lock.release()
            raise

    def _open(self, config: dict[str, Any]) -> None:
        """Open the arrays, make those that are not there, and take up what is as it was written."""
        self._arrays: dict[str, zarr.Array] = {}
        self._salt = json.dumps(config, sort_keys=True).encode()
        try:
            stored = self._described(config)
            lost: list[str] = []
            for name, table in self._tables.items():
                self._array_of(
                    name, table.dtype, table.shape, (self._block, 1, table.shape[2]), lost
                )
            self._array_of(LENGTH, self.lengths.dtype, self.lengths.shape, (self._block,), lost)
            self._array_of(ERROR, np.dtype(float), self.done.shape, (1, 1), lost)
            self._array_of(DONE, np.dtype(np.int64), self.done.shape, (1, 1), lost)
            damaged, marked = self._take_up()
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self._path} cannot be used for an unfinished run: {one_line(error)}"
            ) from error
        if marked and not stored and not self.done.any():
            raise StoreError(
                f"the description of {self._path} is lost, and nothing in it fits this run; "
                "remove it, or choose another name"
            )
        self._group.attrs["config"] = config  # last: a store without it was never begun
        if damaged or (stored and lost):
            be = "is" if damaged == 1 else "are"
            told = (
                f"{damaged} of the {marked} measured blocks of one layer each in {self._path} {be} "
                f"lost or damaged{', and measured again' if damaged else ''}"
            )
            if stored and lost:
                what = f"the description of {', '.join(lost)} in {self._path}"
                told = f"{what} was lost and is written anew; {told}"
            tell(told)

    def _described(self, config: dict[str, Any]) -> bool:
        """Open the group, and tell whether it says what run it is of, which must be this one."""
        description = self._path / "zarr.json"
        try:
            self._group = zarr.open_group(self._path, mode="a")
        except Exception:  # no group's: what it holds shows whether it is of this run
            description.unlink(missing_ok=True)
            self._group = zarr.open_group(self._path, mode="a")
        stored = self._group.attrs.get("config")
        if not isinstance(stored, Mapping):
            return False
        same_configuration(self._path, dict(stored), config)
        return True

    def _array_of(
        self,
        name: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        lost: list[str],
    ) -> None:
        """Open one of the arrays.

        Where its description is gone, or is another's, it is written anew beside the values, which
        are kept, and the name is added to ``lost``.
        """
        description = self._path / name / "zarr.json"
        try:
            array = self._group[name]
        except Exception:  # whatever zarr makes of a description that is no longer one
            array = None
        said = (shape, chunks, dtype)
        if not isinstance(array, zarr.Array) or (array.shape, array.chunks, array.dtype) != said:
            lost.append(name)
            description.unlink(missing_ok=True)
            array = self._group.create_array(
                name, shape=shape, chunks=chunks, dtype=dtype, fill_value=0
            )
        self._arrays[name] = array

    def _take_up(self) -> tuple[int, int]:
        """Fill the tables with what fits its mark.

        Returns:
            How many marked pairs of block and layer do not, and how many are marked.
        """
        found = {name: _values(array) for name, array in self._arrays.items()}
        marks, readable = found.pop(DONE)
        damaged = int((~readable).sum())
        for block, layer in np.argwhere((marks != 0) & readable):
            rows = slice(block * self._block, (block + 1) * self._block)
            where: dict[str, Any] = dict.fromkeys(found, (rows, layer))
            where |= {LENGTH: rows, ERROR: (block, layer)}
            parts = {name: found[name][0][at] for name, at in where.items()}
            whole = all(found[name][1][at].all() for name, at in where.items())
            if not whole or self._mark(block, layer, parts) != marks[block, layer]:
                damaged += 1
                continue
            self.done[block, layer] = True
            for name in self._tables:
                self._tables[name][rows, layer] = parts[name]
            self.lengths[rows] = np.maximum(self.lengths[rows], parts[LENGTH])
            self.error = max(self.error, float(parts[ERROR]))
        return damaged, int((marks != 0).sum() + (~readable).sum())

    def _mark(self, block: int, layer: int, parts: Mapping[str, np.ndarray]) -> int:
        """Hash over what is stored of a layer at a block, over where, and of what run that is.

        It is never 0, which means that nothing is stored.
        """
        digest = hashlib.blake2b(self._salt, digest_size=8)
        digest.update(f"{block}/{layer}".encode())
        for name in sorted(parts):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(parts[name]).tobytes())
        return int.from_bytes(digest.digest(), "little", signed=True) or 1

    def write(self, start: int, measured: LayerResult) -> None:
        """Store one layer at a block from the tables, into which it was put.

        Args:
            start: first sample of the block.
            measured: the layer.

        Raises:
            StoreError: it cannot be written.
        """
        i, block = measured.layer, start // self._block
        rows = slice(start, start + len(measured.lengths))
        self.lengths[rows] = np.maximum(self.lengths[rows], measured.lengths)
        self.error = max(self.error, measured.error)
        parts: dict[str, np.ndarray] = {
            name: table[rows, i] for name, table in self._tables.items()
        }
        parts |= {LENGTH: measured.lengths, ERROR: np.asarray(measured.error)}
        try:
            for name in self._tables:
                self._arrays[name][rows, i] = parts[name]
            self._arrays[LENGTH][rows] = parts[LENGTH]
            self._arrays[ERROR][block, i] = parts[ERROR]
            self._arrays[DONE][block, i] = self._mark(block, i, parts)
        except OSError as error:
            raise StoreError(
                f"{self._path} could not be written: {error.strerror or error}; run again with "
                "resume once it can"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.close(finished=failure is None)

    def close(self, *, finished: bool) -> None:
        """Let go of the store, and remove it where the run is ``finished`` and saved."""
        self._lock.release()
        if finished:
            shutil.rmtree(self._path, ignore_errors=True)


def _values(array: zarr.Array) -> tuple[np.ndarray, np.ndarray]:
    """Read an array, chunk by chunk where some cannot be, and tell where it could."""
    try:
        return np.asarray(array[...]), np.ones(array.shape, dtype=bool)
    except Exception:  # whatever a codec makes of bytes that are not its own
        values = np.zeros(array.shape, dtype=array.dtype)
    readable = np.zeros(array.shape, dtype=bool)
    counts = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
    for index in np.ndindex(*counts):
        chunks = zip(index, array.chunks, strict=True)
        at = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in chunks)
        with suppress(Exception):
            values[at] = array[at]
            readable[at] = True
    return values, readable


def measured_blocks(path: Path) -> tuple[int, int]:
    """Count measured blocks of one layer each, and all, in the unfinished run at ``path``.

    Returns:
        Both counts; (0, 0) where they are lost.
    """
    try:
        marks, readable = _values(zarr.open_array(path / DONE, mode="r"))
    except Exception:
        return 0, 0
    return int(((marks != 0) & readable).sum()), marks.size


def stored_block(path: Path, *, default: int) -> int:
    """Count the samples in a block of the unfinished run at ``path``; else ``default``."""
    for name in (LENGTH, "exact"):
        try:
            return int(zarr.open_array(path / name, mode="r").chunks[0])
        except Exception:  # never begun, or the description is lost
            continue
    return default


def same_configuration(path: Path, stored: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse a run that differs from what is asked for, naming the settings that do."""
    pairs = {key: (stored.get(key), asked.get(key)) for key in {**stored, **asked}}
    if different := {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}:
        what = "; ".join(
            f"{key} was {_said(then)} and is now {_said(now)}"
            for key, (then, now) in different.items()
        )
        raise StoreError(
            f"{path} belongs to another configuration: {what}; use the same arguments, or "
            "another name"
        )


def _said(value: object) -> str:
    """Write a setting in words: the items of a list, "none" for what is not set."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value)) or "none"
    return "none" if value is None else str(value)
