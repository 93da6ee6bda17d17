"""Whether weights are complete and finite, and the hashes that tell them apart."""

import hashlib
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lipbound.errors import CheckpointError

HEADS_ONLY = ("pooler", "classifier", "lm_head", "score", "cls.", "qa_outputs", "mask_token")
"""Parts of a model that attention does not depend on: weights missing there do not matter."""


def refused_pickle(error: BaseException) -> bool:
    """Tell whether torch refused to read a file since it is damaged or holds other things than
    weights."""
    damaged = isinstance(error, struct.error | pickle.UnpicklingError | EOFError)
    return damaged or "weights_only" in str(error) or "Weights only load failed" in str(error)


def check_filled(report: dict[str, Any], name: str) -> None:
    """Raise CheckpointError where transformers' loading report lists tensors that would be random
    numbers."""
    missing = [key for key in report["missing_keys"] if not any(part in key for part in HEADS_ONLY)]
    wrong = missing + [
        str(item[0] if isinstance(item, tuple) else item) for item in report["mismatched_keys"]
    ]
    if wrong:
        others = sorted(str(key) for key in report["unexpected_keys"])
        instead = (
            "; what is there instead is "
            f"{', '.join(others[:2])}{', ...' if len(others) > 2 else ''}"
            if missing and others
            else ""
        )
        raise CheckpointError(
            f"the weights of {name} do not fill its architecture: {len(wrong)} tensors are "
            f"missing or of another shape, {sorted(wrong)[0]} among "
            f"them, and would be random numbers{instead}"
        )


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Raise CheckpointError where a weight or buffer in memory is NaN or infinite."""
    for key, tensor in model.state_dict().items():
        if (
            isinstance(tensor, Tensor)
            and not tensor.is_meta
            and tensor.is_floating_point()
            and not _finite(tensor)
        ):
            raise not_finite(name, key)


def _finite(tensor: Tensor) -> bool:
    """Whether all its numbers are, by their extremes, which are NaN where one of them is: a tenth
    of the time of a look at each."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def not_finite(name: str, key: str) -> CheckpointError:
    """The error about a tensor with NaN or infinite numbers."""
    return CheckpointError(
        f"the weights of {name} contain NaN or infinite numbers, in {key}; no norm is defined there"
    )


WITHOUT_EFFECT = frozenset(
    (
        "transformers_version",
        "dtype",
        "torch_dtype",
        "architectures",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "quantization_config",
    )
)
"""What a configuration says that no number of a forward pass without a cache depends on."""


def config_sha256(config: PreTrainedConfig) -> str:
    """Hash over what a configuration in memory says beyond the defaults of its class: positions,
    windows, epsilons, which weights do not tell."""

    def kept(said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        return {
            str(key): kept(value)
            for key, value in said.items()
            if key not in WITHOUT_EFFECT and not str(key).startswith("_")
        }

    return hashlib.sha256(
        json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str).encode()
    ).hexdigest()


def sha256(files: list[Path]) -> str:
    """Hash over the contents of files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def state_sha256(model: PreTrainedModel) -> str:
    """Hash over names and float32 values of all tensors of a model in memory."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()
