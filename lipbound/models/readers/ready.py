"""Inputs that are ready for the model: named tensors, in memory or in a file."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from safetensors.torch import load_file
from torch import Tensor

from lipbound.errors import InputsError, shown
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import first_line
from lipbound.models.readers.files import there

SAMPLES = "tensors of (samples, ...) with at least one sample"


def is_ready(data: Any) -> bool:
    """Whether it is a mapping (but not the splits of a dataset), or names a .safetensors file."""
    return (isinstance(data, Mapping) and not isinstance(data, DatasetDict)) or (isinstance(data, str | Path) and str(data).endswith(".safetensors"))


def ready_inputs(data: Mapping[str, Any] | str | Path, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], str, list[str]]:
    """The tensors that a checkpoint's model takes, each (samples, ...), a description, and notes on what was left out.

    Raises:
        InputsError: they are no such tensors, disagree about the number of samples, or what the model is about is not among them.
    """
    if isinstance(data, Mapping):
        tensors = {name: value for name, value in data.items() if value is not None and not isinstance(value, bool)}
        given, description = {name: _tensor(name, value) for name, value in tensors.items()}, "ready model inputs"
    else:
        path = there(data)
        if path is None or not path.is_file():
            raise InputsError(f"there is no file {data}")
        try:
            given, description = load_file(path), path.name
        except Exception as error:
            raise InputsError(f"{path} is not a readable safetensors file: {first_line(error)}") from error
    wrong = [name for name, t in given.items() if t.ndim < 2 or not len(t)]
    if wrong or not given:
        has = f"{wrong[0]} has shape {tuple(given[wrong[0]].shape)}" if wrong else "there are none"
        raise InputsError(f"ready inputs must be named {SAMPLES}; {has}")
    lengths = {str(name): len(t) for name, t in given.items()}
    if len(set(lengths.values())) > 1:
        raise InputsError(f"ready inputs disagree about the number of samples: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    taken = _taken(checkpoint)
    main, kind = str(checkpoint.model.main_input_name), type(checkpoint.model).__name__
    if main not in given and not ("inputs_embeds" in given and "inputs_embeds" in taken):
        raise InputsError(f"ready inputs of {kind} must have {main}; given are {', '.join(map(str, given))}")
    tensors = {name: t for name, t in given.items() if not taken or name in taken}
    notes = [f"{name} is not an input of {kind} and was left out" for name in given if name not in tensors]
    return tensors, description, notes


def options_of(data: object, checkpoint: Checkpoint) -> dict[str, bool]:
    """What is given as True or False rather than as a tensor: settings of the model's forward pass, such as interpolate_pos_encoding.

    Raises:
        InputsError: the forward pass has no such setting.
    """
    options = {str(name): value for name, value in data.items() if isinstance(value, bool)} if isinstance(data, Mapping) else {}
    if options and (unknown := set(options) - _taken(checkpoint)):
        raise InputsError(
            f"{min(unknown)} is no setting of {type(checkpoint.model).__name__}'s forward pass; leave it out, or give tensors of (samples, ...)"
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
        raise InputsError(f"ready inputs must be named {SAMPLES}; {name} is {shown(value)}") from error


def _taken(checkpoint: Checkpoint) -> set[str]:
    """Names of what the model's forward takes; empty where they cannot be told."""
    parameters = inspect.signature(checkpoint.model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names if str(checkpoint.model.main_input_name) in names else set()


def check_images(checkpoint: Checkpoint, batch: Mapping[str, Tensor]) -> None:
    """Raise InputsError where ready images are not (samples, channels, height, width) finite numbers of the model's channels."""
    pixels = batch.get("pixel_values")
    if pixels is None:
        return
    if not pixels.is_floating_point():
        raise InputsError(
            f"pixel_values is of dtype {str(pixels.dtype).removeprefix('torch.')}; give the floating-point numbers that the image processor returns"
        )
    if not bool(torch.isfinite(pixels).all()):
        raise InputsError("pixel_values has NaN or infinite entries; the Jacobian is not defined there")
    channels = getattr(checkpoint.model.config, "num_channels", None)
    if pixels.ndim == 4 and isinstance(channels, int) and pixels.shape[1] != channels:
        raise InputsError(f"pixel_values has shape {tuple(pixels.shape)}; {checkpoint.name} takes (samples, {channels}, height, width)")
