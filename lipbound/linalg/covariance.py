r"""Upper values of the largest :math:`\|X^T M(P_i)\|` over the rows of attention matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.devices import Routine
from lipbound.linalg.matrix_norms import gamma, top_eigenvalue, with_derivative

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
    """Upper values of the largest norm of each head, and the rows that they come from.

    Attributes:
        value: the upper values, (heads,).
        rows: of each head, by falling cheap upper values, (heads, r).
        exact: norms of these rows, minus infinity where they were not solved for, (heads, r).
        left: the largest cheap upper value of the other rows, (heads,).
    """

    value: Tensor
    rows: Tensor
    exact: Tensor
    left: Tensor


def weighted_deviation_norm(x: Tensor, p: Tensor) -> Routine[Tensor]:
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
        found = yield from _one_sample(one.detach(), rows.detach().double())
        derived = one.requires_grad or rows.requires_grad
        values.append(_derived(found, one, rows.double()) if derived else found.value)
    return torch.stack(values)


def _inner_products(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred @ centred.T


def _one_sample(x: Tensor, p: Tensor) -> Routine[Largest]:
    heads, n, _ = p.shape
    k, step = _inner_products(x), max(1, int(BYTES // (8 * heads * n)))
    parts = [_upper_values(k, x.shape[1], p[:, i : i + step]) for i in range(0, n, step)]
    upper = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    upper = upper.nan_to_num(nan=torch.inf, posinf=torch.inf)
    most = min(n, 2 + _ROWS * (ROUNDS - 1))
    upper, rows = upper.topk(most, -1)  # the last is left over, unless these are all
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    exact = torch.full_like(upper, -torch.inf)
    active = torch.arange(heads, device=x.device)
    for turn in range(ROUNDS):
        start, end = max(0, 1 + _ROWS * (turn - 1)), 1 + _ROWS * turn
        places = active[:, None], rows[active, start:end]
        exact[active, start:end] = _exact(x, distances, p[places])
        best = exact.amax(-1)
        left = upper[:, end] if end < most else torch.full_like(best, -torch.inf)
        (open_,) = yield [left > best]
        active = open_.nonzero()[:, 0].to(x.device)
        if not len(active):
            break
    return Largest(torch.maximum(best, left), rows, exact, left)


def _derived(found: Largest, x: Tensor, p: Tensor) -> Tensor:
    """Return the values with the derivative of the row each comes from.

    At a top singular pair of X^T M, or that of the cheap upper value.
    """
    best, where = found.exact.max(-1)
    solved = best >= found.left
    where = torch.where(solved, where, (found.exact > -torch.inf).sum(-1))  # or the one left over
    row = found.rows.gather(-1, where[:, None])[:, 0]
    rows = p[torch.arange(len(p), device=p.device), row]
    y = x - x[rows.detach().argmax(-1)][:, None]  # (heads, N, D)
    z = rows[..., None] * (y - rows[:, None] @ y)
    u, _, vh = torch.linalg.svd(z.detach(), full_matrices=False)
    form = (u[:, None, :, 0] @ z @ vh[:, 0, :, None])[:, 0, 0]
    if not bool(solved.all()):
        cheap = _upper_values(_inner_products(x), x.shape[1], rows[:, None])[:, 0]
        form = torch.where(solved, form, cheap)
    return with_derivative(found.value, form)


def _upper_values(k: Tensor, width: int, p: Tensor) -> Tensor:
    """Return Wolkowicz and Styan's upper values of ||X^T M(P_i)||, (heads, rows).

    Of rows p (heads, rows, N); k = X X^T for centred x of this width.
    """
    (n, m), (w, c) = (len(k), min(len(k), width)), (p * p, p @ k)  # c_ij = mean_i . x_j
    # so that k_jl - a_j - a_l is an inner product
    a = torch.sub(c, (c * p).sum(-1, keepdim=True), alpha=0.5)
    # sums over j of w_j times 1, a_j and a_j^2, and over j, l of w_j w_l times k_jl a_l, k_jl^2
    wa = w * a
    mass, first, second = w.sum(-1), wa.sum(-1), (wa * a).sum(-1)
    squares = torch.addcmul((w @ (k * k)) * w, w @ k, wa, value=-4).sum(-1)
    f = torch.addcmul(torch.addcmul(squares, second, mass, value=2), first, first, value=2)
    t, per = torch.sub(w @ k.diagonal(), first, alpha=2), 5 * gamma(4 * n + 2 * width + 60)
    size = k.diagonal().detach().amax() * mass.detach()  # per times which t may be off by
    low = torch.sub(t, size, alpha=per).clamp_min(0)
    high, f = torch.add(t, size, alpha=per), torch.addcmul(f, size, size, value=4 * per)
    room = torch.addcmul(f, low, low, value=-1 / m).clamp_min(_VANISHED).sqrt()
    square = torch.minimum(torch.add(high / m, room, alpha=(1 - 1 / m) ** 0.5), high)
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
    top = top_eigenvalue(g).clamp_min(0)
    top = torch.add(top, trace, alpha=2 * gamma(9 * (n + width) + 4))
    norm = (top.sqrt() + 4 * FLUSHED * n**0.5) * scale[..., 0] + _FAINT
    return torch.add(norm, lengths.sum(-1), alpha=2 * gamma(n + 12)) * (1 + gamma(20))
