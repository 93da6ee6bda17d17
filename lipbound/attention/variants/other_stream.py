"""Queries, or keys and values, that are made of tokens other than those that are perturbed."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from lipbound.attention.variants.base import NamedAxes, TokenStep, cut


@dataclass(frozen=True, eq=False)
class OtherStream(NamedAxes):
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

    axes: ClassVar = {"q": "hsm.", "k": "hsm.", "v": "hsm.", "valid": "sm"}

    @property
    def tokens(self) -> int:
        """Number of tokens of the other stream."""
        return next(t.shape[2] for t in (self.q, self.k) if t is not None)

    def repeated(self, samples: int) -> "OtherStream":
        """Return that of one sample for so many, which differ in the layer's inputs alone."""

        def expanded(t: Tensor, letters: str) -> Tensor:
            one = t.shape[letters.index("s")] == 1
            return t.expand(*(samples if at == "s" else -1 for at in letters)) if one else t

        return self._changed(expanded)

    def unpadded(self) -> "OtherStream":
        """Return that without padding of its own, for one sample."""
        if self.valid is None:
            return self
        return replace(self._changed(partial(cut, m=self.valid[0])), valid=None)


@dataclass(frozen=True)
class FixedStep(TokenStep):
    """The derivative of what does not move: zero.

    Attributes:
        tokens: of the layer's inputs.
        fixed: tokens of the other stream.
    """

    tokens: int
    fixed: int

    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return zero for every token of the other stream."""
        return z.new_zeros(len(z), self.fixed, z.shape[-1])

    def pull(self, g: Tensor) -> tuple[Tensor, None]:
        """Return zero for every token of the layer's inputs."""
        return g.new_zeros(len(g), self.tokens, g.shape[-1]), None
