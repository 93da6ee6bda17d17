"""Checkpoints in one GGUF file, llama.cpp's format: weights, mostly quantised, configuration and
tokenizer together.

transformers' own reader turns the weights into the floating-point numbers that they stand for,
which are what is measured.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from lipbound import devices
from lipbound.errors import CheckpointError, LipboundError, nearest
from lipbound.models import gguf_file
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.precision import check_floating
from lipbound.models.quiet import first_line, quiet
from lipbound.models.sources import adapters
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.weight_checks import check_filled, check_finite, sha256
from lipbound.models.weight_files import check_file

SUFFIX = ".gguf"


def choose(folder: Path, wanted: str | None, name: str) -> Path:
    """The GGUF file of a folder.

    Args:
        folder: where to look.
        wanted: its name there; None for the only one.
        name: what the user called the folder, for messages.

    Raises:
        CheckpointError: there is no such file, or there are several and none was named.
    """
    there = sorted(file.name for file in folder.glob(f"*{SUFFIX}"))
    if wanted is None and len(there) == 1:
        return folder / there[0]
    if wanted is None:
        raise CheckpointError(
            f"{name} holds several GGUF files; name one with gguf_file=, "
            f"{' or '.join(map(repr, there))}"
        )
    if not wanted.endswith(SUFFIX):
        raise CheckpointError(
            f"gguf_file is {wanted!r}; give the name of a file that ends with {SUFFIX}"
        )
    if not (folder / wanted).is_file():
        raise CheckpointError(
            f"{name} has no file {wanted}; "
            f"{nearest(wanted, there) if there else 'it holds no GGUF file at all'}"
        )
    return folder / wanted


def load_gguf(name: str, file: Path, commit: str | None, options: LoadOptions) -> Checkpoint:
    """The model of a GGUF file, its weights in memory.

    Args:
        name: what the user called it, for messages.
        file: with weights, configuration and tokenizer.
        commit: the hub commit, or None.
        options: dtype and device; weights cannot stay on disk.

    Raises:
        CheckpointError: the extra is not installed, a file or an architecture that transformers
            cannot read, one piece of several, or weights that do not fill the architecture or are
            not finite.
        LipboundError: more weights than the memory takes.
    """
    check_file(file)
    notes = adapters.refuse_unasked(name, file.parent, options.adapter)
    gguf_file.check_installed(name)
    if options.weights == "layers":
        raise CheckpointError(
            f"{name} is a GGUF file, and weights='layers' reads safetensors files only; use "
            "weights='whole'"
        )
    try:
        pieces, count, how = (
            gguf_file.field(file, "split.count"),
            gguf_file.numbers(file),
            gguf_file.quantization(file),
        )
    except Exception as error:  # broken files raise a zoo of types
        raise CheckpointError(f"{name} could not be loaded: {_why(error)}") from error
    if pieces is not None and int(pieces) > 1:
        raise CheckpointError(
            f"{name} is one of {int(pieces)} pieces of a model; join them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    instead = "give the safetensors checkpoint that it was made from, with weights='layers'"
    devices.require(
        4.0 * count, torch.device("cpu"), f"the weights of {name} take memory in float32", instead
    )
    model = _read(name, file, options.refuse)
    check_floating(model, name)
    model = model.to(dtype=options.dtype)
    adapters.merge(model, options.adapter)
    model = model.to(device=options.device)
    check_finite(model, name)
    checkpoint = Checkpoint(
        model.eval(),
        name,
        f"sha256:{sha256([file])}",
        str(file.parent),
        commit,
        gguf_file=file.name,
        quantization=how,
        notes=notes,
    )
    return adapters.named(checkpoint, options.adapter)


def _read(name: str, file: Path, refuse: Callable[[PreTrainedConfig], None]) -> PreTrainedModel:
    try:
        with quiet(), gguf_file.read_once(file):
            config = AutoConfig.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
            refuse(config)
            model, report = AutoModel.from_pretrained(
                file.parent,
                gguf_file=file.name,
                config=config,
                attn_implementation="eager",
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
                adapter_kwargs={"subfolder": adapters.ELSEWHERE},
            )
    except LipboundError:
        raise
    except Exception as error:  # broken files raise a zoo of types
        raise CheckpointError(f"{name} could not be loaded: {_why(error)}") from error
    check_filled(report, name)
    assert isinstance(model, PreTrainedModel)
    return model


def _why(error: Exception) -> str:
    """What is wrong with a file, without advice on other libraries' arguments."""
    message = first_line(error)
    if unknown := re.search(r"GGUF model with architecture (\S+) is not supported", message):
        return (
            "this version of transformers reads no GGUF files of the architecture "
            f"{unknown[1]!r}; give the checkpoint that it was made from"
        )
    return "it is not a GGUF file, or a damaged one" if "magic" in message else message
