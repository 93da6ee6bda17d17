"""Work on a GPU that is launched as one CUDA graph, on buffers kept for its next call."""

import io
import pickle
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KEPT, SHARE = 8, 1 / 64
"""Graphs that a thread keeps, and share of a GPU's memory that their buffers take."""


class _Outline(pickle.Pickler):
    """The key of a graph: all about work and arguments but the numbers of the GPU's tensors.

    Attributes:
        key: work, arguments without these tensors, their layouts, and modes of torch.
        text: the arguments, pickled.
        tensors: those that are on a GPU, each once.
    """

    def __init__(self, work: Callable[..., object], args: tuple[Any, ...]):
        text, self._places, self.tensors = io.BytesIO(), dict[int, int](), list[Tensor]()
        super().__init__(text)
        self.dump(args)
        self.text = text.getvalue()
        laid_out = tuple((t.shape, t.stride(), t.dtype, t.device) for t in self.tensors)
        modes = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        self.key = work, self.text, laid_out, torch.backends.cuda.matmul.allow_tf32, *modes

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, Tensor) or not _on_gpu(value):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._places[id(value)]

    def filled(self, tensors: list[Tensor]) -> Any:
        """Return the arguments with other tensors."""
        loader = pickle.Unpickler(io.BytesIO(self.text))
        loader.persistent_load = lambda place: tensors[place]  # type: ignore[method-assign]
        return loader.load()


class _Reads(TorchDispatchMode):
    """Sees which memory is read that was there before: ``found``, by addresses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self._made = set[int](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found |= _places([*args, *(kwargs or {}).values()]) - self._made
        self._made |= _places([made])
        return made


def _places(values: Iterable[object]) -> set[int]:
    """Return the addresses of tensors that are among values, or in lists of these."""
    found = set[int]()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, list | tuple):
            found |= _places(value)
    return found


def _on_gpu(t: Tensor) -> bool:
    return t.device.type == "cuda"


@cache
def _memory(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)


@dataclass
class _Graph:
    """A graph, the arguments whose memory it works on, and those of their tensors that it reads."""

    launch: Callable[[], None]
    args: Any
    places: list[int]
    tensors: list[Tensor]

    @property
    def share(self) -> float:
        """Share of the GPU's memory that these take."""
        return sum(t.nbytes for t in self.tensors) / _memory(self.tensors[0].device)


class _Graphs(threading.local):
    """Graphs of a thread, the last used at the end.

    Of each device also a stream, the memory that its graphs share, of which one is in use at a
    time, and a first graph, with which that memory lives on.
    """

    def __init__(self) -> None:
        self.known: dict[Any, _Graph] = {}
        self.streams: dict[torch.device, tuple[torch.cuda.Stream, Any, torch.cuda.CUDAGraph]] = {}


_GRAPHS = _Graphs()


def forget() -> None:
    """Give the memory of this thread's graphs back."""
    _GRAPHS.known.clear()
    _GRAPHS.streams.clear()


def graphed(work: Callable[..., None], *args: Any) -> tuple[Callable[[], None], tuple[Any, ...]]:
    """Return work as one launch of a CUDA graph, and the arguments that it works on.

    These are copies on buffers that are kept: the graph of the last arguments that differed in
    nothing but the numbers of tensors is used again. It is good until the next call. Work that a
    graph cannot do, since it waits for the GPU or reads what is no part of its arguments, is
    returned as it is, with its arguments.

    Args:
        work: reads and changes tensors on a GPU; those that it changes share no memory.
        args: what it takes, with whatever it would keep for later calls.
    """
    try:
        outline = _Outline(work, args)
        kept = _GRAPHS.known.pop(outline.key, None)
        if kept is None:
            kept = _new(work, outline)
        else:
            torch._foreach_copy_(kept.tensors, [outline.tensors[i] for i in kept.places])
    except (RuntimeError, TypeError, AttributeError, pickle.PicklingError):
        return partial(work, *args), args
    known = _GRAPHS.known
    known[outline.key] = kept
    while len(known) > KEPT or sum(one.share for one in known.values()) > SHARE:
        del known[next(iter(known))]
    return kept.launch, kept.args


def _new(work: Callable[..., None], outline: _Outline) -> _Graph:
    """Capture a graph.

    Raises:
        RuntimeError: a graph cannot do this work.
    """
    buffers = [t.clone() for t in outline.tensors]
    args = outline.filled(buffers)
    with _Reads() as reads:
        work(*args)
    if _Outline(work, args).text != outline.text or not reads.found <= _places(buffers):
        raise RuntimeError("the work reads or keeps what is no part of its arguments")
    places = [i for i, t in enumerate(buffers) if _places([t]) <= reads.found]
    args = outline.filled([t if i in places else t.to("meta") for i, t in enumerate(buffers)])
    kept = _Graph(lambda: None, args, places, [buffers[i] for i in places])
    torch._foreach_copy_(kept.tensors, [outline.tensors[i] for i in places])
    kept.launch = _captured(partial(work, *args), kept.tensors[0].device)
    return kept


def _captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return work that has been done before as the launch of a graph."""
    if device not in _GRAPHS.streams:
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for dtype in (torch.float32, torch.float64):  # libraries' own memory, which they keep
                torch.bmm(*torch.ones(2, 2, 2, 2, dtype=dtype, device=device))
        first = _capture(stream, pool, lambda: torch.zeros(1, device=device).add_(1))
        _GRAPHS.streams[device] = stream, pool, first
    stream, pool, _ = _GRAPHS.streams[device]
    return _capture(stream, pool, work).replay


def _capture(stream: torch.cuda.Stream, pool: Any, work: Callable[[], object]) -> Any:
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph gives all memory that is free back to the system first
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return graph
