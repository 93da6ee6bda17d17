"""Texts that are tokens already: lists, tensors and arrays of token numbers, tokenised datasets."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.readers.model_inputs import text_config


class TokenizedText(NamedTuple):
    """The tokens of one text without the padding at its ends; ``kept`` is False where masked."""

    ids: list[int]
    kept: list[bool]


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
        raise InputsError(
            f"a row has {len(ids)} input_ids and an attention_mask of {len(kept)}; they must be "
            "of the same length"
        )
    if True not in kept:
        return TokenizedText([], [])
    first, last = kept.index(True), len(kept) - kept[::-1].index(True)
    return TokenizedText(ids[first:last], kept[first:last])


def given_tokens(data: Any) -> list[TokenizedText] | None:
    """Return the tokens of each sample of one row, or several, of token numbers; else None."""
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim == 0 or not _integer(data):
            return None
        data = [data] if data.ndim == 1 else list(data)
    elif not isinstance(data, list | tuple) or not data or isinstance(data[0], str):
        return None
    elif _whole(data) is not None:
        data = [data]
    rows = [item for item in data if not isinstance(item, list | tuple) or len(item)]
    if not all(isinstance(item, list | tuple | Tensor | np.ndarray) for item in rows):
        return None
    found = [tokens for item in rows if (tokens := tokens_of(item)) is not None]
    if not found or len(found) < len(rows):
        return None
    return found + [TokenizedText([], [])] * (len(data) - len(rows))


def batch_of(
    rows: Sequence[TokenizedText], checkpoint: Checkpoint, max_length: int
) -> dict[str, Tensor]:
    """Return ``input_ids``, cut and padded on the right, and the ``attention_mask`` that says so.

    Both are int64, (samples, N) with N at most ``max_length``.
    """
    length = min(max_length, max(len(row.ids) for row in rows))
    config = text_config(checkpoint.model)
    pad, known = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None) or 0
    pad = pad if isinstance(pad, int) and 0 <= pad < known else 0
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros_like(ids)
    for k, row in enumerate(rows):
        count = min(length, len(row.ids))
        ids[k, :count] = torch.tensor(row.ids[:count])
        mask[k, :count] = torch.tensor(row.kept[:count])
    return {"input_ids": ids, "attention_mask": mask}


def _integer(data: Tensor | np.ndarray) -> bool:
    if isinstance(data, Tensor):
        return not data.is_floating_point() and not data.is_complex() and data.dtype != torch.bool
    return data.dtype.kind in "iu"


def _whole(value: Any) -> list[int] | None:
    """Return a row of whole numbers as a list, or None."""
    if isinstance(value, Tensor | np.ndarray):
        return [int(v) for v in value.tolist()] if value.ndim == 1 and _integer(value) else None
    if not isinstance(value, list | tuple) or not value:
        return None
    numbers = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in value)
    return [int(v) for v in value] if numbers and all(abs(int(v)) < 2**63 for v in value) else None
