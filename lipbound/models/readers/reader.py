"""What a modality must know to be read, and what all readers share: defaults, files, folders,
lists, tables and hub datasets."""

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
    """The part of some data that is wanted; arguments as of `lipbound.models.inputs.prepare`, but
    ``samples`` is None for all."""

    samples: int | None
    max_length: int
    split: str | None = None
    column: str | None = None
    shuffle: int | None = None

    def described(self, description: str) -> str:
        """The description of what was chosen from some data.

        >>> Selection(8, 128, shuffle=3).described("news.csv")
        'news.csv, shuffled with seed 3'
        """
        return (
            description
            if self.shuffle is None
            else f"{description}, shuffled with seed {self.shuffle}"
        )


class Reader(ABC):
    """One modality. To add one: a class like this, its place in `lipbound.models.inputs.READERS`,
    and the name of the models' main input in `lipbound.models.checkpoint.MODALITIES`.

    Attributes:
        modality: as `Checkpoint.modality` has it.
        kind: what one item is, and the columns where tables have such items.
    """

    modality: ClassVar[str]
    kind: ClassVar[ItemKind]

    @abstractmethod
    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """The first items of some data as tensors that the checkpoint's model takes; raises
        InputsError where there are none."""

    @abstractmethod
    def default(self) -> tuple[Iterable[Any], str]:
        """The items that are read where the user gives no data, and a description."""

    @abstractmethod
    def open_file(self, path: Path, checkpoint: Checkpoint) -> Iterable[Any]:
        """The items of a file that is no table; raises InputsError where it is of
        another modality."""

    def open_folder(self, path: Path) -> DataItems | None:
        """The items of a folder, or None where `datasets` is to read it."""
        return None

    def items(
        self, checkpoint: Checkpoint, data: Any, split: str | None, column: str | None
    ) -> DataItems:
        """The items of some data one by one.

        Raises:
            InputsError: no such data, items of another modality, a split or a column of what has
                none; of a table that is read row by row also later on.
        """
        if isinstance(data, np.ndarray) and data.ndim == 1 and data.dtype.kind in "UO":
            data = data.tolist()  # of strings, or of whatever objects
        path = there(data)
        if data is None:
            no_table(split, column, f"the default {self.kind.many} have")
            return DataItems(*self.default())
        if is_plain_file(data) and path is not None:
            no_table(split, column, f"{path.name}, one file, has")
            return DataItems(self.open_file(path, checkpoint), path.name)
        if (
            path is not None
            and path.is_dir()
            and not is_saved(path)
            and (found := self.open_folder(path)) is not None
        ):
            no_table(split, column, f"{path.name}, a folder of {self.kind.many}, has")
            return found
        if is_sentence(data):
            no_table(split, column, "a text has")
            if self.kind.type is not str:
                raise InputsError(
                    f"there is no file, folder or dataset {shown(data)}, and {checkpoint.name} "
                    f"takes {self.kind.takes}, not text"
                )
            return DataItems(
                [data], f"the text {shown(data[:40] + '...' if len(data) > 40 else data)}"
            )
        if isinstance(data, pd.Series):
            no_table(split, column, "a series has")
            name = self.kind.many
            return replace(
                rows(data.to_frame(name), None, name, self.kind, checkpoint.name),
                description="a series",
            )
        return rows(data, split, column, self.kind, checkpoint.name)
