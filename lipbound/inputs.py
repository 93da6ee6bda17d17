"""Data -> model inputs: text through the checkpoint's tokenizer, images through its processor, or inputs that are ready."""

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lipbound.checkpoints import Checkpoint, quiet
from lipbound.errors import InputsError

TEXT_COLUMNS = ("text", "sentence", "content", "question", "premise", "description")
IMAGE_COLUMNS = ("image", "img", "picture")
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
PROCESSING = (
    "do_resize",
    "size",
    "resample",
    "do_center_crop",
    "crop_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)
"""Settings of image processors that go into a run's provenance."""
TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg", "camera.png", "coins.png", "grass.png")
"""Files of scikit-image that are the default images."""


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


def prepare(
    checkpoint: Checkpoint,
    data: Any = None,
    *,
    samples: int = 8,
    max_length: int = 128,
    split: str | None = None,
    column: str | None = None,
) -> Inputs:
    """The first ``samples`` samples of some data as inputs of a checkpoint.

    Args:
        checkpoint: what the inputs are for; its modality decides how data is read.
        data: None (a text of ours, or photographs from scikit-image), a hub dataset id ("ag_news", or with a configuration
            "wikitext:wikitext-2-raw-v1"), a text file (cut into consecutive windows of ``max_length`` tokens), a folder of images,
            a .parquet, .csv or .json table, a .safetensors file of ready inputs, a ``datasets.Dataset``, a list of strings, PIL
            images or conversations (each a list of messages ``{"role": ..., "content": ...}``, written out by the tokenizer's chat template), or a
            dict of ready tensors.
        samples: how many; fewer are used where there are fewer.
        max_length: tokens per text, special tokens included.
        split: split of a hub dataset; its only split, else "test", "validation" or "train".
        column: column of a table; guessed from its usual names. A number, from 0, for a .csv file without a line of names.

    Raises:
        InputsError: no such data, empty data, data of the wrong modality, text longer than the model's positions allow.
    """
    if samples < 1:
        raise InputsError(f"samples is {samples}; at least one sample is needed")
    if isinstance(data, Mapping) or (isinstance(data, str | Path) and str(data).endswith(".safetensors")):
        batch, description = _ready(data)
        _check_positions(checkpoint, batch)
        return Inputs({name: tensor[:samples] for name, tensor in batch.items()}, description)
    if checkpoint.modality == "text":
        return _text(checkpoint, data, samples, max_length, split, column)
    if checkpoint.modality == "image":
        return _images(checkpoint, data, samples, split, column)
    raise InputsError(f"{checkpoint.name} takes {checkpoint.modality}, neither text nor images; give a dict of ready inputs")


# -- ready inputs --------------------------------------------------------------------------------------------------------


def _ready(data: Mapping[str, Any] | str | Path) -> tuple[dict[str, Tensor], str]:
    if isinstance(data, Mapping):
        tensors, description = dict(data), "ready model inputs"
    else:
        path = Path(data)
        if not path.is_file():
            raise InputsError(f"there is no file {path}")
        try:
            tensors, description = load_file(path), path.name
        except SafetensorError as error:
            raise InputsError(f"{path} is not a readable safetensors file: {error}") from error
    wrong = {name: type(t).__name__ for name, t in tensors.items() if not isinstance(t, Tensor) or t.ndim < 2 or not len(t)}
    if not tensors or wrong:
        raise InputsError(f"ready inputs must be named tensors of (samples, ...) with at least one sample; {wrong or 'none'} given")
    lengths = {name: len(t) for name, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise InputsError(f"ready inputs disagree about the number of samples: {lengths}")
    return tensors, description


# -- text ----------------------------------------------------------------------------------------------------------------


def _text(checkpoint: Checkpoint, data: Any, samples: int, max_length: int, split: str | None, column: str | None) -> Inputs:
    if max_length < 1:
        raise InputsError(f"max_length is {max_length}; at least one token is needed")
    limit = positions(checkpoint)
    if limit is not None and max_length > limit:
        raise InputsError(f"max_length {max_length} exceeds the {limit} positions of {checkpoint.name}; give at most {limit}")
    path = Path(__file__).parent / "builtin" / "text.txt" if data is None else data
    tokenizer = checkpoint.tokenizer()
    if isinstance(path, str | Path) and Path(path).is_file() and Path(path).suffix not in TABLES:
        if Path(path).suffix.lower() in IMAGE_FILES:
            raise InputsError(f"{path} is an image, but {checkpoint.name} reads text")
        batch = _windows(tokenizer, _read(Path(path)), samples, max_length, str(path))
        how = f"{type(tokenizer).__name__}, consecutive windows of {max_length} tokens"
        return Inputs(batch, "the text that comes with lipbound" if data is None else Path(path).name, how)
    if isinstance(data, Sequence) and not isinstance(data, str) and len(data) and _is_chat(data[0]):
        return _chats(tokenizer, data[:samples], max_length, checkpoint.name)
    rows, description = _rows(path, split, column, TEXT_COLUMNS, str, checkpoint)
    texts = list(islice((row for row in rows if row.strip()), samples))
    if not texts:
        raise InputsError(f"{description} has no text in it")
    return Inputs(_tokens(tokenizer, texts, max_length), description, f"{type(tokenizer).__name__}, each text cut at {max_length} tokens")


def _is_chat(item: Any) -> bool:
    """Whether it is a conversation: a list of messages with role and content."""
    return isinstance(item, list | tuple) and len(item) > 0 and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in item)


def _chats(tokenizer: Any, chats: Sequence[Any], max_length: int, name: str) -> Inputs:
    """Conversations as the checkpoint's chat template writes them."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputsError(f"the tokenizer of {name} has no chat template, and conversations were given; give strings")
    if not all(map(_is_chat, chats)):
        raise InputsError("some of the conversations are not lists of messages such as {'role': 'user', 'content': 'hello'}")
    try:
        texts = [tokenizer.apply_chat_template(list(chat), tokenize=False) for chat in chats]
    except Exception as error:  # templates are programs of their own
        raise InputsError(f"the chat template of {name} does not take these conversations: {error}") from error
    batch = _tokens(tokenizer, texts, max_length, special=False)  # the template has written them
    return Inputs(batch, f"{len(texts)} conversations", f"{type(tokenizer).__name__} with its chat template, each cut at {max_length} tokens")


def positions(checkpoint: Checkpoint) -> int | None:
    """Longest input of a text model in tokens, or None where it sets no limit."""
    config = checkpoint.model.config
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is None:
        return None
    padding = getattr(checkpoint.model.base_model, "embeddings", None)
    offset = getattr(padding, "padding_idx", None) if hasattr(padding, "position_embeddings") else None
    return int(limit) - (int(offset) + 1 if offset else 0)  # RoBERTa's positions start behind the padding index


def _check_positions(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    limit = positions(checkpoint) if checkpoint.modality == "text" else None
    length = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
    if limit is not None and length > limit:
        raise InputsError(f"inputs of {length} tokens exceed the {limit} positions of {checkpoint.name}; give at most {limit}")


def _windows(tokenizer: Any, text: str, samples: int, max_length: int, name: str) -> dict[str, Tensor]:
    """Consecutive windows of exactly ``max_length`` tokens (one shorter window where the text has no more)."""
    if not text.strip():
        raise InputsError(f"{name} is empty")
    special = tokenizer.num_special_tokens_to_add()
    if special >= max_length:
        raise InputsError(f"max_length {max_length} leaves no room beside the tokenizer's {special} special tokens")
    size = samples * max_length * 12  # characters read; more only where tokens are longer
    while True:
        with quiet():
            encoded = tokenizer(text[:size], truncation=True, max_length=max_length, return_overflowing_tokens=True)
        full = [k for k, ids in enumerate(encoded["input_ids"]) if len(ids) == max_length]
        if len(full) >= samples or size >= len(text):
            break
        size *= 4
    keep = full[:samples] or [0]
    return {name: torch.tensor([encoded[name][k] for k in keep]) for name in tokenizer.model_input_names if name in encoded}


def stream(checkpoint: Checkpoint, data: Any, count: int, *, split: str | None = None, column: str | None = None) -> tuple[Tensor, str]:
    """The first ``count`` tokens of a text, without special tokens, as one tensor (count,), and a description; data as for `prepare`.

    Rows of a table are tokenised one by one and follow each other.

    Raises:
        InputsError: no text, or less of it.
    """
    if checkpoint.modality != "text":
        raise InputsError(f"{checkpoint.name} takes {checkpoint.modality}, not text")
    path = Path(__file__).parent / "builtin" / "text.txt" if data is None else data
    if isinstance(path, str | Path) and Path(path).is_file() and Path(path).suffix not in TABLES:
        pieces, description = iter([_read(Path(path))]), "the text that comes with lipbound" if data is None else Path(path).name
    else:
        pieces, description = _rows(path, split, column, TEXT_COLUMNS, str, checkpoint)
    tokenizer = checkpoint.tokenizer()
    ids: list[int] = []
    for piece in pieces:
        with quiet():
            ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        if len(ids) >= count:
            return torch.tensor(ids[:count]), description
    raise InputsError(f"{description} has {len(ids)} tokens, and {count} are needed; give more text, fewer sequences or shorter ones")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputsError(f"{path} is not a UTF-8 text file") from error


def _tokens(tokenizer: Any, texts: Sequence[str], max_length: int, *, special: bool = True) -> dict[str, Tensor]:
    if tokenizer.pad_token is None:  # padded positions are masked, so any token serves
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"
    with quiet():
        encoded = tokenizer(list(texts), truncation=True, max_length=max_length, padding=True, return_tensors="pt", add_special_tokens=special)
    return {name: tensor for name, tensor in encoded.items() if isinstance(tensor, Tensor)}


# -- images --------------------------------------------------------------------------------------------------------------


def _images(checkpoint: Checkpoint, data: Any, samples: int, split: str | None, column: str | None) -> Inputs:
    if data is None:
        pictures, description = _photographs(), "photographs from scikit-image"
    elif isinstance(data, str | Path) and Path(data).is_dir() and not _has_table(Path(data)):
        pictures, description = _folder(Path(data)), Path(data).name
    elif isinstance(data, str | Path) and Path(data).is_file() and Path(data).suffix not in TABLES:
        if Path(data).suffix.lower() not in IMAGE_FILES:
            raise InputsError(f"{data} is not an image file, but {checkpoint.name} takes images; give a folder of images, a dataset or a table")
        pictures, description = iter([_open(Path(data))]), Path(data).name
    else:
        pictures, description = _rows(data, split, column, IMAGE_COLUMNS, Image.Image, checkpoint)
    chosen = [picture.convert("RGB") for picture in islice(pictures, samples)]
    if not chosen:
        raise InputsError(f"{description} has no images in it")
    processor = checkpoint.image_processor()
    with quiet():
        batch = processor(images=chosen, return_tensors="pt")
    return Inputs({name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}, description, _processing(processor))


def _processing(processor: Any) -> str:
    """An image processor and its settings in one line."""
    parts = [f"{name} {_plain(getattr(processor, name))}" for name in PROCESSING if getattr(processor, name, None) is not None]
    return ", ".join([type(processor).__name__, *parts])


def _plain(value: Any) -> str:
    """A setting of a processor without its Python types."""
    return str({k: v for k, v in dict(value).items() if v is not None} if isinstance(value, Mapping) else value)


def _photographs() -> Iterator[Image.Image]:
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise InputsError("the default photographs come with scikit-image, which is not installed; pip install 'lipbound[demo]', or give data")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return (_open(folder / name) for name in PHOTOGRAPHS)


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InputsError(f"{path} is not a readable image") from error


def _folder(folder: Path) -> Iterator[Image.Image]:
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGE_FILES)
    if not files:
        raise InputsError(f"{folder} holds no images ({', '.join(IMAGE_FILES)})")
    return (_open(file) for file in files)


# -- tables and datasets -------------------------------------------------------------------------------------------------


def _has_table(folder: Path) -> bool:
    return any(file.suffix in TABLES for file in folder.iterdir())


def _rows(data: Any, split: str | None, column: str | None, usual: Sequence[str], kind: type, checkpoint: Checkpoint) -> tuple[Iterator[Any], str]:
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
