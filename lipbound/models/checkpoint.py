"""A model with where it came from and how it was asked for, and batches of inputs for it.

A model in memory is taken out of wrappers: checkpoints of ours, those of torch and PEFT, pipelines
and sentence encoders. Weights in memory are checked here, wherever they come from, and hashes tell
them apart.
"""

import copy
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from transformers import AutoImageProcessor, AutoTokenizer, PretrainedConfig, PreTrainedModel

from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import CaptureError, CheckpointError, InputsError, shown, tell
from lipbound.models import weight_files
from lipbound.models.other_libraries import explained, quiet

AnyModel = str | Path | nn.Module | Sequence[Attention | ModuleAttention]
"""Anything whose attention is measured: a checkpoint's name or place, a module, layers."""
MASK = "attention_mask"
MODALITIES = {"input_ids": "text", "pixel_values": "image"}
"""Kinds of data, by the name of a model's main input."""
OF_TOKENIZERS = "tokenizer.json tokenizer* vocab* merges.txt *.model *.tiktoken *.vocab tekken.json"
OF_PROCESSORS = "preprocessor_config.json processor_config.json"
"""Patterns of the files of tokenizers and image processors, the usual one first."""
END_TOKENS = ("eos_token_id", "bos_token_id", "sep_token_id", "cls_token_id")
"""Tokens that may begin or end a text."""
ONLY_FOR = {
    "revision": "revisions are for hub models",
    "gguf_file": "such files are in directories and hub models",
    "weights": "only safetensors files of directories and hub models are read layer by layer",
    "adapter": "merge it into the model in memory (peft.PeftModel.from_pretrained)",
}
"""Options that few kinds of checkpoints take, and which do, or what to do instead."""

DEPTH = 8
"""Wrappers around wrappers that are taken off."""
WITHOUT_EFFECT = (
    "transformers_version dtype torch_dtype architectures use_cache output_attentions "
    "output_hidden_states return_dict id2label label2id problem_type finetuning_task "
    "task_specific_params quantization_config"
)
"""Keys of a configuration that do not change a forward pass without a cache."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of `lipbound.models.loading.load_checkpoint`, checked.

    Attributes:
        revision: branch, tag or commit of a hub model.
        dtype: torch.float32 or torch.float64.
        device: a torch device.
        weights: "auto", "whole" or "layers".
        gguf_file: which GGUF file of a directory or a hub model, or None.
        adapter: the `lipbound.models.loading.LoraAdapter` that is merged into the weights; "none":
            not even one that lies beside them; None: nothing was said.
        lazy: only a few weights will be looked at: they stay in the files, and whoever
            reads them sees whether they are finite.
    """

    revision: str | None
    dtype: torch.dtype
    device: str | torch.device
    weights: str
    gguf_file: str | None = None
    adapter: Any = None
    lazy: bool = False

    def refuse_given(self, what: str, *names: str) -> None:
        """Refuse options that mean nothing for what is loaded.

        Args:
            what: is loaded, in words.
            names: of the options; all in `ONLY_FOR` by default.

        Raises:
            CheckpointError: one of them was given.
        """
        for name in names or ONLY_FOR:
            if (value := getattr(self, name)) not in (None, "none", "auto", "whole"):
                said = getattr(value, "name", value)
                raise CheckpointError(f"{name} {said!r} was given for {what}; {ONLY_FOR[name]}")


@dataclass
class Checkpoint:
    """A loaded model and where it came from.

    Attributes:
        model: a transformers model in evaluation mode, float32 or float64, eager attention; or
            another torch module in memory.
        name: what the user asked for.
        revision: commit of a hub model, or "sha256:..." over the weights of a directory or a loaded
            model.
        source: what tokenizer and processor are loaded from (a directory or a hub id), or None for
            a loaded model without one.
        commit: the hub commit, or None.
        loaded: whether the user handed over a loaded model, which no name leads back to.
        by_layer: whether the weights stay on disk and each module's are in memory only while it
            runs (`lipbound.models.weight_files`).
        notes: sentences on what is not as it was handed over.
        gguf_file: the GGUF file in ``source`` that weights and tokenizer came from, or None.
        quantization: how the weights were stored, "GGUF Q4_1 (...)" for one, where they were
            quantised; None where they were not.
        tokenizer_from, processor_from: directory or hub id whose tokenizer or image processor is
            taken in place of the checkpoint's own, or None.
        configuration: "sha256:..." over the config.json of a directory, or over what the
            configuration of a loaded model says; None where ``revision`` covers it.
    """

    model: Any
    name: str
    revision: str
    source: str | None
    commit: str | None = None
    loaded: bool = False
    by_layer: bool = False
    notes: list[str] = field(default_factory=list)
    gguf_file: str | None = None
    quantization: str | None = None
    tokenizer_from: str | None = None
    processor_from: str | None = None
    configuration: str | None = None

    @property
    def accepted(self) -> list[str]:
        """Names of what the model's forward pass takes; none where they cannot be told."""
        parameters = inspect.signature(self.model.forward).parameters.values()
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    @property
    def main_input(self) -> str:
        """The model's main input: the one it declares, if its forward has it, else one of those."""
        declared, names = str(getattr(self.model, "main_input_name", "")), self.accepted
        if declared in names or not names:
            return declared
        return next((name for name in names if name in MODALITIES), names[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return dtype_of(self.model)

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of a transformers model; of another module one that says nothing."""
        return self.model.config if isinstance(self.model, PreTrainedModel) else PretrainedConfig()

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + ", weights on disk" * self.by_layer
        kind = type(self.model).__name__
        return f"Checkpoint({self.name!r}, {kind}, {dtype}, {self.revision[:19]})"

    @property
    def modality(self) -> str:
        """The kind of data it reads: "text", "image", or the name of another main input."""
        return MODALITIES.get(self.main_input, self.main_input)

    def tokenizer(self) -> Any:
        """Load the checkpoint's tokenizer, or the one that was given for it.

        Returns:
            A tokenizer of transformers; CheckpointError is raised where there is none.
        """
        instead = "token numbers, or name another tokenizer with tokenizer="
        return self._companion(AutoTokenizer, OF_TOKENIZERS, self.tokenizer_from, instead)

    def image_processor(self) -> Any:
        """Load the checkpoint's image processor, or the one that was given for it.

        It is the one that computes with Pillow, whether torchvision is installed or not (with
        transformers that have both).

        Returns:
            A processor of transformers; CheckpointError is raised where there is none.
        """
        ready = "a dict of ready inputs, {'pixel_values': ...}"
        instead = f"{ready}, or name another processor with processor="
        return self._companion(AutoImageProcessor, OF_PROCESSORS, self.processor_from, instead)

    def _companion(self, loader: Any, files: str, given: str | None, instead: str) -> Any:
        what = "tokenizer" if loader is AutoTokenizer else "image processor"
        file = self.gguf_file if loader is AutoTokenizer and not given else None
        place, who = given or self.source, given or self.name
        advice = "a directory or a hub id that has one" if given else f"data as {instead}"
        if place is None:
            raise CheckpointError(f"{who} does not say where its {what} is; give {advice}")
        folder, (repo, _, revision) = Path(place).expanduser(), place.partition("@")
        options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
        if folder.is_dir():
            repo, options = str(folder), {"trust_remote_code": False, "gguf_file": file}
            if file is None and not any(any(folder.glob(name)) for name in files.split()):
                # without them transformers makes up a tokenizer that knows no word
                missing = f"{what} ({files.split()[0]} or the like)"
                raise CheckpointError(f"{who} has no files of its {missing}; give {advice}")
        if loader is AutoImageProcessor:  # with torchvision there pixels would be others
            options["backend"] = "pil"
        usable = explained(CheckpointError, f"{who} has no usable {what} (", f"); give {advice}")
        packed = weight_files.gguf_read_once(folder / file if file else None, words=True)
        with usable, quiet(), packed:
            return loader.from_pretrained(repo, **options)

    @property
    def positions(self) -> int | None:
        """The longest input of a text model in tokens, or None where it sets no limit."""
        config = text_part(self.config)
        found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
        limit = next(filter(None, found), -1)
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        if isinstance(rope, Mapping) and rope.get("rope_type") == "dynamic":
            limit *= float(rope.get("factor") or 1)  # it is that from which rotary tables grow
        embeddings = getattr(getattr(self.model, "base_model", None), "embeddings", None)
        if hasattr(embeddings, "position_embeddings"):
            padding = getattr(embeddings, "padding_idx", None)
            limit -= padding + 1 if padding else 0  # RoBERTa's start behind the padding index
        return int(limit) if limit >= 0 else None  # below zero is XLNet's word for none

    def check_length(self, count: int, said: str = "max_length {} exceeds") -> None:
        """Check that texts of so many tokens are no longer than the model allows.

        Args:
            count: of tokens.
            said: the beginning of the message, with a place for the number.

        Raises:
            InputsError: they are.
        """
        limit = self.positions
        if limit is not None and count > limit:
            raise InputsError(f"{said.format(count)} the {limit} positions of {self.name}")


ASSUMED = {"attention_mask": 1, "token_type_ids": 0}
"""What models take these inputs to be where they are not given."""


@dataclass
class Inputs:
    """A batch for a model's forward pass, with where it came from.

    Attributes:
        batch: tensors whose first axis is the sample.
        description: one phrase for captions.
        preprocessing: what made the tensors out of the data, in words.
        notes: sentences on what is not as it was asked for, such as fewer samples.
        options: settings of the forward pass for all samples alike, True or False, or tensors.
        has_axes: whether the model takes positions (time, height and width, samples, N), which are
            samples first here.
    """

    batch: dict[str, Tensor]
    description: str
    preprocessing: str = "none: ready model inputs"
    notes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    has_axes: bool = False

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.batch.items())
        return f"Inputs({shapes}; {self.description})"

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(next(iter(self.batch.values())))

    @property
    def fingerprint(self) -> str:
        """Hash over names and values of the tensors, "sha256:...", the same on every machine.

        Of those that say no more than a model assumes without them, a mask without padding and
        types of tokens that are all 0, there is none in it.
        """
        digest = hashlib.sha256()
        for name, value in (*sorted(self.batch.items()), *sorted(self.options.items())):
            if name in ASSUMED and bool((torch.as_tensor(value) == ASSUMED[name]).all()):
                continue
            if isinstance(value, Tensor):
                value = value if value.is_floating_point() else value.long()
                digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
                numbers = value.cpu().reshape(-1).view(torch.uint8)  # numpy knows no bfloat16
                digest.update(numbers.numpy().tobytes())
            else:
                digest.update(f"{name}={value}".encode())
        return "sha256:" + digest.hexdigest()

    def block(self, start: int, stop: int, device: str) -> dict[str, Any]:
        """Return samples start...stop-1, on a device, and the options."""
        tensors = {name: tensor[start:stop].to(device) for name, tensor in self.batch.items()}
        if self.has_axes:
            tensors["position_ids"] = tensors["position_ids"].transpose(0, 1)
        options = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in self.options.items()}
        return tensors | options


def text_part(config: Any) -> Any:
    """Return the part of a configuration that is about text, or all of it."""
    with suppress(AttributeError, ValueError):  # several are about text
        return config.get_text_config()
    return config


def unmarked_padding(model: Any, batch: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence on padding tokens at an end of a sample that no mask marks."""
    ids, config = batch.get("input_ids"), text_part(getattr(model, "config", None))
    pad = getattr(config, "pad_token_id", None)
    masked = batch.get("attention_mask") is not None
    if masked or not isinstance(ids, Tensor) or ids.ndim != 2 or not isinstance(pad, int):
        return []
    is_pad = ids == pad
    trailing, leading = is_pad.flip(-1).cummin(-1).values.sum(-1), is_pad.cummin(-1).values.sum(-1)
    ends = [getattr(config, name, None) for name in END_TOKENS]
    also_an_end = any(pad in end if isinstance(end, list | tuple) else pad == end for end in ends)
    found = int(((trailing >= (2 if also_an_end else 1)) | (leading >= 2)).sum())
    what = f"{found} of {len(ids)} samples end or begin with the model's padding token ({pad})"
    said = f"{what} and have no attention_mask, so it counts as text; give the tokenizer's mask"
    return [said] if found else []


def load_loaded(model: object, options: LoadOptions) -> Checkpoint | None:
    """Make a checkpoint of a transformers model, or of any module, in memory, or in a wrapper.

    Args:
        model: used as it is and moved; a copy of it where its weights are in another dtype. Of a
            `Checkpoint` the name and the revision stay, so that its numbers are known to be of the
            same weights.
        options: dtype and device.

    Returns:
        The checkpoint; None where there is no module.

    Raises:
        CheckpointError: weights that are, or should be, on disk, quantised or not finite.
    """
    inner, notes = unwrapped(model)
    if not isinstance(inner, nn.Module):
        return None
    kind = type(inner).__name__
    options.refuse_given("a model in memory")
    if weight_files.is_offloaded(inner):
        raise CheckpointError(f"the weights of {kind} are on disk; give its directory or hub id")
    loaded, changes = in_dtype(inner, options.dtype)
    notes += changes
    loaded = loaded.to(options.device)  # some modules take it by position only
    weight_files.check_weights(loaded, kind)
    if isinstance(model, Checkpoint):
        return replace(model, model=loaded, loaded=True, notes=[*model.notes, *notes])
    commit = getattr(getattr(loaded, "config", None), "_commit_hash", None)
    return _described(loaded, weight_files.state_sha256(loaded), commit=commit, notes=notes)


def in_training(model: object, tokenizer: str | None = None) -> Checkpoint:
    """Describe a model that is being trained, whose weights say nothing about what it will be.

    Args:
        model: a module, or a wrapper of one; it stays as it is and where it is.
        tokenizer: directory or hub id, in place of the model's own.

    Raises:
        CaptureError: it is no module.
        CheckpointError: its weights are no floating-point numbers.
    """
    inner = bare_module(model)
    weight_files.check_floating(inner, type(inner).__name__)
    return _described(inner, "in training", tokenizer_from=tokenizer)


def _described(model: nn.Module, revision: str, **others: Any) -> Checkpoint:
    """Return the checkpoint of a module in memory, which a transformers model says more of."""
    known = isinstance(model, PreTrainedModel)
    source = (str(model.name_or_path) or None) if known else None
    said = config_sha256(model.config) if known else weight_files.hashed(repr(model).encode())
    name = source or type(model).__name__
    return Checkpoint(model, name, revision, source, loaded=True, configuration=said, **others)


def unwrapped(given: object) -> tuple[object, list[str]]:
    """Take all wrappers off an object.

    Args:
        given: anything.

    Returns:
        What is inside, and sentences on what was left out on the way.

    Raises:
        CaptureError: that is a traced program.
    """
    notes: list[str] = []
    for _ in range(DEPTH):
        inner, note = _inside(given)
        if inner is None:
            break
        notes += [note] if note else []
        given = inner
    traced = isinstance(graph := getattr(given, "graph", None), fx.Graph) and any(
        isinstance(node.target, OpOverload) for node in graph.nodes
    )
    if traced or isinstance(given, torch.jit.ScriptModule):
        what = f"the {type(given).__name__} is a traced program (torch.jit, torch.export)"
        raise CaptureError(f"{what}, into which nobody sees; give the module that it was made of")
    return given, notes


def bare_module(given: object, tells: bool = True, kind: type = nn.Module) -> Any:
    """Return the transformers model, or else the module, inside what a public function was given.

    Args:
        given: a module, a wrapper of one, or a checkpoint.
        tells: whether notices tell what was left out, which may have been told before.
        kind: of module that is wanted.

    Returns:
        The module itself.

    Raises:
        CaptureError: there is none.
    """
    model, notes = unwrapped(given)
    if not isinstance(model, kind):
        other = ", any torch.nn.Module," if kind is nn.Module else ""
        kinds = f"a loaded transformers model{other} or what lipbound.load_checkpoint returns"
        raise CaptureError(f"model is {shown(given)}; give {kinds}")
    tell(*(notes if tells else ()))
    return model


def named_inputs(model: nn.Module, inputs: object) -> dict[str, Tensor]:
    """Return inputs by the names of the parameters of a model's forward.

    Those of `lipbound.prepare` come to its device. A tensor, or several, are given the names of the
    first parameters of ``forward``.

    Raises:
        CaptureError: there are no tensors among them, or more than ``forward`` has names for.
    """
    if isinstance(inputs, Inputs):
        tensors = (*model.parameters(), *model.buffers())
        device = next((tensor.device for tensor in tensors if not tensor.is_meta), "cpu")
        inputs = inputs.block(0, inputs.samples, str(device))
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, tuple | list) and any(isinstance(t, Tensor) for t in inputs):
        with suppress(TypeError):  # they are more than it takes
            inputs = inspect.signature(model.forward).bind_partial(*inputs).arguments
    if not isinstance(inputs, Mapping) or not any(isinstance(t, Tensor) for t in inputs.values()):
        kinds = "tensors that its forward takes, such as tokenizer(text, return_tensors='pt')"
        raise CaptureError(f"inputs is {shown(inputs)}; give {kinds}")
    return {str(name): value for name, value in inputs.items()}


def taken(model: nn.Module, inputs: object) -> dict[str, Tensor]:
    """Return inputs as a model's forward takes them: named, floating-point ones in its dtype."""
    dtype, named = dtype_of(model), named_inputs(model, inputs)
    numbers = (n for n, t in named.items() if isinstance(t, Tensor) and t.is_floating_point())
    return named | {name: named[name].to(dtype) for name in numbers}


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's weights."""
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floating, torch.float32)


def _inside(given: Any) -> tuple[object | None, str]:
    """Take one wrapper off.

    Args:
        given: anything.

    Returns:
        The content (None for what is no wrapper), and a sentence on what is lost without the
        wrapper, or "".
    """
    kind, configs = type(given).__name__, getattr(given, "peft_config", None)
    if isinstance(given, Checkpoint | transformers.Pipeline):
        return given.model, ""
    if isinstance(given, type | PreTrainedModel):
        return None, ""
    if isinstance(inner := getattr(given, "_orig_mod", None), nn.Module):  # torch.compile
        return inner, ""
    if isinstance(given, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return given.module, ""
    if hasattr(given, "get_base_model") and isinstance(configs, Mapping):
        prompts = [one for one in configs.values() if getattr(one, "is_prompt_learning", False)]
        learned = ", ".join(str(one.peft_type).rpartition(".")[2] for one in prompts)
        left_out = f"the tokens that {kind} learned in front of its inputs ({learned}) are left out"
        return given.get_base_model(), left_out if learned else ""
    first, *others = given if isinstance(given, nn.Sequential) and len(given) else [None]
    if isinstance(inner := getattr(first, "auto_model", None), nn.Module):  # SentenceTransformer
        after = ", ".join(type(part).__name__ for part in others)
        left_out = f"what comes after the transformer of the {kind} ({after}) is left out"
        return inner, left_out if after else ""
    if isinstance(inner := getattr(given, "model", None), PreTrainedModel):
        name = type(inner).__name__
        return inner, f"the {name} inside the {kind} is measured, and nothing around it"
    return None, ""


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
    weight_files.check_floating(model, type(model).__name__)
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


def measurable(given: object, kind: type = nn.Module) -> Any:
    """Return the model inside what a public function was given, as it can be measured.

    Args:
        given: as of `bare_module`; CheckpointError is raised where weights are no floating-point
            numbers in memory.
        kind: of module that is wanted.

    Returns:
        The model, or a copy in float32 of one in half precision, which a notice tells of.
    """
    model, notes = in_dtype(bare_module(given, kind=kind))
    tell(*notes)
    return model


def config_sha256(config: PretrainedConfig) -> str:
    """Return "sha256:" and the hash of what a configuration says beyond its class's defaults.

    That is positions, windows, epsilons and the like, which weights do not tell.
    """

    def kept(said: dict[str, Any]) -> dict[str, Any]:
        return {
            str(key): kept(value) if isinstance(value, dict) else value
            for key, value in said.items()
            if key not in WITHOUT_EFFECT.split() and not str(key).startswith("_")
        }

    return weight_files.hashed(
        json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str).encode()
    )
