"""Largest eigenvalues of many matrices, and largest norms of rows of blocks.

Found by search, then bounded from above by proof.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lipbound.jacobians.token_norms.block_rows import Blocks
from lipbound.linalg.matrix_norms import (
    UNIT,
    at_most,
    block_norm,
    decomposed,
    eigenvalues,
    matrix_norm,
    symmetric_norm,
)
from lipbound.linalg.solution import normal_numbers

POWER_STEPS = 12
LEADERS = 4
"""Rows of each map that are looked at closely before all others are compared with the best of them.
"""
NEAR = 0.95
"""Share of the best known of other rows below which a row does not lead, after the first steps."""
FIRST_STEPS, STEPS = 6, 24
CONVEX_STEPS, ROUNDS = 60, 4
MOST_CUT = 8
"""Rows of one map that are bounded wedge by wedge; where more are open, they stay as they are."""
FLOOR = 1e-6
"""Weights are no smaller than this times the size of their block, which keeps rounding small."""
FLAT_BYTES = 2**26
"""Bytes of the blocks that are worked on at a time when each row has its own map."""
WEDGES, PARTS, LEVELS, MOST_WEDGES = 6, 3, 6, 24
"""Wedges at first, parts that one is cut into, how often, and how many at a time."""
MULTIPLIERS, MULTIPLIER_STEPS, TRIED = 8, 8, 17
"""Bisections for a wedge's multiplier, steps of the search in each, and multipliers tried in the
end."""


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
    below the best, or below what is ``known`` (b,) of others, are not looked at again.
    """
    b, count = blocks.rows
    at = torch.arange(b, device=blocks.p.device)
    state = SearchState(*_best(*_climb(blocks, starts(blocks), FIRST_STEPS, tol)), known)
    totals, leaders = state.total.topk(min(LEADERS, count), -1)
    flat = torch.stack([at[:, None].expand_as(leaders), leaders], -1)
    flat = flat.flatten(0, 1) if known is None else flat[totals >= known[:, None] * NEAR]
    _in_parts(_improve, blocks, flat, state, tol)
    steps = torch.full((b,), FIRST_STEPS + STEPS, device=at.device)
    w, weight = weights_of(blocks, state.lengths, tol)
    g, slack = blocks.matrix(w)
    target = (state.value * (1 + 0.9 * tol))[:, None].expand_as(weight)
    square = (target * (1 - 1e-14)) ** 2 / weight.clamp_min(1e-300)
    state.upper = torch.where(at_most(g, square - slack) | (weight == 0), target, torch.inf)
    del g
    for close in (_settle, _relax, _cut):
        rows = state.open(tol)
        _in_parts(close, blocks, rows, state, tol)
        steps[rows[:, 0].unique()] += STEPS
    best = state.total.argmax(-1)
    value, token, vector = state.total[at, best], blocks.token[at, best], state.y[at, best, 0]
    return BestRows(value, token, token, vector, state.upper.amax(-1), steps)


class SearchState:
    """Per row (b, i): best vector found, block lengths, their sum, proved upper bound.

    Attributes:
        y: vectors, (b, i, 1, r). lengths: (b, i, n). total: their sums, upper: (b, i).
        known: the best of other rows, (b,), or None.
        columns: matrices that have climbed, by row.
    """

    def __init__(self, y: Tensor, lengths: Tensor, total: Tensor, known: Tensor | None):
        self.y, self.lengths, self.total, self.known = y, lengths, total, known
        self.upper = torch.full_like(total, torch.inf)
        self.columns: dict[tuple[int, int], Tensor] = {}

    @property
    def value(self) -> Tensor:
        """The best of each map, (b,)."""
        best = self.total.amax(-1)
        return best if self.known is None else torch.maximum(best, self.known)

    def open(self, tol: float) -> Tensor:
        """Rows (k, 2) that may exceed the best by more than ``tol``."""
        return (self.upper > self.value[:, None] * (1 + tol)).nonzero()

    def take(self, rows: Tensor, y: Tensor, lengths: Tensor, total: Tensor) -> None:
        """Keep what is better: rows (k, 2), y (k, 1, 1, r), lengths (k, 1, n) and sums (k, 1)."""
        better = total[:, 0] >= self.total[rows[:, 0], rows[:, 1]]
        b, i = rows[better].unbind(-1)
        for mine, found in ((self.y, y), (self.lengths, lengths), (self.total, total)):
            mine[b, i] = found[better, 0]

    def bound(self, rows: Tensor, upper: Tensor) -> None:
        """Keep upper values (k, 1) of rows."""
        b, i = rows.unbind(-1)
        self.upper[b, i] = torch.minimum(self.upper[b, i], upper[:, 0])

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors (k, 1, 1, r) and lengths (k, 1, 1, n) of rows."""
        b, i = rows.unbind(-1)
        return self.y[b, i][:, None], self.lengths[b, i][:, None, None]


Step = Callable[[Blocks, Tensor, SearchState, float], None]


def _in_parts(work: Step, blocks: Blocks, rows: Tensor, state: SearchState, tol: float) -> None:
    """Do something for rows (k, 2), so many at a time as fit when each has its own map."""
    h, n, d_v = blocks.v.shape[1:]
    each = h * n * (5 * d_v + 40) + blocks.qt[0, 0].numel() * 2 + 4 * blocks.width**2
    step = max(1, int(FLAT_BYTES // (8 * each)))
    for k in range(0, len(rows), step):
        work(blocks.select(rows[k : k + step]), rows[k : k + step], state, tol)


def _improve(part: Blocks, rows: Tensor, state: SearchState, tol: float) -> None:
    """Climb from more starts."""
    state.take(rows, *_best(*_climb(part, more_starts(part, *state.at(rows)), STEPS, tol)))


def _settle(part: Blocks, rows: Tensor, state: SearchState, tol: float) -> None:
    """Climb from more starts, and bound with the weights that belong to the best."""
    _improve(part, rows, state, tol)
    state.bound(rows, bounded(part, state.at(rows)[1][:, 0], tol))


def _relax(part: Blocks, rows: Tensor, state: SearchState, tol: float) -> None:
    """Minimise the bound over weights, through its dual.

    Matrices of several columns climb together; their columns are starts once more.
    """
    many = more_starts(part, *state.at(rows))
    many = many / many.shape[2] ** 0.5
    for _ in range(ROUNDS):
        many, lengths, total = _climb(part, many, CONVEX_STEPS, tol / 100, together=True)
        upper = bounded(part, lengths[:, :, 0], tol)
        state.bound(rows, upper)
        if bool((upper <= total[..., 0] * (1 + tol / 8)).all()):
            break
    state.take(rows, *_best(*_climb(part, _unit(many), STEPS, tol)))
    for (b, i), one in zip(rows.tolist(), many, strict=True):
        state.columns[b, i] = one[None]


def _cut(part: Blocks, rows: Tensor, state: SearchState, tol: float) -> None:
    """Bound the sphere wedge by wedge where a matrix does better than every vector.

    Where matrices end there, vectors start.
    """
    count = state.open(tol)[:, 0].bincount(minlength=len(state.total))
    for k, (b, i) in enumerate(rows.tolist()):
        if int(count[b]) > MOST_CUT:
            continue
        row, at = part.select(torch.tensor([[k, 0]], device=rows.device)), rows[k : k + 1]
        target = float(state.value[b]) * (1 + 0.9 * tol)
        upper, ends = wedged(row, state.columns[b, i], target, tol)
        state.bound(at, torch.full_like(state.total[:1, :1], upper))
        state.take(at, *_best(*_climb(row, ends, STEPS, tol)))


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


def wedged(row: Blocks, y: Tensor, target: float, tol: float) -> tuple[float, Tensor]:
    r"""Upper value of :math:`\sigma_i` of a single row, and unit vectors to climb from.

    Lemma 91 (docs/theory/token_norms.md): the sphere is cut into wedges, and each is bounded by
    itself.

    Args:
        row: one map with one output token.
        y: columns (1, 1, s, r) of a matrix of Frobenius norm one that has climbed: wedges divide
            the plane of its first two directions.
        target: wedges that are proved to be below it are not cut again.
        tol: of the weights.

    Returns:
        The upper value, and vectors (1, 1, s, r).
    """
    if y.shape[-1] < 2 or not bool(torch.isfinite(y).all()):
        return math.inf, y
    plane, finest = torch.linalg.svd(y[0, 0], full_matrices=False).Vh[:2], PARTS ** (LEVELS - 1)
    angles = torch.linspace(0.0, math.pi, WEDGES * finest + 1, dtype=y.dtype, device=y.device)
    # vectors across these directions of the plane; wedges that touch share one, to the last digit
    edges = torch.stack([-angles.sin(), angles.cos()], -1) @ plane
    edges[-1] = -edges[0]
    first = torch.arange(WEDGES, device=y.device) * finest
    upper, found = 0.0, [y[0]]
    y = y.expand(WEDGES, -1, -1, -1)
    for level in range(LEVELS):
        width = PARTS ** (LEVELS - 1 - level)
        bounds, y = _bounded(row, y, edges[first], edges[first + width], tol)
        found.append(torch.linalg.svd(y[:, 0], full_matrices=False).Vh[:, :1])
        again = ~(bounds <= target)
        upper = max(upper, float(torch.where(again, 0.0, bounds).amax()))
        count = int(again.sum())
        if count == 0 or level == LEVELS - 1 or count * PARTS > MOST_WEDGES:
            upper = max(upper, float(bounds.amax()))
            break
        parts = torch.arange(PARTS, device=y.device) * (width // PARTS)
        first = (first[again, None] + parts).flatten()
        y = y[again].repeat_interleave(PARTS, 0)
    return upper, _unit(torch.cat([one.reshape(-1, one.shape[-1]) for one in found]))[None, None]


def _bounded(
    row: Blocks, y: Tensor, left: Tensor, right: Tensor, tol: float
) -> tuple[Tensor, Tensor]:
    """Upper values (k,) of a row over the wedges between edges (k, r), and matrices found there.

    The matrices have climbed from y (k, 1, s, r).
    """
    q = left[:, :, None] * right[:, None]
    q = ((q + q.mT) / 2)[:, None]  # y is in a wedge where y^T q y <= 0
    many = row.select(torch.zeros(len(q), 2, dtype=torch.long, device=y.device))
    total = many.slope(y, together=True)[2][..., 0].square().clamp_min(1e-300)
    low, high = ((total * factor).log() for factor in (1e-5, 30.0))
    for _ in range(MULTIPLIERS):
        middle = (low + high) / 2
        mu = middle.exp()[..., None, None]
        for _ in range(MULTIPLIER_STEPS):
            z, _, sums = many.slope(y, together=True)
            z = sums[..., None] * z + mu * (y - y @ q)
            y = z / torch.linalg.vector_norm(z, dim=(2, 3), keepdim=True).clamp_min(1e-300)
        outside = ((y @ q) * y).sum((2, 3)) > 0
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    w, weight = weights_of(many, many.slope(y, together=True)[1][:, :, 0], tol)
    g, slack = many.matrix(w)
    around = torch.linspace(-1.5, 1.5, TRIED, dtype=torch.float64, device=y.device)
    tried = ((low + high) / 2 + around).exp() / weight  # (k, tried)
    best = eigenvalues(g - tried[..., None, None] * q)[..., -1].argmin(-1)[:, None]
    mu = tried.gather(-1, best)
    rounding = 8 * UNIT * (torch.linalg.matrix_norm(g) + mu * torch.linalg.matrix_norm(q))
    proved = symmetric_norm(g - mu[..., None, None] * q) + slack + rounding
    return (weight * proved).sqrt()[:, 0] * (1 + 1e-14), y
