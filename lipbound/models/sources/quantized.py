"""Checkpoints whose configuration says that their weights were quantised: turned back into
floating-point numbers, or refused by name."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lipbound.errors import CheckpointError
from lipbound.models.sources.weight_checks import HEADS_ONLY
from lipbound.models.weight_files import contents

AFTERWARDS = ("bitsandbytes", "higgs")
"""Methods whose models transformers turns back once they are loaded (``model.dequantize()``)."""


def method(config: PreTrainedConfig) -> str | None:
    """What quantised the weights of a checkpoint, as its configuration calls it; None where nothing
    did."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    name = (
        said.get("quant_method")
        if isinstance(said, Mapping)
        else getattr(said, "quant_method", None)
    )
    return str(getattr(name, "value", name) or "an unnamed method")


def ask_for_floats(config: PreTrainedConfig, name: str) -> str | None:
    """Have transformers turn weights back while it loads them, where it can.

    Args:
        config: of the checkpoint; what it says of quantisation is changed.
        name: what the user called the checkpoint, for messages.

    Returns:
        `method` of the checkpoint.

    Raises:
        CheckpointError: weights that transformers does not turn back.
    """
    how = method(config)
    if how is None or how in AFTERWARDS:
        return how
    kind: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(how)
    if kind is None or "dequantize" not in inspect.signature(kind.__init__).parameters:
        raise CheckpointError(
            f"the weights of {name} were quantized with {how}, which transformers does not turn "
            "back into floating-point numbers; give the "
            "checkpoint that was quantized"
        )
    said = config.quantization_config
    config.quantization_config = {
        **(said if isinstance(said, Mapping) else said.to_dict()),
        "dequantize": True,
    }
    return how


def check_blocks(folder: Path, config: PreTrainedConfig, name: str) -> None:
    """Raise CheckpointError where numbers of one byte are not a whole number of blocks, whose
    scales transformers would take for those of others."""
    said = config.quantization_config
    block = (said if isinstance(said, Mapping) else said.to_dict()).get("weight_block_size")
    try:
        stored = contents(folder)
    except (
        Exception
    ):  # no safetensors files, or broken ones, which loading has its own sentences for
        return
    for key, tensor in stored.items():
        if (
            block
            and f"{key}_scale_inv" in stored
            and any(size % part for size, part in zip(tensor.shape[-2:], block, strict=True))
        ):
            raise CheckpointError(
                f"{key} of {name} is {tensor.shape[-2]} x {tensor.shape[-1]}, no whole number of "
                f"quantized blocks of {block[0]} x {block[1]}, and "
                "transformers misreads such; give the checkpoint that was quantized"
            )


def in_floats(model: PreTrainedModel, how: str | None) -> PreTrainedModel:
    """A loaded model whose weights were quantised with ``how``, all of them
    floating-point numbers."""
    return model.dequantize() if how in AFTERWARDS else model


def check_used(report: dict[str, Any], how: str | None, name: str) -> None:
    """Raise CheckpointError where transformers' loading report lists tensors of a quantised
    checkpoint, such as scales, that were left unused."""
    unused = sorted(
        key for key in report["unexpected_keys"] if not any(part in key for part in HEADS_ONLY)
    )
    if how is not None and unused:
        raise CheckpointError(
            f"transformers left {len(unused)} tensors of {name} unused when it turned back what "
            f"{how} quantized, {unused[0]} among them; give the "
            "checkpoint that was quantized"
        )
