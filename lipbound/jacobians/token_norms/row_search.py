"""Largest eigenvalues of many matrices, and the largest norms of rows of blocks: found by search,
then bounded from above by proof."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lipbound.jacobians.token_norms.block_rows import Blocks
from lipbound.jacobians.token_norms.sphere_cuts import wedged
from lipbound.linalg.matrix_norms import at_most, block_norm, matrix_norm, symmetric_norm
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


@dataclass(frozen=True, eq=False)
class BestRows:
    """The best row of each of b maps, and what no row exceeds, float64.

    Attributes:
        value: what the search found there, to rounding, (b,). token: the row, (b,). source: the
            token that moves, where there is one, (b,).
        vector: unit vector, (b, r). upper: bound on all rows, (b,). steps: of the search, (b,).
    """

    value: Tensor
    token: Tensor
    source: Tensor
    vector: Tensor
    upper: Tensor
    steps: Tensor

    @staticmethod
    def cat(found: "list[BestRows]") -> "BestRows":
        """Of all the maps of several."""
        names = [f.name for f in fields(BestRows)]
        return BestRows(
            **{name: torch.cat([getattr(one, name) for one in found]) for name in names}
        )

    def joined(self, other: "BestRows") -> "BestRows":
        """Of the rows of both."""
        first = self.value >= other.value
        value, token, source = (
            torch.where(first, a, b)
            for a, b in (
                (self.value, other.value),
                (self.token, other.token),
                (self.source, other.source),
            )
        )
        vector = torch.where(first[:, None], self.vector, other.vector)
        return BestRows(
            value,
            token,
            source,
            vector,
            torch.maximum(self.upper, other.upper),
            self.steps + other.steps,
        )


def largest(g: Tensor, slack: Tensor, tol: float) -> BestRows:
    """Roots of the largest eigenvalues of positive semi-definite matrices (b, i, n, n) over i,
    whose rounding errors are at most ``slack`` (b, i).

    A matrix that one Cholesky decomposition proves to be below the best by ``tol`` is not looked at
    again.
    """
    b, count, n = g.shape[:3]
    x = g.gather(
        -1, torch.linalg.vector_norm(g, dim=-2).argmax(-1)[..., None, None].expand(-1, -1, n, 1)
    )
    for _ in range(POWER_STEPS):
        x = g @ (x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(1e-300))
    rayleigh = torch.linalg.vector_norm(x, dim=(-2, -1))
    at = torch.arange(b, device=g.device)
    leaders = rayleigh.topk(min(LEADERS, count), -1).indices
    top, vectors = _eigen(g[at[:, None], leaders])
    best = top.argmax(-1)
    value, token, vector = top[at, best], leaders[at, best], vectors[at, best]
    target = value * (1 + tol)
    upper = torch.where(at_most(g, target[:, None] - slack), target[:, None], torch.inf)
    rows, places = (upper == torch.inf).nonzero(as_tuple=True)
    if len(rows):
        upper[rows, places] = symmetric_norm(g[rows, places]) + slack[rows, places]
        for b_, i in zip(rows.tolist(), places.tolist(), strict=True):
            if float(upper[b_, i]) > float(value[b_]) * (1 + tol):
                one, its = _eigen(g[b_, i][None])
                if float(one[0]) > float(value[b_]):
                    value[b_], token[b_], vector[b_] = one[0], i, its[0]
    return BestRows(
        value.clamp_min(0).sqrt(),
        token,
        token,
        vector,
        upper.amax(-1).sqrt(),
        torch.full_like(token, POWER_STEPS),
    )


def _eigen(g: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues and their vectors; zero and a unit vector where the solver gives up."""
    try:
        values, vectors = torch.linalg.eigh(g)
    except RuntimeError:  # LinAlgError
        return g.new_zeros(g.shape[:-2]), torch.ones_like(g[..., 0]) / g.shape[-1] ** 0.5
    return values[..., -1], vectors[..., -1]


def largest_pair(blocks: Blocks, tol: float) -> BestRows:
    """The largest norm of a block of every map; vectors are of the output: Lemma 92
    (docs/theory/token_norms.md)."""
    b = blocks.rows[0]
    bounds = blocks.pair_bounds()
    n = bounds.shape[-1]
    flat = bounds.flatten(1)
    at = torch.arange(b, device=flat.device)[:, None]
    order = flat.topk(min(2 * LEADERS, flat.shape[1]), -1).indices
    chosen = torch.stack([at.expand_as(order), order // n, order % n], -1).flatten(0, 1)
    parts = blocks.pairs(chosen)[0]
    top, vectors = _eigen((parts.mT @ parts).unflatten(0, (b, -1)))
    best, line = top.argmax(-1), torch.arange(b, device=flat.device)
    value, place, vector = (
        top[line, best].clamp_min(0).sqrt(),
        order[line, best],
        vectors[line, best],
    )
    upper = torch.zeros_like(value)
    left = (flat > (value * (1 + tol / 2))[:, None]).nonzero()
    upper = torch.maximum(
        upper, torch.where(flat > (value * (1 + tol / 2))[:, None], 0.0, flat).amax(-1)
    )
    step = max(
        1, int(FLAT_BYTES // (32 * blocks.w_v.shape[2] * blocks.width * max(1, blocks.p.shape[2])))
    )
    for k in range(0, len(left), step):
        maps, places = left[k : k + step].unbind(-1)
        parts, slack = blocks.pairs(torch.stack([maps, places // n, places % n], -1))
        norms = block_norm(parts) + slack
        near = norms > value[maps] * (1 + tol / 2)
        if bool(near.any()):
            norms[near] = matrix_norm(parts[near]) + slack[near]
            for m, at_, norm in zip(
                maps[near].tolist(), places[near].tolist(), norms[near].tolist(), strict=True
            ):
                if norm > float(value[m]) * (1 + tol / 2):
                    one = blocks.pairs(torch.tensor([[m, at_ // n, at_ % n]], device=flat.device))[
                        0
                    ]
                    found, its = _eigen(one.mT @ one)
                    if float(found[0]) > float(value[m]) ** 2:
                        value[m], place[m], vector[m] = found[0].sqrt(), at_, its[0]
        upper = upper.scatter_reduce(0, maps, norms, "amax")
    token = blocks.token[line, place // n]
    return BestRows(value, token, place % n, vector, upper, torch.zeros_like(token))


def steepest(blocks: Blocks, tol: float, known: Tensor | None = None) -> BestRows:
    r"""The largest :math:`\sup_{|y|=1} \sum_j |J_{ij}^T y|` over output tokens i, of every map:
    Lemmas 89 and 90 (docs/theory/token_norms.md).

    Rows that one Cholesky decomposition proves to be below the best, or below what is ``known``
    (b,) of others, are not looked at again.
    """
    b, count = blocks.rows
    at = torch.arange(b, device=blocks.p.device)
    state = State(*_best(*_climb(blocks, starts(blocks), FIRST_STEPS, tol)), known)
    totals, leaders = state.total.topk(min(LEADERS, count), -1)
    flat = torch.stack([at[:, None].expand_as(leaders), leaders], -1)
    flat = flat.flatten(0, 1) if known is None else flat[totals >= known[:, None] * NEAR]
    step = _together(blocks)
    for k in range(0, len(flat), step):
        _improve(blocks.select(flat[k : k + step]), flat[k : k + step], state, tol)
    steps = torch.full((b,), FIRST_STEPS + STEPS, device=at.device)
    w, weight = weights_of(blocks, state.lengths, tol)
    g, slack = blocks.matrix(w)
    target = (state.value * (1 + 0.9 * tol))[:, None].expand_as(weight)
    square = (target * (1 - 1e-14)) ** 2 / weight.clamp_min(1e-300)
    state.upper = torch.where(at_most(g, square - slack) | (weight == 0), target, torch.inf)
    del g
    for close in (_settle, _relax, _cut):
        rows = state.open(tol)
        for k in range(0, len(rows), step):
            close(blocks.select(rows[k : k + step]), rows[k : k + step], state, tol)
        steps[rows[:, 0].unique()] += STEPS
    best = state.total.argmax(-1)
    token = blocks.token[at, best]
    return BestRows(
        state.total[at, best], token, token, state.y[at, best, 0], state.upper.amax(-1), steps
    )


class State:
    """What is known of rows (b, i): vectors y (b, i, 1, r), their lengths (b, i, n), sums of these
    and upper values, (b, i); ``known`` of others."""

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
        """For rows (k, 2) what is better of y (k, 1, 1, r), lengths (k, 1, n) and sums (k, 1)."""
        better = total[:, 0] >= self.total[rows[:, 0], rows[:, 1]]
        b, i = rows[better].unbind(-1)
        self.y[b, i], self.lengths[b, i], self.total[b, i] = (
            y[better, 0],
            lengths[better, 0],
            total[better, 0],
        )

    def bound(self, rows: Tensor, upper: Tensor) -> None:
        """Upper values (k, 1) of rows."""
        b, i = rows.unbind(-1)
        self.upper[b, i] = torch.minimum(self.upper[b, i], upper[:, 0])

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors (k, 1, 1, r) and lengths (k, 1, 1, n) of rows."""
        b, i = rows.unbind(-1)
        return self.y[b, i][:, None], self.lengths[b, i][:, None, None]


def _improve(part: Blocks, rows: Tensor, state: State, tol: float) -> None:
    """Climb from more starts."""
    state.take(rows, *_best(*_climb(part, more_starts(part, *state.at(rows)), STEPS, tol)))


def _settle(part: Blocks, rows: Tensor, state: State, tol: float) -> None:
    """Climb from more starts, and bound with the weights that belong to the best."""
    _improve(part, rows, state, tol)
    state.bound(rows, bounded(part, state.at(rows)[1][:, 0], tol))


def _relax(part: Blocks, rows: Tensor, state: State, tol: float) -> None:
    """Minimise the bound over weights, through its dual: matrices of several columns climb
    together; their columns are starts once more."""
    many = more_starts(part, *state.at(rows))
    many = many / many.shape[2] ** 0.5
    for _ in range(ROUNDS):
        many, lengths, total = _climb(part, many, CONVEX_STEPS, tol / 100, together=True)
        upper = bounded(part, lengths[:, :, 0], tol)
        state.bound(rows, upper)
        if bool((upper <= total[..., 0] * (1 + tol / 8)).all()):
            break
    state.take(rows, *_best(*_climb(part, _unit(many), STEPS, tol)))
    state.columns |= {
        (int(b), int(i)): one[None] for (b, i), one in zip(rows.tolist(), many, strict=True)
    }


def _cut(part: Blocks, rows: Tensor, state: State, tol: float) -> None:
    """Where a matrix does better than every vector, bound the sphere wedge by wedge; where matrices
    end there, vectors start."""
    count = state.open(tol)[:, 0].bincount(minlength=len(state.total))
    for k, (b, i) in enumerate(rows.tolist()):
        if int(count[b]) > MOST_CUT:
            continue
        row, at = part.select(torch.tensor([[k, 0]], device=rows.device)), rows[k : k + 1]
        target = float(state.value[b]) * (1 + 0.9 * tol)
        upper, ends = wedged(
            row,
            state.columns[b, i],
            target,
            lambda blocks, lengths: weights_of(blocks, lengths, tol),
        )
        state.bound(at, torch.full_like(state.total[:1, :1], upper))
        state.take(at, *_best(*_climb(row, ends, STEPS, tol)))


def _together(blocks: Blocks) -> int:
    """Rows that are worked on at a time when each has its own map."""
    h, n, d_v = blocks.v.shape[1:]
    width = blocks.width
    return max(
        1,
        int(
            FLAT_BYTES
            // (8 * (h * n * (5 * d_v + 40) + blocks.qt[0, 0].numel() * 2 + 4 * width * width))
        ),
    )


def starts(blocks: Blocks) -> Tensor:
    """Unit vectors to climb from, (b, i, 2, r): the direction in which values reach furthest, and
    that of the largest difference of values."""
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
    """Vectors (k, 1, 1, r) that were found, the first eigenvectors at their weights, and a fixed
    direction without preference, (k, 1, s, r)."""
    w = torch.where(lengths > 0, 1 / lengths.clamp_min(1e-300), 0.0)
    g = blocks.matrix(w[:, :, 0])[0]
    try:
        vectors = torch.linalg.eigh(g).eigenvectors.mT.flip(-2)[..., :3, :]
    except RuntimeError:  # LinAlgError
        vectors = y
    drawn = normal_numbers(y.shape[-1], "one more start")[None].to(y.device)
    return torch.cat([y, vectors, _unit(drawn).expand(len(y), 1, -1, -1)], 2)


def _climb(
    blocks: Blocks, y: Tensor, steps: int, tol: float, *, together: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """So many steps from y, fewer where sums have settled: vectors, lengths and sums, which belong
    together."""
    following, lengths, total = blocks.ascend(y, together=together)
    for _ in range(steps):
        before, y = total, following
        following, lengths, total = blocks.ascend(y, together=together)
        if bool((total <= before * (1 + tol / 500)).all()):
            break
    return y, lengths, total


def _best(y: Tensor, lengths: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of several starts the best: (b, i, 1, r), (b, i, n), (b, i)."""
    best = total.argmax(-1)[..., None]
    y = y.gather(2, best[..., None].expand(*best.shape, y.shape[-1]))
    return (
        y,
        lengths.gather(2, best[..., None].expand(*best.shape, lengths.shape[-1]))[:, :, 0],
        total.gather(2, best)[..., 0],
    )


def weights_of(blocks: Blocks, lengths: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Weights 1 / d (b, i, n) and the sums of d, (b, i): Lemma 90 (docs/theory/token_norms.md)."""
    d = torch.maximum(lengths, min(FLOOR, tol / 100) * blocks.size)
    w = torch.where(d > 1e-290, 1 / d.clamp_min(1e-290), 0.0)
    w = torch.where((blocks.size > 0) & (w == 0), 1e290, w)
    return w, torch.where(w > 0, 1 / w.clamp_min(1e-300), 0.0).sum(-1) * (1 + 1e-12)


def bounded(blocks: Blocks, lengths: Tensor, tol: float) -> Tensor:
    """Upper values of what rows can reach, from weights, (b, i): Lemma 90
    (docs/theory/token_norms.md)."""
    w, weight = weights_of(blocks, lengths, tol)
    g, slack = blocks.matrix(w)
    return (weight * (symmetric_norm(g) + slack)).sqrt() * (1 + 1e-14)
