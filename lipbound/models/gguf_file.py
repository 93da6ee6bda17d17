"""What a GGUF file says of itself, and transformers' reader of such files without its repetitions;
needs the package gguf."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lipbound.errors import CheckpointError
from lipbound.models.quiet import VERBOSE

EXTRA = "pip install 'lipbound[gguf]'"
NEEDED = ("gguf", "accelerate")
"""Packages that transformers reads GGUF files with."""


def check_installed(name: str) -> None:
    """Raise CheckpointError where a package that reads GGUF files is missing; ``name`` is what the
    user called the file."""
    if missing := [package for package in NEEDED if find_spec(package) is None]:
        raise CheckpointError(
            f"{name} is a GGUF file, and reading it needs the package {' and '.join(missing)}, "
            f"not installed here; {EXTRA}"
        )


def contents(path: Path) -> Any:
    """``gguf.GGUFReader`` of a file: ``fields`` by name, and ``tensors`` with their types; the last
    file read is kept, as long as it does not change.

    Raises:
        Exception: what the package raises for files that are none, or broken.
    """
    status = path.stat()
    return _reader(str(path.resolve()), status.st_size, status.st_mtime_ns)


def field(path: Path, name: str) -> Any:
    """A field of a file by its name; None where it has none."""
    found = contents(path).fields.get(name)
    return None if found is None else found.contents()


def numbers(path: Path) -> int:
    """How many weights a file holds."""
    return sum(int(tensor.n_elements) for tensor in contents(path).tensors)


def quantization(path: Path) -> str:
    """How a file stores its weights: its file type as llama.cpp calls it, and how many tensors are
    of which type.

    "GGUF Q4_1 (210 tensors Q4_1, 61 F32, 1 Q8_0)", for one. A file that does not say its type is
    called by that of most of its tensors with rows.
    """
    import gguf

    tensors = contents(path).tensors
    counts = Counter(tensor.tensor_type.name for tensor in tensors).most_common()
    matrices = (
        Counter(
            tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1
        ).most_common()
        or counts
    )
    try:
        kind = (
            gguf.LlamaFileType(field(path, "general.file_type"))
            .name.removeprefix("MOSTLY_")
            .removeprefix("ALL_")
        )
    except ValueError:
        kind = matrices[0][0] if matrices else "empty"
    first, *rest = [
        f"{count} tensors {name}" if i == 0 else f"{count} {name}"
        for i, (name, count) in enumerate(counts)
    ] or ["no tensors"]
    return f"GGUF {kind} ({', '.join([first, *rest])})"


@contextmanager
def read_once(path: Path) -> Iterator[None]:
    """Context in which transformers reads the fields of a file once, where it would do so for
    configuration, weights and tokenizer each.

    The names of tensors are likewise listed once instead of once a module, and no bar is drawn.
    What is read is the same.

    Raises:
        Exception: as `contents`.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reader

    parse, known = reader._gguf_parse_value, contents(path).parsed

    def parsed(value: Any, types: Any) -> Any:
        found = known.get(id(value))
        if found is None or found[0] is not value:
            found = known[id(value)] = value, parse(value, types)
        return found[1]

    changes: tuple[tuple[Any, str, Any], ...] = (
        (gguf, "GGUFReader", lambda path, mode="r": contents(Path(path))),
        (gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        (reader, "_gguf_parse_value", parsed),
        (reader, "tqdm", reader.tqdm if os.environ.get(VERBOSE) else lambda items, **kwargs: items),
    )
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


@lru_cache(maxsize=1)
def _reader(path: str, size: int, changed: int) -> Any:
    from gguf.gguf_reader import GGUFReader

    class CheckedReader(GGUFReader):  # type: ignore[misc]  # the package has no types
        """Quick with the words of a vocabulary, of which it takes several small arrays each."""

        def __init__(self, path: str) -> None:
            self.parsed: dict[
                int, tuple[Any, Any]
            ] = {}  # by the identity of an array that is kept beside what it says
            super().__init__(path)

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = mapped.view(
                np.ndarray
            )  # a slice of a memory map costs several times one of a plain array

        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> np.ndarray:
            if (override_order or self.byte_order) != "I":
                return super()._get(offset, dtype, count, override_order)
            count = int(count)
            return self._plain[offset : offset + np.dtype(dtype).itemsize * count].view(dtype)[
                :count
            ]

    return CheckedReader(path)
