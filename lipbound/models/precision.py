"""In which precision a model that the user has loaded computes, and whether its numbers can be
measured at all."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lipbound.errors import CheckpointError, tell
from lipbound.models.offload import by_layer
from lipbound.models.weight_files import contents

PACKED = ("qweight", "weight_packed", "W_q", "qzeros")
"""Buffers of layers that keep their weights in a form of their own."""


def dtypes(model: PreTrainedModel) -> set[torch.dtype]:
    """Of the weights."""
    return {parameter.dtype for parameter in model.parameters()}


def check_floating(model: PreTrainedModel, name: str) -> None:
    """Raise CheckpointError where a model has weights that are no floating-point numbers, or
    weights that were never loaded.

    Numbers of one byte are taken for none: what they stand for depends on scales that are kept
    beside them. Layers that keep packed weights have no derivatives, or wrong ones, however right
    their outputs are.
    """
    for key, value in model.state_dict(keep_vars=True).items():
        if _packed(key, value):
            path = (
                key.partition("._packed_params")[0]
                if "._packed_params" in key
                else key.rpartition(".")[0]
            )
            kind = type(model.get_submodule(path)).__name__
            raise CheckpointError(
                f"the weights of {name} are not all floating-point numbers: {path} is a "
                f"quantized {kind}, which has no true derivatives; "
                "give the model before quantization"
            )
    for key, tensor in model.named_parameters():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise CheckpointError(
                f"the weights of {name} are not all floating-point numbers, {key} is "
                f"{str(tensor.dtype).removeprefix('torch.')}; "
                "give the checkpoint before quantization, or what model.dequantize() makes of a "
                "loaded model"
            )
        if tensor.is_meta and not by_layer(model):
            raise CheckpointError(
                f"the weights of {name} are not in memory ({key} is on the device meta); load "
                "the model with its weights"
            )


def _packed(key: str, value: object) -> bool:
    """Tell whether an entry of a layer's state holds quantised weights: of torch's int8 layers,
    GPTQ, AWQ, compressed-tensors, HQQ."""
    if not isinstance(value, torch.Tensor):
        return "packed" in key and value is not None
    return value.is_quantized or (
        key.rpartition(".")[2] in PACKED and not value.is_floating_point()
    )


def check_stored(folder: Path, model: PreTrainedModel, name: str) -> None:
    """Raise CheckpointError where a checkpoint's safetensors files hold whole numbers in the place
    of weights."""
    floating = {key for key, tensor in model.state_dict().items() if tensor.is_floating_point()}
    try:
        stored = contents(folder)
    except Exception:  # no safetensors files
        return
    for key, tensor in stored.items():
        if not tensor.floating and (
            key in floating or key.partition(".")[2] in floating
        ):  # with or without the prefix of the task's model
            raise CheckpointError(
                f"the weights of {name} are not all floating-point numbers, {key} for one; give "
                "the checkpoint before quantization"
            )


def in_dtype(
    model: PreTrainedModel, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, str | None]:
    """The model itself where all its weights are in a dtype, else a copy in it, and what there is
    to tell of that.

    Args:
        model: stays as it is.
        dtype: torch.float32 or torch.float64; None for the model's own where it is one of these,
            else the smaller that holds its numbers.
    """
    found = dtypes(model)
    wanted = dtype or (torch.float64 if torch.float64 in found else torch.float32)
    if found <= {wanted}:
        return model, None
    names = [
        " and ".join(sorted(str(one).removeprefix("torch.") for one in some))
        for some in (found, {wanted})
    ]
    rounded = wanted == torch.float32 and torch.float64 in found
    same = "rounded; dtype='float64' keeps its numbers" if rounded else "with the same numbers"
    note = (
        None
        if found == {torch.float32}
        else f"the model's weights are in {names[0]}; a copy of it in {names[1]} is measured, "
        f"{same}"
    )
    return copy.deepcopy(model).to(dtype=wanted), note


def measurable(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or a copy in float32 of one in half precision, which a notice tells of.

    Raises:
        CheckpointError: weights that are no floating-point numbers, or not in memory.
    """
    check_floating(model, type(model).__name__)
    model, note = in_dtype(model)
    if note is not None:
        tell(note)
    return model
