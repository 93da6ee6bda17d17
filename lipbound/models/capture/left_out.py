"""Attention that a model computes without its attention interface, so that a capture can say what
it has not seen."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SOFTMAX = ("_softmax", "_safe_softmax")
FUSED = (
    "_scaled_dot_product",
    "scaled_dot_product",
    "_native_multi_head_attention",
    "_transformer_encoder_layer",
    "_fused_sdp",
    "_flash_attention",
    "_efficient_attention",
)
"""Beginnings of the names of torch's operations that are attention by themselves."""
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul")
FOLLOWED = 8
"""How many tensors that were made of a softmax are remembered at a time."""
DEEP = 3
"""How many modules may stand between one of attention and its softmax, with it."""
NAMED = 4
"""How many modules a sentence names."""


class AttentionFinder(TorchDispatchMode):
    """Record of the modules that compute attention by themselves: a softmax that is multiplied by a
    matrix, or torch's own attention.

    What happens in a context of `seen` is left out. Routers of experts and mixtures of residual
    streams have a softmax, too: a module counts if the name of its class says that it is attention.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, nn.Module] = {}
        self._stack: list[tuple[nn.Module, str]] = []
        self._softmaxes: deque[tuple[Tensor, tuple[nn.Module, str]]] = deque(maxlen=FOLLOWED)
        self._seen = False

    def enter(self, module: nn.Module, name: str) -> None:
        """A module begins to run."""
        self._stack.append((module, name))

    def leave(self) -> None:
        """The module that began last has run."""
        self._stack.pop()

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Context of attention that is captured."""
        self._seen = True
        try:
            yield
        finally:
            self._seen = False

    def names(self, captured: Collection[str]) -> str:
        """Names and types of some of the modules that were found, without those that
        were captured."""
        found = [
            f"{name or 'the model itself'} ({type(module).__name__})"
            for name, module in self.found.items()
            if name not in captured
        ]
        return ", ".join(found[:NAMED]) + (
            f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._seen and self._stack:
            self._look(func._schema.name.rpartition("::")[2], args, out)
        return out

    def _look(self, operation: str, args: Sequence[Any], out: Any) -> None:
        if operation.startswith(FUSED):
            self._add(self._owner() or self._stack[-1])
        elif operation in PRODUCTS:
            for one in args[:3]:
                if isinstance(one, Tensor) and (owner := self._made_in(one)) is not None:
                    self._add(owner)
        elif isinstance(out, Tensor) and operation in SOFTMAX and out.ndim > 2:
            if (owner := self._owner()) is not None:
                self._softmaxes.append((out, owner))
        elif (
            isinstance(result := out[0] if isinstance(out, tuple) and out else out, Tensor)
            and args
            and isinstance(args[0], Tensor)
        ):
            owner = self._made_in(args[0])  # dropout, casts and other forms of probabilities
            if owner is not None and result.numel() == args[0].numel():
                self._softmaxes.append((result, owner))

    def _owner(self) -> tuple[nn.Module, str] | None:
        """The module of attention that runs, itself or by a part of it."""
        return next(
            (
                one
                for one in reversed(self._stack[-DEEP:])
                if "att" in type(one[0]).__name__.lower()
            ),
            None,
        )

    def _made_in(self, tensor: Tensor) -> tuple[nn.Module, str] | None:
        return next(
            (
                owner
                for one, owner in self._softmaxes
                if one is tensor or (one.numel() == tensor.numel() and _same_memory(one, tensor))
            ),
            None,
        )

    def _add(self, owner: tuple[nn.Module, str]) -> None:
        self.found[owner[1]] = owner[0]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def left_out(model: nn.Module, watch: AttentionFinder, captured: Collection[str]) -> list[str]:
    """A sentence on the modules of which the attention was not seen, where there are some.

    Args:
        model: whose forward pass was watched.
        watch: what watched it.
        captured: names of the modules that were seen.
    """
    count = len(set(watch.found) - set(captured))
    if not count:
        return []
    several, are = (f"{count} modules compute", "are") if count > 1 else ("a module computes", "is")
    return [
        f"{several} attention without transformers' attention interface, which cannot be "
        f"captured: {watch.names(captured)} of {type(model).__name__} "
        f"{are} left out"
    ]
