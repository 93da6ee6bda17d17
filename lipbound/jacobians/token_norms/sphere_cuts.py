"""What no vector of a row exceeds, where a matrix does better than every vector: the sphere is cut
into wedges, and each is bounded by itself."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.jacobians.token_norms.block_rows import Blocks
from lipbound.linalg.matrix_norms import UNIT, eigenvalues, symmetric_norm

Weights = Callable[[Blocks, Tensor], tuple[Tensor, Tensor]]
"""From blocks (k maps of one row) and lengths (k, 1, n) to weights and the sums of their inverses.
"""
FIRST, PARTS, LEVELS, MOST = 6, 3, 6, 24
"""Wedges at first, parts that one is cut into, how often, and how many at a time."""
MULTIPLIERS, STEPS, TRIED = 8, 8, 17


def wedged(row: Blocks, y: Tensor, target: float, weights: Weights) -> tuple[float, Tensor]:
    r"""An upper value of :math:`\sigma_i` of a single row: Lemma 91 (docs/theory/token_norms.md);
    and unit vectors (1, 1, s, r) to climb from.

    Args:
        row: one map with one output token. y: columns (1, 1, s, r) of a matrix of Frobenius norm
            one that has climbed: wedges divide the plane of its first two directions. target:
            wedges that are proved to be below it are not cut again.
        weights: see `Weights`.
    """
    if y.shape[-1] < 2 or not bool(torch.isfinite(y).all()):
        return math.inf, y
    plane = torch.linalg.svd(y[0, 0], full_matrices=False).Vh[:2]
    edges, size = _edges(plane, 0.0, math.pi, FIRST), math.pi / FIRST
    edges[-1] = -edges[0]
    left, right = edges[:-1], edges[1:]
    angles = torch.arange(FIRST, dtype=torch.float64, device=y.device) * size
    upper, found = 0.0, [y[0]]
    y = y.expand(FIRST, -1, -1, -1)
    for level in range(LEVELS):
        bounds, y = _bounded(row, y, left, right, weights)
        found.append(torch.linalg.svd(y[:, 0], full_matrices=False).Vh[:, :1])
        again = ~(bounds <= target)
        upper = max(upper, float(torch.where(again, 0.0, bounds).amax()))
        count = int(again.sum())
        if count == 0 or level == LEVELS - 1 or count * PARTS > MOST:
            upper = max(upper, float(bounds.amax()))
            break
        size /= PARTS
        cut = [
            _edges(plane, float(angle), float(angle) + PARTS * size, PARTS)
            for angle in angles[again]
        ]
        for one, first, last in zip(cut, left[again], right[again], strict=True):
            one[0], one[-1] = first, last
        left, right = torch.cat([one[:-1] for one in cut]), torch.cat([one[1:] for one in cut])
        angles = (angles[again, None] + torch.arange(PARTS, device=y.device) * size).flatten()
        y = y[again].repeat_interleave(PARTS, 0)
    starts = torch.cat([one.reshape(-1, one.shape[-1]) for one in found])[None, None]
    return upper, starts / torch.linalg.vector_norm(starts, dim=-1, keepdim=True).clamp_min(1e-300)


def _edges(plane: Tensor, first: float, last: float, parts: int) -> Tensor:
    """Vectors (parts + 1, r) across the directions at equal angles of a plane (2, r)."""
    angles = torch.linspace(first, last, parts + 1, dtype=torch.float64, device=plane.device)
    return torch.stack([-angles.sin(), angles.cos()], -1) @ plane


def _bounded(
    row: Blocks, y: Tensor, left: Tensor, right: Tensor, weights: Weights
) -> tuple[Tensor, Tensor]:
    """Upper values (k,) of a row over the wedges between edges (k, r), and where matrices end that
    start from y (k, 1, s, r)."""
    q = left[:, :, None] * right[:, None]
    q = ((q + q.mT) / 2)[:, None]  # y is in a wedge where y^T q y <= 0
    many = row.select(torch.zeros(len(q), 2, dtype=torch.long, device=y.device))
    total = many.slope(y, together=True)[2][..., 0].square().clamp_min(1e-300)
    low, high = ((total * factor).log() for factor in (1e-5, 30.0))
    for _ in range(MULTIPLIERS):
        middle = (low + high) / 2
        mu = middle.exp()[..., None, None]
        for _ in range(STEPS):
            z, _, sums = many.slope(y, together=True)
            z = sums[..., None] * z + mu * (y - y @ q)
            y = z / torch.linalg.vector_norm(z, dim=(2, 3), keepdim=True).clamp_min(1e-300)
        outside = ((y @ q) * y).sum((2, 3)) > 0
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    w, weight = weights(many, many.slope(y, together=True)[1][:, :, 0])
    g, slack = many.matrix(w)
    around = torch.linspace(-1.5, 1.5, TRIED, dtype=torch.float64, device=y.device)
    tried = ((low + high) / 2 + around).exp() / weight  # (k, tried)
    best = eigenvalues(g - tried[..., None, None] * q)[..., -1].argmin(-1)[:, None]
    mu = tried.gather(-1, best)
    rounding = 8 * UNIT * (torch.linalg.matrix_norm(g) + mu * torch.linalg.matrix_norm(q))
    proved = symmetric_norm(g - mu[..., None, None] * q) + slack + rounding
    return (weight * proved).sqrt()[:, 0] * (1 + 1e-14), y
