"""Upper values of the largest eigenvalues of symmetric matrices with entries >= 0, from few products with vectors."""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.linalg.matrix_norms import UNIT

RTOL = 0.02
"""How far the upper value may stay above a lower one; our bounds are its root."""
MAX_STEPS = 24
"""Products, at most."""
EVERY, FIRST = 4, 2
"""Steps between two that start from the best vector of all that have been seen, and the first of them."""
FLOOR = 1e-2
"""What such a vector keeps of power iteration's, entry by entry, so that none of its entries is too small."""


def least_norm(apply: Callable[[Tensor], Tensor], n: int, more: Tensor, *, rtol: float = RTOL) -> Tensor:
    r"""An upper value of the least of the norms of some matrices M, each with a number of its own added, ``more`` (m,).

    ``apply`` maps (n, m) to the products of each matrix with its column. For every y > 0, :math:`\|M\| \le \max_i (M y)_i / y_i`: Lemma 49
    (docs/theory/numerics.md). y follows power iteration, now and then from the Ritz vector of the space of all y so far, until the least upper value
    is within ``rtol`` of the least lower one.
    """
    y = more.new_ones(n, len(more))
    upper, seen = torch.full_like(more, torch.inf), []
    for step in range(MAX_STEPS):
        z = apply(y)
        upper = torch.minimum(upper, (z / y).amax(0))
        lower = (y * z).sum(0) / (y * y).sum(0)
        if not bool((upper + more).amin() > (1 + rtol) * (lower + more).amin()):
            break
        size = y.norm(dim=0)
        seen.append((y / size, z / size))
        y = (z / z.amax(0).clamp_min(1e-300)).clamp_min(1e-14)
        if step % EVERY == FIRST and bool(torch.isfinite(z).all()):
            best = torch.stack(
                [_ritz_image(*(torch.stack([t[:, c] for t in part], -1) for part in zip(*seen, strict=True))) for c in range(len(more))], -1
            )
            y = torch.maximum(best, FLOOR * y)
    return (upper + more).amin() * (1 + 8 * n * UNIT)


def _ritz_image(y: Tensor, z: Tensor) -> Tensor:
    """M r, largest entry 1, where r is the top Ritz vector of a symmetric M on the span of the columns of y, (n, k), and z = M y."""
    values, vectors = torch.linalg.eigh(y.mT @ y)
    basis = vectors / values.clamp_min(1e-300).sqrt()
    basis = basis[:, values > 1e-10 * values[-1]]
    form = basis.mT @ (y.mT @ z) @ basis
    image = z @ (basis @ torch.linalg.eigh((form + form.mT) / 2).eigenvectors[:, -1])
    image = image * (1 - 2 * (image.sum() < 0).to(image.dtype))
    return image / image.amax().clamp_min(1e-300)
