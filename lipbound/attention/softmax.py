r"""The Jacobian of the softmax, :math:`M(p) = \mathrm{diag}(p) - p p^T`: its spectrum and norms.

Rows are always the last axis. No N x N matrix is formed for a row. Norms other than the spectral
one: Nair 2025, "Softmax is 1/2-Lipschitz: A tight bound across all l_p norms" (arXiv 2510.23012);
Emadi 2026 (arXiv 2602.18849, abstract and quotations).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT
from lipbound.devices import Routine, finished
from lipbound.errors import LipboundError

_ROWS = 2**21
"""Entries handled at a time by `jacobian_norm`, which works in float64 whatever it is given."""
STEPS = 40
"""Steps of Newton's iteration at most."""
FAR_LOOK = 6
"""Steps between two looks at rows on a GPU, which waits for every look: nearly all rows have
settled at the first."""
FIRST, FAR_FIRST = 8, 32
"""Rows of each matrix that are solved for first, those with the largest g_1: on a CPU and on a GPU,
for which more rows are little more work."""
LARGEST_LP_NORM = 0.5
r"""The smallest number that bounds :math:`\|M(p)\|_{p \to p}` for all probability rows, in every
l_p (Nair 2025): Lemma 100 (docs/theory/token_bounds.md)."""


class Enclosure(NamedTuple):
    """Lower and upper end of an interval that contains the exact value."""

    lower: Tensor
    upper: Tensor


def jacobian_norm(p: Tensor, *, max_iterations: int = STEPS) -> Enclosure:
    r"""Return the spectral norm of M(p) for every row, enclosed to rounding: O(N) a row.

    Newton's iteration for the secular equation in a form whose terms are all positive; the residual
    at the last iterate gives the enclosure: Lemma 11 (docs/theory/softmax.md).

    Args:
        p: (..., N), non-negative, any floating dtype; rows are normalised in float64 (they need
            only sum to one up to rounding). All-zero rows (padding) have norm 0.
        max_iterations: steps of Newton's iteration at most.

    Returns:
        `Enclosure` of shape (...), float64; relative width about 1e-14 (N + 20 roundings), down to
        subnormal norms.

    >>> float(jacobian_norm(torch.tensor([0.5, 0.5])).upper)
    0.5...
    """
    rows = p.reshape(-1, p.shape[-1])
    found = finished(_enclosed(rows, max_iterations))
    return Enclosure(*(end.view(p.shape[:-1]) for end in found))


def _enclosed(rows: Tensor, max_iterations: int = STEPS) -> Routine[Enclosure]:
    """`jacobian_norm` of rows (n, N), some at a time."""
    found = []
    for part in rows.split(max(1, _ROWS // rows.shape[-1])):
        found += [(yield from _enclose(part.double(), max_iterations))]
    return Enclosure(*map(torch.cat, zip(*found, strict=True)))


def normalised(p: Tensor) -> Tensor:
    """Return rows in float64 that sum to one; all-zero rows stay.

    Rows normalised in float32 miss one by too much for Theorem 4 of Yudin et al.
    """
    p = p.double()
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total > 0, total, 1.0)


def _enclose(p: Tensor, max_iterations: int) -> Routine[Enclosure]:
    n = p.shape[-1]
    if n == 1:
        return Enclosure(torch.zeros_like(p[:, 0]), torch.zeros_like(p[:, 0]))
    p = normalised(p)
    where = p.argmax(-1, keepdim=True)
    p1 = p.gather(-1, where)
    rest = p.scatter(-1, where, 0.0)
    p2 = rest.amax(-1, keepdim=True)
    delta = p1 - p2
    simple = (p2 <= 0) | (delta <= 0)  # one-hot: norm 0; a tie at the top: norm p1
    safe = torch.where(simple, 1.0, p2)
    r = rest / safe
    gap = torch.where(rest > 0, (p2 - rest) / safe, 1.0)
    s_hat = r.sum(-1, keepdim=True)
    total = rest.sum(-1, keepdim=True) + p1
    slope = s_hat / total.clamp_min(torch.finfo(p.dtype).tiny)  # 1 / smallest F', up to rounding
    gamma = 2 * (n + 20) * UNIT

    # Start at the Rayleigh quotient of (1, -p_i/s), exact for two tokens or a tied rest.
    w = r / s_hat.clamp_min(1e-300)
    mean = p1 - (rest * w).sum(-1, keepdim=True)
    square = p1 + (rest * w * w).sum(-1, keepdim=True) - mean * mean
    x = (square / (1 + (w * w).sum(-1, keepdim=True)) - p2) / safe
    top = s_hat * delta
    x = torch.where(simple, 1.0, torch.minimum(x.clamp_min(0), top).maximum(1e-6 * top))
    look, least = 1 if p.device.type == "cpu" else FAR_LOOK, 1e-9 * top
    for count in range(1, max_iterations + 1):
        y = x + gap
        q = r / y
        t = 1 / q.sum(-1, keepdim=True)
        share = p1 * t
        miss = delta - torch.addcmul(share, p2, x)
        if count % look == 0 and count < max_iterations:
            (settled,) = yield [(simple | ((miss * slope).abs() <= gamma * (1 + x))).all()]
            if bool(settled):
                break
        x = x + miss / torch.addcmul(p2, share * t, (q / y).sum(-1, keepdim=True))
        x = x.clamp(least, top)
    f = p2 * x + p1 / (r / (x + gap)).sum(-1, keepdim=True)
    up = x + ((delta * (1 + 4 * UNIT) - f * (1 - gamma)) * slope).clamp_min(0)
    low = x - ((f * (1 + gamma) - delta * (1 - 4 * UNIT)) * slope).clamp_min(0)
    exact = torch.where(delta <= 0, p2, torch.zeros_like(p2))
    upper = torch.where(simple, exact, p2 * (1 + torch.minimum(up, top * (1 + gamma))))
    upper = upper * (1 + gamma)
    lower = torch.where(simple, exact, p2 * (1 + low.clamp_min(0))) * (1 - gamma)
    # rounding of subnormal numbers is absolute
    upper = torch.where(upper > 0, upper + n * 5e-324, upper)
    return Enclosure(lower[:, 0], upper[:, 0])


def g(p: Tensor, k: int = 1) -> Tensor:
    r"""Return :math:`g_k(p) = p_{(k)} (1 - p_{(k)} + p_{(k+1)})` for every row.

    It bounds the k-th singular value of M(p) from above. Order statistics are decreasing,
    :math:`p_{(N+1)} = 0` (Yudin et al. 2025, Definition 1 and Theorem 4). For k = 1 the factor is
    evaluated as :math:`\sum_{i \ge 2} p_{(i)} + p_{(2)}`: the printed form cancels, and in float32
    falls below the norm it should bound: Lemma 11 (docs/theory/softmax.md).

    Args:
        p: (..., N), rows summing to one.
        k: 1 ... N.

    Returns:
        (...), in the dtype of ``p``; differentiable.
    """
    n = p.shape[-1]
    if not 1 <= k <= n:
        raise LipboundError(f"k is {k}; it must be between 1 and the row length {n}")
    top, where = p.topk(min(k + 1, n), -1)
    value = top[..., k - 1]
    following = top[..., k] if k < n else torch.zeros_like(value)
    if k == 1:
        others = p.scatter(-1, where[..., :1], 0.0).sum(-1)
        return value * (others + following)
    return value * (1 - value + following)


def largest_jacobian_norm(p: Tensor) -> Tensor:
    """Return max_i ||M(p_i)|| over the rows of each matrix, (...), rounded upwards, float64.

    Rows are solved for in the order of their g_1, until that of no other is larger but for
    rounding: Lemma 13 (docs/theory/softmax.md). The derivative is that of :math:`y^T M(p_i) y` at a
    top eigenvector y of the row that attains the maximum.

    Args:
        p: matrices, (..., N, N).
    """
    return finished(largest_jacobian_routine(p))


def largest_jacobian_routine(p: Tensor) -> Routine[Tensor]:
    """Return `largest_jacobian_norm`."""
    double, n = normalised(p.detach()), p.shape[-1]
    norms = g(double) * (1 + 2 * (n + 8) * UNIT)
    count, steps = (FIRST, STEPS) if p.device.type == "cpu" else (FAR_FIRST, FAR_LOOK)
    first = norms.topk(min(count, p.shape[-2]), -1).indices
    rows = double.take_along_dim(first[..., None], -2).flatten(0, -2)
    found = yield from _enclosed(rows, steps)
    lower, upper = (end.view(first.shape) for end in found)
    norms.scatter_(-1, first, upper)
    most = lower.amax(-1, keepdim=True) * (1 + 16 * (n + 20) * UNIT)
    (larger,) = yield [norms > most]  # or not settled yet
    if bool(larger.any()):
        places = tuple(t.to(p.device) for t in larger.nonzero(as_tuple=True))
        norms[places] = (yield from _enclosed(double[places])).upper
    norm, where = norms.max(-1)
    if not (p.requires_grad and torch.is_grad_enabled()):
        return norm
    place = where[..., None, None].expand(*where.shape, 1, p.shape[-1])
    row = normalised(p.gather(-2, place))[..., 0, :]
    y = top_eigenvector(row.detach())
    form = (row * (y - (row * y).sum(-1, keepdim=True)) ** 2).sum(-1)  # y^T M y
    return norm + (form - form.detach())


def top_eigenvector(p: Tensor) -> Tensor:
    r"""Return a unit eigenvector of M(p) for its norm, for rows (..., N) that sum to one.

    Of one-hot and all-zero rows, where M is zero, the zero vector. In the notation of Lemma 11
    (docs/theory/softmax.md) its entry at :math:`p_1` is :math:`\sum_{i \ge 2} r_i/(x^* + a_i)`, and
    entry i the negative of the i-th summand; where two entries tie at the top, it is their
    difference.
    """
    if p.shape[-1] == 1:
        return torch.zeros_like(p)
    where = p.argmax(-1, keepdim=True)
    p1, rest = p.gather(-1, where), p.scatter(-1, where, 0.0)
    p2, second = rest.max(-1, keepdim=True)
    tie = p1 <= p2
    safe = torch.where(p2 > 0, p2, 1.0)
    x = (jacobian_norm(p).upper[..., None] - p2) / safe
    gap = torch.where(rest > 0, (p2 - rest) / safe, 1.0)
    q = torch.where(rest > 0, rest / safe, 0.0) / (x.clamp_min(1e-300) + gap)
    y = torch.where(tie, torch.zeros_like(p).scatter(-1, second, 1.0), q)
    y = (y / y.amax(-1, keepdim=True).clamp_min(1e-300)).neg().scatter(-1, where, 0.0)
    y = y.scatter(-1, where, -y.sum(-1, keepdim=True))
    y = y / y.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return torch.where(p2 > 0, y, 0.0)


def largest_entry_norm(p: Tensor) -> Tensor:
    r"""Return :math:`\|M(p)\|_{\infty \to \infty} = \max_i 2 p_i (1 - p_i)` of every row.

    It bounds the norm in every l_p (Nair 2025); the norm in :math:`\ell_1` is the same.
    :math:`1 - p_i` is the sum of the other entries, from which nothing cancels: Lemma 100
    (docs/theory/token_bounds.md).

    Args:
        p: (..., N), rows summing to one.

    Returns:
        (...), in the dtype of ``p``; differentiable. The largest value is at the entry nearest 1/2:
        the largest, or, of ties, one of them.

    >>> float(largest_entry_norm(torch.tensor([0.75, 0.25])))
    0.375
    """
    top, where = p.max(-1, keepdim=True)
    others = p.scatter(-1, where, 0.0)
    return 2 * (top * others.sum(-1, keepdim=True))[..., 0]


def splitting_bound(p: Tensor) -> Tensor:
    r"""Return a cheap upper value of :math:`\theta(p)` of every row.

    :math:`\theta(p) = \|M(p)\|_{\infty \to 1} = 4 \max_S p(S)(1 - p(S))` over subsets S of the
    entries (Emadi 2026) is the largest sum of changes of probabilities when no score
    changes by more than 1. The value is :math:`4 p_{(1)} (1 - p_{(1)})` where the largest entry is
    at least 1/2, which is exact, and 1 elsewhere: Lemma 101 (docs/theory/token_bounds.md). The
    factor :math:`1 - p_{(1)}` is the sum of the other entries, from which nothing cancels.

    Args:
        p: (..., N), rows summing to one up to rounding; rows of zeros (padding) have 0.

    Returns:
        (...), in the dtype of ``p``; differentiable.

    >>> splitting_bound(torch.tensor([[0.75, 0.25], [0.5, 0.5]])).tolist()
    [0.75, 1.0]
    """
    others = p.scatter(-1, p.argmax(-1, keepdim=True), 0.0).sum(-1).clamp_max(0.5)
    return 4 * others * (1 - others)
