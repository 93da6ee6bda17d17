"""Queries that differ from key to key by vectors of their relative position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.variants.base import Variant
from lipbound.attention.variants.pair_vectors import PairVectors


@dataclass(frozen=True, eq=False)
class RelativeQueries(PairVectors, Variant):
    r"""Scores :math:`c\,(q_i + t_{ij}) \cdot k_j` with fixed vectors t of pairs of tokens.

    He et al. 2021 (DeBERTa), equation (4), "position to content". What an output makes of another
    token's key changes with the pair: Lemma 6 (docs/theory/jacobian.md).

    Args:
        vectors: t, (heads or 1, N, N, d), of queries and keys as they enter the scores.
    """

    name = "relative_queries"
    title = "relative queries"
    stage = 2
    place = 9
    shift_invariant = False

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        # (heads, j, i, samples)
        found = self.vectors.to(k.dtype).transpose(1, 2) @ k.permute(1, 2, 3, 0)
        return found.permute(3, 0, 2, 1)


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
