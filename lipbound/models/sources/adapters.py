"""LoRA adapters (Hu et al. 2022), as PEFT stores them, merged into the weights of a checkpoint.

Needs no PEFT.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lipbound.errors import CheckpointError, tell
from lipbound.models import offload
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import explained, first_line
from lipbound.models.sources.weight_checks import matters, refused_pickle, sha256
from lipbound.models.weight_files import check_file, has_weights

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ELSEWHERE = "another place for adapters than beside the weights"
"""A folder that does not exist: transformers looks there for adapters to load where PEFT is."""
HARMLESS = (
    "peft_type task_type base_model_name_or_path revision inference_mode auto_mapping peft_version "
    "target_modules exclude_modules modules_to_save layers_to_transform layers_pattern "
    "lora_dropout bias fan_in_fan_out megatron_core loftq_config eva_config runtime_config "
    "qalora_group_size ensure_weight_tying init_lora_weights r lora_alpha rank_pattern "
    "alpha_pattern use_rslora"
)
"""Keys of a configuration that are understood; others may change what an adapter does."""
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin a LoRA matrix (``init_lora_weights``) that leave the weights beside it alone."""
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?"
)
_INSTEAD = "merge it with PEFT and save the model"


class Change(NamedTuple):
    """The change that an adapter makes to one parameter.

    Attributes:
        shape: of the parameter.
        made: from the parameter, the tensor to take in its place, of the same dtype and device.
    """

    shape: tuple[int, ...]
    made: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Adapter:
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

    @cached_property
    def file(self) -> Path:
        """The file of its weights.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        for file in (self.folder / name for name in WEIGHTS):
            if file.is_file():
                check_file(file)
                return file
        raise CheckpointError(f"the adapter {self.name} has no weights ({' or '.join(WEIGHTS)})")

    @cached_property
    def revision(self) -> str:
        """Hash over its weights and its configuration."""
        return sha256([self.file, self.folder / CONFIG])

    def tensors(self) -> dict[str, Tensor]:
        """Read the tensors of its file.

        Returns:
            The tensors by their names, without what PEFT puts in front of them.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with explained(CheckpointError, f"{self.file} cannot be read: ", why=_why):
            if self.file.suffix == ".safetensors":
                found = load_file(self.file)
            else:
                found = torch.load(self.file, map_location="cpu", weights_only=True)
        return {
            key.removeprefix("base_model.model.")
            .replace(".base_layer.", ".")
            .replace(".modules_to_save.", "."): tensor
            for key, tensor in found.items()
            if ".original_module." not in key  # what a module that was trained as a whole had been
        }

    def check(self) -> None:
        """Refuse kinds of adapters that are not a weight plus a product of two matrices.

        Raises:
            CheckpointError: its configuration says so.
        """
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(
                f"the adapter {self.name} is of the kind {kind}, and only LORA can be merged; "
                f"{_INSTEAD}"
            )
        other = [key for key, value in self.config.items() if value and key not in HARMLESS.split()]
        if self.config.get("init_lora_weights", True) not in STARTS:
            other.append("init_lora_weights")
        if other:
            said = f"{other[0]}: {json.dumps(self.config[other[0]])[:60]}"
            raise CheckpointError(
                f"the adapter {self.name} says {said}, which is more than a product of two "
                "matrices to add; merge it with PEFT (merge_and_unload) and save the model"
            )

    def changes(self, model: PreTrainedModel) -> dict[str, Change]:
        """Find the changes that it makes to the parameters of a model.

        Args:
            model: that it was trained on. Parts that attention does not depend on, such as a head,
                may be missing there.

        Returns:
            The changes, by the names of the parameters.

        Raises:
            CheckpointError: another kind of adapter, layers that the model does not have, or shapes
                that do not fit.
        """
        self.check()
        factors: dict[tuple[str, str], dict[str, Tensor]] = {}
        found: dict[str, Change] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        prefixes = ("", f"{model.base_model_prefix}.", "model.")
        for key, tensor in self.tensors().items():
            factor = _FACTOR.fullmatch(key)
            module, _, last = (factor["module"], "", "weight") if factor else key.rpartition(".")
            # the path of the module in a model without its head
            paths = [module.removeprefix(prefix) for prefix in prefixes]
            path = next((path for path in paths if path in modules), None)
            if path is not None and factor:
                factors.setdefault((module, path), {})[factor["side"]] = tensor
            elif path is not None and "lora_" not in last and hasattr(modules[path], last):
                found[f"{path}.{last}"] = _replaced(tensor)
            elif matters(key):
                trained = f" (it was trained on {self.base})" if self.base else ""
                raise CheckpointError(
                    f"the adapter {self.name} changes {key}, which {type(model).__name__} does not "
                    f"have{trained}; give the model that it was trained on"
                )
        for (module, path), pair in factors.items():
            found[f"{path}.weight"] = self._product(module, pair, modules[path])
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, change in found.items():
            if shapes.get(name) != change.shape:
                own = f"that of the model has {shapes[name]}" if name in shapes else ""
                raise CheckpointError(
                    f"the adapter {self.name} is for another model: its part for {name} has "
                    f"shape {change.shape}, {own or 'the model has none'}"
                )
        if not found:
            raise CheckpointError(
                f"the adapter {self.name} changes nothing that attention depends on; leave it out"
            )
        return found

    def _product(self, module: str, pair: Mapping[str, Tensor], target: nn.Module) -> Change:
        """Return the change of a module by alpha / r, or alpha / sqrt(r), times B A.

        Raises:
            CheckpointError: A or B is missing, or they do not fit each other.
        """
        a, b = pair.get("A"), pair.get("B")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise CheckpointError(
                f"the adapter {self.name} has no two matrices for {module}; {_INSTEAD}"
            )
        alpha = self.config.get("lora_alpha", 8)
        patterns = (self.config.get("alpha_pattern") or {}).items()
        own = (value for end, value in patterns if re.match(rf"(.*\.)?({end})$", module))
        rank = a.shape[0]
        scale = float(next(own, alpha)) / (rank**0.5 if self.config.get("use_rslora") else rank)
        return _added(a, b, scale, isinstance(target, Conv1D | nn.Embedding))


def _added(a: Tensor, b: Tensor, scale: float, transposed: bool) -> Change:
    """Return the addition of ``scale`` B A, in float64, rounded once to the weight's own dtype.

    Args:
        a: (r, in), any floating dtype.
        b: (out, r), any floating dtype.
        scale: a number.
        transposed: whether the weight is (in, out), as transformers' ``Conv1D`` and tables of
            embeddings are.
    """

    def made(weight: Tensor) -> Tensor:
        added = scale * (b.double() @ a.double())
        # added up on the CPU: the same sum on every device
        total = weight.cpu().double() + (added.mT if transposed else added)
        return total.to(weight.dtype).to(weight.device)

    shape = (b.shape[0], a.shape[1])
    return Change(shape[::-1] if transposed else shape, made)


def _replaced(value: Tensor) -> Change:
    """Return the replacement of a weight or a bias that was trained as a whole."""
    return Change(
        tuple(value.shape),
        lambda weight: value.to(torch.float32).to(weight.dtype).to(weight.device),
    )


def _why(error: Exception) -> str:
    refused = "it is damaged or holds other things than weights, none of which were run"
    return refused if refused_pickle(error) else first_line(error)


def open_adapter(name: str, folder: Path) -> Adapter:
    """Open the adapter of a folder.

    Args:
        name: what the user called it.
        folder: as PEFT wrote it.

    Returns:
        The adapter, its weights not yet read.

    Raises:
        CheckpointError: there is none, or one that cannot be read.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"adapter is {name!r}, and there is no {CONFIG} in it; give the directory that PEFT "
            "wrote, or its hub id"
        )
    check_file(file)
    with explained(CheckpointError, f"{file} is not JSON: "):
        config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is no configuration of an adapter")
    return Adapter(name, folder, config)


def refuse_unasked(name: str, folder: Path, asked: Adapter | str | None) -> list[str]:
    """Refuse an adapter beside the weights if nobody said whether it counts.

    Args:
        name: what the user called the checkpoint.
        folder: with its weights.
        asked: the adapter that was asked for, "none", or None.

    Returns:
        What to tell where it does not count.

    Raises:
        CheckpointError: there is one, and nothing was said.
    """
    if not (folder / CONFIG).is_file():
        return []
    if asked is None:
        raise CheckpointError(
            f"{name} holds an adapter beside its weights ({CONFIG}); say whether it counts: "
            f"adapter={name!r} merges it, adapter='none' leaves it out"
        )
    if isinstance(asked, Adapter) and asked.folder.resolve() == folder.resolve():
        return []
    return [f"the adapter beside the weights of {name} ({CONFIG}) is left out, as was asked"]


def refuse_alone(name: str, folder: Path) -> None:
    """Refuse a folder that was given as a model and holds nothing but an adapter.

    Args:
        name: what the user called it.
        folder: of that name.

    Raises:
        CheckpointError: it is such a folder.
    """
    if (folder / CONFIG).is_file() and not (
        (folder / "config.json").exists() and has_weights(folder)
    ):
        base = open_adapter(name, folder).base or "the model that it was trained on"
        raise CheckpointError(
            f"{name} is an adapter of {base}, not a model; give {base} as the model, with "
            f"adapter={name!r}"
        )


def merge(model: PreTrainedModel, asked: Adapter | str | None) -> None:
    """Merge an adapter, if one was asked for; parameters on disk change wherever they are read."""
    if not isinstance(asked, Adapter):
        return
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, change in asked.changes(model).items():
            if not offload.change(model, name, change.made):
                parameters[name].copy_(change.made(parameters[name]))


def named(checkpoint: Checkpoint, asked: Adapter | str | None) -> Checkpoint:
    """Name a checkpoint after the adapter, too, that was merged into it.

    A notice tells where the adapter names another model, by the last part of their names.

    Args:
        checkpoint: as it was loaded.
        asked: the adapter, or none.

    Returns:
        The checkpoint with the names and revisions of both.
    """
    if not isinstance(asked, Adapter):
        return checkpoint
    notes = list(checkpoint.notes)
    base, mine = (
        Path(one.partition("@")[0].rstrip("/")).name.lower()
        for one in (asked.base, checkpoint.name)
    )
    if base and base != mine:
        notes.append(
            f"the adapter {asked.name} says that it was trained on {asked.base}; it is merged "
            f"into {checkpoint.name}"
        )
        tell(notes[-1])
    name = f"{checkpoint.name} with adapter {asked.name}"
    revision = f"{checkpoint.revision}+{asked.revision}"
    return replace(checkpoint, name=name, revision=revision, notes=notes)
