"""Largest eigenvalues of many matrices, and largest norms of rows of blocks.

Found by search, then bounded from above by proof.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lipbound.jacobians.token_norms.block_rows import Blocks
from lipbound.linalg.matrix_norms import (
    at_most,
    block_norm,
    decomposed,
    matrix_norm,
    symmetric_norm,
)
from lipbound.linalg.solution import normal_numbers

POWER_STEPS = 12
LEADERS = 4
"""Matrices, or rows of blocks, of each map that are looked at closely."""
FIRST_STEPS, STEPS = 6, 24
CONVEX_STEPS, ROUNDS = 60, 4
LAST_STEPS, SETTLED = 500, 1e-10
"""Steps of the best rows in the end, and the tolerance to which they climb."""
FLOOR = 1e-6
"""Weights are no smaller than this times the size of their block, which keeps rounding small."""
FLAT_BYTES = 2**26
"""Bytes of the blocks that are worked on at a time when each row has its own map."""


@dataclass(frozen=True, eq=False)
class BestRows:
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
        names = [f.name for f in fields(BestRows)]
        return BestRows(*(torch.cat([getattr(one, name) for one in found]) for name in names))

    def joined(self, other: "BestRows") -> "BestRows":
        """The better of two, map by map."""
        first = self.value >= other.value

        def better(name: str) -> Tensor:
            a, b = getattr(self, name), getattr(other, name)
            return torch.where(first[:, None] if a.ndim > 1 else first, a, b)

        value, token, source, vector = map(better, ("value", "token", "source", "vector"))
        upper, steps = torch.maximum(self.upper, other.upper), self.steps + other.steps
        return BestRows(value, token, source, vector, upper, steps)


def largest(g: Tensor, slack: Tensor, tol: float) -> BestRows:
    """Roots of the largest eigenvalues over i of positive semi-definite matrices (b, i, n, n).

    Their rounding errors are at most ``slack``, (b, i). A matrix that one Cholesky decomposition
    proves to be below the best by ``tol`` is not looked at again.
    """
    b, count, n = g.shape[:3]
    column = torch.linalg.vector_norm(g, dim=-2).argmax(-1)[..., None, None]
    x = g.gather(-1, column.expand(-1, -1, n, 1))
    for _ in range(POWER_STEPS):
        x = g @ (x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(1e-300))
    at = torch.arange(b, device=g.device)
    rayleigh = torch.linalg.vector_norm(x, dim=(-2, -1))
    leaders = rayleigh.topk(min(LEADERS, count), -1).indices
    top, vectors = _top(g[at[:, None], leaders])
    best = top.argmax(-1)
    value, token, vector = top[at, best], leaders[at, best], vectors[at, best]
    target = (value * (1 + tol))[:, None]
    upper = torch.where(at_most(g, target - slack), target, torch.inf)
    rows, places = (upper == torch.inf).nonzero(as_tuple=True)
    if len(rows):
        upper[rows, places] = symmetric_norm(g[rows, places]) + slack[rows, places]
        for m, i in zip(rows.tolist(), places.tolist(), strict=True):
            if float(upper[m, i]) > float(value[m]) * (1 + tol):
                one, its = _top(g[m, i][None])
                if float(one[0]) > float(value[m]):
                    value[m], token[m], vector[m] = one[0], i, its[0]
    value, most = value.clamp_min(0).sqrt(), upper.amax(-1).sqrt()
    return BestRows(value, token, token, vector, most, torch.full_like(token, POWER_STEPS))


def _top(g: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues and their vectors."""
    values, vectors = decomposed(g)
    return values[..., -1], vectors[..., -1]


def largest_block(blocks: Blocks, tol: float) -> BestRows:
    """The largest norm of a block of every map; vectors are of the output.

    Lemma 92 (docs/theory/token_norms.md).
    """
    b = blocks.rows[0]
    bounds = blocks.norm_bounds()
    n, flat = bounds.shape[-1], bounds.flatten(1)
    line = torch.arange(b, device=flat.device)
    order = flat.topk(min(2 * LEADERS, flat.shape[1]), -1).indices
    chosen = torch.stack([line[:, None].expand_as(order), order // n, order % n], -1)
    parts = blocks.single(chosen.flatten(0, 1))[0]
    top, vectors = _top((parts.mT @ parts).unflatten(0, (b, -1)))
    best = top.argmax(-1)
    value, place = top[line, best].clamp_min(0).sqrt(), order[line, best]
    vector = vectors[line, best]
    open_ = flat > (value * (1 + tol / 2))[:, None]
    upper, left = torch.where(open_, 0.0, flat).amax(-1).clamp_min(0), open_.nonzero()
    size = 32 * blocks.to_v.shape[3] * blocks.width * max(1, blocks.p.shape[2])
    step = max(1, int(FLAT_BYTES // size))
    for k in range(0, len(left), step):
        maps, places = left[k : k + step].unbind(-1)
        parts, slack = blocks.single(torch.stack([maps, places // n, places % n], -1))
        norms = block_norm(parts) + slack
        near = (norms > value[maps] * (1 + tol / 2)).nonzero()[:, 0]
        if len(near):
            norms[near] = matrix_norm(parts[near]) + slack[near]
        for i in near.tolist():
            m = int(maps[i])
            if float(norms[i]) > float(value[m]) * (1 + tol / 2):
                found, its = _top((parts[i].mT @ parts[i])[None])
                if float(found[0]) > float(value[m]) ** 2:
                    value[m], place[m], vector[m] = found[0].sqrt(), int(places[i]), its[0]
        upper = upper.scatter_reduce(0, maps, norms, "amax")
    token = blocks.token[line, place // n]
    return BestRows(value, token, place % n, vector, upper, torch.zeros_like(token))


def steepest(blocks: Blocks, tol: float, known: Tensor | None = None) -> BestRows:
    r"""The largest :math:`\sup_{|y|=1} \sum_j |J_{ij}^T y|` over output tokens i, of every map.

    Lemmas 89 and 90 (docs/theory/token_norms.md). Rows that one Cholesky decomposition proves to be
    below the best, or below what is ``known`` (b,) of others, are not looked at again; the others
    stay as wide as the weights leave them.
    """
    b = blocks.rows[0]
    at, (h, n, d_v) = torch.arange(b, device=blocks.p.device), blocks.v.shape[1:]
    y, lengths, total = _best(*_climb(blocks, starts(blocks), FIRST_STEPS, tol))
    best = total.amax(-1) if known is None else torch.maximum(total.amax(-1), known)
    target = (best * (1 + 0.9 * tol))[:, None].expand_as(total)
    w, weight = weights_of(blocks, lengths, tol)
    g, slack = blocks.matrix(w)
    square = (target * (1 - 1e-14)) ** 2 / weight.clamp_min(1e-300)
    upper = torch.where(at_most(g, square - slack) | (weight == 0), target, torch.inf)
    del g
    rows, steps = (upper == torch.inf).nonzero(), torch.full_like(at, FIRST_STEPS)
    each = h * n * (5 * d_v + 40) + blocks.qt[0, 0].numel() * 2 + 4 * blocks.width**2
    for part in rows.split(max(1, int(FLAT_BYTES // (8 * each)))):
        m, i = part.unbind(-1)
        found, its, most = _closed(blocks.select(part), y[m, i], lengths[m, i], target[m, i], tol)
        better = its > total[m, i]
        y[m[better], i[better]], total[m[better], i[better]] = found[better], its[better]
        upper[m, i] = most
    steps[rows[:, 0].unique()] += CONVEX_STEPS
    leaders = total.topk(min(LEADERS, total.shape[1]), -1).indices
    chosen = torch.stack([at[:, None].expand_as(leaders), leaders], -1).flatten(0, 1)
    y = y[chosen[:, 0], chosen[:, 1]][:, None]
    y, _, total = _best(*_climb(blocks.select(chosen), y, LAST_STEPS, SETTLED))
    value, best = total.view_as(leaders).max(-1)
    token, vector = blocks.token[at, leaders[at, best]], y.view(*leaders.shape, -1)[at, best]
    return BestRows(value, token, token, vector, upper.amax(-1), steps)


def _closed(
    part: Blocks, y: Tensor, lengths: Tensor, target: Tensor, tol: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Better vectors (k, 1, r), their sums and upper values (k,) of rows that are left open.

    The bound is minimised over weights, through its dual: matrices of several columns climb
    together from vectors y (k, 1, r) and others, and their columns are starts once more.
    """
    many = more_starts(part, y[:, None], lengths[:, None, None])
    many, upper = many / many.shape[2] ** 0.5, torch.full_like(target, torch.inf)
    for _ in range(ROUNDS):
        many, lengths, total = _climb(part, many, CONVEX_STEPS, tol / 100, together=True)
        upper = upper.minimum(bounded(part, lengths[:, :, 0], tol)[:, 0])
        if bool((upper <= (total[:, 0, 0] * (1 + tol / 8)).maximum(target)).all()):
            break
    y, _, total = _best(*_climb(part, _unit(many), STEPS, tol))
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
    if blocks.w_o is not None:
        both = both @ blocks.w_o.flatten(0, 1)
    return _unit(both)


def _unit(y: Tensor) -> Tensor:
    """Vectors (..., r) divided by their length; where that is zero, one of equal entries."""
    size = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return torch.where(size > 0, y / size.clamp_min(1e-300), y.shape[-1] ** -0.5)


def more_starts(blocks: Blocks, y: Tensor, lengths: Tensor) -> Tensor:
    """Vectors to climb from once more, (k, 1, s, r).

    Those that were found, y (k, 1, 1, r), the first eigenvectors at their weights, and a fixed
    direction without preference.
    """
    w = torch.where(lengths > 0, 1 / lengths.clamp_min(1e-300), 0.0)
    vectors = decomposed(blocks.matrix(w[:, :, 0])[0])[1].mT.flip(-2)[..., :3, :]
    drawn = normal_numbers(y.shape[-1], "one more start")[None].to(y.device)
    return torch.cat([y, vectors, _unit(drawn).expand(len(y), 1, -1, -1)], 2)


def _climb(
    blocks: Blocks, y: Tensor, steps: int, tol: float, *, together: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, their lengths and sums after so many steps from y, fewer where sums have settled."""
    following, lengths, total = blocks.ascend(y, together=together)
    for _ in range(steps):
        before, y = total, following
        following, lengths, total = blocks.ascend(y, together=together)
        if bool((total <= before * (1 + tol / 500)).all()):
            break
    return y, lengths, total


def _best(y: Tensor, lengths: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best of several starts: (b, i, 1, r), (b, i, n), (b, i)."""
    best = total.argmax(-1)[..., None]

    def chosen(t: Tensor) -> Tensor:
        return t.gather(2, best[..., None].expand(*best.shape, t.shape[-1]))

    return chosen(y), chosen(lengths)[:, :, 0], total.gather(2, best)[..., 0]


def weights_of(blocks: Blocks, lengths: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Weights 1 / d (b, i, n) and the sums of d, (b, i): Lemma 90 (docs/theory/token_norms.md)."""
    d = torch.maximum(lengths, min(FLOOR, tol / 100) * blocks.size)
    w = torch.where(d > 1e-290, 1 / d.clamp_min(1e-290), 0.0)
    w = torch.where((blocks.size > 0) & (w == 0), 1e290, w)
    return w, torch.where(w > 0, 1 / w.clamp_min(1e-300), 0.0).sum(-1) * (1 + 1e-12)


def bounded(blocks: Blocks, lengths: Tensor, tol: float) -> Tensor:
    """Upper values of what rows can reach, from weights, (b, i).

    Lemma 90 (docs/theory/token_norms.md).
    """
    w, weight = weights_of(blocks, lengths, tol)
    g, slack = blocks.matrix(w)
    return (weight * (symmetric_norm(g) + slack)).sqrt() * (1 + 1e-14)
