"""Load a model from a folder with its configuration and weights, or from a GGUF file in it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from lipbound import devices
from lipbound.errors import CheckpointError, tell
from lipbound.models import gguf_file, offload, weight_files
from lipbound.models.checkpoint import Checkpoint, LoadOptions
from lipbound.models.quiet import first_line, quiet
from lipbound.models.sources import adapters, weight_checks


def load_folder(
    name: str, folder: Path, commit: str | None, options: LoadOptions, gguf: str | None = None
) -> Checkpoint:
    """Load the model of a folder, its weights in memory or left on disk.

    Args:
        name: what the user called it, for messages.
        folder: where config.json, weights and tokenizer or processor are, or the GGUF file.
        commit: the hub commit; without one a hash over the files of weights is the revision.
        options: dtype, device and residence of the weights.
        gguf: the name of a GGUF file that has configuration, weights and tokenizer.

    Returns:
        The model in evaluation mode, with the adapter that was asked for. CheckpointError is raised
        for files that transformers cannot load, weights that do not fill the architecture or are
        not finite; LipboundError for a GGUF file that is larger than the memory.
    """
    notes = adapters.refuse_unasked(name, folder, options.adapter)
    if gguf is None:
        config, how = _config(name, folder), None
        options.refuse(config)
        files, unread = weight_files.files(folder)
        for note in unread:
            tell(note)
        notes += unread
        by_layer = options.weights == "layers" or (
            options.weights == "auto" and _large(folder, options)
        )
    else:
        files, by_layer = [folder / gguf], False
        how = _check_gguf(name, files[0], options)
        config = _config(name, folder, gguf)
        options.refuse(config)
    if by_layer:
        model = _load_by_layer(name, folder, config, options)
    else:
        how = how or weight_checks.ask_for_floats(config, name, folder)
        model = _load_whole(name, folder, config, how, gguf)
        weight_checks.check_floating(model, name)
        if how is None:
            weight_checks.check_stored(folder, model, name)
        model = model.to(dtype=options.dtype)
        adapters.merge(model, options.adapter)
        model = model.to(device=options.device)
    weight_checks.check_finite(model, name)
    checkpoint = Checkpoint(
        model.eval(),
        name,
        weight_checks.sha256(files) if commit is None or gguf else commit,
        str(folder),
        commit,
        by_layer=by_layer,
        notes=notes,
        gguf_file=gguf,
        quantization=how,
        configuration=None if commit or gguf else weight_checks.sha256([folder / "config.json"]),
    )
    return adapters.named(checkpoint, options.adapter)


def _check_gguf(name: str, file: Path, options: LoadOptions) -> str:
    weight_files.check_file(file)
    gguf_file.check_installed(name)
    if options.weights == "layers":
        raise CheckpointError(
            f"{name} is a GGUF file, and weights='layers' reads safetensors files only; use "
            "weights='whole'"
        )
    with _explained(name):
        how = gguf_file.quantization(file)
    gguf_file.check_whole(name, file)
    return how


@contextmanager
def _explained(name: str, way: str = "", gguf: Path | None = None) -> Iterator[None]:
    """Silence transformers, and raise CheckpointError in place of whatever it raises.

    Args:
        name: what the user called the checkpoint.
        way: how it is loaded, in words.
        gguf: a GGUF file that is then read once.

    Yields:
        Nothing.

    Raises:
        CheckpointError: files that cannot be loaded.
    """
    try:
        with quiet(), gguf_file.read_once(gguf):
            yield
    except Exception as error:  # broken files raise a zoo of types, down to those of single parsers
        raise CheckpointError(f"{name} could not be loaded{way}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """Return why files cannot be loaded, without advice on the arguments of other libraries."""
    message = first_line(error)
    if "ignore_mismatched_sizes" in message:
        return "its weights have other shapes than its config.json says"
    if unknown := re.search(r"has model type `([^`]*)` but", message):
        return (
            f"its config.json names the model type {unknown[1]!r}, which this version of "
            "transformers does not know"
        )
    if unknown := re.search(r"GGUF model with architecture (\S+) is not supported", message):
        return (
            "this version of transformers reads no GGUF files of the architecture "
            f"{unknown[1]!r}; give the checkpoint that it was made from"
        )
    if "GGUF magic" in message:
        return "it is not a GGUF file, or a damaged one"
    if weight_checks.refused_pickle(error):
        return (
            "its file of weights is damaged or holds other things than weights, none of which "
            "were run; save the model again with save_pretrained"
        )
    return message


def _config(name: str, folder: Path, gguf: str | None = None) -> PreTrainedConfig:
    if gguf is None and (folder / "config.json").is_file():
        weight_files.check_file(folder / "config.json")
    with _explained(name, gguf=folder / gguf if gguf else None):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf)


def _load_whole(
    name: str, folder: Path, config: PreTrainedConfig, how: str | None, gguf: str | None
) -> PreTrainedModel:
    """Return the model with its weights in memory; ``how``: what quantised them."""

    def load(names: dict[str, str] | None) -> tuple[PreTrainedModel, dict[str, Any]]:
        with _explained(name, gguf=folder / gguf if gguf else None):
            model, report = AutoModel.from_pretrained(
                folder,
                config=config,
                attn_implementation="eager",
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
                key_mapping=names,
                adapter_kwargs={"subfolder": adapters.ELSEWHERE},
                gguf_file=gguf,
            )
            return weight_checks.in_floats(model, how), report

    model, report = load(None)
    if report["missing_keys"] and (
        renamed := weight_files.renames(report["unexpected_keys"], config)
    ):
        model, report = load({f"^{re.escape(old)}$": new for old, new in renamed.items()})
    weight_checks.check_filled(report, name)
    if gguf is None:
        weight_checks.check_used(report, how, name)
    assert isinstance(model, PreTrainedModel)
    return model


def _load_by_layer(
    name: str, folder: Path, config: PreTrainedConfig, options: LoadOptions
) -> PreTrainedModel:
    with _explained(name, " layer by layer"):
        model, report = offload.load_offloaded(
            folder, config, dtype=options.dtype, device=torch.device(options.device)
        )
    weight_checks.check_filled(report, name)
    adapters.merge(model, options.adapter)
    return model


def _large(folder: Path, options: LoadOptions) -> bool:
    """Return whether the weights would fill more than half of the free memory."""
    try:
        count = weight_files.numbers(folder)
    except Exception:  # no safetensors files, or broken ones, which loading has sentences for
        return False
    return count * options.dtype.itemsize > devices.available(torch.device(options.device)) / 2


def check_directory(path: Path, name: str) -> None:
    """Refuse a directory without a configuration or without weights.

    Args:
        path: of the directory.
        name: what the user called it.

    Raises:
        CheckpointError: one of them is missing, or there is an adapter alone.
    """
    adapters.refuse_alone(name, path)
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{name} has no config.json; give a directory written by save_pretrained, or the hub "
            "id of a transformers model"
        )
    if not any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        raise CheckpointError(
            f"{name} has a config.json but no weights (model.safetensors or pytorch_model.bin)"
        )
