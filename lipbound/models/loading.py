"""Load a model from a hub id, a local directory, a builtin name or a loaded module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lipbound.devices import DTYPES, WEIGHTS, check_weights, dtype_name, has_float64, resolve_device
from lipbound.errors import CheckpointError, adapter_name, name_or_none, shown, tell
from lipbound.models.checkpoint import Checkpoint, LoadOptions
from lipbound.models.given_layers import load_layers
from lipbound.models.sources.adapters import Adapter, open_adapter
from lipbound.models.sources.catalogue import load_builtin
from lipbound.models.sources.loaded_model import load_loaded
from lipbound.models.sources.locations import adapter_folder, load_directory, load_hub
from lipbound.models.sources.other_packages import load_other

__all__ = ["SOURCES", "WEIGHTS", "Checkpoint", "load_checkpoint"]

SOURCES: tuple[Callable[[Any, LoadOptions], Checkpoint | None], ...] = (
    load_loaded,
    load_layers,
    load_builtin,
    load_other,
    load_directory,
    load_hub,
)
"""Loaders of the kinds of checkpoints, in the order in which they are asked.

Each takes what the user gave and returns None where that is not of its kind, else the model in
evaluation mode, with finite weights that fill its architecture; it raises CheckpointError where the
model is not found or cannot be loaded as the options say.
"""

COMPANIONS = {"tokenizer": "images", "processor": "text"}
"""Options that name a companion of a model, and the data of models that have no use for it."""


def load_checkpoint(
    model: str | Path | PreTrainedModel,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    weights: str = "auto",
    gguf_file: str | None = None,
    tokenizer: str | Path | None = None,
    processor: str | Path | None = None,
    adapter: str | Path | Literal[False] | None = None,
) -> Checkpoint:
    """Load a model for capture.

    Args:
        model: hub id ("google/vit-base-patch16-224", "name@revision"), a checkpoint directory, a
            GGUF file, "builtin:minilm", "builtin:smollm2", "builtin:gpt2", "builtin:llama",
            "builtin:qwen3", "builtin:vit", "builtin:vit-baseline", "builtin:vit-jasmin", a model of
            another package, "timm:NAME" or "open_clip:NAME@TAG" (behind the @ also a local
            .safetensors file), or a loaded transformers model or other torch module (used as it
            is, moved and cast).
        revision: branch, tag or commit of a hub model.
        dtype: "float32" or "float64"; half-precision weights are cast up.
        device: a torch device.
        weights: "whole": all weights in memory, in ``dtype``. "layers": they stay in the
            checkpoint's safetensors files, and each module's are in memory only while it runs; the
            numbers are the same, every forward pass reads the files anew. "auto": "layers" where
            the whole weights would take more than half of the free memory of the device.
        gguf_file: which GGUF file of a directory or of a hub model; its weights are measured as the
            floating-point numbers that they stand for, and configuration and tokenizer are its own.
            Needs the extra ``gguf``.
        tokenizer, processor: directory or hub id of the tokenizer or the image processor to take,
            where the checkpoint has none, or another one.
        adapter: a LoRA adapter that is merged into the weights: the directory that PEFT wrote, or
            its hub id. "none" or False: none, where one lies beside the weights; without either
            such a checkpoint is refused, whatever packages are installed.

    Returns:
        The model in evaluation mode with eager attention (a loaded model as it was handed over),
        with its name, its revision and where its tokenizer or image processor is. Code that a
        checkpoint brings is never run.

    Raises:
        CheckpointError: unknown or unreachable model, no weights, weights that do not fit, NaN or
            infinite weights, no safetensors files for "layers". A model loaded in layers raises it
            later on, too, when its files are gone or have changed.

    >>> checkpoint = load_checkpoint("builtin:gpt2")
    >>> checkpoint.modality, checkpoint.model.config.num_hidden_layers, str(checkpoint.model.dtype)
    ('text', 6, 'torch.float32')
    """
    given = dict(locals())
    return load_unless_refused(given.pop("model"), lambda config: None, **given)


def load_unless_refused(
    model: str | Path | PreTrainedModel,
    refuse: Callable[[PreTrainedConfig], None],
    **given: Any,
) -> Checkpoint:
    """Load a checkpoint as `load_checkpoint` does, unless its configuration is refused.

    Args:
        model: as `load_checkpoint` takes it.
        refuse: is shown the configuration of a model that is not in memory yet, and may raise
            before the weights are read.
        given: all other options of `load_checkpoint`.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: as `load_checkpoint` does.
    """
    check_weights(given["weights"])
    if isinstance(model, str | Path) and not str(model).strip():
        raise CheckpointError(
            "model is empty; give a hub id, a checkpoint directory or a builtin such as "
            "'builtin:minilm'"
        )
    options = LoadOptions(
        name_or_none("revision", given["revision"]),
        DTYPES[dtype_name(given["dtype"], CheckpointError)],
        resolve_device(given["device"]),
        given["weights"],
        name_or_none("gguf_file", given["gguf_file"]),
        _adapter(adapter_name(given["adapter"])),
        refuse,
    )
    if options.dtype == torch.float64 and not has_float64(options.device):
        raise CheckpointError(
            f"dtype is 'float64', which the device {str(options.device)!r} does not have; take "
            "dtype='float32', or device='cpu'"
        )
    companions = {name: _companion(name, given[name]) for name in COMPANIONS}
    loaded = (source(model, options) for source in SOURCES)
    checkpoint = next((found for found in loaded if found is not None), None)
    if checkpoint is None:
        raise CheckpointError(
            f"model is {'a class' if isinstance(model, type) else shown(model)}; give a hub id, a "
            "directory, 'builtin:NAME', a loaded transformers model or another torch module"
        )
    for name, other in COMPANIONS.items():
        setattr(checkpoint, f"{name}_from", companions[name])
        reads = checkpoint.modality.replace("image", "images")
        if companions[name] is not None and reads == other:
            note = f"{name} {companions[name]} is not looked at: {checkpoint.name} reads {reads}"
            checkpoint.notes.append(note)
            tell(note)
    return checkpoint


def _companion(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value).strip():
        raise CheckpointError(
            f"{name} is {shown(value)}; give a directory or a hub id (of a loaded one, the "
            "directory of its save_pretrained)"
        )
    return str(value)


def _adapter(name: str | None) -> Adapter | str | None:
    """Return the adapter of a directory or of a hub repository; None and "none" stay."""
    if name is None or name == "none":
        return name
    folder = Path(name).expanduser()
    return open_adapter(name, folder if folder.exists() else adapter_folder(name))
