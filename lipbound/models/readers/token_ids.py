"""Texts that are tokens already: lists, tensors and arrays of token numbers, and tokenised
datasets."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.readers.positions import text_config


class TokenizedText(NamedTuple):
    """The tokens of one text, padding at both ends taken away; ``kept`` is False for tokens in
    between that are masked."""

    ids: list[int]
    kept: list[bool]


def tokens_of(value: Any) -> TokenizedText | None:
    """The tokens that a list, a tensor or an array of whole numbers, or a row of a tokenised
    dataset, stands for; None for anything else."""
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
    """The tokens of each sample, where data in memory is token numbers: one list, tensor or array
    of them, or several."""
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim == 0 or not _integer(data):
            return None
        data = [data] if data.ndim == 1 else list(data)
    elif not isinstance(data, list | tuple) or not data or isinstance(data[0], str):
        return None
    elif _whole(data) is not None:
        data = [data]
    rows = [item for item in data if not isinstance(item, list | tuple) or len(item)]
    found = [
        tokens_of(item) if isinstance(item, list | tuple | Tensor | np.ndarray) else None
        for item in rows
    ]
    if not found or any(one is None for one in found):
        return None
    blank = [TokenizedText([], [])] * (len(data) - len(rows))
    return [one for one in found if one is not None] + blank


def batch_of(
    rows: Sequence[TokenizedText], checkpoint: Checkpoint, max_length: int
) -> dict[str, Tensor]:
    """``input_ids``, cut at ``max_length`` and padded on the right, and an ``attention_mask`` that
    says where."""
    length = min(max_length, max(len(row.ids) for row in rows))
    config = text_config(checkpoint.model)
    pad = getattr(config, "pad_token_id", None)
    ids = torch.full(
        (len(rows), length),
        pad
        if isinstance(pad, int) and 0 <= pad < (getattr(config, "vocab_size", None) or 0)
        else 0,
    )
    mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for k, row in enumerate(rows):
        count = min(length, len(row.ids))
        ids[k, :count], mask[k, :count] = (
            torch.tensor(row.ids[:count]),
            torch.tensor(row.kept[:count], dtype=torch.int64),
        )
    return {"input_ids": ids, "attention_mask": mask}


def _integer(data: Tensor | np.ndarray) -> bool:
    if isinstance(data, Tensor):
        return not data.is_floating_point() and not data.is_complex() and data.dtype != torch.bool
    return data.dtype.kind in "iu"


def _whole(value: Any) -> list[int] | None:
    """A row of whole numbers as a list, or None."""
    if isinstance(value, Tensor | np.ndarray):
        return [int(v) for v in value.tolist()] if value.ndim == 1 and _integer(value) else None
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in value):
        return None
    return [int(v) for v in value] if all(abs(int(v)) < 2**63 for v in value) else None
