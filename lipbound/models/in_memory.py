"""Models in memory, as the user has loaded them.

The transformers model is taken out of wrappers: checkpoints of ours, those of torch and PEFT,
pipelines and sentence encoders. Weights in memory are checked here, wherever they come from, and
hashes tell them apart.
"""

import copy
import hashlib
import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Pipeline, PretrainedConfig, PreTrainedModel

from lipbound.errors import CaptureError, CheckpointError, shown, tell
from lipbound.models import weight_files
from lipbound.models.checkpoint import Checkpoint, Inputs, LoadOptions
from lipbound.models.weight_files import extremes

DEPTH = 8
"""Wrappers around wrappers that are taken off."""
WITHOUT_EFFECT = (
    "transformers_version dtype torch_dtype architectures use_cache output_attentions "
    "output_hidden_states return_dict id2label label2id problem_type finetuning_task "
    "task_specific_params quantization_config"
)
"""Keys of a configuration that do not change a forward pass without a cache."""
PACKED = ("qweight", "weight_packed", "W_q", "qzeros")
"""Buffers of layers that keep their weights in a form of their own."""


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
    check_floating(inner, kind)
    loaded, changes = in_dtype(inner, options.dtype)
    notes += changes
    loaded = loaded.to(options.device)  # some modules take it by position only
    check_weights(loaded, kind)
    if isinstance(model, Checkpoint):
        return replace(model, model=loaded, loaded=True, notes=[*model.notes, *notes])
    commit = getattr(getattr(loaded, "config", None), "_commit_hash", None)
    return _described(loaded, state_sha256(loaded), commit=commit, notes=notes)


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
    check_floating(inner, type(inner).__name__)
    return _described(inner, "in training", tokenizer_from=tokenizer)


def _described(model: nn.Module, revision: str, **others: Any) -> Checkpoint:
    """Return the checkpoint of a module in memory, which a transformers model says more of."""
    known = isinstance(model, PreTrainedModel)
    source = (str(model.name_or_path) or None) if known else None
    said = config_sha256(model.config) if known else _sha256(repr(model).encode())
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


def bare_model(given: object, tells: bool = True) -> PreTrainedModel:
    """Return what `bare_module` does, where it is a transformers model; else raise CaptureError."""
    model: PreTrainedModel = bare_module(given, tells, PreTrainedModel)
    return model


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


def _inside(given: Any) -> tuple[object | None, str]:
    """Take one wrapper off.

    Args:
        given: anything.

    Returns:
        The content (None for what is no wrapper), and a sentence on what is lost without the
        wrapper, or "".
    """
    kind, configs = type(given).__name__, getattr(given, "peft_config", None)
    if isinstance(given, Checkpoint | Pipeline):
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
    tell(*notes)
    return model


def check_weights(model: nn.Module, name: str) -> None:
    """Refuse weights and buffers, in memory or on disk, that are NaN or infinite.

    A buffer in memory may hold -inf, as masks do.

    Args:
        model: as it was loaded.
        name: what the user called it.

    Raises:
        CheckpointError: one of them is not finite; the message names it. Or a file is gone.
    """
    stored, buffers = weight_files.on_disk(model), {key for key, _ in model.named_buffers()}
    found = {"": torch.zeros(2)}  # of a model without any
    for key, tensor in model.state_dict().items():
        tensor = stored[key].read() if key in stored else tensor
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            found[key] = extremes(tensor)
    *_, last = found.values()
    ends = torch.stack([both.to(last.device) for both in found.values()]).tolist()
    for key, (low, high) in zip(found, ends, strict=True):
        if not (high < torch.inf and (low > -torch.inf or (key in buffers and low == -torch.inf))):
            raise CheckpointError(f"the weights of {name} have NaN or infinite numbers, in {key}")


def check_floating(model: nn.Module, name: str) -> None:
    """Refuse a model whose weights are not all floating-point numbers in memory or on disk.

    Numbers of one byte are taken for none: what they stand for depends on scales that are kept
    beside them. Layers that keep packed weights have no derivatives, or wrong ones, however right
    their outputs are.

    Args:
        model: as it was loaded.
        name: what the user called it.

    Raises:
        CheckpointError: quantised layers, whole numbers, or weights that were never loaded.
    """
    for key, value in (*model.state_dict(keep_vars=True).items(), *model.named_parameters()):
        packed, weight = _packed(key, value), isinstance(value, nn.Parameter)
        if packed or (weight and (not value.is_floating_point() or value.dtype.itemsize == 1)):
            kind = "quantized" if packed else str(value.dtype).removeprefix("torch.")
            what = f"are not all floating-point: {key} is {kind}, and has no true derivatives"
            instead = "give the model before quantization, or what model.dequantize() makes of it"
            raise CheckpointError(f"the weights of {name} {what}; {instead}")
        if weight and value.is_meta and not weight_files.is_offloaded(model):
            what = f"are not in memory ({key} is on the device meta)"
            raise CheckpointError(f"the weights of {name} {what}; load them")


def _packed(key: str, value: object) -> bool:
    """Return whether an entry of a state dict holds packed weights of a quantised layer.

    That is one of torch's int8 layers, GPTQ, AWQ, compressed-tensors, HQQ, quanto or torchao.
    """
    if not isinstance(value, torch.Tensor):
        return "packed" in key and value is not None
    named = key.rpartition(".")[2] in PACKED
    any_one: Any = value  # tensors made of others, but for those of several devices
    other = is_traceable_wrapper_subclass(any_one) and type(any_one).__name__ != "DTensor"
    return value.is_quantized or other or (named and not value.is_floating_point())


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

    return _sha256(json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str).encode())


def state_sha256(model: nn.Module) -> str:
    """Return "sha256:" and the hash over names and float32 values of a model in memory."""
    entries = sorted(model.state_dict().items())
    values = ((key.encode(), t.detach().cpu().contiguous().float().numpy()) for key, t in entries)
    return _sha256(*(part for pair in values for part in pair))


def _sha256(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return "sha256:" + digest.hexdigest()
