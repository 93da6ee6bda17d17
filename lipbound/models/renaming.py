"""Names of stored tensors that are not those of the model, though the tensors are its own."""

from collections.abc import Iterable, Iterator

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
)

WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and DataParallel put in front of the names of a state dict."""
HEADS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
"""Models with a head whose weights may be those of the table of embeddings, by their
configurations."""


def renames(stored: Iterable[str], config: PreTrainedConfig) -> dict[str, str]:
    """Stored names that have to change: old -> new.

    Prefixes of wrappers go, where all names have them. A table of embeddings that is stored under
    the name of the head that it is tied to, and under that alone, as
    ``safetensors.torch.save_model`` does, gets its own name.
    """
    new = {name: name for name in stored}
    while found := next(
        (one for one in WRAPPERS if new and all(name.startswith(one) for name in new.values())),
        None,
    ):
        new = {name: now.removeprefix(found) for name, now in new.items()}
    for head, table in _tied(config) if getattr(config, "tie_word_embeddings", False) else ():
        inside = table.partition(".")[2] or table  # as the model without its head calls it
        if not any(now == inside or now.endswith(f".{inside}") for now in new.values()):
            new = {name: table if now == head else now for name, now in new.items()}
    return {name: now for name, now in new.items() if now != name}


def _tied(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Weights of the models with a head, and which they are the same as."""
    for mapping in HEADS:
        tied = getattr(mapping.get(type(config), None), "_tied_weights_keys", None)
        yield from tied.items() if isinstance(tied, dict) else ()
