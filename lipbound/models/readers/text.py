"""Text as model inputs: windows of a text, beginnings of several, token numbers, conversations.

One rule holds wherever text comes from. One text (a file, a string, a list, a folder or a table
with nothing else in it) is read in consecutive windows of ``max_length`` tokens, each a sample. Of
several texts (a list, the rows of a table, the files of a folder) each is one sample: its first
``max_length`` tokens. The first window of a text is its first ``max_length`` tokens, so the same
text begins with the same sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint, Inputs, text_part
from lipbound.models.quiet import explained, quiet
from lipbound.models.readers import files
from lipbound.models.readers.reader import DEFAULT_LENGTH, DataItems, Reader, Selection, order

DEFAULT_TEXT = Path(__file__).parent.parent / "builtin" / "text.txt"
"""The text that comes with lipbound."""
GENERIC = "TokenizersBackend PythonBackend PreTrainedTokenizerFast PreTrainedTokenizer None"
"""Classes that transformers loads any tokenizer into, and what stands for none."""
UNKNOWN = 0.5
"""Share of unknown tokens above which a text is hardly one of the tokenizer's."""

Encoded = tuple[dict[str, Tensor], list[str]]
"""A batch of token numbers and masks, each (samples, N), and notes on it."""


class TokenizedText(NamedTuple):
    """The tokens of one text without the padding at its ends; ``kept`` is False where masked."""

    ids: list[int]
    kept: list[bool]

    def __bool__(self) -> bool:
        return bool(self.ids)


def tokens_of(value: Any) -> TokenizedText | None:
    """Return the tokens that something stands for, or None.

    Args:
        value: a list, a tensor or an array of whole numbers, or a row of a tokenised dataset.

    Raises:
        InputsError: a mask of another length.
    """
    row = value if isinstance(value, Mapping) else {"input_ids": value}
    ids = _whole(row.get("input_ids"))
    if ids is None:
        return None
    mask = row.get("attention_mask")
    kept = [True] * len(ids) if mask is None else [bool(k) for k in np.asarray(mask).tolist()]
    if len(kept) != len(ids):
        raise InputsError(f"a row has {len(ids)} input_ids and an attention_mask of {len(kept)}")
    if True not in kept:
        return TokenizedText([], [])
    first, last = kept.index(True), len(kept) - kept[::-1].index(True)
    return TokenizedText(ids[first:last], kept[first:last])


def given_tokens(data: Any) -> list[TokenizedText] | None:
    """Return the tokens of each sample of one row, or several, of token numbers; else None."""
    if isinstance(data, Tensor | np.ndarray):
        rows = list(data) if data.ndim > 1 else [data]
    elif isinstance(data, list | tuple) and data and not isinstance(data[0], str):
        rows = list(data) if _whole(data) is None else [data]
    else:
        return None
    if not all(isinstance(row, list | tuple | Tensor | np.ndarray) for row in rows):
        return None
    found = [tokens_of(row) if len(row) else TokenizedText([], []) for row in rows]
    return found if None not in found and any(found) else None  # type: ignore[return-value]


def _whole(value: Any) -> list[int] | None:
    """Return a row of whole numbers as a list, or None."""
    if not isinstance(value, list | tuple | Tensor | np.ndarray):
        return None
    try:
        row = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError):  # rows of unequal lengths, or odd dtypes
        return None
    whole = row.ndim == 1 and row.dtype.kind in "iu" and np.can_cast(row.dtype, np.int64)
    return list(row.tolist()) if whole else None


def _batch_of(rows: Sequence[TokenizedText], model: Checkpoint, most: int) -> dict[str, Tensor]:
    """Return ``input_ids``, cut and padded on the right, and the ``attention_mask`` that says so.

    Both are int64, (samples, N) with N at most ``most``.
    """
    config = text_part(model.config)
    pad, known = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None) or 0
    pad = pad if isinstance(pad, int) and 0 <= pad < known else 0
    ids = [torch.tensor(row.ids[:most]) for row in rows]
    kept = [torch.tensor(row.kept[:most], dtype=torch.int64) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence(kept, batch_first=True),
    }


class TextReader(Reader):
    """Text through the checkpoint's tokenizer: one sample a text, or a window of the only one."""

    modality = "text"
    item_type, one, many, takes = str, "a text", "texts", "text"
    columns = ("input_ids", "text", "sentence", "content", "question", "premise", "description")

    def item(self, value: Any) -> str | TokenizedText | None:
        """Return a text, that of a file, or the tokens that a value stands for."""
        if not isinstance(value, Path):
            return value if isinstance(value, str) else tokens_of(value)
        is_text = files.is_plain_file(value) and files.ending(value) not in files.IMAGE_FILES
        return files.read_text(value) if is_text else None

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """Return the first windows of a text, or the first of several texts or conversations.

        Raises:
            InputsError: there is no text, or samples are longer than the model allows.
        """
        limit, shorter = checkpoint.positions, list[str]()
        if given_tokens(data) is None:
            if limit is not None and selection.max_length == DEFAULT_LENGTH > limit:
                selection = replace(selection, max_length=limit)
                shorter = [f"texts are cut at {limit} tokens, the positions of {checkpoint.name}"]
            checkpoint.check_length(selection.max_length)
        max_length = selection.max_length
        if files.is_plain_file(data) and files.ending(Path(data)) in files.IMAGE_FILES:
            raise InputsError(f"{data} is an image, but {checkpoint.name} reads text")
        chats = isinstance(data, list | tuple) and len(data) > 0 and _is_chat(data[0])
        if chats:
            selection.refuse_table("conversations in memory")
            found, many = DataItems(list(data), "conversations"), "conversations"
        else:
            found, many = self.items(checkpoint, data, selection), "texts"
        texts, notes = found.take(selection, many)
        if not texts:
            empty = f"{data} is empty" if files.is_plain_file(data) else ""
            raise InputsError(empty or f"{found.description} has no text in it")
        if len({isinstance(text, TokenizedText) for text in texts}) > 1:
            raise InputsError(f"{found.description} holds texts and token numbers; give one kind")
        where = f"{len(texts)} conversations" if chats else found.description
        description = selection.described(where)
        if isinstance(texts[0], TokenizedText):
            max_length = min(max_length, checkpoint.positions or max_length)
            batch = _batch_of(texts, checkpoint, max_length)
            notes += _cut([len(text.ids) for text in texts], max_length)
            made = f"token numbers as given, each text cut at {max_length}"
            return Inputs(batch, description, made, notes)
        tokenizer, name = checkpoint.tokenizer(), checkpoint.name
        made = _kind(tokenizer, checkpoint)
        alone = isinstance(found.given, Sequence) and len(found.given) == 1
        if chats:
            texts = _written_out(tokenizer, texts, name)
            # the template has written the special tokens
            batch, said = _tokens(tokenizer, texts, max_length, name, special=False)
            made += f" with its chat template, each cut at {max_length} tokens"
        elif len(texts) == 1 and (selection.samples != 1 or alone):
            batch, said = _windows(tokenizer, texts[0], selection, name)
            made += f", consecutive windows of {max_length} tokens"
        else:
            batch, said = _tokens(tokenizer, texts, max_length, name)
            made += f", each text cut at {max_length} tokens"
        return Inputs(batch, description, made, notes + shorter + said + _unknown(tokenizer, batch))

    def items(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> DataItems:
        """Return the items of some data as `Reader.items` does, or tokens in memory."""
        given = given_tokens(data)
        if given is None:
            return super().items(checkpoint, data, selection)
        selection.refuse_table("token numbers in memory")
        many = "texts" if len(given) > 1 else "text"
        return DataItems(given, f"{len(given)} given {many} of token numbers")

    def default(self) -> tuple[list[str], str]:
        """Return `DEFAULT_TEXT` and its description."""
        said = "the story of a lighthouse clock that comes with lipbound"
        return [files.read_text(DEFAULT_TEXT)], said

    def open_file(self, path: Path, checkpoint: Checkpoint) -> list[str]:
        """Return the whole of a UTF-8 file as one text."""
        return [files.read_text(path)]

    def open_folder(self, path: Path, takes: str) -> DataItems | None:
        """Return the texts of a folder and its subfolders; None where there are none, or tables.

        Raises:
            InputsError: it is a folder of images.
        """
        names = files.visible(path)
        ends = {files.ending(file) for file in names}
        found = [file for file in names if files.ending(file) in files.PROSE]
        tables = not ends.isdisjoint(files.TABLES)
        if not (found or tables or ends.isdisjoint(files.IMAGE_FILES)):
            raise InputsError(f"{path} is a folder of images, {takes}")
        if not found or tables:
            return None
        return DataItems.of_files(path, found, files.read_text)


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
    tokenizer: Any = None
    ids: list[int] = []
    for text in found:
        if isinstance(text, TokenizedText):
            ids += text.ids
        elif text is not None:
            tokenizer = tokenizer or checkpoint.tokenizer()
            with quiet():
                ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= count:
            return torch.tensor(ids[:count]), found.description
    raise InputsError(f"{found.description} has {len(ids)} tokens of {count}; give more text")


def _kind(tokenizer: Any, checkpoint: Checkpoint) -> str:
    """Return the class of a tokenizer, loaded or named in its files, or else whose it is."""
    named = type(tokenizer).__name__, str(tokenizer.init_kwargs.get("tokenizer_class"))
    other = checkpoint.tokenizer_from
    whose = f"the tokenizer of {Path(other).name}" if other else "the model's tokenizer"
    return next((name for name in named if name not in GENERIC.split()), whose)


def _is_chat(item: Any) -> bool:
    """Return whether something is a list of messages, each with role and content."""
    listed = isinstance(item, list | tuple) and len(item) > 0
    return listed and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in item)


def _written_out(tokenizer: Any, chats: Sequence[Any], name: str) -> list[str]:
    """Return conversations as the tokenizer's chat template writes them."""
    if getattr(tokenizer, "chat_template", None) is None or not all(map(_is_chat, chats)):
        raise InputsError(
            f"conversations need a chat template in the tokenizer of {name}, and messages such as "
            "{'role': 'user', 'content': 'hello'}; give strings"
        )
    before = f"the chat template of {name} does not take these conversations: "
    with explained(InputsError, before, why=str):  # templates are programs of their own
        return [tokenizer.apply_chat_template(list(chat), tokenize=False) for chat in chats]


def _windows(tokenizer: Any, text: str, selection: Selection, name: str) -> Encoded:
    """Return consecutive windows of ``max_length`` tokens, or one that is shorter where all is."""
    samples, max_length = selection.samples, selection.max_length
    special = _special(tokenizer, max_length)
    size = len(text)
    if samples is not None and selection.shuffle is None:
        size = samples * max_length * 12  # characters read; more only where tokens are longer
    while True:
        encoded = _in_windows(tokenizer, text[:size], max_length, special, name)
        windows = encoded["input_ids"]
        full = [k for k, ids in enumerate(windows) if len(ids) == max_length]
        if (samples is not None and len(full) >= samples) or size >= len(text):
            break
        size *= 4
    if not windows[0]:
        raise InputsError(f"the text has no token for the tokenizer of {name}")
    notes = []
    if samples is None and full and len(full) < len(windows):
        notes.append(
            f"the last {len(windows[-1]) - special} tokens of the text do not fill a window of "
            f"{max_length} and were left out"
        )
    if selection.shuffle is not None:
        full = [full[k] for k in order(len(full), selection.shuffle)]
    keys = [key for key in tokenizer.model_input_names if key in encoded]
    keep = full[:samples] or [0]
    return {key: torch.tensor([encoded[key][k] for k in keep]) for key in keys}, notes


def _special(tokenizer: Any, max_length: int) -> int:
    """Return how many special tokens a text gets, beside which others must fit."""
    special = int(tokenizer.num_special_tokens_to_add())
    if special >= max_length:
        raise InputsError(f"max_length {max_length} leaves no room beside {special} special tokens")
    return special


def _in_windows(
    tokenizer: Any, text: str, max_length: int, special: int, name: str
) -> Mapping[str, list[Any]]:
    if getattr(tokenizer, "is_fast", False):
        options = {"max_length": max_length, "return_overflowing_tokens": True}
        return _encoded(tokenizer, text, name, truncation=True, **options)
    # tokenizers written in Python return no windows
    ids = _encoded(tokenizer, text, name, add_special_tokens=False)["input_ids"]
    room = max_length - special
    starts = range(0, max(1, len(ids)), room)
    with quiet():
        windows = [tokenizer.prepare_for_model(ids[start : start + room]) for start in starts]
    return {key: [window[key] for window in windows] for key in windows[0]}


def _encoded(tokenizer: Any, text: str | list[str], name: str, **options: Any) -> Any:
    # characters that are none, among others
    with explained(InputsError, f"the tokenizer of {name} does not take the text: "), quiet():
        return tokenizer(text, **options)


def _tokens(
    tokenizer: Any, texts: Sequence[str], max_length: int, name: str, *, special: bool = True
) -> Encoded:
    """Return the beginnings of texts, padded on the right."""
    if special:
        _special(tokenizer, max_length)
    every = _encoded(tokenizer, list(texts), name, add_special_tokens=special)["input_ids"]
    lengths = [len(ids) for ids in every]
    texts = [text for text, length in zip(texts, lengths, strict=True) if length]
    if not texts:
        raise InputsError(f"the texts have no token for the tokenizer of {name}")
    none = lengths.count(0)
    notes = [f"{none} of {len(lengths)} texts have no token and were passed over"] if none else []
    if tokenizer.pad_token is None:  # padded positions are masked, so any token serves
        known = tokenizer.eos_token or tokenizer.unk_token
        tokenizer.pad_token = known or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    options = {"max_length": max_length, "add_special_tokens": special, "return_tensors": "pt"}
    if len(set(lengths)) > 1:  # the mask alone tells padding from text, for any tokenizer
        options["return_attention_mask"] = True
    batch = _encoded(tokenizer, texts, name, truncation=True, padding=True, **options)
    tensors = {key: tensor for key, tensor in batch.items() if isinstance(tensor, Tensor)}
    return tensors, notes + _cut(lengths, max_length)


def _cut(lengths: Sequence[int], max_length: int) -> list[str]:
    """Return a note on texts that are longer than a sample."""
    longer = sum(length > max_length for length in lengths)
    said = (
        f"{longer} of {len(lengths)} texts: only the first {max_length} tokens were taken "
        f"(max_length) of up to {max(lengths)}"
    )
    return [said] if longer else []


def _unknown(tokenizer: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Return a note where most tokens stand for what the tokenizer does not know."""
    unknown, ids = tokenizer.unk_token_id, batch["input_ids"]
    others = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    if unknown is None or unknown in others:
        return []
    special = torch.tensor([i for i in tokenizer.all_special_ids if i != unknown])
    words, lost = ~torch.isin(ids, special.to(ids.dtype)), ids == unknown
    strange = int((lost.sum(-1) > UNKNOWN * words.sum(-1)).sum())
    said = (
        f"most tokens of {strange} of {len(ids)} samples are {tokenizer.unk_token}, which stands "
        "for what the tokenizer does not know; give data in the model's language"
    )
    return [said] if strange else []
