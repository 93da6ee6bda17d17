"""Normalised values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, Passing, Shapes, Side, Variant
from lipbound.attention.variants.qk_norm import NormStep, QKNorm
from lipbound.attention.variants.token_maps import TokenStep


@dataclass(frozen=True, eq=False)
class ValueNorm(Variant):
    r"""Values :math:`v = norm(y)\,M` of projected vectors y.

    Gemma 4 normalises each head's values; in latent attention (DeepSeek-V2 2024, section 2.1) they
    are projections of a vector that is normalised. J is linear in M, in which an output projection
    is folded.

    Args:
        norm: the normalisation.
        after: M, (heads, d_v, d_v), or None for the identity.
    """

    norm: QKNorm
    after: Tensor | None = None

    name = "value_norm"
    title = "normalised values"
    stage = 0
    place = 4
    axes: ClassVar = {"norm": "", "after": "h.."}

    @property
    def parts(self) -> list[str]:
        return ["norm_v"]

    def check(self, shapes: Shapes) -> None:
        self.norm.check("norm_v", shapes)

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        if side != "v":
            return y
        y = self.norm.enter(x, y, valid)
        return y if self.after is None else y @ self.after.double()

    def before(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what `after` is applied to."""
        return self.norm.apply(x, y)

    def acts_on(self, side: Side) -> bool:
        return side == "v"

    def step(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> "ValueStep | None":
        if side != "v":
            return None
        after = self.after
        if after is not None:
            after = after.to(dtype).expand(len(x), *after.shape).flatten(0, 1)
        return ValueStep(NormStep.of(self.norm, x, y(), dtype), after)

    def rounded(self, side: Side, x: Tensor, y: Tensor, before: Passing) -> Passing:
        """Return upper values as `Variant.rounded` does: Lemma 69 (docs/theory/rounding.md)."""
        if side != "v":
            return before
        found = self.norm.rounded(x, y, before)
        if self.after is None:
            return found
        norm = torch.linalg.matrix_norm(self.after.double())[:, None]
        own = 2 * (self.after.shape[-1] + 8) * UNIT
        length = torch.linalg.vector_norm(self.before(x, y), dim=-1)
        return Passing(
            norm * (found.error * (1 + own) + own * length),
            norm * found.slope,
            norm * (found.slope_error * (1 + own) + own * found.slope),
        )

    def spans(self) -> list[Tensor]:
        return [] if self.norm.over is None else [self.norm.over[0]]

    def followed_by(self, m: Tensor) -> "ValueNorm":
        return replace(self, after=m if self.after is None else self.after @ m)

    def linear(self) -> dict[str, Tensor]:
        if self.after is not None:
            return {"after": self.after}
        bias = {} if self.norm.bias is None else {"bias": self.norm.bias}
        return {"gain": self.norm.gain} | bias

    def with_linear(self, tensors: dict[str, Tensor]) -> "ValueNorm":
        if self.after is not None:
            return replace(self, after=tensors["after"])
        norm = replace(self.norm, gain=tensors["gain"], bias=tensors.get("bias"))
        return replace(self, norm=norm)

    def without_biases(self) -> "ValueNorm":
        return replace(self, norm=self.norm.without_biases())

    def of_scaled_inputs(self, exponent: int) -> "ValueNorm":
        return replace(self, norm=self.norm.of_scaled_inputs(exponent))


@dataclass(frozen=True, eq=False)
class ValueStep(TokenStep):
    """The derivative of `ValueNorm`, token by token.

    Attributes:
        norm: of the normalisation.
        after: M, (batch, d_v, d_v), or None.
    """

    norm: NormStep
    after: Tensor | None

    @property
    def direction(self) -> Tensor | None:
        """Direction of the extra coordinate, as `NormStep` has it."""
        return self.norm.direction

    def push(self, z: Tensor, extra: Tensor | None) -> Tensor:
        """Return perturbations as they go on."""
        z = self.norm.push(z, extra)
        return z if self.after is None else z @ self.after

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the transposed map of g."""
        return self.norm.pull(g if self.after is None else g @ self.after.mT)

    def select(self, index: Tensor | slice) -> "ValueStep":
        """Return that of some entries of the batch."""
        after = None if self.after is None else self.after[index]
        return ValueStep(self.norm.select(index), after)

    def of_tokens(self, tokens: slice | Tensor) -> "ValueStep":
        """Return that of some tokens; the direction stays."""
        return replace(self, norm=self.norm.of_tokens(tokens))

    def double(self) -> "ValueStep":
        """Return the same with products in float64."""
        after = None if self.after is None else self.after.double()
        return ValueStep(self.norm.double(), after)
