"""LoRA adapters (Hu et al. 2022), as PEFT stores them, merged into the weights of the checkpoint
that they were trained on; needs no PEFT."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lipbound.errors import CheckpointError, tell
from lipbound.models import offload
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import first_line
from lipbound.models.sources.weight_checks import HEADS_ONLY, refused_pickle, sha256
from lipbound.models.weight_files import check_file, has_weights

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ELSEWHERE = "another place for adapters than beside the weights"
"""A folder that does not exist, for transformers, which would load an adapter beside the weights
wherever PEFT is installed."""
HARMLESS = frozenset(
    (
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "auto_mapping",
        "peft_version",
        "target_modules",
        "exclude_modules",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",
        "bias",
        "fan_in_fan_out",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "runtime_config",
        "qalora_group_size",
        "ensure_weight_tying",
        "init_lora_weights",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
    )
)
"""What a configuration may say beside what is empty; anything else may change what the adapter
does, and is refused."""
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin a LoRA matrix (``init_lora_weights``) that leave the weights beside it alone."""
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?"
)


@dataclass(frozen=True)
class LowRank:
    """A weight plus ``scale`` times B A, in float64, rounded once to the weight's own dtype.

    Attributes:
        a, b: (r, in) and (out, r). scale: alpha / r, or alpha / sqrt(r).
        transposed: whether the weight is (in, out), as transformers' ``Conv1D`` and tables of
            embeddings are.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.transposed else shape

    def __call__(self, weight: Tensor) -> Tensor:
        """The changed weight; added up on the CPU, so that the sum is the same on every device."""
        added = self.scale * (self.b.double() @ self.a.double())
        return (
            (weight.cpu().double() + (added.mT if self.transposed else added))
            .to(weight.dtype)
            .to(weight.device)
        )


@dataclass(frozen=True)
class Replaced:
    """Another tensor in the place of a weight or a bias that was trained as a whole."""

    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self.value.shape)

    def __call__(self, weight: Tensor) -> Tensor:
        return self.value.to(torch.float32).to(weight.dtype).to(weight.device)


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
        """The file of its weights; raises CheckpointError where there is none, or a damaged one."""
        found = next(
            (self.folder / name for name in WEIGHTS if (self.folder / name).is_file()), None
        )
        if found is None:
            raise CheckpointError(
                f"the adapter {self.name} has no weights ({' or '.join(WEIGHTS)})"
            )
        check_file(found)
        return found

    @cached_property
    def revision(self) -> str:
        """Hash over its weights and its configuration."""
        return f"sha256:{sha256([self.file, self.folder / CONFIG])}"

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of its file by their names, without what PEFT puts in front of them."""
        try:
            read: Any = load_file if self.file.suffix == ".safetensors" else _load_pickle
            found: dict[str, Tensor] = read(self.file)
        except Exception as error:  # broken files raise a zoo of types
            why = (
                "it is damaged or holds other things than weights, none of which were run"
                if refused_pickle(error)
                else first_line(error)
            )
            raise CheckpointError(f"{self.file} cannot be read: {why}") from error
        return {
            key.removeprefix("base_model.model.")
            .replace(".base_layer.", ".")
            .replace(".modules_to_save.", "."): tensor
            for key, tensor in found.items()
            if ".original_module." not in key  # what a module that was trained as a whole had been
        }

    def check(self) -> None:
        """Raise CheckpointError where it is of a kind that is not a sum of a weight and a product
        of two matrices."""
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(
                f"the adapter {self.name} is of the kind {kind}, and only LORA can be merged; "
                "merge it with PEFT and save the model"
            )
        start = self.config.get("init_lora_weights", True)
        other = [key for key, value in self.config.items() if value and key not in HARMLESS]
        if start not in STARTS:
            other.append("init_lora_weights")
        if other:
            said = f"{other[0]}: {json.dumps(self.config[other[0]])[:60]}"
            raise CheckpointError(
                f"the adapter {self.name} says {said}, which is more than a product of two "
                "matrices to add; merge it with PEFT "
                "(merge_and_unload) and save the model"
            )

    def changes(self, model: PreTrainedModel) -> dict[str, LowRank | Replaced]:
        """The changes that it makes to the parameters of a model, by their names there.

        Parts that attention does not depend on, such as a head, may be missing in the model.

        Raises:
            CheckpointError: another kind of adapter, layers that the model does not have, or shapes
                that do not fit.
        """
        self.check()
        factors: dict[str, dict[str, Tensor]] = {}
        found: dict[str, LowRank | Replaced] = {}
        unknown = []
        for key, tensor in self.tensors().items():
            factor = _FACTOR.fullmatch(key)
            module, _, last = (factor["module"], "", "weight") if factor else key.rpartition(".")
            path = _path(model, module)
            if path is None or (
                factor is None and ("lora_" in last or not hasattr(model.get_submodule(path), last))
            ):
                unknown += [] if any(part in key for part in HEADS_ONLY) else [key]
            elif factor:
                factors.setdefault(module, {})[factor["side"]] = tensor
            else:
                found[f"{path}.{last}"] = Replaced(tensor)
        if unknown:
            raise CheckpointError(
                f"the adapter {self.name} changes {unknown[0]}, which {type(model).__name__} "
                "does not have"
                f"{f' (it was trained on {self.base})' if self.base else ''}; give the model "
                "that it was trained on"
            )
        for module, pair in factors.items():
            path = _path(model, module)
            assert path is not None
            found[f"{path}.weight"] = self._product(module, pair, model.get_submodule(path))
        parameters = dict(model.named_parameters())
        for name, change in found.items():
            if name not in parameters or tuple(parameters[name].shape) != change.shape:
                theirs = (
                    f"that of the model has {tuple(parameters[name].shape)}"
                    if name in parameters
                    else "the model has none"
                )
                raise CheckpointError(
                    f"the adapter {self.name} is for another model: its part for {name} has "
                    f"shape {change.shape}, {theirs}"
                )
        if not found:
            raise CheckpointError(
                f"the adapter {self.name} changes nothing that attention depends on; leave it out"
            )
        return found

    def _product(self, module: str, pair: Mapping[str, Tensor], target: nn.Module) -> LowRank:
        """One product of two matrices."""
        if (
            pair.keys() != {"A", "B"}
            or pair["A"].ndim != 2
            or pair["B"].ndim != 2
            or pair["A"].shape[0] != pair["B"].shape[1]
        ):
            raise CheckpointError(
                f"the adapter {self.name} has no two matrices for {module}; merge it with PEFT "
                "and save the model"
            )
        rank = pair["A"].shape[0]
        alpha = _patterned(
            self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8)
        )
        scale = alpha / (rank**0.5 if self.config.get("use_rslora") else rank)
        return LowRank(pair["A"], pair["B"], scale, isinstance(target, Conv1D | nn.Embedding))


def open_adapter(name: str, folder: Path) -> Adapter:
    """The adapter of a folder; raises CheckpointError where there is none, or one that cannot be
    read."""
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"adapter is {name!r}, and there is no {CONFIG} in it; give the directory that PEFT "
            "wrote, or its hub id"
        )
    check_file(file)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is no configuration of an adapter")
    return Adapter(name, folder, config)


def refuse_unasked(name: str, folder: Path, asked: Adapter | str | None) -> list[str]:
    """Raise CheckpointError where an adapter lies beside the weights and nobody said whether it
    counts; what to tell where it does not."""
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
    """Raise CheckpointError where a folder that was given as a model holds nothing but
    an adapter."""
    if (folder / CONFIG).is_file() and not (
        (folder / "config.json").exists() and has_weights(folder)
    ):
        base = open_adapter(name, folder).base or "the model that it was trained on"
        raise CheckpointError(
            f"{name} is an adapter of {base}, not a model; give {base} as the model, with "
            f"adapter={name!r}"
        )


def merge(model: PreTrainedModel, asked: Adapter | str | None) -> None:
    """Change the parameters of a model as an adapter says, if one was asked for, those on disk
    wherever they are read."""
    if not isinstance(asked, Adapter):
        return
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, change in asked.changes(model).items():
            if not offload.change(model, name, change):
                parameters[name].copy_(change(parameters[name]))


def named(checkpoint: Checkpoint, asked: Adapter | str | None) -> Checkpoint:
    """A checkpoint whose weights have the adapter that was asked for: called by both their names,
    with the revisions of both.

    A notice tells where the adapter names another model, by the last part of their names.
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
    name, revision = (
        f"{checkpoint.name} with adapter {asked.name}",
        f"{checkpoint.revision}+{asked.revision}",
    )
    return replace(checkpoint, name=name, revision=revision, notes=notes)


def _load_pickle(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _path(model: PreTrainedModel, module: str) -> str | None:
    """The path of a module in a model without the head that it was trained with; None where it is
    not there."""
    for prefix in ("", f"{model.base_model_prefix}.", "model."):
        path = module.removeprefix(prefix)
        if path != module or not prefix:
            try:
                model.get_submodule(path)
                return path
            except AttributeError:
                continue
    return None


def _patterned(patterns: Any, module: str, otherwise: Any) -> float:
    """The number of a module, from the first pattern that its name ends with."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return float(otherwise)
