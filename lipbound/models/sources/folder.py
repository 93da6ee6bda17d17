"""Load a model from a folder with its configuration and weights, or from a GGUF file in it.

Quantised weights are turned back into floating-point numbers, or refused by name. LoRA adapters (Hu
et al. 2022) are merged into the weights by PEFT.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, modeling_utils
from transformers.integrations import peft as integration
from transformers.models.auto import auto_factory
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lipbound import devices
from lipbound.errors import CheckpointError, tell
from lipbound.models import offload, weight_files
from lipbound.models.checkpoint import Checkpoint, LoadOptions
from lipbound.models.quiet import changed, explained, quiet
from lipbound.models.sources.loaded_model import check_finite, check_floating

FILES = WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin a LoRA matrix (``init_lora_weights``) that leave the weights beside it alone."""
PATH = "base_model.model."
"""Prefix that PEFT gives to names of tensors."""
_FINDER = "find_adapter_config_file"


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

    def check(self) -> None:
        """Refuse what PEFT must not be given.

        That is no safetensors file, other kinds than LoRA, modules to be imported by name, and
        beginnings that change the weights beside the matrices.

        Raises:
            CheckpointError: the adapter has one of them.
        """
        if not (self.folder / WEIGHTS).is_file():
            raise CheckpointError(
                f"the adapter {self.name} has no {WEIGHTS}, and pickles are not read; save it anew"
            )
        weight_files.check_file(self.folder / WEIGHTS)
        allowed = {"peft_type": ("LORA",), "init_lora_weights": STARTS, "megatron_config": (None,)}
        for key, values in allowed.items():
            said = self.config.get(key)
            if said not in values or (key == "peft_type" and not said):
                raise CheckpointError(
                    f"the adapter {self.name} says {key}: {json.dumps(said)[:60]}, which is not "
                    "merged here; merge it with PEFT (merge_and_unload) and save the model"
                )

    def merge(self, model: PreTrainedModel) -> None:
        """Have PEFT merge it into the weights of a model in memory, on the CPU.

        Args:
            model: that it was trained on. Parts that attention does not depend on, such as a head,
                may be missing there.

        Raises:
            CheckpointError: PEFT is not installed, or refuses; the adapter changes or lacks parts
                that the model has not, or has.
        """
        self.check()
        try:
            import peft
        except ImportError as error:
            raise CheckpointError(
                f"the adapter {self.name} is merged by peft; pip install 'lipbound[adapters]'"
            ) from error
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
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
            if strange or fitted.missing_keys:
                what = "changes" if strange else "lacks"
                raise CheckpointError(
                    f"the adapter {self.name} {what} {(strange or fitted.missing_keys)[0]}, which "
                    f"{type(model).__name__} {'does not have' if strange else 'has'}; give the "
                    f"model that it was trained on {self.base}".rstrip()
                )
            merged.merge_and_unload()
        model.requires_grad_(True)  # as it was


def _as_trained(model: PreTrainedModel, keys: list[str]) -> nn.Module:
    """Return a model, in a module with the head's name for it where an adapter was trained there.

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
        raise CheckpointError(f"adapter is {name!r}, without {CONFIG}; give what PEFT wrote")
    weight_files.check_file(file)
    with explained(CheckpointError, f"{file} is no configuration of an adapter: "):
        return Adapter(name, folder, dict(json.loads(file.read_text(encoding="utf-8"))))


def unseen() -> AbstractContextManager[None]:
    """Return a context in which transformers sees no adapter beside weights.

    It would load that, or the model that it names. Its arguments say so in new versions only.
    """
    looking = [one for one in (auto_factory, integration, modeling_utils) if hasattr(one, _FINDER)]
    return changed(_FINDER, lambda *place, **options: None, *looking)


def alone(folder: Path) -> bool:
    """Return whether a folder holds an adapter, and no weights of a model."""
    model = (folder / "config.json").exists() and weight_files.candidates(folder)
    return (folder / CONFIG).is_file() and not model


def notes_beside(name: str, folder: Path, asked: Adapter | str | None) -> list[str]:
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


def named(checkpoint: Checkpoint, asked: Adapter) -> Checkpoint:
    """Name a checkpoint after the adapter, too, that was merged into it.

    A notice tells where the adapter names another model, by the last part of their names.

    Args:
        checkpoint: as it was loaded.
        asked: the adapter.

    Returns:
        The checkpoint with the names and revisions of both.
    """
    notes = list(checkpoint.notes)
    base, mine = (Path(one.partition("@")[0]).name.lower() for one in (asked.base, checkpoint.name))
    if base and base != mine:
        notes.append(f"the adapter {asked.name}, of {asked.base}, is merged into {checkpoint.name}")
        tell(notes[-1])
    name = f"{checkpoint.name} with adapter {asked.name}"
    own = weight_files.sha256(asked.folder / name for name in FILES)
    return replace(checkpoint, name=name, revision=f"{checkpoint.revision}+{own}", notes=notes)


AFTERWARDS = ("bitsandbytes", "higgs")
"""Methods whose models transformers turns back once they are loaded (``model.dequantize()``)."""
LAYERS = 1000
"""Number of layers that nobody doubts, be they stored once for all (ALBERT) or each."""
INSTEAD = "give the checkpoint that was quantized"


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
        The model in evaluation mode, with the adapter that was asked for.

    Raises:
        CheckpointError: files that transformers cannot load, weights that do not fill the
            architecture or are not finite. LipboundError for a GGUF file larger than the memory.
    """
    if sys.flags.optimize > 1:
        raise CheckpointError("transformers needs its docstrings; run python without -OO")
    file = None if gguf is None else folder / gguf
    merged = options.adapter if isinstance(options.adapter, Adapter) else None
    notes = notes_beside(name, folder, options.adapter)
    if file is None and not (folder / "config.json").is_file():
        raise CheckpointError(f"{name} has no config.json; give what save_pretrained writes")
    weight_files.check_file(file or folder / "config.json")
    how = None
    if file is not None:
        options.refuse_given(f"the GGUF file {file}", "weights")
        with _loading(name):
            how = weight_files.check_gguf(name, file)
    with _loading(name, file):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf)
    counts = [getattr(one, "num_hidden_layers", 0) for one in (config, *vars(config).values())]
    most = max(count for count in counts if isinstance(count, int))  # would be built for hours
    if most > LAYERS and most > (
        there := len(weight_files.gguf_of(file).tensors if file else _stored(folder))
    ):
        said = f"the configuration of {name} says {most} layers"
        raise CheckpointError(f"{said}, and its weights are {there} tensors; fetch it again")
    check_rotary(config, name)
    files, unread = ([file], []) if file else weight_files.files(folder)
    notes += unread
    tell(*unread)
    layers = file is None and _by_layer(folder, options)
    if layers:
        with _loading(name):
            model, report = offload.load_offloaded(
                folder, config, dtype=options.dtype, device=torch.device(options.device)
            )
        check_filled(report, name)
    else:
        how = how or ask_for_floats(config, name, folder)
        model = _load_whole(name, folder, config, how, gguf)
        check_floating(model, name)
        if how is None:
            check_stored(folder, model, name)
        model = model.to(dtype=options.dtype)
        if merged is not None:
            merged.merge(model)
        model = model.to(device=options.device)
    check_finite(model, name)
    revision = weight_files.sha256(files) if commit is None or gguf else commit
    config_sha = None if commit or gguf else weight_files.sha256([folder / "config.json"])
    checkpoint = Checkpoint(model.eval(), name, revision, str(folder), commit, by_layer=layers)
    checkpoint.notes, checkpoint.configuration = notes, config_sha
    checkpoint.gguf_file, checkpoint.quantization = gguf, how
    return checkpoint if merged is None else named(checkpoint, merged)


@contextmanager
def _loading(name: str, gguf: Path | None = None) -> Iterator[None]:
    """Silence transformers, and raise CheckpointError in place of whatever it raises."""
    before, why = f"{name} could not be loaded: ", weight_files.unreadable
    with explained(CheckpointError, before, why=why), quiet(), weight_files.gguf_read_once(gguf):
        yield


def _by_layer(folder: Path, options: LoadOptions) -> bool:
    """Return whether weights stay on disk: where it was asked for, or they fill half the memory.

    Raises:
        CheckpointError: it was asked for, and an adapter is to be merged.
    """
    merged = isinstance(options.adapter, Adapter)
    if merged and options.weights == "layers":
        raise CheckpointError(
            "an adapter is merged into weights in memory, and weights='layers' leaves them on "
            "disk; use weights='whole', or merge it with PEFT and save the model"
        )
    if merged or options.weights != "auto":
        return options.weights == "layers"
    needed = sum(prod(t.shape) for t in _stored(folder).values()) * options.dtype.itemsize
    return needed > devices.available(torch.device(options.device)) / 2


def _load_whole(
    name: str, folder: Path, config: PretrainedConfig, how: str | None, gguf: str | None
) -> PreTrainedModel:
    """Return the model with its weights in memory; ``how``: what quantised them."""

    def load(names: dict[str, str] | None) -> tuple[PreTrainedModel, dict[str, Any]]:
        with _loading(name, folder / gguf if gguf else None), unseen():
            wanted: dict[str, Any] = {"config": config, "key_mapping": names, "gguf_file": gguf}
            wanted |= {"attn_implementation": "eager", "dtype": torch.float32}
            wanted |= {"trust_remote_code": False, "output_loading_info": True}
            model, report = AutoModel.from_pretrained(folder, **wanted)
            return model.dequantize() if how in AFTERWARDS else model, report

    model, report = load(None)
    if report["missing_keys"] and (
        renamed := weight_files.renames(report["unexpected_keys"], config)
    ):
        model, report = load({f"^{re.escape(old)}$": new for old, new in renamed.items()})
    check_filled(report, name)
    unused = sorted(filter(weight_files.matters, report["unexpected_keys"]))
    if how is not None and gguf is None and unused:
        raise CheckpointError(
            f"transformers left {len(unused)} tensors of {name} unused when it turned back what "
            f"{how} quantized, {unused[0]} among them; {INSTEAD}"
        )
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
        if said and said != read | (scaling or {}) and transformers.__version__ < "5":
            raise CheckpointError(
                f"{name} was saved by transformers {config.transformers_version}, and "
                f"{transformers.__version__} reads other rotary embeddings than it says "
                "(rope_parameters); install transformers>=5"
            )


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
        raise CheckpointError(
            f"the weights of {name} do not fill its architecture: {len(wrong)} tensors are "
            f"missing or of another shape, {sorted(wrong)[0]} among them, and would be random "
            f"numbers{instead}"
        )


def ask_for_floats(config: PretrainedConfig, name: str, folder: Path) -> str | None:
    """Have transformers turn weights back while it loads them, where it can.

    Args:
        config: of the checkpoint; what it says of quantisation is changed.
        name: what the user called the checkpoint, for messages.
        folder: with its files of weights.

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
            raise CheckpointError(
                f"the weights of {name} were quantized with {how}, which transformers does not "
                f"turn back into floating-point numbers; {INSTEAD}"
            )
        config.quantization_config = said | {"dequantize": True}
    block = said.get("weight_block_size")
    stored = _stored(folder)
    for key, tensor in stored.items() if block else ():
        # of such blocks transformers would take the scales of others
        if f"{key}_scale_inv" in stored and any(
            size % part for size, part in zip(tensor.shape[-2:], block, strict=True)
        ):
            raise CheckpointError(
                f"{key} of {name} is no whole number of quantized blocks of {block[0]} x "
                f"{block[1]}, and transformers misreads such; {INSTEAD}"
            )
    return how


def check_stored(folder: Path, model: PreTrainedModel, name: str) -> None:
    """Refuse safetensors files that hold whole numbers in the place of weights.

    Args:
        folder: of the checkpoint.
        model: as it was loaded from there.
        name: what the user called it.

    Raises:
        CheckpointError: there is such a tensor.
    """
    floating = {key for key, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for key, tensor in _stored(folder).items():
        bare = key.partition(".")[2]  # without the prefix of the task's model
        if not tensor.floating and (key in floating or bare in floating):
            raise CheckpointError(
                f"weights of {name} are not all floating-point numbers, {key} for one; {INSTEAD}"
            )


def _stored(folder: Path) -> dict[str, weight_files.TensorRef]:
    """Return the tensors of a checkpoint; none where it has no safetensors files."""
    try:
        return weight_files.contents(folder)
    except CheckpointError:
        return {}
