"""Where to compute, with what memory, on how many threads."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
from torch import Tensor

from lipbound.errors import CheckpointError, LipboundError, UnknownNameError, shown

T = TypeVar("T")
P = ParamSpec("P")

DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""What is computed in."""


WEIGHTS = ("auto", "whole", "layers")
"""Where the weights of a model may be: see `lipbound.models.checkpoints.load_checkpoint`."""


def check_weights(weights: object) -> str:
    """One of `WEIGHTS`; raises CheckpointError for anything else."""
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise CheckpointError(
            f"weights is {shown(weights)}; allowed are 'auto', 'whole' (all in memory) and "
            "'layers' (on disk, read layer by layer)"
        )
    return weights


def resolve_device(device: str | torch.device) -> str:
    """A device of this machine by its name; "auto" is CUDA where there is one.

    Raises:
        LipboundError: no such device, or one that holds no numbers ("meta").
    """
    if isinstance(device, torch.device):
        device = str(device)
    if not isinstance(device, str) or not device:
        raise LipboundError(f"device is {shown(device)}; give 'cpu', 'cuda', 'cuda:1' or 'auto'")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if float(torch.ones(1, device=device)) != 1:
            raise RuntimeError("it does not compute")
    except (RuntimeError, AssertionError, ValueError, ImportError, NotImplementedError) as error:
        raise LipboundError(
            f"device {shown(device)} cannot be used here; try 'cpu' or 'auto'"
        ) from error
    return device


def has_float64(device: str | torch.device) -> bool:
    """Tell whether a device computes in float64, which Apple's GPUs do not."""
    if torch.device(device).type in ("cpu", "cuda"):
        return True
    try:
        return bool(torch.ones(1, dtype=torch.float64, device=device).sum() == 1)
    except (TypeError, RuntimeError, NotImplementedError):
        return False


def measuring_device(device: torch.device) -> torch.device:
    """The device on which the layers of a model are measured: its own, or the CPU where that has no
    float64."""
    return device if has_float64(device) else torch.device("cpu")


def dtype_name(dtype: object, error: type[LipboundError] = UnknownNameError) -> str:
    """ "float32" or "float64", however it is written: also torch.float64, np.float64.

    Raises:
        LipboundError: another dtype; ``error`` is the type to raise.

    >>> dtype_name("float32"), dtype_name(torch.float64)
    ('float32', 'float64')
    """
    written = (
        getattr(dtype, "__name__", None)
        if isinstance(dtype, type)
        else str(dtype)
        if isinstance(dtype, str | torch.dtype)
        else None
    )
    name = (
        getattr(dtype, "name", None) if written is None and hasattr(dtype, "itemsize") else written
    )
    name = name.removeprefix("torch.") if isinstance(name, str) else None
    if name not in DTYPES:
        raise error(
            f"dtype is {shown(dtype)}; allowed are 'float32' and 'float64' (half-precision "
            "checkpoints are cast up)"
        )
    return name


def device_name(device: str) -> str:
    """A device as provenance names it."""
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device
    )


LIMITS = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),)
"""Where a container's limit and use are found (cgroup v2)."""


def available(device: torch.device) -> float:
    """Bytes that can be allocated on a device without swapping, as the system estimates it."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = float(psutil.virtual_memory().available)
    for limit, use in LIMITS:
        if Path(limit).exists() and (most := Path(limit).read_text().strip()).isdigit():
            free = min(free, float(most) - float(Path(use).read_text()))
    return free


def require(needed: float, device: torch.device, what: str, instead: str) -> None:
    """Raise LipboundError when ``needed`` bytes are more than nine tenths of what is free: ``what``
    needs them, and ``instead`` may do."""
    free = available(device)
    if needed > 0.9 * free:
        raise LipboundError(
            f"{what}, about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of memory are free; "
            f"{instead}"
        )


def in_own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: the function computes what it would by itself, whatever the caller lets torch
    choose.

    Products are in the dtype of their factors (no autocast), new tensors are on the CPU unless said
    otherwise (no default device), and results can take part in derivatives later on (no inference
    mode; derivatives are then not recorded, as there). A layer on a device without float64, in
    which norms and bounds are certified, is taken to the CPU first.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            return function(*map(_certifiable, args), **kwargs)

    return run


def _certifiable(value: Any) -> Any:
    """A layer (a `lipbound.Attention`, which this module does not know) where there is float64;
    anything else as it is."""
    if hasattr(value, "w_q") and not has_float64(value.device):
        return value.to("cpu")
    return value


class Room:
    """Memory for one large temporary after the other, each of which ends the one before: fresh
    pages cost as much as the arithmetic on them."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None
        self._views: dict[tuple[int, ...], Tensor] = {}

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """A tensor of this shape with arbitrary entries, in the dtype and on the device of
        ``like``."""
        view, size, kept = self._views.get(shape), math.prod(shape), self._kept
        if (
            kept is None
            or kept.numel() < size
            or kept.dtype != like.dtype
            or kept.device != like.device
        ):
            self._kept, self._views, view = like.new_empty(size), {}, None
        if view is None:
            assert self._kept is not None
            view = self._views[shape] = self._kept[:size].view(shape)
        return view


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return, each run in a thread of its own, among which torch's threads are
    shared out; derivatives are recorded as they are here.

    Many products of small matrices gain next to nothing from torch's own threads, which wait for
    each other after every one of them. An error of one task is raised once all have ended, an
    interruption at once.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    threads, recording = torch.get_num_threads(), torch.is_grad_enabled()

    def run(task: Callable[[], T]) -> T:
        torch.set_num_threads(max(1, threads // len(tasks)))
        with torch.set_grad_enabled(recording):
            return task()

    pool = ThreadPoolExecutor(len(tasks))
    try:
        return list(pool.map(run, tasks))
    except Exception:
        pool.shutdown()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        torch.set_num_threads(threads)  # for threads that start from now on
