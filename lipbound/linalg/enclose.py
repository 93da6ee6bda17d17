r"""Two-sided bounds on the norms of a batch of operators, with every rounding inside.

A Lanczos run in float64 finds a vector whose quotient bounds from below, and shows from above that
its random start would have seen every larger eigenvalue of :math:`G = J J^T`: Lemma 65
(docs/theory/rounding.md). Where rounding hides what one start sees, several are taken, whose
probabilities of failure are multiplied.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lipbound.errors import RangeError
from lipbound.graphs import graphed
from lipbound.linalg.certificates import STARTS, Certificate
from lipbound.linalg.krylov import Array, Recurrence, Runs
from lipbound.linalg.matrix_norms import SMALLEST, UNIT, power_of_two
from lipbound.linalg.operator_norm import lanczos
from lipbound.linalg.operators import InUnits, JacobianOperator, Roundoff
from lipbound.linalg.solution import Norm, seeds_each, start_vectors, width, with_vectors

_ADDED = 4
"""Rounding of one product where it is not measured, in units of the last digit of a bound on the
norm."""
_HIDDEN = 4
"""Factor on what a random vector shows of a difference, beyond the share that each direction has of
its length on average."""
SEEN = 4e-6
"""Relative difference, some 32 units, below which a search in float32 does not tell singular values
apart. Smaller tolerances are for searches in float64."""
ROUGH = 1e-3
"""Share of a tolerance that rounding of a length may take."""
FINER = 0.2
"""Share of a tolerance to which a run goes on where rounding lets it."""
SMALL = 1e-60
"""Norms below this are enclosed in units of their size: their fourth powers, and what rounding adds
to these, may underflow."""
_FAINT = 1e-12
"""Norms below this, of values of ordinary size, come from probabilities that other dtypes than
float64 may have lost."""


@dataclass
class Problem:
    """Norms to be bounded.

    Attributes:
        op: the operators in float64.
        rounding: gives their `roundoff`, which is asked for while a GPU is busy.
        search: the same operators in the dtype in which estimates are searched.
        tol: relative width to reach, or relative error of an estimate.
        max_steps: products of one run at most.
        seeds: of all random vectors, one for each entry of the batch.
    """

    op: JacobianOperator
    rounding: Callable[[], Roundoff]
    search: JacobianOperator
    tol: float
    max_steps: int
    seeds: list[int]

    @cached_property
    def roundoff(self) -> Roundoff:
        """Rounding of the operators."""
        return self.rounding()

    def select(self, index: Tensor) -> "Problem":
        """Return the problem of some entries, ascending."""
        if len(index) == self.op.batch:
            return self
        there, seeds = index.to(self.op.device), [self.seeds[i] for i in index.tolist()]
        op, rounding = self.op.select(there), partial(self.roundoff.select, index)
        search = op if self.search is self.op else self.search.select(there)
        return replace(self, op=op, rounding=rounding, search=search, seeds=seeds)

    def seeds_for(self, *purpose: int | str) -> list[int]:
        """Return other seeds, one for each entry."""
        return seeds_each(self.op.batch, self.seeds, *purpose)


@torch.no_grad()
def enclose(problem: Problem, delta: float, *, vectors: bool = False) -> Norm:
    """Enclose norms of J, rounding included, all of them but for an event of probability ``delta``.

    Args:
        problem: the norms.
        delta: total failure probability of the enclosures, each of which has its part.
        vectors: whether to return top singular vectors.

    Returns:
        `Norm`; ``converged`` is False where the width is not reached, and both ends hold all the
        same. Of a norm whose square leaves the range of float64 nothing is said, or only that it
        is at most a crude bound.
    """
    op, tol, each = problem.op, problem.tol, delta / problem.op.batch
    start = start_vectors(op, op.out_shape, problem.seeds)
    found, high, starts, goal = _beyond(problem, each, start, np.ones(op.batch, dtype=int))
    roundoff = problem.roundoff
    faint = (roundoff.size > 0) & (roundoff.size < SMALLEST)
    small = (roundoff.size < SMALL) & (roundoff.size > 0) & ~faint
    if bool(small.any()):
        unit = torch.where(small, 1 / power_of_two(roundoff.size), 1.0)
        scaled = InUnits(op, unit)
        part = replace(problem, op=scaled, search=scaled, rounding=partial(roundoff.scaled, unit))
        norm = enclose(part, delta, vectors=vectors)
        return replace(norm, lower=norm.lower / unit, upper=norm.upper / unit)
    top, largest, steps = found.vectors, found.recurrence.top, found.recurrence.steps
    for count in range(1, STARTS[-1]):  # the bound fails only if every start does
        more = (starts > count).nonzero()[0]
        if not len(more):
            break
        there = torch.from_numpy(more)
        part = problem.select(there)
        start = start_vectors(part.op, op.out_shape, part.seeds_for("start", count))
        again, above, starts[more], _ = _beyond(part, each, start, starts[more], goal[more])
        high[more] = np.maximum(high[more], above)
        steps[more] += again.recurrence.steps
        better = again.recurrence.top > largest[more]
        largest[more[better]] = again.recurrence.top[better]
        top[there[better].to(op.device)] = again.vectors[torch.from_numpy(better).to(op.device)]
    low, _, top, _ = _quotients(op, op, roundoff, top, tol)
    crude = (roundoff.size + roundoff.products) * (1 + 2 * UNIT)
    upper = torch.minimum(torch.from_numpy(high).sqrt() * (1 + 4 * UNIT), crude)
    upper = torch.where(faint, roundoff.size, upper) + roundoff.tensors
    low, upper = torch.where(faint, 0.0, low), upper * (1 + 2 * UNIT)
    norm = Norm(low, upper, torch.from_numpy(steps), upper <= low * (1 + tol), width(low, upper))
    return with_vectors(norm, op, top) if vectors else norm


def _beyond(
    problem: Problem, delta: float, start: Tensor, starts: Array, goal: Array | None = None
) -> tuple[Runs, Array, Array, Array]:
    """Return runs from ``start``, and numbers beyond every eigenvalue, but for ``delta``.

    Args:
        problem: the norms.
        delta: failure probability of each number.
        start: unit vectors, (batch, n).
        starts: over how many independent ones the probability is multiplied up at least, (batch,).
        goal: numbers that would do; None for what the tolerance asks.

    Returns:
        The runs; the numbers, starts as rounding allows them, and goals, (batch,) each.
    """
    n, known = start.shape[1], goal
    runs = Runs(problem.op, start, limit=min(problem.max_steps, n))
    roundoff = problem.roundoff
    noise, tensors = (roundoff.tensors + roundoff.products).numpy(), roundoff.tensors.numpy()
    certificate = Certificate(n, delta, roundoff.products.numpy())

    def enough(index: Array, top: Array, tol: float) -> Array:
        if known is not None:
            return known[index]
        sigma, lost = np.sqrt(np.nan_to_num(top)), noise[index].clip(max=1e150)
        # where rounding is wider than tol, twice what it takes; a little less than asked for, so
        # that other rounding does not decide
        wide = 0.999 * np.maximum(tol, 4 * np.minimum(lost / sigma.clip(1e-100), 1e6))
        low = np.maximum(sigma * (1 - 4 * n * UNIT) - lost, 0)
        return np.maximum(low * (1 + wide) - tensors[index], 0) ** 2

    def rule(index: Array, part: Recurrence) -> Array:
        aim = enough(index, part.top, problem.tol)
        shown, some, hopeless = certificate.shows(index, part, aim, starts[index])
        if known is None and shown.any():  # another digit, which takes a step, but no more starts
            aim = enough(index, part.top, FINER * problem.tol)
            finer, more, _ = certificate.shows(index, part, aim, starts[index])
            shown &= finer | (more > some)
        return shown | hopeless

    found, everyone = runs.until(rule).recurrence, np.arange(len(start))
    goal = enough(everyone, found.top, problem.tol)
    starts = certificate.shows(everyone, found, goal, starts)[1]
    return runs, certificate.bound(found, starts, goal), starts, goal


@torch.no_grad()
def estimate(problem: Problem, *, vectors: bool = False) -> Norm:
    """Bound norms from below by quotients in float64, less all rounding; without an upper end.

    The vectors are found by Lanczos in any dtype. Where products of the search cannot tell norms
    apart that differ by ``tol``, or its value is not the quotient, it runs again in float64; where
    rounding of float64 itself is more than that, ``converged`` is False. Of a norm whose products
    leave the range of float64 nothing is said: its lower end is zero.

    Args:
        problem: the norms.
        vectors: whether to return top singular vectors.

    Returns:
        `Norm`, whose upper ends are infinite.
    """
    norm, top = _estimated(problem)
    return with_vectors(norm, problem.op, top) if vectors else norm


def _estimated(problem: Problem) -> tuple[Norm, Tensor]:
    """Return the result of `estimate`, and the vectors (batch, n) whose quotients it has."""
    op, search, tol, steps = problem.op, problem.search, problem.tol, problem.max_steps
    run = partial(lanczos, search, tol=tol, max_steps=steps, seed=problem.seeds)
    try:
        found, left = run(meanwhile=lambda: problem.roundoff)
    except RangeError:
        if search is not op:
            return _estimated(replace(problem, search=op))
        if op.batch == 1:
            zero = torch.zeros(1, dtype=torch.float64)
            norm = Norm(zero, zero + math.inf, zero.long(), zero > 0, zero + math.inf)
            return norm, zero.new_zeros(1, math.prod(op.out_shape), device=op.device)
        parts = [_estimated(problem.select(i)) for i in torch.arange(op.batch)[:, None]]
        return Norm.cat([norm for norm, _ in parts]), torch.cat([top for _, top in parts])
    roundoff = problem.roundoff
    low, size, top, off = _quotients(op, search, roundoff, left.double(), tol)
    noise, missed = roundoff.tensors + roundoff.products, found.error
    if search is not op:
        noise, missed = noise + _blur(problem, off, low), missed.clamp_min(SEEN)
    # a search that finds another number at its vector than the quotient has seen the top as roughly
    gap = (found.lower - size).abs()
    high = torch.maximum(found.lower * (1 + missed), size + gap) + noise
    apart = torch.where(low > 0, high / low.clamp_min(1e-300) - 1, math.inf)
    error = torch.where(high > low, apart, found.error)
    converged = found.converged & (gap + (size - low) + noise <= tol * low)
    if search.squared and search is op:  # what its rounding may hide
        hidden = roundoff.products * roundoff.size / (low**2).clamp_min(1e-300)
        error = torch.where(converged, error, error + hidden)
    norm = Norm(low, found.upper, found.steps, converged, error)
    again = (~converged).nonzero()[:, 0]
    if search is op or not len(again):
        return norm, top
    part = problem.select(again)
    better, vectors = _estimated(replace(part, search=part.op, seeds=part.seeds_for("float64")))
    top[again.to(op.device)] = vectors
    norm.put(again, better)
    return norm, top


def _blur(problem: Problem, off: Tensor, low: Tensor) -> Tensor:
    r"""Return how far products of the search are from those of the operators, (batch,).

    At the vectors that it has found by ``off``. Where the norm is so much smaller than what is
    added up in its products that their rounding may hide other vectors, a random direction is
    looked at, too, in which a difference of one direction alone shows as one part of
    :math:`n^{1/2}`.
    """
    size, search = problem.roundoff.size, problem.search
    unit = search.coarse * torch.finfo(search.dtype).eps
    unsure = (~(_ADDED * unit * size <= problem.tol * low) | (size == 0)).nonzero()[:, 0]
    if len(unsure):
        part = problem.select(unsure)
        y = start_vectors(part.op, part.op.out_shape, part.seeds_for("blur"))
        seen = _images(part.op, part.search, y)[1][:, 3:]
        seen = torch.nan_to_num(part.search.length(seen.cpu())[0], nan=math.inf)
        off[unsure] = torch.maximum(off[unsure], _HIDDEN * y.shape[1] ** 0.5 * seen)
    return torch.where(low < _FAINT, math.inf, off)


def _images(op: JacobianOperator, search: JacobianOperator, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``z`` (batch, n) of length one, and `JacobianOperator.sums`, (batch, 3 or 6).

    The first three of its images, the others of how far those of another search are from these.
    """
    z = torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-300)
    image = op.image(z.view(-1, *op.out_shape))
    parts = [op.sums(image)]
    if search is not op:
        seen = search.image(z.to(search.dtype).view(-1, *search.out_shape))
        parts.append(search.sums((image - seen.double()).to(search.dtype)).double())
    return z, torch.cat([pad(part, (0, 3 - part.shape[1])) for part in parts], 1)


def _images_into(
    op: JacobianOperator, search: JacobianOperator, z: Tensor, found: Sequence[Tensor]
) -> None:
    """Put what `_images` returns into two tensors that are there."""
    for t, new in zip(found, _images(op, search, z), strict=True):
        t.copy_(new)


def _quotients(
    op: JacobianOperator,
    search: JacobianOperator,
    roundoff: Roundoff,
    vectors: Tensor,
    tol: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bound norms from below by one vector each, (batch, n), of length one or zero.

    By the length of J^T z less what rounding may have added to it, over that of z, which is 1 but
    for its own rounding. Where an operator measures lengths too roughly for ``tol``, in the
    coordinates of its inputs.

    Returns:
        The bounds and the lengths, (batch,) each, the vectors with length one, and how far images
        of the search are from those of these.
    """
    if op.graphable() and search.graphable():
        found = torch.empty_like(vectors), vectors.new_empty(len(vectors), 6 - 3 * (search is op))
        launch, (*_, found) = graphed(_images_into, op, search, vectors, found)
        launch()
        z, sums = (t.clone() for t in found)
    else:
        z, sums = _images(op, search, vectors)
    sums = sums.cpu()
    size, more = op.length(sums)
    off = torch.nan_to_num(search.length(sums[:, -3:])[0], nan=math.inf)
    rough = (~(more <= ROUGH * tol * size)).nonzero()[:, 0]
    if len(rough):
        there = rough.to(op.device)
        part = op.select(there)
        inputs = part.vjp(z[there].view(-1, *op.out_shape))
        sums = JacobianOperator.sums(part, inputs).cpu()
        size[rough], more[rough] = JacobianOperator.length(part, sums)
    own = (2 * z.shape[1] + 16) * UNIT
    low = (size - more) * (1 - own) - roundoff.products * (1 + 1e-6) - roundoff.tensors
    low = torch.where(torch.isfinite(size), low, 0.0).nan_to_num(0.0).clamp_min(0)
    return low, size, z, off
