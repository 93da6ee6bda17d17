"""How far the vectors of tokens are spread in any one direction, for weights of every pair of
tokens: Lemma 109 (docs/theory/ball_pairs.md)."""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.bounds.ours.block_norms import outer
from lipbound.linalg.matrix_norms import block_norm, gamma

PAIR_CHUNK = 2**24
"""Bytes of the largest temporary, the d x d matrices of some tokens of all heads."""
Maps = Callable[[slice], Tensor]
"""Of some tokens, (heads, tokens, d, r): vectors are mapped by their transposes."""


def spread(
    w: Tensor, x: Tensor, centre: Tensor | None, off: Tensor | None = None, maps: Maps | None = None
) -> Tensor:
    """||sum_j w_ij y_ij y_ij^T||^(1/2) for y_ij = F_i^T (x_j - c_i), each known up to ``off``
    (heads, N, 1): (heads, N, 1).

    From w (heads, N, M), x (heads, M, d), c (heads, N, d), or 0, and the maps F of the rows.
    """
    (n, m), d = w.shape[-2:], x.shape[-1]
    total, length = w.sum(-1, keepdim=True), x.norm(dim=-1, keepdim=True)
    size, side = w @ length.square(), torch.zeros_like(w[..., :1])
    if centre is not None:
        far = centre.norm(dim=-1, keepdim=True)
        side, size = (
            w @ x - total / 2 * centre,
            size + 2 * far * (w @ length) + far.square() * total,
        )
    lost = gamma(m + 2 * d + 18) * size  # the difference cancels
    pairs, step = outer(x, x), max(1, PAIR_CHUNK // (8 * len(x) * d * d))
    found = []
    for rows in (slice(i, i + step) for i in range(0, n, step)):
        sums, more = (w[:, rows] @ pairs).unflatten(-1, (d, d)), lost[:, rows]
        if centre is not None:
            cross = side[:, rows, :, None] * centre[:, rows, None, :]
            sums = sums - cross - cross.mT
        if maps is not None:
            factor = maps(rows)
            sums, more = factor.mT @ sums @ factor, more * factor.square().sum((-1, -2))[..., None]
        found.append((block_norm(sums)[..., None] + more).sqrt())
    root = torch.cat(found, 1)
    return root if off is None else root + off * total.sqrt()
