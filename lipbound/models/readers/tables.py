"""A column of a table, a hub dataset or a list, value by value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

from lipbound.errors import InputsError, shown
from lipbound.models.quiet import cause, first_line, quiet
from lipbound.models.readers.files import TABLES, is_path, there


@dataclass(frozen=True)
class ItemKind:
    """What one item of a modality is.

    Attributes:
        type: its Python type.
        takes: what models of the modality take, in messages.
        one, many: an item and several, in descriptions.
        columns: usual names of the column of a table, the likeliest first.
    """

    type: type
    takes: str
    one: str
    many: str
    columns: tuple[str, ...]


def no_table(split: str | None, column: str | None, what: str) -> None:
    """Raise InputsError where a split or a column was asked for of something that has none: ``what``, with its verb."""
    for name, value, many in (("split", split, "splits"), ("column", column, "columns")):
        if value is not None:
            raise InputsError(f"{name} is {shown(value)}, but {what} no {many}; leave it out")


def rows(data: Any, split: str | None, column: str | None, kind: ItemKind, name: str) -> tuple[Iterator[Any], str]:
    """The items of a list, a dataset, a table file or a hub dataset, or one item, value by value, and a description.

    Args:
        data: any of these.
        split, column: as of `lipbound.models.inputs.prepare`.
        kind: what the items must be.
        name: of the checkpoint they are for, in messages.

    Raises:
        InputsError: no such data, no clear column, or items of another kind; those of a table are looked at as they come.
    """
    if isinstance(data, kind.type | list | tuple) and not isinstance(data, str):
        no_table(split, column, f"{kind.many} in memory have")
    if isinstance(data, datasets.DatasetDict):
        if (chosen := split or _usual(list(data))) not in data:
            raise InputsError(f"split is {shown(split)}; the given dataset has {', '.join(data)}")
        table, description = data[chosen], f"a dataset, {chosen} split"
    elif isinstance(data, str | Path):
        table, description = _load_table(str(data), split, header=column is None or not column.isdigit())
    elif isinstance(data, kind.type):
        return iter([data]), kind.one
    elif isinstance(data, Image.Image):
        raise InputsError(f"data is an image, but {name} takes {kind.takes}")
    elif isinstance(data, Sequence):
        if not len(data):
            raise InputsError("data is an empty list; give at least one sample")
        wrong = next((type(item).__name__ for item in data if not isinstance(item, kind.type)), None)
        if wrong:
            raise InputsError(f"data holds items of type {wrong}, but {name} takes {kind.takes}; give a list of {kind.many}")
        return iter(data), f"{len(data)} given {kind.many}"
    elif isinstance(data, datasets.Dataset | datasets.IterableDataset):
        no_table(split, None, "a dataset in memory has")
        table, description = data, str(getattr(data.info, "dataset_name", None) or "a dataset")
    else:
        raise InputsError(f"data is {shown(data)}; give a path, a hub dataset id, a datasets.Dataset, a list or a dict of ready inputs")
    chosen = _column(table, column, kind, description)
    return _values(table, chosen, kind, description, name), description


def _values(table: Any, column: str, kind: ItemKind, description: str, name: str) -> Iterator[Any]:
    for row in table:
        value = row[column]
        if value is None:
            continue
        if not isinstance(value, kind.type):
            raise InputsError(
                f"column {column!r} of {description} holds {type(value).__name__}, but {name} takes {kind.takes}; name another with column="
            )
        yield value


def _column(table: Any, column: str | None, kind: ItemKind, description: str) -> str:
    names = list(table.column_names or next(iter(table), {}).keys())
    if column is not None:
        if column not in names:
            raise InputsError(f"{description} has no column {column!r}; its columns are {', '.join(names)}")
        return column
    for name in kind.columns:
        if name in names:
            return name
    if not names:
        raise InputsError(f"{description} is empty")
    raise InputsError(f"which column of {description} holds {kind.takes} is not clear; name one of {', '.join(names)} with column=")


def _load_table(name: str, split: str | None, *, header: bool = True) -> tuple[Any, str]:
    path = there(name) or Path(name)
    if path.suffix in TABLES and path.is_file():
        no_table(split, None, f"{path.name}, one file, has")
    try:
        with quiet():
            return _read_table(name, path, split, header)
    except InputsError:
        raise
    except Exception as error:  # every format has a zoo of types
        generic = "generating the dataset" in str(error) or not str(error)  # what went wrong is said by what it was raised from
        why = "it is empty" if isinstance(error, StopIteration) or "no data" in str(error) else cause(error) if generic else first_line(error)
        raise InputsError(f"data {shown(name)} could not be read, as a file or a hub dataset: {why}") from error


def _read_table(name: str, path: Path, split: str | None, header: bool) -> tuple[Any, str]:
    if path.suffix == ".csv" and path.is_file() and not header:
        table = datasets.load_dataset("csv", data_files=str(path), split="train", header=None)
        return table.rename_columns({old: str(i) for i, old in enumerate(table.column_names)}), path.name
    if path.suffix in TABLES and path.is_file():
        return datasets.load_dataset(TABLES[path.suffix], data_files=str(path), split="train"), path.name
    if path.exists() or is_path(name) or path.suffix in TABLES:
        if not path.exists():
            raise InputsError(f"there is no file or folder {name}")
        if not path.is_dir():
            raise InputsError(f"{name} is not a file that can be read here; tables are {', '.join(TABLES)}")
    repo, _, config = name.partition(":")
    chosen = split or _pick_split(repo, config or None)
    return datasets.load_dataset(repo, config or None, split=chosen), f"{name}, {chosen} split"


def _pick_split(repo: str, config: str | None) -> str:
    names = datasets.get_dataset_split_names(repo, config)
    return _usual(names)


def _usual(names: list[str]) -> str:
    """The split that is read unless another is named."""
    return next((n for n in ("test", "validation", "train") if n in names), names[0])
