"""The files of a folder that hold the weights of a checkpoint, and the tensors of safetensors
files, read one by one or in part."""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lipbound.errors import CheckpointError

ORDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where weights may be, in the order in which transformers looks; an index names its shards."""
NAMED = "transformers_weights"
"""What a configuration calls the file of weights, where it has another name than those."""
DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that Git LFS left in the place of a large one."""
LONGEST_HEADER = 100_000_000
"""Bytes that a safetensors file may have before its numbers."""
BLOCK = 1 << 22
"""Numbers read at once where a tensor is looked at piece by piece."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a safetensors file, as it was when the model was loaded.

    Attributes:
        change: what is made of it once it has the dtype of the model
            (`lipbound.models.sources.adapters`), or None.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    floating: bool
    stamp: tuple[int, int]
    change: Callable[[Tensor], Tensor] | None = None

    def changed(self, tensor: Tensor) -> Tensor:
        """The tensor that the model computes with where the file has ``tensor``, all of it."""
        return tensor if self.change is None else self.change(tensor)

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor, or rows of it, in the dtype of the file, backed by the file: pages that
        nobody looks at are never read.

        Raises:
            CheckpointError: the file is gone, has changed or cannot be read.
        """
        try:
            if _stamp(self.file) != self.stamp:
                raise CheckpointError(
                    f"{self.file} has changed since the model was loaded from it layer by layer; "
                    "load the model again"
                )
            with safe_open(self.file, framework="pt") as file:
                return file.get_tensor(self.key) if rows is None else file.get_slice(self.key)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.key} cannot be read from {self.file} any more ({error}); models loaded "
                "layer by layer need their files, so put it back "
                "or load the model again"
            ) from error

    def finite(self) -> bool:
        """Whether all numbers are finite in float32, looked at in blocks."""
        if not self.floating:
            return True
        if not self.shape or self.change is not None:
            return bool(torch.isfinite(self.changed(self.read().float())).all())
        step = max(1, BLOCK * self.shape[0] // max(1, torch.Size(self.shape).numel()))
        return all(
            bool(torch.isfinite(self.read(slice(i, i + step)).float()).all())
            for i in range(0, self.shape[0], step)
        )


def files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files that the weights of a checkpoint are read from, and sentences on others beside them
    that are not read.

    Raises:
        CheckpointError: there are none, an index is empty or names files that are not there, a file
            is cut off or was never fetched.
    """
    if shards := sorted(file.name for file in folder.iterdir() if DISTRIBUTED.fullmatch(file.name)):
        raise CheckpointError(
            f"{folder} holds a distributed checkpoint ({shards[0]}); save the model again, "
            "whole, with save_pretrained"
        )
    named = _read_json(folder / "config.json").get(NAMED)
    candidates = _candidates(folder, named)
    if named is not None and candidates[:1] != [named]:
        raise CheckpointError(
            f"the config.json of {folder} says that its weights are in {named} ({NAMED}), which "
            "is not there"
        )
    if not candidates:
        raise CheckpointError(
            f"{folder} has no weights ({' or '.join(ORDER)}); save the model again with "
            "save_pretrained"
        )
    first, *others = dict.fromkeys(candidates)
    found = [folder / first] if not first.endswith(".json") else _shards(folder / first)
    for file in found:
        check_file(file)
    notes = (
        [
            f"the weights are read from {first}; {' and '.join(others)} beside it "
            f"{'is' if len(others) == 1 else 'are'} not read"
        ]
        if others
        else []
    )
    return found, notes


def has_weights(folder: Path) -> bool:
    """Tell whether a folder has a file that weights are read from."""
    return bool(_candidates(folder, _read_json(folder / "config.json").get(NAMED)))


def _candidates(folder: Path, named: Any) -> list[str]:
    """Files of a folder that may hold its weights, the first of which does; ``named``: what its
    configuration calls it."""
    return [
        name
        for name in (ORDER if named is None else (str(named), *ORDER))
        if (folder / name).is_file()
    ]


def _read_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is none."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _shards(index: Path) -> list[Path]:
    """The files that an index names."""
    check_file(index)
    named = _read_json(index).get("weight_map")
    names = sorted({str(name) for name in named.values()}) if isinstance(named, dict) else []
    if not names:
        raise CheckpointError(
            f"{index} is no index of weights, or an empty one; fetch it again, or save the model "
            "again with save_pretrained"
        )
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        count = f"{len(missing)} of {len(names)} files" if len(names) > 1 else "a file"
        raise CheckpointError(
            f"{index} names {count} of weights that {'is' if len(missing) == 1 else 'are'} not "
            f"there, {missing[0]} for one"
        )
    return [index.parent / name for name in names]


def check_fetched(folder: Path, patterns: Iterable[str]) -> None:
    """Raise CheckpointError where files of a folder are what Git LFS leaves in the place of them.

    Args:
        folder: where to look, if it is one.
        patterns: of the names of the files.
    """
    for file in (file for pattern in patterns for file in folder.glob(pattern) if file.is_file()):
        with file.open("rb") as stream:
            _refuse_pointer(file, stream.read(len(POINTER)))


def _refuse_pointer(file: Path, start: bytes) -> None:
    if start.startswith(POINTER):
        raise CheckpointError(
            f"{file} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"
        )


def check_file(file: Path) -> None:
    """Raise CheckpointError where a file is empty, what Git LFS leaves in the place of one, or a
    safetensors file that is cut off."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(max(8, len(POINTER)))
        _refuse_pointer(file, start)
        if not size:
            raise CheckpointError(f"{file} is empty; fetch it again")
        if file.suffix != ".safetensors":
            return
        length = int.from_bytes(start[:8], "little")
        try:
            stream.seek(8)
            header = json.loads(stream.read(length)) if 8 + length <= size else None
            ends = (
                [
                    int(part["data_offsets"][1])
                    for name, part in header.items()
                    if name != "__metadata__"
                ]
                if header is not None
                else []
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{file} is not a safetensors file, or a damaged one; fetch it again"
            ) from error
    if length > LONGEST_HEADER:
        raise CheckpointError(f"{file} is not a safetensors file; fetch it again")
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise CheckpointError(
            f"{file} is cut off: it has {size:,} bytes and should have at least {expected:,}; "
            "fetch it again"
        )


def contents(folder: Path) -> dict[str, TensorRef]:
    """Every tensor of a checkpoint by its name in the files; raises CheckpointError as `files`
    does, and for other formats than safetensors."""
    named, _ = files(folder)
    if other := next((file.name for file in named if file.suffix != ".safetensors"), None):
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json, and "
            f"weights='layers' does not read {other}; use "
            "weights='whole', or save the model again with save_pretrained"
        )
    found = {}
    for file in (one.absolute() for one in named):
        stamp = _stamp(file)
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(key)
                found[key] = TensorRef(
                    file,
                    key,
                    tuple(part.get_shape()),
                    part.get_dtype().startswith(("F", "BF")),
                    stamp,
                )
    return found


def _stamp(file: Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def numbers(folder: Path) -> int:
    """How many numbers the safetensors files of a checkpoint hold; raises CheckpointError where
    there are no such files."""
    return sum(torch.Size(tensor.shape).numel() for tensor in contents(folder).values())
