"""LoRA adapters (Hu et al. 2022), which PEFT merges into the weights of a model."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.integrations import peft as integration
from transformers.models.auto import auto_factory

from lipbound.errors import CheckpointError
from lipbound.models import weight_files
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.other_libraries import changed, explained, quiet

PEFT_FILES = PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base model's weights as they are."""
PATH = "base_model.model."
"""Prefix that PEFT gives to names of tensors."""
_FINDER = "find_adapter_config_file"


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


def unseen() -> AbstractContextManager[None]:
    """Return a context in which transformers sees no adapter beside weights.

    It would load that, or the model that it names. Its arguments say so in new versions only.
    """
    looking = [one for one in (auto_factory, integration, modeling_utils) if hasattr(one, _FINDER)]
    return changed(_FINDER, lambda *place, **options: None, *looking)


def alone(folder: Path) -> bool:
    """Return whether a folder holds an adapter, and no weights of a model."""
    model = (folder / "config.json").exists() and weight_files.candidates(folder)
    return (folder / PEFT_CONFIG).is_file() and not model


def check_beside(name: str, folder: Path, asked: LoraAdapter | str | None) -> None:
    """Refuse an adapter beside the weights if nobody said whether it counts.

    Args:
        name: what the user called the checkpoint.
        folder: with its weights.
        asked: the adapter that was asked for, "none", or None.

    Raises:
        CheckpointError: there is one, and nothing was said.
    """
    if asked is None and (folder / PEFT_CONFIG).is_file():
        say = f"adapter={name!r} merges it, adapter='none' leaves it out"
        raise CheckpointError(f"{name} holds an adapter beside its weights ({PEFT_CONFIG}); {say}")


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
