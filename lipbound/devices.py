"""Devices, dtypes, memory, threads and packages to compute with."""

import importlib.metadata
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lipbound import errors, graphs
from lipbound.errors import LipboundError, P, T, knows_options, shown

DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""Dtypes that numbers are computed in, by name."""
WEIGHTS = ("auto", "whole", "layers")
"""Places of a model's weights, as `lipbound.models.loading.load_checkpoint` explains them."""


def resolve_device(device: str | torch.device) -> str:
    """Find a device of this machine.

    Args:
        device: by its name; "auto" is CUDA where there is one.

    Returns:
        Its name.

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
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, ValueError, ImportError, NotImplementedError) as error:
        what = f"device {shown(device)} cannot be used here; try 'cpu' or 'auto'"
        raise LipboundError(what) from error
    return device


def has_float64(device: str | torch.device) -> bool:
    """Return whether a device computes in float64, which Apple's GPUs do not."""
    kind = torch.device(device).type
    return kind in ("cpu", "cuda") or _computes_float64(kind)


@cache
def _computes_float64(device: str) -> bool:
    try:
        return bool(torch.ones(1, dtype=torch.float64, device=device).sum() == 1)
    except (TypeError, RuntimeError, NotImplementedError):
        return False


def measuring_device(device: torch.device) -> torch.device:
    """Return the device on which a model's layers are measured: its own, or one with float64."""
    return device if has_float64(device) else torch.device("cpu")


def dtype_name(dtype: object, error: type[LipboundError] = errors.UnknownNameError) -> str:
    """Check a dtype, however it is written: also torch.float64, np.float64.

    Args:
        dtype: what was given.
        error: the type that is raised for another dtype.

    Returns:
        "float32" or "float64".

    >>> dtype_name("float32"), dtype_name(torch.float64)
    ('float32', 'float64')
    """
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if name not in DTYPES:
        given = name if isinstance(dtype, torch.dtype | type) else shown(dtype)
        raise error(f"dtype is {given}; allowed are 'float32' and 'float64'")
    return name


def device_name(device: str) -> str:
    """Return a device as provenance names it, with the name of the GPU."""
    gpu = device.startswith("cuda")
    return f"{device} ({torch.cuda.get_device_name(device)})" if gpu else device


PACKAGES: tuple[str, ...] = ("lipbound", "torch", "transformers", "numpy", "scipy")
PACKAGES += ("xarray", "zarr", "tokenizers", "datasets")
"""Packages that the numbers of a run can depend on, or how they are stored."""


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of packages, by default of those that numbers can depend on."""
    return {name: _installed(name) for name in names}


@cache  # what was imported stays, whatever is installed later
def _installed(name: str) -> str:
    if name == "torch":
        return str(torch.__version__)  # with what it was built for
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "not installed"


LIMITS = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),)
"""Files with the limit and the use of memory of a container (cgroup v2)."""


def available(device: torch.device) -> float:
    """Return the bytes that the system estimates can be allocated without swapping.

    Of a GPU what torch has kept of freed tensors counts.
    """
    if device.type == "cuda":
        given = torch.cuda.mem_get_info(device)[0]  # which starts CUDA
        held = torch.cuda.memory_stats_as_nested_dict(device)  # others take four times as long
        reserved, used = (held[f"{kind}_bytes"]["all"] for kind in ("reserved", "allocated"))
        return float(given + reserved["current"] - used["current"])
    free = float(psutil.virtual_memory().available)
    for limit, use in LIMITS:
        if Path(limit).exists() and (most := Path(limit).read_text().strip()).isdigit():
            free = min(free, float(most) - float(Path(use).read_text()))
    return free


def require(needed: float, device: torch.device, what: str, instead: str) -> float:
    """Refuse work that needs more than nine tenths of the free memory, and return that, in bytes.

    Args:
        needed: in bytes.
        device: whose memory is meant.
        what: needs it, in words.
        instead: may do, in words.

    Raises:
        LipboundError: it is more than there is.
    """
    free = available(device)
    if needed > 0.9 * free:
        sizes = f"{needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of memory are free"
        raise LipboundError(f"{what}, about {sizes}; {instead}")
    return free


def in_own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function independent of the modes that its caller has set in torch.

    Products are in the dtype of their factors (no autocast), new tensors are on the CPU unless said
    otherwise (no default device), and results can take part in derivatives later on (no inference
    mode; derivatives are then not recorded, as there). A layer on a device without float64, in
    which norms and bounds are certified, is taken to the CPU first. Where a GPU has no memory left,
    what torch keeps of it is given back, and a `lipbound.errors.MemoryFullError` says so.

    Args:
        function: any.

    Returns:
        The function, which computes what it would by itself.
    """
    function = knows_options(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return undisturbed(function, *args, **kwargs)

    return run


def undisturbed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function returns, in its own modes: see `in_own_modes`."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        try:
            return function(*map(_certifiable, args), **kwargs)
        except torch.cuda.OutOfMemoryError as error:
            wanted = str(error).split(". ")[1:2]  # "Tried to allocate 2.00 GiB"
        graphs.forget()
        torch.cuda.empty_cache()  # once the traceback no longer holds tensors
        what = f"the GPU has no memory left for this ({', '.join(wanted) or 'out of memory'})"
        instead = "measure fewer samples or layers, shorter inputs, or on device='cpu'"
        raise errors.MemoryFullError(f"{what}; {instead}")


def _certifiable(value: Any) -> Any:
    """Return a `lipbound.Attention` (unknown here) where there is float64; else the value."""
    return value.to("cpu") if hasattr(value, "w_q") and not has_float64(value.device) else value


Routine = Generator[list[Tensor], list[Tensor], T]
"""Work that yields tensors whose numbers decide how it goes on, is sent them on the CPU, and at the
end returns a result. `together` has several of them wait for a device at the same time."""


def finished(routine: Routine[T]) -> T:
    """Run a routine; all that it asks for at a time comes in one read.

    >>> def double(x):
    ...     (known,) = yield [x]
    ...     return 2 * float(known)
    >>> finished(double(torch.tensor(3.0)))
    6.0
    """
    answer: list[Tensor] | None = None
    while True:
        try:
            asked = routine.send(answer)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            result: T = end.value
            return result
        answer = on_cpu(asked)


def together(*routines: Routine[T]) -> Routine[list[T]]:
    """Run routines side by side, as one that asks for what all of them ask for at a time."""
    found: dict[int, T] = {}
    answers: dict[int, list[Tensor] | None] = dict.fromkeys(range(len(routines)))
    while answers:
        asked: dict[int, list[Tensor]] = {}
        for i, answer in answers.items():
            try:
                asked[i] = routines[i].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                found[i] = end.value
        read = iter((yield [t for tensors in asked.values() for t in tensors]) if asked else [])
        answers = {i: [next(read) for _ in tensors] for i, tensors in asked.items()}
    return [found[i] for i in range(len(routines))]


def on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors, of numbers that float64 holds, on the CPU, in one read."""
    far = [t for t in tensors if t.device.type != "cpu"]
    if not far:
        return tensors
    whole = torch.cat([t.flatten().double() for t in far]).cpu()
    read = zip(far, whole.split([t.numel() for t in far]), strict=True)
    near = iter([part.view(t.shape).to(t.dtype) for t, part in read])
    return [t if t.device.type == "cpu" else next(near) for t in tensors]


class Room:
    """Memory for large temporaries, each of which ends the one before.

    Fresh pages cost as much as the arithmetic on them.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor of a shape, arbitrary entries, dtype and device of ``like``."""
        size, kept, kind = math.prod(shape), self._kept, (like.dtype, like.device)
        if kept is None or kept.numel() < size or (kept.dtype, kept.device) != kind:
            kept = self._kept = like.new_empty(size)
        return kept[:size].view(shape)


SERIAL = 2e10
"""Floating-point operations up to which a pass through a model is left to one thread: a fifth of a
second on a core, in hundreds of small products."""


@contextmanager
def threads_for(work: float) -> Iterator[None]:
    """Compute on one thread of torch where there is little work.

    torch's threads wait for each other after every product: on cores that other programs use, much
    longer than small products take.

    Args:
        work: floating-point operations.
    """
    threads = torch.get_num_threads()
    if threads == 1 or work > SERIAL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run each task in a thread of its own, and return what they return.

    torch's threads are shared out among them, and derivatives are recorded as they are here. Many
    products of small matrices gain next to nothing from torch's own threads, which wait for each
    other after every one of them.

    Args:
        tasks: functions without arguments.

    Returns:
        Their results, in order. An error of one task is raised once all have ended, an interruption
        at once.
    """
    if len(tasks) <= 1:
        return [task() for task in tasks]
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
