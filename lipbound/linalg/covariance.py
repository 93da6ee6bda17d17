r"""Upper values of the largest :math:`\|X^T M(P_i)\|` over the rows of attention matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.linalg.matrix_norms import (
    UNIT,
    eigenvalues,
    gamma,
    power_of_two,
    with_derivative,
)

ROWS = 4
"""Rows of each head solved for at a time, after the first, which is nearly always the largest."""
ROUNDS = 9
"""Rounds after which the remaining rows keep their cheap upper values."""
BYTES = 2**26
"""Size in bytes of the largest temporary over rows of several heads."""
FLUSHED = 2.0**-120
"""Entries of a matrix that count as zero, relative to its largest."""
FAINT = 2.0**-500
"""Deviations of rows, of inputs of ordinary size, below which nothing depends on their digits: this
much is added to all of them."""


class Largest(NamedTuple):
    """The value of each head, its row, and whether that row was solved for."""

    value: Tensor
    row: Tensor
    solved: Tensor


def weighted_deviation_norm(x: Tensor, p: Tensor, stretch: Tensor | None = None) -> Tensor:
    r"""Return upper values of :math:`\max_i f_i\,\|X^T M(P_i)\|`, (samples, heads).

    Every row gets a cheap upper value from a few N x N products; rows are then solved for exactly,
    in the order of those values, until no other row can be larger. Rows left over after `ROUNDS`
    rounds count with their upper values: the result is always an upper value, and the exact maximum
    when the rounds suffice: Lemma 51 (docs/theory/numerics.md); rounding is included: Lemma 85
    (docs/theory/upper_values.md). The derivative is that of one row at a top singular pair. Cost
    O(N^3 + N^2 D), and a few eigenvalue problems per head.

    Args:
        x: inputs, (samples, N, D).
        p: probabilities, (samples, heads, N, N).
        stretch: f, (samples, heads, N), at least 1; what rounding of P takes, for instance. One by
            default.
    """
    unit = power_of_two(x.detach().abs().amax((-2, -1)))
    x = x.double() / unit[:, None, None]
    stretch = torch.ones_like(p[..., 0], dtype=torch.float64) if stretch is None else stretch
    values = []
    for one, rows, factors in zip(x, p, stretch, strict=True):
        with torch.no_grad():
            found = _one_sample(one, rows.double(), factors)
        derived = one.requires_grad or rows.requires_grad
        values.append(_derived(found, one, rows.double(), factors) if derived else found.value)
    return torch.stack(values) * unit[:, None]


def _inner_products(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred @ centred.T


def _one_sample(x: Tensor, p: Tensor, stretch: Tensor) -> Largest:
    heads, n, _ = p.shape
    k, step = _inner_products(x), max(1, int(BYTES // (8 * heads * n)))
    parts = [_upper_values(k, x.shape[1], p[:, i : i + step])[0] for i in range(0, n, step)]
    upper = (torch.cat(parts, -1) * stretch).nan_to_num(nan=torch.inf, posinf=torch.inf)
    best = torch.full((heads,), -torch.inf, dtype=torch.float64, device=x.device)
    where = torch.zeros(heads, dtype=torch.int64, device=x.device)
    active = torch.arange(heads, device=x.device)
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    for turn in range(ROUNDS):
        rows = upper[active].topk(min(ROWS if turn else 1, n), -1).indices
        exact = _exact(x, distances, p[active[:, None], rows]) * stretch[active[:, None], rows]
        upper[active[:, None], rows] = -torch.inf
        top, place = exact.max(-1)
        better = top > best[active]
        best[active] = torch.where(better, top, best[active])
        where[active] = torch.where(better, rows.gather(-1, place[:, None])[:, 0], where[active])
        active = active[upper[active].amax(-1) > best[active]]
        if not len(active):
            break
    left, row = upper.max(-1)
    solved = best >= left
    return Largest(torch.where(solved, best, left), torch.where(solved, where, row), solved)


def _derived(found: Largest, x: Tensor, p: Tensor, stretch: Tensor) -> Tensor:
    """Return the values with the derivative of the row each comes from.

    At a top singular pair of X^T M, or that of the cheap upper value.
    """
    heads = torch.arange(len(p), device=p.device)
    rows = p[heads, found.row]
    y = x - x[rows.detach().argmax(-1)][:, None]  # (heads, N, D)
    z = rows[..., None] * (y - rows[:, None] @ y)
    u, _, vh = torch.linalg.svd(z.detach(), full_matrices=False)
    form = (u[:, None, :, 0] @ z @ vh[:, 0, :, None])[:, 0, 0]
    if not bool(found.solved.all()):
        cheap = _upper_values(_inner_products(x), x.shape[1], rows[:, None])[1][:, 0]
        form = torch.where(found.solved, form, cheap)
    return with_derivative(found.value, form * stretch[heads, found.row])


def _upper_values(k: Tensor, width: int, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return Wolkowicz and Styan's upper values of ||X^T M(P_i)||, and others with derivatives.

    (heads, rows) each, of rows p (heads, rows, N); k = X X^T for x of this width.
    """
    n = len(k)
    w = p * p
    c = p @ k  # c_ij = mean_i . x_j
    s = (c * p).sum(-1, keepdim=True)  # |mean_i|^2
    distance = (k.diagonal() - 2 * c + s).clamp_min(0)
    t = (w * distance).sum(-1)
    # f = sum_jl w_j w_l (k_jl - c_j - c_l + s)^2 = sum_jl w_j w_l (k_jl - c_j)^2 + ..., expanded so
    # that only N x N products occur
    total, wc, wcc = w.sum(-1), (w * c).sum(-1), (w * c * c).sum(-1)
    s = s[..., 0]
    wk = w @ k
    f = ((w @ (k * k)) * w).sum(-1) + 2 * wcc * total + (s * total) ** 2
    f = f - 4 * (wk * w * c).sum(-1) + 2 * s * (wk * w).sum(-1) + 2 * wc**2 - 4 * s * wc * total
    largest, mass = k.diagonal().detach().amax(), total.detach()
    unit = gamma(4 * n + 2 * width + 60) * largest
    slack_t, slack_f = 5 * unit * mass, 20 * unit * largest * mass**2
    m = min(n, width)
    high, low, f = t + slack_t, (t - slack_t).clamp_min(0), f.clamp_min(0) + slack_f
    room = (1 - 1 / m) * (f - low * low / m).clamp_min(0)
    spread = high / m + torch.where(room > 0, torch.where(room > 0, room, 1.0).sqrt(), 0.0)
    square = torch.where(spread * spread <= f, spread, torch.where(f > 0, f, 1.0).sqrt())
    square = torch.where(square <= high, square, high) + 2.0**-1000
    return square.detach().sqrt() * (1 + gamma(40)), square.sqrt()


def _exact(x: Tensor, distances: Tensor, p: Tensor) -> Tensor:
    """Return upper values of ||X^T M(p)|| of rows p (heads, rows, N), by dense decompositions.

    (heads, rows). Centred at each row's heaviest token, which avoids cancellation.
    """
    n, width = x.shape
    heaviest = p.argmax(-1)
    lengths = p * distances[heaviest]  # at most N times as small as the columns of X^T M
    error = gamma(n + 12) * lengths.sum(-1)
    scale = lengths.amax(-1, keepdim=True)
    # p over a subnormal number would overflow, subnormal products take a hundred times as long
    scale = torch.where(scale > 0, scale.clamp_min(FAINT), 1.0)
    weights = torch.where(p * distances.amax() < FLUSHED * scale, 0.0, p / scale)
    z = x - x[heaviest][..., None, :]
    z.sub_(p[..., None, :] @ z).mul_(weights[..., None])
    z = z if n <= width else z.mT
    g = z @ z.mT
    top = eigenvalues(g)[..., -1].clamp_min(0)
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)
    top = top * (1 + 16 * min(n, width) * UNIT) + gamma(max(n, width) + 4) * trace
    norm = (top.sqrt() + 4 * FLUSHED * n**0.5) * scale[..., 0]
    return (norm + 2 * error + FAINT) * (1 + gamma(20))
