"""What a variant of attention is."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from lipbound.attention.variants.token_maps import TokenStep

Side = Literal["q", "k"]
UNIT = 2.0**-53
"""The unit of rounding of float64."""
REGISTERED: list[type["Variant"]] = []
"""Every variant there is, in the order in which their modules were imported."""


class Shapes(NamedTuple):
    """Of the layer that a variant is part of: x is (samples, N, D), w_q (heads, D, d)."""

    x: tuple[int, ...]
    w_q: tuple[int, ...]


class Passing(NamedTuple):
    """Upper values about a token's query or key on its way from projection to scores, in float64;
    each broadcasts to (samples, heads, N).

    Attributes:
        error: distance of the computed vector from that of exact arithmetic.
        slope: how much longer than a change of the token the change of the vector can be.
        slope_error: distance, in the same sense, of the computed derivative from that of exact
            arithmetic.
    """

    error: Tensor
    slope: Tensor
    slope_error: Tensor


class Variant:
    """One thing that happens between the projections of a layer and its output. Each method does
    nothing unless a variant says otherwise.

    Attributes:
        name: what runs and bounds call it.
        title: what sentences call it.
        stage: variants act in the order of their stages: on queries and keys (0, 1), on scores (2),
            in the softmax (3).
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
    def parts(self) -> list[str]:
        """The arguments of `Attention` that give it, for ``repr``."""
        return [self.name]

    def tensors(self) -> dict[str, Tensor]:
        """Those that must have the dtype of the layer and be finite, by the names that errors call
        them."""
        return {}

    def inputs(self) -> list[Tensor]:
        """All tensors that it is made of."""
        return list(self.tensors().values())

    def check(self, shapes: Shapes) -> None:
        """Raise AttentionError where it does not fit a layer."""

    # -- queries and keys --------------------------------------------------------------------------

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """Projected queries or keys y (samples, heads, N, d), float64, of inputs x (samples, N, D),
        as they go on: shaped like y."""
        return y

    def acts_on(self, side: Side) -> bool:
        """Whether `enter` may change queries, or keys."""
        return type(self).enter is not Variant.enter

    def step(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> TokenStep | None:
        """The derivative of `enter` with respect to y = y(), token by token, with products in a
        dtype; None where it leaves vectors as they are."""
        return None

    def rounded(self, side: Side, x: Tensor, y: Tensor, before: Passing) -> Passing:
        """What `enter` and the derivative in `step` make of ``before``, their own float64 rounding
        included; x and y as for `enter`, y computed.

        Infinite where a variant has an `enter` and does not say.
        """
        return (
            before._replace(error=before.error + math.inf)
            if type(self).enter is not Variant.enter
            else before
        )

    def spans(self) -> list[Tensor]:
        """Projections (D, n) besides the head's own through which a change of the input is felt."""
        return []

    # -- scores ------------------------------------------------------------------------------------

    def scores(self, z: Tensor, heads: slice | int, rows: slice) -> Tensor:
        """Scores z before the mask, (samples, heads, rows, N) of some heads and queries, or (rows,
        N) of one head, as they go on."""
        return z

    def slopes(self, z: Tensor, heads: slice | int, rows: slice) -> Tensor | None:
        """The derivative of `scores` entry by entry, shaped like z; None where it is one."""
        return None

    @property
    def entrywise(self) -> bool:
        """Whether `scores` and `slopes` treat every entry of z alike, wherever it stands: they may
        then be given some columns of z only."""
        return type(self).scores is Variant.scores and type(self).slopes is Variant.slopes

    def rounded_scores(self, error: Tensor, reach: Tensor) -> tuple[Tensor, Tensor | float]:
        """Upper values of the error of `scores`, and of the relative error of `slopes`, float64
        rounding included.

        Args:
            error: how far the arguments are off, at most. reach: how large they are, at most.

        Infinite where a variant has `scores` of its own and does not say.
        """
        return (error + math.inf if type(self).scores is not Variant.scores else error), 0.0

    @property
    def sloped(self) -> bool:
        """Whether `slopes` may be other than one."""
        return type(self).slopes is not Variant.slopes

    # -- the softmax -------------------------------------------------------------------------------

    def extra_scores(self) -> Tensor | None:
        """Scores (heads, n) that take part in every softmax of a head and whose probabilities are
        dropped; None for no such."""
        return None

    # -- copies ------------------------------------------------------------------------------------

    def of_heads(self, heads: slice) -> Self:
        """For some of the heads."""
        return self

    def of_tokens(self, keep: Tensor | slice) -> Self:
        """For some of the tokens."""
        return self

    def without_biases(self) -> Self:
        """For projections without biases."""
        return self

    def of_scaled_inputs(self, exponent: int) -> Self:
        """For inputs times 2 to the exponent, with projections of queries and keys that make up for
        it: the same map of what is projected."""
        return self

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """With changed tensors."""
        return self
