"""Data -> model inputs: text through the checkpoint's tokenizer, images through its processor, or
inputs that are ready."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lipbound.errors import (
    CheckpointError,
    InputsError,
    name_or_none,
    sample_count,
    shown,
    tell,
    whole,
)
from lipbound.models.batch import Inputs
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.readers.files import is_sentence
from lipbound.models.readers.images import ImageReader
from lipbound.models.readers.model_inputs import (
    check_images,
    check_tokens,
    check_towers,
    is_ready,
    options_of,
    ready_inputs,
    remarks,
)
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.tables import no_table, order
from lipbound.models.readers.text import TextReader

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
    """The first ``samples`` samples of some data as inputs of a checkpoint.

    Args:
        checkpoint: what the inputs are for; its modality decides how data is read.
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
            vocabulary.
        CheckpointError: the checkpoint has no usable tokenizer or image processor.

    >>> from lipbound.models.checkpoints import load_checkpoint
    >>> texts = ["Down the Rabbit-Hole", "The Pool of Tears"]
    >>> inputs = prepare(load_checkpoint("builtin:gpt2"), texts, max_length=3)
    >>> tuple(inputs.batch["input_ids"].shape), inputs.samples, inputs.description
    ((2, 3), 2, '2 given texts')
    """
    count, max_length = (
        sample_count(samples, InputsError),
        whole("max_length", max_length, least=1, error=InputsError),
    )
    shuffle = None if shuffle is None else whole("shuffle", shuffle, least=0, error=InputsError)
    split, column = name_or_none("split", split), name_or_none("column", column)
    if not isinstance(checkpoint, Checkpoint):
        raise InputsError(
            f"checkpoint is {shown(checkpoint)}; give what lipbound.load_checkpoint returns"
        )
    if isinstance(data, str) and not data.strip():
        raise InputsError(
            "data is empty; give a file, a folder, a hub dataset or a text, or leave it out for "
            "the default"
        )
    if isinstance(data, Inputs):
        no_table(split, column, "ready inputs have")
        first = slice(None) if count is None else slice(count)
        drawn = first if shuffle is None else order(data.samples, shuffle)[first]
        return replace(
            data,
            batch={name: tensor[drawn] for name, tensor in data.batch.items()},
            notes=list(data.notes),
        )
    selection = Selection(count, max_length, split, column, shuffle)
    inputs = (
        _ready(checkpoint, data, selection)
        if is_ready(data)
        else _read(checkpoint, data, selection)
    )
    check_tokens(checkpoint, inputs.batch)
    in_memory = (data is not None and not isinstance(data, str | Path)) or is_sentence(data)
    if (
        count is not None
        and inputs.samples < count
        and not (in_memory and count == DEFAULT_SAMPLES)
    ):
        inputs.notes.append(
            f"{count} samples were asked for, and {inputs.description} gives only {inputs.samples}"
        )
    inputs.notes += remarks(checkpoint.model, inputs.batch)
    for note in inputs.notes:
        tell(note)
    return inputs


def token_texts(checkpoint: Checkpoint, inputs: Inputs, sample: int = 0) -> list[str]:
    """The text of every token of a sample, padding left out; an empty list for images, and where
    there is no tokenizer.

    >>> from lipbound.models.checkpoints import load_checkpoint
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


def _ready(checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
    no_table(selection.split, selection.column, "ready inputs have")
    batch, description, notes = ready_inputs(data, checkpoint)
    check_images(checkpoint, batch)
    if selection.shuffle is not None:
        drawn = order(len(next(iter(batch.values()))), selection.shuffle)
        batch = {name: tensor[drawn] for name, tensor in batch.items()}
    batch = {name: tensor[: selection.samples] for name, tensor in batch.items()}
    return Inputs(
        batch, selection.described(description), notes=notes, options=options_of(data, checkpoint)
    )


def _read(checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
    check_towers(checkpoint, [checkpoint.main_input])
    reader = READERS.get(checkpoint.modality)
    if reader is None:
        raise InputsError(
            f"{checkpoint.name} takes {checkpoint.modality}, neither text nor images; give a "
            "dict of ready inputs"
        )
    return reader.read(checkpoint, data, selection)
