"""Prepare data as model inputs: texts, images, or inputs that are ready."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lipbound import errors
from lipbound.errors import CheckpointError, InputsError, name_or_none, tell
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.given_layers import GivenLayers, inputs_of
from lipbound.models.offload import without_weights
from lipbound.models.quiet import quiet
from lipbound.models.readers.files import is_sentence
from lipbound.models.readers.images import ImageReader
from lipbound.models.readers.model_inputs import (
    add_decoder_inputs,
    check_length,
    check_tokens,
    check_towers,
    declared_positions,
    is_ready,
    ready_inputs,
    remarks,
    text_part,
)
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.text import TextReader, given_tokens
from lipbound.models.sources.loaded_model import named_inputs

__all__ = ["READERS", "Inputs", "prepare", "token_texts"]

DEFAULT_SAMPLES = 8
READERS: dict[str, Reader] = {reader.modality: reader for reader in (TextReader(), ImageReader())}
"""The reader of each modality."""


def prepare(
    checkpoint: Checkpoint,
    data: Any = None,
    *,
    samples: int | str = DEFAULT_SAMPLES,
    max_length: int = 128,
    split: str | None = None,
    column: str | None = None,
    shuffle: int | None = None,
) -> Inputs:
    """Prepare the first samples of some data as inputs of a checkpoint.

    Args:
        checkpoint: of `load_checkpoint`; its modality decides how data is read.
        data: None (a story of ours, or photographs from scikit-image), a hub dataset id ("ag_news",
            or with a configuration "wikitext:wikitext-2-raw-v1"), a text file, a folder of .txt
            files or of images, a .parquet, .csv, .tsv or .json table (text files and tables also
            packed, as .gz), a folder that ``save_to_disk`` wrote, a .safetensors file of ready
            inputs, a ``datasets.Dataset``, a ``pandas.DataFrame`` or Series, a list of strings, of
            PIL images, of paths or of conversations (each a list of messages
            ``{"role": ..., "content": ...}``, written out by the tokenizer's chat template), token
            numbers (a list, a tensor or an array, or a list of them; or a column ``input_ids``), or
            a dict of ready tensors, with settings that are True or False, such as
            ``interpolate_pos_encoding``, or `Inputs` as this function returned them. Several words
            that name no file are themselves the text.
        samples: how many, or "all". Where there are fewer, all are used, and a
            `lipbound.errors.Notice` says so (not of data in memory, unless another number than the
            default was asked for).
        max_length: tokens per text, special tokens included. A text that is alone is cut into
            consecutive windows of so many tokens, each a sample; of several texts each is one
            sample, cut at so many tokens, which a `lipbound.errors.Notice` tells.
        split: split of a hub dataset; its only split, else "test", "validation" or "train".
        column: column of a table; guessed from its usual names. A number, from 0, for a .csv file
            without a line of names.
        shuffle: a seed; samples are then drawn from all of the data, in an order that depends on
            the seed and on how many there are. None for the first ones.

    Returns:
        Tensors on the CPU whose first axis is the sample, with a description and a fingerprint.
        Texts of unequal length are padded on the right, and their ``attention_mask`` says where.

    Raises:
        InputsError: no such data, empty data, data of the wrong modality, a split or a column of
            what has none, text longer than the model's positions allow, tokens that are not in its
            vocabulary. Without a usable tokenizer or image processor, CheckpointError.

    >>> from lipbound.models.loading import load_checkpoint
    >>> texts = ["Down the Rabbit-Hole", "The Pool of Tears"]
    >>> inputs = prepare(load_checkpoint("builtin:gpt2"), texts, max_length=3)
    >>> tuple(inputs.batch["input_ids"].shape), inputs.samples, inputs.description
    ((2, 3), 2, '2 given texts')
    """
    count = errors.sample_count(samples, InputsError)
    max_length = errors.whole("max_length", max_length, least=1, error=InputsError)
    if shuffle is not None:
        shuffle = errors.whole("shuffle", shuffle, least=0, error=InputsError)
    split, column = name_or_none("split", split), name_or_none("column", column)
    if not isinstance(checkpoint, Checkpoint):
        raise InputsError(
            f"checkpoint is {errors.shown(checkpoint)}; give what lipbound.load_checkpoint returns"
        )
    if isinstance(data, str) and not data.strip():
        raise InputsError(
            "data is empty; give a file, a folder, a hub dataset or a text, or leave it out for "
            "the default"
        )
    selection = Selection(count, max_length, split, column, shuffle)
    if isinstance(checkpoint.model, GivenLayers):
        selection.refuse_table("layers have")
        return inputs_of(checkpoint.model, data, count)
    if isinstance(data, Inputs):
        selection.refuse_table("ready inputs have")
        return replace(data, batch=selection.drawn(data.batch), notes=list(data.notes))
    if not isinstance(checkpoint.model, PreTrainedModel) and data is not None:
        parts = data if isinstance(data, list | tuple) else [data]
        tensors = isinstance(data, Mapping) or any(isinstance(one, Tensor) for one in parts)
        if tensors or checkpoint.modality not in READERS:
            data = named_inputs(checkpoint.model, data)
    if is_ready(data):
        inputs = ready_inputs(data, checkpoint, selection)
    else:
        check_towers(checkpoint, [checkpoint.main_input])
        if checkpoint.modality not in READERS:
            raise InputsError(
                f"{checkpoint.name} takes {checkpoint.modality}, neither text nor images; give a "
                "dict of ready inputs"
            )
        inputs = READERS[checkpoint.modality].read(checkpoint, data, selection)
    add_decoder_inputs(checkpoint, inputs)
    check_tokens(checkpoint, inputs.batch)
    in_memory = (data is not None and not isinstance(data, str | Path)) or is_sentence(data)
    by_default = in_memory and count == DEFAULT_SAMPLES
    if count is not None and inputs.samples < count and not by_default:
        inputs.notes.append(
            f"{count} samples were asked for, and {inputs.description} gives only {inputs.samples}"
        )
    inputs.notes += remarks(checkpoint.model, inputs.batch)
    for note in inputs.notes:
        tell(note)
    return inputs


def refuse_long(name: str, config: PreTrainedConfig, data: Any, max_length: int) -> None:
    """Refuse texts that are longer than a model allows before its weights are read.

    `prepare` does the same when they are.

    Args:
        name: of the model, for messages.
        config: of the model. What it declares must be too short for the model to be looked at.
        data, max_length: as of `prepare`.

    Raises:
        InputsError: the model takes text, which the data may be, and has too few positions; or it
            has several towers, all of which need inputs.
    """
    if isinstance(data, Inputs) or is_ready(data) or given_tokens(data) is not None:
        return
    declared = declared_positions(text_part(config))
    if declared is None or max_length <= declared:
        return
    try:
        with quiet():
            model = without_weights(deepcopy(config))
    except Exception:  # what cannot be built is told when it is loaded
        return
    checkpoint = Checkpoint(model, name, "", None)
    if checkpoint.modality == TextReader.modality:
        check_towers(checkpoint, [checkpoint.main_input])
        check_length(checkpoint, max_length)


def token_texts(checkpoint: Checkpoint, inputs: Inputs, sample: int = 0) -> list[str]:
    """Decode every token of a sample, padding left out.

    Args:
        checkpoint: with the tokenizer.
        inputs: of `prepare`.
        sample: the number of the sample.

    Returns:
        The texts; none for images, and where there is no tokenizer.

    >>> from lipbound.models.loading import load_checkpoint
    >>> checkpoint = load_checkpoint("builtin:minilm")
    >>> token_texts(checkpoint, prepare(checkpoint, ["the gulls"]))
    ['[CLS]', 'the', 'gu', '##lls', '[SEP]']
    """
    ids = inputs.batch.get("input_ids")
    if ids is None or (checkpoint.source is None and checkpoint.tokenizer_from is None):
        return []
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError:
        return []  # ready inputs for a model that has none: tokens keep their numbers
    mask = inputs.batch.get("attention_mask")
    row = ids[sample] if mask is None else ids[sample][mask[sample].bool()]
    return [str(tokenizer.decode([one])) for one in row.tolist()]
