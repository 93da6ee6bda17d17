"""Data as model inputs: texts and images from files, folders, lists, tables, datasets, or our own.

A reader lists the items of some data, takes those that are wanted, and has the checkpoint's
tokenizer or image processor make tensors of them. Tables and datasets are read by `datasets`.

One rule holds wherever text comes from. One text (a file, a string, a list, a folder or a table
with nothing else in it) is read in consecutive windows of ``max_length`` tokens, each a sample. Of
several texts (a list, the rows of a table, the files of a folder) each is one sample: its first
``max_length`` tokens. The first window of a text is its first ``max_length`` tokens, so the same
text begins with the same sample.
"""

import gzip
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub import HfApi
from PIL import Image, ImageOps
from torch import Tensor

from lipbound.errors import InputsError, shown
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.other_libraries import answers, cause, explained, quiet, temporarily

BUILTIN = Path(__file__).parent / "builtin"
DEFAULT_TEXT = BUILTIN / "text.txt"
"""The text that comes with lipbound."""
PHOTOGRAPHS = BUILTIN / "photographs"
"""Folder of the default images, reduced from those of scikit-image (benchmarks/photographs.py)."""
_LOADERS = {"parquet": ".parquet", "csv": ".csv .tsv", "json": ".json .jsonl .ndjson"}
TABLES = {end: loader for loader, ends in _LOADERS.items() for end in ends.split()}
"""Endings of tables, and the loader of `datasets` that reads them."""
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of images."""
TEXT_FILES = (".txt", ".md", ".text", ".tex", ".html", ".rst", ".log", ".safetensors", ".zarr")
"""Endings of names that are meant as files, whatever blanks are in them."""
PROSE = (".txt", ".text")
"""Endings of the files of a folder that are read as texts."""
ROOTED = re.compile(r"[.~/]|\\\\|[A-Za-z]:[/\\]")
"""Beginnings of names that say where they begin: here, at home, at a root or on a drive."""
DEFAULT_LENGTH = 128
"""Tokens per text where nothing else is said; fewer where a model has fewer positions."""
GENERIC = "TokenizersBackend PythonBackend PreTrainedTokenizerFast PreTrainedTokenizer None"
"""Classes that transformers loads any tokenizer into, and what stands for none."""
LONGEST_TOKEN = 100
"""Characters of the longest tokens: of a long text no more are read than windows may need."""
MOSTLY_UNKNOWN = 0.5
"""Share of unknown tokens above which a text is hardly one of the tokenizer's."""
PROCESSING = {
    "size": "do_resize",
    "resample": "do_resize",
    "crop_size": "do_center_crop",
    "rescale_factor": "do_rescale",
    "image_mean": "do_normalize",
    "image_std": "do_normalize",
}
"""Settings of image processors that go into a run's provenance, and the step that each is of."""

Tokens = dict[str, list[int]]
"""The tokens of a text or of a window of it, and what tokenizers say of each."""


def there(data: Any) -> Path | None:
    """Return the path of the file or folder that something names, or None where there is none."""
    try:
        path = Path(data).expanduser() if isinstance(data, str | Path) else None
        return path if path is not None and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, or not a path at all
        return None


def ending(name: str | Path) -> str:
    """Return the ending of a name in small letters; of a packed file, that of its contents.

    >>> ending("A.TXT"), ending("b.csv.gz")
    ('.txt', '.csv')
    """
    return Path(str(name).lower().removesuffix(".gz")).suffix


def is_path(name: str) -> bool:
    r"""Return whether a name can only be that of a file or folder, on any system, and no hub id.

    >>> is_path("./bert"), is_path(r"C:\models\bert"), is_path("owner/bert"), is_path("news:raw")
    (True, True, False, False)
    """
    return ROOTED.match(name) is not None or "\\" in name


def is_sentence(data: Any) -> bool:
    """Return whether something is itself a text: several words not meant as a file's name.

    >>> is_sentence("how smooth is attention?"), is_sentence("my file.txt"), is_sentence("ag_news")
    (True, False, False)
    """
    if not isinstance(data, str) or len(data.split()) < 2 or there(data) or ROOTED.match(data):
        return False
    named = ending(data[-20:]) in (*TABLES, *IMAGE_FILES, *TEXT_FILES)
    return not named and ("/" not in data or there(Path(data).parent) is None)


def visible(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted, but for hidden ones."""
    files = ((f, f"/{f.relative_to(folder).as_posix()}") for f in folder.rglob("*") if f.is_file())
    return sorted(file for file, place in files if "/." not in place)


def read_text(path: Path) -> str:
    """Return the whole of a UTF-8 file, unpacked where it is packed with gzip.

    Lines end with a line feed, however the system that wrote them ends them.

    Raises:
        InputsError: the file cannot be read, or is not such a file.
    """
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    unreadable = explained(InputsError, f"{path} is no UTF-8 text file that can be read: ")
    with unreadable, opened(path, "rt", encoding="utf-8") as file:
        return str(file.read())


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


def order(count: int, seed: int) -> list[int]:
    """Return 0...count-1 in an order that depends on the seed alone, not on any version."""
    return [int(i) for i in np.argsort(np.random.Philox(seed).random_raw(count), kind="stable")]


@dataclass
class DataItems:
    """The items of some data.

    Attributes:
        given: a sequence, or what is iterated over where their number is not known before the end.
        description: of the data, for captions.
        made: from one of ``given``, the item; None for a row without one.
    """

    given: Any
    description: str
    made: Callable[[Any], Any] = lambda item: item

    def __iter__(self) -> Iterator[Any]:
        done, before = 0, f"{self.description} cannot be read after "
        # what a row holds is decoded now, by whatever its format needs
        with explained(InputsError, before, why=lambda error: f"{done} rows: {cause(error)}"):
            for row in self.given:
                yield self.made(row)
                done += 1

    def take(self, selection: Selection, many: str, what: str) -> tuple[list[Any], list[str]]:
        """Return the items that are wanted, and a note on blank ones.

        Args:
            selection: how many, and in which order.
            many: several items, in messages.
            what: they are.

        Raises:
            InputsError: there are none, or items of a stream are to be shuffled.
        """
        count, chosen = selection.samples, self
        if selection.shuffle is not None:
            if not hasattr(self.given, "__len__"):
                raise InputsError(f"{self.description} is read as a stream; drop shuffle")
            drawn = order(len(self.given), selection.shuffle)
            chosen = replace(self, given=map(self.given.__getitem__, drawn))
        taken: list[Any] = []
        blank = 0
        for item in chosen:
            if item is None or (isinstance(item, str) and not item.strip()):
                blank += 1
            else:
                taken.append(item)
            if len(taken) == count:
                break
        if not taken:
            raise InputsError(f"{self.description} has no {what} in it")
        notes = [f"blank {many} of {self.description} were passed over: {blank}"] if blank else []
        return taken, notes


class Reader:
    """One modality.

    Attributes:
        many: several items, in descriptions.
        takes: what models of the modality take, in messages.
        instead: how other items are given, at the end of a message.
        columns: usual names of the column of a table that has items, the likeliest first.
        files: endings of the files of a folder that are items.
        default: the files that are read where the user gives no data, and what they are.
    """

    many: ClassVar[str]
    takes: ClassVar[str]
    instead: ClassVar[str] = ""
    columns: ClassVar[tuple[str, ...]]
    files: ClassVar[tuple[str, ...]]
    default: ClassVar[tuple[list[Path], str]]

    def item(self, value: Any) -> Any:
        """Return the item that a value is or stands for, such as the path of a file, or None."""
        raise NotImplementedError

    def items(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> DataItems:
        """Return the items of some data one by one.

        A table is read row by row, so some of its errors come later.

        Raises:
            InputsError: no such data, items of another modality, or a split or a column of what has
                none.
        """
        if getattr(getattr(data, "dtype", None), "kind", "none") in "UO" and data.ndim == 1:
            data = data.tolist()  # of strings, or of whatever objects: numpy's or pandas'
        data = [data] if isinstance(data, Image.Image) else data
        path, takes = there(data), f"but {checkpoint.name} takes {self.takes}"
        found = None
        if data is None:
            found = DataItems(*self.default, self.item)
        elif path is not None and path.is_file() and ending(path) not in TABLES:
            if (item := self.item(path)) is None:
                what = "an image" if ending(path) in IMAGE_FILES else "not an image file"
                raise InputsError(f"{path} is {what}, {takes}")
            found = DataItems([item], path.name)
        elif path is not None and path.is_dir():
            found = self._folder(path, takes)
        elif is_sentence(data):
            start = f"the text {shown(data[:40] + '...' if len(data) > 40 else data)}"
            if self.item(data) is None:
                raise InputsError(f"data is {start}, {takes}")
            found = DataItems([data], start)
        elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
            found = self._listed(data, takes)
        if found is None:
            return self._rows(data, selection, takes)
        selection.refuse_table(found.description)
        return found

    def _folder(self, folder: Path, takes: str) -> DataItems | None:
        """Return the items of a folder and its subfolders; None where `datasets` is to read it."""
        files = visible(folder)
        mine = [file for file in files if ending(file) in self.files]
        ends = {ending(file) for file in files}
        # labels of images are often in such a table beside them
        if is_saved(folder) or ends & TABLES.keys() - ({".tsv"} if mine else set()):
            return None
        if not mine and (ends & {*IMAGE_FILES, *PROSE} or self.files == IMAGE_FILES):
            raise InputsError(f"{folder} holds no {self.many} ({', '.join(self.files)}), {takes}")
        return DataItems(mine, folder.name, self.item) if mine else None

    def _listed(self, data: Sequence[Any], takes: str) -> DataItems:
        """Return the items of a list; where all of it names text files, their contents."""
        if not len(data):
            raise InputsError("data is an empty list; give at least one sample")
        ends = [ending(one[-20:]) if isinstance(one, str) else "" for one in data]
        if all(one in TEXT_FILES for one in ends) and (
            any(map(there, data)) or not any(len(one.split()) > 1 for one in data)
        ):
            data = [Path(one) for one in data]
        found = [self.item(one) for one in data]
        for other, end, item in zip(data, ends, found, strict=True):
            if item is None:
                named = isinstance(other, Path) or end in IMAGE_FILES
                kind = f"items of type {type(other).__name__}"
                what = f"{other}, which is no such file" if named else kind
                raise InputsError(f"data holds {what}, {takes}{'' if named else self.instead}")
        several = self.many if len(data) > 1 else self.many.removesuffix("s")
        return DataItems(found, f"{len(data)} given {several}")

    def _rows(self, data: Any, selection: Selection, takes: str) -> DataItems:
        """Return the items of a dataset, data frame, table file or hub dataset as they come."""
        word = isinstance(data, str) and there(data) is None and self.item(data) is not None
        advice = f"; a text itself is given in a list, [{data!r}], or in a file" if word else ""
        given = str(data) if isinstance(data, Path) else data
        before = f"data {shown(given)} could not be read, as a file or a hub dataset: "
        with explained(InputsError, before, advice, why=_why), quiet():
            table, said = dataset_of(data, selection)
            names = list(table.column_names or next(iter(table), {}))
        column = selection.column
        usual = column or next((name for name in self.columns if name in names), None)
        if usual is None or usual not in names:
            if not names:
                raise InputsError(f"{said} is empty")
            lacks = f"{column!r}" if column else f"of a usual name for {self.takes}"
            quoted = ", ".join(map(shlex.quote, names))  # sentences, without a header
            raise InputsError(f"{said} has no column {lacks}; name one of {quoted} with column=")
        rows = table.select_columns([usual])

        def item(row: Any) -> Any:
            if (value := row[usual]) is None:
                return None
            if (made := self.item(value)) is None:
                what = f"column {usual!r} of {said} holds {type(value).__name__}, {takes}"
                raise InputsError(f"{what}; name another with column=")
            return made

        return DataItems(rows, said, item)


def is_saved(folder: Path) -> bool:
    """Return whether a folder is one that ``save_to_disk`` of a dataset wrote."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def dataset_of(data: Any, selection: Selection) -> tuple[Any, str]:
    """Return data as a dataset of `datasets`, and its description.

    Raises:
        InputsError: it is no such data, or has no such split. `datasets` raises others.
    """
    import datasets  # takes long, and few runs need it

    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        if (chosen := selection.split or _usual(list(data))) not in data:
            raise InputsError(f"split is {shown(chosen)}; the given dataset has {', '.join(data)}")
        return data[chosen], f"a dataset, {chosen} split"
    if type(data).__name__ == "DataFrame":
        data = datasets.Dataset.from_pandas(data, preserve_index=False)
    if isinstance(data, datasets.Dataset | datasets.IterableDataset):
        selection.refuse_table("a dataset in memory", "split")
        return data, str(getattr(data.info, "dataset_name", None) or "a dataset")
    if not isinstance(data, str | Path):
        kinds = "a path, hub dataset id, datasets.Dataset, data frame, list of texts or images"
        raise InputsError(f"data is {shown(data)}; give {kinds}, or a dict of ready inputs")
    path, name, end = there(data), str(data), ending(data)
    if path is None and (is_path(name) or end in (*TABLES, *TEXT_FILES, *IMAGE_FILES)):
        raise InputsError(f"there is no file or folder {name}")
    if path is not None and path.is_file():
        selection.refuse_table(f"{path.name}, one file", "split")
        options: dict[str, Any] = {"sep": "\t"} if end == ".tsv" else {}
        if TABLES[end] == "csv" and (selection.column or "").isdigit():
            options["header"] = None  # columns are called by their numbers
        options |= {"data_files": str(path), "split": "train"}
        return datasets.load_dataset(TABLES[end], **options), path.name
    if path is not None and is_saved(path):
        table, said = dataset_of(datasets.load_from_disk(str(path)), selection)
        return table, said.replace("a dataset", path.name, 1)
    repo, _, config = name.partition(":")
    if path is None and repo in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        what = f"data is {name!r}, the name of a kind of files in `datasets`, and of no dataset"
        raise InputsError(f"{what}; give the path of files, or a hub dataset id, as owner/name")
    offline = datasets.config.HF_HUB_OFFLINE or not (path or answers(HfApi().dataset_info, repo))
    with temporarily("HF_HUB_OFFLINE", offline, datasets.config):
        chosen = selection.split or _usual(datasets.get_dataset_split_names(repo, config or None))
        found = datasets.load_dataset(repo, config or None, split=chosen)
    return found, f"{path.name if path else name}, {chosen} split"


def _usual(names: list[str]) -> str:
    """Return the split that is read unless another is named."""
    return next((n for n in ("test", "validation", "train") if n in names), names[0])


def _why(error: BaseException) -> str:
    """Return why `datasets` cannot read a table."""
    said = cause(error)
    empty = isinstance(error, StopIteration) or re.search("no data|at least one example", said)
    return "it is empty" if empty else said


class TextReader(Reader):
    """Text through the checkpoint's tokenizer: one sample a text, or a window of the only one."""

    many, takes, files = "texts", "text", PROSE
    instead = '; token numbers are ready inputs, {"input_ids": ...}'
    default = [DEFAULT_TEXT], "the story of a lighthouse clock that comes with lipbound"
    columns = ("text", "sentence", "content", "question", "premise", "description")

    def item(self, value: Any) -> str | None:
        """Return a text, or that of a file."""
        if not isinstance(value, Path):
            return value if isinstance(value, str) else None
        is_text = there(value) is not None and ending(value) not in IMAGE_FILES
        return read_text(value.expanduser()) if is_text else None

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """Return the first windows of a text, or the first of several texts.

        Raises:
            InputsError: there is no text, or samples are longer than the model allows.
        """
        limit, most, name = checkpoint.positions, selection.max_length, checkpoint.name
        found = self.items(checkpoint, data, selection)
        texts, notes = found.take(selection, self.many, self.takes)
        description = selection.described(found.description)
        if limit is not None and most == DEFAULT_LENGTH > limit:
            most = limit
            notes.append(f"texts are cut at {limit} tokens, the positions of {name}")
        checkpoint.check_length(most)
        tokenizer = checkpoint.tokenizer()
        special = int(tokenizer.num_special_tokens_to_add())
        if special >= most:
            raise InputsError(f"max_length {most} leaves no room beside {special} special tokens")
        alone = hasattr(found.given, "__len__") and len(found.given) == 1
        alone = len(texts) == 1 and (selection.samples != 1 or alone)
        if alone and selection.samples is not None and selection.shuffle is None:
            texts = [texts[0][: selection.samples * most * LONGEST_TOKEN]]
        every = [_windows(tokenizer, text, most, special, name) for text in texts]
        lengths = [special + sum(len(w["input_ids"]) - special for w in one) for one in every]
        if not any(lengths):
            raise InputsError(f"{found.description} has no token for the tokenizer of {name}")
        if alone:
            made = f"consecutive windows of {most} tokens"
            rows, said = _full(every[0], selection, most, special)
        else:
            made, said = f"each text cut at {most} tokens", _cut(lengths, most)
            rows = [one[0] for one, length in zip(every, lengths, strict=True) if length]
            if none := lengths.count(0):
                said = [f"{none} of {len(texts)} texts have no token and were passed over", *said]
        batch = _padded(tokenizer, rows)
        made, notes = f"{_kind(tokenizer, checkpoint)}, {made}", notes + said
        return Inputs(batch, description, made, notes + _unknown(tokenizer, batch))


def stream(
    checkpoint: Checkpoint,
    data: Any,
    count: int,
    *,
    split: str | None = None,
    column: str | None = None,
) -> tuple[Tensor, str]:
    """Return the first tokens of a text in one row, without special tokens, and a description.

    Rows of a table are tokenised one by one and follow each other.

    Args:
        checkpoint: whose tokenizer is taken.
        data: as for `lipbound.models.inputs.prepare`.
        count: how many tokens.
        split: as for `lipbound.models.inputs.prepare`.
        column: as for `lipbound.models.inputs.prepare`.

    Returns:
        Token numbers, int64 (count,), and a phrase for captions.

    Raises:
        InputsError: no text, or less of it.
    """
    if checkpoint.modality != "text":
        takes = "images" if checkpoint.modality == "image" else checkpoint.modality
        raise InputsError(f"{checkpoint.name} takes {takes}, not text")
    found = TextReader().items(checkpoint, data, Selection(None, count, split, column))
    tokenizer, ids = checkpoint.tokenizer(), list[int]()
    for text in found:
        if text is not None:
            ids += _encoded(tokenizer, text, checkpoint.name, add_special_tokens=False)["input_ids"]
        if len(ids) >= count:
            return torch.tensor(ids[:count]), found.description
    raise InputsError(f"{found.description} has {len(ids)} tokens of {count}; give more text")


def _kind(tokenizer: Any, checkpoint: Checkpoint) -> str:
    """Return the class of a tokenizer, loaded or named in its files, or else whose it is."""
    named = type(tokenizer).__name__, str(tokenizer.init_kwargs.get("tokenizer_class"))
    other = checkpoint.tokenizer_from
    whose = f"the tokenizer of {Path(other).name}" if other else "the model's tokenizer"
    return next((name for name in named if name not in GENERIC.split()), whose)


def _windows(tokenizer: Any, text: str, most: int, special: int, name: str) -> list[Tokens]:
    """Return consecutive windows of a text, of ``most`` tokens with special ones, or fewer."""
    if getattr(tokenizer, "is_fast", False):
        options = {"max_length": most, "return_overflowing_tokens": True}
        found = _encoded(tokenizer, text, name, truncation=True, **options)
        keys = [key for key in tokenizer.model_input_names if key in found]
        rows = zip(*(found[key] for key in keys), strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]
    # tokenizers written in Python return no windows
    ids = _encoded(tokenizer, text, name, add_special_tokens=False)["input_ids"]
    room = most - special
    parts = (ids[start : start + room] for start in range(0, max(1, len(ids)), room))
    with quiet():
        return [dict(tokenizer.prepare_for_model(part)) for part in parts]


def _full(
    windows: list[Tokens], selection: Selection, most: int, special: int
) -> tuple[list[Tokens], list[str]]:
    """Return the windows of ``most`` tokens that are wanted, or the one that is shorter; notes."""
    full, notes = [one for one in windows if len(one["input_ids"]) == most], []
    if selection.samples is None and 0 < len(full) < len(windows):
        rest = len(windows[-1]["input_ids"]) - special
        said = f"the last {rest} tokens of the text do not fill a window of {most}"
        notes.append(f"{said} and were left out")
    if selection.shuffle is not None:
        full = [full[k] for k in order(len(full), selection.shuffle)]
    return full[: selection.samples] or windows[:1], notes


def _encoded(tokenizer: Any, text: str | list[str], name: str, **options: Any) -> Any:
    # characters that are none, among others
    with explained(InputsError, f"the tokenizer of {name} does not take the text: "), quiet():
        return tokenizer(text, **options)


def _padded(tokenizer: Any, rows: list[Tokens]) -> dict[str, Tensor]:
    """Return rows of tokens as tensors, padded on the right."""
    if tokenizer.pad_token is None:  # padded positions are masked, so any token serves
        known = tokenizer.eos_token or tokenizer.unk_token
        tokenizer.pad_token = known or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    # of unequal rows the mask alone tells padding from text, for any tokenizer
    mask = True if len({len(row["input_ids"]) for row in rows}) > 1 else None
    with quiet():
        return dict(tokenizer.pad(rows, return_tensors="pt", return_attention_mask=mask))


def _cut(lengths: Sequence[int], max_length: int) -> list[str]:
    """Return a note on texts that are longer than a sample."""
    longer = sum(length > max_length for length in lengths)
    first = f"only the first {max_length} tokens were taken (max_length) of up to {max(lengths)}"
    return [f"{longer} of {len(lengths)} texts: {first}"] if longer else []


def _unknown(tokenizer: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Return a note where most tokens stand for what the tokenizer does not know."""
    unknown, ids = tokenizer.unk_token_id, batch["input_ids"]
    others = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    if unknown is None or unknown in others:
        return []
    special = torch.tensor([i for i in tokenizer.all_special_ids if i != unknown])
    words, lost = ~torch.isin(ids, special.to(ids.dtype)), ids == unknown
    strange = int((lost.sum(-1) > MOSTLY_UNKNOWN * words.sum(-1)).sum())
    most = f"most tokens of {strange} of {len(ids)} samples are {tokenizer.unk_token}"
    said = f"{most}, unknown to the tokenizer; give data in the model's language"
    return [said] if strange else []


class ImageReader(Reader):
    """Images, one sample each, through the checkpoint's image processor."""

    many, takes, files = "images", "images", IMAGE_FILES
    columns = ("image", "img", "picture")
    default = sorted(PHOTOGRAPHS.glob("*.png")), "photographs from scikit-image"

    def item(self, value: Any) -> Path | Image.Image | None:
        """Return an image, or what stands for one: the path of a file, or an array of 8 bits.

        Arrays are (height, width), or (height, width, 3 or 4).
        """
        if isinstance(value, np.ndarray) and value.size and value.dtype == np.uint8:
            fits = value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in (3, 4))
            return Image.fromarray(value) if fits else None
        path = there(value)
        if path is not None and path.is_file() and path.suffix.lower() in IMAGE_FILES:
            return path
        return value if isinstance(value, Image.Image) else None

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """Return the first images, upright and in RGB, as the image processor makes them.

        Raises:
            InputsError: there are no images, or the processor does not take them.
        """
        found = self.items(checkpoint, data, selection)
        items, notes = found.take(selection, self.many, self.takes)
        where, told = found.description, Counter[str]()
        images = []
        for k, item in enumerate(items):
            path = isinstance(item, Path)
            what = f"{item if path else f'image {k} of {where}'} is not a readable image: "
            with explained(InputsError, what):  # broken files raise whatever their format's does
                images.append(rgb(Image.open(item) if path else item, told))
        processor = checkpoint.image_processor()
        before = f"the image processor of {checkpoint.name} does not take {where}: "
        with explained(InputsError, before), quiet():  # processors are programs of their own
            batch = processor(images=images, return_tensors="pt")
        tensors = {name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}
        notes += [f"{n} of {len(images)} images {said}" for said, n in told.items()]
        return Inputs(tensors, selection.described(where), _processing(processor), notes)


def _processing(processor: Any) -> str:
    """Return an image processor and its settings in one line.

    >>> from transformers import ViTImageProcessor
    >>> processor = ViTImageProcessor(size={"height": 8, "width": 8})
    >>> _processing(processor).partition(": ")[2].split(", image")[0]
    'size 8 x 8, resample bilinear, rescale factor 0.00392157'
    """
    said = [
        f"{name.replace('_', ' ')} {_plain(value, name)}"
        for name, step in PROCESSING.items()
        if getattr(processor, step, None) and (value := getattr(processor, name, None)) is not None
    ]
    return type(processor).__name__ + (f": {', '.join(said)}" if said else "")


def _plain(value: Any, name: str = "") -> str:
    """Return a setting of a processor in words and numbers."""
    if name == "resample":
        return Image.Resampling(value).name.lower()
    if name.endswith("size"):
        return " x ".join(str(number) for number in dict(value).values() if number is not None)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def rgb(image: Image.Image, told: Counter[str]) -> Image.Image:
    """Return an image upright, as its EXIF data say, in RGB with 8 bits a channel.

    Args:
        image: of any mode; of several frames the one it stands at.
        told: counts what was done to it beyond a change of mode, as ends of sentences.
    """
    if getattr(image, "n_frames", 1) > 1:
        told["have further frames, which were left out"] += 1
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        what = f"it is of mode {image.mode}, whose range is not known"
        raise ValueError(f"{what}; bring it to 8 bits (mode L), 0 to 255")
    if "a" not in image.mode.lower()[1:] and "transparency" not in image.info:
        return image.convert("RGB")
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    if image.getchannel("A").getextrema()[0] == 255:
        return image.convert("RGB")
    told["have transparent parts, which were laid on white"] += 1
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


READERS: dict[str, TextReader | ImageReader] = {"text": TextReader(), "image": ImageReader()}
"""The reader of each modality."""
