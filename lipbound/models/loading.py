"""Load a model from a hub id, a directory, a builtin name, a loaded module, or layers.

Weights are in memory, or stay in their files and are read layer by layer. Quantised ones are turned
back into floating-point numbers, or refused by name.
"""

import inspect
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import huggingface_hub.errors as hub_errors
import torch
from huggingface_hub import HfApi, constants, snapshot_download, utils
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, __version__
from transformers import modeling_utils as modeling
from transformers.integrations import peft as integration
from transformers.models.auto import auto_factory
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lipbound import devices, errors
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.devices import DTYPES, WEIGHTS, dtype_name, has_float64, resolve_device
from lipbound.errors import CheckpointError, knows_options, name_or_none, shown, tell
from lipbound.models import weight_files
from lipbound.models.capture.capture import Capturer, LayerCapture
from lipbound.models.catalogue import BUILTINS, PREFIX, known_builtin
from lipbound.models.checkpoint import AnyModel, Checkpoint, LoadOptions, load_loaded
from lipbound.models.other_libraries import answers, explained, first_line, quiet, temporarily
from lipbound.models.readers import is_path

__all__ = ["Checkpoint", "load_checkpoint"]

SAMPLE = "sample"
"""The one input of given layers: the numbers of samples, which they have inside."""
AFTERWARDS = ("bitsandbytes", "higgs")
"""Methods whose models transformers turns back once they are loaded (``model.dequantize()``)."""
INSTEAD = "give the checkpoint that was quantized"
FETCHED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.safetensors")
"""Files of a hub model that are fetched: configuration, tokenizer or processor, and weights."""
REASONS = {
    hub_errors.GatedRepoError: "is a gated model; accept its conditions, then `hf auth login`",
    hub_errors.RevisionNotFoundError: "was not found on the hub; give a branch, a tag or a commit",
    hub_errors.HFValidationError: "is neither a directory nor a hub id; hub ids are owner/name",
    hub_errors.RepositoryNotFoundError: "was not found on the hub; check the spelling, or log in",
    hub_errors.LocalEntryNotFoundError: "is not in the local cache, and {}; give a directory",
}
"""Why a hub model cannot be had, and what to do, by the first that an error is of."""
PEFT_FILES = PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base model's weights as they are."""
PATH = "base_model.model."
"""Prefix that PEFT gives to names of tensors."""
_FINDER = "find_adapter_config_file"
Stored = Mapping[str, weight_files.TensorRef]
"""Tensors of files, by name."""


class GivenLayers(nn.Module):
    """Attention layers in the place of a model; its parameters are what they are made of."""

    main_input_name = SAMPLE

    def __init__(self, layers: Sequence[Attention | ModuleAttention]):
        super().__init__()
        self.layers = tuple(layers)
        for i, layer in enumerate(layers):
            given = layer.tensors() if isinstance(layer, Attention) else {"stream": layer.stream}
            for name, t in given.items():
                key = f"{name.replace('.', '_')}_{i}"
                self.register_parameter(key, nn.Parameter(t, requires_grad=False))

    @property
    def samples(self) -> list[int]:
        """Numbers of samples of each layer."""
        return [layer.samples // getattr(layer, "windows", 1) for layer in self.layers]


def load_layers(model: Any, options: LoadOptions) -> Checkpoint | None:
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
    several = isinstance(model, list | tuple) and len(model) > 0
    if not several or not all(isinstance(one, Attention | ModuleAttention) for one in model):
        return None
    options.refuse_given("layers")
    notes = []
    if cast := sum(isinstance(one, Attention) and one.dtype != options.dtype for one in model):
        wanted = str(options.dtype).removeprefix("torch.")
        notes = [f"{cast} of {len(model)} layers are measured in {wanted}, not in their own dtype"]
    brought = (
        layer.to(options.device).to(options.dtype) if isinstance(layer, Attention) else layer
        for layer in model
    )
    made, name = GivenLayers(tuple(brought)), f"{len(model)} layer{'s' * (len(model) > 1)}"
    if len(set(made.samples)) > 1:
        raise CheckpointError(f"layers must have as many samples each; these have {made.samples}")
    return Checkpoint(made, name, weight_files.state_sha256(made), None, loaded=True, notes=notes)


class GivenCapturer(Capturer):
    """Hands out given layers as a `Capturer` does captured ones."""

    def each(self, inputs: Any, skip: Collection[int] = ()) -> Iterator[LayerCapture]:
        assert isinstance(self.model, GivenLayers)
        layers, numbers = self.model.layers, inputs[SAMPLE]
        first, stop = int(numbers[0]), int(numbers[-1]) + 1
        for i in self._chosen(len(layers), skip):
            windows = getattr(layers[i], "windows", 1)
            part = layers[i].select(slice(first * windows, stop * windows))
            yield LayerCapture(i, f"layers.{i}", part, 0.0, windows)


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
            "builtin:qwen3", "builtin:vit", "builtin:vit-baseline", "builtin:vit-jasmin", or a
            loaded transformers model or other torch module (used as it is, moved and cast).
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
            infinite weights, weights of another format for "layers". A model loaded in layers
            raises it later on, too, when its files are gone or have changed.

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
        what = f"dtype is 'float64', which the device {str(options.device)!r} does not have"
        raise CheckpointError(f"{what}; take dtype='float32', or device='cpu'")
    given = {"tokenizer": tokenizer, "processor": processor}
    places = {what: _place(what, one) for what, one in given.items()}
    checkpoint = load_loaded(model, options) or load_layers(model, options)
    checkpoint = checkpoint or load_named(model, options)
    checkpoint.tokenizer_from, checkpoint.processor_from = places.values()
    other = {"image": "tokenizer", "text": "processor"}.get(checkpoint.modality, "")
    if places.get(other) is not None:
        what = f"{other} {places[other]} is not looked at: {checkpoint.name} reads "
        checkpoint.notes.append(what + checkpoint.modality.replace("image", "images"))
    tell(*checkpoint.notes)
    return checkpoint


def _place(what: str, given: object) -> str | None:
    """Return the directory or hub id of the tokenizer or the processor that was given, if any."""
    if given is None:
        return None
    if not isinstance(given, str | Path) or not str(given).strip():
        raise CheckpointError(f"{what} is {shown(given)}; give its directory or hub id")
    name = known_builtin(given)
    return str(given) if name is None else str(BUILTINS[name].place(name))


def load_named(model: object, options: LoadOptions) -> Checkpoint:
    """Load a checkpoint that comes with lipbound, lies on this machine, or is on the hub.

    Args:
        model: "builtin:NAME"; a directory with config.json and weights, as save_pretrained writes
            it, or with a GGUF file; such a file itself; or a hub id, "owner/name" or "name", with
            "@revision" behind it or without.
        options: as `load_folder` takes them.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be loaded as the options say.
    """
    if not isinstance(model, str | Path):
        kinds = "a hub id, a directory, 'builtin:NAME', a transformers model, another torch module"
        what = "a class" if isinstance(model, type) else shown(model)
        raise CheckpointError(f"model is {what}; give {kinds}, or a list of lipbound.Attention")
    name, path, gguf = str(model), Path(model).expanduser(), options.gguf_file
    if (builtin := known_builtin(name)) is not None:
        options.refuse_given(f"the builtin checkpoint {builtin!r}", "revision", "gguf_file")
        found = BUILTINS[builtin]
        wanted = replace(options, gguf_file=found.gguf)
        checkpoint = load_folder(PREFIX + builtin, found.place(builtin), None, wanted)
        found.check(checkpoint.revision.partition("+")[0])
        return checkpoint
    packed = name.lower().endswith(weight_files.GGUF)
    if not path.exists() and (is_path(name) or name.count("/") > 1 or packed):
        instead = "give a checkpoint directory, a GGUF file, a hub id (owner/name) or a builtin"
        raise CheckpointError(f"there is no directory or file {name}; {suggestion(name, instead)}")
    if path.exists():
        options.refuse_given(f"the directory {name}", "revision")
        if path.is_dir():
            return load_folder(name, path, None, options)
        if not packed or gguf not in (None, path.name):
            given = "" if gguf is None else f", and gguf_file is {gguf!r}"
            what = "give one GGUF file, or the directory that holds config.json"
            raise CheckpointError(f"{name} is a file{given}; {what}")
        return load_folder(name, path.parent, None, replace(options, gguf_file=path.name))
    repo, _, suffix = name.partition("@")
    if suffix and options.revision not in (None, suffix):
        raise CheckpointError(
            f"two revisions were given, {suffix} and {options.revision}; give one"
        )
    files = () if gguf is None else (gguf,)
    folder = snapshot(repo, suffix or options.revision, *files)
    return load_folder(name, folder, folder.name, options)


def load_adapted(name: str, folder: Path, commit: Any, options: LoadOptions) -> Checkpoint:
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
    found = load_named(adapter.base, replace(options, adapter=adapter, revision=revision))
    return replace(found, commit=commit)


def _adapter(given: object) -> "LoraAdapter | str | None":
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
    there = folder if folder.exists() else snapshot(repo, revision or None, *PEFT_FILES)
    return open_adapter(name, there)


def snapshot(repo: str, revision: str | None, *wanted: str) -> Path:
    """Fetch a hub model, or find it in the cache when the hub is out of reach.

    Args:
        repo: its hub id.
        revision: branch, tag or commit.
        *wanted: names of the files; without any, configuration, tokenizer or processor, and one
            format of weights.

    Returns:
        The folder in the cache, named by the commit.

    Raises:
        CheckpointError: there is no such model, or it is not accessible.
    """
    options: Any = {"revision": revision, "ignore_patterns": ["*/*", "consolidated*"]}
    try:
        with quiet():
            if sys.stderr.isatty():
                utils.enable_progress_bars()
            there = answers(HfApi().model_info, repo, revision=revision)
            options["local_files_only"] = not there
            found = snapshot_download(repo, allow_patterns=list(wanted or FETCHED), **options)
            if not wanted and not any(Path(found).glob("*.safetensors")):
                snapshot_download(repo, allow_patterns=["pytorch_model*.bin"], **options)
            return Path(found)
    except Exception as error:  # no connection, in whatever type the HTTP client reports it
        offline = "HF_HUB_OFFLINE forbids looking on the hub"
        off = offline if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        other = f"could not be fetched from the hub ({first_line(error)}); try again"
        kinds = (said.format(off) for kind, said in REASONS.items() if isinstance(error, kind))
        why, _, instead = next(kinds, other).rpartition("; ")
        if not isinstance(error, hub_errors.GatedRepoError | hub_errors.RevisionNotFoundError):
            instead = suggestion(repo, instead)
        at = f"{repo} at revision {revision!r}" if revision else repo
        raise CheckpointError(f"{at} {why}; {instead}") from error


def suggestion(name: str, otherwise: str) -> str:
    """Return the part of a message that names the builtins that a name can mean, or the other."""
    close = [PREFIX + one for one in errors.neighbours(name, BUILTINS, cutoff=0.75)]
    return f"did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def load_folder(name: str, folder: Path, commit: str | None, options: LoadOptions) -> Checkpoint:
    """Load the model of a folder, its weights in memory or left on disk.

    Args:
        name: what the user called it, for messages.
        folder: where config.json, weights and tokenizer or processor are, or a GGUF file that has
            all of them, or an adapter that names its model.
        commit: the hub commit; without one a hash over the files of weights is the revision.
        options: dtype, device and residence of the weights, and which GGUF file.

    Returns:
        The model in evaluation mode, with the adapter that was asked for.

    Raises:
        CheckpointError: files that transformers cannot load, weights that do not fill the
            architecture or are not finite. LipboundError for a GGUF file larger than the memory.
    """
    if sys.flags.optimize > 1:
        raise CheckpointError("transformers needs its docstrings; run python without -OO")
    saved, adapted = ((folder / one).is_file() for one in ("config.json", PEFT_CONFIG))
    if options.gguf_file is None and adapted and not (saved and weight_files.candidates(folder)):
        return load_adapted(name, folder, commit, options)
    # of a hub model, the cache need not have all files
    gguf = weight_files.choose_gguf(folder, options.gguf_file, name, saved or commit is not None)
    if gguf is None and not saved:
        what = "give what save_pretrained writes, or name a GGUF file with gguf_file="
        raise CheckpointError(f"{name} has no config.json; {what}")
    file = None if gguf is None else folder / gguf
    merged = options.adapter if isinstance(options.adapter, LoraAdapter) else None
    if adapted and options.adapter is None:
        say = f"adapter={name!r} merges it, adapter='none' leaves it out"
        raise CheckpointError(f"{name} holds an adapter beside its weights ({PEFT_CONFIG}); {say}")
    with _loading(name):
        how = weight_files.check_gguf(name, file) if file else None
    with _loading(name, file):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf)
    check_rotary(config, name)
    files, unread = ([file], []) if file else weight_files.files(folder)
    stored = weight_files.stored_tensors(files)
    layers = _by_layer(name, file, stored, options)
    if layers:
        if not (file or stored):
            what = "weights='layers' reads safetensors and GGUF files only; use weights='whole'"
            raise CheckpointError(f"{name} has its weights in {files[0].name}, and {what}")
        with _loading(name, file):
            stored = weight_files.gguf_tensors(file, config) if file else stored
            place = options.dtype, options.device
            model, report = weight_files.load_offloaded(stored, config, *place)
        if file and any(map(weight_files.matters, report["missing_keys"])):
            raise CheckpointError(f"{name} could not be loaded: {weight_files.OTHER_FORM}")
        check_filled(report, name)
    else:
        how = how or ask_for_floats(config, name, stored)
        model = _load_whole(name, folder, config, how, gguf)
        weight_files.check_floating(model, name)
        if how is None:
            check_stored(stored, model, name)
        model = model.to(dtype=options.dtype)
        if merged is not None:
            merged.merge(model)
        model = model.to(device=options.device)
    if not (layers and options.lazy):
        weight_files.check_weights(model, name)
    revision = weight_files.sha256(files) if commit is None or gguf else commit
    config_sha = None if commit or gguf else weight_files.sha256([folder / "config.json"])
    checkpoint = Checkpoint(model.eval(), name, revision, str(folder), commit, by_layer=layers)
    checkpoint.notes, checkpoint.configuration = unread, config_sha
    checkpoint.gguf_file, checkpoint.quantization = gguf, how
    return checkpoint if merged is None else with_adapter(checkpoint, merged)


@contextmanager
def _loading(name: str, gguf: Path | None = None) -> Iterator[None]:
    """Silence transformers, and raise CheckpointError in place of whatever it raises."""
    before, why = f"{name} could not be loaded: ", weight_files.unreadable
    with explained(CheckpointError, before, why=why), quiet(), weight_files.gguf_read_once(gguf):
        yield


def _by_layer(name: str, gguf: Path | None, stored: Stored, options: LoadOptions) -> bool:
    """Return whether weights stay on disk: where it was asked for, or they fill half the memory.

    Raises:
        CheckpointError: it was asked for, and an adapter is to be merged. LipboundError for a GGUF
            file larger than the memory that it was to be read into.
    """
    merged = isinstance(options.adapter, LoraAdapter)
    if merged and options.weights == "layers":
        raise CheckpointError("adapters are merged in memory; use weights='whole', not 'layers'")
    if options.weights == "layers":
        return True
    tensors = weight_files.gguf_of(gguf).tensors if gguf else stored.values()
    size = sum(prod(map(int, one.shape)) for one in tensors)
    whole = merged or options.weights == "whole"
    if gguf and whole:
        what = f"the weights of {name} take memory in float32"
        devices.require(4 * size, torch.device("cpu"), what, "use weights='layers'")
    much = size * options.dtype.itemsize > devices.available(torch.device(options.device)) / 2
    return not whole and size > 0 and (options.lazy or much)


def _load_whole(
    name: str, folder: Path, config: PretrainedConfig, how: str | None, gguf: str | None
) -> PreTrainedModel:
    """Return the model with its weights in memory; ``how``: what quantised them."""
    # an adapter beside the weights would be loaded, or its model; arguments say so in new versions
    looking = [one for one in (auto_factory, integration, modeling) if hasattr(one, _FINDER)]
    unseen = temporarily(_FINDER, lambda *place, **options: None, *looking)
    with _loading(name, folder / gguf if gguf else None), unseen:
        wanted: dict[str, Any] = {"config": config, "gguf_file": gguf, "dtype": torch.float32}
        wanted |= {"attn_implementation": "eager", "trust_remote_code": False}
        model, report = AutoModel.from_pretrained(folder, output_loading_info=True, **wanted)
        model = model.dequantize() if how in AFTERWARDS else model
    check_filled(report, name)
    unused = sorted(filter(weight_files.matters, report["unexpected_keys"]))
    if how is not None and gguf is None and unused:
        what = f"transformers left {unused[0]} unused when it turned back what {how} quantized"
        raise CheckpointError(f"{name} could not be loaded: {what}; {INSTEAD}")
    return model


def check_rotary(config: PretrainedConfig, name: str) -> None:
    """Refuse rotary embeddings that transformers before 5 would pass over without a word.

    Args:
        config: of the checkpoint, as the transformers that is installed reads it.
        name: what the user called it.

    Raises:
        CheckpointError: transformers 5 saved it, and an older one reads other angles.
    """
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        said, scaling = (getattr(part, f"rope_{key}", None) for key in ("parameters", "scaling"))
        read = {"rope_theta": getattr(part, "rope_theta", None), "rope_type": "default"}
        if said and said != read | (scaling or {}) and __version__ < "5":
            what = f"{name} was saved by transformers {config.transformers_version}"
            why = f"{__version__} does not read its rope_parameters"
            raise CheckpointError(f"{what}, and {why}; install transformers>=5")


def check_filled(report: dict[str, Any], name: str) -> None:
    """Refuse weights that leave tensors of the model random.

    Args:
        report: of transformers, on loading: missing, mismatched and unexpected tensors.
        name: what the user called the checkpoint.

    Raises:
        CheckpointError: tensors that attention may depend on are missing or of another shape.
    """
    missing = [key for key in report["missing_keys"] if weight_files.matters(key)]
    other = report["mismatched_keys"]
    wrong = missing + [str(item[0] if isinstance(item, tuple) else item) for item in other]
    if wrong:
        others = sorted(str(key) for key in report["unexpected_keys"])
        instead = f"; what is there instead is {', '.join(others[:2])}" if others else ""
        what = f"{len(wrong)} tensors are missing or of another shape, {min(wrong)} among them"
        start = f"the weights of {name} do not fill its architecture"
        raise CheckpointError(f"{start}: {what}, and would be random numbers{instead}")


def ask_for_floats(config: PretrainedConfig, name: str, stored: Stored) -> str | None:
    """Have transformers turn weights back while it loads them, where it can.

    Args:
        config: of the checkpoint; what it says of quantisation is changed.
        name: what the user called the checkpoint, for messages.
        stored: tensors of its safetensors files.

    Returns:
        What quantised the weights, as the configuration calls it; None where nothing did.

    Raises:
        CheckpointError: weights that transformers does not turn back, or misreads.
    """
    said: Any = getattr(config, "quantization_config", None)
    if said is None:
        return None
    said = dict(said if isinstance(said, Mapping) else said.to_dict())
    method = said.get("quant_method")
    how = str(getattr(method, "value", method) or "an unnamed method")
    if how not in AFTERWARDS:
        kind: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(how)
        if kind is None or "dequantize" not in inspect.signature(kind.__init__).parameters:
            what = f"were quantized with {how}, which transformers does not turn back"
            raise CheckpointError(f"the weights of {name} {what}; {INSTEAD}")
        config.quantization_config = said | {"dequantize": True}
    block = said.get("weight_block_size")
    for key, tensor in stored.items() if block else ():
        # of such blocks transformers would take the scales of others
        if f"{key}_scale_inv" in stored and any(
            size % part for size, part in zip(tensor.shape[-2:], block, strict=True)
        ):
            what = f"is no whole number of quantized blocks of {block[0]} x {block[1]}"
            raise CheckpointError(f"{key} of {name} {what}; {INSTEAD}")
    return how


def check_stored(stored: Stored, model: PreTrainedModel, name: str) -> None:
    """Refuse safetensors files that hold whole numbers in the place of weights.

    Args:
        stored: their tensors.
        model: as it was loaded from them.
        name: what the user called it.

    Raises:
        CheckpointError: there is such a tensor.
    """
    floating = {key for key, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for key, tensor in stored.items():
        bare = key.partition(".")[2]  # without the prefix of the task's model
        if not tensor.floating and (key in floating or bare in floating):
            what = f"are not all floating-point numbers, {key} for one"
            raise CheckpointError(f"weights of {name} {what}; {INSTEAD}")


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter in a folder.

    Attributes:
        name: what the user called it.
        folder: with its configuration and its weights.
        config: what adapter_config.json says.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def base(self) -> str:
        """The model that it was trained on, as it calls it; may be empty."""
        return str(self.config.get("base_model_name_or_path") or "")

    def check(self) -> None:
        """Refuse what PEFT must not be given.

        That is no safetensors file, other kinds than LoRA, modules to be imported by name
        (``megatron_config``), and initialisations that change the base model's weights.

        Raises:
            CheckpointError: the adapter has one of them.
        """
        if not (self.folder / PEFT_WEIGHTS).is_file():
            what = f"has no {PEFT_WEIGHTS}, and pickles are not read"
            raise CheckpointError(f"the adapter {self.name} {what}")
        weight_files.check_file(self.folder / PEFT_WEIGHTS)
        allowed = {"peft_type": ("LORA",), "init_lora_weights": _STARTS, "megatron_config": (None,)}
        for key, values in allowed.items():
            if (said := self.config.get(key)) not in values:
                what = f"says {key}: {json.dumps(said)[:60]}, which is not merged here"
                instead = "merge it with PEFT (merge_and_unload) and save the model"
                raise CheckpointError(f"the adapter {self.name} {what}; {instead}")

    def merge(self, model: PreTrainedModel) -> None:
        """Have PEFT merge it into the weights of a model in memory, on the CPU.

        Args:
            model: that it was trained on. Parts that attention does not depend on, such as a head,
                may be missing there.

        Raises:
            CheckpointError: PEFT is not installed, or refuses; the adapter has weights for parts
                that the model lacks, or lacks weights for parts that it changes.
        """
        self.check()
        try:
            import peft
        except ImportError as error:
            how = "is merged by peft; pip install 'lipbound[adapters]'"
            raise CheckpointError(f"the adapter {self.name} {how}") from error
        with safe_open(self.folder / PEFT_WEIGHTS, framework="pt") as file:
            whole = _as_trained(model, list(file.keys()))
        refused = explained(CheckpointError, f"PEFT does not merge the adapter {self.name}: ")
        # matrices begin with random numbers, which are not taken from the caller's
        with refused, quiet(), torch.random.fork_rng(devices=[]):
            config = peft.PeftConfig.from_pretrained(str(self.folder))
            new = [key for key, said in self.config.items() if said and not hasattr(config, key)]
            if new:
                raise ValueError(f"version {peft.__version__} does not know {new[0]}")
            config.task_type = None  # the head of the task is not here
            where: dict[str, Any] = {"model_id": str(self.folder), "torch_device": "cpu"}
            merged = peft.PeftModel.from_pretrained(whole, config=config, **where)
            fitted = merged.load_adapter(adapter_name="default", **where)  # says what did not fit
            strange = sorted(filter(weight_files.matters, fitted.unexpected_keys))
            if unfit := [*strange, *fitted.missing_keys]:
                what = f"{unfit[0]} is in the adapter {self.name} or in {type(model).__name__}"
                instead = f"give the model that it was trained on {self.base}".rstrip()
                raise CheckpointError(f"{what} alone; {instead}")
            merged.merge_and_unload()
        model.requires_grad_(True)  # as it was


def _as_trained(model: PreTrainedModel, keys: list[str]) -> nn.Module:
    """Return a model, within a module as a model with a head holds it if an adapter asks for that.

    Behind `PATH`, names of such an adapter's tensors begin with the model's name in there.

    Args:
        model: without a head.
        keys: names of the adapter's tensors.
    """
    for prefix in filter(None, (model.base_model_prefix, "model")):
        if not hasattr(model, prefix) and any(key.startswith(f"{PATH}{prefix}.") for key in keys):
            whole = nn.Module()
            whole.config, whole.base_model_prefix = model.config, prefix
            whole.add_module(prefix, model)
            return whole
    return model


def open_adapter(name: str, folder: Path) -> LoraAdapter:
    """Open the adapter of a folder.

    Args:
        name: what the user called it.
        folder: as PEFT wrote it.

    Returns:
        The adapter, its weights not yet read.

    Raises:
        CheckpointError: there is none, or one that cannot be read.
    """
    file = folder / PEFT_CONFIG
    if not file.is_file():
        raise CheckpointError(f"adapter is {name!r}, without {PEFT_CONFIG}; give what PEFT wrote")
    with explained(CheckpointError, f"{file} is no configuration of an adapter: "):
        return LoraAdapter(name, folder, dict(json.loads(file.read_text(encoding="utf-8"))))


def with_adapter(checkpoint: Checkpoint, asked: LoraAdapter) -> Checkpoint:
    """Name a checkpoint after the adapter, too, that was merged into it.

    A notice tells where the adapter names another model, by the last part of their names.

    Args:
        checkpoint: as it was loaded.
        asked: the adapter.

    Returns:
        The checkpoint with the names and revisions of both.
    """
    notes, name = list(checkpoint.notes), f"{checkpoint.name} with adapter {asked.name}"
    base, mine = (Path(one.partition("@")[0]).name.lower() for one in (asked.base, checkpoint.name))
    if base and base != mine:
        notes.append(f"the adapter {asked.name}, of {asked.base}, is merged into {checkpoint.name}")
    own = weight_files.sha256(asked.folder / name for name in PEFT_FILES)
    return replace(checkpoint, name=name, revision=f"{checkpoint.revision}+{own}", notes=notes)
