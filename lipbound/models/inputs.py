"""Prepare data as model inputs: texts, images, or inputs that are ready.

Ready inputs are named tensors, and settings of the forward pass. All inputs are checked against the
model, and remarked on if odd.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from lipbound import errors
from lipbound.errors import CheckpointError, InputsError, knows_options, name_or_none, shown, tell
from lipbound.models.checkpoint import Checkpoint, Inputs, named_inputs, text_part, unmarked_padding
from lipbound.models.loading import SAMPLE, GivenLayers
from lipbound.models.other_libraries import explained
from lipbound.models.readers import DEFAULT_LENGTH, READERS, Selection, is_sentence, there
from lipbound.models.weight_files import extremes

DEFAULT_SAMPLES = 8
FINITE = {"pixel_values", "inputs_embeds", "input_features", "input_values"}
"""Inputs that are numbers."""
SAMPLES = "tensors of (samples, ...), all with as many samples, at least one"


@knows_options
def prepare(
    checkpoint: Checkpoint,
    data: Any = None,
    *,
    samples: int | str = DEFAULT_SAMPLES,
    max_length: int = DEFAULT_LENGTH,
    split: str | None = None,
    column: str | None = None,
    shuffle: int | None = None,
) -> Inputs:
    """Prepare the first samples of some data as inputs of a checkpoint.

    Args:
        checkpoint: of `load_checkpoint`; its modality decides how data is read.
        data: None (a story of ours, or photographs that come with it), a hub dataset id ("ag_news",
            or with a configuration "wikitext:wikitext-2-raw-v1"), a text file, a folder of .txt
            files or of images, a .parquet, .csv, .tsv or .json table (text files and tables also
            packed, as .gz), a folder that ``save_to_disk`` wrote, a .safetensors file of ready
            inputs, a ``datasets.Dataset``, a ``pandas.DataFrame`` or Series, a list of strings, of
            PIL images or of paths, or a dict of ready tensors (token numbers as ``input_ids``),
            with settings that are True or False, such as ``interpolate_pos_encoding``, a tensor
            that is the model's main input, or `Inputs` as this function returned them. Several
            words that name no file are themselves the text.
        samples: how many, or "all". Where there are fewer, all are used, and a
            `lipbound.errors.Notice` says so (not of data in memory, unless another number than the
            default was asked for).
        max_length: tokens per text, special tokens included. A text that is alone is cut into
            consecutive windows of so many tokens, each a sample; of several texts each is one
            sample, cut at so many tokens, which a `lipbound.errors.Notice` tells. The default is
            what the model has positions for, where that is less, and a notice says so.
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
        raise InputsError(f"checkpoint is {errors.shown(checkpoint)}; give that of load_checkpoint")
    if isinstance(data, str) and not data.strip():
        raise InputsError("data is empty; give a file, a folder, a hub dataset or a text, or none")
    return _prepared(checkpoint, data, Selection(count, max_length, split, column, shuffle))


def _prepared(checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
    """Return what `prepare` does, of checked arguments."""
    count = selection.samples
    if isinstance(checkpoint.model, GivenLayers):
        selection.refuse_table("layers")
        if data is not None:
            raise InputsError("layers bring their own inputs; leave out data")
        numbers = torch.arange(checkpoint.model.samples[0])[:count]
        return Inputs({SAMPLE: numbers}, "inputs of the layers")
    if isinstance(data, Inputs):
        selection.refuse_table("ready inputs")
        return replace(data, batch=selection.drawn(data.batch), notes=list(data.notes))
    reader = READERS.get(checkpoint.modality)
    if not isinstance(checkpoint.model, PreTrainedModel) and data is not None:
        parts = data if isinstance(data, list | tuple) else [data]
        if reader is None or any(isinstance(one, Mapping | Tensor) for one in parts):
            data = named_inputs(checkpoint.model, data)
    data = {checkpoint.main_input: data} if isinstance(data, Tensor) else data
    file = isinstance(data, str | Path) and str(data).endswith(".safetensors")
    splits = hasattr(data, "column_names")  # a DatasetDict, which is a mapping as well
    if file or (isinstance(data, Mapping) and not splits):
        inputs = ready_inputs(data, checkpoint, selection)
    elif reader is None:
        raise InputsError(f"{checkpoint.name} takes {checkpoint.modality}; give inputs=")
    else:
        inputs = reader.read(checkpoint, data, selection)
    add_decoder_inputs(checkpoint, inputs)
    check_tokens(checkpoint, inputs.batch)
    in_memory = (data is not None and not isinstance(data, str | Path)) or is_sentence(data)
    by_default = in_memory and count == DEFAULT_SAMPLES
    if count is not None and inputs.samples < count and not by_default:
        gives = f"{inputs.description} gives only {inputs.samples}"
        inputs.notes.append(f"{count} samples were asked for, and {gives}")
    inputs.notes += _repeated(inputs.batch) + unmarked_padding(checkpoint.model, inputs.batch)
    tell(*inputs.notes)
    return inputs


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


def ready_inputs(data: Any, checkpoint: Checkpoint, selection: Selection) -> Inputs:
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
    selection.refuse_table("ready inputs")
    given, description = _read_tensors(data)
    kind, main, names = type(checkpoint.model).__name__, checkpoint.main_input, checkpoint.accepted
    known = isinstance(checkpoint.model, PreTrainedModel)
    least, shared = 2 if known else 1, {}  # other modules take numbers, times, places
    samples = next((len(t) for t in given.values() if t.ndim > 1), 0)
    if known and main in given:  # patches of one sample may be packed
        samples = len(given[main]) if given[main].ndim else 0
    turned = known and given.get("position_ids", torch.zeros(0)).shape[1:-1] == (samples,)
    if turned:
        given["position_ids"] = given["position_ids"].transpose(0, 1)
    if not known or samples == 1:
        apart = [name for name, t in given.items() if not t.ndim or len(t) > samples > 0]
        shared = {name: given.pop(name) for name in sorted(apart)}
    wrong = [name for name, t in given.items() if t.ndim < least or not len(t)]
    if wrong or not given or len({len(t) for t in given.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
        raise InputsError(f"ready inputs must be named {SAMPLES}; given are {shapes or 'none'}")
    # other modules may make it of their tokens
    names = names if known or not names else [*names, "attention_mask"]
    tensors = {name: t for name, t in given.items() if not names or name in names}
    if not tensors:
        raise InputsError(f"ready inputs of {kind} must have {main}; given are {', '.join(given)}")
    for name in FINITE & tensors.keys():
        whole = name == "pixel_values" and not tensors[name].is_floating_point()
        if whole or not bool(extremes(tensors[name]).isfinite().all()):
            raise InputsError(f"{name} ({tensors[name].dtype}) must be floating-point and finite")
    notes = [f"{n} is not an input of {kind} and was left out" for n in given if n not in tensors]
    items = data.items() if isinstance(data, Mapping) else ()
    options: dict[str, Any] = {str(name): value for name, value in items if isinstance(value, bool)}
    if unknown := options.keys() - names:
        raise InputsError(f"{min(unknown)} is no setting of {kind}'s forward pass; leave it out")
    notes += [
        f"{name}, of shape {tuple(t.shape)}, is given to {kind} whole with any sample"
        for name, t in shared.items()
    ]
    found = Inputs(selection.drawn(tensors), selection.described(description), notes=notes)
    return replace(found, options=options | shared, has_axes=turned)


def _read_tensors(data: Mapping[str, Any] | str | Path) -> tuple[dict[str, Tensor], str]:
    if not isinstance(data, Mapping):
        path = there(data)
        if path is None or not path.is_file():
            raise InputsError(f"there is no file {data}")
        with explained(InputsError, f"{path} is not a readable safetensors file: "):
            return load_file(path), path.name
    given = {}
    for name, value in data.items():
        if value is not None and not isinstance(value, bool):
            before = f"ready inputs must be named {SAMPLES}; {shown(name)} is {shown(value)}"
            if not isinstance(name, str):
                raise InputsError(before)
            with explained(InputsError, f"{before}: "):
                given[name] = torch.as_tensor(value)
    return given, "ready model inputs"


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
    if ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 2 or not shape[1]:
        must = "it must be whole numbers (int64), (samples, tokens)"
        raise InputsError(f"input_ids is of {ids.dtype} and of shape {shape}; {must}")
    if checkpoint.modality == "text":
        checkpoint.check_length(shape[1], "inputs of {} tokens exceed")
    low, high = (int(end) for end in ids.aminmax())
    known = getattr(config, "vocab_size", None) or high + 1
    if low < 0 or high >= known:
        strange = low if low < 0 else high
        knows = f"{checkpoint.name} knows tokens 0 to {known - 1}"
        raise InputsError(f"input_ids has the number {strange}; {knows}; of which tokenizer is it?")
    mask = batch.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        if tuple(mask.shape) != shape:
            raise InputsError(f"attention_mask has shape {tuple(mask.shape)} but input_ids {shape}")
        if not bool((mask != 0).any(-1).all()):
            raise InputsError("attention_mask marks all of a sample as padding; leave it out")


def add_decoder_inputs(checkpoint: Checkpoint, inputs: Inputs) -> None:
    """Give the decoder of an encoder-decoder the encoder's tokens, shifted by one, and tell it.

    Where the inputs have tokens of its own, or the configuration names no first token, they stay.
    """
    batch, start = inputs.batch, getattr(checkpoint.config, "decoder_start_token_id", None)
    needed = "decoder_input_ids" in checkpoint.accepted and "decoder_inputs_embeds" not in batch
    if not needed or start is None or "decoder_input_ids" in batch or "input_ids" not in batch:
        return
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    batch["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)
    if "decoder_attention_mask" in checkpoint.accepted:
        batch["decoder_attention_mask"] = torch.cat([mask[:, :1], mask[:, :-1]], 1)
    said = "the decoder reads the encoder's tokens, shifted by one as in training"
    inputs.notes.append(f"{said}; give others as ready inputs, decoder_input_ids")


def _repeated(batch: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence on samples that are the same."""
    rows = zip(*batch.values(), strict=True)
    plain = ((t.detach().cpu().reshape(-1).view(torch.uint8) for t in row) for row in rows)
    each = {tuple(t.numpy().tobytes() for t in row) for row in plain}
    count = len(next(iter(batch.values())))
    said = f"only {len(each)} of {count} samples are different, and means count the others again"
    return [said] if len(each) < count else []
