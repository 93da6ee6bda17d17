"""Unfinished runs: folders filled block by block, that another process can take up."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout

from lipbound.errors import StoreError, one_line, tell
from lipbound.formatting import replacing

PARTIAL = ".partial"
CONFIGURATION, LOCK = "configuration.json", ".lock"
START, LAYER, LENGTHS, ERROR = ".start", ".layer", ".lengths", ".capture_error"
"""Names in a file that are no variables of a run."""
MARK = 32
"""Bytes of the mark that a file begins with."""


class LayerResult(NamedTuple):
    """One layer at one block of samples.

    Attributes:
        start: number of the first sample.
        layer: its position among the chosen layers.
        values: by name, (samples, heads) each.
        lengths: (samples,) tokens of the inputs.
        error: of the capture.
        name: of the layer; not stored.
    """

    start: int
    layer: int
    values: dict[str, np.ndarray]
    lengths: np.ndarray
    error: float
    name: str = ""


def partial_path(path: Path) -> Path:
    """Name the folder of the unfinished run that will become ``path``."""
    return path.with_name(path.name + PARTIAL)


def hold(path: Path, file: Path, *, again: bool = False) -> BaseFileLock:
    """Take the lock of a run, which the system lets go when its process ends.

    Args:
        path: of the run, for messages.
        file: that is locked.
        again: whether this process may take it although it holds it already.

    Raises:
        StoreError: another process holds it; the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file, is_singleton=again, thread_local=False)
        lock.acquire(timeout=0)
    except Timeout as error:
        what = f"another process is filling {path} at this moment"
        raise StoreError(f"{what}; wait for it to end, or choose another name") from error
    except OSError as error:
        raise StoreError(f"{file.parent} cannot be written: {one_line(error)}") from error
    return lock


def check_free(path: Path, *, resume: bool) -> None:
    """Check that a run can be begun, or taken up where ``resume`` is asked for.

    Raises:
        StoreError: another process fills it, or it is there in part.
    """
    if partial_path(path).exists():
        hold(path, partial_path(path) / LOCK).release()
        if not resume:
            what = f"{partial_path(path)} holds an unfinished run"
            raise StoreError(f"{what}; continue it with resume (--resume), or remove it first")


class PartialRun:
    """Folder of an unfinished run, held by one process at a time.

    Each layer at a block of samples is a file, which is there whole or not at all: a process may be
    killed at any moment. It begins with a mark, a hash over what follows and the configuration; a
    file that does not fit its mark when the run is taken up counts as not measured.

    Args:
        path: where the finished run will be.
        config: everything that decides its numbers, in JSON's types.

    Attributes:
        found: what was there already.

    Raises:
        StoreError: another process fills it; it belongs to another configuration; it cannot be
            written.
    """

    def __init__(self, path: Path, config: dict[str, Any]):
        self._path, self._salt = partial_path(path), json.dumps(config, sort_keys=True)
        self._lock = hold(path, self._path / LOCK)
        try:
            self.found = self._take_up(config)
        except BaseException:
            self._lock.release()
            raise

    def _take_up(self, config: dict[str, Any]) -> list[LayerResult]:
        """Read the files that fit their marks; those that do not are told."""
        if stored := configuration(self._path):
            same_configuration(self._path, stored, config)
        files = sorted(self._path.glob("[!.]*.npz"))
        found = [one for one in map(self._read, files) if one is not None]
        if files and not stored and not found:
            what = f"the description of {self._path} is lost"
            raise StoreError(f"{what}, and nothing in it fits this run; choose another name")
        if lost := len(files) - len(found):
            tell(
                f"{lost} of the {len(files)} measured blocks of one layer each in {self._path} "
                f"{'is' if lost == 1 else 'are'} damaged, and measured again"
            )
        self._put(CONFIGURATION, self._salt.encode())
        return found

    def _read(self, file: Path) -> LayerResult | None:
        """Read a layer at a block; None where it is not as it was written."""
        content = b""
        with suppress(OSError):  # what cannot be read is measured again
            content = file.read_bytes()
        if not content.startswith(self._mark(content[MARK:])):
            return None
        with np.load(io.BytesIO(content[MARK:])) as stored:
            parts = dict(stored)
        start, layer, error = (parts.pop(name).item() for name in (START, LAYER, ERROR))
        lengths = parts.pop(LENGTHS)
        return LayerResult(start, layer, parts, lengths, error)

    def _mark(self, content: bytes) -> bytes:
        """Hash over what is stored of a layer at a block, and over what run that is of."""
        return hashlib.sha256(self._salt.encode() + content).digest()

    def write(self, measured: LayerResult) -> None:
        """Store one layer at a block.

        Args:
            measured: the layer.

        Raises:
            StoreError: it cannot be written.
        """
        parts: dict[str, Any] = {START: measured.start, LAYER: measured.layer}
        parts |= measured.values | {LENGTHS: measured.lengths, ERROR: measured.error}
        written = io.BytesIO()
        np.savez(written, **parts)
        content = written.getvalue()
        self._put(f"{measured.start}-{measured.layer}.npz", self._mark(content) + content)

    def _put(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        try:
            with replacing(self._path / name) as (unfinished,):
                unfinished.write_bytes(content)
        except StoreError as error:
            raise StoreError(f"{error}; run again with resume once it can") from error

    def keeping(self, results: Iterable[LayerResult]) -> Iterator[LayerResult]:
        """Store results as they come.

        Yields:
            What was there already, then the results.
        """
        yield from self.found
        for measured in results:
            self.write(measured)
            yield measured

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Let go of the folder, and remove it where the run is finished and saved."""
        self._lock.release()
        if failure is None:
            shutil.rmtree(self._path, ignore_errors=True)


def configuration(folder: Path) -> dict[str, Any]:
    """Read the configuration of an unfinished run; empty where it is lost."""
    try:
        stored = json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def same_configuration(path: Path, stored: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse a run that differs from what is asked for, naming the settings that do."""
    different = [
        f"{key} was {_said(stored.get(key))} and is now {_said(asked.get(key))}"
        for key in {**stored, **asked}
        if stored.get(key) != asked.get(key)
    ]
    if different:
        raise StoreError(
            f"{path} belongs to another configuration: {'; '.join(different)}; use the same "
            "arguments, or another name"
        )


def _said(value: object) -> str:
    """Write a setting in words: the items of a list, "none" for what is not set."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value)) or "none"
    return "none" if value is None else str(value)
