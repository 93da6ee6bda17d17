"""Building a model whose weights stay on disk.

transformers itself builds it, out of placeholders of the right shapes that weigh next to nothing;
whatever it renames on the way, the placeholder in a parameter's place still tells which tensor of
which file belongs there. `lipbound.models.offload` then fetches that tensor when it is needed.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from lipbound.errors import CheckpointError
from lipbound.models.offload import WeightOffloader, keep
from lipbound.models.renaming import renames
from lipbound.models.weight_files import TensorRef, contents

_OTHER_FORM = (
    "its weights are stored in another form than the model computes with (pieces to "
    "join or split); use weights='whole'"
)


def load_offloaded(
    folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in evaluation mode, with eager attention, whose weights stay in the safetensors files
    of a folder.

    Buffers, and parts that the checkpoint lacks, are in memory. The numbers are those of a model
    loaded whole in float32 and cast to ``dtype``. Not for several threads at once.

    Returns:
        The model, and transformers' report of missing and mismatched keys.

    Raises:
        CheckpointError: no safetensors files, quantized weights, or weights that are stored in
            another form than the model computes with.
        Exception: what transformers raises for broken files.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            "its weights are quantized, and weights='layers' reads float weights only; give the "
            "checkpoint that was quantized"
        )
    tensors = contents(folder)
    tensors = (
        {renamed.get(key, key): stored for key, stored in tensors.items()}
        if (renamed := renames(tensors, config))
        else tensors
    )
    placeholders = {key: _placeholder(stored) for key, stored in tensors.items()}
    owners = {tensor.data_ptr(): key for key, tensor in placeholders.items()}
    with torch.device("meta"):
        # eager whatever attention the configuration asks for: its package need not be here, and its
        # code need not be fetched
        architecture = type(
            AutoModel.from_config(config, trust_remote_code=False, attn_implementation="eager")
        )
    with _NoJoining(owners) as joining:
        try:
            model, report = architecture.from_pretrained(
                None,
                config=config,
                state_dict=placeholders,
                attn_implementation="eager",
                dtype=torch.float32,
                output_loading_info=True,
            )
        except Exception as error:
            if joining.tripped:
                raise CheckpointError(_OTHER_FORM) from error
            raise
    model.name_or_path = model.config.name_or_path = str(
        folder
    )  # as transformers does for a folder
    ignored = (
        getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    )  # left out of the report
    lacking = {str(key) for key in report["missing_keys"]}
    expected = {
        key
        for key in model.state_dict()
        if key not in lacking and not any(re.search(pattern, key) for pattern in ignored)
    }

    def source(name: str, tensor: Tensor) -> TensorRef | None:
        """Where a tensor of the model is stored; None for what was computed."""
        key = owners.get(tensor.data_ptr()) if tensor.numel() else None
        if (
            key is not None
            and tensor.shape == placeholders[key].shape
            and tensor.stride() == placeholders[key].stride()
        ):
            return tensors[key]
        if name in expected and tensor.numel():
            raise CheckpointError(f"{_OTHER_FORM}, {name} for one")
        return None

    meta: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, buffer in module.named_buffers(recurse=False):
            stored = source(dot + name, buffer)
            value = buffer if stored is None else stored.read().to(buffer.dtype)
            setattr(
                module,
                name,
                value.to(
                    device,
                    dtype if value.is_floating_point() else value.dtype,
                    copy=stored is not None,
                ),
            )
        found: dict[str, TensorRef] = {}
        away: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(recurse=False):
            stored = source(dot + name, parameter)
            if stored is None:
                setattr(
                    module,
                    name,
                    nn.Parameter(parameter.detach().to(device, dtype), requires_grad=False),
                )
                continue
            found[name] = stored  # tied weights are one parameter, and stay one
            away[name] = meta.setdefault(
                str((stored.file, stored.key)),
                nn.Parameter(torch.empty(stored.shape, dtype=dtype, device="meta"), False),
            )
        for name, parameter in away.items():
            setattr(module, name, parameter)
        if found:
            keep(module, WeightOffloader(away, found, device))
    return model, report


class _NoJoining(TorchFunctionMode):
    """Refuses to join placeholders (experts are stored one by one and computed with as one tensor),
    which would fill the memory with zeros."""

    def __init__(self, owners: dict[int, str]):
        super().__init__()
        self.owners, self.tripped = owners, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.stack) and any(
            t.data_ptr() in self.owners for t in (args[0] if args else kwargs["tensors"])
        ):
            self.tripped = True
            raise CheckpointError(_OTHER_FORM)
        return func(*args, **(kwargs or {}))


def _placeholder(stored: TensorRef) -> Tensor:
    """A tensor of the right shape and next to no memory, whose address and strides betray whatever
    is done to it."""
    dtype = torch.float32 if stored.floating else stored.read().dtype
    return torch.zeros(stored.shape[:1] + (1,) * (len(stored.shape) - 1), dtype=dtype).expand(
        stored.shape
    )
