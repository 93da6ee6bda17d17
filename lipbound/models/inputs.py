"""Data -> model inputs: text through the checkpoint's tokenizer, images through its processor, or inputs that are ready."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.datasets import Inputs
from lipbound.models.images import read_images
from lipbound.models.text import check_positions, read_text


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

    Raises:
        InputsError: no such data, empty data, data of the wrong modality, text longer than the model's positions allow.
    """
    if samples < 1:
        raise InputsError(f"samples is {samples}; at least one sample is needed")
    if isinstance(data, Mapping) or (isinstance(data, str | Path) and str(data).endswith(".safetensors")):
        batch, description = _ready(data)
        check_positions(checkpoint, batch)
        return Inputs({name: tensor[:samples] for name, tensor in batch.items()}, description)
    if checkpoint.modality == "text":
        return read_text(checkpoint, data, samples, max_length, split, column)
    if checkpoint.modality == "image":
        return read_images(checkpoint, data, samples, split, column)
    raise InputsError(f"{checkpoint.name} takes {checkpoint.modality}, neither text nor images; give a dict of ready inputs")


# -- ready inputs --------------------------------------------------------------------------------------------------------


def _ready(data: Mapping[str, Any] | str | Path) -> tuple[dict[str, Tensor], str]:
    if isinstance(data, Mapping):
        tensors, description = dict(data), "ready model inputs"
    else:
        path = Path(data)
        if not path.is_file():
            raise InputsError(f"there is no file {path}")
        try:
            tensors, description = load_file(path), path.name
        except SafetensorError as error:
            raise InputsError(f"{path} is not a readable safetensors file: {error}") from error
    wrong = {name: type(t).__name__ for name, t in tensors.items() if not isinstance(t, Tensor) or t.ndim < 2 or not len(t)}
    if not tensors or wrong:
        raise InputsError(f"ready inputs must be named tensors of (samples, ...) with at least one sample; {wrong or 'none'} given")
    lengths = {name: len(t) for name, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise InputsError(f"ready inputs disagree about the number of samples: {lengths}")
    return tensors, description
