"""Modules whose parameters stay on disk and are in memory only while a forward pass uses them.

transformers builds the model out of placeholders of the right shapes that weigh next to nothing.
Whatever it renames on the way, the placeholder in a parameter's place still tells which tensor of
which file belongs there. The parameter is then a tensor on the meta device with the right shape and
dtype; hooks put what the file says in its place before the module runs, and the meta tensor back
afterwards. accelerate's offloading does as much for plain forward passes, but casts the whole table
of embeddings up for every look-up of tokens (1 GB of float32 for 128k tokens of width 2048), and
its modules cannot be copied without their hooks.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from lipbound.errors import CaptureError
from lipbound.models.checkpoint import LoadOptions
from lipbound.models.other_libraries import explained
from lipbound.models.weight_files import TensorRef

OTHER_FORM = "its weights are stored in another form, to be joined or split; use weights='whole'"


@dataclass
class WeightOffloader:
    """Reads the parameters of one module at their first use and drops them after their last.

    Attributes:
        away: the parameters as they are when not in memory, on the meta device.
        stored: where each of them is on disk.
        device: where they are brought.
        users: how many forward passes and `resident` contexts hold the parameters.
        table: whether what is in memory is the file's own table of embeddings, in its dtype.
    """

    away: dict[str, nn.Parameter]
    stored: dict[str, TensorRef]
    device: torch.device
    users: int = 0
    table: bool = False

    def hold(self, module: nn.Module, table: bool = False) -> None:
        """Bring the parameters into memory in the model's dtype; ``table``: in the file's."""
        self.users += 1
        if self.users == 1 or (self.table and not table):
            for name, stored in self.stored.items():
                value = stored.read()
                if not table:
                    value = _cast(value.to(self.device), self.away[name].dtype)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
            self.table = table

    def release(self, module: nn.Module) -> None:
        """Drop the parameters from memory if nobody else holds them."""
        self.users = max(self.users - 1, 0)
        if not self.users:
            for name, parameter in self.away.items():
                setattr(module, name, parameter)
            self.table = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Bring the parameters in before a forward pass; registered as a hook."""
        self.hold(module, table=self.device.type == "cpu" and _looks_up(module))
        for _, part, keeper in _read_by(module):
            keeper.hold(part)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return looked-up rows in the model's dtype, and drop the parameters after a pass."""
        looked_up = self.table and isinstance(output, Tensor)
        rows = _cast(output, self.away["weight"].dtype) if looked_up else None
        for _, part, keeper in _read_by(module):
            keeper.release(part)
        self.release(module)
        return rows


def _keeper(module: nn.Module) -> WeightOffloader | None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, WeightOffloader)), None)


def _kept(module: nn.Module) -> list[tuple[str, nn.Module, WeightOffloader]]:
    """Return the names of the parts whose parameters stay on disk, the parts, and their keepers."""
    parts = ((name, part, _keeper(part)) for name, part in module.named_modules())
    return [(name, part, keeper) for name, part, keeper in parts if keeper is not None]


def is_offloaded(module: nn.Module) -> bool:
    """Return whether any of a module's parameters stay on disk."""
    return bool(_kept(module))


def on_disk(model: nn.Module) -> dict[str, TensorRef]:
    """Return the places of parameters that stay on disk, by their names in the model."""
    return {
        f"{prefix}.{name}".lstrip("."): stored
        for prefix, _, keeper in _kept(model)
        for name, stored in keeper.stored.items()
    }


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Keep all parameters of a module, offloaded or not, in memory in the model's dtype.

    CheckpointError is raised where a file is gone, has changed or cannot be read.

    Args:
        module: any.

    Yields:
        Nothing.
    """
    with ExitStack() as afterwards:
        for _, part, keeper in _kept(module):
            afterwards.callback(keeper.release, part)
            keeper.hold(part)
        yield


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy with its weights in memory and no tie to a disk, where these are.

    Raises:
        CaptureError: it cannot be copied.
    """
    kind = type(module).__name__
    with resident(module), explained(CaptureError, f"{kind} cannot be copied, to be run apart: "):
        copied = copy.deepcopy(module)
    for _, part, keeper in _kept(copied):
        own = keeper.before, keeper.after
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in own]:
                del hooks[key]
                part._forward_hooks_always_called.pop(key, None)
    return copied


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.float32).to(dtype)  # by way of float32, as a model loaded whole is


def _looks_up(module: nn.Module) -> bool:
    """Return whether a forward pass only takes rows of a table, the only ones to read and cast."""
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return plain and module.max_norm is None


def _read_by(module: nn.Module) -> list[tuple[str, nn.Module, WeightOffloader]]:
    """Return the submodules whose parameters a module reads without calling them."""
    parts = _kept(module) if isinstance(module, nn.MultiheadAttention) else []
    return [kept for kept in parts if kept[1] is not module]


def load_offloaded(
    folder: Path, tensors: dict[str, TensorRef], config: PretrainedConfig, options: LoadOptions
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model whose weights stay in their files.

    Buffers, and parts that the checkpoint lacks, are in memory. The numbers are those of a model
    loaded whole in float32 and cast to ``dtype``. Not for several threads at once.

    Args:
        folder: of the checkpoint.
        tensors: where the model's are, by name.
        config: of the model.
        options: with the dtype, torch.float32 or torch.float64, in which the model computes, and
            the device.

    Returns:
        The model, in evaluation mode with eager attention, and transformers' report of missing and
        mismatched keys.

    Raises:
        CheckpointError: a file has changed.
        ValueError: quantized weights, or weights that are stored in another form than the model
            computes with. For broken files transformers raises others.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantized; give the checkpoint that was quantized")
    dtype, device = options.dtype, torch.device(options.device)
    placeholders = _Placeholders(tensors)
    model, report = _built(config, placeholders)
    model.name_or_path = model.config.name_or_path = str(folder)  # as transformers sets them
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()  # not in the report
    computed = {str(key) for key in report["missing_keys"]} | {
        key for key in model.state_dict() if any(re.search(pattern, key) for pattern in ignored)
    }
    expected = model.state_dict().keys() - computed
    away: dict[tuple[Path, str], nn.Parameter] = {}  # tied weights are one parameter, and stay one
    for prefix, module in model.named_modules():
        found: dict[str, TensorRef] = {}
        parameters = dict(module.named_parameters(recurse=False))
        for name, tensor in (*parameters.items(), *module.named_buffers(recurse=False)):
            path = f"{prefix}.{name}".lstrip(".")
            stored = placeholders.source(tensor, path in expected, path)
            if stored is not None and name in parameters:
                found[name] = stored
                empty = torch.empty(stored.shape, dtype=dtype, device="meta")
                away.setdefault((stored.file, stored.key), nn.Parameter(empty, requires_grad=False))
                continue
            value = tensor.detach() if stored is None else stored.read().to(tensor.dtype)
            kind = dtype if value.is_floating_point() else value.dtype
            value = value.to(device, kind, copy=stored is not None)
            own = name in parameters
            setattr(module, name, nn.Parameter(value, requires_grad=False) if own else value)
        if found:
            mine = {name: away[stored.file, stored.key] for name, stored in found.items()}
            keeper = WeightOffloader(mine, found, device)
            keeper.release(module)
            module.register_forward_pre_hook(keeper.before)
            module.register_forward_hook(keeper.after, always_call=True)
    return model, report


def _built(
    config: PretrainedConfig, placeholders: "_Placeholders"
) -> tuple[PreTrainedModel, dict[str, Any]]:
    # eager, whatever is asked for: the package of that need not be here, nor its code be fetched
    eager: dict[str, Any] = {"attn_implementation": "eager"}
    with torch.device("meta"):
        architecture = type(AutoModel.from_config(config, trust_remote_code=False, **eager))
    try:
        with placeholders:
            how = eager | {"config": config, "state_dict": placeholders.tensors}
            return architecture.from_pretrained(
                None, dtype=torch.float32, output_loading_info=True, **how
            )
    except Exception as error:
        if placeholders.joined:
            raise ValueError(OTHER_FORM) from error
        raise


class _Placeholders(TorchFunctionMode):
    """Tensors of the stored shapes and next to no memory, known again by address and strides.

    As a context it refuses to join them (experts are stored one by one and computed with as one
    tensor), which would fill the memory with zeros.
    """

    def __init__(self, stored: dict[str, TensorRef]):
        super().__init__()
        self.stored, self.joined = stored, False
        self.tensors = {key: self._placeholder(ref) for key, ref in stored.items()}
        self.keys = {tensor.data_ptr(): key for key, tensor in self.tensors.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.stack) and any(
            tensor.data_ptr() in self.keys for tensor in (args[0] if args else kwargs["tensors"])
        ):
            self.joined = True
            raise ValueError(OTHER_FORM)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _placeholder(stored: TensorRef) -> Tensor:
        dtype = torch.float32 if stored.floating else stored.read().dtype
        thin = stored.shape[:1] + (1,) * (len(stored.shape) - 1)
        return torch.zeros(thin, dtype=dtype).expand(stored.shape)

    def source(self, tensor: Tensor, expected: bool, name: str) -> TensorRef | None:
        """Find the file's tensor behind one of the model.

        Args:
            tensor: a parameter or a buffer.
            expected: whether the file should have it.
            name: of the tensor in the model.

        Returns:
            Its place; None for what was computed.

        Raises:
            ValueError: it was expected, and something else was made of it.
        """
        key = self.keys.get(tensor.data_ptr()) if tensor.numel() else None
        if key is not None:
            mine = self.tensors[key]
            if tensor.shape == mine.shape and tensor.stride() == mine.stride():
                return self.stored[key]
        if expected and tensor.numel():
            raise ValueError(f"{OTHER_FORM}, {name} for one")
        return None
