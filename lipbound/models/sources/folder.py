"""Loading a model from a folder with config.json and weights, which most kinds of checkpoints come
down to."""

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from lipbound import devices
from lipbound.errors import CheckpointError, tell
from lipbound.models import offload, offload_loading, weight_files
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.precision import check_floating, check_stored
from lipbound.models.quiet import first_line, quiet
from lipbound.models.renaming import renames
from lipbound.models.sources import adapters, quantized
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.weight_checks import (
    check_filled,
    check_finite,
    not_finite,
    refused_pickle,
    sha256,
)

WEIGHT_FILES = ("*.safetensors", "*.bin")
"""Files that hold weights."""


class FolderSource(ABC):
    """A kind of checkpoint that has a name which leads to a folder."""

    def matches(self, model: object) -> bool:
        """Whether it is a name, or a path, of this kind."""
        return isinstance(model, str | Path) and self.names(str(model))

    def load(self, model: str | Path, options: LoadOptions) -> Checkpoint:
        """The model from its folder; see `load_folder`."""
        name = str(model)
        folder, commit = self.locate(name, options.revision)
        return load_folder(name, folder, commit, options)

    @abstractmethod
    def names(self, name: str) -> bool:
        """Whether a name is of this kind."""

    @abstractmethod
    def locate(self, name: str, revision: str | None) -> tuple[Path, str | None]:
        """The folder to load from, and the commit of a hub model; raises CheckpointError where
        there is none."""


def load_folder(name: str, folder: Path, commit: str | None, options: LoadOptions) -> Checkpoint:
    """The model of a folder, its weights in memory or left on disk.

    Args:
        name: what the user called it, for messages.
        folder: where config.json, weights and tokenizer or processor are.
        commit: the hub commit; without one a hash over the files of weights is the revision.
        options: dtype, device and residence of the weights.

    Raises:
        CheckpointError: files that transformers cannot load, weights that do not fill the
            architecture or are not finite.
    """
    config = _config(name, folder)
    options.refuse(config)
    notes = adapters.refuse_unasked(name, folder, options.adapter)
    files, unread = weight_files.files(folder)
    for note in unread:
        tell(note)
    device = torch.device(options.device)
    by_layer = options.weights == "layers" or (
        options.weights == "auto" and _large(folder, options.dtype, device)
    )
    if by_layer:
        model, how = _load_by_layer(name, folder, config, options, device), None
    else:
        model, how = _load_whole(name, folder, config)
        check_floating(model, name)
        if how is None:
            check_stored(folder, model, name)
        model = model.to(dtype=options.dtype)
        adapters.merge(model, options.adapter)
        model = model.to(device=device)
        check_finite(model, name)
    revision, configuration = (
        commit or f"sha256:{sha256(files)}",
        None if commit else f"sha256:{sha256([folder / 'config.json'])}",
    )
    checkpoint = Checkpoint(
        model.eval(),
        name,
        revision,
        str(folder),
        commit,
        by_layer=by_layer,
        notes=notes + unread,
        quantization=how,
        configuration=configuration,
    )
    return adapters.named(checkpoint, options.adapter)


def _why(error: Exception) -> str:
    """What transformers says of files that it cannot load, without advice on its own arguments."""
    message = first_line(error)
    if "ignore_mismatched_sizes" in message:
        return "its weights have other shapes than its config.json says"
    if unknown := re.search(r"has model type `([^`]*)` but", message):
        return (
            f"its config.json names the model type {unknown[1]!r}, which this version of "
            "transformers does not know"
        )
    if refused_pickle(error):
        return (
            "its file of weights is damaged or holds other things than weights, none of which "
            "were run; save the model again with save_pretrained"
        )
    return message


def _config(name: str, folder: Path) -> PreTrainedConfig:
    if (folder / "config.json").is_file():
        weight_files.check_file(folder / "config.json")
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # broken files raise a zoo of types, down to those of single parsers
        raise CheckpointError(f"{name} could not be loaded: {_why(error)}") from error


def _load_whole(
    name: str, folder: Path, config: PreTrainedConfig
) -> tuple[PreTrainedModel, str | None]:
    """The model, and what its weights had been quantised with."""
    how = quantized.ask_for_floats(config, name)
    if how is not None:
        quantized.check_blocks(folder, config, name)

    def load(mapping: dict[str, str] | None) -> tuple[PreTrainedModel, dict[str, Any]]:
        try:
            with quiet():
                model, report = AutoModel.from_pretrained(
                    folder,
                    config=config,
                    attn_implementation="eager",
                    dtype=torch.float32,
                    trust_remote_code=False,
                    output_loading_info=True,
                    key_mapping=mapping,
                    adapter_kwargs={"subfolder": adapters.ELSEWHERE},
                )
                return quantized.in_floats(model, how), report
        except Exception as error:  # as above
            raise CheckpointError(f"{name} could not be loaded: {_why(error)}") from error

    model, report = load(None)
    if renamed := renames(report["unexpected_keys"], config) if report["missing_keys"] else {}:
        model, report = load({f"^{re.escape(old)}$": new for old, new in renamed.items()})
    check_filled(report, name)
    quantized.check_used(report, how, name)
    assert isinstance(model, PreTrainedModel)
    return model, how


def _load_by_layer(
    name: str, folder: Path, config: PreTrainedConfig, options: LoadOptions, device: torch.device
) -> PreTrainedModel:
    try:
        with quiet():
            model, report = offload_loading.load_offloaded(
                folder, config, dtype=options.dtype, device=device
            )
    except Exception as error:  # as above
        raise CheckpointError(
            f"{name} could not be loaded layer by layer: {_why(error)}"
        ) from error
    check_filled(report, name)
    adapters.merge(model, options.adapter)
    for key, tensor in offload.on_disk(model).items():
        if not tensor.finite():
            raise not_finite(name, key)
    check_finite(model, name)
    return model


def _large(folder: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights would fill more than half of the free memory; False where they cannot be
    read layer by layer anyway."""
    try:
        count = weight_files.numbers(folder)
    except (
        Exception
    ):  # no safetensors files, or broken ones, which loading has its own sentences for
        return False
    return count * dtype.itemsize > devices.available(device) / 2


def check_directory(path: Path, name: str) -> None:
    """Raise CheckpointError unless a directory holds a configuration and weights."""
    adapters.refuse_alone(name, path)
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{name} has no config.json; give a directory written by save_pretrained, or the hub "
            "id of a transformers model"
        )
    if not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise CheckpointError(
            f"{name} has a config.json but no weights (model.safetensors or pytorch_model.bin)"
        )
