"""Keys that differ from query to query by vectors of their relative position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.variants.base import Variant
from lipbound.attention.variants.pair_vectors import PairVectors

CHUNK = 2**24
"""Bytes of the largest temporary, differences of values and outputs of some queries."""


@dataclass(frozen=True, eq=False)
class RelativeKeys(PairVectors, Variant):
    r"""Scores :math:`c\,q_i \cdot (k_j + r_{ij})` with fixed vectors r of pairs of tokens.

    Shaw et al. 2018, "Self-Attention with Relative Position Representations", equation (4), without
    its values; Dai et al. 2019 (Transformer-XL), section 3.3. The derivative of an output by its
    own query is all that they change: Lemma 6 (docs/theory/jacobian.md).

    Args:
        vectors: r, (heads or 1, N, N, d), of queries and keys as they enter the scores.
    """

    name = "relative_keys"
    title = "relative keys"
    stage = 2
    place = 8

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        found = q.permute(1, 2, 0, 3) @ self.vectors.to(q.dtype).mT  # (heads, N, samples, N)
        return found.permute(2, 0, 1, 3)

    def by_query(self, t: Tensor, v: Tensor, o: Tensor, heads: Tensor) -> Tensor:
        r"""Return :math:`\sum_j T_{ij} (v_j - o_i) r_{ij}^T`, (batch, N, d_v, d).

        Args:
            t: weights of changes of scores, (batch, N, N).
            v, o: values and outputs, (batch, N, d_v).
            heads: head of each entry of the batch, (batch,).
        """
        n, step = t.shape[-1], max(1, CHUNK // (8 * t.shape[-1] * v.shape[-1]))
        rows, found = [slice(i, i + step) for i in range(0, n, step)], []
        for head, t_b, v_b, o_b in zip(heads.tolist(), t, v, o, strict=True):
            r = self.vectors[min(head, len(self.vectors) - 1)].to(t.dtype)
            moved = [(t_b[i, :, None] * (v_b - o_b[i, None])).mT @ r[i] for i in rows]
            found.append(torch.cat(moved))
        return torch.stack(found)
