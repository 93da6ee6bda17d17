"""The tensors of a checkpoint's safetensors files, read one by one or in part."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lipbound.errors import CheckpointError

BLOCK = 1 << 22
"""Numbers read at once where a tensor is looked at piece by piece."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a safetensors file, as it was when the model was loaded."""

    file: Path
    key: str
    shape: tuple[int, ...]
    floating: bool
    stamp: tuple[int, int]

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor, or rows of it, in the dtype of the file, backed by the file: pages that nobody looks at are never read.

        Raises:
            CheckpointError: the file is gone, has changed or cannot be read.
        """
        try:
            if _stamp(self.file) != self.stamp:
                raise CheckpointError(f"{self.file} has changed since the model was loaded from it layer by layer; load the model again")
            with safe_open(self.file, framework="pt") as file:
                return file.get_tensor(self.key) if rows is None else file.get_slice(self.key)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.key} cannot be read from {self.file} any more ({error}); models loaded layer by layer need their files, so put it back "
                "or load the model again"
            ) from error

    def finite(self) -> bool:
        """Whether all numbers are finite in float32, looked at in blocks."""
        if not self.floating:
            return True
        if not self.shape:
            return bool(torch.isfinite(self.read().float()))
        step = max(1, BLOCK * self.shape[0] // max(1, torch.Size(self.shape).numel()))
        return all(bool(torch.isfinite(self.read(slice(i, i + step)).float()).all()) for i in range(0, self.shape[0], step))


def contents(folder: Path) -> dict[str, TensorRef]:
    """Every tensor of a checkpoint by its name in the files."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        if not index.exists():
            raise CheckpointError(
                f"{folder} has neither model.safetensors nor {index.name}, and weights='layers' reads no other files; use weights='whole', or save "
                "the model again with save_pretrained"
            )
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    found = {}
    for name in names:
        file = (folder / name).absolute()
        stamp = _stamp(file)
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(key)
                found[key] = TensorRef(file, key, tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF")), stamp)
    return found


def _stamp(file: Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def numbers(folder: Path) -> int:
    """How many numbers the safetensors files of a checkpoint hold; raises CheckpointError where there are no such files."""
    return sum(torch.Size(tensor.shape).numel() for tensor in contents(folder).values())
