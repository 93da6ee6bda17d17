"""How many tokens a text model has positions for."""

from collections.abc import Mapping

from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint


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
    """Raise InputsError where ready inputs of a text model are longer than it allows."""
    limit = positions(checkpoint) if checkpoint.modality == "text" else None
    length = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
    if limit is not None and length > limit:
        raise InputsError(f"inputs of {length} tokens exceed the {limit} positions of {checkpoint.name}; give at most {limit}")
