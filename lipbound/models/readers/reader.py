"""Reading data of any modality: defaults, files, folders, lists, tables and hub datasets."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from lipbound.errors import InputsError, shown
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.readers.files import is_plain_file, is_sentence, there
from lipbound.models.readers.tables import DataItems, ItemKind, is_saved, no_table, rows


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
        path, many, found = there(data), self.kind.many, None
        if data is None:
            no_table(split, column, f"the default {many} have")
            return DataItems(*self.default())
        if path is not None and is_plain_file(data):
            no_table(split, column, f"{path.name}, one file, has")
            return DataItems(self.open_file(path, checkpoint), path.name)
        if path is not None and path.is_dir() and not is_saved(path):
            found = self.open_folder(path)
        if path is not None and found is not None:
            no_table(split, column, f"{path.name}, a folder of {many}, has")
            return found
        if is_sentence(data):
            no_table(split, column, "a text has")
            if self.kind.type is not str:
                raise InputsError(
                    f"there is no file, folder or dataset {shown(data)}, and {checkpoint.name} "
                    f"takes {self.kind.takes}, not text"
                )
            start = data[:40] + "..." if len(data) > 40 else data
            return DataItems([data], f"the text {shown(start)}")
        if isinstance(data, pd.Series):
            no_table(split, column, "a series has")
            found = rows(data.to_frame(many), None, many, self.kind, checkpoint.name)
            return replace(found, description="a series")
        return rows(data, split, column, self.kind, checkpoint.name)
