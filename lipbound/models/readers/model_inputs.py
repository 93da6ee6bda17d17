"""Inputs that are ready for the model: named tensors, in memory or in a file."""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict, IterableDatasetDict
from safetensors.torch import load_file
from torch import Tensor

from lipbound.errors import InputsError, shown
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import first_line
from lipbound.models.readers.files import there
from lipbound.models.readers.positions import several_towers

TOWERS = (
    ("text_config", "input_ids", "text"),
    ("vision_config", "pixel_values", "images"),
    ("audio_config", "input_features", "sound"),
)
"""Parts of configurations, the input of the tower that each is of, and what that takes."""
FINITE = ("pixel_values", "inputs_embeds", "input_features", "input_values")
"""Inputs that are numbers."""
SAMPLES = "tensors of (samples, ...) with at least one sample"


def is_ready(data: Any) -> bool:
    """Whether it is a mapping (but not the splits of a dataset), or names a .safetensors file."""
    named = isinstance(data, str | Path) and str(data).endswith(".safetensors")
    return named or (
        isinstance(data, Mapping) and not isinstance(data, DatasetDict | IterableDatasetDict)
    )


def ready_inputs(
    data: Mapping[str, Any] | str | Path, checkpoint: Checkpoint
) -> tuple[dict[str, Tensor], str, list[str]]:
    """The tensors that a checkpoint's model takes, each (samples, ...), a description, and notes on
    what was left out.

    Raises:
        InputsError: they are no such tensors, disagree about the number of samples, or what the
            model is about is not among them.
    """
    if isinstance(data, Mapping):
        tensors = {
            name: value
            for name, value in data.items()
            if value is not None and not isinstance(value, bool)
        }
        given, description = (
            {name: _tensor(name, value) for name, value in tensors.items()},
            "ready model inputs",
        )
    else:
        path = there(data)
        if path is None or not path.is_file():
            raise InputsError(f"there is no file {data}")
        try:
            given, description = load_file(path), path.name
        except Exception as error:
            raise InputsError(
                f"{path} is not a readable safetensors file: {first_line(error)}"
            ) from error
    wrong = [name for name, t in given.items() if t.ndim < 2 or not len(t)]
    if wrong or not given:
        has = f"{wrong[0]} has shape {tuple(given[wrong[0]].shape)}" if wrong else "there are none"
        raise InputsError(f"ready inputs must be named {SAMPLES}; {has}")
    lengths = {str(name): len(t) for name, t in given.items()}
    if len(set(lengths.values())) > 1:
        raise InputsError(
            "ready inputs disagree about the number of samples: "
            f"{', '.join(f'{name} {n}' for name, n in lengths.items())}"
        )
    taken = _taken(checkpoint)
    main, kind = checkpoint.main_input, type(checkpoint.model).__name__
    check_towers(checkpoint, given)
    if main not in given and not ("inputs_embeds" in given and "inputs_embeds" in taken):
        raise InputsError(
            f"ready inputs of {kind} must have {main}; given are {', '.join(map(str, given))}"
        )
    tensors = {name: t for name, t in given.items() if not taken or name in taken}
    notes = [
        f"{name} is not an input of {kind} and was left out"
        for name in given
        if name not in tensors
    ]
    return tensors, description, notes


def options_of(data: object, checkpoint: Checkpoint) -> dict[str, bool]:
    """Settings of the model's forward pass that are given as True or False, such as
    interpolate_pos_encoding.

    Raises:
        InputsError: the forward pass has no such setting.
    """
    options = (
        {str(name): value for name, value in data.items() if isinstance(value, bool)}
        if isinstance(data, Mapping)
        else {}
    )
    if options and (unknown := set(options) - _taken(checkpoint)):
        raise InputsError(
            f"{min(unknown)} is no setting of {type(checkpoint.model).__name__}'s forward pass; "
            "leave it out, or give tensors of (samples, ...)"
        )
    return options


def _tensor(name: object, value: Any) -> Tensor:
    """A tensor, or what is nearly one: an array or nested lists of numbers."""
    if not isinstance(name, str):
        raise InputsError(f"ready inputs must be named {SAMPLES}; a name is {shown(name)}")
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputsError(
            f"ready inputs must be named {SAMPLES}; {name} is {shown(value)}"
        ) from error


def _taken(checkpoint: Checkpoint) -> set[str]:
    """Names of what the model's forward takes; empty where they cannot be told."""
    parameters = inspect.signature(checkpoint.model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names if checkpoint.main_input in names else set()


def check_towers(checkpoint: Checkpoint, given: Collection[str]) -> None:
    """Raise InputsError where a model of several towers, all of which always run, lacks the input
    of one."""
    model, takes = checkpoint.model, _taken(checkpoint)
    towers = {
        other: words
        for part, other, words in TOWERS
        if getattr(model.config, part, None) is not None and other in takes
    }
    if len(towers) < 2 or not several_towers(model):
        return
    missing = [name for name in towers if name not in given]
    if missing:
        raise InputsError(
            f"{type(model).__name__} has towers of {' and '.join(towers.values())} and needs "
            f"{' and '.join(towers)}, but there is no "
            f"{' and no '.join(missing)}; give a dict of ready inputs with all of them, or load "
            "one tower by a class of its own"
        )


def check_images(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    """Raise InputsError where ready images are not (samples, channels, height, width) finite
    numbers of its channels, or others not finite."""
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
    channels = getattr(checkpoint.model.config, "num_channels", None)
    if pixels.ndim == 4 and isinstance(channels, int) and pixels.shape[1] != channels:
        raise InputsError(
            f"pixel_values has shape {tuple(pixels.shape)}; {checkpoint.name} takes (samples, "
            f"{channels}, height, width)"
        )
