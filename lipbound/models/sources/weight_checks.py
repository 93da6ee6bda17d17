"""Checks that weights are complete and finite, and hashes that tell them apart."""

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
NOT_FINITE = "the weights of {} contain NaN or infinite numbers, in {}; no norm is defined there"


def matters(key: str) -> bool:
    """Return whether a tensor of that name is in a part that attention may depend on."""
    return not any(part in key for part in HEADS_ONLY)


def refused_pickle(error: BaseException) -> bool:
    """Return whether torch refused a file as damaged, or for other things in it than weights."""
    damaged = isinstance(error, struct.error | pickle.UnpicklingError | EOFError)
    return damaged or "weights_only" in str(error) or "Weights only load failed" in str(error)


def check_filled(report: dict[str, Any], name: str) -> None:
    """Refuse weights that leave tensors of the model random.

    Args:
        report: of transformers, on loading: missing, mismatched and unexpected tensors.
        name: what the user called the checkpoint.

    Raises:
        CheckpointError: tensors that attention may depend on are missing or of another shape.
    """
    missing = [key for key in report["missing_keys"] if matters(key)]
    wrong = missing + [
        str(item[0] if isinstance(item, tuple) else item) for item in report["mismatched_keys"]
    ]
    if wrong:
        others = sorted(str(key) for key in report["unexpected_keys"])
        listed = f"{', '.join(others[:2])}{', ...' if len(others) > 2 else ''}"
        instead = f"; what is there instead is {listed}" if missing and others else ""
        raise CheckpointError(
            f"the weights of {name} do not fill its architecture: {len(wrong)} tensors are "
            f"missing or of another shape, {sorted(wrong)[0]} among them, and would be random "
            f"numbers{instead}"
        )


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Refuse weights and buffers in memory that are NaN or infinite.

    Args:
        model: whose parts on the device meta are left out.
        name: what the user called it.

    Raises:
        CheckpointError: one of them is not finite; the message names it.
    """
    for key, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.is_floating_point():
            continue
        # extremes are NaN where one number is: a tenth of the time of a look at each
        if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
            raise CheckpointError(NOT_FINITE.format(name, key))


WITHOUT_EFFECT = (
    "transformers_version dtype torch_dtype architectures use_cache output_attentions "
    "output_hidden_states return_dict id2label label2id problem_type finetuning_task "
    "task_specific_params quantization_config"
)
"""Keys of a configuration that do not change a forward pass without a cache."""


def config_sha256(config: PreTrainedConfig) -> str:
    """Hash what a configuration says beyond the defaults of its class.

    That is positions, windows, epsilons and the like, which weights do not tell.

    Args:
        config: of a model in memory.

    Returns:
        The hexadecimal digest.
    """

    def kept(said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        return {
            str(key): kept(value)
            for key, value in said.items()
            if key not in WITHOUT_EFFECT.split() and not str(key).startswith("_")
        }

    return hashlib.sha256(
        json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str).encode()
    ).hexdigest()


def sha256(files: list[Path]) -> str:
    """Return the hash over the contents of files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def state_sha256(model: PreTrainedModel) -> str:
    """Return the hash over names and float32 values of all tensors of a model in memory."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()
