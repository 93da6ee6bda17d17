"""Queries, or keys and values, that are made of tokens other than those that are perturbed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import Passing, Shapes, Side, Variant
from lipbound.attention.variants.token_maps import TokenStep
from lipbound.errors import AttentionError


@dataclass(frozen=True, eq=False)
class OtherStream(Variant):
    """One side of cross-attention, which does not move when the layer's inputs do.

    Queries of another stream, where the layer's inputs are the memory that keys and values are made
    of; or keys and values of another stream, where its inputs are what queries are made of. The
    layer's own projections of that side are not looked at.

    Args:
        q: queries as they enter the scores, (heads, samples, N, d), or None.
        k, v: keys as they enter the scores and values, (heads, samples, M, d or d_v), or None.
        valid: tokens of the other stream that are not padding, (samples, N or M) bool, or None.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    valid: Tensor | None = None

    name = "cross"
    title = "cross-attention"
    stage = 2
    place = 5
    axes: ClassVar = {"q": "hsm.", "k": "hsm.", "v": "hsm.", "valid": "sm"}

    def _given(self) -> dict[str, Tensor]:
        sides = {"q": self.q, "k": self.k, "v": self.v}
        return {side: t for side, t in sides.items() if t is not None}

    @property
    def parts(self) -> list[str]:
        return [f"{side} of another stream" for side in self._given()]

    def tensors(self) -> dict[str, Tensor]:
        return {f"{side} of the other stream": t for side, t in self._given().items()}

    @property
    def tokens(self) -> int:
        """Number of tokens of the other stream."""
        return next(iter(self._given().values())).shape[2]

    def check(self, shapes: Shapes) -> None:
        if set(self._given()) not in ({"q"}, {"k", "v"}):
            raise AttentionError("the other stream gives queries alone, or keys and values")
        start = shapes.w_q[0], shapes.x[0], self.tokens
        for side, t in self._given().items():
            expected = *start, (shapes.w_v if side == "v" else shapes.w_q)[2]
            if tuple(t.shape) != expected:
                raise AttentionError(
                    f"{side} of the other stream has shape {tuple(t.shape)}; it must be {expected}"
                )
        if self.valid is not None and tuple(self.valid.shape) != (start[1], start[2]):
            raise AttentionError(
                f"valid of the other stream has shape {tuple(self.valid.shape)}; it must be "
                f"{(start[1], start[2])}"
            )

    def acts_on(self, side: Side) -> bool:
        return side in self._given()

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        given = self._given().get(side)
        return y if given is None else given.double().transpose(0, 1)

    def step(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> "FixedStep | None":
        given = self._given().get(side)
        return None if given is None else FixedStep(x.shape[1], given.shape[2])

    def rounded(self, side: Side, x: Tensor, y: Tensor, before: Passing) -> Passing:
        if not self.acts_on(side):
            return before
        return Passing(*[torch.zeros(1, 1, 1, dtype=torch.float64, device=x.device)] * 3)

    def followed_by(self, m: Tensor) -> "OtherStream":
        assert self.v is not None
        return replace(self, v=self.v @ m[:, None])

    def linear(self) -> dict[str, Tensor]:
        return {} if self.v is None else {"values": self.v}

    def with_linear(self, tensors: dict[str, Tensor]) -> "OtherStream":
        return replace(self, v=tensors["values"])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "OtherStream":
        q, k, v = (None if t is None else change(t) for t in (self.q, self.k, self.v))
        return OtherStream(q, k, v, self.valid)

    def repeated(self, samples: int) -> "OtherStream":
        """Return that of one sample for so many, which differ in the layer's inputs alone."""
        if next(iter(self._given().values())).shape[1] != 1:
            return self
        valid = None if self.valid is None else self.valid.expand(samples, -1)
        return replace(self._each(lambda t: t.expand(-1, samples, -1, -1)), valid=valid)

    def unpadded(self) -> "OtherStream":
        """Return that without padding of its own, for one sample."""
        if self.valid is None:
            return self
        keep = self.valid[0]
        return replace(self._each(lambda t: t[:, :, keep]), valid=None)


@dataclass(frozen=True)
class FixedStep(TokenStep):
    """The derivative of what does not move: zero.

    Attributes:
        tokens: of the layer's inputs.
        fixed: tokens of the other stream.
    """

    tokens: int
    fixed: int

    def push(self, z: Tensor, extra: Tensor | None) -> Tensor:
        """Return zero for every token of the other stream."""
        return z.new_zeros(len(z), self.fixed, z.shape[-1])

    def pull(self, g: Tensor) -> tuple[Tensor, None]:
        """Return zero for every token of the layer's inputs."""
        return g.new_zeros(len(g), self.tokens, g.shape[-1]), None
