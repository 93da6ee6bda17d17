"""What a modality must know to be read, and what all readers share: defaults, files, folders, lists, tables and hub datasets."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lipbound.models.batch import Inputs
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.readers.files import is_plain_file
from lipbound.models.readers.tables import ItemKind, rows


@dataclass(frozen=True)
class Selection:
    """Which part of some data is wanted; arguments as of `lipbound.models.inputs.prepare`."""

    samples: int
    max_length: int
    split: str | None
    column: str | None


class Reader(ABC):
    """One modality. To add one: a class like this, its place in `lipbound.models.inputs.READERS`, and the name of the models' main input in
    `lipbound.models.checkpoint.MODALITIES`.

    Attributes:
        modality: as `Checkpoint.modality` has it.
        kind: what one item is, and the columns where tables have such items.
    """

    modality: ClassVar[str]
    kind: ClassVar[ItemKind]

    @abstractmethod
    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """The first items of some data as tensors that the checkpoint's model takes; raises InputsError where there are none."""

    @abstractmethod
    def default(self) -> tuple[Iterator[Any], str]:
        """The items that are read where the user gives no data, and a description."""

    @abstractmethod
    def open_file(self, path: Path, checkpoint: Checkpoint) -> Iterator[Any]:
        """The items of a file that is no table; raises InputsError where it is of another modality."""

    def open_folder(self, path: Path) -> Iterator[Any] | None:
        """The items of a folder, or None where `datasets` is to read it."""
        return None

    def items(self, checkpoint: Checkpoint, data: Any, split: str | None, column: str | None) -> tuple[Iterator[Any], str]:
        """The items of some data one by one, and a description.

        Raises:
            InputsError: no such data, or items of another modality; of a table that is read row by row also later on.
        """
        if data is None:
            return self.default()
        if is_plain_file(data):
            return self.open_file(Path(data), checkpoint), Path(data).name
        if isinstance(data, str | Path) and Path(data).is_dir() and (found := self.open_folder(Path(data))) is not None:
            return found, Path(data).name
        return rows(data, split, column, self.kind, checkpoint.name)
