"""A column of a table, a hub dataset or a list, value by value; and the batch of inputs it becomes."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from PIL import Image
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint

TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


@dataclass
class Inputs:
    """A batch for a model's forward pass, with where it came from.

    Attributes:
        batch: tensors whose first axis is the sample.
        description: one phrase for captions.
        preprocessing: what made the tensors out of the data, in words.
        fingerprint: "sha256:..." over the tensors.
    """

    batch: dict[str, Tensor]
    description: str
    preprocessing: str = "none: ready model inputs"

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(next(iter(self.batch.values())))

    @property
    def fingerprint(self) -> str:
        """Hash of names and values of the tensors, the same on every machine."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.batch.items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        return "sha256:" + digest.hexdigest()

    def block(self, start: int, stop: int, device: str) -> dict[str, Tensor]:
        """Samples start...stop-1, on a device."""
        return {name: tensor[start:stop].to(device) for name, tensor in self.batch.items()}


# -- tables and datasets -------------------------------------------------------------------------------------------------


def has_table(folder: Path) -> bool:
    """Whether a folder holds tables rather than images."""
    return any(file.suffix in TABLES for file in folder.iterdir())


def read_rows(
    data: Any, split: str | None, column: str | None, usual: Sequence[str], kind: type, checkpoint: Checkpoint
) -> tuple[Iterator[Any], str]:
    """The wanted column of a list, a dataset, a table file or a hub dataset, value by value, and a description."""
    what = "text" if kind is str else "images"
    if isinstance(data, Image.Image | str | Path) and not isinstance(data, kind if kind is not str else ()):
        if isinstance(data, Image.Image):
            raise InputsError(f"data is an image, but {checkpoint.name} takes {what}")
        table, description = _load_table(str(data), split, header=column is None or not column.isdigit())
    elif isinstance(data, Image.Image):
        return iter([data]), "an image"
    elif isinstance(data, Sequence):
        if not len(data):
            raise InputsError("data is an empty list; give at least one sample")
        wrong = next((type(item).__name__ for item in data if not isinstance(item, kind)), None)
        if wrong:
            raise InputsError(f"data holds items of type {wrong}, but {checkpoint.name} takes {what}")
        return iter(data), f"{len(data)} given {'texts' if kind is str else 'images'}"
    elif isinstance(data, datasets.Dataset | datasets.IterableDataset):
        table, description = data, str(getattr(data.info, "dataset_name", None) or "a dataset")
    else:
        raise InputsError(f"data is a {type(data).__name__}; give a path, a hub dataset id, a datasets.Dataset, a list or a dict of ready inputs")
    name = _column(table, column, usual, what, description)
    return _values(table, name, kind, what, description, checkpoint), description


def _values(table: Any, column: str, kind: type, what: str, description: str, checkpoint: Checkpoint) -> Iterator[Any]:
    for row in table:
        value = row[column]
        if not isinstance(value, kind):
            raise InputsError(
                f"column {column!r} of {description} holds {type(value).__name__}, but {checkpoint.name} takes {what}; name another with column="
            )
        yield value


def _column(table: Any, column: str | None, usual: Sequence[str], what: str, description: str) -> str:
    names = list(table.column_names or next(iter(table)).keys())
    if column is not None:
        if column not in names:
            raise InputsError(f"{description} has no column {column!r}; its columns are {', '.join(names)}")
        return column
    for name in usual:
        if name in names:
            return name
    raise InputsError(f"which column of {description} holds {what} is not clear; name one of {', '.join(names)} with column=")


def _load_table(name: str, split: str | None, *, header: bool = True) -> tuple[Any, str]:
    path = Path(name).expanduser()
    try:
        if path.suffix == ".csv" and path.is_file() and not header:
            table = datasets.load_dataset("csv", data_files=str(path), split="train", header=None)
            return table.rename_columns({old: str(i) for i, old in enumerate(table.column_names)}), path.name
        if path.suffix in TABLES and path.is_file():
            return datasets.load_dataset(TABLES[path.suffix], data_files=str(path), split="train"), path.name
        if path.exists() or name.startswith((".", "~", "/")) or path.suffix in TABLES:
            if not path.exists():
                raise InputsError(f"there is no file or folder {name}")
            if not path.is_dir():
                raise InputsError(f"{name} is not a file that can be read here; tables are {', '.join(TABLES)}")
        repo, _, config = name.partition(":")
        chosen = split or _pick_split(repo, config or None)
        return datasets.load_dataset(repo, config or None, split=chosen), f"{name}, {chosen} split"
    except InputsError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise InputsError(f"data {name!r} could not be read, as a file or a hub dataset: {message[0][:300]}") from error


def _pick_split(repo: str, config: str | None) -> str:
    names = datasets.get_dataset_split_names(repo, config)
    return next((n for n in ("test", "validation", "train") if n in names), names[0])
