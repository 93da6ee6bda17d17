"""What is derived from a layer, computed on first use and kept."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Cache:
    """Values by key, owned by one layer. What it holds never decides which path a computation takes, only whether a value is computed again."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value kept under ``key``; ``make()``, which is then kept, where there is none."""
        if key not in self._values:
            self._values[key] = make()
        value: T = self._values[key]
        return value

    def keep(self, key: Hashable, value: Any) -> None:
        """Use this value from now on."""
        self._values[key] = value

    def share(self, other: "Cache", *keys: Hashable) -> None:
        """Take over what another layer has computed under these keys."""
        self._values |= {key: other._values[key] for key in keys if key in other._values}

    def drop(self, *keys: Hashable) -> None:
        """Free what is kept under these keys; it is computed again when it is needed."""
        for key in keys:
            self._values.pop(key, None)


class derived(Generic[T]):
    """Decorator: a property that is computed on first use and kept in the ``cache`` of its object, under its own name."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "derived[T]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> "T | derived[T]":
        if instance is None:
            return self
        cache: Cache = instance.cache
        return cache.get(self._name, lambda: self._make(instance))

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(f"{self._name} is derived from the layer and cannot be set")
