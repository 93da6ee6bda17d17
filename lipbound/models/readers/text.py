"""Text as model inputs: windows of one text, the beginnings of several, token numbers,
conversations.

One rule holds wherever text comes from. One text (a file, a string, a list, a folder or a table
with nothing else in it) is read in consecutive windows of ``max_length`` tokens, each a sample. Of
several texts (a list, the rows of a table, the files of a folder) each is one sample: its first
``max_length`` tokens. The first window of a text is its first ``max_length`` tokens, so the same
text begins with the same sample.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.quiet import first_line, quiet
from lipbound.models.readers.files import (
    IMAGE_FILES,
    PROSE,
    TABLES,
    ending,
    is_plain_file,
    read_text,
    visible,
)
from lipbound.models.readers.positions import check_length, positions
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.tables import DataItems, ItemKind, Lazy, no_table, order
from lipbound.models.readers.token_ids import TokenizedText, batch_of, given_tokens, tokens_of

TEXT_COLUMNS = ("input_ids", "text", "sentence", "content", "question", "premise", "description")
DEFAULT_TEXT = Path(__file__).parent.parent / "builtin" / "text.txt"
"""The text that comes with lipbound."""
GENERIC = (
    "TokenizersBackend",
    "PythonBackend",
    "PreTrainedTokenizerFast",
    "PreTrainedTokenizer",
    "None",
)
"""Classes that transformers loads any tokenizer into, and what stands for none."""
UNKNOWN = 0.5
"""Share of unknown tokens above which a text is hardly one of the tokenizer's."""


def _as_text(value: Any) -> str | TokenizedText | None:
    """The text of a file, or the tokens, that a value stands for."""
    if isinstance(value, Path):
        return (
            read_text(value) if is_plain_file(value) and ending(value) not in IMAGE_FILES else None
        )
    return tokens_of(value)


class TextReader(Reader):
    """Text through the checkpoint's tokenizer: one sample a text, or a window of the only one."""

    modality = "text"
    kind = ItemKind(
        str, takes="text", one="a text", many="texts", columns=TEXT_COLUMNS, convert=_as_text
    )

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """The first windows of a text, the first of several texts that are not blank, or the first
        conversations."""
        samples, max_length = selection.samples, selection.max_length
        if given_tokens(data) is None:
            check_length(checkpoint, max_length)
        if _are_chats(data):
            no_table(selection.split, selection.column, "conversations in memory have")
            return _chats(checkpoint, data, selection)
        if is_plain_file(data) and ending(Path(data)) in IMAGE_FILES:
            raise InputsError(f"{data} is an image, but {checkpoint.name} reads text")
        found = self.items(checkpoint, data, selection.split, selection.column)
        texts, notes = found.take(samples, selection.shuffle, "texts")
        if not texts:
            raise InputsError(
                f"{data} is empty"
                if is_plain_file(data)
                else f"{found.description} has no text in it"
            )
        description = selection.described(found.description)
        if len({isinstance(text, TokenizedText) for text in texts}) > 1:
            raise InputsError(
                f"{found.description} holds both texts and token numbers; give one kind"
            )
        if isinstance(texts[0], TokenizedText):
            limit = positions(checkpoint)
            max_length = max_length if limit is None else min(max_length, limit)
            notes += _cut([len(text.ids) for text in texts], max_length)
            return Inputs(
                batch_of(texts, checkpoint, max_length),
                description,
                f"token numbers as given, each text cut at {max_length}",
                notes,
            )
        tokenizer = checkpoint.tokenizer()
        kind = _kind(tokenizer, checkpoint)
        if len(texts) == 1 and (
            samples != 1 or (isinstance(found.items, Sequence) and len(found.items) == 1)
        ):
            batch, said = _windows(tokenizer, texts[0], selection, checkpoint.name)
            return Inputs(
                batch,
                description,
                f"{kind}, consecutive windows of {max_length} tokens",
                notes + said + _unknown(tokenizer, batch),
            )
        batch, said = _tokens(tokenizer, texts, max_length, checkpoint.name)
        return Inputs(
            batch,
            description,
            f"{kind}, each text cut at {max_length} tokens",
            notes + said + _unknown(tokenizer, batch),
        )

    def items(
        self, checkpoint: Checkpoint, data: Any, split: str | None, column: str | None
    ) -> DataItems:
        """The items of some data, as `Reader.items` has them; tokens in memory are items, too."""
        given = given_tokens(data)
        if given is None:
            return super().items(checkpoint, data, split, column)
        no_table(split, column, "token numbers in memory have")
        return DataItems(
            given, f"{len(given)} given {'texts' if len(given) > 1 else 'text'} of token numbers"
        )

    def default(self) -> tuple[list[str], str]:
        """`DEFAULT_TEXT`."""
        return [read_text(DEFAULT_TEXT)], "the story of a lighthouse clock that comes with lipbound"

    def open_file(self, path: Path, checkpoint: Checkpoint) -> list[str]:
        """The whole of a UTF-8 file as one text."""
        return [read_text(path)]

    def open_folder(self, path: Path) -> DataItems | None:
        """The texts of a folder and the folders in it, a file each, by their paths; None for a
        folder of tables, and where there are none."""
        names = visible(path)
        files = [file for file in names if ending(file) in PROSE]
        if not files or any(ending(file) in TABLES for file in names):
            return None
        texts = Lazy(len(files), lambda k: read_text(files[k]))
        return DataItems(
            texts,
            path.name,
            lambda: [str(file.parent.relative_to(path)) for file in files],
            ("folder", "folders"),
        )


def _kind(tokenizer: Any, checkpoint: Checkpoint) -> str:
    """What a tokenizer is called: its class, the one that its files name where it was loaded as
    none of its own, or whose it is."""
    named = type(tokenizer).__name__, str(tokenizer.init_kwargs.get("tokenizer_class"))
    if kind := next((name for name in named if name not in GENERIC), None):
        return kind
    other = checkpoint.tokenizer_from
    return "the model's tokenizer" if other is None else f"the tokenizer of {Path(other).name}"


def _are_chats(data: Any) -> bool:
    """Whether it is a list that begins with a conversation."""
    return (
        isinstance(data, Sequence)
        and not isinstance(data, str)
        and len(data) > 0
        and _is_chat(data[0])
    )


def _is_chat(item: Any) -> bool:
    """Whether it is a conversation: a list of messages with role and content."""
    return (
        isinstance(item, list | tuple)
        and len(item) > 0
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in item)
    )


def _chats(checkpoint: Checkpoint, data: Sequence[Any], selection: Selection) -> Inputs:
    """Conversations as the checkpoint's chat template writes them."""
    tokenizer = checkpoint.tokenizer()
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputsError(
            f"the tokenizer of {checkpoint.name} has no chat template, and conversations were "
            "given; give strings"
        )
    chats, _ = DataItems(list(data), "conversations").take(
        selection.samples, selection.shuffle, "conversations"
    )
    if not all(map(_is_chat, chats)):
        raise InputsError(
            "some of the conversations are not lists of messages such as {'role': 'user', "
            "'content': 'hello'}"
        )
    try:
        texts = [tokenizer.apply_chat_template(list(chat), tokenize=False) for chat in chats]
    except Exception as error:  # templates are programs of their own
        raise InputsError(
            f"the chat template of {checkpoint.name} does not take these conversations: {error}"
        ) from error
    batch, notes = _tokens(
        tokenizer, texts, selection.max_length, checkpoint.name, special=False
    )  # the template has written them
    made = (
        f"{_kind(tokenizer, checkpoint)} with its chat template, each cut at "
        f"{selection.max_length} tokens"
    )
    return Inputs(
        batch,
        selection.described(f"{len(texts)} conversations"),
        made,
        notes + _unknown(tokenizer, batch),
    )


def _windows(
    tokenizer: Any, text: str, selection: Selection, name: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Consecutive windows of exactly ``max_length`` tokens (one shorter window where the text has
    no more), and a note on what was left out."""
    samples, max_length = selection.samples, selection.max_length
    special = _special(tokenizer, max_length)
    everything = samples is None or selection.shuffle is not None
    size = (
        len(text) if everything or samples is None else samples * max_length * 12
    )  # characters read; more only where tokens are longer
    while True:
        encoded = _in_windows(tokenizer, text[:size], max_length, special, name)
        full = [k for k, ids in enumerate(encoded["input_ids"]) if len(ids) == max_length]
        if (samples is not None and len(full) >= samples) or size >= len(text):
            break
        size *= 4
    notes = []
    if samples is None and full and len(full) < len(encoded["input_ids"]):
        rest = len(encoded["input_ids"][-1]) - special
        notes.append(
            f"the last {rest} tokens of the text do not fill a window of {max_length} and were "
            "left out"
        )
    if selection.shuffle is not None:
        full = [full[k] for k in order(len(full), selection.shuffle)]
    keep = full[:samples] or [0]
    if not encoded["input_ids"][0]:
        raise InputsError(f"the text has no token for the tokenizer of {name}")
    return {
        key: torch.tensor([encoded[key][k] for k in keep])
        for key in tokenizer.model_input_names
        if key in encoded
    }, notes


def _special(tokenizer: Any, max_length: int) -> int:
    """How many special tokens a text gets; raises InputsError where no others would fit."""
    special = int(tokenizer.num_special_tokens_to_add())
    if special >= max_length:
        raise InputsError(
            f"max_length {max_length} leaves no room beside the tokenizer's {special} special "
            "tokens"
        )
    return special


def _in_windows(
    tokenizer: Any, text: str, max_length: int, special: int, name: str
) -> Mapping[str, list[Any]]:
    """Encode a text, window by window."""
    if getattr(tokenizer, "is_fast", False):
        return _encoded(
            tokenizer,
            text,
            name,
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
        )
    ids = _encoded(tokenizer, text, name, add_special_tokens=False)[
        "input_ids"
    ]  # written in Python, they return no windows
    room = max_length - special
    with quiet():
        windows = [
            tokenizer.prepare_for_model(ids[start : start + room])
            for start in range(0, max(1, len(ids)), room)
        ]
    return {key: [window[key] for window in windows] for key in windows[0]}


def _encoded(tokenizer: Any, text: str | list[str], name: str, **options: Any) -> Any:
    """Encode text; raises InputsError where the tokenizer fails."""
    try:
        with quiet():
            return tokenizer(text, **options)
    except Exception as error:  # characters that are none, among others
        raise InputsError(
            f"the tokenizer of {name} does not take the text: {first_line(error)}"
        ) from error


def _tokens(
    tokenizer: Any, texts: Sequence[str], max_length: int, name: str, *, special: bool = True
) -> tuple[dict[str, Tensor], list[str]]:
    """The beginnings of texts, padded on the right, and notes on those that were cut or have no
    token."""
    if special:
        _special(tokenizer, max_length)
    lengths = [
        len(ids)
        for ids in _encoded(tokenizer, list(texts), name, add_special_tokens=special)["input_ids"]
    ]
    texts = [text for text, length in zip(texts, lengths, strict=True) if length]
    if not texts:
        raise InputsError(f"the texts have no token for the tokenizer of {name}")
    notes = (
        []
        if all(lengths)
        else [f"{lengths.count(0)} of {len(lengths)} texts have no token and were passed over"]
    )
    if tokenizer.pad_token is None:  # padded positions are masked, so any token serves
        tokenizer.pad_token = (
            tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        )
    tokenizer.padding_side = "right"
    masked = (
        True if len(set(lengths)) > 1 else None
    )  # padding is told from text by the mask alone, whatever the tokenizer returns by itself
    encoded = _encoded(
        tokenizer,
        list(texts),
        name,
        truncation=True,
        max_length=max_length,
        padding=True,
        return_tensors="pt",
        add_special_tokens=special,
        return_attention_mask=masked,
    )
    return {
        key: tensor for key, tensor in encoded.items() if isinstance(tensor, Tensor)
    }, notes + _cut(lengths, max_length)


def _cut(lengths: Sequence[int], max_length: int) -> list[str]:
    """A note on texts that are longer than a sample."""
    longer = sum(length > max_length for length in lengths)
    return (
        [
            f"{longer} of {len(lengths)} texts: only the first {max_length} tokens were taken "
            f"(max_length) of up to {max(lengths)}"
        ]
        if longer
        else []
    )


def _unknown(tokenizer: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """A note where most tokens are the one that stands for what a tokenizer does not know."""
    unknown, ids = tokenizer.unk_token_id, batch["input_ids"]
    if unknown is None or unknown in (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
    ):
        return []
    special = torch.tensor(sorted({int(i) for i in tokenizer.all_special_ids} - {unknown}))
    words, lost = ~torch.isin(ids, special.to(ids.dtype)), ids == unknown
    strange = int((lost.sum(-1) > UNKNOWN * words.sum(-1)).sum())
    if not strange:
        return []
    share = float(lost.sum() / words.sum().clamp_min(1))
    return [
        f"most tokens of {strange} of {len(ids)} samples ({share:.0%} of all) are "
        f"{tokenizer.unk_token}, which stands for what the tokenizer "
        "does not know; give data in the model's language"
    ]
