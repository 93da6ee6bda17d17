"""Queries that move with their tokens over a ball, summed over the tokens that attend to one: Lemma
116 (docs/theory/ball_norm.md)."""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.bounds.ours.weighted_spread import spread

UNEVEN = 1.5
"""Exponent of the ratio of two lengths in the weights between which their sum is shared: 1 is best
where both are along one direction, 2 where they are orthogonal."""


class Turning(NamedTuple):
    r"""Vectors :math:`x_i` of queries, which move by :math:`G h_i` when token i moves by
    :math:`h_i`: Lemma 116 (docs/theory/ball_norm.md).

    ``x`` (heads, N, r), known up to ``off`` (heads, N, 1); rows ``g`` (heads, s, r) whose sum of
    squares is at least :math:`G G^T`, known up to ``off_g`` (heads, 1, 1) in the Frobenius norm;
    ``size`` at least ||G||, (heads, 1, 1).
    """

    x: Tensor
    off: Tensor
    g: Tensor
    off_g: Tensor
    size: Tensor

    def columns(self, w: Tensor, most: Tensor) -> Tensor:
        r"""For each token j at least :math:`(\sum_i w_{ij} (y \cdot x'_i)^2)^{1/2}` for unit
        vectors y, (heads, N).

        The weights w are (heads, N, N); :math:`\sum_i w_{ij} (y \cdot G h_i)^2` is at most ``most``
        (heads, N) times :math:`|G^T y|^2`.
        """
        w, move = w.mT, most.sqrt()[..., None]
        squares = w @ self.off.square()
        still = spread(w, self.x, None) + squares.sqrt()
        ratio = (still / (move * self.size)).nan_to_num(1.0).clamp(1e-6, 1e6) ** UNEVEN
        share, rest = 1 + 1 / ratio, (1 + ratio) * move.square()
        weights = torch.cat([share * w, rest.expand(-1, -1, self.g.shape[1])], -1)
        joint = (
            spread(weights, torch.cat([self.x, self.g], 1), None)
            + (share * squares).sqrt()
            + rest.sqrt() * self.off_g
        )
        return (still + move * self.size).minimum(joint)[..., 0]
