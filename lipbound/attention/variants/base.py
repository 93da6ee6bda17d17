"""The protocol of a variant of attention."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from lipbound.attention.variants.named_axes import NamedAxes
from lipbound.attention.variants.token_maps import TokenStep

Side = Literal["q", "k", "v"]
"""Queries, keys or values."""
SIDES: tuple[Side, ...] = ("q", "k", "v")
UNIT = 2.0**-53
"""The unit of rounding of float64."""
REGISTERED: list[type["Variant"]] = []
"""Every variant there is, in the order in which their modules were imported."""


class Shapes(NamedTuple):
    """Shapes of the layer that a variant is part of.

    x (samples, N, D), w_q (heads, D, d), w_v (heads, D, d_v).
    """

    x: tuple[int, ...]
    w_q: tuple[int, ...]
    w_v: tuple[int, ...]


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


class Variant(NamedAxes):
    """One step between the projections of a layer and its output.

    Each method does nothing unless a variant says otherwise; copies are made by what `axes` says.

    Attributes:
        name: what runs and bounds call it.
        title: what sentences call it.
        stage: variants act in the order of their stages: on projected vectors (0, 1), on scores
            (2), in the softmax (3).
        place: where it stands in lists.
        shift_invariant: whether a vector added to all keys still changes nothing. Keys are then
            centred before use.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    stage: ClassVar[int]
    place: ClassVar[int]
    shift_invariant: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        REGISTERED.append(cls)

    @property
    def order(self) -> float:
        """Place among the steps: variants of one stage may act one after the other."""
        return self.stage

    @property
    def parts(self) -> list[str]:
        """Arguments of `Attention` that give it, for ``repr``."""
        return [self.name]

    def tensors(self) -> dict[str, Tensor]:
        """Return those that must be finite and of the layer's dtype, by names that errors use."""
        return {}

    def check(self, shapes: Shapes) -> None:
        """Raise AttentionError where it does not fit a layer of these shapes."""

    # -- queries, keys and values ------------------------------------------------------------------

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """Return projected queries, keys or values as they go on.

        Args:
            side: "q", "k" or "v".
            x: inputs, (samples, N, D).
            y: projected vectors, (samples, heads, N, d or d_v), float64.
            valid: tokens that are not padding, (samples, N) bool, or None.
        """
        return y

    def acts_on(self, side: Side) -> bool:
        """Return whether `enter` may change vectors of this side."""
        return type(self).enter is not Variant.enter

    def step(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> TokenStep | None:
        """Return the derivative of `enter` with respect to y(), token by token.

        With products in ``dtype``; None where it leaves vectors as they are.
        """
        return None

    def rounded(self, side: Side, x: Tensor, y: Tensor, before: Passing) -> Passing:
        """Return what `enter` and the derivative in `step` make of ``before``.

        Their own float64 rounding is included; x and y as for `enter`, y computed. Infinite where a
        variant has an `enter` and does not say.
        """
        silent = self.acts_on(side)
        return before._replace(error=before.error + math.inf) if silent else before

    def spans(self) -> list[Tensor]:
        """Return projections (D, n) besides the head's own through which inputs are felt."""
        return []

    def linear(self) -> dict[str, Tensor]:
        """Return the tensors that values are linear in where it makes them, (heads, ...) each."""
        return {}

    def with_linear(self, tensors: dict[str, Tensor]) -> Self:
        """Return the same with other tensors of `linear`."""
        return self

    def followed_by(self, m: Tensor) -> Self:
        """Return the same with values that it makes multiplied by matrices (heads, d_v, d_v)."""
        return self

    # -- scores ------------------------------------------------------------------------------------

    def scores(self, z: Tensor) -> Tensor:
        """Return scores z before the mask as they go on, every entry alike, wherever it stands."""
        return z

    def slopes(self, z: Tensor) -> Tensor | None:
        """Return the derivative of `scores` entry by entry, shaped like z; None where it is one."""
        return None

    def rounded_scores(self, error: Tensor, reach: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return upper values of the error of `scores`, and of the relative error of `slopes`.

        Float64 rounding is included. Infinite where a variant has `scores` and does not say.

        Args:
            error: how far the arguments are off, at most.
            reach: how large they are, at most.
        """
        return (error + math.inf if type(self).scores is not Variant.scores else error), 0.0

    @property
    def sloped(self) -> bool:
        """True if `slopes` may be other than one."""
        return type(self).slopes is not Variant.slopes

    # -- copies ------------------------------------------------------------------------------------

    def without_biases(self) -> Self:
        """Return that for projections without biases."""
        return self

    def of_scaled_inputs(self, exponent: int) -> Self:
        """Return that for inputs times 2 to the exponent.

        Projections of queries and keys make up for it: the same map of what is projected.
        """
        return self
