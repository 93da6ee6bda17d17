r"""Upper values of the largest :math:`\|X^T M(P_i)\|` over the rows of attention matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.linalg.matrix_norms import (
    eigenvalues,
    gamma,
    with_derivative,
)

_ROWS = 4
"""Rows of each head solved for at a time, after the first, which is nearly always the largest."""
ROUNDS = 9
"""Rounds after which the remaining rows keep their cheap upper values."""
BYTES = 2**26
"""Size in bytes of the largest temporary over rows of several heads."""
FLUSHED = 2.0**-120
"""Entries of a matrix that count as zero, relative to its largest."""
_VANISHED = 2.0**-1000
"""Upper value of what underflow takes from fourth powers of deviations."""
_FAINT = 2.0**-500
"""Deviations of rows, of inputs of ordinary size, below which nothing depends on their digits: this
much is added to all of them."""


class Largest(NamedTuple):
    """The value of each head, its row, and whether that row was solved for."""

    value: Tensor
    row: Tensor
    solved: Tensor


def weighted_deviation_norm(x: Tensor, p: Tensor) -> Tensor:
    r"""Return upper values of :math:`\max_i \|X^T M(P_i)\|`, (samples, heads), float64.

    Every row gets a cheap upper value from a few N x N products; rows are then solved for exactly,
    in the order of those values, until no other row can be larger. Rows left over after `ROUNDS`
    rounds count with their upper values: the result is always an upper value, and the exact maximum
    when the rounds suffice: Lemma 51 (docs/theory/numerics.md); rounding is included: Lemma 85
    (docs/theory/upper_values.md). The derivative is that of one row at a top singular pair. Cost
    O(N^3 + N^2 D), and a few eigenvalue problems per head.

    Args:
        x: inputs, (samples, N, D), whose largest entry is 0 or from 1e-60 to 1e60.
        p: probabilities, (samples, heads, N, N).
    """
    values = []
    for one, rows in zip(x.double(), p, strict=True):
        with torch.no_grad():
            found = _one_sample(one, rows.double())
        derived = one.requires_grad or rows.requires_grad
        values.append(_derived(found, one, rows.double()) if derived else found.value)
    return torch.stack(values)


def _inner_products(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred @ centred.T


def _one_sample(x: Tensor, p: Tensor) -> Largest:
    heads, n, _ = p.shape
    k, step = _inner_products(x), max(1, int(BYTES // (8 * heads * n)))
    parts = [_upper_values(k, x.shape[1], p[:, i : i + step]) for i in range(0, n, step)]
    upper = torch.cat(parts, -1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    exact = torch.full_like(upper, -torch.inf)
    active = torch.arange(heads, device=x.device)
    for turn in range(ROUNDS):
        rows = upper[active].topk(min(_ROWS if turn else 1, n), -1).indices
        places = active[:, None], rows
        exact[places], upper[places] = _exact(x, distances, p[places]), -torch.inf
        active = (upper.amax(-1) > exact.amax(-1)).nonzero()[:, 0]
        if not len(active):
            break
    (best, where), (left, row) = exact.max(-1), upper.max(-1)
    solved = best >= left
    return Largest(torch.maximum(best, left), torch.where(solved, where, row), solved)


def _derived(found: Largest, x: Tensor, p: Tensor) -> Tensor:
    """Return the values with the derivative of the row each comes from.

    At a top singular pair of X^T M, or that of the cheap upper value.
    """
    rows = p[torch.arange(len(p), device=p.device), found.row]
    y = x - x[rows.detach().argmax(-1)][:, None]  # (heads, N, D)
    z = rows[..., None] * (y - rows[:, None] @ y)
    u, _, vh = torch.linalg.svd(z.detach(), full_matrices=False)
    form = (u[:, None, :, 0] @ z @ vh[:, 0, :, None])[:, 0, 0]
    if not bool(found.solved.all()):
        cheap = _upper_values(_inner_products(x), x.shape[1], rows[:, None])[:, 0]
        form = torch.where(found.solved, form, cheap)
    return with_derivative(found.value, form)


def _upper_values(k: Tensor, width: int, p: Tensor) -> Tensor:
    """Return Wolkowicz and Styan's upper values of ||X^T M(P_i)||, (heads, rows).

    Of rows p (heads, rows, N); k = X X^T for centred x of this width.
    """
    (n, m), (w, c) = (len(k), min(len(k), width)), (p * p, p @ k)  # c_ij = mean_i . x_j
    a = c - (c * p).sum(-1, keepdim=True) / 2  # so that k_jl - a_j - a_l is an inner product
    # sums over j of w_j times 1, a_j and a_j^2, and over j, l of w_j w_l times k_jl a_l, k_jl^2
    wa = w * a
    mass, first, second = w.sum(-1), wa.sum(-1), (wa * a).sum(-1)
    squares = ((w @ (k * k)) * w - 4 * (w @ k) * wa).sum(-1)
    t, f = w @ k.diagonal() - 2 * first, squares + 2 * (second * mass + first * first)
    size, per = k.diagonal().detach().amax() * mass.detach(), gamma(4 * n + 2 * width + 60)
    low, high, f = t - 5 * per * size, t + 5 * per * size, f + 20 * per * size**2
    room = (1 - 1 / m) * (f - low.clamp_min(0) ** 2 / m)
    square = torch.minimum(high / m + room.clamp_min(_VANISHED).sqrt(), high)
    return square.clamp_min(_VANISHED**0.5).sqrt() * (1 + gamma(40))


def _exact(x: Tensor, distances: Tensor, p: Tensor) -> Tensor:
    """Return upper values of ||X^T M(p)|| of rows p (heads, rows, N), by dense decompositions.

    (heads, rows). Centred at each row's heaviest token, which avoids cancellation.
    """
    n, width = x.shape
    heaviest = p.argmax(-1)
    lengths = p * distances[heaviest]  # at most N times as small as the columns of X^T M
    scale = lengths.amax(-1, keepdim=True).clamp_min(_FAINT)
    weights = p / scale  # subnormal products take a hundred times as long
    weights.masked_fill_(weights * distances.amax() < FLUSHED, 0.0)
    z = x - x[heaviest][..., None, :]
    z.sub_(p[..., None, :] @ z).mul_(weights[..., None])
    z = z if n <= width else z.mT
    g = z @ z.mT
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)
    top = eigenvalues(g)[..., -1].clamp_min(0) + 2 * gamma(9 * (n + width) + 4) * trace
    norm = (top.sqrt() + 4 * FLUSHED * n**0.5) * scale[..., 0]
    return (norm + 2 * gamma(n + 12) * lengths.sum(-1) + _FAINT) * (1 + gamma(20))
