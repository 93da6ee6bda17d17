"""What a text model can be given: how many tokens, and which."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint


def text_config(model: Any) -> Any:
    """The part of a model's configuration that is about text: of a model of several towers that of
    the text's."""
    return text_part(model.config)


def text_part(config: Any) -> Any:
    """The part of a configuration that is about text; all of it where there is no single one."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):  # several are about text
        return config


def several_towers(model: Any) -> bool:
    """Tell whether a model compares its towers with one another, or looks tokens up in one of
    several rather than in a table of its own."""
    if hasattr(model, "logit_scale"):  # CLIP and its kin, of which SigLIP has a table of tokens
        return True
    try:
        model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return True
    return False


def token_embedding(model: Any) -> nn.Module | None:
    """The table that token numbers are looked up in; None where it cannot be told."""
    for module in (
        model,
        *(
            getattr(model, name, None)
            for name in ("text_model", "text_encoder", "language_model", "text_branch")
        ),
    ):
        try:
            if module is not None:
                return module.get_input_embeddings()
        except (AttributeError, NotImplementedError):  # models of several towers have no single one
            continue
    return None


def declared_positions(config: Any) -> int | None:
    """The longest text in tokens that the text part of a configuration declares; None where it sets
    no limit."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is not None and limit < 0:  # XLNet's word for none
        return None
    rope = getattr(config, "rope_parameters", None)
    if limit is not None and isinstance(rope, Mapping) and rope.get("rope_type") == "dynamic":
        limit *= float(rope.get("factor") or 1)  # it is that from which rotary tables grow
    return None if limit is None else int(limit)


def positions(checkpoint: Checkpoint) -> int | None:
    """Longest input of a text model in tokens, or None where it sets no limit."""
    limit = declared_positions(text_config(checkpoint.model))
    padding = getattr(checkpoint.model.base_model, "embeddings", None)
    offset = (
        getattr(padding, "padding_idx", None) if hasattr(padding, "position_embeddings") else None
    )
    if limit is None or not offset:
        return limit
    return limit - int(offset) - 1  # RoBERTa's positions start behind the padding index


def check_length(checkpoint: Checkpoint, max_length: int) -> None:
    """Raise InputsError where texts of ``max_length`` tokens are longer than the model allows."""
    limit = positions(checkpoint)
    if limit is not None and max_length > limit:
        raise InputsError(
            f"max_length {max_length} exceeds the {limit} positions of {checkpoint.name}; give at "
            f"most {limit}"
        )


def check_positions(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    """Raise InputsError where ready inputs of a text model are longer than it allows."""
    limit = positions(checkpoint) if checkpoint.modality == "text" else None
    length = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
    if limit is not None and length > limit:
        raise InputsError(
            f"inputs of {length} tokens exceed the {limit} positions of {checkpoint.name}; give "
            f"at most {limit}"
        )


def check_tokens(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    """Raise InputsError unless token numbers are whole, (samples, N), and in the model's
    vocabulary, and the mask is of their shape."""
    ids = batch.get("input_ids")
    if ids is None:
        return
    shape = tuple(ids.shape)
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputsError(
            f"input_ids is of dtype {str(ids.dtype).removeprefix('torch.')}; token numbers must "
            "be whole (int64)"
        )
    if ids.ndim != 2 or not ids.shape[1]:
        raise InputsError(
            f"input_ids has shape {shape}; it must be (samples, tokens) with at least one token"
        )
    check_positions(checkpoint, batch)
    embedding = token_embedding(checkpoint.model)
    known = getattr(embedding, "num_embeddings", None) or getattr(
        text_config(checkpoint.model), "vocab_size", None
    )
    _check_range(
        "input_ids",
        ids,
        known if isinstance(known, int) else None,
        f"{checkpoint.name} knows tokens",
        "are they of its tokenizer?",
    )
    types = batch.get("token_type_ids")
    if types is not None:
        kinds = getattr(text_config(checkpoint.model), "type_vocab_size", None)
        _check_range(
            "token_type_ids",
            types,
            kinds or None,
            f"{checkpoint.name} knows types",
            "leave them out for type 0",
        )
    for name in ("attention_mask", "token_type_ids"):
        if name in batch and batch[name].ndim == 2 and tuple(batch[name].shape) != shape:
            raise InputsError(
                f"{name} has shape {tuple(batch[name].shape)} but input_ids {shape}; they must "
                "be the same"
            )
    mask = batch.get("attention_mask")
    if mask is not None and mask.ndim == 2 and not bool((mask != 0).any(-1).all()):
        raise InputsError(
            "attention_mask marks every token of a sample as padding; each sample needs at least "
            "one token"
        )


def _check_range(name: str, values: Tensor, count: int | None, known: str, hint: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or (count is not None and high >= count):
        limit = "" if count is None else f"{known} 0 to {count - 1}; "
        raise InputsError(f"{name} has the number {low if low < 0 else high}; {limit}{hint}")
