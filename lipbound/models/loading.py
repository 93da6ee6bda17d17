"""Load a model from a hub id, a local directory, a builtin name, a loaded module, or layers."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import huggingface_hub.errors as hub_errors
import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.utils import enable_progress_bars
from torch import Tensor, nn

from lipbound import errors
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.devices import DTYPES, WEIGHTS, dtype_name, has_float64, resolve_device
from lipbound.errors import (
    CheckpointError,
    InputsError,
    knows_options,
    name_or_none,
    neighbours,
    shown,
    tell,
)
from lipbound.models.capture.capture import Capturer, LayerCapture
from lipbound.models.checkpoint import AnyModel, Checkpoint, Inputs, LoadOptions
from lipbound.models.quiet import first_line, quiet
from lipbound.models.readers.files import is_path
from lipbound.models.sources.catalogue import BUILTINS, PREFIX, builtin_place, load_builtin
from lipbound.models.sources.folder import FILES, Adapter, alone, load_folder, open_adapter
from lipbound.models.sources.loaded_model import load_loaded, load_other, state_sha256
from lipbound.models.weight_files import GGUF, choose_gguf, is_gguf

SAMPLE = "sample"
"""The one input of given layers: the numbers of samples, which they have inside."""


class GivenLayers(nn.Module):
    """Attention layers in the place of a model; its parameters are what they are made of."""

    main_input_name = SAMPLE

    def __init__(self, layers: Sequence[Attention | ModuleAttention]):
        super().__init__()
        self.layers = tuple(layers)
        for i, layer in enumerate(layers):
            for name, t in _tensors(layer).items():
                self.register_parameter(f"{name}_{i}", nn.Parameter(t, requires_grad=False))

    def forward(self, sample: Tensor) -> Tensor:
        """Return nothing new: layers hold their inputs."""
        return sample


def _tensors(layer: Attention | ModuleAttention) -> dict[str, Tensor]:
    if isinstance(layer, ModuleAttention):
        return {"stream": layer.stream}
    return {name.replace(".", "_"): t for name, t in layer.tensors().items()}


def load_layers(model: object, options: LoadOptions) -> Checkpoint | None:
    """Make a checkpoint of a list of layers.

    Args:
        model: a list or tuple of `Attention`, or of what `lipbound.capture` returns, all with as
            many samples.
        options: dtype and device that they are brought to.

    Returns:
        The checkpoint, whose revision is a hash over all tensors; None for anything else.

    Raises:
        CheckpointError: they have different numbers of samples.
    """
    if not isinstance(model, list | tuple) or not model:
        return None
    if not all(isinstance(layer, Attention | ModuleAttention) for layer in model):
        return None
    options.refuse_given("layers")
    samples = [layer.samples // _windows(layer) for layer in model]
    if len(set(samples)) > 1:
        raise CheckpointError(f"layers must have as many samples each; these have {samples}")
    notes = []
    if cast := sum(isinstance(one, Attention) and one.dtype != options.dtype for one in model):
        wanted = str(options.dtype).removeprefix("torch.")
        notes = [f"{cast} of {len(model)} layers are measured in {wanted}, not in their own dtype"]
        tell(*notes)
    brought = (
        layer.to(options.device).to(options.dtype) if isinstance(layer, Attention) else layer
        for layer in model
    )
    made, name = GivenLayers(tuple(brought)), f"{len(model)} layer{'s' * (len(model) > 1)}"
    return Checkpoint(made, name, state_sha256(made), None, loaded=True, notes=notes)


def _windows(layer: Attention | ModuleAttention) -> int:
    return layer.windows if isinstance(layer, ModuleAttention) else 1


def inputs_of(model: GivenLayers, data: Any, count: int | None) -> Inputs:
    """Return the inputs of given layers, which are those that they hold.

    Args:
        model: of the layers.
        data: must be None.
        count: of samples wanted, or None for all.

    Raises:
        InputsError: data were given.
    """
    if data is not None:
        raise InputsError("layers bring their own inputs; leave out data")
    there = model.layers[0].samples // _windows(model.layers[0])
    return Inputs({SAMPLE: torch.arange(there)[:count]}, "inputs of the layers")


class GivenCapturer(Capturer):
    """Hands out given layers as a `Capturer` does captured ones."""

    def each(
        self, inputs: Mapping[str, Tensor] | Inputs, skip: Collection[int] = ()
    ) -> Iterator[LayerCapture]:
        assert isinstance(self.model, GivenLayers)
        assert isinstance(inputs, Mapping)
        layers, numbers = self.model.layers, inputs[SAMPLE]
        self.count = len(layers)
        first, stop = int(numbers[0]), int(numbers[-1]) + 1
        for position, i in enumerate(self._chosen(self.count)):
            if position not in skip:
                windows = _windows(layers[i])
                part = layers[i].select(slice(first * windows, stop * windows))
                yield LayerCapture(i, f"layers.{i}", part, 0.0, windows)

    def examine(self, inputs: Mapping[str, Tensor]) -> None:
        """Tell nothing: samples of a layer do not see each other."""


__all__ = ["SOURCES", "WEIGHTS", "Checkpoint", "load_checkpoint"]


@knows_options
def load_checkpoint(
    model: AnyModel,
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
        adapter: a LoRA adapter that PEFT merges into the weights (extra ``adapters``): the
            directory that PEFT wrote, or its hub id. "none" or False: none, where one lies beside
            the weights; without either such a checkpoint is refused. A directory or a hub id with
            nothing but an adapter may also be ``model``: it names its model.

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
    errors.choice("weights", weights, WEIGHTS)
    if isinstance(model, str | Path) and not str(model).strip():
        raise CheckpointError("model is empty; give a hub id, a directory or 'builtin:minilm'")
    named, kind = name_or_none("revision", revision), DTYPES[dtype_name(dtype, CheckpointError)]
    place, file = resolve_device(device), name_or_none("gguf_file", gguf_file)
    options = LoadOptions(named, kind, place, weights, file, _adapter(adapter))
    if options.dtype == torch.float64 and not has_float64(options.device):
        raise CheckpointError(
            f"dtype is 'float64', which the device {str(options.device)!r} does not have; take "
            "dtype='float32', or device='cpu'"
        )
    companions = {"tokenizer": tokenizer, "processor": processor}
    for name, value in companions.items():
        if value is not None and not (isinstance(value, str | Path) and str(value).strip()):
            raise CheckpointError(
                f"{name} is {shown(value)}; give a directory (of a loaded one, that of its "
                "save_pretrained) or a hub id"
            )
    checkpoint = next(filter(None, (source(model, options) for source in SOURCES)), None)
    if checkpoint is None:
        raise CheckpointError(
            f"model is {'a class' if isinstance(model, type) else shown(model)}; give a hub id, a "
            "directory, 'builtin:NAME', a loaded transformers model or another torch module"
        )
    _give(checkpoint, companions)
    return checkpoint


def _give(checkpoint: Checkpoint, companions: dict[str, Any]) -> None:
    """Have a checkpoint take the tokenizer or processor that was named, and tell of another."""
    checkpoint.tokenizer_from, checkpoint.processor_from = (
        None if value is None else str(builtin_place(str(value)) or value)
        for value in companions.values()
    )
    other = {"image": "tokenizer", "text": "processor"}.get(checkpoint.modality, "")
    if companions.get(other) is not None:
        reads = checkpoint.modality.replace("image", "images")
        note = f"{other} {companions[other]} is not looked at: {checkpoint.name} reads {reads}"
        checkpoint.notes.append(note)
        tell(note)


def load_directory(model: object, options: LoadOptions) -> Checkpoint | None:
    """Load a checkpoint from a directory of this machine, or from a GGUF file.

    Args:
        model: a directory with config.json and weights, as save_pretrained writes it, or with a
            GGUF file; or such a file itself.
        options: as `load_folder` takes them.

    Returns:
        The checkpoint; None where nothing is there and the name may be a hub id.

    Raises:
        CheckpointError: it is no such directory, lacks files, or cannot be loaded.
    """
    if not isinstance(model, str | Path):
        return None
    name, path, wanted = str(model), Path(model).expanduser(), options.gguf_file
    if not path.exists():
        if not (is_path(name) or name.count("/") > 1 or is_gguf(name)):
            return None
        instead = "give a checkpoint directory, a GGUF file, a hub id (owner/name) or a builtin"
        raise CheckpointError(f"there is no directory or file {name}; {suggestion(name, instead)}")
    options.refuse_given(f"the directory {name}", "revision")
    if path.is_dir() and wanted is None and alone(path):
        return load_adapted(name, path, None, options)
    if path.is_dir():
        found = [file.name for file in path.glob(f"*{GGUF}")]
        # a directory that has a config.json is what save_pretrained wrote, unless a file is wanted
        saved = wanted is None and ((path / "config.json").exists() or not found)
        gguf = None if saved else choose_gguf(found, wanted, name)
        return load_folder(name, path, None, options, gguf)
    if not is_gguf(name) or wanted not in (None, path.name):
        given = "" if wanted is None else f", and gguf_file is {wanted!r}"
        raise CheckpointError(
            f"{name} is a file{given}; give one GGUF file, or the directory that holds config.json"
        )
    return load_folder(name, path.parent, None, options, path.name)


def load_hub(model: object, options: LoadOptions) -> Checkpoint | None:
    """Load a checkpoint from the hub, or from its cache when the hub is out of reach.

    Args:
        model: a hub id, "owner/name" or "name", with "@revision" behind it or without.
        options: as `load_folder` takes them.

    Returns:
        The checkpoint; None for what is no name.

    Raises:
        CheckpointError: it cannot be had.
    """
    if not isinstance(model, str | Path):
        return None
    name, _, suffix = str(model).partition("@")
    if suffix and options.revision not in (None, suffix):
        raise CheckpointError(
            f"two revisions were given, {suffix!r} in the name and {options.revision!r}; give one"
        )
    wanted = options.gguf_file
    folder = snapshot(name, suffix or options.revision, wanted)
    if wanted is None and alone(folder):
        return load_adapted(str(model), folder, folder.name, options)
    if wanted is not None:
        choose_gguf((file.name for file in folder.glob(f"*{GGUF}")), wanted, f"{model} on the hub")
    return load_folder(str(model), folder, folder.name, options, wanted)


def load_adapted(name: str, folder: Path, commit: Any, options: LoadOptions) -> Checkpoint | None:
    """Load the model that an adapter was trained on, and merge the adapter into it.

    Args:
        name: what the user called the adapter.
        folder: with it.
        commit: its hub commit, or None.
        options: of what is loaded; ``revision`` is the adapter's.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: the adapter does not say which model that is, or that is an adapter too.
    """
    adapter = open_adapter(name, folder)
    if not adapter.base:
        raise CheckpointError(f"the adapter {name} names no model; give one, with adapter={name!r}")
    if options.adapter is not None:
        raise CheckpointError(f"{name} is itself an adapter, of {adapter.base}; give that")
    here = Path(adapter.base).expanduser().exists() or adapter.base.startswith(PREFIX)
    revision = None if here else adapter.config.get("revision")
    wanted = replace(options, adapter=adapter, revision=revision)
    sources = (load_builtin, load_directory, load_hub)
    found = next(filter(None, (source(adapter.base, wanted) for source in sources)), None)
    return None if found is None else replace(found, commit=commit)


def _adapter(given: object) -> Adapter | str | None:
    """Return the adapter that was asked for, fetched from the hub where it is no directory here.

    Args:
        given: a directory, or a hub id; "none" or False; or None.

    Raises:
        CheckpointError: there is no such adapter, or it cannot be had.
    """
    name = errors.adapter_name(given)
    if name in (None, "none"):
        return name
    folder = Path(name).expanduser()
    if not folder.exists() and is_path(name):
        raise CheckpointError(f"there is no directory {name}; give PEFT's, or a hub id")
    repo, _, revision = name.partition("@")
    there = folder if folder.exists() else snapshot(repo, revision or None, only=FILES)
    return open_adapter(name, there)


def snapshot(
    repo: str, revision: str | None, gguf_file: str | None = None, only: Sequence[str] = ()
) -> Path:
    """Fetch a hub model, or find it in the cache when the hub is out of reach.

    Args:
        repo: its hub id.
        revision: branch, tag or commit.
        gguf_file: the one file that is wanted, if it is one.
        only: the names of an adapter's files, in place of a model's.

    Returns:
        The folder in the cache, named by the commit.

    Raises:
        CheckpointError: there is no such model, or it is not accessible.
    """
    try:
        with quiet():
            if sys.stderr.isatty():
                enable_progress_bars()
            names = _wanted(repo, revision, gguf_file, only)
            rest: Any = {"allow_patterns": names, "local_files_only": names is None}
            return Path(snapshot_download(repo, revision=revision, **rest))
    except (hub_errors.HFValidationError, OSError) as error:
        at = f"{repo} at revision {revision!r}" if revision else repo
        raise CheckpointError(_why_not(error, repo, at)) from error


def _why_not(error: Exception, repo: str, at: str) -> str:
    """Return why a hub model cannot be had, and what to do."""
    if isinstance(error, hub_errors.GatedRepoError):
        return f"{repo} is a gated model; accept its conditions on the hub, then `hf auth login`"
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return f"{at} was not found on the hub; give a branch, a tag or a full commit hash"
    if isinstance(error, hub_errors.HFValidationError):
        why, instead = "is neither a directory here nor a valid hub id", "hub ids are owner/name"
    elif isinstance(error, hub_errors.RepositoryNotFoundError):
        why = "was not found on the hub, nor is it a directory here"
        instead = "check the spelling, or log in if it is private"
    elif isinstance(error, hub_errors.LocalEntryNotFoundError):
        off = "HF_HUB_OFFLINE forbids looking on the hub"
        reason = off if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        why, instead = f"is not in the local cache, and {reason}", "connect, or give a directory"
    else:
        return f"{at} could not be fetched from the hub: {first_line(error)}"
    return f"{at} {why}; {suggestion(repo, instead)}"


def _wanted(repo: str, revision: Any, gguf_file: Any, only: Sequence[str]) -> list[str] | None:
    """List the files of a hub model that are needed; the arguments are those of `snapshot`.

    Returns:
        Configuration, tokenizer or processor, and one format of weights; or the GGUF file, which
        has all. None: the hub is out of reach.

    Raises:
        CheckpointError: the GGUF file is not there, or there are only such files, and none was
            named.
        HfHubHTTPError: the hub has no such model.
        HFValidationError: the name is no hub id.
    """
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=15)
    except Exception as error:  # no connection, in whatever type the HTTP client reports it
        status = getattr(getattr(error, "response", None), "status_code", 500)
        named = isinstance(error, hub_errors.HfHubHTTPError) and status < 500
        if named or isinstance(error, hub_errors.HFValidationError):
            raise
        return None
    if only:
        return list(only)
    names = [sibling.rfilename for sibling in info.siblings or [] if "/" not in sibling.rfilename]
    packed = [name for name in names if name.endswith(GGUF)]
    weights = [n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]
    weights = weights or [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]
    if gguf_file is not None:
        return [choose_gguf(packed, gguf_file, f"{repo} on the hub")]
    if packed and not weights:
        raise CheckpointError(
            f"{repo} on the hub has GGUF files only; name one with gguf_file=, "
            f"{' or '.join(map(repr, packed[:6]))}"
        )
    others = (".json", ".txt", ".model", ".jinja", ".tiktoken")
    return weights + [name for name in names if name.endswith(others)]


def suggestion(name: str, otherwise: str) -> str:
    """Suggest checkpoints that a mistyped name can mean.

    Args:
        name: what was given.
        otherwise: what to do where nothing is like it.

    Returns:
        The part of a message that names builtins, models in the hub's cache and directories nearby,
        or ``otherwise``.
    """
    wanted = name.partition("@")[0].rstrip("/")
    cached = (one.name for one in Path(constants.HF_HUB_CACHE).glob("models--*"))
    known = [PREFIX + one for one in BUILTINS]
    known += [one.removeprefix("models--").replace("--", "/", 1) for one in cached]
    parent, beside = Path(wanted).parent, []
    with suppress(OSError, ValueError, RuntimeError):
        folders = (file.parent for file in parent.expanduser().glob("*/config.json"))
        beside = [str(parent / folder.name) for folder in folders]
    by_end = {one.rpartition("/")[2].removeprefix(PREFIX): one for one in (*known, *beside)}
    close = neighbours(wanted, known, cutoff=0.75)
    close += [by_end[one] for one in neighbours(wanted.rpartition("/")[2], by_end, cutoff=0.75)]
    found = [one for one in dict.fromkeys(close) if one != name][:3]
    return f"did you mean {' or '.join(map(repr, found))}?" if found else otherwise


SOURCES = (load_loaded, load_layers, load_builtin, load_other, load_directory, load_hub)
"""Loaders of the kinds of checkpoints, in the order in which they are asked.

Each takes what the user gave and returns None where that is not of its kind, else the model in
evaluation mode, with finite weights that fill its architecture; it raises CheckpointError where the
model is not found or cannot be loaded as the options say.
"""
