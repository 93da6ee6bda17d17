"""A device beside the CPU, of the CPU's own numbers: its tensors refuse what those on a GPU refuse,
above all to meet others in one operation.

Registering it changes the process it is in, so that tests use it in one of their own. A GPU takes
its place where the environment variable LIPBOUND_TESTS_DEVICE names one.
"""

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

NAME = os.environ.get("LIPBOUND_TESTS_DEVICE", "far")
REAL = NAME != "far"
LISTS = (list, tuple)
MOVING = {"copy_", "_to_copy", "_copy_from"}
"""Operations that lead from one device to another."""
PHYSICAL = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""Views that only say that entries are to be conjugated or negated, which operations inside of
others do not see."""
LACKING: list[str] = []
"""What the device does not have, of what others have."""
COUNTED = {"operations": 0, "reads": 0, "bytes": 0, "most": 0}
"""How many operations and reads to the host there have been, bytes that tensors hold, and the most
that they have held. Views and memory without numbers, for which a GPU does nothing, are left out of
the operations."""
HOLDERS: Counter[int] = Counter()
"""How many tensors there are of each memory, by its address."""
DECOMPOSED = set[str]()
"""Decompositions of several matrices at a time, over which a GPU takes far longer than the host."""
LAUNCHES_NOTHING = {"_unsafe_view", "empty", "new_empty", "empty_like", "empty_strided"}
BY_PLACE = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations whose indices may be on the CPU."""


class Held:
    """The memory of a tensor, which is counted as long as some tensor has it."""

    counted, holders = COUNTED, HOLDERS

    def __init__(self, near: Tensor):
        memory = near.untyped_storage()
        self._place, self._size = memory.data_ptr(), memory.nbytes()
        HOLDERS[self._place] += 1
        COUNTED["bytes"] += self._size * (HOLDERS[self._place] == 1)
        COUNTED["most"] = max(COUNTED["most"], COUNTED["bytes"])

    def __del__(self) -> None:
        self.holders[self._place] -= 1
        self.counted["bytes"] -= self._size * (self.holders[self._place] == 0)


class Far(torch.Tensor):
    """A tensor on the other device; its numbers are those of ``near``, on the CPU."""

    near: Tensor
    held: Held

    @staticmethod
    def __new__(cls, near: Tensor) -> "Far":
        if near.dtype == torch.float64 and LACKING:
            raise TypeError(
                f"Cannot convert a tensor to float64 dtype as the device {NAME} doesn't support "
                "float64"
            )
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            layout=near.layout,
            device=f"{NAME}:0",
        )
        made.near = near
        made.held = Held(near)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Far({self.near})"

    def tolist(self) -> Any:
        """Numbers, as of any tensor."""
        COUNTED["reads"] += 1
        return self.near.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refused, as on a GPU."""
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    __array__ = numpy

    def __getitem__(self, index: Any) -> Tensor:
        # which torch makes tensors of, on the device
        lists = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(
            tuple(torch.tensor(i) if isinstance(i, list) else i for i in lists)
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, launches = _about(func)
        _count(name, launches, args, kwargs)
        far = _result_is_far(name, args, kwargs)
        if kwargs.get("device") is not None:
            far, kwargs["device"] = torch.device(kwargs["device"]).type == NAME, torch.device("cpu")
        if far and kwargs.get("generator") is not None:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
        known: dict[int, Far] = {}

        def near(t: Any) -> Any:
            if not isinstance(t, Far):
                return t
            known[id(t.near)] = t
            return t.near

        def wrapped(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            return known[id(t)] if id(t) in known else Far(t) if far else t

        func = PHYSICAL.get(func, func)
        found = _mapped(wrapped, func(*_mapped(near, args), **_mapped(near, kwargs)))
        if torch.Tag.inplace_view in func.tags:  # the tensor itself has another shape from now on
            with no_dispatch():
                func(*args, **kwargs)
        return found


def _mapped(f: Callable[[Any], Any], given: Any) -> Any:
    """What a function makes of all that is in lists, tuples and dictionaries."""
    if isinstance(given, dict):
        return {name: _mapped(f, part) for name, part in given.items()}
    return type(given)([_mapped(f, t) for t in given]) if isinstance(given, LISTS) else f(given)


def _tensors(*given: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(lambda t: found.append(t) if isinstance(t, Tensor) else None, given)
    return found


@cache
def _about(func: Any) -> tuple[str, bool]:
    """Name of an operation, and whether a GPU does something for it."""
    name, ends = func.overloadpacket.__name__, [r.alias_info for r in func._schema.returns]
    view = any(one is not None and not one.is_write for one in ends)
    return name, not view and name not in LAUNCHES_NOTHING


def _count(name: str, launches: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    device = kwargs.get("device")
    home = device is not None and torch.device(device).type == "cpu"
    chosen = name in BY_PLACE and any(t.dtype == torch.bool for t in _tensors(args[1]))
    reads = name in ("_local_scalar_dense", "nonzero") or (name == "_to_copy" and home)
    COUNTED["reads"] += reads or chosen  # places of a mask are counted first
    COUNTED["operations"] += launches
    if name.endswith(("linalg_eig", "linalg_eigh", "linalg_svd", "linalg_qr")) and args[0].ndim > 2:
        DECOMPOSED.add(name)


def _result_is_far(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Where the result of an operation is; raises RuntimeError for tensors that do not
    go together."""
    tensors = _tensors(args, kwargs)
    far = [t for t in tensors if isinstance(t, Far)]
    beside = [t for t in tensors if not isinstance(t, Far) and t.ndim]
    if name == "copy_":
        return isinstance(args[0], Far)
    if name in BY_PLACE:
        values = [t for t in args[2:] if isinstance(t, Tensor) and t.ndim]
        if not isinstance(args[0], Far) or not all(isinstance(t, Far) for t in values):
            raise RuntimeError(
                f"{name}: indices should be either on cpu or on the same device as the indexed "
                "tensor (cpu), values on its device"
            )
    elif far and beside and name not in MOVING:
        shapes = [(type(t).__name__, tuple(t.shape)) for t in tensors]
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, but found at least two "
            f"devices, {NAME}:0 and cpu: {shapes}"
        )
    return bool(far)


def _made(like: str) -> Callable[..., Tensor]:
    """A function that makes tensors, for this device, of torch's own for the CPU."""
    make = getattr(torch, like)
    return lambda *args, dtype=None, device=None, pin_memory=None, layout=None, memory_format=None: (  # noqa: E501
        Far(make(*args, dtype=dtype))
    )


OPERATIONS = "empty.memory_format empty_strided eye eye.m arange arange.start arange.start_step"
FACTORIES = {name: name.partition(".")[0] for name in OPERATIONS.split()}
FACTORIES |= {"_efficientzerotensor": "zeros", "linspace": "linspace"}
FACTORIES |= {"triu_indices": "triu_indices"}


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    (target.near if isinstance(target, Far) else target).copy_(
        source.near if isinstance(source, Far) else source
    )
    return target


LIBRARY: list[Any] = []


def register() -> None:
    """Make the device known to torch, in this process, for good."""
    torch.set_num_threads(int(os.environ["LIPBOUND_TESTS_THREADS"]))
    if REAL:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    for name, like in FACTORIES.items():
        library.impl(name, _made(like), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    LIBRARY.append(library)
    # or a module's dtype would change in name only
    torch.__future__.set_swap_module_params_on_conversion(True)


def register_without_float64() -> None:
    """Make the device known as one that knows no float64, as Apple's GPUs are."""
    register()
    LACKING.append("float64")
