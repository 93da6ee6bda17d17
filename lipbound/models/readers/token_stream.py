"""A text as one long row of tokens."""

from typing import Any

import torch
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import quiet
from lipbound.models.readers.text import TextReader
from lipbound.models.readers.token_ids import TokenizedText


def stream(
    checkpoint: Checkpoint,
    data: Any,
    count: int,
    *,
    split: str | None = None,
    column: str | None = None,
) -> tuple[Tensor, str]:
    """The first ``count`` tokens of a text, without special tokens, as one tensor (count,), and a
    description; data as for `prepare`.

    Rows of a table are tokenised one by one and follow each other.

    Raises:
        InputsError: no text, or less of it.
    """
    if checkpoint.modality != "text":
        raise InputsError(
            f"{checkpoint.name} takes "
            f"{'images' if checkpoint.modality == 'image' else checkpoint.modality}, not text"
        )
    found = TextReader().items(checkpoint, data, split, column)
    tokenizer: Any = None
    ids: list[int] = []
    for piece in found.items:
        if isinstance(piece, TokenizedText):
            ids += piece.ids
        elif piece is not None:
            tokenizer = tokenizer or checkpoint.tokenizer()
            with quiet():
                ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        if len(ids) >= count:
            return torch.tensor(ids[:count]), found.description
    raise InputsError(
        f"{found.description} has {len(ids)} tokens, and {count} are needed; give more text, "
        "fewer sequences or shorter ones"
    )
