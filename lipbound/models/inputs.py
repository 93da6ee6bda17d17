"""Data -> model inputs: text through the checkpoint's tokenizer, images through its processor, or inputs that are ready."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lipbound.errors import CheckpointError, InputsError, name_or_none, shown, tell, whole
from lipbound.models.batch import Inputs
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.readers.files import is_sentence
from lipbound.models.readers.images import ImageReader
from lipbound.models.readers.positions import check_tokens
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.ready import check_images, is_ready, ready_inputs
from lipbound.models.readers.tables import no_table
from lipbound.models.readers.text import TextReader

__all__ = ["READERS", "Inputs", "prepare", "token_texts"]

DEFAULT_SAMPLES = 8
READERS: dict[str, Reader] = {reader.modality: reader for reader in (TextReader(), ImageReader())}
"""The reader of each modality."""


def prepare(
    checkpoint: Checkpoint,
    data: Any = None,
    *,
    samples: int = DEFAULT_SAMPLES,
    max_length: int = 128,
    split: str | None = None,
    column: str | None = None,
) -> Inputs:
    """The first ``samples`` samples of some data as inputs of a checkpoint.

    Args:
        checkpoint: what the inputs are for; its modality decides how data is read.
        data: None (a text of ours, or photographs from scikit-image), a hub dataset id ("ag_news", or with a configuration
            "wikitext:wikitext-2-raw-v1"), a text file (cut into consecutive windows of ``max_length`` tokens), a folder of images,
            a .parquet, .csv or .json table, a .safetensors file of ready inputs, a ``datasets.Dataset``, a list of strings, PIL
            images or conversations (each a list of messages ``{"role": ..., "content": ...}``, written out by the tokenizer's chat template), or a
            dict of ready tensors, or `Inputs` as this function returned them. Several words that name no file are themselves the text.
        samples: how many. Where there are fewer, all are used, and a `lipbound.errors.Notice` says so (not of data in memory, unless another number
            than the default was asked for).
        max_length: tokens per text, special tokens included.
        split: split of a hub dataset; its only split, else "test", "validation" or "train".
        column: column of a table; guessed from its usual names. A number, from 0, for a .csv file without a line of names.

    Returns:
        Tensors on the CPU whose first axis is the sample, with a description and a fingerprint. Texts of unequal length are padded on the right,
        and their ``attention_mask`` says where.

    Raises:
        InputsError: no such data, empty data, data of the wrong modality, a split or a column of what has none, text longer than the model's
            positions allow, tokens that are not in its vocabulary.
        CheckpointError: the checkpoint has no usable tokenizer or image processor.

    >>> from lipbound.models.checkpoints import load_checkpoint
    >>> inputs = prepare(load_checkpoint("builtin:gpt2"), ["Down the Rabbit-Hole", "The Pool of Tears"], max_length=3)
    >>> tuple(inputs.batch["input_ids"].shape), inputs.samples, inputs.description
    ((2, 3), 2, '2 given texts')
    """
    samples, max_length = whole("samples", samples, least=1, error=InputsError), whole("max_length", max_length, least=1, error=InputsError)
    split, column = name_or_none("split", split), name_or_none("column", column)
    if not isinstance(checkpoint, Checkpoint):
        raise InputsError(f"checkpoint is {shown(checkpoint)}; give what lipbound.load_checkpoint returns")
    if isinstance(data, str) and not data.strip():
        raise InputsError("data is empty; give a file, a folder, a hub dataset or a text, or leave it out for the default")
    if isinstance(data, Inputs):
        no_table(split, column, "ready inputs have")
        return replace(data, batch={name: tensor[:samples] for name, tensor in data.batch.items()}, notes=list(data.notes))
    inputs = _ready(checkpoint, data, samples, split, column) if is_ready(data) else _read(checkpoint, data, samples, max_length, split, column)
    check_tokens(checkpoint, inputs.batch)
    in_memory = (data is not None and not isinstance(data, str | Path)) or is_sentence(data)
    if inputs.samples < samples and not (in_memory and samples == DEFAULT_SAMPLES):
        inputs.notes.append(f"{samples} samples were asked for, and {inputs.description} gives only {inputs.samples}")
    for note in inputs.notes:
        tell(note)
    return inputs


def token_texts(checkpoint: Checkpoint, inputs: Inputs, sample: int = 0) -> list[str]:
    """The text of every token of a sample, padding left out; an empty list for images, and where there is no tokenizer.

    >>> from lipbound.models.checkpoints import load_checkpoint
    >>> checkpoint = load_checkpoint("builtin:minilm")
    >>> token_texts(checkpoint, prepare(checkpoint, ["the gulls"]))
    ['[CLS]', 'the', 'gu', '##lls', '[SEP]']
    """
    ids = inputs.batch.get("input_ids")
    if ids is None or checkpoint.source is None:
        return []
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError:
        return []  # ready inputs for a model that has none: tokens keep their numbers
    mask = inputs.batch.get("attention_mask")
    row = ids[sample] if mask is None else ids[sample][mask[sample].bool()]
    return [str(tokenizer.decode([one])) for one in row.tolist()]


def _ready(checkpoint: Checkpoint, data: Any, samples: int, split: str | None, column: str | None) -> Inputs:
    no_table(split, column, "ready inputs have")
    batch, description, notes = ready_inputs(data, checkpoint)
    check_images(checkpoint, batch)
    return Inputs({name: tensor[:samples] for name, tensor in batch.items()}, description, notes=notes)


def _read(checkpoint: Checkpoint, data: Any, samples: int, max_length: int, split: str | None, column: str | None) -> Inputs:
    reader = READERS.get(checkpoint.modality)
    if reader is None:
        raise InputsError(f"{checkpoint.name} takes {checkpoint.modality}, neither text nor images; give a dict of ready inputs")
    return reader.read(checkpoint, data, Selection(samples, max_length, split, column))
