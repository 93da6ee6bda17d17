r"""Upper values of the largest :math:`\|X^T M(P_i)\|` over the rows of attention matrices."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lipbound.devices import Routine
from lipbound.linalg.matrix_norms import gamma, top_eigenpair, top_eigenvalue, with_derivative

ROUNDS, FAR_ROUNDS = tuple(range(1, 34, 4)), (1, 9, 33)
"""Numbers of rows of a head that are solved for by the end of each round at most, on a CPU and on a
GPU, which waits between rounds. They come by falling cheap upper values, so that the first is
nearly always the largest; those left over after the last round keep these values."""
BYTES, FAR_BYTES = 2**26, 2**28
"""Sizes in bytes of the largest temporary over rows of several heads, on a CPU and on a GPU."""
FLUSHED = 2.0**-120
"""Entries of a matrix that count as zero, relative to its largest."""
_VANISHED = 2.0**-1000
"""Upper value of what underflow takes from fourth powers of deviations."""
_FAINT = 2.0**-500
"""Deviations of rows, of inputs of ordinary size, below which nothing depends on their digits: this
much is added to all of them."""


def weighted_deviation_norm(x: Tensor, p: Tensor) -> Routine[Tensor]:
    r"""Return upper values of :math:`\max_i \|X^T M(P_i)\|`, (samples, heads), float64.

    Every row gets a cheap upper value from a few N x N products; rows are then solved for exactly,
    in the order of those values, until no other row can be larger. Rows left over after the last of
    `ROUNDS` count with their upper values: the result is always an upper value, and the exact
    maximum when the rounds suffice: Lemma 51 (docs/theory/numerics.md); rounding is included:
    Lemma 85 (docs/theory/upper_values.md). The derivative is that of one row at a top singular
    pair. Cost O(N^3 + N^2 D), and a few eigenvalue problems per head.

    Args:
        x: inputs, (samples, N, D), whose largest entry is 0 or from 1e-60 to 1e60.
        p: probabilities, (samples, heads, N, N).
    """
    x, p = x.double(), p.double()
    step = 1 if x.device.type == "cpu" else len(x)  # a GPU waits for all samples at once
    values = []
    for some, rows in zip(x.split(step), p.split(step), strict=True):
        order, cheap, exact = yield from _largest(some.detach(), rows.detach())
        left_over = exact.isneginf()
        value, place = torch.where(left_over, cheap, exact).max(-1)
        if some.requires_grad or rows.requires_grad:
            row, open_ = (t.gather(-1, place[..., None]) for t in (order, left_over))
            value = with_derivative(value, _form(row, open_, some, rows))
        values.append(value)
    return torch.cat(values)


def _inner_products(x: Tensor) -> Tensor:
    centred = x - x.mean(-2, keepdim=True)
    return centred @ centred.mT


def _largest(x: Tensor, p: Tensor) -> Routine[tuple[Tensor, Tensor, Tensor]]:
    """Upper values of the norms of the rows of each head that may be the largest.

    Returns:
        The rows by falling cheap upper values, (samples, heads, r); these values; and the norms of
        those that were solved for, minus infinity for the others.
    """
    samples, heads, n, _ = p.shape
    near = x.device.type == "cpu"
    rounds, size = (ROUNDS, BYTES) if near else (FAR_ROUNDS, FAR_BYTES)
    k, step = _inner_products(x), max(1, size // (8 * samples * n))
    every = [_upper_values(k, x.shape[2], part) for part in p.flatten(1, 2).split(step, 1)]
    upper = (torch.cat(every, -1) if len(every) > 1 else every[0]).view(samples, heads, n)
    upper = upper.nan_to_num(nan=torch.inf, posinf=torch.inf)
    cheap, rows = upper.topk(min(n, rounds[-1] + 1), -1)  # the last is left over, but for short x
    exact, step = torch.full_like(cheap, -torch.inf), max(1, size // (8 * x[0].numel()))
    open_ = torch.ones(samples, heads, 1, dtype=torch.bool)
    for start, end in pairwise((0, *rounds)):
        if start:
            (open_,) = yield [cheap[..., start:end] > exact.amax(-1, keepdim=True)]
        places = open_.nonzero().to(x.device)
        if not len(places):
            break
        for part in places.split(step):
            s, h, i = part.unbind(-1)
            i = i + start
            exact[s, h, i] = _exact(x, s, p[s, h, rows[s, h, i]])
    return rows, cheap, exact


def _form(row: Tensor, open_: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """Return values with the derivative of one row (samples, heads, 1) of each head.

    At a top singular pair of X^T M, or that of the cheap upper value where it is still ``open_``.
    """
    rows = p.take_along_dim(row[..., None], 2)  # (samples, heads, 1, N)
    heaviest = rows.detach().argmax(-1)
    y = x[:, None] - x[:, None].take_along_dim(heaviest[..., None], 2)
    z = rows.mT * (y - rows @ y)
    z = z if z.shape[-2] <= z.shape[-1] else z.mT
    unit = z.detach() / z.detach().abs().amax((-1, -2), keepdim=True).clamp_min(1e-300)
    u = top_eigenpair(unit @ unit.mT)[1]
    image = z.mT @ u
    form = (normalize(image.detach(), dim=-2, eps=1e-300) * image).sum((-1, -2))
    cheap = _upper_values(_inner_products(x), x.shape[-1], rows[:, :, 0])
    return torch.where(open_[..., 0], cheap, form)


def _upper_values(k: Tensor, width: int, p: Tensor) -> Tensor:
    """Return Wolkowicz and Styan's upper values of ||X^T M(P_i)||, (samples, rows).

    Of rows p (samples, rows, N); k = X X^T for centred x of this width, (samples, N, N).
    """
    n, diagonal = k.shape[-1], k.diagonal(dim1=-2, dim2=-1)[..., None]
    m, w, c = min(n, width), p * p, p @ k  # c_ij = mean_i . x_j
    # so that k_jl - a_j - a_l is an inner product
    a = torch.sub(c, (c * p).sum(-1, keepdim=True), alpha=0.5)
    # sums over j of w_j times 1, a_j and a_j^2, and over j, l of w_j w_l times k_jl a_l, k_jl^2
    wa = w * a
    mass, first, second = w.sum(-1), wa.sum(-1), (wa * a).sum(-1)
    squares = torch.addcmul((w @ (k * k)) * w, w @ k, wa, value=-4).sum(-1)
    f = torch.addcmul(torch.addcmul(squares, second, mass, value=2), first, first, value=2)
    t = torch.sub((w @ diagonal)[..., 0], first, alpha=2)
    per, size = 5 * gamma(4 * n + 2 * width + 60), diagonal.detach().amax(-2) * mass.detach()
    # t may be off by their product
    low = torch.sub(t, size, alpha=per).clamp_min(0)
    high, f = torch.add(t, size, alpha=per), torch.addcmul(f, size, size, value=4 * per)
    room = torch.addcmul(f, low, low, value=-1 / m).clamp_min(_VANISHED).sqrt()
    square = torch.minimum(torch.add(high / m, room, alpha=(1 - 1 / m) ** 0.5), high)
    return square.clamp_min(_VANISHED**0.5).sqrt() * (1 + gamma(40))


def _exact(x: Tensor, samples: Tensor, p: Tensor) -> Tensor:
    """Return upper values of ||X^T M(p)|| of rows p (rows, N) of some samples, (rows,).

    By dense decompositions. Centred at each row's heaviest token, which avoids cancellation.
    """
    n, width = x.shape[1:]
    z = x[samples]
    z.sub_(x[samples, p.argmax(-1), None])
    distances = torch.linalg.vector_norm(z, dim=-1)
    lengths = p * distances  # at most N times as small as the columns of X^T M
    scale = lengths.amax(-1, keepdim=True).clamp_min(_FAINT)
    weights = p / scale  # subnormal products take a hundred times as long
    weights.masked_fill_(weights * distances.amax(-1, keepdim=True) < FLUSHED, 0.0)
    z.sub_(p[..., None, :] @ z).mul_(weights[..., None])
    z = z if n <= width else z.mT
    g = z @ z.mT
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)
    top = top_eigenvalue(g).clamp_min(0)
    top = torch.add(top, trace, alpha=2 * gamma(9 * (n + width) + 4))
    norm = (top.sqrt() + 4 * FLUSHED * n**0.5) * scale[..., 0] + _FAINT
    return torch.add(norm, lengths.sum(-1), alpha=2 * gamma(n + 12)) * (1 + gamma(20))
