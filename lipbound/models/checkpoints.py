"""Where a model comes from: hub id, local directory, builtin or loaded module -> a `Checkpoint` ready for capture."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lipbound import devices
from lipbound.errors import CheckpointError
from lipbound.models import offload, offload_loading, weight_files
from lipbound.models.builtins import builtin_folder, sha256
from lipbound.models.hub import WEIGHT_FILES, check_directory, first_line, snapshot

HEADS_ONLY = ("pooler", "classifier", "lm_head", "score", "cls.", "qa_outputs", "mask_token")
"""Parts of a model that attention does not depend on: weights missing there do not matter."""


MODALITIES = {"input_ids": "text", "pixel_values": "image"}


WEIGHTS = ("auto", "whole", "layers")


@dataclass
class Checkpoint:
    """A loaded model and where it came from.

    Attributes:
        model: in evaluation mode, float32 or float64, eager attention.
        name: what the user asked for.
        revision: commit of a hub model, or "sha256:..." over the weights of a directory or a loaded model.
        source: what tokenizer and processor are loaded from (a directory or a hub id), or None for a loaded model without one.
        commit: the hub commit, or None.
        loaded: whether the user handed over a loaded model, which no name leads back to.
        by_layer: whether the weights stay on disk and each module's are in memory only while it runs (`lipbound.models.offload`).
    """

    model: PreTrainedModel
    name: str
    revision: str
    source: str | None
    commit: str | None = None
    loaded: bool = False
    by_layer: bool = False

    @property
    def modality(self) -> str:
        """ "text" or "image", or the name of the model's main input where it is neither."""
        main = str(self.model.main_input_name)
        return MODALITIES.get(main, main)

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer; raises CheckpointError where there is none."""
        return self._companion(AutoTokenizer, "tokenizer", "tokens, a dict of ready inputs")

    def image_processor(self) -> Any:
        """The checkpoint's image processor; raises CheckpointError where there is none."""
        return self._companion(AutoImageProcessor, "image processor", "a dict of ready inputs, {'pixel_values': ...}")

    def _companion(self, loader: Any, what: str, instead: str) -> Any:
        if self.source is None:
            raise CheckpointError(f"the loaded model does not say where its {what} is; give data as {instead}")
        try:
            with quiet():
                return loader.from_pretrained(self.source, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(f"{self.name} has no usable {what} ({first_line(error)}); give data as {instead}") from error


class quiet:
    """Context in which transformers prints neither progress bars nor warnings."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
        if self._bars:
            transformers_logging.enable_progress_bar()


def load_checkpoint(
    model: str | Path | PreTrainedModel,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    weights: str = "auto",
) -> Checkpoint:
    """Load a model for capture.

    Args:
        model: hub id ("google/vit-base-patch16-224", "name@revision"), a checkpoint directory, "builtin:minilm", "builtin:gpt2",
            "builtin:llama", "builtin:qwen3", "builtin:vit", "builtin:vit-baseline", "builtin:vit-jasmin", or a loaded transformers model (used as
            it is, moved and cast).
        revision: branch, tag or commit of a hub model.
        dtype: "float32" or "float64"; half-precision weights are cast up.
        device: a torch device.
        weights: "whole": all weights in memory, in ``dtype``. "layers": they stay in the checkpoint's safetensors files, and each module's are in
            memory only while it runs; the numbers are the same, every forward pass reads the files anew. "auto": "layers" where the whole
            weights would take more than half of the free memory of the device.

    Raises:
        CheckpointError: unknown or unreachable model, no weights, weights that do not fit, NaN or infinite weights, no safetensors files
            for "layers". A model loaded in layers raises it later on, too, when its files are gone or have changed.
    """
    if dtype not in ("float32", "float64"):
        raise CheckpointError(f"dtype is {dtype!r}; allowed are 'float32' and 'float64' (half-precision checkpoints are cast up)")
    if weights not in WEIGHTS:
        raise CheckpointError(f"weights is {weights!r}; allowed are 'auto', 'whole' (all in memory) and 'layers' (on disk, read layer by layer)")
    target = getattr(torch, dtype)
    if isinstance(model, PreTrainedModel):
        if weights == "layers" or offload.by_layer(model):
            raise CheckpointError(
                f"model is a loaded {type(model).__name__}, but reading weights layer by layer starts from files; give the checkpoint's directory "
                "or hub id with weights='layers'"
            )
        loaded = model.to(device=device, dtype=target)
        _check_finite(loaded, type(model).__name__)
        source = str(model.name_or_path) or None
        name = source or type(model).__name__
        return Checkpoint(loaded, name, _state_hash(loaded), source, getattr(model.config, "_commit_hash", None), loaded=True)
    if not isinstance(model, str | Path):
        raise CheckpointError(f"model is a {type(model).__name__}; give a hub id, a directory, 'builtin:NAME' or a transformers model")
    name = str(model)
    folder, commit = _locate(name, revision)
    where = torch.device(device)
    layers = weights == "layers" or (weights == "auto" and _large(folder, target, where))
    if layers:
        loaded = _load_by_layer(name, folder, target, where)
    else:
        loaded = _load_model(name, folder).to(device=where, dtype=target)
        _check_finite(loaded, name)
    return Checkpoint(loaded.eval(), name, commit or _files_hash(folder), str(folder), commit, by_layer=layers)


def _locate(name: str, revision: str | None) -> tuple[Path, str | None]:
    """The directory to load from, and the commit of a hub model."""
    if name.startswith("builtin:"):
        return builtin_folder(name.removeprefix("builtin:")), None
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} was given for the directory {name}; revisions are for hub models")
        check_directory(path, str(path))
        return path, None
    if path.exists():
        raise CheckpointError(f"{name} is a file; give the directory that holds config.json and the weights")
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise CheckpointError(f"there is no directory {name}; give a checkpoint directory, a hub id such as 'owner/name', or 'builtin:minilm'")
    repo, _, suffix = name.partition("@")
    if suffix and revision and suffix != revision:
        raise CheckpointError(f"two revisions were given, {suffix!r} in the name and {revision!r}; give one")
    return snapshot(repo, suffix or revision)


def _load_model(name: str, folder: Path) -> PreTrainedModel:
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model, report = AutoModel.from_pretrained(
                folder, config=config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # broken files raise a zoo of types, down to those of single parsers
        raise CheckpointError(f"{name} could not be loaded: {first_line(error)}") from error
    _check_filled(report, name)
    assert isinstance(model, PreTrainedModel)
    return model


def _load_by_layer(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model, report = offload_loading.load_offloaded(folder, config, dtype=dtype, device=device)
    except Exception as error:  # as above
        raise CheckpointError(f"{name} could not be loaded layer by layer: {first_line(error)}") from error
    _check_filled(report, name)
    for key, tensor in offload.on_disk(model).items():
        if not tensor.finite():
            raise CheckpointError(_not_finite(name, key))
    _check_finite(model, name)
    return model


def _large(folder: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights would fill more than half of the free memory; False where they cannot be read layer by layer anyway."""
    try:
        count = weight_files.numbers(folder)
    except Exception:  # no safetensors files, or broken ones, which loading has its own sentences for
        return False
    return count * dtype.itemsize > devices.available(device) / 2


def _check_filled(report: dict[str, Any], name: str) -> None:
    missing = [key for key in report["missing_keys"] if not any(part in key for part in HEADS_ONLY)]
    wrong = missing + [str(item[0] if isinstance(item, tuple) else item) for item in report["mismatched_keys"]]
    if wrong:
        raise CheckpointError(
            f"the weights of {name} do not fill its architecture: {len(wrong)} tensors are missing or of another shape, {sorted(wrong)[0]} among "
            "them, and would be random numbers"
        )


def _check_finite(model: PreTrainedModel, name: str) -> None:
    for key, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(_not_finite(name, key))


def _not_finite(name: str, key: str) -> str:
    return f"the weights of {name} contain NaN or infinite numbers, in {key}; no norm is defined there"


def _files_hash(folder: Path) -> str:
    files = sorted(f for pattern in WEIGHT_FILES for f in folder.glob(pattern))
    return "sha256:" + sha256(files)


def _state_hash(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return "sha256:" + digest.hexdigest()
