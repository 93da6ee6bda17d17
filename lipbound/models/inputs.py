"""Data -> model inputs: text through the checkpoint's tokenizer, images through its processor, or inputs that are ready."""

from typing import Any

from lipbound.errors import InputsError
from lipbound.models.batch import Inputs
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.readers.images import ImageReader
from lipbound.models.readers.positions import check_positions
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.ready import is_ready, ready_inputs
from lipbound.models.readers.text import TextReader

__all__ = ["READERS", "Inputs", "prepare"]

READERS: dict[str, Reader] = {reader.modality: reader for reader in (TextReader(), ImageReader())}
"""The reader of each modality."""


def prepare(
    checkpoint: Checkpoint,
    data: Any = None,
    *,
    samples: int = 8,
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
            dict of ready tensors.
        samples: how many; fewer are used where there are fewer.
        max_length: tokens per text, special tokens included.
        split: split of a hub dataset; its only split, else "test", "validation" or "train".
        column: column of a table; guessed from its usual names. A number, from 0, for a .csv file without a line of names.

    Returns:
        Tensors on the CPU whose first axis is the sample, with a description and a fingerprint. Texts of unequal length are padded on the right,
        and their ``attention_mask`` says where.

    Raises:
        InputsError: no such data, empty data, data of the wrong modality, text longer than the model's positions allow.
        CheckpointError: the checkpoint has no usable tokenizer or image processor.

    >>> from lipbound.models.checkpoints import load_checkpoint
    >>> inputs = prepare(load_checkpoint("builtin:gpt2"), ["Down the Rabbit-Hole", "The Pool of Tears"], max_length=3)
    >>> tuple(inputs.batch["input_ids"].shape), inputs.samples, inputs.description
    ((2, 3), 2, '2 given texts')
    """
    if samples < 1:
        raise InputsError(f"samples is {samples}; at least one sample is needed")
    if is_ready(data):
        batch, description = ready_inputs(data)
        check_positions(checkpoint, batch)
        return Inputs({name: tensor[:samples] for name, tensor in batch.items()}, description)
    reader = READERS.get(checkpoint.modality)
    if reader is None:
        raise InputsError(f"{checkpoint.name} takes {checkpoint.modality}, neither text nor images; give a dict of ready inputs")
    return reader.read(checkpoint, data, Selection(samples, max_length, split, column))
