r"""Two-sided bounds on the norms of a batch of operators, with every rounding inside.

A search, in any dtype, finds vectors Z near the top. Their quotients, taken in float64, bound from
below. From above: with Q an orthonormal basis of Z the largest eigenvalue of :math:`G = J J^T` is
that of a small matrix bordered by :math:`\varphi \ge \|(I - QQ^T)\,G\,(I - QQ^T)\|`: Lemma 44
(docs/theory/certificates.md). A Lanczos run of its own, from a random start that Z knows nothing
of, certifies such a :math:`\varphi`: Lemma 65 (docs/theory/rounding.md). It need not be sharp: what
it leaves is multiplied by the squared residual of Z.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lipbound.errors import LipboundError, RangeError
from lipbound.linalg.certificates import log_inverse_epsilon
from lipbound.linalg.enclosures.deflated_lanczos import RITZ, deflated_bound
from lipbound.linalg.enclosures.ritz import ritz_search
from lipbound.linalg.enclosures.verified import bordered, largest_eigenvalue
from lipbound.linalg.lanczos import lanczos
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import JacobianOperator, Roundoff
from lipbound.linalg.solution import Norm, seeds_each, start_vectors, unit_vectors

VECTORS = 2
"""How many Ritz vectors are deflated at first."""
SEARCH = 3e-3
"""Residual, relative to the Ritz value, at which the search ends at the latest; the certificate
feels its square, so that small tolerances need a smaller one."""
ATTEMPTS = ((0.5, 1), (0.25, 1), (0.25, 2))
"""Per attempt: its share of delta, and a factor on the number of independent starts needed."""
AUDIBLE = 6.0
"""How many times the rounding of one product, relative to the norm, the component of a start must
be that a certificate rests on."""
MOST_STARTS = 4
"""Beyond so many independent starts, more of them do not help: their components are a good part of
their length."""
LARGEST_DENSE = 512
"""Largest output dimension for which what random starts leave open is settled by a dense
decomposition."""
ADDED = 16
"""Units of the last digit of a bound on the norm that rounding of one product is taken to be, where
it is not measured."""
HIDDEN = 4
"""How many times the share of a direction that all are given alike what a random vector shows of a
difference is taken for."""
FAINT = 1e-12
"""Norms below this, of values of ordinary size, come from probabilities that other dtypes than
float64 may have lost."""
Solver = Callable[..., Norm]


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


def enclose(
    op: JacobianOperator,
    roundoff: Roundoff,
    search: JacobianOperator,
    *,
    tol: float,
    delta: float,
    seed: int | Sequence[int],
    max_steps: int,
    vectors: bool = False,
) -> Norm:
    """Enclose norms of J, rounding included, each but for an event of probability ``delta``.

    Args:
        op: the operators in float64.
        roundoff: their rounding.
        search: the same operators in the dtype in which to search.
        tol: relative width to reach.
        delta: failure probability of each enclosure.
        seed: of all random vectors, one for all or one for each of equal parts of the batch.
        max_steps: products of one run.
        vectors: whether to return top singular vectors.

    Returns:
        `Norm`; ``converged`` is False where the width is not reached, and both ends hold all the
        same. Of a norm whose square leaves the range of float64 nothing is said.

    Raises:
        LipboundError: ``delta`` is not between 0 and 1.
    """
    if not 0 < delta < 1:
        raise LipboundError(f"delta is {delta}; the failure probability must be between 0 and 1")
    n, seeds = math.prod(op.out_shape), seeds_each(op.batch, seed)
    high = (roundoff.size + roundoff.products) ** 2
    top = torch.zeros(op.batch, n, dtype=torch.float64, device=op.device)
    found = NormBounds(torch.zeros_like(high), high, top, torch.zeros_like(high).long())
    active = torch.isfinite(high).nonzero()[:, 0]
    residual = max(min(SEARCH, 0.3 * math.sqrt(tol)), 16 * torch.finfo(search.dtype).eps)
    if len(active):
        part = search if len(active) == op.batch else search.select(active.to(op.device))
        own, count = [seeds[i] for i in active.tolist()], min(VECTORS, n)
        z, found.steps[active] = ritz_search(
            part, count=count, residual=residual, max_steps=max_steps, seed=own
        )
        z = z.double()
    for attempt, (share, starts) in enumerate(ATTEMPTS if len(active) else ()):
        part = op if len(active) == op.batch else op.select(active.to(op.device))
        # other vectors than those of the search and of other attempts
        every = seeds_each(op.batch, seeds, "certificate", attempt)
        own = [every[i] for i in active.tolist()]
        settings = tol, delta * share, starts, own, max_steps
        z = _attempt(part, roundoff.select(active), z, found, active, *settings)
        keep = _open(found, roundoff, tol)[active]
        active, z = active[keep], z[keep.to(z.device)]
        if not len(active):
            break
    rest = _open(found, roundoff, tol).nonzero()[:, 0]
    if len(rest) and n <= LARGEST_DENSE:
        _settle(op, roundoff, found, rest)
    low, high = _ends(found, roundoff)
    norm = Norm(low, high, found.steps, high <= low * (1 + tol), _width(low, high))
    return _with_vectors(norm, op, found.top) if vectors else norm


def _with_vectors(norm: Norm, op: JacobianOperator, top: Tensor) -> Norm:
    """Return the norms with the singular vectors that ``top`` (batch, n) leads to."""
    right = unit_vectors(op.vjp(top.view(-1, *op.out_shape)))
    return replace(norm, left=unit_vectors(op.jvp(right)), right=right)


def widened(norm: Norm, by: Tensor, tol: float) -> Norm:
    """Return bounds on norms of operators that are off by ``by`` (batch,) at most.

    ``converged`` where they are no wider than ``tol``.
    """
    low = torch.nan_to_num((norm.lower - by) * (1 - 2 * UNIT), nan=0.0).clamp_min(0)
    high = (norm.upper + by) * (1 + 2 * UNIT)
    error = _width(low, high)
    return replace(norm, lower=low, upper=high, error=error, converged=error <= tol)


def _width(low: Tensor, high: Tensor) -> Tensor:
    return torch.where(high > low, high / low.clamp_min(1e-300) - 1, 0.0)


def estimate(
    op: JacobianOperator,
    roundoff: Roundoff,
    search: JacobianOperator,
    *,
    tol: float,
    seed: int | Sequence[int],
    max_steps: int,
    vectors: bool = False,
) -> Norm:
    """Bound norms from below by quotients in float64, less all rounding; without an upper end.

    The vectors are found by Lanczos in any dtype. Where products of the search cannot tell norms
    apart that differ by ``tol``, or its value is not the quotient, it runs again in float64; where
    rounding of float64 itself is more than that, ``converged`` is False. Of a norm whose products
    leave the range of float64 nothing is said: its lower end is zero.

    Args:
        op: the operators in float64.
        roundoff: their rounding.
        search: the same operators in the dtype in which to search.
        tol: relative error of the estimates.
        seed: of the start vectors, one for all or one for each of equal parts of the batch.
        max_steps: products of one run.
        vectors: whether to return top singular vectors.

    Returns:
        `Norm`, whose upper ends are infinite.
    """
    solver: Solver = partial(lanczos, tol=tol, max_steps=max_steps, vectors=True, refined=False)
    norm, top = _estimated(op, roundoff, search, solver, tol, seeds_each(op.batch, seed))
    return _with_vectors(norm, op, top) if vectors else norm


def _estimated(
    op: JacobianOperator,
    roundoff: Roundoff,
    search: JacobianOperator,
    solver: Solver,
    tol: float,
    seeds: Sequence[int],
) -> tuple[Norm, Tensor]:
    """Return the result of `estimate`, and the vectors (batch, n) whose quotients it has."""
    try:
        found = solver(search, seed=seeds)
    except RangeError:
        if search is not op:
            return _estimated(op, roundoff, op, solver, tol, seeds)
        if op.batch == 1:
            return _nothing(op)
        parts = []
        for i in torch.arange(op.batch)[:, None]:
            one = op.select(i.to(op.device))
            parts.append(_estimated(one, roundoff.select(i), one, solver, tol, [seeds[int(i)]]))
        return Norm.cat([norm for norm, _ in parts]), torch.cat([top for _, top in parts])
    assert found.left is not None
    low, top, image = _quotients(op, roundoff, found.left.flatten(1).double())
    noise = roundoff.tensors + roundoff.products
    if search is not op:
        noise = noise + _blur(op, search, roundoff, top, image, low, tol, seeds)
    high = found.lower * (1 + found.error) + noise
    apart = torch.where(low > 0, high / low.clamp_min(1e-300) - 1, math.inf)
    error = torch.where(high > low, apart, found.error)
    converged = found.converged & (found.lower + noise - low <= tol * low)
    norm = Norm(low, found.upper, found.steps, converged, error)
    again = torch.empty(0) if search is op else (~converged).nonzero()[:, 0]
    if not len(again):
        return norm, top
    there, every = again.to(op.device), seeds_each(op.batch, seeds, "float64")
    part, others = op.select(there), [every[i] for i in again.tolist()]
    better, top[there] = _estimated(part, roundoff.select(again), part, solver, tol, others)
    for name in ("lower", "upper", "steps", "converged", "error"):
        getattr(norm, name)[again] = getattr(better, name)
    return norm, top


def _blur(
    op: JacobianOperator,
    search: JacobianOperator,
    roundoff: Roundoff,
    top: Tensor,
    image: Tensor,
    low: Tensor,
    tol: float,
    seeds: Sequence[int],
) -> Tensor:
    r"""Return how far products of ``search`` are from those of ``op``, (batch,).

    As seen at the vectors ``top``, whose images by J^T are ``image``. Where the norm is so much
    smaller than what is added up in its products that their rounding may hide other vectors, a
    random direction is looked at, too, in which a difference of one direction alone shows as one
    part of :math:`n^{1/2}`.
    """

    def apart(
        one: JacobianOperator, other: JacobianOperator, y: Tensor, exact: Tensor | None = None
    ) -> Tensor:
        seen = other.vjp(y.to(other.dtype).view(-1, *other.out_shape)).flatten(1).double()
        exact = one.vjp(y.view(-1, *one.out_shape)).flatten(1) if exact is None else exact
        return torch.nan_to_num(torch.linalg.vector_norm(exact - seen, dim=1).cpu(), nan=math.inf)

    blur = apart(op, search, top, image)
    unit = torch.finfo(search.dtype).eps
    unsure = (~(ADDED * unit * roundoff.size <= tol * low) | (roundoff.size == 0)).nonzero()[:, 0]
    if len(unsure):
        there = unsure.to(op.device)
        whole = len(unsure) == op.batch
        wide, narrow = (op, search) if whole else (op.select(there), search.select(there))
        every = seeds_each(op.batch, seeds, "blur")
        y = start_vectors(wide, wide.out_shape, [every[i] for i in unsure.tolist()])
        seen = HIDDEN * y.shape[1] ** 0.5 * apart(wide, narrow, y)
        blur[unsure] = torch.maximum(blur[unsure], seen)
    return torch.where(low < FAINT, math.inf, blur)


def _nothing(op: JacobianOperator) -> tuple[Norm, Tensor]:
    """Return trivial bounds on one norm, and no vector."""
    zero, no = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bool)
    vector = torch.zeros(1, math.prod(op.out_shape), dtype=torch.float64, device=op.device)
    return Norm(zero, zero + math.inf, zero.long(), no, zero + math.inf), vector


def _quotients(
    op: JacobianOperator, roundoff: Roundoff, vectors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Bound norms from below by one vector each, (batch, n).

    By the length of J^T z less what rounding may have added to it, over that of z, which is 1 but
    for its own rounding.

    Returns:
        The bounds (batch,), the vectors with length one, and their images J^T z, (batch, m).
    """
    z = vectors / vectors.abs().amax(1, keepdim=True).clamp_min(1e-300)
    z = torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-300)
    image = op.vjp(z.view(-1, *op.out_shape)).flatten(1)
    rounding = (image.shape[1] + 2 * z.shape[1] + 16) * UNIT
    size = torch.linalg.vector_norm(image, dim=1).cpu() * (1 - rounding)
    low = torch.nan_to_num(size - roundoff.products * (1 + 1e-6), nan=0.0, posinf=0.0)
    finite = torch.isfinite(image).all(1).cpu()
    return torch.where(finite, low - roundoff.tensors, 0.0).clamp_min(0), z, image


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
    op: JacobianOperator,
    roundoff: Roundoff,
    z: Tensor,
    found: NormBounds,
    active: Tensor,
    tol: float,
    delta: float,
    starts: int,
    seed: Sequence[int],
    max_steps: int,
) -> Tensor:
    """Improve the bounds in ``found`` of the entries ``active`` by vectors z (batch, r, n).

    Returns:
        Better vectors for another attempt.
    """
    z = torch.linalg.qr(z.mT).Q.mT.contiguous()
    y = torch.stack([op.gram(row.view(-1, *op.out_shape)).flatten(1) for row in z.unbind(1)], 1)
    small = bordered(z, y, roundoff)
    low, top = small.lower()
    higher = low > found.low[active]
    found.low[active] = torch.where(higher, low, found.low[active])
    found.top[active[higher].to(op.device)] = top[higher.to(op.device)]
    target = small.largest_phi(_goal(found.low[active], roundoff.tensors, tol))
    phi, steps, n = torch.zeros_like(target), torch.zeros_like(found.steps[active]), z.shape[2]
    needed = starts * _starts(n, delta, roundoff.products / found.low[active].sqrt())
    better = z.new_zeros(len(active), min(RITZ, n - z.shape[1], max_steps), n)
    for count in needed.unique().tolist():
        rows = (needed == count).nonzero()[:, 0]
        there = rows.to(op.device)
        all_of_them = len(rows) == len(active)
        part, own = (op, small) if all_of_them else (op.select(there), small.select(rows))
        goal, rounding, share = target[rows], roundoff.select(rows), delta ** (1 / count)
        for s in range(count):  # the bound fails only if every start does
            starts_from = [seed[i] * 16 + s for i in rows.tolist()]
            each = deflated_bound(part, rounding, own, goal, share, starts_from, max_steps)
            phi[rows], steps[rows] = torch.maximum(phi[rows], each.phi), steps[rows] + each.steps
            better[there] = each.ritz
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
        if low - slack > found.low[i]:
            found.low[i], found.top[i] = low - slack, top
        found.high[i] = min(float(found.high[i]), high + slack)
