"""Data row by row: a list, a dataset in memory, a data frame, a table file or a hub dataset, value
by value."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from PIL import Image

from lipbound.errors import InputsError, shown
from lipbound.models.quiet import cause, first_line, quiet
from lipbound.models.readers.files import IMAGE_FILES, TABLES, TEXT_FILES, ending, is_path, there
from lipbound.models.readers.token_ids import TokenizedText

CLASSES = ("label", "labels", "class", "target", "category", "fine_label", "coarse_label")
"""Usual names of the column that says of what class a row is."""


@dataclass(frozen=True)
class ItemKind:
    """What one item of a modality is.

    Attributes:
        type: its Python type.
        takes: what models of the modality take, in messages.
        one, many: an item and several, in descriptions.
        columns: usual names of the column of a table, the likeliest first.
        convert: what else stands for an item, such as the path of a file, as an item; None for what
            does not.
    """

    type: type
    takes: str
    one: str
    many: str
    columns: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: None

    def item(self, value: Any) -> Any:
        """The item that a value is or stands for, or None."""
        return value if isinstance(value, self.type) else self.convert(value)


class Lazy(Sequence[Any]):
    """So many items, each made when it is looked at."""

    def __init__(self, count: int, make: Callable[[int], Any]):
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(index)


@dataclass
class DataItems:
    """The items of some data.

    Attributes:
        items: a sequence, or an iterator where their number is not known before the end; None
            stands for a row without an item.
        description: of the data, for captions.
        groups: the class of each item, where the data say it.
        at: what says it, in messages: one and several.
    """

    items: Iterable[Any]
    description: str
    groups: Callable[[], Sequence[Any] | None] = field(default=lambda: None)
    at: tuple[str, str] = ("class", "classes")

    def take(
        self, count: int | None, shuffle: int | None, many: str
    ) -> tuple[list[Any], list[str]]:
        """The first ``count`` items (None: all), in their order or in that of a seed, and notes on
        blank ones and on items sorted by class.

        Raises:
            InputsError: items of a stream are to be shuffled.
        """
        chosen = iter(self.items)
        if shuffle is not None:
            if not isinstance(self.items, Sequence):
                raise InputsError(
                    f"shuffle is {shuffle}, but {self.description} is read as a stream, whose "
                    "end is not known; leave it out"
                )
            chosen = (self.items[i] for i in order(len(self.items), shuffle))
        passed = Counter[str]()
        taken = list(islice(_filled(chosen, passed), count))
        notes = (
            [f"blank {many} of {self.description} were passed over: {passed['blank']}"]
            if passed["blank"]
            else []
        )
        if (
            shuffle is None
            and count is not None
            and (said := self._sorted(count, many)) is not None
        ):
            notes.append(said)
        return taken, notes

    def _sorted(self, count: int, many: str) -> str | None:
        """A sentence where items come class by class, so that the first ones stand for few of the
        classes."""
        groups = self.groups()
        if groups is None or count < 2 or count >= len(groups):
            return None
        seen, every = dict.fromkeys(groups[:count]), dict.fromkeys(groups)
        changes = sum(a != b for a, b in pairwise(groups))
        if changes != len(every) - 1 or len(seen) >= min(count, len(every)):
            return None
        names = ", ".join(map(str, list(seen)[:3])) + (", ..." if len(seen) > 3 else "")
        one, several = self.at
        return (
            f"the {many} of {self.description} are sorted by {one}, and the first {count} are of "
            f"{len(seen)} of {len(every)} {several} ({names}); "
            "shuffle=0, or another seed, draws from all"
        )


def order(count: int, seed: int) -> list[int]:
    """The numbers 0...count-1 in an order that depends on the seed alone, with every version of
    every package."""
    return [int(i) for i in np.argsort(np.random.Philox(seed).random_raw(count), kind="stable")]


def _filled(items: Iterable[Any], passed: Counter[str]) -> Iterator[Any]:
    for item in items:
        if (
            item is None
            or (isinstance(item, str) and not item.strip())
            or (isinstance(item, TokenizedText) and not item.ids)
        ):
            passed["blank"] += 1
        else:
            yield item


def no_table(split: str | None, column: str | None, what: str) -> None:
    """Raise InputsError where a split or a column was asked for of something that has none:
    ``what``, with its verb."""
    for name, value, many in (("split", split, "splits"), ("column", column, "columns")):
        if value is not None:
            raise InputsError(f"{name} is {shown(value)}, but {what} no {many}; leave it out")


class _Frame:
    """A data frame of pandas as a table: rows by number, their missing values None."""

    def __init__(self, frame: pd.DataFrame):
        self._frame, self.column_names = frame, [str(name) for name in frame.columns]

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, index: int) -> dict[str, Any]:
        values = self._frame.iloc[index].tolist()
        return {
            name: None if pd.api.types.is_scalar(v) and pd.isna(v) else v
            for name, v in zip(self.column_names, values, strict=True)
        }

    def column(self, name: str) -> list[Any]:
        """All values of a column."""
        return list(self._frame.iloc[:, self.column_names.index(name)].astype(object))


def rows(data: Any, split: str | None, column: str | None, kind: ItemKind, name: str) -> DataItems:
    """The items of a list, a dataset, a data frame, a table file or a hub dataset, or one item,
    value by value.

    Args:
        data: any of these.
        split, column: as of `lipbound.models.inputs.prepare`.
        kind: what the items must be.
        name: of the checkpoint they are for, in messages.

    Raises:
        InputsError: no such data, no clear column, or items of another kind; those of a table are
            looked at as they come.
    """
    if isinstance(data, kind.type | list | tuple) and not isinstance(data, str):
        no_table(split, column, f"{kind.many} in memory have")
    if isinstance(data, kind.type) and not isinstance(data, str):
        return DataItems([data], kind.one)
    if isinstance(data, Image.Image):
        raise InputsError(f"data is an image, but {name} takes {kind.takes}")
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return _listed(data, kind, name)
    table, description = table_of(data, split, column)
    chosen = _column(table, column, kind, description)
    return DataItems(
        _values(table, chosen, kind, description, name), description, partial(_classes, table)
    )


def _listed(data: Sequence[Any], kind: ItemKind, name: str) -> DataItems:
    """The items of a list; of names of files where all of them are."""
    if not len(data):
        raise InputsError("data is an empty list; give at least one sample")
    if kind.type is str and all(
        isinstance(item, str) and ending(Path(item[-20:])) in TEXT_FILES for item in data
    ):
        gone = [item for item in data if there(item) is None]
        if len(gone) < len(data):
            data = [Path(item) for item in data]
        elif not any(len(item.split()) > 1 for item in gone):
            raise InputsError(f"data is a list of names of files, and there is no file {gone[0]}")
    items = [kind.item(item) for item in data]
    for given, item in zip(data, items, strict=True):
        if item is None and (
            isinstance(given, Path)
            or (isinstance(given, str) and ending(Path(given[-20:])) in IMAGE_FILES)
        ):
            raise InputsError(
                f"data holds {given}, and there is no file of {kind.takes} of that name; {name} "
                f"takes {kind.takes}"
            )
        if item is None:
            raise InputsError(
                f"data holds items of type {type(given).__name__}, but {name} takes "
                f"{kind.takes}; give a list of {kind.many}"
            )
    return DataItems(
        items, f"{len(data)} given {kind.many if len(data) > 1 else kind.many.removesuffix('s')}"
    )


def table_of(data: Any, split: str | None, column: str | None) -> tuple[Any, str]:
    """A dataset, a data frame, a table file or a hub dataset as something with column names and
    rows, and its description."""
    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        if (chosen := split or _usual(list(data))) not in data:
            raise InputsError(f"split is {shown(split)}; the given dataset has {', '.join(data)}")
        return data[chosen], f"a dataset, {chosen} split"
    if isinstance(data, str | Path):
        return _load_table(str(data), split, header=column is None or not column.isdigit())
    if isinstance(data, datasets.Dataset | datasets.IterableDataset):
        no_table(split, None, "a dataset in memory has")
        return data, str(getattr(data.info, "dataset_name", None) or "a dataset")
    if isinstance(data, pd.DataFrame):
        no_table(split, None, "a data frame has")
        return _Frame(data), "a data frame"
    raise InputsError(
        f"data is {shown(data)}; give a path, a hub dataset id, a datasets.Dataset, a data "
        "frame, a list, token numbers or a dict of ready inputs"
    )


def _classes(table: Any) -> Sequence[Any] | None:
    """The class of every row of a dataset or a data frame, by name, where a column says it."""
    if not isinstance(table, datasets.Dataset | _Frame):
        return None
    for name in CLASSES:
        if name in table.column_names:
            if isinstance(table, _Frame):
                return table.column(name)
            values = table.with_format(None)[name][:]
            feature = table.features[name]
            if isinstance(feature, datasets.ClassLabel) and feature.names:
                return [
                    feature.names[v] if isinstance(v, int) and 0 <= v < len(feature.names) else v
                    for v in values
                ]
            return values if all(isinstance(v, str | int) for v in values) else None
    return None


def _values(table: Any, column: str, kind: ItemKind, description: str, name: str) -> Iterable[Any]:
    """The items of a column; a sequence where the table knows its length."""

    def item(row: Any) -> Any:
        value = row[column]
        found = None if value is None else kind.item(row if column == "input_ids" else value)
        if value is not None and found is None:
            raise InputsError(
                f"column {column!r} of {description} holds {type(value).__name__}, but {name} "
                f"takes {kind.takes}; name another with column="
            )
        return found

    def at(index: int) -> Any:
        try:
            return item(table[index])
        except InputsError:
            raise
        except Exception as error:  # what a row holds is decoded now, by whatever its format needs
            raise InputsError(
                f"row {index} of {description} cannot be read: {cause(error)}"
            ) from error

    if isinstance(table, datasets.Dataset):
        wanted = (
            [n for n in ("input_ids", "attention_mask") if n in table.column_names]
            if column == "input_ids"
            else [column]
        )
        table = table.select_columns(wanted)
    return (
        Lazy(len(table), at) if hasattr(table, "__len__") else _streamed(table, item, description)
    )


def _streamed(table: Iterable[Any], item: Callable[[Any], Any], description: str) -> Iterator[Any]:
    """The items of a table that comes row by row, and may break off."""
    stream, count = iter(table), 0
    while True:
        try:
            row = next(stream)
        except StopIteration:
            return
        except Exception as error:
            raise InputsError(
                f"{description} breaks off after {count} rows: {cause(error)}; ask for fewer "
                "samples, or try again"
            ) from error
        yield item(row)
        count += 1


def _column(table: Any, column: str | None, kind: ItemKind, description: str) -> str:
    try:
        names = list(table.column_names or next(iter(table), {}).keys())
    except Exception as error:
        raise InputsError(f"{description} cannot be read: {cause(error)}") from error
    if column is not None:
        if column not in names:
            raise InputsError(
                f"{description} has no column {column!r}; its columns are {', '.join(names)}"
            )
        return column
    for name in kind.columns:
        if name in names:
            return name
    if not names:
        raise InputsError(f"{description} is empty")
    raise InputsError(
        f"which column of {description} holds {kind.takes} is not clear; name "
        f"{'one of ' if len(names) > 1 else ''}{', '.join(names)} with column="
    )


def _load_table(name: str, split: str | None, *, header: bool = True) -> tuple[Any, str]:
    path = there(name) or Path(name)
    if ending(path) in TABLES and path.is_file():
        no_table(split, None, f"{path.name}, one file, has")
    try:
        with quiet():
            return _read_table(name, path, split, header)
    except InputsError:
        raise
    except Exception as error:  # every format has a zoo of types
        generic = "generating the dataset" in str(error) or not str(
            error
        )  # what went wrong is said by what it was raised from
        why = (
            "it is empty"
            if isinstance(error, StopIteration) or "no data" in str(error)
            else cause(error)
            if generic
            else first_line(error)
        )
        raise InputsError(
            f"data {shown(name)} could not be read, as a file or a hub dataset: {why}"
        ) from error


def _read_table(name: str, path: Path, split: str | None, header: bool) -> tuple[Any, str]:
    kind = ending(path)
    if kind in TABLES and path.is_file():
        options: dict[str, Any] = {"sep": "\t"} if kind == ".tsv" else {}
        if TABLES[kind] != "csv" or header:
            return datasets.load_dataset(
                TABLES[kind], data_files=str(path), split="train", **options
            ), path.name
        table = datasets.load_dataset(
            "csv", data_files=str(path), split="train", header=None, **options
        )
        return table.rename_columns(
            {old: str(i) for i, old in enumerate(table.column_names)}
        ), path.name
    if is_saved(path):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            table, description = table_of(saved, split, None)
            return table, description.replace("a dataset", path.name, 1)
        no_table(split, None, f"{path.name}, one dataset, has")
        return saved, path.name
    if path.exists() or is_path(name) or kind in (*TABLES, *TEXT_FILES, *IMAGE_FILES):
        if not path.exists():
            raise InputsError(f"there is no file or folder {name}")
        if not path.is_dir():
            raise InputsError(
                f"{name} is not a file that can be read here; tables are {', '.join(TABLES)}"
            )
    repo, _, config = name.partition(":")
    chosen = split or _pick_split(repo, config or None)
    return datasets.load_dataset(
        repo, config or None, split=chosen
    ), f"{path.name if path.is_dir() else name}, {chosen} split"


def is_saved(path: Path) -> bool:
    """Tell whether a folder is one that ``save_to_disk`` of a dataset wrote."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def _pick_split(repo: str, config: str | None) -> str:
    names = datasets.get_dataset_split_names(repo, config)
    return _usual(names)


def _usual(names: list[str]) -> str:
    """The split that is read unless another is named."""
    return next((n for n in ("test", "validation", "train") if n in names), names[0])
