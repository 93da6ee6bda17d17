"""Modules whose parameters stay on disk and are in memory only while a forward pass runs through
them.

On disk, a parameter is a tensor on the meta device with the right shape and dtype; hooks put what
the file says in its place before the module runs, and the meta tensor back afterwards. accelerate's
offloading does as much for plain forward passes, but casts the whole table of embeddings up for
every look-up of tokens (1 GB of float32 for 128k tokens of width 2048), and its modules cannot be
copied without their hooks.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.models.weight_files import TensorRef


@dataclass
class WeightOffloader:
    """Fetches the parameters of one module when they are needed first and drops them after their
    last use.

    Attributes:
        away: the parameters as they are when not in memory, on the meta device.
        stored: where each of them is on disk.
        device: where they are brought.
        users: how many forward passes and `resident` contexts hold the parameters.
        table: whether what is in memory is the file's own table of embeddings, in the dtype of the
            file.
    """

    away: dict[str, nn.Parameter]
    stored: dict[str, TensorRef]
    device: torch.device
    users: int = 0
    table: bool = False

    def hold(self, module: nn.Module, table: bool = False) -> None:
        """Parameters into memory, unless they are there, in the dtype that was asked for; with
        ``table`` as the file has them."""
        self.users += 1
        if self.users == 1 or (self.table and not table):
            for name, stored in self.stored.items():
                value = stored.read() if table else self._value(name, stored)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
            self.table = table

    def _value(self, name: str, stored: TensorRef) -> Tensor:
        """A parameter as the model computes with it."""
        if stored.change is None:
            return _cast(stored.read().to(self.device), self.away[name].dtype)
        return stored.changed(_cast(stored.read(), self.away[name].dtype)).to(self.device)

    def release(self, module: nn.Module) -> None:
        """Parameters out of memory, if nobody else holds them."""
        self.users = max(self.users - 1, 0)
        if not self.users:
            for name, parameter in self.away.items():
                setattr(module, name, parameter)
            self.table = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before a forward pass."""
        plain = all(stored.change is None for stored in self.stored.values())
        self.hold(module, table=plain and self.device.type == "cpu" and _looks_up(module))
        for part, keeper in _read_by(module):
            keeper.hold(part)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook after a forward pass, also after one that failed."""
        rows = (
            _cast(output, self.away["weight"].dtype)
            if self.table and isinstance(output, Tensor)
            else None
        )
        for part, keeper in _read_by(module):
            keeper.release(part)
        self.release(module)
        return rows


def keep(module: nn.Module, keeper: WeightOffloader) -> None:
    """Leave a module's own parameters to a keeper from now on."""
    keeper.release(module)
    module.register_forward_pre_hook(keeper.before)
    module.register_forward_hook(keeper.after, always_call=True)


def _keeper(module: nn.Module) -> WeightOffloader | None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, WeightOffloader)), None)


def _kept(module: nn.Module) -> list[tuple[nn.Module, WeightOffloader]]:
    return [(part, keeper) for part in module.modules() if (keeper := _keeper(part)) is not None]


def by_layer(module: nn.Module) -> bool:
    """Whether any of a module's parameters stay on disk."""
    return bool(_kept(module))


def change(model: nn.Module, name: str, made: Callable[[Tensor], Tensor]) -> bool:
    """Have a parameter changed wherever it is read from disk; False where it does not
    stay there."""
    path, _, last = name.rpartition(".")
    keeper = _keeper(model.get_submodule(path))
    if keeper is None or last not in keeper.stored:
        return False
    keeper.stored[last] = replace(keeper.stored[last], change=made)
    return True


def on_disk(model: nn.Module) -> dict[str, TensorRef]:
    """Where the parameters that stay on disk are, by their names in the model."""
    parts = {part: prefix for prefix, part in model.named_modules()}
    return {
        f"{parts[part]}.{name}".lstrip("."): where
        for part, keeper in _kept(model)
        for name, where in keeper.stored.items()
    }


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Context in which all parameters of a module and its submodules are in memory, in the dtype
    that was asked for; any module will do.

    Raises:
        CheckpointError: a file is gone, has changed or cannot be read.
    """
    held: list[tuple[nn.Module, WeightOffloader]] = []
    try:
        for part, keeper in _kept(module):
            held.append((part, keeper))
            keeper.hold(part)
        yield
    finally:
        for part, keeper in held:
            keeper.release(part)


def plain_copy(module: nn.Module) -> nn.Module:
    """A deep copy with its weights in memory and no tie to a disk; of an ordinary module just a
    deep copy.

    Raises:
        CheckpointError: a file is gone, has changed or cannot be read.
    """
    with resident(module):
        copied = copy.deepcopy(module)
    for part in copied.modules():
        hooks = (part._forward_pre_hooks, part._forward_hooks)
        for mine in [
            key
            for table in hooks
            for key, hook in table.items()
            if isinstance(getattr(hook, "__self__", None), WeightOffloader)
        ]:
            for table in (*hooks, part._forward_hooks_always_called):
                table.pop(mine, None)
    return copied


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.float32).to(dtype)  # by way of float32, as a model loaded whole is


def _looks_up(module: nn.Module) -> bool:
    """Whether a forward pass does nothing but take rows of a table, so that only these need be read
    and cast."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
    )


def _read_by(module: nn.Module) -> list[tuple[nn.Module, WeightOffloader]]:
    """Submodules whose parameters a module reads without calling them."""
    return (
        [pair for child in module.children() for pair in _kept(child)]
        if isinstance(module, nn.MultiheadAttention)
        else []
    )
