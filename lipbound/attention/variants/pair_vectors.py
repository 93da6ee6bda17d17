"""Fixed vectors of pairs of tokens, which relative keys and relative queries are."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import Shapes
from lipbound.attention.variants.named_axes import NamedAxes
from lipbound.errors import AttentionError


@dataclass(frozen=True, eq=False)
class PairVectors(NamedAxes):
    """A vector for each query i and key j.

    Attributes:
        vectors: (heads or 1, N, N, d), by query, then by key.
        title: what sentences call them.
    """

    vectors: Tensor

    title: ClassVar[str]
    axes: ClassVar = {"vectors": "hnn."}

    def tensors(self) -> dict[str, Tensor]:
        """Return the vectors, under the name that errors use."""
        return {self.title: self.vectors}

    def check(self, shapes: Shapes) -> None:
        """Raise AttentionError where they do not fit a layer of these shapes."""
        heads, n, d = shapes.w_q[0], shapes.x[1], shapes.w_q[2]
        if tuple(self.vectors.shape[1:]) != (n, n, d) or len(self.vectors) not in (1, heads):
            raise AttentionError(
                f"{self.title} have shape {tuple(self.vectors.shape)}; it must be "
                f"{(heads, n, n, d)}, or 1 in the place of the heads"
            )

    def of_head(self, head: int) -> Tensor:
        """Return the vectors of one head, (N, N, d), float64."""
        return self.vectors[min(head, len(self.vectors) - 1)].double()

    def lengths(self) -> Tensor:
        """Return the lengths of all vectors, (heads or 1, N, N), float64."""
        return torch.linalg.vector_norm(self.vectors, dim=-1, dtype=torch.float64)

    def fits(self, tokens: int) -> bool:
        """Return whether they are of so many tokens."""
        return self.vectors.shape[1] == tokens
