"""Inputs that are ready for the model: named tensors, read, checked, and remarked on if odd."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict, IterableDatasetDict
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from lipbound.attention.scoring import zero_one
from lipbound.errors import InputsError, shown
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.quiet import explained
from lipbound.models.readers.files import there
from lipbound.models.readers.reader import Selection

TOWERS = (
    ("text_config", "input_ids", "text"),
    ("vision_config", "pixel_values", "images"),
    ("audio_config", "input_features", "sound"),
)
"""Parts of configurations, the input of the tower that each is of, and what that takes."""
TEXT_TOWERS = ("text_model", "text_encoder", "language_model", "text_branch")
"""Names of the part of a model of several towers that reads text."""
FINITE = ("pixel_values", "inputs_embeds", "input_features", "input_values")
"""Inputs that are numbers."""
SAMPLES = "tensors of (samples, ...) with at least one sample"
ENDS = ("eos_token_id", "bos_token_id", "sep_token_id", "cls_token_id")
"""Tokens that may begin or end a text."""


def is_ready(data: Any) -> bool:
    """Return whether data are ready inputs: a mapping, or the name of a .safetensors file."""
    if isinstance(data, str | Path):
        return str(data).endswith(".safetensors")
    return isinstance(data, Mapping) and not isinstance(data, DatasetDict | IterableDatasetDict)


def ready_inputs(
    data: Mapping[str, Any] | str | Path, checkpoint: Checkpoint, selection: Selection
) -> Inputs:
    """Return the tensors that a checkpoint's model takes, and settings of its forward pass.

    Args:
        data: tensors, arrays or nested lists by name, and settings that are True or False; or a
            .safetensors file of tensors.
        checkpoint: whose model they are for.
        selection: which samples are wanted.

    Returns:
        Tensors (samples, ...) by name, with notes on what was left out.

    Raises:
        InputsError: they are no such tensors, disagree about the number of samples, have numbers
            that the model does not take, or what the model is about is not among them; or a split
            or a column was named.
    """
    selection.refuse_table("ready inputs have")
    given, description = _read_tensors(data)
    kind, shared = type(checkpoint.model).__name__, {}
    least, samples = 2, next((len(t) for t in given.values() if t.ndim > 1), 0)
    if not isinstance(checkpoint.model, PreTrainedModel):  # takes numbers, times, places
        least = 1
    elif checkpoint.main_input in given:  # patches of one sample may be packed
        samples = len(given[checkpoint.main_input]) if given[checkpoint.main_input].ndim else 0
    if least == 1 or samples == 1:
        apart = [name for name, t in given.items() if not t.ndim or len(t) > samples > 0]
        shared = {name: given.pop(name) for name in apart}
    wrong = [name for name, t in given.items() if t.ndim < least or not len(t)]
    if wrong or not given:
        has = f"{wrong[0]} has shape {tuple(given[wrong[0]].shape)}" if wrong else "there are none"
        raise InputsError(f"ready inputs must be named {SAMPLES}; {has}")
    if len({len(t) for t in given.values()}) > 1:
        lengths = ", ".join(f"{name} {len(t)}" for name, t in given.items())
        raise InputsError(f"ready inputs disagree about the number of samples: {lengths}")
    names = _taken(checkpoint)
    main = checkpoint.main_input
    check_towers(checkpoint, given)
    others = {"inputs_embeds"} & names
    if least == 1 and checkpoint.optional(main):
        others = names
    if main not in given and not others & given.keys():
        raise InputsError(
            f"ready inputs of {kind} must have {main}; given are {', '.join(map(str, given))}"
        )
    tensors = {name: t for name, t in given.items() if not names or name in names}
    left_out = [name for name in given if name not in tensors]
    notes = [f"{name} is not an input of {kind} and was left out" for name in left_out]
    _check_images(checkpoint, tensors)
    items = data.items() if isinstance(data, Mapping) else ()
    options: dict[str, Any] = {str(name): value for name, value in items if isinstance(value, bool)}
    if options and (unknown := options.keys() - names):
        raise InputsError(
            f"{min(unknown)} is no setting of {kind}'s forward pass; leave it out, or give tensors "
            "of (samples, ...)"
        )
    for name, t in sorted(shared.items()):
        options[name] = t
        notes.append(f"{name}, of shape {tuple(t.shape)}, is given to {kind} whole with any sample")
    described = selection.described(description)
    return Inputs(selection.drawn(tensors), described, notes=notes, options=options)


def _read_tensors(data: Mapping[str, Any] | str | Path) -> tuple[dict[str, Tensor], str]:
    if isinstance(data, Mapping):
        given = {k: v for k, v in data.items() if v is not None and not isinstance(v, bool)}
        return {name: _tensor(name, value) for name, value in given.items()}, "ready model inputs"
    path = there(data)
    if path is None or not path.is_file():
        raise InputsError(f"there is no file {data}")
    with explained(InputsError, f"{path} is not a readable safetensors file: "):
        return load_file(path), path.name


def _tensor(name: object, value: Any) -> Tensor:
    if not isinstance(name, str):
        raise InputsError(f"ready inputs must be named {SAMPLES}; a name is {shown(name)}")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputsError(
            f"ready inputs must be named {SAMPLES}; {name} is {shown(value)}"
        ) from error


def _taken(checkpoint: Checkpoint) -> set[str]:
    """Return the names of what the model's forward takes; none where they cannot be told."""
    names = set(checkpoint.accepted)
    return names if checkpoint.main_input in names else set()


def text_part(config: Any) -> Any:
    """Return the part of a configuration that is about text, or all of it."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):  # several are about text
        return config


def _has_table(model: Any) -> bool:
    """Return whether a model looks tokens up in one table, rather than in one of its towers."""
    try:
        model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return False
    return True


def declared_positions(config: Any) -> int | None:
    """Return the longest text in tokens that the text part of a configuration declares, or None."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is None or limit < 0:  # below zero is XLNet's word for none
        return None
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, Mapping) and rope.get("rope_type") == "dynamic":
        limit *= float(rope.get("factor") or 1)  # it is that from which rotary tables grow
    return int(limit)


def positions(checkpoint: Checkpoint) -> int | None:
    """Return the longest input of a text model in tokens, or None where it sets no limit."""
    limit = declared_positions(text_part(checkpoint.config))
    embeddings = getattr(getattr(checkpoint.model, "base_model", None), "embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    if limit is None or not padding or not hasattr(embeddings, "position_embeddings"):
        return limit
    return limit - int(padding) - 1  # RoBERTa's positions start behind the padding index


def check_length(checkpoint: Checkpoint, count: int, said: str = "max_length {} exceeds") -> None:
    """Check that texts of so many tokens are no longer than the model allows.

    Args:
        checkpoint: with the model.
        count: of tokens.
        said: the beginning of the message, with a place for the number.

    Raises:
        InputsError: they are.
    """
    limit = positions(checkpoint)
    if limit is not None and count > limit:
        raise InputsError(
            f"{said.format(count)} the {limit} positions of {checkpoint.name}; give at most {limit}"
        )


def check_tokens(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    """Check that token numbers are whole, (samples, N), and in the model's vocabulary.

    Args:
        checkpoint: with the model.
        batch: its inputs by name.

    Raises:
        InputsError: they are not, are more than the model's positions, or their mask or types do
            not fit them.
    """
    ids = batch.get("input_ids")
    if ids is None:
        return
    shape, config = tuple(ids.shape), text_part(checkpoint.config)
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputsError(
            f"input_ids is of dtype {str(ids.dtype).removeprefix('torch.')}; token numbers must "
            "be whole (int64)"
        )
    if ids.ndim != 2 or not ids.shape[1]:
        raise InputsError(
            f"input_ids has shape {shape}; it must be (samples, tokens) with at least one token"
        )
    if checkpoint.modality == "text":
        check_length(checkpoint, shape[1], "inputs of {} tokens exceed")
    towers = (getattr(checkpoint.model, name, None) for name in TEXT_TOWERS)
    models = [model for model in (checkpoint.model, *towers) if _has_table(model)]
    table = models[0].get_input_embeddings() if models else None
    known = getattr(table, "num_embeddings", None) or getattr(config, "vocab_size", None)
    types = getattr(config, "type_vocab_size", None)
    for name, count, what, hint in (
        ("input_ids", known, "tokens", "are they of its tokenizer?"),
        ("token_type_ids", types, "types", "leave them out for type 0"),
    ):
        count = count if isinstance(count, int) else 0
        low, high = (int(end) for end in batch[name].aminmax()) if name in batch else (0, 0)
        if low < 0 or 0 < count <= high:
            limit = f"{checkpoint.name} knows {what} 0 to {count - 1}; " if count else ""
            number = low if low < 0 else high
            raise InputsError(f"{name} has the number {number}; {limit}{hint}")
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


def add_decoder_inputs(checkpoint: Checkpoint, inputs: Inputs) -> None:
    """Give the decoder of an encoder-decoder the encoder's tokens, shifted by one, and tell it.

    Where the inputs have tokens of its own, or the configuration names no first token, they stay.

    Raises:
        InputsError: the encoder reads no tokens, and the decoder was given none.
    """
    config, batch = checkpoint.config, inputs.batch
    start = getattr(config, "decoder_start_token_id", None)
    needed = "decoder_input_ids" in _taken(checkpoint) and "decoder_inputs_embeds" not in batch
    if not needed or "decoder_input_ids" in batch or start is None:
        return
    if "input_ids" not in batch:
        if getattr(config, "is_encoder_decoder", False) and "inputs_embeds" not in batch:
            raise InputsError(
                f"{type(checkpoint.model).__name__} has a decoder that reads tokens, and none are "
                f"given beside {', '.join(batch)}; give ready inputs with decoder_input_ids, such "
                "as the transcript"
            )
        return
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    batch["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)
    if "decoder_attention_mask" in _taken(checkpoint):
        batch["decoder_attention_mask"] = torch.cat([mask[:, :1], mask[:, :-1]], 1)
    inputs.notes.append(
        "the decoder reads the encoder's tokens, shifted by one as in training (give others as "
        "ready inputs, decoder_input_ids)"
    )


def check_towers(checkpoint: Checkpoint, given: Collection[str]) -> None:
    """Check that a model of several towers, all of which always run, has the input of each.

    Raises:
        InputsError: it lacks that of one.
    """
    model, names = checkpoint.model, _taken(checkpoint)
    towers = {
        name: words
        for part, name, words in TOWERS
        if getattr(checkpoint.config, part, None) is not None and name in names
    }
    missing = [name for name in towers if name not in given]
    compared = hasattr(model, "logit_scale")  # CLIP and its kin, of which SigLIP has a table
    if len(towers) > 1 and missing and (compared or not _has_table(model)):
        raise InputsError(
            f"{type(model).__name__} has towers of {' and '.join(towers.values())} and needs "
            f"{' and '.join(towers)}, but there is no {' and no '.join(missing)}; give a dict of "
            "ready inputs with all of them, or load one tower by a class of its own"
        )


def _check_images(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    """Check that numbers are finite, and images (samples, channels, height, width) numbers.

    Raises:
        InputsError: they are not, or of other channels than the model's.
    """
    for name in FINITE:
        if name in batch and not bool(torch.isfinite(batch[name]).all()):
            raise InputsError(
                f"{name} has NaN or infinite entries; the Jacobian is not defined there"
            )
    pixels = batch.get("pixel_values")
    if pixels is None:
        return
    if not pixels.is_floating_point():
        raise InputsError(
            f"pixel_values is of dtype {str(pixels.dtype).removeprefix('torch.')}; give the "
            "floating-point numbers that the image processor returns"
        )
    channels = getattr(checkpoint.config, "num_channels", None)
    if pixels.ndim == 4 and isinstance(channels, int) and pixels.shape[1] != channels:
        raise InputsError(
            f"pixel_values has shape {tuple(pixels.shape)}; {checkpoint.name} takes (samples, "
            f"{channels}, height, width)"
        )


def remarks(model: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Return sentences about samples that are the same, and those of `odd_masks`."""
    return _repeated(batch) + odd_masks(model, batch)


def odd_masks(model: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Return sentences about padding without a mask, and masks of 0 and 1 that are added."""
    return _unmasked(model, batch) + _added(batch)


def _repeated(batch: Mapping[str, Tensor]) -> list[str]:
    count = len(next(iter(batch.values())))
    first: dict[bytes, int] = {}
    again = [k for k in range(count) if first.setdefault(_sample_hash(batch, k), k) != k]
    if not again:
        return []
    listed = ", ".join(map(str, again[:5])) + (", ..." if len(again) > 5 else "")
    one = f"sample {listed} repeats an earlier one, and means count it again"
    several = f"samples {listed} repeat earlier ones, and means count them again"
    are, those = "is" if len(first) == 1 else "are", several if len(again) > 1 else one
    return [f"only {len(first)} of {count} samples {are} different: {those}"]


def _sample_hash(batch: Mapping[str, Tensor], sample: int) -> bytes:
    digest = hashlib.sha256()
    for tensor in batch.values():
        flat = tensor[sample].detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _unmasked(model: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence on padding tokens at an end of a sample that no mask marks."""
    ids, config = batch.get("input_ids"), text_part(getattr(model, "config", None))
    pad = getattr(config, "pad_token_id", None)
    masked = batch.get("attention_mask") is not None
    if masked or not isinstance(ids, Tensor) or ids.ndim != 2 or not isinstance(pad, int):
        return []
    is_pad = ids == pad
    trailing, leading = is_pad.flip(-1).cummin(-1).values.sum(-1), is_pad.cummin(-1).values.sum(-1)
    ends = [getattr(config, name, None) for name in ENDS]
    also_an_end = any(pad in end if isinstance(end, list | tuple) else pad == end for end in ends)
    found = int(((trailing >= (2 if also_an_end else 1)) | (leading >= 2)).sum())
    said = (
        f"{found} of {len(ids)} samples end or begin with the model's padding token ({pad}), and "
        "there is no attention_mask, so padding is measured as text; give the attention_mask that "
        "the tokenizer returns"
    )
    return [said] if found else []


def _added(batch: Mapping[str, Tensor]) -> list[str]:
    """Return sentences on masks over pairs of tokens that look as if they meant yes and no."""
    masks = {
        name: mask
        for name, mask in batch.items()
        if name.endswith("attention_mask") and isinstance(mask, Tensor) and mask.ndim == 4
    }
    return [
        f"{name} has 4 axes and holds the numbers 0 and 1, which are added to the scores and mask "
        "nothing; give a boolean mask, True where a token is seen, or 0 there and -inf elsewhere"
        for name, mask in masks.items()
        if mask.dtype != torch.bool and zero_one(mask)
    ]
