"""Checks that weights are complete, finite and floating-point numbers; hashes that tell them apart.

Quantised weights are turned back into floating-point numbers, or refused by name.
"""

import hashlib
import inspect
import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lipbound.errors import CheckpointError
from lipbound.models.offload import by_layer, on_disk
from lipbound.models.weight_files import TensorRef, contents

HEADS_ONLY = ("pooler", "classifier", "lm_head", "score", "cls.", "qa_outputs", "mask_token")
"""Parts of a model that attention does not depend on: weights missing there do not matter."""
WITHOUT_EFFECT = (
    "transformers_version dtype torch_dtype architectures use_cache output_attentions "
    "output_hidden_states return_dict id2label label2id problem_type finetuning_task "
    "task_specific_params quantization_config"
)
"""Keys of a configuration that do not change a forward pass without a cache."""
AFTERWARDS = ("bitsandbytes", "higgs")
"""Methods whose models transformers turns back once they are loaded (``model.dequantize()``)."""
PACKED = ("qweight", "weight_packed", "W_q", "qzeros")
"""Buffers of layers that keep their weights in a form of their own."""
INSTEAD = "give the checkpoint that was quantized"


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


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse weights and buffers, in memory or on disk, that are NaN or infinite.

    A buffer in memory may hold -inf, as masks do.

    Args:
        model: as it was loaded.
        name: what the user called it.

    Raises:
        CheckpointError: one of them is not finite; the message names it. Or a file is gone.
    """
    stored, buffers = on_disk(model), {key for key, _ in model.named_buffers()}
    for key, tensor in model.state_dict().items():
        if key in stored:
            finite = stored[key].finite()
        elif isinstance(tensor, Tensor) and not tensor.is_meta and tensor.is_floating_point():
            # extremes are NaN where one number is: a tenth of the time of a look at each
            ends = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
            ends = ends.nan_to_num(nan=torch.nan, neginf=0.0) if key in buffers else ends
            finite = bool(torch.isfinite(ends).all())
        else:
            continue
        if not finite:
            raise CheckpointError(
                f"the weights of {name} contain NaN or infinite numbers, in {key}; no norm is "
                "defined there"
            )


def ask_for_floats(config: PreTrainedConfig, name: str, folder: Path) -> str | None:
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
                f"{key} of {name} is {tensor.shape[-2]} x {tensor.shape[-1]}, no whole number of "
                f"quantized blocks of {block[0]} x {block[1]}, and transformers misreads such; "
                f"{INSTEAD}"
            )
    return how


def _stored(folder: Path) -> dict[str, TensorRef]:
    """Return the tensors of a checkpoint; none where it has no safetensors files."""
    try:
        return contents(folder)
    except Exception:  # none, or broken ones, which loading has its own sentences for
        return {}


def in_floats(model: PreTrainedModel, how: str | None) -> PreTrainedModel:
    """Return a loaded model, quantised with ``how``, with floating-point numbers for weights."""
    return model.dequantize() if how in AFTERWARDS else model


def check_used(report: dict[str, Any], how: str | None, name: str) -> None:
    """Refuse a quantised checkpoint with tensors, such as scales, that transformers did not use.

    Args:
        report: of transformers, on loading.
        how: what quantised the weights, or None.
        name: what the user called the checkpoint.

    Raises:
        CheckpointError: there are such tensors.
    """
    unused = sorted(filter(matters, report["unexpected_keys"]))
    if how is not None and unused:
        raise CheckpointError(
            f"transformers left {len(unused)} tensors of {name} unused when it turned back what "
            f"{how} quantized, {unused[0]} among them; {INSTEAD}"
        )


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
    for key, value in model.state_dict(keep_vars=True).items():
        if _packed(key, value):
            inside = key.partition("._packed_params")[0]
            path = inside if inside != key else key.rpartition(".")[0]
            raise CheckpointError(
                f"the weights of {name} are not all floating-point numbers: {path} is a quantized "
                f"{type(model.get_submodule(path)).__name__}, which has no true derivatives; give "
                "the model before quantization"
            )
    for key, tensor in model.named_parameters():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise CheckpointError(
                f"the weights of {name} are not all floating-point numbers, {key} is "
                f"{str(tensor.dtype).removeprefix('torch.')}; give the checkpoint before "
                "quantization, or what model.dequantize() makes of a loaded model"
            )
        if tensor.is_meta and not by_layer(model):
            raise CheckpointError(
                f"the weights of {name} are not in memory ({key} is on the device meta); load "
                "the model with its weights"
            )


def _packed(key: str, value: object) -> bool:
    """Return whether an entry of a state dict holds packed weights of a quantised layer.

    That is one of torch's int8 layers, GPTQ, AWQ, compressed-tensors or HQQ.
    """
    if not isinstance(value, torch.Tensor):
        return "packed" in key and value is not None
    named = key.rpartition(".")[2] in PACKED
    return value.is_quantized or (named and not value.is_floating_point())


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
                f"the weights of {name} are not all floating-point numbers, {key} for one; give "
                "the checkpoint before quantization"
            )


def config_sha256(config: PreTrainedConfig) -> str:
    """Hash what a configuration says beyond the defaults of its class.

    That is positions, windows, epsilons and the like, which weights do not tell.

    Args:
        config: of a model in memory.

    Returns:
        "sha256:" and the hexadecimal digest.
    """

    def kept(said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        return {
            str(key): kept(value)
            for key, value in said.items()
            if key not in WITHOUT_EFFECT.split() and not str(key).startswith("_")
        }

    said = json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str)
    return "sha256:" + hashlib.sha256(said.encode()).hexdigest()


def sha256(files: list[Path]) -> str:
    """Return "sha256:" and the hash over the contents of files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return "sha256:" + digest.hexdigest()


def state_sha256(model: nn.Module) -> str:
    """Return "sha256:" and the hash over names and float32 values of a model in memory."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return "sha256:" + digest.hexdigest()
