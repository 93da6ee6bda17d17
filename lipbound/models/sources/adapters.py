"""LoRA adapters (Hu et al. 2022), as PEFT stores them, merged into the weights of a checkpoint.

Needs no PEFT.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lipbound.errors import CheckpointError, tell
from lipbound.models import offload
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import explained
from lipbound.models.weight_files import candidates, check_file, matters, sha256, unreadable

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
_AROUND = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save(?=\.)")
"""What PEFT adds to the names of tensors."""
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?"
)


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

    def tensors(self) -> dict[str, Tensor]:
        """Read the tensors of its file.

        Returns:
            The tensors by their names, without what PEFT adds to these.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with explained(CheckpointError, f"{self.file} cannot be read: ", why=unreadable):
            if self.file.suffix == ".safetensors":
                found = load_file(self.file)
            else:
                found = torch.load(self.file, map_location="cpu", weights_only=True)
        return {
            _AROUND.sub("", key): tensor
            for key, tensor in found.items()
            if ".original_module." not in key  # what a module that was trained as a whole had been
        }

    def check(self) -> None:
        """Refuse kinds of adapters that are not a weight plus a product of two matrices.

        Raises:
            CheckpointError: its configuration says so.
        """
        other = [key for key, value in self.config.items() if value and key not in HARMLESS.split()]
        if self.config.get("init_lora_weights", True) not in STARTS:
            other.append("init_lora_weights")
        if self.config.get("peft_type") != "LORA":
            other.insert(0, "peft_type")
        if other:
            said = f"{other[0]}: {json.dumps(self.config.get(other[0]))[:60]}"
            raise CheckpointError(
                f"the adapter {self.name} says {said}, which is not LoRA or more than a product of "
                "two matrices to add; merge it with PEFT (merge_and_unload) and save the model"
            )

    def changes(self, model: PreTrainedModel) -> dict[str, Callable[[Tensor], Tensor]]:
        """Find the changes that it makes to the parameters of a model.

        Args:
            model: that it was trained on. Parts that attention does not depend on, such as a head,
                may be missing there.

        Returns:
            By the names of parameters, what makes the tensor to take in the place of each, of the
            same dtype and device. It raises CheckpointError where shapes do not fit.

        Raises:
            CheckpointError: another kind of adapter, or layers that the model does not have.
        """
        self.check()
        factors: dict[tuple[str, str], dict[str, Tensor]] = {}
        found: dict[str, Callable[[Tensor], Tensor]] = {}
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
            elif path is not None and getattr(modules[path], last, None) is not None:
                found[f"{path}.{last}"] = partial(self._fit, f"{path}.{last}", tensor.float())
            elif matters(key):
                raise CheckpointError(
                    f"the adapter {self.name} changes {key}, which {type(model).__name__} does not "
                    f"have; give the model that it was trained on {self.base}".rstrip()
                )
        for (module, path), pair in factors.items():
            transposed = isinstance(modules[path], Conv1D | torch.nn.Embedding)
            added = partial(self._added, f"{path}.weight", pair, self._alpha(module), transposed)
            found[f"{path}.weight"] = added
        if not found:
            raise CheckpointError(
                f"the adapter {self.name} changes nothing that attention depends on; leave it out"
            )
        return found

    def _alpha(self, module: str) -> float:
        """Return the alpha of a module."""
        patterns = (self.config.get("alpha_pattern") or {}).items()
        own = (value for end, value in patterns if re.match(rf"(.*\.)?({end})$", module))
        return float(next(own, self.config.get("lora_alpha", 8)))

    def _added(
        self, name: str, pair: Mapping[str, Tensor], alpha: float, transposed: bool, weight: Tensor
    ) -> Tensor:
        """Return a weight plus alpha / r, or alpha / sqrt(r), times B A.

        It is computed in float64 and rounded once to the weight's own dtype.

        Args:
            name: of the weight.
            pair: A, (r, in), and B, (out, r).
            alpha: a number.
            transposed: whether the weight is (in, out), as transformers' ``Conv1D`` and tables of
                embeddings are.
            weight: itself.
        """
        with explained(
            CheckpointError, f"the adapter {self.name} has no two matrices for {name}: "
        ):
            rank = len(pair["A"])
            scale = alpha / (rank**0.5 if self.config.get("use_rslora") else rank)
            added = scale * (pair["B"].double() @ pair["A"].double())
        added = added.mT if transposed else added
        # added up on the CPU: the same sum on every device
        total = weight.cpu().double() + added if added.shape == weight.shape else added
        return self._fit(name, total, weight)

    def _fit(self, name: str, new: Tensor, weight: Tensor) -> Tensor:
        """Return a tensor in the dtype and on the device of the weight that it replaces."""
        if new.shape != weight.shape:
            raise CheckpointError(
                f"the adapter {self.name} is for another model: its part for {name} has shape "
                f"{tuple(new.shape)}, that of the model has {tuple(weight.shape)}"
            )
        return new.to(weight.dtype).to(weight.device)


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
            f"adapter is {name!r}, and there is no {CONFIG} in it; give what PEFT wrote"
        )
    check_file(file)
    with explained(CheckpointError, f"{file} is no configuration of an adapter: "):
        return Adapter(name, folder, dict(json.loads(file.read_text(encoding="utf-8"))))


def notes_beside(name: str, folder: Path, asked: Adapter | str | None, *, alone: bool) -> list[str]:
    """Refuse an adapter beside the weights if nobody said whether it counts.

    Args:
        name: what the user called the checkpoint.
        folder: with its weights.
        asked: the adapter that was asked for, "none", or None.
        alone: whether there may be nothing but an adapter in the folder.

    Returns:
        What to tell where it does not count.

    Raises:
        CheckpointError: there is one, and nothing was said; or there is nothing else.
    """
    if not (folder / CONFIG).is_file():
        return []
    if alone and not ((folder / "config.json").exists() and candidates(folder)):
        base = open_adapter(name, folder).base or "the model that it was trained on"
        raise CheckpointError(
            f"{name} is an adapter of {base}, not a model; give {base} as the model, with "
            f"adapter={name!r}"
        )
    if asked is None:
        raise CheckpointError(
            f"{name} holds an adapter beside its weights ({CONFIG}); say whether it counts: "
            f"adapter={name!r} merges it, adapter='none' leaves it out"
        )
    if isinstance(asked, Adapter) and asked.folder.resolve() == folder.resolve():
        return []
    return [f"the adapter beside the weights of {name} ({CONFIG}) is left out, as was asked"]


def merge(model: PreTrainedModel, asked: Adapter | str | None) -> None:
    """Merge an adapter, if one was asked for; parameters on disk change wherever they are read."""
    if not isinstance(asked, Adapter):
        return
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, made in asked.changes(model).items():
            if not offload.change(model, name, made):
                parameters[name].copy_(made(parameters[name]))


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
    base, mine = (Path(one.partition("@")[0]).name.lower() for one in (asked.base, checkpoint.name))
    if base and base != mine:
        notes.append(
            f"the adapter {asked.name} says that it was trained on {asked.base}; it is merged "
            f"into {checkpoint.name}"
        )
        tell(notes[-1])
    return replace(
        checkpoint,
        name=f"{checkpoint.name} with adapter {asked.name}",
        revision=f"{checkpoint.revision}+{sha256([asked.file, asked.folder / CONFIG])}",
        notes=notes,
    )
