"""Cache of what is derived from a layer: computed on first use, and kept."""

from collections.abc import Callable, Hashable
from functools import wraps
from inspect import unwrap
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from lipbound.devices import Routine, finished, together, undisturbed
from lipbound.errors import T

F = TypeVar("F", bound=Callable[..., Any])
_ITSELF = object()


class Cache:
    """Values by key, owned by one layer.

    What it holds never decides which path a computation takes, only whether a value is computed
    again.

    Args:
        differentiable: whether derivatives may be wanted of what it holds. Values computed without
            them then do not serve where they are on.
    """

    def __init__(self, *, differentiable: bool = False) -> None:
        self._values: dict[tuple[Hashable, bool], Any] = {}
        self._differentiable = differentiable

    @property
    def recording(self) -> bool:
        """True if derivatives of what is computed now may be wanted."""
        return self._differentiable and torch.is_grad_enabled()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value kept under ``key``, or else ``make()``, which is then kept."""
        place = key, self.recording
        if place not in self._values:
            self._values[place] = undisturbed(make)  # kept for callers in other modes
        return self._values[place]

    def has(self, key: Hashable) -> bool:
        """Return whether a value is kept under ``key``."""
        return (key, self.recording) in self._values

    def keep(self, key: Hashable, value: Any) -> None:
        """Use this value from now on."""
        self._values[key, self.recording] = value

    def share(
        self, other: "Cache", *keys: Hashable, change: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Take over what another layer has computed under these keys, each value changed.

        That layer is one of the same tensors, or of more of them.
        """
        known = other._values.items()
        self._values |= {place: change(value) for place, value in known if place[0] in keys}

    def clear(self) -> None:
        """Free all that is kept."""
        self._values.clear()

    def drop(self, *keys: Hashable) -> None:
        """Free what is kept under these keys; it is computed again when it is needed."""
        known = self._values.items()
        self._values = {place: value for place, value in known if place[0] not in keys}


if TYPE_CHECKING:
    derived = property
else:

    def derived(make):
        """Decorator of a property that the ``cache`` of its object keeps, under its own name."""
        return property(
            lambda layer: layer.cache.get(make.__name__, lambda: make(layer)), doc=make.__doc__
        )


def memoised(function: F) -> F:
    """Return a function of a layer whose results the layer's cache keeps.

    A result that is the layer is not kept as such: a layer that holds itself would be freed by the
    garbage collector only, which does not know of the memory of a GPU.

    Args:
        function: takes the layer and hashable arguments by position, which the result is kept for.
    """

    @wraps(function)
    def kept(layer: Any, *arguments: Hashable) -> Any:
        def make() -> Any:
            found = function(layer, *arguments)
            return _ITSELF if found is layer else found

        found = layer.cache.get(_key(function, *arguments), make)
        return layer if found is _ITSELF else found

    return cast(F, kept)


def memoised_routine(routine: Callable[[Any], Routine[T]]) -> Callable[[Any], T]:
    """Return a `memoised` function of a layer that runs a routine."""
    return memoised(wraps(routine)(lambda layer: finished(routine(layer))))


def found_together(layer: Any, *functions: Callable[[Any], Any]) -> None:
    """Have results of `memoised_routine` for a layer, waiting for its device together."""
    missing = [f for f in functions if not layer.cache.has(_key(f))]
    values = undisturbed(finished, together(*(unwrap(f)(layer) for f in missing)))
    for f, value in zip(missing, values, strict=True):
        keep_result(f, layer, value)


def keep_result(function: Callable[[Any], T], layer: Any, value: T) -> None:
    """Let a `memoised` function return this value for a layer from now on."""
    layer.cache.keep(_key(function), value)


def _key(function: Callable[..., Any], *arguments: Hashable) -> Hashable:
    return function.__module__, function.__qualname__, *arguments
