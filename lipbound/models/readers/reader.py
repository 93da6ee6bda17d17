"""Reading data of any modality: defaults, files, folders, lists, tables and hub datasets."""

import itertools
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from PIL import Image
from torch import Tensor

from lipbound.errors import InputsError, shown
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.quiet import cause, changed, explained, first_line, quiet
from lipbound.models.readers import files

CLASSES = ("label", "labels", "class", "target", "category", "fine_label", "coarse_label")
"""Usual names of the column that says of what class a row is."""
SERIES = "items"
"""Name of the only column of a series."""


@dataclass
class DataItems:
    """The items of some data.

    Attributes:
        given: a sequence, or an iterator where their number is not known before the end.
        description: of the data, for captions.
        groups: the class of each item, where the data say it.
        at: what says it, in messages: one and several.
        made: from one of ``given``, the item; None for a row without one.
    """

    given: Iterable[Any]
    description: str
    groups: Sequence[Any] | None = None
    at: tuple[str, str] = ("class", "classes")
    made: Callable[[Any], Any] = lambda item: item

    @staticmethod
    def of_files(
        folder: Path, paths: Sequence[Path], made: Callable[[Path], Any] = lambda path: path
    ) -> "DataItems":
        """Return the items that the files of a folder hold, their classes those of its folders."""
        folders = [str(file.parent.relative_to(folder)) for file in paths]
        return DataItems(paths, folder.name, folders, ("folder", "folders"), made)

    def __iter__(self) -> Iterator[Any]:
        return map(self.made, self.given)

    def take(self, selection: "Selection", many: str) -> tuple[list[Any], list[str]]:
        """Return the items that are wanted, and notes on blank ones and on items sorted by class.

        Args:
            selection: how many, and in which order.
            many: several items, in messages.

        Raises:
            InputsError: items of a stream are to be shuffled.
        """
        count, shuffle, chosen = selection.samples, selection.shuffle, self.given
        if shuffle is not None:
            if not isinstance(self.given, Sequence):
                raise InputsError(f"{self.description} is read as a stream; drop shuffle")
            chosen = (self.given[i] for i in order(len(self.given), shuffle))
        taken: list[Any] = []
        blank = 0
        for item in map(self.made, chosen):
            if _is_blank(item):
                blank += 1
                continue
            taken.append(item)
            if len(taken) == count:
                break
        notes = [f"blank {many} of {self.description} were passed over: {blank}"] if blank else []
        return taken, notes + (self._sorted(count, many) if shuffle is None and count else [])

    def _sorted(self, count: int, many: str) -> list[str]:
        """Return a sentence where the first of items sorted by class are of few of the classes."""
        groups = self.groups or ()
        seen, every = dict.fromkeys(groups[:count]), dict.fromkeys(groups)
        changes = sum(a != b for a, b in itertools.pairwise(groups))
        if not 1 < count < len(groups) or changes != len(every) - 1:
            return []
        if len(seen) >= min(count, len(every)):
            return []
        names = ", ".join(list(seen)[:3]) + (", ..." if len(seen) > 3 else "")
        return [
            f"the {many} of {self.description} are sorted by {self.at[0]}, and the first {count} "
            f"are of {len(seen)} of {len(every)} {self.at[1]} ({names}); shuffle=0, or another "
            "seed, draws from all"
        ]


def order(count: int, seed: int) -> list[int]:
    """Return 0...count-1 in an order that depends on the seed alone, not on any version."""
    return [int(i) for i in np.argsort(np.random.Philox(seed).random_raw(count), kind="stable")]


def _is_blank(item: Any) -> bool:
    text = item.strip() if isinstance(item, str) else item
    return item is None or (isinstance(item, str | tuple) and not text)


DEFAULT_LENGTH = 128
"""Tokens per text where nothing else is said; fewer where a model has fewer positions."""


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

    def refuse_table(self, what: str, *names: str) -> None:
        """Refuse a split or a column of something that has none.

        Args:
            what: the thing.
            names: "split" or "column"; both by default.

        Raises:
            InputsError: one was named.
        """
        for name in names or ("split", "column"):
            if (value := getattr(self, name)) is not None:
                raise InputsError(f"{name} is {shown(value)}, but there is none in {what}; drop it")

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
        item_type: the Python type of an item.
        one, many: an item and several, in descriptions.
        takes: what models of the modality take, in messages.
        columns: usual names of the column of a table that has items, the likeliest first.
    """

    modality: ClassVar[str]
    item_type: ClassVar[type]
    one: ClassVar[str]
    many: ClassVar[str]
    takes: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    @abstractmethod
    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """Return the first items of some data as tensors; raise InputsError if there are none."""

    @abstractmethod
    def default(self) -> tuple[Iterable[Any], str]:
        """Return the items that are read where the user gives no data, and their description."""

    @abstractmethod
    def open_file(self, path: Path, checkpoint: Checkpoint) -> Iterable[Any]:
        """Return the items of a file that is no table; raise InputsError for another modality's."""

    def open_folder(self, path: Path, takes: str) -> DataItems | None:
        """Return the items of a folder, or None where `datasets` is to read it.

        Args:
            path: of the folder.
            takes: what the model takes, as the end of a message.
        """
        return None

    def item(self, value: Any) -> Any:
        """Return the item that a value is or stands for, such as the path of a file, or None."""
        return value if isinstance(value, self.item_type) else None

    def items(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> DataItems:
        """Return the items of some data one by one.

        A table is read row by row, so some of its errors come later.

        Raises:
            InputsError: no such data, items of another modality, or a split or a column of what has
                none.
        """
        if isinstance(data, np.ndarray) and data.ndim == 1 and data.dtype.kind in "UO":
            data = data.tolist()  # of strings, or of whatever objects
        path, takes = files.there(data), f"but {checkpoint.name} takes {self.takes}"
        folder = path if path is not None and path.is_dir() and not files.is_saved(path) else None
        if data is None:
            found = DataItems(*self.default())
        elif path is not None and files.is_plain_file(data):
            found = DataItems(self.open_file(path, checkpoint), path.name)
        elif folder is not None and (inside := self.open_folder(folder, takes)) is not None:
            found = inside
        elif files.is_sentence(data):
            start = shown(data[:40] + "..." if len(data) > 40 else data)
            if self.item_type is not str:
                raise InputsError(f"data is the text {start}, {takes}")
            found = DataItems([data], f"the text {start}")
        elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
            found = self._listed(data, takes)
        elif isinstance(data, self.item_type) and not isinstance(data, str):
            found = DataItems([data], self.one)
        elif isinstance(data, Image.Image):
            raise InputsError(f"data is an image, {takes}")
        else:
            return self._rows(data, selection, takes)
        selection.refuse_table(found.description)
        return found

    def _listed(self, data: Sequence[Any], takes: str) -> DataItems:
        """Return the items of a list; where all of it names text files, their contents."""
        if not len(data):
            raise InputsError("data is an empty list; give at least one sample")

        def named(item: Any, endings: tuple[str, ...]) -> bool:
            return isinstance(item, str) and files.ending(Path(item[-20:])) in endings

        if self.item_type is str and all(named(item, files.TEXT_FILES) for item in data):
            if any(files.there(item) for item in data):
                data = [Path(item) for item in data]
            elif not any(len(item.split()) > 1 for item in data):
                raise InputsError(f"data is a list of files, and there is no file {data[0]}")
        found = [self.item(item) for item in data]
        if None in found:
            other = data[found.index(None)]
            if isinstance(other, Path) or named(other, files.IMAGE_FILES):
                raise InputsError(f"data holds {other}, which is no such file, {takes}")
            raise InputsError(f"data holds items of type {type(other).__name__}, {takes}")
        several = self.many if len(data) > 1 else self.many.removesuffix("s")
        return DataItems(found, f"{len(data)} given {several}")

    def _rows(self, data: Any, selection: Selection, takes: str) -> DataItems:
        """Return the items of a dataset, data frame, table file or hub dataset as they come."""
        alone = self.item_type is str and isinstance(data, str) and files.there(data) is None
        advice = f"; a text itself is given in a list, [{data!r}], or in a file" * alone
        table, said = _table_of(data, selection, advice)
        if isinstance(data, pd.Series):
            selection.refuse_table(said, "column")
        names, column = self._columns(table, selection.column, said)
        tokens = column == "input_ids"

        def item(row: Any) -> Any:
            value = row[column]
            found = None if value is None else self.item(row if tokens else value)
            if value is not None and found is None:
                raise InputsError(
                    f"column {column!r} of {said} holds {type(value).__name__}, {takes}; name "
                    "another with column="
                )
            return found

        def at(index: int) -> Any:
            # what a row holds is decoded now, by whatever its format needs
            with explained(InputsError, f"row {index} of {said} cannot be read: ", why=cause):
                return item(rows[index])

        rows = table
        if of_datasets(table, "Dataset"):
            keep = {column, "attention_mask"} if tokens else {column}
            rows = table.select_columns([one for one in names if one in keep])
        elif not isinstance(table, list):
            return DataItems(_streamed(table, said), said, made=item)
        return DataItems(range(len(rows)), said, _classes(table, names), made=at)

    def _columns(self, table: Any, column: str | None, said: str) -> tuple[list[str], str]:
        """Return the names of all columns of a table, and of the one that holds the items."""
        with explained(InputsError, f"{said} cannot be read: ", why=cause):
            names = list(getattr(table, "column_names", None) or next(iter(table), {}))
        usual = column or next((name for name in (*self.columns, SERIES) if name in names), None)
        if usual is not None and usual in names:
            return names, usual
        if not names:
            raise InputsError(f"{said} is empty")
        has = f"no column {column!r}" if column else f"no column of a usual name for {self.takes}"
        quoted = ", ".join(map(shlex.quote, names))  # sentences, without a header
        raise InputsError(f"{said} has {has}; name one of {quoted} with column=")


def of_datasets(value: object, *names: str) -> bool:
    """Return whether a value is of some classes of `datasets`, without loading it for that."""
    loaded = sys.modules.get("datasets")
    return loaded is not None and isinstance(value, tuple(getattr(loaded, one) for one in names))


def _classes(table: Any, names: Sequence[str]) -> Sequence[Any] | None:
    """Return the class of every row of a dataset or a data frame, where a column says it."""
    name = next((name for name in CLASSES if name in names), None)
    if name is None:
        return None
    if isinstance(table, list):
        return [str(row[name]) for row in table]
    known = dict(enumerate(getattr(table.features[name], "names", None) or ()))
    values = table.with_format(None)[name][:]
    return [known.get(v, str(v)) if isinstance(v, int) else str(v) for v in values]


def _table_of(data: Any, selection: Selection, advice: str = "") -> tuple[Any, str]:
    """Return data as a dataset or a list of rows, and its description; ``advice`` ends messages."""
    if of_datasets(data, "DatasetDict", "IterableDatasetDict"):
        if (chosen := selection.split or _usual(list(data))) not in data:
            raise InputsError(f"split is {shown(chosen)}; the given dataset has {', '.join(data)}")
        return data[chosen], f"a dataset, {chosen} split"
    if isinstance(data, str | Path):
        before = f"data {shown(str(data))} could not be read, as a file or a hub dataset: "
        import datasets  # noqa: F401  # before `quiet`, which silences what is loaded

        with explained(InputsError, before, advice, why=_why), quiet():
            return _read_table(str(data), files.there(data) or Path(data), selection)
    if of_datasets(data, "Dataset", "IterableDataset"):
        selection.refuse_table("a dataset in memory", "split")
        return data, str(getattr(data.info, "dataset_name", None) or "a dataset")
    if isinstance(data, pd.DataFrame | pd.Series):
        frame, said = data, "a data frame"
        if isinstance(data, pd.Series):
            frame, said = data.to_frame(SERIES), "a series"
        selection.refuse_table(said, "split")
        frame = frame.set_axis(map(str, frame.columns), axis=1).astype(object)
        return frame.where(frame.notna(), None).to_dict("records"), said
    raise InputsError(
        f"data is {shown(data)}; give a path, a hub dataset id, a datasets.Dataset, a data "
        "frame, a list, token numbers (whole, one at least) or a dict of ready inputs"
    )


def _streamed(table: Iterable[Any], said: str) -> Iterator[Any]:
    """Yield the rows of a table that comes row by row, and may break off."""
    rows, advice = iter(table), "; ask for fewer samples, or try again"
    for done in itertools.count():
        with explained(InputsError, f"{said} breaks off after {done} rows: ", advice, why=cause):
            row = next(rows, None)
        if row is None:
            return
        yield row


def _why(error: Exception) -> str:
    """Return why a table cannot be read."""
    if isinstance(error, StopIteration) or "no data" in str(error):
        return "it is empty"
    if isinstance(error, HFValidationError | ConnectionError):
        named = isinstance(error, ConnectionError)
        return "the hub cannot be reached" if named else "there is none, and no hub id is like it"
    # what went wrong is then said by what it was raised from
    below = "generating the dataset" in str(error) or not str(error)
    said = (cause(error) if below else first_line(error)).rstrip(".")
    return "it is empty" if "at least one example" in said else said


def _read_table(name: str, path: Path, selection: Selection) -> tuple[Any, str]:
    import datasets

    kind = files.ending(path)
    if kind in files.TABLES and path.is_file():
        selection.refuse_table(f"{path.name}, one file", "split")
        loader = files.TABLES[kind]
        options: dict[str, Any] = {"sep": "\t"} if kind == ".tsv" else {}
        if loader == "csv" and (selection.column or "").isdigit():
            options["header"] = None
        table = datasets.load_dataset(loader, data_files=str(path), split="train", **options)
        if "header" in options:
            numbers = {old: str(i) for i, old in enumerate(table.column_names)}
            table = table.rename_columns(numbers)
        return table, path.name
    if files.is_saved(path):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            table, description = _table_of(saved, selection)
            return table, description.replace("a dataset", path.name, 1)
        selection.refuse_table(f"{path.name}, one dataset", "split")
        return saved, path.name
    meant = files.is_path(name) or kind in (*files.TABLES, *files.TEXT_FILES, *files.IMAGE_FILES)
    if meant and not path.exists():
        raise InputsError(f"there is no file or folder {name}")
    if path.exists() and not path.is_dir():
        raise InputsError(f"{name} cannot be read here; tables are {', '.join(files.TABLES)}")
    repo, _, config = name.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE or not (path.is_dir() or _answers(repo))
    with changed("HF_HUB_OFFLINE", offline, datasets.config):
        chosen = selection.split or _usual(datasets.get_dataset_split_names(repo, config or None))
        found = datasets.load_dataset(repo, config or None, split=chosen)
    return found, f"{path.name if path.is_dir() else name}, {chosen} split"


def _answers(repo: str) -> bool:
    """Return whether the hub says something of a dataset; `datasets` tries for half a minute."""
    try:
        HfApi().dataset_info(repo, timeout=15)
    except (HfHubHTTPError, HFValidationError):
        return True
    except Exception:  # no connection, in whatever type the HTTP client reports it
        return False
    return True


def _usual(names: list[str]) -> str:
    """Return the split that is read unless another is named."""
    return next((n for n in ("test", "validation", "train") if n in names), names[0])
