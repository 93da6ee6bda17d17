"""Text as model inputs: windows of a file, rows of a table, conversations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.batch import Inputs
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import quiet
from lipbound.models.readers.files import IMAGE_FILES, is_plain_file
from lipbound.models.readers.positions import positions
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.tables import ItemKind, no_table

TEXT_COLUMNS = ("text", "sentence", "content", "question", "premise", "description")
DEFAULT_TEXT = Path(__file__).parent.parent / "builtin" / "text.txt"
"""The text that comes with lipbound."""


class TextReader(Reader):
    """Text through the checkpoint's tokenizer: one sample a text, or a window of a file."""

    modality = "text"
    kind = ItemKind(str, takes="text", one="a text", many="texts", columns=TEXT_COLUMNS)

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """The first windows of a file, or the first texts of a table or a list that are not blank, or the first conversations."""
        samples, max_length = selection.samples, selection.max_length
        limit = positions(checkpoint)
        if limit is not None and max_length > limit:
            raise InputsError(f"max_length {max_length} exceeds the {limit} positions of {checkpoint.name}; give at most {limit}")
        tokenizer = checkpoint.tokenizer()
        if _are_chats(data):
            no_table(selection.split, selection.column, "conversations in memory have")
            return _chats(tokenizer, data[:samples], max_length, checkpoint.name)
        if is_plain_file(data) and Path(data).suffix.lower() in IMAGE_FILES:
            raise InputsError(f"{data} is an image, but {checkpoint.name} reads text")
        found, description = self.items(checkpoint, data, selection.split, selection.column)
        if data is None or is_plain_file(data):
            batch = _windows(tokenizer, next(found), samples, max_length, str(data or DEFAULT_TEXT))
            return Inputs(batch, description, f"{type(tokenizer).__name__}, consecutive windows of {max_length} tokens")
        blank: list[str] = []
        texts = list(islice(_not_blank(found, blank), samples))
        if not texts:
            raise InputsError(f"{description} has no text in it")
        notes = [f"blank texts of {description} were passed over: {len(blank)}"] if blank else []
        return Inputs(_tokens(tokenizer, texts, max_length), description, f"{type(tokenizer).__name__}, each text cut at {max_length} tokens", notes)

    def default(self) -> tuple[Iterator[str], str]:
        """`DEFAULT_TEXT`."""
        return iter([_read(DEFAULT_TEXT)]), "the text that comes with lipbound"

    def open_file(self, path: Path, checkpoint: Checkpoint) -> Iterator[str]:
        """The whole of a UTF-8 file as one text."""
        return iter([_read(path)])


def _not_blank(texts: Iterable[str], blank: list[str]) -> Iterator[str]:
    """Texts with something in them; the others go to ``blank``."""
    for text in texts:
        if text.strip():
            yield text
        else:
            blank.append(text)


def _are_chats(data: Any) -> bool:
    """Whether it is a list that begins with a conversation."""
    return isinstance(data, Sequence) and not isinstance(data, str) and len(data) > 0 and _is_chat(data[0])


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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputsError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputsError(f"{path} is not a UTF-8 text file") from error


def _tokens(tokenizer: Any, texts: Sequence[str], max_length: int, *, special: bool = True) -> dict[str, Tensor]:
    if tokenizer.pad_token is None:  # padded positions are masked, so any token serves
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"
    with quiet():
        encoded = tokenizer(list(texts), truncation=True, max_length=max_length, padding=True, return_tensors="pt", add_special_tokens=special)
    return {name: tensor for name, tensor in encoded.items() if isinstance(tensor, Tensor)}
