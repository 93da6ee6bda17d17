r"""Norms of the softmax Jacobian other than the spectral one: in every l_p, and from the largest
entry to the sum of entries.

Sources: Nair 2025, "Softmax is 1/2-Lipschitz: A tight bound across all l_p norms" (arXiv
2510.23012); Emadi 2026 (arXiv 2602.18849, abstract and quotations). Rows are always the last axis.
"""

import torch
from torch import Tensor

from lipbound.attention.softmax.spectrum import ROWS, Enclosure, normalised
from lipbound.attention.variants.base import UNIT
from lipbound.errors import LipboundError, whole

LARGEST_LP_NORM = 0.5
r"""The smallest number that bounds :math:`\|M(p)\|_{p \to p}` for all probability rows, in every
l_p (Nair 2025): Lemma 100 (docs/theory/token_bounds.md)."""


def largest_entry_norm(p: Tensor) -> Tensor:
    r""":math:`\|M(p)\|_{\infty \to \infty} = \max_i 2 p_i (1 - p_i)` of every row (Nair 2025),
    which bounds the norm in every l_p.

    It is that of :math:`\ell_1` too. :math:`1 - p_i` is the sum of the other entries, from which
    nothing cancels: Lemma 100 (docs/theory/token_bounds.md).

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


def splitting_norm(p: Tensor, *, largest: int = 24) -> Enclosure:
    r""":math:`\theta(p) = \|M(p)\|_{\infty \to 1} = 4 \max_S p(S)(1 - p(S))` of every row (Emadi
    2026), between two numbers.

    What the sum of all changes of probabilities can be when no score changes by more than 1; near 1
    where the entries can be split into two halves. All subsets of the largest entries are looked
    at, by sorted sums of two halves of them; for the lower end the others are added to them one
    after the other, for the upper they may be split at will. Exact to rounding for rows with at
    most ``largest`` entries that are not zero, and where one entry is at least 1/2: Lemma 101
    (docs/theory/token_bounds.md).

    Args:
        p: (..., N), rows summing to one up to rounding; rows of zeros (padding) have norm 0.
        largest: entries whose subsets are all looked at, 1 to 40; 2^(largest/2) numbers a row.

    Returns:
        `Enclosure` of shape (...), float64.

    Raises:
        LipboundError: ``largest`` is none of these numbers.

    >>> [round(float(end), 12) for end in splitting_norm(torch.tensor([0.75, 0.25]))]
    [0.75, 0.75]
    """
    if not 1 <= whole("largest", largest) <= 40:
        raise LipboundError(
            f"largest is {largest}; it must be between 1 and 40, as 2^(largest/2) sums are kept "
            "for each row"
        )
    rows = p.detach().reshape(-1, p.shape[-1])
    k = min(largest, p.shape[-1])
    parts = [_split(part, k) for part in rows.split(max(1, ROWS >> ((k + 1) // 2)))]
    lower, upper = (torch.cat(ends) for ends in zip(*parts, strict=True))
    return Enclosure(lower.view(p.shape[:-1]), upper.view(p.shape[:-1]))


def _split(p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    p = normalised(p).sort(-1, descending=True).values
    n = p.shape[-1]
    error = 16 * (n + 20) * UNIT
    top, others = p[:, 0], p[:, 1:].sum(-1)
    alone = 4 * top * others  # where one entry is at least a half

    left, right = _sums(p[:, : k - k // 2]), _sums(p[:, k - k // 2 : k]).sort(-1).values
    rest, wanted = p[:, k:], 0.5 - left
    rest_sum = rest.sum(-1, keepdim=True)
    after = torch.searchsorted(right, wanted.contiguous())  # sums that are at least a half
    above = (left + right.gather(-1, after.clamp_max(right.shape[-1] - 1))).masked_fill(
        after == right.shape[-1], torch.inf
    )
    below = (left + right.gather(-1, (after - 1).clamp_min(0))).masked_fill(after == 0, -torch.inf)
    over, under = above.amin(-1) - 0.5, 0.5 - below.amax(-1)
    gap = torch.minimum(over, (under - rest_sum[:, 0]).clamp_min(0))

    reached = 0.5 - under
    for j in range(rest.shape[-1]):
        fuller = reached + rest[:, j]
        reached = torch.where(fuller <= 0.5, fuller, reached)
    attained = torch.minimum(over, 0.5 - reached)
    lower, upper = 1 - 4 * attained**2 - error, (1 - 4 * gap**2 + error).clamp_max(1.0)
    half = top >= 0.5 * (1 + error)
    lower, upper = (
        torch.where(half, alone * (1 - error), lower),
        torch.where(half, alone * (1 + error) + 5e-324 * (others > 0), upper),
    )
    return lower.clamp_min(0) * (top > 0), upper * (top > 0)


def _sums(p: Tensor) -> Tensor:
    """Sums of all subsets of the entries of each row, (rows, k) -> (rows, 2^k)."""
    sums = p.new_zeros(len(p), 1)
    for entry in p.T:
        sums = torch.cat([sums, sums + entry[:, None]], -1)
    return sums
