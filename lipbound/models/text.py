"""Text as model inputs: windows of a file, rows of a table, conversations."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.datasets import TABLES, Inputs, read_rows
from lipbound.models.images import IMAGE_FILES
from lipbound.models.quiet import quiet

TEXT_COLUMNS = ("text", "sentence", "content", "question", "premise", "description")


# -- text ----------------------------------------------------------------------------------------------------------------


def read_text(checkpoint: Checkpoint, data: Any, samples: int, max_length: int, split: str | None, column: str | None) -> Inputs:
    """The first samples of a text, a table or a list, through the checkpoint's tokenizer; arguments as of `lipbound.models.inputs.prepare`."""
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
    rows, description = read_rows(path, split, column, TEXT_COLUMNS, str, checkpoint)
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


def check_positions(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    """Raise InputsError where ready inputs are longer than the model allows."""
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
        pieces, description = read_rows(path, split, column, TEXT_COLUMNS, str, checkpoint)
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
