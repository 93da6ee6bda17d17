"""Reading data of any modality: defaults, files, folders, lists, tables and hub datasets."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from torch import Tensor

from lipbound.errors import InputsError, shown
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.readers.files import is_plain_file, is_sentence, there
from lipbound.models.readers.tables import DataItems, ItemKind, is_saved, no_table, order, rows


@dataclass(frozen=True)
class Selection:
    """The part of some data that is wanted.

    Arguments are those of `lipbound.models.inputs.prepare`, but ``samples`` is None for all.
    """

    samples: int | None
    max_length: int
    split: str | None = None
    column: str | None = None
    shuffle: int | None = None

    def described(self, description: str) -> str:
        """Return the description of what was chosen from some data.

        >>> Selection(8, 128, shuffle=3).described("news.csv")
        'news.csv, shuffled with seed 3'
        """
        shuffled = "" if self.shuffle is None else f", shuffled with seed {self.shuffle}"
        return description + shuffled

    def drawn(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the first samples of a batch, or random ones; all where no number is given."""
        chosen: Any = slice(self.samples)
        if self.shuffle is not None:
            chosen = order(len(next(iter(batch.values()))), self.shuffle)[: self.samples]
        return {name: tensor[chosen] for name, tensor in batch.items()}


class Reader(ABC):
    """One modality.

    To add one: a class like this, its place in `lipbound.models.inputs.READERS`, and the name of
    the models' main input in `lipbound.models.checkpoint.MODALITIES`.

    Attributes:
        modality: as `Checkpoint.modality` has it.
        kind: what one item is, and the columns where tables have such items.
    """

    modality: ClassVar[str]
    kind: ClassVar[ItemKind]

    @abstractmethod
    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """Return the first items of some data as tensors that the checkpoint's model takes.

        Where there are none, it raises InputsError.
        """

    @abstractmethod
    def default(self) -> tuple[Iterable[Any], str]:
        """Return the items that are read where the user gives no data, and their description."""

    @abstractmethod
    def open_file(self, path: Path, checkpoint: Checkpoint) -> Iterable[Any]:
        """Return the items of a file that is no table; raise InputsError for another modality's."""

    def open_folder(self, path: Path) -> DataItems | None:
        """Return the items of a folder, or None where `datasets` is to read it."""
        return None

    def items(
        self, checkpoint: Checkpoint, data: Any, split: str | None, column: str | None
    ) -> DataItems:
        """Return the items of some data one by one.

        A table is read row by row, so some of its errors come later.

        Raises:
            InputsError: no such data, items of another modality, or a split or a column of what has
                none.
        """
        if isinstance(data, np.ndarray) and data.ndim == 1 and data.dtype.kind in "UO":
            data = data.tolist()  # of strings, or of whatever objects
        path, many = there(data), self.kind.many
        folder = path if path is not None and path.is_dir() and not is_saved(path) else None
        if data is None:
            found, what = DataItems(*self.default()), f"the default {many} have"
        elif path is not None and is_plain_file(data):
            found = DataItems(self.open_file(path, checkpoint), path.name)
            what = f"{path.name}, one file, has"
        elif folder is not None and (inside := self.open_folder(folder)) is not None:
            found, what = inside, f"{folder.name}, a folder of {many}, has"
        elif is_sentence(data):
            if self.kind.type is not str:
                raise InputsError(
                    f"there is no file, folder or dataset {shown(data)}, and {checkpoint.name} "
                    f"takes {self.kind.takes}, not text"
                )
            start = data[:40] + "..." if len(data) > 40 else data
            found, what = DataItems([data], f"the text {shown(start)}"), "a text has"
        elif isinstance(data, pd.Series):
            found = rows(data.to_frame(many), None, many, self.kind, checkpoint.name)
            found, what = replace(found, description="a series"), "a series has"
        else:
            return rows(data, split, column, self.kind, checkpoint.name)
        no_table(split, column, what)
        return found
