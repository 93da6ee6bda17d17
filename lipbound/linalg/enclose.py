r"""Two-sided bounds on the norms of a batch of operators, with every rounding inside.

A search, in any dtype, finds vectors Z near the top. Their quotients, taken in float64, bound from
below. From above: with Q an orthonormal basis of Z the largest eigenvalue of :math:`G = J J^T` is
that of a small matrix bordered by :math:`\varphi \ge \|(I - QQ^T)\,G\,(I - QQ^T)\|`: Lemma 44
(docs/theory/certificates.md). A Lanczos run of its own, from a random start that Z knows nothing
of, certifies such a :math:`\varphi`: Lemma 65 (docs/theory/rounding.md). It need not be sharp: what
it leaves is multiplied by the squared residual of Z.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.errors import RangeError
from lipbound.linalg.bordered import bordered
from lipbound.linalg.certificates import log_inverse_epsilon
from lipbound.linalg.deflated_lanczos import RITZ, deflated_bound
from lipbound.linalg.krylov import top_vectors
from lipbound.linalg.matrix_norms import SMALLEST, UNIT, largest_eigenvalue, power_of_two
from lipbound.linalg.operator_norm import lanczos
from lipbound.linalg.operators import InUnits, JacobianOperator, Roundoff
from lipbound.linalg.solution import Norm, seeds_each, start_vectors, width, with_vectors

VECTORS = 2
"""Ritz vectors that are deflated at first."""
SEARCH = 3e-3
"""Residual, relative to the Ritz value, at which the search ends at the latest; the certificate
feels its square, so that small tolerances need a smaller one."""
ATTEMPTS = ((0.5, 1), (0.25, 1), (0.25, 2))
"""Per attempt: its share of delta, and a factor on the number of independent starts needed."""
AUDIBLE = 6.0
"""Least component of a start that a certificate may rest on, in units of the rounding of one
product relative to the norm."""
MOST_STARTS = 4
"""Largest number of independent starts: with so many their components are a good part of their
length, and more of them do not help."""
LARGEST_DENSE = 512
"""Largest output dimension for which what random starts leave open is settled by a dense
decomposition."""
ADDED = 4
"""Rounding of one product where it is not measured, in units of the last digit of a bound on the
norm."""
HIDDEN = 4
"""Factor on what a random vector shows of a difference, beyond the share that each direction has of
its length on average."""
ROUGH = 1e-3
"""Share of a tolerance that rounding of a length may take."""
SMALL = 1e-60
"""Norms below this are enclosed in units of their size: their fourth powers, and what rounding adds
to these, may underflow."""
FAINT = 1e-12
"""Norms below this, of values of ordinary size, come from probabilities that other dtypes than
float64 may have lost."""


@dataclass
class Problem:
    """Norms to be bounded.

    Attributes:
        op: the operators in float64.
        roundoff: their rounding.
        search: the same operators in the dtype in which to search.
        tol: relative width to reach, or relative error of an estimate.
        max_steps: products of one run at most.
        seeds: of all random vectors, one for each entry of the batch.
    """

    op: JacobianOperator
    roundoff: Roundoff
    search: JacobianOperator
    tol: float
    max_steps: int
    seeds: list[int]

    def select(self, index: Tensor) -> "Problem":
        """Return the problem of some entries, ascending."""
        if len(index) == self.op.batch:
            return self
        there, seeds = index.to(self.op.device), [self.seeds[i] for i in index.tolist()]
        op = self.op.select(there)
        search = op if self.search is self.op else self.search.select(there)
        return replace(
            self, op=op, roundoff=self.roundoff.select(index), search=search, seeds=seeds
        )

    def seeds_for(self, *purpose: int | str) -> list[int]:
        """Return other seeds, one for each entry."""
        return seeds_each(self.op.batch, self.seeds, *purpose)


@dataclass
class NormBounds:
    """Bounds found so far, of the operator of the stored tensors.

    Attributes:
        low, high: bounds on the largest eigenvalue of G, the square of the norm, (batch,) float64.
        top: the vector that attains ``low``, (batch, n).
        steps: products spent, (batch,).
    """

    low: Tensor
    high: Tensor
    top: Tensor
    steps: Tensor


def enclose(problem: Problem, delta: float, *, vectors: bool = False) -> Norm:
    """Enclose norms of J, rounding included, each but for an event of probability ``delta``.

    Args:
        problem: the norms.
        delta: failure probability of each enclosure, between 0 and 1.
        vectors: whether to return top singular vectors.

    Returns:
        `Norm`; ``converged`` is False where the width is not reached, and both ends hold all the
        same. Of a norm whose square leaves the range of float64 nothing is said, or only that it
        is at most a crude bound.
    """
    op, roundoff, tol = problem.op, problem.roundoff, problem.tol
    n = math.prod(op.out_shape)
    high = (roundoff.size + roundoff.products) ** 2
    top = torch.zeros(op.batch, n, dtype=torch.float64, device=op.device)
    found = NormBounds(torch.zeros_like(high), high, top, torch.zeros_like(high).long())
    faint = (roundoff.size > 0) & (roundoff.size < SMALLEST)
    small = (roundoff.size < SMALL) & (roundoff.size > 0) & ~faint
    if bool(small.any()):
        unit = torch.where(small, 1 / power_of_two(roundoff.size), 1.0)
        scaled = InUnits(op, unit)
        part = replace(problem, op=scaled, search=scaled, roundoff=roundoff.scaled(unit))
        norm = enclose(part, delta, vectors=vectors)
        return replace(norm, lower=norm.lower / unit, upper=norm.upper / unit)
    active = (torch.isfinite(high) & ~faint).nonzero()[:, 0]
    residual = max(min(SEARCH, 0.3 * math.sqrt(tol)), 16 * torch.finfo(problem.search.dtype).eps)
    z, part = top, problem
    if len(active):
        part, count, steps = problem.select(active), min(VECTORS, n), problem.max_steps
        z, found.steps[active] = top_vectors(
            part.search, count=count, residual=residual, max_steps=steps, seed=part.seeds
        )
        z = z.double()
    for attempt, (share, starts) in enumerate(ATTEMPTS):
        if not len(active):
            break
        # other vectors than those of the search and of other attempts
        seeds = part.seeds_for("certificate", attempt)
        z = _attempt(replace(part, seeds=seeds), z, found, active, delta * share, starts)
        keep = _open(found, roundoff, tol)[active]
        active, z = active[keep], z[keep.to(z.device)]
        part = part.select(keep.nonzero()[:, 0]) if len(active) else part
    rest = (_open(found, roundoff, tol) & ~faint).nonzero()[:, 0]
    if len(rest) and n <= LARGEST_DENSE:
        _settle(op, roundoff, found, rest)
    low, high = _ends(found, roundoff)
    high = torch.where(faint, (roundoff.size + roundoff.tensors) * (1 + 2 * UNIT), high)
    norm = Norm(low, high, found.steps, high <= low * (1 + tol), width(low, high))
    return with_vectors(norm, op, found.top) if vectors else norm


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
    op, roundoff, search, tol = problem.op, problem.roundoff, problem.search, problem.tol
    try:
        found, left = lanczos(search, tol=tol, max_steps=problem.max_steps, seed=problem.seeds)
    except RangeError:
        if search is not op:
            return _estimated(replace(problem, search=op))
        if op.batch == 1:
            return _nothing(op)
        parts = [_estimated(problem.select(i)) for i in torch.arange(op.batch)[:, None]]
        return Norm.cat([norm for norm, _ in parts]), torch.cat([top for _, top in parts])
    low, size, top, image = _quotients(op, roundoff, left.double(), tol)
    noise = roundoff.tensors + roundoff.products
    if search is not op:
        noise = noise + _blur(problem, top, image, low, size)
    high = torch.maximum(found.lower * (1 + found.error), size) + noise
    apart = torch.where(low > 0, high / low.clamp_min(1e-300) - 1, math.inf)
    error = torch.where(high > low, apart, found.error)
    # a search that finds less than the quotient has not seen the top to that accuracy either
    off = (found.lower - size).abs() + (size - low) + noise
    converged = found.converged & (off <= tol * low)
    norm = Norm(low, found.upper, found.steps, converged, error)
    again = (~converged).nonzero()[:, 0]
    if search is op or not len(again):
        return norm, top
    part = problem.select(again)
    better, vectors = _estimated(replace(part, search=part.op, seeds=part.seeds_for("float64")))
    top[again.to(op.device)] = vectors
    for name in ("lower", "upper", "steps", "converged", "error"):
        getattr(norm, name)[again] = getattr(better, name)
    return norm, top


def _blur(problem: Problem, top: Tensor, image: Tensor, low: Tensor, length: Tensor) -> Tensor:
    r"""Return how far products of the search are from those of the operators, (batch,).

    As seen at the vectors ``top``, whose images are ``image``, of these lengths. Where the norm is
    so much smaller than what is added up in its products that their rounding may hide other
    vectors, a random direction is looked at, too, in which a difference of one direction alone
    shows as one part of :math:`n^{1/2}`.
    """

    def apart(search: JacobianOperator, y: Tensor, exact: Tensor, length: Tensor) -> Tensor:
        seen = search.image(y.to(search.dtype).view(-1, *search.out_shape))
        off = search.length((exact - seen.double()).to(search.dtype))[0].double().cpu()
        found = off + (length - search.length(seen)[0].double().cpu()).abs()
        return torch.nan_to_num(found, nan=math.inf)

    blur, size = apart(problem.search, top, image, length), problem.roundoff.size
    unit = torch.finfo(problem.search.dtype).eps
    unsure = (~(ADDED * unit * size <= problem.tol * low) | (size == 0)).nonzero()[:, 0]
    if len(unsure):
        part = problem.select(unsure)
        y = start_vectors(part.op, part.op.out_shape, part.seeds_for("blur"))
        exact = part.op.image(y.view(-1, *part.op.out_shape))
        off = apart(part.search, y, exact, part.op.length(exact)[0].cpu())
        seen = HIDDEN * y.shape[1] ** 0.5 * off
        blur[unsure] = torch.maximum(blur[unsure], seen)
    return torch.where(low < FAINT, math.inf, blur)


def _nothing(op: JacobianOperator) -> tuple[Norm, Tensor]:
    """Return trivial bounds on one norm, and no vector."""
    zero, no = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bool)
    vector = torch.zeros(1, math.prod(op.out_shape), dtype=torch.float64, device=op.device)
    return Norm(zero, zero + math.inf, zero.long(), no, zero + math.inf), vector


def _quotients(
    op: JacobianOperator, roundoff: Roundoff, vectors: Tensor, tol: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bound norms from below by one vector each, (batch, n).

    By the length of J^T z less what rounding may have added to it, over that of z, which is 1 but
    for its own rounding. Where an operator measures lengths too roughly for ``tol``, in the
    coordinates of its inputs.

    Returns:
        The bounds and the lengths, (batch,) each, the vectors with length one, and what
        `JacobianOperator.image` gives of these.
    """
    z = vectors / vectors.abs().amax(1, keepdim=True).clamp_min(1e-300)
    z = torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-300)
    image = op.image(z.view(-1, *op.out_shape))
    size, more = op.length(image)
    rough = (~(more <= ROUGH * tol * size)).nonzero()[:, 0]
    if len(rough):
        part = op.select(rough)
        size[rough], more[rough] = JacobianOperator.length(
            part, part.vjp(z[rough].view(-1, *op.out_shape))
        )
    size, more, own = size.cpu(), more.cpu(), (2 * z.shape[1] + 16) * UNIT
    low = (size - more) * (1 - own) - roundoff.products * (1 + 1e-6) - roundoff.tensors
    low = torch.where(torch.isfinite(size), low, 0.0).nan_to_num(0.0).clamp_min(0)
    return low, size, z, image


def _ends(found: NormBounds, roundoff: Roundoff) -> tuple[Tensor, Tensor]:
    """Return bounds on the norms at the given numbers, from those of the stored tensors."""
    low = (found.low.clamp_min(0).sqrt() * (1 - 4 * UNIT) - roundoff.tensors).clamp_min(0)
    return low, (found.high.sqrt() * (1 + 4 * UNIT) + roundoff.tensors) * (1 + 2 * UNIT)


def _reachable(sigma: Tensor, tensors: Tensor, tol: float) -> Tensor:
    """Return the relative width to aim at.

    Where rounding of the tensors is wider than ``tol``, twice what it takes.
    """
    return (4 * tensors / sigma.clamp_min(1e-300)).clamp_min(tol)


def _goal(low: Tensor, tensors: Tensor, tol: float) -> Tensor:
    """Return what the largest eigenvalue, ``low`` at least, may be at most for that width."""
    sigma = low.sqrt()
    # a little less than asked for, so that rounding does not decide
    wide = 0.999 * _reachable(sigma, tensors, tol)
    return ((sigma - tensors) * (1 + wide) - tensors).clamp_min(0) ** 2


def _open(found: NormBounds, roundoff: Roundoff, tol: float) -> Tensor:
    """Return where more work could make an enclosure narrower, (batch,) bool.

    It cannot where the enclosure is as wide as rounding of the tensors makes it.
    """
    low, high = _ends(found, roundoff)
    wide = _reachable(found.low.clamp_min(0).sqrt(), roundoff.tensors, tol)
    return ~(high <= low * (1 + wide)) & torch.isfinite(found.high) & (found.high > 0)


def _attempt(
    part: Problem, z: Tensor, found: NormBounds, active: Tensor, delta: float, starts: int
) -> Tensor:
    """Improve the bounds in ``found`` of the entries ``active`` by vectors z (batch, r, n).

    Returns:
        Better vectors for another attempt.
    """
    op, roundoff = part.op, part.roundoff
    z = torch.linalg.qr(z.mT).Q.mT.contiguous()
    y = torch.stack([op.gram(row.view(-1, *op.out_shape)).flatten(1) for row in z.unbind(1)], 1)
    small = bordered(z, y, roundoff)
    low, top = small.lower()
    higher = low > found.low[active]
    found.low[active] = torch.where(higher, low, found.low[active])
    found.top[active[higher].to(op.device)] = top[higher.to(op.device)]
    target = small.largest_phi(_goal(found.low[active], roundoff.tensors, part.tol))
    phi, steps, n = torch.zeros_like(target), torch.zeros_like(found.steps[active]), z.shape[2]
    needed = starts * _starts(n, delta, roundoff.products / found.low[active].sqrt())
    better = z.new_zeros(len(active), min(RITZ, n - z.shape[1], part.max_steps), n)
    for count in needed.unique().tolist():
        rows = (needed == count).nonzero()[:, 0]
        one, own, share = part.select(rows), small.select(rows), delta ** (1 / count)
        for s in range(count):  # the bound fails only if every start does
            seeds = [seed * 16 + s for seed in one.seeds]
            run = one.op, one.roundoff, own, target[rows], share, seeds, part.max_steps
            each = deflated_bound(*run)
            phi[rows], steps[rows] = torch.maximum(phi[rows], each.phi), steps[rows] + each.steps
            better[rows.to(op.device)] = each.ritz
    found.high[active] = torch.minimum(found.high[active], small.upper(phi))
    found.steps[active] += steps + z.shape[1]
    return torch.cat([z, better], 1) if better.shape[1] + z.shape[1] <= n else z


def _starts(n: int, delta: float, noise: Tensor) -> Tensor:
    """Return over how many starts to multiply up ``delta``, (batch,).

    So many that none has to show what is lost in ``noise``, of a product relative to the norm.
    """
    count = torch.ones(len(noise), dtype=torch.long)
    for more in range(2, MOST_STARTS + 1):
        short = math.exp(-log_inverse_epsilon(n, delta ** (1 / (more - 1)))) < AUDIBLE * noise
        count = torch.where(short, more, count)
    return count


def _settle(op: JacobianOperator, roundoff: Roundoff, found: NormBounds, index: Tensor) -> None:
    """Improve the bounds in ``found`` of some entries by verified dense decompositions of G.

    They add no probability of failure.
    """
    n = math.prod(op.out_shape)
    for i in index.tolist():
        same = op.select(torch.full((n,), i, device=op.device))
        eye = torch.eye(n, dtype=torch.float64, device=op.device)
        g = same.gram(eye.view(n, *op.out_shape)).flatten(1)
        size = float(found.high[i].sqrt().minimum(roundoff.size[i]))
        products = float(roundoff.products[i])
        low, high, top = largest_eigenvalue((g + g.mT) / 2)
        slack = (2 * size * products + products**2) * n**0.5 + 2 * UNIT * float(g.norm())
        if float(low) - slack > found.low[i]:
            found.low[i], found.top[i] = float(low) - slack, top
        found.high[i] = min(float(found.high[i]), float(high) + slack)
