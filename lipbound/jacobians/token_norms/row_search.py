"""Largest eigenvalues of many matrices, and largest norms of rows of blocks.

Found by search, then bounded from above by proof.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lipbound.jacobians.token_norms.blocks import Blocks, LayerTensors
from lipbound.linalg.matrix_norms import (
    at_most,
    block_norm,
    decomposed,
    largest_eigenvalue,
    matrix_norm,
    symmetric_norm,
)
from lipbound.linalg.solution import normal_numbers

FIRST_STEPS, STEPS, CONVEX_STEPS, LAST_STEPS = 6, 24, 240, 500
"""Steps of vectors of all rows, of those that are left open, of matrices, and of the best vectors
in the end."""
SETTLED = 2e-13
"""Relative growth of their sums in a step at which they have arrived."""
LEADERS = 4
"""Rows of each map that climb to the end, and half of the blocks that are looked at first."""
_FLOOR = 1e-6
"""Weights are no smaller than this times the size of their block, which keeps rounding small."""
FLAT_BYTES = 2**26
"""Bytes of the blocks that are worked on at a time when each row has its own map."""


class BestRows(NamedTuple):
    """The best row of each of b maps, and what no row exceeds, float64.

    Attributes:
        value: what the search found there, to rounding, (b,).
        token: the row, (b,). source: the token that moves, where there is one, (b,).
        vector: unit vector, (b, r).
        upper: bound on all rows, (b,).
        steps: of the search, (b,).
    """

    value: Tensor
    token: Tensor
    source: Tensor
    vector: Tensor
    upper: Tensor
    steps: Tensor

    @staticmethod
    def cat(found: "list[BestRows]") -> "BestRows":
        """All the maps of several."""
        return BestRows(*map(torch.cat, zip(*found, strict=True)))

    def joined(self, other: "BestRows") -> "BestRows":
        """The better of two, map by map."""
        first = self.value >= other.value
        chosen = {1: first, 2: first[:, None]}
        better = (torch.where(chosen[a.ndim], a, b) for a, b in zip(self, other, strict=True))
        upper, steps = torch.maximum(self.upper, other.upper), self.steps + other.steps
        return BestRows(*better)._replace(upper=upper, steps=steps)


def roots(g: Tensor, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both ends of roots of the largest eigenvalues of matrices (b, i, n, n), and vectors.

    The matrices are positive semi-definite, and known up to ``slack``, (b, i).
    """
    lower, upper, vectors = largest_eigenvalue(g)
    lower = (lower - slack).clamp_min(0).sqrt() * (1 - 1e-15)
    return lower, (upper + slack).sqrt() * (1 + 1e-15), vectors


def best_rows(parts: LayerTensors, chunks: list[slice], norm: str, tol: float) -> BestRows:
    """The best of all tokens of some maps, some at a time, in a norm that tells tokens apart.

    What is known of those before spares work on those after.
    """
    best: BestRows | None = None
    for rows in chunks:
        if norm == "every-token":
            one = steepest(parts.rows(rows), tol, None if best is None else best.value)
        elif norm == "token-pair":
            one = largest_block(parts.rows(rows), tol)
        else:
            one = largest(*parts.squares(rows, columns=norm == "one-token"))
            one = one._replace(token=one.token + rows.start)
        best = one if best is None else best.joined(one)
    assert best is not None
    return best


def largest(g: Tensor, slack: Tensor) -> BestRows:
    """The largest of `roots` over i."""
    lower, upper, vectors = roots(g, slack)
    value, token = lower.max(-1)
    at = torch.arange(len(g), device=g.device)
    return BestRows(value, token, token, vectors[at, token], upper.amax(-1), torch.zeros_like(at))


def largest_block(blocks: Blocks, tol: float) -> BestRows:
    """The largest norm of a block of every map; vectors are of the output.

    Blocks are taken in the order of bounds on them, until what is left lies below the best: Lemma
    92 (docs/theory/token_norms.md).
    """
    every, n, found = blocks.norm_bounds(), blocks.p.shape[-1], []
    size = 32 * blocks.to_v.shape[3] * blocks.width * max(1, blocks.p.shape[2])
    step = max(1, int(FLAT_BYTES // size))
    for m, bounds in enumerate(every.flatten(1)):
        bounds, order = bounds.sort(descending=True)
        best, upper, place = torch.zeros_like(bounds[0]), torch.zeros_like(bounds[0]), order[0]
        vector, first, together = bounds.new_zeros(blocks.width), 0, 2 * LEADERS
        while (left := int((bounds > best * (1 + tol / 2)).sum())) > first:
            part = order[first : min(first + together, left)]
            first, together = first + len(part), step
            chosen = torch.stack([torch.full_like(part, m), part // n, part % n], -1)
            parts, slack = blocks.single(chosen)
            norms = block_norm(parts) + slack
            near = (norms > best * (1 + tol / 2)).nonzero()[:, 0]
            if len(near):
                norms[near] = matrix_norm(parts[near]) + slack[near]
                k = near[norms[near].argmax()]
                values, vectors = decomposed(parts[k].mT @ parts[k])
                if bool(values[-1] > best**2):
                    best, place, vector = values[-1].sqrt(), part[k], vectors[:, -1]
            upper = upper.maximum(norms.amax())
        upper = upper.maximum(bounds[first]) if first < len(order) else upper
        token = blocks.token[m, place // n]
        each = (best, token, place % n, vector, upper, torch.zeros_like(token))
        found.append(BestRows(*(t[None] for t in each)))
    return BestRows.cat(found)


def steepest(blocks: Blocks, tol: float, known: Tensor | None = None) -> BestRows:
    r"""The largest :math:`\sup_{|y|=1} \sum_j |J_{ij}^T y|` over output tokens i, of every map.

    Lemmas 89 and 90 (docs/theory/token_norms.md). Rows that one Cholesky decomposition proves to be
    below the best, or below what is ``known`` (b,) of others, are not looked at again; the others
    stay as wide as the weights leave them.
    """
    at, (h, n, d_v) = torch.arange(len(blocks.p), device=blocks.p.device), blocks.v.shape[1:]
    y, lengths, total = _climb(blocks, starts(blocks), FIRST_STEPS, tol / 500)
    best = total.amax(-1) if known is None else torch.maximum(total.amax(-1), known)
    target = (best * (1 + 0.9 * tol))[:, None].expand_as(total)
    w, weight = block_weights(blocks, lengths, tol)
    g, slack = blocks.matrix(w)
    square = (target * (1 - 1e-14)) ** 2 / weight.clamp_min(1e-300)
    shown = at_most(g, square - slack) | (weight == 0)
    del g
    upper, steps = torch.where(shown, target, torch.inf), torch.full_like(at, FIRST_STEPS)
    each = h * n * (5 * d_v + 40) + blocks.qt[0, 0].numel() * 2 + 4 * blocks.width**2
    for part in (~shown).nonzero().split(max(1, int(FLAT_BYTES // (8 * each)))):
        m, i = part.unbind(-1)
        some = blocks.select(part)
        y[m, i], total[m, i], upper[m, i] = _closed(some, y[m, i], lengths[m, i], tol)
        steps[m] = FIRST_STEPS + CONVEX_STEPS
    leaders = total.topk(min(LEADERS, total.shape[1]), -1).indices
    chosen = torch.stack([at[:, None].expand_as(leaders), leaders], -1).flatten(0, 1)
    last = blocks.select(chosen), y[chosen[:, 0], chosen[:, 1]][:, None, None]
    y, _, total = _climb(*last, LAST_STEPS, SETTLED)
    value, best = total.view_as(leaders).max(-1)
    token, vector = blocks.token[at, leaders[at, best]], y.view(*leaders.shape, -1)[at, best]
    return BestRows(value, token, token, vector, upper.amax(-1), steps)


def _closed(blocks: Blocks, y: Tensor, lengths: Tensor, tol: float) -> tuple[Tensor, ...]:
    """Better vectors (k, r), their sums and upper values (k,) of rows that are left open.

    The bound is minimised over weights, through its dual: matrices of several columns climb
    together from vectors y (k, r), eigenvectors at their weights and a fixed direction without
    preference; then their columns climb by themselves.
    """
    w = torch.where(lengths > 0, 1 / lengths.clamp_min(1e-300), 0.0)
    vectors = decomposed(blocks.matrix(w[:, None])[0])[1].mT.flip(-2)[..., :3, :]
    drawn = _unit(normal_numbers(y.shape[-1], "one more start")[None].to(y.device))
    many = torch.cat([y[:, None, None], vectors, drawn.expand(len(y), 1, -1, -1)], 2)
    many = many / many.shape[2] ** 0.5
    many, lengths, _ = _climb(blocks, many, CONVEX_STEPS, tol / 50_000, together=True)
    upper = bounded(blocks, lengths[:, :, 0], tol)[:, 0]
    many = torch.cat([y[:, None, None], _unit(many)], 2)
    y, _, total = _climb(blocks, many, STEPS, tol / 500)
    return y[:, 0], total[:, 0], upper


def starts(blocks: Blocks) -> Tensor:
    """Unit vectors to climb from, (b, i, 2, r).

    The direction in which values reach furthest, and that of the largest difference of values.
    """
    first = blocks.full.mT @ (blocks.full @ blocks.full.sum(-2, keepdim=True).mT)
    first = first[..., 0].flatten(2)
    weight = torch.linalg.vector_norm(blocks.a, dim=-1)
    index = weight.argmax(-1)[..., None, None].expand(*weight.shape[:-1], 1, blocks.v.shape[-1])
    second = blocks.a.gather(-2, index)[..., 0, :].flatten(2)
    both = torch.stack([first, second], 2)
    return _unit(both if blocks.w_o is None else both @ blocks.w_o.flatten(0, 1))


def _unit(y: Tensor) -> Tensor:
    """Vectors (..., r) divided by their length; where that is zero, one of equal entries."""
    zero = (y == 0).all(-1, keepdim=True)
    return normalize(torch.where(zero, 1.0, y), dim=-1, eps=1e-300)


def _climb(
    blocks: Blocks, y: Tensor, steps: int, tol: float, *, together: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, their lengths and sums after so many steps from y (b, i, s, r).

    Fewer where no sum grows by ``tol`` any more. Of the best of several, (b, i, r), (b, i, n) and
    (b, i); or of the matrix that they are ``together``.
    """
    following, lengths, total = blocks.ascend(y, together=together)
    for _ in range(steps):
        before, y = total, following
        following, lengths, total = blocks.ascend(y, together=together)
        if bool((total <= before * (1 + tol)).all()):
            break
    if together:
        return y, lengths, total
    best = total.argmax(-1)[..., None]
    y, lengths = (t.take_along_dim(best[..., None], 2)[:, :, 0] for t in (y, lengths))
    return y, lengths, total.gather(2, best)[..., 0]


def block_weights(blocks: Blocks, lengths: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Weights 1 / d (b, i, n) and the sums of d, (b, i): Lemma 90 (docs/theory/token_norms.md)."""
    d = torch.maximum(lengths, min(_FLOOR, tol / 100) * blocks.size)
    w = torch.where(d > 1e-290, 1 / d.clamp_min(1e-290), 0.0)
    w = torch.where((blocks.size > 0) & (w == 0), 1e290, w)
    return w, torch.where(w > 0, 1 / w.clamp_min(1e-300), 0.0).sum(-1) * (1 + 1e-12)


def bounded(blocks: Blocks, lengths: Tensor, tol: float) -> Tensor:
    """Upper values of what rows can reach, from weights, (b, i).

    Lemma 90 (docs/theory/token_norms.md).
    """
    w, weight = block_weights(blocks, lengths, tol)
    g, slack = blocks.matrix(w)
    return (weight * (symmetric_norm(g) + slack)).sqrt() * (1 + 1e-14)
