"""Queries that differ from key to key by vectors of their relative position."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import Shapes, Variant
from lipbound.errors import AttentionError


@dataclass(frozen=True, eq=False)
class RelativeQueries(Variant):
    r"""Scores :math:`c\,(q_i + t_{ij}) \cdot k_j` with fixed vectors t of pairs of tokens.

    He et al. 2021 (DeBERTa), equation (4), "position to content". What an output makes of another
    token's key changes with the pair: Lemma 6 (docs/theory/jacobian.md).

    Args:
        t: (heads or 1, N, N, d), of queries and keys as they enter the scores.
    """

    t: Tensor

    name = "relative_queries"
    title = "relative queries"
    stage = 2
    place = 9
    axes: ClassVar = {"t": "hnn."}
    shift_invariant = False

    def tensors(self) -> dict[str, Tensor]:
        return {"relative queries": self.t}

    def check(self, shapes: Shapes) -> None:
        heads, n, d = shapes.w_q[0], shapes.x[1], shapes.w_q[2]
        if tuple(self.t.shape[1:]) != (n, n, d) or len(self.t) not in (1, heads):
            raise AttentionError(
                f"relative queries have shape {tuple(self.t.shape)}; it must be "
                f"{(heads, n, n, d)}, or 1 in the place of the heads"
            )

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        found = self.t.to(k.dtype).transpose(1, 2) @ k.permute(1, 2, 3, 0)  # (heads, j, i, samples)
        return found.permute(3, 0, 2, 1)

    def of_head(self, head: int) -> Tensor:
        """Return the vectors of one head, (N, N, d), float64."""
        return self.t[min(head, len(self.t) - 1)].double()

    def longest(self) -> Tensor:
        """Return the longest vector of each query, (heads or 1, N), float64."""
        return torch.linalg.vector_norm(self.t, dim=-1, dtype=torch.float64).amax(2)

    def fits(self, tokens: int) -> bool:
        """Return whether they are of so many tokens."""
        return self.t.shape[1] == tokens


@dataclass(frozen=True, eq=False)
class RelativeStep:
    """Relative queries as products with a batch of perturbations of keys need them.

    Attributes:
        t: (heads or 1, N, N, d) by key, then by query. heads: of each entry of the batch.
    """

    t: Tensor
    heads: Tensor

    def push(self, z: Tensor) -> Tensor:
        """Return t_ij . z_j, (batch, N, N), of z (batch, N, d)."""
        # rows times matrices: torch is slow at matrices times columns
        found = [(one[:, None] @ t.mT)[:, 0].mT for t, one in zip(self._each(), z, strict=True)]
        return torch.stack(found)

    def pull(self, g: Tensor) -> Tensor:
        """Return sum_i g_ij t_ij, (batch, N, d), of g (batch, N, N)."""
        found = [(one.mT[:, None] @ t)[:, 0] for t, one in zip(self._each(), g, strict=True)]
        return torch.stack(found)

    def _each(self) -> list[Tensor]:
        return [self.t[min(head, len(self.t) - 1)] for head in self.heads.tolist()]

    def select(self, index: Tensor | slice) -> "RelativeStep":
        """Return that of some entries of the batch."""
        return RelativeStep(self.t, self.heads[index])

    def to(self, dtype: torch.dtype) -> "RelativeStep":
        """Return the same in another dtype."""
        return RelativeStep(self.t.to(dtype), self.heads)

    def double(self) -> "RelativeStep":
        """Return the same in float64."""
        return self.to(torch.float64)
