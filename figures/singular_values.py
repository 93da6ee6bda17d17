"""All singular values of the Jacobian of the softmax, and the chain of Theorem 4 of Yudin et al."""

import itertools

import torch
from torch import Tensor

from lipbound.attention.softmax import Enclosure, g, normalised
from lipbound.errors import LipboundError

BISECTED = 2**17
"""Entries handled at a time by `singular_value`: what a cache holds."""


def singular_value(p: Tensor, k: int) -> Enclosure:
    r"""Return the k-th singular value of M(p) for every row, enclosed: O(N) a row and round.

    By bisection between :math:`p_{(k+1)}` and :math:`p_{(k)}`, which interlace with the singular
    values and between which :math:`\sum_i p_i/(p_i - \lambda)` rises from minus to plus infinity,
    so that its only root there is the one; in :math:`\mu = \lambda - p_{(k+1)}`, so
    that differences :math:`p_i - \lambda` do not cancel, and over the floating-point numbers
    themselves, which takes 64 rounds however small :math:`\mu` is.

    Args:
        p: (..., N), rows summing to one.
        k: 1 ... N, else LipboundError is raised.

    Returns:
        `Enclosure` of shape (...), float64: neighbouring numbers between which the computed left
        side changes sign; to a few roundings.
    """
    n = p.shape[-1]
    if not 1 <= k <= n:
        raise LipboundError(f"k is {k}; it must be between 1 and the row length {n}")
    rows = p.reshape(-1, n)
    parts = rows.split(max(1, BISECTED // n))
    ends = zip(*(_bisect(part, k) for part in parts), strict=True)
    return Enclosure(*(torch.cat(end).view(p.shape[:-1]) for end in ends))


def _bisect(p: Tensor, k: int) -> Enclosure:
    p = normalised(p).sort(-1, descending=True).values
    if k == p.shape[-1]:
        return Enclosure(torch.zeros_like(p[:, 0]), torch.zeros_like(p[:, 0]))
    base, top = p[:, k : k + 1], p[:, k - 1 : k]
    shifted = p - base  # exact where p is within a factor of two of it
    # bit patterns of numbers >= 0 are in their order
    low, high = torch.zeros_like(base, dtype=torch.int64), (top - base).view(torch.int64)
    for _ in range(64):
        middle = low + (high - low) // 2
        rises = (p / (shifted - middle.view(torch.float64))).sum(-1, keepdim=True) > 0
        low, high = torch.where(rises, low, middle), torch.where(rises, middle, high)
    # where only k entries are positive M has rank k - 1
    ends = (torch.where(base == 0, 0.0, base + t.view(torch.float64))[:, 0] for t in (low, high))
    return Enclosure(*ends)


def interlacing(p: Tensor, links: int) -> Tensor:
    r"""Return the slack of first links of Theorem 4 of Yudin et al. 2025, (..., links), float64.

    Where the theorem holds it is never negative, up to rounding. The chain is :math:`p_{(1)} \ge
    g_1 \ge \sigma_1 \ge p_{(2)} \ge g_2 \ge \sigma_2 \ge \dots \ge p_{(n)} \ge g_n \ge \sigma_n =
    0`, of 3 N - 1 links. Slack is the difference of neighbours over the left one (0 where both are
    0); of the interval that encloses a singular value the end is taken that makes it smaller.

    Args:
        p: (..., N), rows summing to one, N at least 2.
        links: how many, at most 3 N - 1; a third of them need a singular value each.

    Raises:
        LipboundError: ``links`` is not between 1 and 3 N - 1.
    """
    n = p.shape[-1]
    if not 1 <= links <= 3 * n - 1:
        raise LipboundError(
            f"links is {links}; the chain for rows of length {n} has 1 to {3 * n - 1}"
        )
    p = normalised(p)
    ordered = p.sort(-1, descending=True).values
    members: list[tuple[Tensor, Tensor]] = []
    for k in range(1, links // 3 + 2):
        members += [(ordered[..., k - 1],) * 2, (g(p, k),) * 2]
        members.append(singular_value(p, k) if k < n else (torch.zeros_like(ordered[..., 0]),) * 2)
    slacks = []
    for (left, _), (_, right) in itertools.pairwise(members[: links + 1]):
        relative = (left - right) / left.clamp_min(torch.finfo(left.dtype).tiny)
        slacks.append(torch.where(left > 0, relative, -right))
    return torch.stack(slacks, -1)
