"""What the matrices of our bounds are made from: products, lengths and roots that round upwards or
say by how much they may be off."""

import torch
from torch import Tensor

from lipbound.devices import Room
from lipbound.linalg.matrix_norms import gamma

TINIEST = 2.0**-470
"""Stands for smaller sizes where something is divided by them: far above 2^-537, below which
squares vanish and sizes with them, so that quotients stay small."""
SQUARINGS = 1
"""How often the Gram matrices of B_t and B_t W_V are squared: they are small beside other terms,
and once more would take 1e-4 off the bounds."""


def mean(p: Tensor, x: Tensor) -> Tensor:
    """P x for vectors x (heads, N), without derivative."""
    return (x[..., None, :] @ p.detach().mT)[..., 0, :]


def lengths(x: Tensor) -> Tensor:
    """Of rows, without derivative: what allowances are made of."""
    return x.detach().norm(dim=-1)


def scaled_lengths(x: Tensor) -> Tensor:
    """Lengths of rows of numbers >= 0 whose squares may underflow, without derivative,
    (..., n, 1)."""
    most = x.detach().amax(-1, keepdim=True).clamp_min(1e-300)
    return most * (x.detach() / most).norm(dim=-1, keepdim=True)


def upper_lengths(x: Tensor) -> Tensor:
    """Upper values of lengths of rows in any dtype, float64: the rounding of squares and of their
    sum is relative."""
    return torch.linalg.vector_norm(x, dim=-1).double() * (1 + gamma(x.shape[-1] + 4, x.dtype))


def root(x: Tensor) -> Tensor:
    """Square root whose derivative at 0 is 0; NaN of NaN and of numbers < 0."""
    return (
        torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x).sqrt())
        if x.requires_grad
        else x.sqrt()
    )


def each_times(maps: Tensor, m: Tensor) -> Tensor:
    """Products of maps (heads, n, a, b) with one matrix a head, (heads, b, r), as one product: a
    copy of it for each would cost more."""
    return (maps.flatten(1, 2) @ m).unflatten(1, maps.shape[1:3])


def outer(x: Tensor, y: Tensor, room: Room | None = None) -> Tensor:
    """Rows of outer products, (heads, N, a) and (heads, N, b) -> (heads, N, a b); in ``room`` where
    no derivative is wanted."""
    left, right = x[..., :, None], y[..., None, :]
    if room is None or torch.is_grad_enabled():
        return (left * right).flatten(-2)
    return torch.mul(left, right, out=room.take(x, *x.shape, y.shape[-1])).flatten(-2)


def normalised(m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrices, those of their absolute values made no longer than 1 in the 2-norm, and by what
    they were divided, (n or 1, 1)."""
    size = m.detach().abs()
    size = torch.minimum(
        torch.linalg.matrix_norm(size), (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()
    )[:, None]
    return (m / size.clamp_min(TINIEST)[..., None]).to(dtype), size


def divided(x: Tensor, by: Tensor, work: torch.dtype) -> Tensor:
    """x / by in another dtype; without a temporary where no derivative is wanted."""
    return (
        (x / by).to(work)
        if torch.is_grad_enabled()
        else torch.div(x, by, out=torch.empty_like(x, dtype=work))
    )


def seen(t: Tensor, step: int) -> list[tuple[slice, slice, slice]]:
    """Parts of so many tokens; the queries that see some of them as keys, from first to last; the
    keys that they see as queries.

    t: entries that are zero where nothing is seen, (N, N), or bool.
    """
    ends = []
    for m in (t.detach().mT, t.detach()):
        order = (m != 0).to(torch.uint8)
        most, first = order.max(-1)
        last = len(t) - order.flip(-1).argmax(-1)
        ends += [
            torch.where(most > 0, first, len(t)).tolist(),
            torch.where(most > 0, last, 0).tolist(),
        ]
    found = []
    for part in (slice(i, min(i + step, len(t))) for i in range(0, len(t), step)):
        low, high, left, right = (
            min(ends[0][part]),
            max(ends[1][part]),
            min(ends[2][part]),
            max(ends[3][part]),
        )
        found.append((part, slice(low, max(low, high)), slice(left, max(left, right))))
    return found
