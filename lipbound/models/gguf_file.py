"""Checkpoints in one GGUF file, llama.cpp's format: weights, configuration and tokenizer together.

transformers' own reader turns the weights, mostly quantised, into the floating-point numbers that
they stand for, which are what is measured. Needs the package gguf.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lipbound import devices
from lipbound.errors import CheckpointError, nearest
from lipbound.models.quiet import VERBOSE

SUFFIX = ".gguf"
EXTRA = "pip install 'lipbound[gguf]'"
NEEDED = ("gguf", "accelerate")
"""Packages that transformers reads GGUF files with."""


def is_gguf(name: str) -> bool:
    """Return whether a name ends as that of a GGUF file does."""
    return name.lower().endswith(SUFFIX)


def choose(folder: Path, wanted: str | None, name: str) -> str:
    """Choose the GGUF file of a folder.

    Args:
        folder: where to look.
        wanted: its name there; None for the only one.
        name: what the user called the folder, for messages.

    Returns:
        The name of the file.

    Raises:
        CheckpointError: there is no such file, or there are several and none was named.
    """
    there = sorted(file.name for file in folder.glob(f"*{SUFFIX}"))
    if wanted is None:
        if len(there) == 1:
            return there[0]
        listed = " or ".join(map(repr, there))
        raise CheckpointError(
            f"{name} holds several GGUF files; name one with gguf_file=, {listed}"
        )
    check_name(wanted)
    if not (folder / wanted).is_file():
        instead = nearest(wanted, there) if there else "it holds no GGUF file at all"
        raise CheckpointError(f"{name} has no file {wanted}; {instead}")
    return wanted


def check_name(wanted: str) -> None:
    """Refuse a name that is not that of one GGUF file.

    Args:
        wanted: what was given.

    Raises:
        CheckpointError: another ending, or a pattern.
    """
    if not wanted.endswith(SUFFIX) or "*" in wanted:
        raise CheckpointError(
            f"gguf_file is {wanted!r}; give the name of a file that ends with {SUFFIX}"
        )


def check_installed(name: str) -> None:
    """Refuse a GGUF file where a package that reads it is missing.

    Args:
        name: what the user called the file.

    Raises:
        CheckpointError: a package is missing.
    """
    if missing := [package for package in NEEDED if find_spec(package) is None]:
        raise CheckpointError(
            f"{name} is a GGUF file, and reading it needs the package {' and '.join(missing)}, "
            f"not installed here; {EXTRA}"
        )


def check_whole(name: str, path: Path) -> None:
    """Refuse a file that is one piece of a model, or whose weights are more than the memory takes.

    Args:
        name: what the user called the file.
        path: of the file.

    Raises:
        CheckpointError: it is one of several pieces; LipboundError where memory is short.
    """
    pieces = int(field(path, "split.count") or 1)
    if pieces > 1:
        raise CheckpointError(
            f"{name} is one of {pieces} pieces of a model; join them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    instead = "give the safetensors checkpoint that it was made from, with weights='layers'"
    needed, what = 4.0 * numbers(path), f"the weights of {name} take memory in float32"
    devices.require(needed, torch.device("cpu"), what, instead)


def contents(path: Path) -> Any:
    """Return ``gguf.GGUFReader`` of a file: ``fields`` by name, and ``tensors`` with their types.

    The last file read is kept, as long as it does not change. Files that are none, or broken, raise
    whatever the package raises.
    """
    status = path.stat()
    return _reader(str(path.resolve()), status.st_size, status.st_mtime_ns)


def field(path: Path, name: str) -> Any:
    """Return a field of a file by its name; None where it has none."""
    found = contents(path).fields.get(name)
    return None if found is None else found.contents()


def numbers(path: Path) -> int:
    """Return how many weights a file holds."""
    return sum(int(tensor.n_elements) for tensor in contents(path).tensors)


def quantization(path: Path) -> str:
    """Describe how a file stores its weights.

    Args:
        path: of the file.

    Returns:
        Its file type as llama.cpp calls it, and how many tensors are of which type, such as
        "GGUF Q4_1 (210 tensors Q4_1, 61 F32, 1 Q8_0)". A file that does not say its type is called
        by that of most of its tensors with rows.
    """
    import gguf

    tensors = contents(path).tensors
    counts = Counter(tensor.tensor_type.name for tensor in tensors).most_common()
    rows = Counter(t.tensor_type.name for t in tensors if len(t.shape) > 1).most_common() or counts
    try:
        kind = gguf.LlamaFileType(field(path, "general.file_type")).name
        kind = kind.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        kind = rows[0][0] if rows else "empty"
    listed = ", ".join(f"{count} {name}" for name, count in counts).replace(" ", " tensors ", 1)
    return f"GGUF {kind} ({listed or 'no tensors'})"


@contextmanager
def read_once(path: Path | None) -> Iterator[None]:
    """Have transformers read a file once, not for configuration, weights and tokenizer each.

    The names of tensors are likewise listed once instead of once a module, and no bar is drawn.
    What is read is the same.

    Args:
        path: of the file; `contents` says what is raised for files that are none. None changes
            nothing.

    Yields:
        Nothing; while the context lasts, functions of transformers and gguf are replaced.
    """
    if path is None:
        yield
        return
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reader

    changes: tuple[tuple[Any, str, Any], ...] = (
        (gguf, "GGUFReader", lambda path, mode="r": contents(Path(path))),
        (gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        (reader, "tqdm", reader.tqdm if os.environ.get(VERBOSE) else lambda items, **kwargs: items),
    )
    with ExitStack() as afterwards:
        for module, name, value in changes:
            afterwards.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


@lru_cache(maxsize=1)
def _reader(path: str, size: int, changed: int) -> Any:
    from gguf.gguf_reader import GGUFReader

    class PlainReader(GGUFReader):  # type: ignore[misc]  # the package has no types
        """Slices a plain array for the words of a vocabulary: a memory map takes several times."""

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = mapped.view(np.ndarray)

    return PlainReader(path)
