"""Attention that no way of seeing has captured, so that a capture can say what it left out."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SOFTMAX = ("_softmax", "_safe_softmax")
FUSED_ATTENTION = (
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
"""Number of tensors made of a softmax that are remembered at a time."""
DEEP = 3
"""Largest number of modules from one of attention to its softmax, with it."""
NAMED = 4
"""Number of modules that a sentence names."""

NamedModule = tuple[nn.Module, str]


class AttentionFinder(TorchDispatchMode):
    """The modules that compute attention: a softmax, or torch's own attention.

    What happens in a context of `captured` is left out. Routers of experts and mixtures of residual
    streams have a softmax, too: a module counts if the name of its class says that it is attention.

    Attributes:
        found: modules by name.
        running: the modules that run, the innermost last, which whoever watches keeps up to date.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, nn.Module] = {}
        self.running: list[NamedModule] = []
        self._softmaxes: deque[tuple[Tensor, NamedModule]] = deque(maxlen=FOLLOWED)
        self._captured = False

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Yield while attention is computed that is captured."""
        self._captured = True
        try:
            yield
        finally:
            self._captured = False

    def seen(self, names: Collection[str]) -> None:
        """Take out modules whose attention was seen after all."""
        for name in names:
            self.found.pop(name, None)

    def names(self, captured: Collection[str]) -> str:
        """Return names and types of some of the modules found, but for captured ones."""
        found = [
            f"{name or 'the model itself'} ({type(module).__name__})"
            for name, module in self.found.items()
            if name not in captured
        ]
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        return ", ".join(found[:NAMED]) + more

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._captured and self.running:
            self._look(func._schema.name.rpartition("::")[2], args, out)
        return out

    def _look(self, operation: str, args: Sequence[Any], out: Any) -> None:
        if operation.startswith(FUSED_ATTENTION):
            self._add(self._owner() or self.running[-1])
        elif operation in PRODUCTS:
            for one in args[:3]:
                self._add(self._made_in(one))
        elif isinstance(out, Tensor) and operation in SOFTMAX and out.ndim > 2:
            if (owner := self._owner()) is not None:
                self._softmaxes.append((out, owner))
                self._add(owner)  # what it weighs may be added up in other ways (deformable)
        elif args and isinstance(args[0], Tensor):
            result = out[0] if isinstance(out, tuple) and out else out
            owner = self._made_in(args[0])  # dropout, casts and other forms of probabilities
            if owner and isinstance(result, Tensor) and result.numel() == args[0].numel():
                self._softmaxes.append((result, owner))

    def _owner(self) -> NamedModule | None:
        """Return the module of attention that runs, itself or by a part of it."""
        near = reversed(self.running[-DEEP:])
        return next((one for one in near if "att" in type(one[0]).__name__.lower()), None)

    def _made_in(self, tensor: object) -> NamedModule | None:
        """Return the module that made the softmax that a tensor is a form of."""
        if isinstance(tensor, Tensor):
            for one, owner in self._softmaxes:
                if one is tensor or (one.numel() == tensor.numel() and _same_memory(one, tensor)):
                    return owner
        return None

    def _add(self, owner: NamedModule | None) -> None:
        if owner is not None:
            self.found[owner[1]] = owner[0]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def left_out(model: nn.Module, watch: AttentionFinder, captured: Collection[str]) -> list[str]:
    """Return a sentence on the modules whose attention was not captured, where there are some.

    Args:
        model: whose forward pass was watched.
        watch: what watched it.
        captured: names of the modules that were captured.
    """
    count = len(set(watch.found) - set(captured))
    compute, are = (f"{count} modules compute", "are") if count > 1 else ("a module computes", "is")
    said = (
        f"{compute} attention of an unknown make, which cannot be captured: "
        f"{watch.names(captured)} of {type(model).__name__} {are} left out"
    )
    return [said] if count else []


def without_softmax(model: nn.Module, captured: Collection[str]) -> list[str]:
    """Return a sentence for each list of layers of which only some have softmax attention.

    Args:
        model: whose forward pass was watched.
        captured: names of the modules that compute attention.
    """
    said = []
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, module in lists.items():
        within = any(name.startswith(f"{outer}.") for outer in lists)  # parts of one layer
        if within or len(module) < 2:
            continue
        start = f"{name}."
        inside = {one[len(start) :].partition(".")[0] for one in captured if one.startswith(start)}
        count = len(inside & set(map(str, range(len(module)))))
        if 0 < count < len(module):
            have = "have" if count > 1 else "has"
            said.append(
                f"{count} of {len(module)} layers in {name} {have} softmax attention; the others "
                "mix tokens in another way, or not at all, and are left out"
            )
    return said
