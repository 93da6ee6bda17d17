"""The files that hold the weights of a checkpoint, and single tensors of safetensors files."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
)

from lipbound.errors import CheckpointError

ORDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where weights may be, in the order in which transformers looks; an index names its shards."""
NAMED = "transformers_weights"
"""Key of a configuration for the file of weights, where it has another name than those."""
DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a file that Git LFS left in the place of a large one."""
LONGEST_HEADER = 100_000_000
"""Bytes that a safetensors file may have before its numbers."""
BLOCK = 1 << 22
"""Numbers read at once where a tensor is looked at piece by piece."""
WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DataParallel give the names of a state dict."""
HEADS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
"""Models with a head whose weights may be those of the table of embeddings, by configuration."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a safetensors file, as it was when the model was loaded.

    Attributes:
        file, key: where it is.
        shape: of the tensor.
        floating: whether it holds floating-point numbers.
        stamp: size and time of the file.
        change: what an adapter makes of it once it has the dtype of the model, or None.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    floating: bool
    stamp: tuple[int, int]
    change: Callable[[Tensor], Tensor] | None = None

    def changed(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the model computes with where the file has ``tensor``."""
        return tensor if self.change is None else self.change(tensor)

    def read(self, rows: slice | None = None) -> Tensor:
        """Read the tensor, or rows of it; pages of the file that nobody looks at are never read.

        Args:
            rows: of the first axis; all by default.

        Returns:
            The numbers in the dtype of the file.

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
                "layer by layer need their files, so put it back or load the model again"
            ) from error

    def finite(self) -> bool:
        """Return whether all numbers are finite in float32, looked at in blocks."""
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
    """List the files that the weights of a checkpoint are read from.

    Args:
        folder: of the checkpoint.

    Returns:
        The files, and sentences on others beside them that are not read.

    Raises:
        CheckpointError: there are none, an index is empty or names files that are not there, a file
            is cut off or was never fetched.
    """
    if shards := sorted(file.name for file in folder.iterdir() if DISTRIBUTED.fullmatch(file.name)):
        raise CheckpointError(
            f"{folder} holds a distributed checkpoint ({shards[0]}); save the model again, "
            "whole, with save_pretrained"
        )
    named, candidates = _candidates(folder)
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
    note = (
        f"the weights are read from {first}; {' and '.join(others)} beside it "
        f"{'is' if len(others) == 1 else 'are'} not read"
    )
    return found, [note] if others else []


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a file that weights are read from."""
    return bool(_candidates(folder)[1])


def _candidates(folder: Path) -> tuple[str | None, list[str]]:
    """Return the name of the weights in a configuration, and the names that there are, in order."""
    named = _read_json(folder / "config.json").get(NAMED)
    order = ORDER if named is None else (str(named), *ORDER)
    return named, [name for name in order if (folder / name).is_file()]


def _read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; empty where there is none."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _shards(index: Path) -> list[Path]:
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
    """Refuse a file that was not fetched whole.

    Args:
        file: of any kind; of safetensors files the header is read.

    Raises:
        CheckpointError: it is empty, what Git LFS leaves in the place of a file, or a safetensors
            file that is damaged or cut off.
    """
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
            header = json.loads(stream.read(length)) if 8 + length <= size else {}
            parts = [part for name, part in header.items() if name != "__metadata__"]
            end = max((int(part["data_offsets"][1]) for part in parts), default=0)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{file} is not a safetensors file, or a damaged one; fetch it again"
            ) from error
    if length > LONGEST_HEADER:
        raise CheckpointError(f"{file} is not a safetensors file; fetch it again")
    if size < 8 + length + end:
        raise CheckpointError(
            f"{file} is cut off: it has {size:,} bytes and should have at least "
            f"{8 + length + end:,}; fetch it again"
        )


def contents(folder: Path) -> dict[str, TensorRef]:
    """Locate every tensor of a checkpoint.

    Args:
        folder: of the checkpoint.

    Returns:
        The tensors by their names in the files.

    Raises:
        CheckpointError: as `files` does, and for other formats than safetensors.
    """
    named, _ = files(folder)
    if other := next((file.name for file in named if file.suffix != ".safetensors"), None):
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json, and "
            f"weights='layers' does not read {other}; use weights='whole', or save the model again "
            "with save_pretrained"
        )
    found = {}
    for file in (one.absolute() for one in named):
        stamp = _stamp(file)
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(key)
                floating = part.get_dtype().startswith(("F", "BF"))
                found[key] = TensorRef(file, key, tuple(part.get_shape()), floating, stamp)
    return found


def _stamp(file: Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def numbers(folder: Path) -> int:
    """Return how many numbers the safetensors files of a checkpoint hold."""
    return sum(torch.Size(tensor.shape).numel() for tensor in contents(folder).values())


def renames(stored: Iterable[str], config: PreTrainedConfig) -> dict[str, str]:
    """Find the stored names that the model does not know though the tensors are its own.

    Prefixes of wrappers go, where all names have them. A table of embeddings that is stored under
    the name of the head that it is tied to, and under that alone, as
    ``safetensors.torch.save_model`` does, gets its own name.

    Args:
        stored: the names in the files.
        config: of the model.

    Returns:
        The model's names by the stored ones, of those that differ.
    """
    new = {name: name for name in stored}
    while new and (
        found := next((w for w in WRAPPERS if all(n.startswith(w) for n in new.values())), None)
    ):
        new = {name: now.removeprefix(found) for name, now in new.items()}
    for head, table in _tied(config) if getattr(config, "tie_word_embeddings", False) else ():
        inside = table.partition(".")[2] or table  # as the model without its head calls it
        if not any(now == inside or now.endswith(f".{inside}") for now in new.values()):
            new = {name: table if now == head else now for name, now in new.items()}
    return {name: now for name, now in new.items() if now != name}


def _tied(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Yield the weights of models with a head, and those that they are the same as."""
    for mapping in HEADS:
        tied = getattr(mapping.get(type(config), None), "_tied_weights_keys", None)
        yield from tied.items() if isinstance(tied, dict) else ()
