"""Models that the user has loaded: the transformers model inside wrappers, its dtype, its source.

Wrappers are checkpoints of ours, those of torch and PEFT, pipelines and sentence encoders.
"""

import copy
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Pipeline, PreTrainedModel

from lipbound.errors import CaptureError, CheckpointError, shown, tell
from lipbound.models import offload
from lipbound.models.checkpoint import Checkpoint, Inputs, LoadOptions
from lipbound.models.sources.weight_checks import (
    check_finite,
    check_floating,
    config_sha256,
    state_sha256,
)

DEPTH = 8
"""Wrappers around wrappers that are taken off."""


def load_loaded(model: object, options: LoadOptions) -> Checkpoint | None:
    """Make a checkpoint of a transformers model, or of any module, in memory, or in a wrapper.

    Args:
        model: used as it is and moved; a copy of it where its weights are in another dtype. Of a
            `Checkpoint` the name and the revision stay, so that its numbers are known to be of the
            same weights.
        options: dtype and device.

    Returns:
        The checkpoint; None where there is no module. CheckpointError is raised for
        weights that are, or should be, on disk, quantised or not finite.
    """
    inner, notes = unwrapped(model)
    if not isinstance(inner, nn.Module):
        return None
    kind = type(inner).__name__
    _check_options(inner, kind, options)
    check_floating(inner, kind)
    loaded, changes = in_dtype(inner, options.dtype)
    notes += changes
    for note in notes:
        tell(note)
    loaded = loaded.to(options.device)  # some modules take it by position only
    check_finite(loaded, kind)
    if isinstance(model, Checkpoint):
        return replace(model, model=loaded, loaded=True, notes=[*model.notes, *notes])
    if not isinstance(inner, PreTrainedModel):
        shape = f"sha256:{hashlib.sha256(repr(inner).encode()).hexdigest()}"
        return Checkpoint(
            loaded.eval(),
            kind,
            state_sha256(loaded),
            None,
            None,
            loaded=True,
            notes=notes,
            configuration=shape,
        )
    source = str(inner.name_or_path) or None
    return Checkpoint(
        loaded,
        source or kind,
        state_sha256(loaded),
        source,
        getattr(inner.config, "_commit_hash", None),
        loaded=True,
        notes=notes,
        configuration=config_sha256(inner.config),
    )


def _check_options(model: nn.Module, kind: str, options: LoadOptions) -> None:
    if options.weights == "layers" or offload.by_layer(model):
        raise CheckpointError(
            f"model is a loaded {kind}, but reading weights layer by layer starts from files; "
            "give the checkpoint's directory or hub id with weights='layers'"
        )
    options.refuse_given("a model in memory", "revision", "gguf_file")
    if options.adapter not in (None, "none"):
        raise CheckpointError(
            "adapter= is for checkpoints that are loaded by name; a model in memory is measured "
            "with the adapters in its layers (merge it there: "
            "peft.PeftModel.from_pretrained(model, adapter))"
        )


def unwrapped(given: object) -> tuple[object, list[str]]:
    """Take all wrappers off an object.

    Args:
        given: anything.

    Returns:
        What is inside, and sentences on what was left out on the way.
    """
    notes: list[str] = []
    for _ in range(DEPTH):
        if isinstance(given, PreTrainedModel):
            break
        inner, note = _inside(given)
        if inner is None:
            break
        notes += [note] if note else []
        given = inner
    return given, notes + _adapters(given)


def bare_model(given: object, tells: bool = True) -> PreTrainedModel:
    """Return the transformers model inside what a public function was given.

    Args:
        given: a model, a wrapper of one, or a checkpoint.
        tells: whether notices tell what was left out, which may have been told before.

    Returns:
        The model itself.

    Raises:
        CaptureError: there is none.
    """
    model = bare_module(given, tells)
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(
            f"model is {shown(given)}; give a loaded transformers model, or what "
            "lipbound.load_checkpoint returns"
        )
    return model


def bare_module(given: object, tells: bool = True) -> nn.Module:
    """Return the transformers model, or else the module, inside what a public function was given.

    Args:
        given: a module, a wrapper of one, or a checkpoint.
        tells: whether notices tell what was left out, which may have been told before.

    Returns:
        The module itself.

    Raises:
        CaptureError: there is none.
    """
    model, notes = unwrapped(given)
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"model is {shown(given)}; give a loaded transformers model, any torch.nn.Module, or "
            "what lipbound.load_checkpoint returns"
        )
    for note in notes if tells else ():
        tell(note)
    return model


def bare_inputs(inputs: Any, model: nn.Module) -> Any:
    """Return the tensors of `Inputs`, on the device of a model; anything else as it is."""
    if not isinstance(inputs, Inputs):
        return inputs
    tensors = (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    return dict(inputs.batch) if device is None else inputs.block(0, inputs.samples, str(device))


def named_inputs(model: nn.Module, inputs: object) -> dict[str, Tensor]:
    """Return inputs by the names of the parameters of a model's forward.

    Those of `lipbound.prepare` come to its device. A tensor, or several, are given the names of the
    first parameters of ``forward``.

    Raises:
        CaptureError: there are no tensors among them, or more than ``forward`` has names for.
    """
    inputs = bare_inputs(inputs, model)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, tuple | list) and any(isinstance(t, Tensor) for t in inputs):
        names = [
            p.name
            for p in inspect.signature(model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
        ]
        if len(names) < len(inputs):
            raise CaptureError(
                f"inputs are {len(inputs)} tensors, and the forward of {type(model).__name__} has "
                f"names for {len(names)}; give a dict of named tensors"
            )
        inputs = dict(zip(names, inputs, strict=False))
    if not isinstance(inputs, Mapping) or not any(isinstance(t, Tensor) for t in inputs.values()):
        kind = "without tensors" if isinstance(inputs, Mapping) else shown(inputs)
        raise CaptureError(
            f"inputs is {kind}; give named tensors, such as tokenizer(text, return_tensors='pt')"
        )
    return {str(name): value for name, value in inputs.items()}


def _inside(given: Any) -> tuple[object | None, str]:
    """Take one wrapper off.

    Args:
        given: anything.

    Returns:
        The content (None for what is no wrapper), and a sentence on what is lost without the
        wrapper, or "".
    """
    if isinstance(given, Checkpoint | Pipeline):
        return given.model, ""
    if isinstance(given, type):
        return None, ""
    if isinstance(inner := getattr(given, "_orig_mod", None), nn.Module):  # torch.compile
        return inner, ""
    if isinstance(given, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return given.module, ""
    kind, configs = type(given).__name__, getattr(given, "peft_config", None)
    if hasattr(given, "get_base_model") and isinstance(configs, Mapping):
        prompts = [one for one in configs.values() if getattr(one, "is_prompt_learning", False)]
        learned = ", ".join(str(one.peft_type).rpartition(".")[2] for one in prompts)
        left_out = (
            f"the tokens that {kind} learned in front of its inputs ({learned}) are left out; its "
            "base model is measured"
        )
        return given.get_base_model(), left_out if learned else ""
    parts = list(given) if isinstance(given, nn.Sequential) else []
    inner = getattr(parts[0], "auto_model", None) if parts else None
    if isinstance(inner, nn.Module):  # SentenceTransformer
        after = ", ".join(type(part).__name__ for part in parts[1:])
        left_out = f"what comes after the transformer of the {kind} ({after}) is left out"
        return inner, left_out if after else ""
    if isinstance(inner := getattr(given, "model", None), PreTrainedModel):
        name = type(inner).__name__
        return inner, f"the {name} inside the {kind} is measured, and nothing around it"
    return None, ""


def _adapters(model: object) -> list[str]:
    """Return a sentence where layers of a model have adapters in them."""
    parts = model.modules() if isinstance(model, PreTrainedModel) else ()
    layers = [
        part for part in parts if hasattr(part, "base_layer") and hasattr(part, "active_adapters")
    ]
    if not layers:
        return []
    off = all(getattr(layer, "disable_adapters", False) for layer in layers)
    how = "switched off, and it is measured without them" if off else "and it is measured with them"
    return [f"{len(layers)} layers of the model have adapters in them, {how}"]


def in_dtype(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[Any, list[str]]:
    """Return a model whose weights are all in one dtype.

    Args:
        model: stays as it is.
        dtype: torch.float32 or torch.float64; None for the model's own where it is one of these,
            else the smaller that holds its numbers.

    Returns:
        The model itself where its weights are in that dtype, else a copy; and a sentence on the
        copy where there is something to tell.
    """
    found = {parameter.dtype for parameter in model.parameters()}
    wanted = dtype or (torch.float64 if torch.float64 in found else torch.float32)
    if found <= {wanted}:
        return model, []
    copied = copy.deepcopy(model).to(wanted)
    if found == {torch.float32}:
        return copied, []
    theirs = " and ".join(sorted(str(one).removeprefix("torch.") for one in found))
    rounded = wanted == torch.float32 and torch.float64 in found
    same = "rounded; dtype='float64' keeps its numbers" if rounded else "with the same numbers"
    mine = str(wanted).removeprefix("torch.")
    note = f"the model's weights are in {theirs}; a copy of it in {mine} is measured, {same}"
    return copied, [note]


def measurable(model: nn.Module) -> Any:
    """Return a model as it can be measured.

    Args:
        model: with weights that are floating-point numbers in memory; CheckpointError is raised for
            others.

    Returns:
        The model, or a copy in float32 of one in half precision, which a notice tells of.
    """
    check_floating(model, type(model).__name__)
    model, notes = in_dtype(model)
    for note in notes:
        tell(note)
    return model
