"""Sentences on odd inputs, of which numbers come out all the same, and may not mean what one takes
them for."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.scoring import zero_one
from lipbound.models.readers.positions import text_config


def remarks(model: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Sentences about samples that are the same, and those of `odd_masks`."""
    repeated = _repeated(batch)
    return ([] if repeated is None else [repeated]) + odd_masks(model, batch)


def odd_masks(model: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Sentences about padding that no mask tells of, and masks of 0 and 1 that are
    added to scores."""
    return [said for said in (_unmasked(model, batch), _added(batch)) if said is not None]


def _repeated(batch: Mapping[str, Tensor]) -> str | None:
    count = len(next(iter(batch.values())))
    first: dict[bytes, int] = {}
    again = []
    for k in range(count):
        digest = hashlib.sha256()
        for tensor in batch.values():
            digest.update(
                tensor[k].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        if first.setdefault(digest.digest(), k) != k:
            again.append(k)
    if not again:
        return None
    listed = ", ".join(map(str, again[:5])) + (", ..." if len(again) > 5 else "")
    those = (
        f"sample {listed} repeats an earlier one, and means count it"
        if len(again) == 1
        else f"samples {listed} repeat earlier ones, and means count them"
    )
    return (
        f"only {len(first)} of {count} samples {'is' if len(first) == 1 else 'are'} "
        f"different: {those} again"
    )


def _unmasked(model: Any, batch: Mapping[str, Tensor]) -> str | None:
    """Runs of the padding token at an end of a sample, where no mask says that they are padding."""
    ids, config = batch.get("input_ids"), text_config(model)
    pad = getattr(config, "pad_token_id", None)
    if (
        not isinstance(ids, Tensor)
        or ids.ndim != 2
        or batch.get("attention_mask") is not None
        or not isinstance(pad, int)
    ):
        return None
    is_pad = ids == pad
    trailing, leading = is_pad.flip(-1).cummin(-1).values.sum(-1), is_pad.cummin(-1).values.sum(-1)
    ends = {
        getattr(config, name, None)
        for name in ("eos_token_id", "bos_token_id", "sep_token_id", "cls_token_id")
    }
    ends = {
        one for entry in ends for one in (entry if isinstance(entry, list | tuple) else (entry,))
    }
    least = 2 if pad in ends else 1  # where it also ends a text, one is no padding
    found = int(((trailing >= least) | (leading >= 2)).sum())
    if not found:
        return None
    return (
        f"{found} of {len(ids)} samples end or begin with the model's padding token ({pad}), and "
        "there is no attention_mask, so padding is measured "
        "as text; give the attention_mask that the tokenizer returns"
    )


def _added(batch: Mapping[str, Tensor]) -> str | None:
    """A mask over pairs of tokens, in numbers that look as if they meant yes and no."""
    for name, mask in batch.items():
        if (
            name.endswith("attention_mask")
            and isinstance(mask, Tensor)
            and mask.ndim == 4
            and mask.dtype != torch.bool
            and zero_one(mask)
        ):
            return (
                f"{name} has 4 axes and holds the numbers 0 and 1, which are added to the scores "
                "and mask nothing; give a boolean mask, True where a "
                "token is seen, or 0 there and -inf elsewhere"
            )
    return None
