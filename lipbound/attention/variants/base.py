"""Base classes of steps between projections and scores, and their derivatives token by token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

Side = Literal["q", "k", "v"]
"""Queries, keys or values."""
SIDES: tuple[Side, ...] = ("q", "k", "v")
UNIT = 2.0**-53
"""The unit of rounding of float64."""


class NamedAxes:
    """A dataclass of tensors that says which axes they have, for copies of some of their entries.

    Attributes:
        axes: for each field that holds tensors, the letters of their last axes: h for heads, s for
            samples, n for tokens, m for those of another stream, b for a batch of heads of samples,
            any other for axes that stay. An axis of heads or samples may have length 1 for all.
            Fields may be None, or tuples.
    """

    axes: ClassVar[dict[str, str]] = {}

    def _changed(self, change: Callable[[Tensor, str], Tensor]) -> Self:
        fields = {name: mapped(getattr(self, name), at, change) for name, at in self.axes.items()}
        if all(value is getattr(self, name) for name, value in fields.items()):
            return self
        return replace(self, **fields)  # type: ignore[type-var]

    def of_heads(self, heads: slice) -> Self:
        """Return that for some of the heads."""
        return self._changed(partial(cut, h=heads))

    def of_tokens(self, tokens: Tensor | slice) -> Self:
        """Return that for some of the tokens."""
        return self._changed(partial(cut, n=tokens))

    def select(self, index: Tensor | slice) -> Self:
        """Return that for some entries of the batch."""
        return self._changed(partial(cut, b=index))

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same in another dtype."""
        return self._changed(lambda t, _: t.to(dtype) if t.is_floating_point() else t)

    def double(self) -> Self:
        """Return the same in float64."""
        return self.to(torch.float64)


def mapped(value: Any, letters: str, change: Callable[[Tensor, str], Tensor]) -> Any:
    """Return what a field holds with changed tensors, whose last axes have these letters."""
    if isinstance(value, NamedAxes):
        return value._changed(change)
    if isinstance(value, tuple):
        return tuple(mapped(one, letters, change) for one in value)
    return change(value, letters) if isinstance(value, Tensor) else value


def cut(t: Tensor, letters: str, **index: Tensor | slice) -> Tensor:
    """Return some entries of the axes with these letters."""
    for axis, letter in enumerate(letters[-t.ndim :], max(0, t.ndim - len(letters))):
        if letter in index and (letter in "bmn" or t.shape[axis] > 1):
            t = t[(slice(None),) * axis + (index[letter],)]
    return t


def tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors that a field holds by name, as "norm_q.gain"."""
    if isinstance(value, Tensor):
        return {name: value}
    parts: dict[str, Any] = {}
    if isinstance(value, NamedAxes):
        parts = {f"{name}.{field}": getattr(value, field) for field in value.axes}
    elif isinstance(value, tuple):
        parts = {f"{name}.{i}": one for i, one in enumerate(value)}
    return {key: t for part, one in parts.items() for key, t in tensors(part, one).items()}


def for_each_sample(t: Tensor | None, samples: int, dtype: torch.dtype) -> Tensor | None:
    """Return matrices of heads (heads, ...) for a batch of the heads of all samples, in a dtype."""
    return None if t is None else t.to(dtype).expand(samples, *t.shape).flatten(0, 1)


class Passing(NamedTuple):
    """Upper values about a token's query, key or value on its way from its projection.

    In float64; each broadcasts to (samples, heads, N).

    Attributes:
        error: distance of the computed vector from that of exact arithmetic.
        slope: how much longer than a change of the token the change of the vector can be.
        slope_error: distance, in the same sense, of the computed derivative from that of exact
            arithmetic.
    """

    error: Tensor
    slope: Tensor
    slope_error: Tensor


class TokenStep(NamedAxes, ABC):
    """Derivative of one step: a linear map for each token of each entry of a batch of heads.

    Copies at some tokens keep ``direction``.
    """

    @property
    def direction(self) -> Tensor | None:
        r"""Direction (samples, N, D) of the extra coordinate :math:`\tau` of a change, or None."""
        return None

    @abstractmethod
    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        r"""Return perturbations (batch, N, d) as they go on.

        ``extra`` is :math:`\tau`, (batch, N, 1), where the step sees it.
        """

    @abstractmethod
    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""Return the transposed map of g (batch, N, d), and the cotangent of :math:`\tau`."""

    def turns(self) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines (N, r) of a step that turns coordinates i and i + r.

        None for steps that do anything else.
        """
        return None


@dataclass(frozen=True, eq=False)
class TokenMap:
    r"""The steps that follow the projection of queries, keys or values of a batch of heads.

    Attributes:
        steps: in the order in which they act.
        tokens: N.
        dtype, device: of the products.
    """

    steps: Sequence[TokenStep]
    tokens: int
    dtype: torch.dtype
    device: torch.device

    @property
    def direction(self) -> Tensor | None:
        r"""Direction of the extra coordinate :math:`\tau = direction \cdot dx`, or None.

        (samples, N, D), in the dtype of the products.
        """
        return next((step.direction for step in self.steps if step.direction is not None), None)

    @property
    def extra(self) -> int:
        """Number of coordinates that it sees besides the projected vector, 0 or 1."""
        return 0 if self.direction is None else 1

    def turns(self) -> tuple[Tensor, Tensor] | None:
        """Return those of its only step; None where there are others."""
        return self.steps[0].turns() if len(self.steps) == 1 else None

    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        r"""Return perturbations of the projected vectors (batch, N, d) as they arrive.

        ``extra`` is :math:`\tau`, (batch, N, 1), where there is one.
        """
        for step in self.steps:
            z = step.push(z, extra)
        return z

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""Return the transposed map of g (batch, N, d), and the cotangent of :math:`\tau`."""
        extra = None
        for step in reversed(self.steps):
            g, own = step.pull(g)
            extra = extra if own is None else own
        return g, extra

    def matrices(self, entry: int, tokens: slice | Tensor, d: int) -> Tensor | None:
        r"""Return the maps of some tokens of one entry of the batch, (n, d + extra, d).

        From rows :math:`(dy, \tau)` to rows of queries; None where every map is the identity.
        """
        if not self.steps:
            return None
        one = slice(entry, entry + 1)
        part = replace(self, steps=[step.select(one).of_tokens(tokens) for step in self.steps])
        n = len(range(self.tokens)[tokens]) if isinstance(tokens, slice) else len(tokens)
        eye = torch.eye(d + self.extra, dtype=self.dtype, device=self.device)
        eye = eye[:, None].expand(-1, n, -1)
        return part.push(eye[..., :d], eye[..., d:] if self.extra else None).transpose(0, 1)

    def select(self, index: Tensor | slice) -> "TokenMap":
        """Return some entries of the batch; ``direction``, which has samples instead, stays."""
        return replace(self, steps=[step.select(index) for step in self.steps])

    def to(self, dtype: torch.dtype) -> "TokenMap":
        """Return the same with products in another dtype."""
        return replace(self, steps=[step.to(dtype) for step in self.steps], dtype=dtype)
