"""Dataclasses of tensors whose axes are named, and others like them at some heads or samples."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

from torch import Tensor

Change = Callable[[Tensor, str], Tensor]
"""From a tensor and the letters of its axes, the tensor in its place."""


class NamedAxes:
    """A dataclass that says which axes its tensors have.

    Attributes:
        axes: for each field that holds tensors, the letters of their axes: h for heads, s for
            samples, n for tokens, any other for axes that stay. An axis of heads or samples may
            have length 1 for all. Fields may be None, tuples, or of such a class themselves.
    """

    axes: ClassVar[dict[str, str]] = {}

    def _changed(self, change: Change) -> Self:
        fields = {name: _applied(getattr(self, name), at, change) for name, at in self.axes.items()}
        return replace(self, **fields) if fields else self  # type: ignore[type-var]

    def inputs(self) -> list[Tensor]:
        """Return all tensors that it is made of."""
        return [t for name in self.axes for t in _tensors(getattr(self, name))]

    def of_heads(self, heads: slice) -> Self:
        """Return that for some of the heads."""
        return self._changed(partial(_cut, "h", heads))

    def of_samples(self, samples: slice) -> Self:
        """Return that for some of the samples."""
        return self._changed(partial(_cut, "s", samples))

    def of_tokens(self, keep: Tensor | slice) -> Self:
        """Return that for some of the tokens."""
        return self._changed(partial(_cut, "n", keep))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same with changed tensors; those of bool stay bool."""
        return self._changed(lambda t, at: change(t) if t.is_floating_point() else change(t).bool())


def _applied(value: Any, letters: str, change: Change) -> Any:
    if isinstance(value, NamedAxes):
        return value._changed(change)
    if isinstance(value, tuple):
        return tuple(_applied(one, letters, change) for one in value)
    return change(value, letters) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, NamedAxes):
        return value.inputs()
    if isinstance(value, tuple):
        return [t for one in value for t in _tensors(one)]
    return [value] if isinstance(value, Tensor) else []


def _cut(letter: str, index: Tensor | slice, t: Tensor, letters: str) -> Tensor:
    for axis, one in enumerate(letters):
        if one == letter and (letter == "n" or t.shape[axis] > 1):
            t = t[(slice(None),) * axis + (index,)]
    return t
