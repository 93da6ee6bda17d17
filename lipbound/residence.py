"""Models whose weights stay on disk: each module's parameters are in memory only while its forward runs.

transformers itself builds the model, out of placeholders of the right shapes that weigh next to nothing; whatever it renames on the way, the
placeholder in a parameter's place still tells which tensor of which file belongs there. Parameters become meta tensors then, and hooks read them
when they are needed. accelerate's offloading to disk would do for plain forward passes, but it casts the largest tensor up while loading and at
every look-up of tokens (1 GB of float32 for 128k tokens of width 2048), and its modules cannot be copied without their hooks.
"""

import copy
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from lipbound.errors import CheckpointError

BLOCK = 1 << 24
"""Numbers read at once where a tensor is looked at piece by piece."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, as it was when the model was loaded."""

    file: Path
    key: str
    shape: tuple[int, ...]
    floating: bool
    stamp: tuple[int, int]

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor, or rows of it, in the dtype of the file, backed by the file: pages that nobody looks at are never read.

        Raises:
            CheckpointError: the file is gone, has changed or cannot be read.
        """
        try:
            if _stamp(self.file) != self.stamp:
                raise CheckpointError(f"{self.file} has changed since the model was loaded from it layer by layer; load the model again")
            with safe_open(self.file, framework="pt") as file:
                return file.get_tensor(self.key) if rows is None else file.get_slice(self.key)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.key} cannot be read from {self.file} any more ({error}); models loaded layer by layer need their files, so put it back "
                "or load the model again"
            ) from error

    def finite(self) -> bool:
        """Whether all numbers are finite in float32, looked at in blocks."""
        if not self.floating:
            return True
        if not self.shape:
            return bool(torch.isfinite(self.read().float()))
        step = max(1, BLOCK * self.shape[0] // max(1, torch.Size(self.shape).numel()))
        return all(bool(torch.isfinite(self.read(slice(i, i + step)).float()).all()) for i in range(0, self.shape[0], step))


@dataclass
class Keeper:
    """Fetches the parameters of one module when they are needed first and drops them after their last use.

    Attributes:
        away: the parameters as they are when not in memory, on the meta device.
        stored: where each of them is on disk.
        looks_up: whether the module is a plain table of embeddings, of which a forward pass takes rows: the file's own half-precision table
            is enough for that, and only the rows are cast.
        together: whether the module reads parameters of its submodules without calling them.
        users: how many forward passes and `resident` contexts hold the parameters.
    """

    away: dict[str, nn.Parameter]
    stored: dict[str, Stored]
    device: torch.device
    looks_up: bool
    together: bool
    users: int = field(default=0)
    table: bool = field(default=False)

    def hold(self, module: nn.Module, look_up: bool = False) -> None:
        """Parameters into memory, unless they are there, in their dtype; with ``look_up`` in that of the file."""
        self.users += 1
        if self.users == 1 or (self.table and not look_up):
            for name, stored in self.stored.items():
                value = stored.read() if look_up else _cast(stored.read().to(self.device), self.away[name].dtype)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
            self.table = look_up

    def release(self, module: nn.Module) -> None:
        """Parameters out of memory, if nobody else holds them."""
        self.users = max(self.users - 1, 0)
        if not self.users:
            for name, parameter in self.away.items():
                setattr(module, name, parameter)
            self.table = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before a forward pass."""
        self.hold(module, self.looks_up)
        if self.together:
            for part, keeper in _kept(module):
                if keeper is not self:
                    keeper.hold(part)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook after a forward pass, also after one that failed."""
        looked_up = self.table and isinstance(output, Tensor)
        dtype = next(iter(self.away.values())).dtype
        if self.together:
            for part, keeper in _kept(module):
                if keeper is not self:
                    keeper.release(part)
        self.release(module)
        return _cast(output, dtype) if looked_up else None


def _keeper(module: nn.Module) -> Keeper | None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Keeper)), None)


def _kept(module: nn.Module) -> list[tuple[nn.Module, Keeper]]:
    return [(part, keeper) for part in module.modules() if (keeper := _keeper(part)) is not None]


def by_layer(module: nn.Module) -> bool:
    """Whether any of a module's parameters stay on disk."""
    return bool(_kept(module))


def stored(model: nn.Module) -> dict[str, Stored]:
    """Where the parameters that stay on disk are, by their names in the model."""
    parts = {part: prefix for prefix, part in model.named_modules()}
    return {f"{parts[part]}.{name}".lstrip("."): where for part, keeper in _kept(model) for name, where in keeper.stored.items()}


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Context in which all parameters of a module and its submodules are in memory, in the dtype that was asked for; any module will do.

    Raises:
        CheckpointError: a file is gone, has changed or cannot be read.
    """
    held: list[tuple[nn.Module, Keeper]] = []
    try:
        for part, keeper in _kept(module):
            held.append((part, keeper))
            keeper.hold(part)
        yield
    finally:
        for part, keeper in held:
            keeper.release(part)


def plain_copy(module: nn.Module) -> nn.Module:
    """A deep copy with its weights in memory and no tie to a disk; of an ordinary module just a deep copy.

    Raises:
        CheckpointError: a file is gone, has changed or cannot be read.
    """
    with resident(module):
        copied = copy.deepcopy(module)
    for part in copied.modules():
        hooks = (part._forward_pre_hooks, part._forward_hooks)
        for mine in [key for table in hooks for key, hook in table.items() if isinstance(getattr(hook, "__self__", None), Keeper)]:
            for table in (*hooks, part._forward_hooks_always_called):
                table.pop(mine, None)
    return copied


def numbers(folder: Path) -> int:
    """How many numbers the safetensors files of a checkpoint hold; raises CheckpointError where there are no such files."""
    return sum(torch.Size(stored.shape).numel() for stored in _contents(folder).values())


def load(folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in evaluation mode, with eager attention, whose weights stay in the safetensors files of a folder.

    Buffers, and parts that the checkpoint lacks, are in memory. The numbers are those of a model loaded whole in float32 and cast to ``dtype``.
    Not for several threads at once.

    Returns:
        The model, and transformers' report of missing and mismatched keys.

    Raises:
        CheckpointError: no safetensors files, quantized weights, or weights that are stored in another form than the model computes with.
        Exception: what transformers raises for broken files.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError("its weights are quantized, and weights='layers' reads float weights only; give the checkpoint that was quantized")
    contents = _contents(folder)
    placeholders = {key: _placeholder(stored) for key, stored in contents.items()}
    owners = {tensor.data_ptr(): key for key, tensor in placeholders.items()}
    with torch.device("meta"):
        architecture = type(AutoModel.from_config(config, trust_remote_code=False))
    with _NoJoining(owners) as joining:
        try:
            model, report = architecture.from_pretrained(
                None, config=config, state_dict=placeholders, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:
            if joining.tripped:
                raise CheckpointError(_OTHER_FORM) from error
            raise
    model.name_or_path = model.config.name_or_path = str(folder)  # as transformers does for a folder
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()  # left out of the report
    lacking = {str(key) for key in report["missing_keys"]}
    expected = {key for key in model.state_dict() if key not in lacking and not any(re.search(pattern, key) for pattern in ignored)}

    def source(name: str, tensor: Tensor) -> Stored | None:
        """Where a tensor of the model is stored; None for what was computed."""
        key = owners.get(tensor.data_ptr()) if tensor.numel() else None
        if key is not None and tensor.shape == placeholders[key].shape and tensor.stride() == placeholders[key].stride():
            return contents[key]
        if name in expected and tensor.numel():
            raise CheckpointError(f"{_OTHER_FORM}, {name} for one")
        return None

    meta: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, buffer in module.named_buffers(recurse=False):
            stored = source(dot + name, buffer)
            value = buffer if stored is None else stored.read().to(buffer.dtype)
            setattr(module, name, value.to(device, dtype if value.is_floating_point() else value.dtype, copy=stored is not None))
        found: dict[str, Stored] = {}
        away: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(recurse=False):
            stored = source(dot + name, parameter)
            if stored is None:
                setattr(module, name, nn.Parameter(parameter.detach().to(device, dtype), requires_grad=False))
                continue
            found[name] = stored  # tied weights are one parameter, and stay one
            away[name] = meta.setdefault(str((stored.file, stored.key)), nn.Parameter(torch.empty(stored.shape, dtype=dtype, device="meta"), False))
        for name, parameter in away.items():
            setattr(module, name, parameter)
        if found:
            _keep(module, Keeper(away, found, device, _looks_up(module, device), isinstance(module, nn.MultiheadAttention)))
    return model, report


_OTHER_FORM = "its weights are stored in another form than the model computes with (pieces to join or split); use weights='whole'"


class _NoJoining(TorchFunctionMode):
    """Refuses to join placeholders (experts are stored one by one and computed with as one tensor), which would fill the memory with zeros."""

    def __init__(self, owners: dict[int, str]):
        super().__init__()
        self.owners, self.tripped = owners, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.stack) and any(t.data_ptr() in self.owners for t in args[0]):
            self.tripped = True
            raise CheckpointError(_OTHER_FORM)
        return func(*args, **(kwargs or {}))


def _placeholder(stored: Stored) -> Tensor:
    """A tensor of the right shape and next to no memory, whose address and strides betray whatever is done to it."""
    dtype = torch.float32 if stored.floating else stored.read().dtype
    return torch.zeros(stored.shape[:1] + (1,) * (len(stored.shape) - 1), dtype=dtype).expand(stored.shape)


def _contents(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by its name in the files."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        if not index.exists():
            raise CheckpointError(
                f"{folder} has neither model.safetensors nor {index.name}, and weights='layers' reads no other files; use weights='whole', or save "
                "the model again with save_pretrained"
            )
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    contents = {}
    for name in names:
        file = (folder / name).absolute()
        stamp = _stamp(file)
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(key)
                contents[key] = Stored(file, key, tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF")), stamp)
    return contents


def _stamp(file: Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.float32).to(dtype)  # by way of float32, as a model loaded whole is


def _looks_up(module: nn.Module, device: torch.device) -> bool:
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward and module.max_norm is None and device.type == "cpu"


def _keep(module: nn.Module, keeper: Keeper) -> None:
    keeper.release(module)
    module.register_forward_pre_hook(keeper.before)
    module.register_forward_hook(keeper.after, always_call=True)
