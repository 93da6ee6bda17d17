r"""Certified bound on the part of G that some vectors leave out, by a Lanczos run of its own.

Let B be symmetric positive semi-definite, :math:`v_1, \dots, v_k` *any* stored vectors, T *any*
symmetric tridiagonal matrix with entries >= 0, and :math:`R = B V - V T` what they miss by. For an
eigenpair :math:`B x = \varphi x` with :math:`\varphi` beyond the eigenvalues of T

.. math:: x \cdot v_1 = x^T R\,y(\varphi),\qquad y(\varphi) = (\varphi - T)^{-1} e_1 \ge 0,

so that a random :math:`v_1` rules out every :math:`\varphi` with
:math:`\sum_j y_j |R_j| < \varepsilon`: Lemma 65 (docs/theory/rounding.md). What is known of R is
arrays of numpy, a few float64 numbers for every norm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipbound.linalg.bordered import Bordered
from lipbound.linalg.certificates import log_inverse_epsilon
from lipbound.linalg.krylov import (
    WORTH_COPYING,
    Dots,
    moved_up,
    ritz_vectors,
    top_eigenpairs,
    with_room,
)
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import JacobianOperator, Roundoff
from lipbound.linalg.solution import normal_numbers

Array = np.ndarray
LOOK = 2
"""Steps between two looks at the recurrences."""
RITZ = 2
"""Ritz vectors that a run leaves for a second attempt."""
HOPELESS = 1e-3
"""Relative residual of a Ritz value beyond the target at which the run ends: the vectors it was
given have missed something."""


@dataclass
class Deflated:
    """Results of a run.

    Attributes:
        phi: upper bounds on the largest eigenvalue of the deflated matrix, (batch,).
        steps: products spent, (batch,).
        ritz: top Ritz vectors, (batch, at most `RITZ`, n).
    """

    phi: Tensor
    steps: Tensor
    ritz: Tensor


def deflated_bound(
    op: JacobianOperator,
    roundoff: Roundoff,
    small: Bordered,
    target: Tensor,
    delta: float,
    seeds: Sequence[int],
    max_steps: int,
) -> Deflated:
    r"""Bound :math:`\|(I - QQ^T)\,G\,(I - QQ^T)\|` from above, Q orthonormalising ``small.z``.

    Lemma 65 (docs/theory/rounding.md): every rounding of the run is measured step by step.

    Args:
        op: the operators J of :math:`G = J J^T`, in float64.
        roundoff: of their products.
        small: the vectors that are left out, and their images.
        target: values that would do, (batch,) float64.
        delta: probability with which each bound may fail.
        seeds: of the start vectors, one for each entry.
        max_steps: products of the run at most.

    Returns:
        Bounds: at most ``target`` where that can be shown, elsewhere the smallest number that can,
        or infinity.
    """
    n, r = math.prod(op.out_shape), small.z.shape[1]
    if r >= n:
        nothing = torch.zeros_like(target)
        return Deflated(nothing, nothing.long(), small.z[:, :0])
    limit, z, dots = min(max_steps, n - r), small.z, Dots(n)
    gamma = 2 * (dots.roundings + 4 * UNIT) * r**0.5  # of products with z
    epsilon = math.exp(-log_inverse_epsilon(n, delta))
    least = epsilon - 4 * float(small.skew.amax()) - 4 * gamma - 16 * UNIT
    rows = Recurrences(op.batch, limit, small, roundoff, least)
    ritz = z.new_zeros(op.batch, min(RITZ, limit), n)
    goal, steps = target.numpy(), np.zeros(op.batch, dtype=np.int64)
    active, going = np.arange(op.batch), np.ones(op.batch, dtype=bool)
    v = _start(seeds, z, dots)
    basis, b = v.new_empty(op.batch, min(24, limit), n), v.new_zeros(op.batch)
    for j in range(limit):
        basis = with_room(basis, j, limit)
        basis[:, j] = v
        outside = torch.linalg.vector_norm(dots(v, z), dim=1) + gamma
        w, a, lost, reach = _step(op, v, z, basis[:, : j + 1], b, dots)
        b = torch.linalg.vector_norm(w, dim=1)
        columns = torch.stack((a, b, lost, outside, reach)).cpu()[:, going].numpy()
        rows.columns[:, active[going], j] = np.where(np.isnan(columns), np.inf, columns)
        v = w / b.clamp_min(1e-300)[:, None]
        if j % LOOK and j + 1 < limit and bool((b > 1e-12 * reach).all()):
            continue
        stop = rows.end(active, j + 1, goal[active])
        stop = going & (stop | (j + 1 == limit) | (b <= 1e-13 * reach).cpu().numpy())
        if not stop.any():
            continue
        index = active[stop]
        steps[index] = j + 1
        alpha, beta = (np.nan_to_num(t[index, : j + 1], posinf=0.0) for t in rows.columns[:2])
        own = basis[torch.from_numpy(stop).to(op.device), : j + 1]
        found = ritz_vectors(alpha, beta, own, RITZ)
        ritz[torch.from_numpy(index).to(op.device), : found.shape[1]] = found
        going &= ~stop
        if not going.any():
            break
        if going.sum() <= WORTH_COPYING * len(going):
            keep = going.nonzero()[0]
            there, basis = torch.from_numpy(keep).to(op.device), moved_up(basis, keep, j + 1)
            op, v, b, z = op.select(there), v[there], b[there], z[there]
            active, going = active[keep], going[keep]
    phi = torch.from_numpy(smallest_excluded(rows, steps, goal))
    return Deflated(phi, torch.from_numpy(steps), ritz)


def _start(seeds: Sequence[int], z: Tensor, dots: Dots) -> Tensor:
    """Return random unit vectors (batch, n) without components along z (batch, r, n)."""
    v = torch.stack([normal_numbers(z.shape[2], seed) for seed in seeds]).to(z.device)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
    for _ in range(2):
        v = v - (dots(v, z)[:, None] @ z)[:, 0]
    return v / torch.linalg.vector_norm(v, dim=1, keepdim=True)


def _step(
    op: JacobianOperator, v: Tensor, z: Tensor, known: Tensor, b: Tensor, dots: Dots
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multiply the last vector v of a basis, and orthogonalise the image.

    Returns:
        What is left of the image (batch, n); the diagonal entry of T, what reorthogonalisation took
        away, and the length of the image, (batch,) each.
    """
    w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
    reach = torch.linalg.vector_norm(w, dim=1)
    w = w - (dots(w, z)[:, None] @ z)[:, 0]
    a = (w * v).sum(1).clamp_min(0)
    w.addcmul_(v, a[:, None], value=-1)
    if known.shape[1] > 1:
        w.addcmul_(known[:, -2], b[:, None], value=-1)
    lost = torch.zeros_like(a)
    for vectors in (z, known):  # what rounding has left of them, as measured
        c = w[:, None] @ vectors.mT
        lost += c.abs().sum((1, 2))
        w = (w[:, None] - c @ vectors)[:, 0]
    return w, a, lost, reach


class Recurrences:
    """T of a batch of runs, and upper values of what each column of R consists of.

    Args:
        batch: number of runs.
        limit: steps of each at most.
        small: what has been deflated.
        roundoff: of the products.
        epsilon: the length that the start's component along an eigenvector has at least.

    Attributes:
        columns: entries alpha and beta of T, size of what reorthogonalisation took away, size of
            the part of v_j inside what is deflated, and :math:`|G v_j|`, (5, batch, limit).
    """

    def __init__(self, batch: int, limit: int, small: Bordered, roundoff: Roundoff, epsilon: float):
        self.columns = np.zeros((5, batch, limit))
        self.products = roundoff.products.numpy()
        self.size = roundoff.size.numpy() ** 2
        self.top = small.values.numpy()[:, -1]
        slack = small.slack(roundoff.size).numpy()
        self.off = np.linalg.norm(small.r_c.numpy(), axis=(1, 2)) + slack
        r, n = small.z.shape[1:]
        self.project = 2 * small.skew.numpy() + 4 * (Dots(n).roundings + (r + 8) * UNIT) * r**0.5
        self.epsilon = epsilon

    def end(self, active: Array, k: int, target: Array) -> Array:
        """Return which of the runs ``active`` may end after k steps: ``target`` is excluded.

        Or a Ritz value beyond it has come within the relative residual `HOPELESS`.
        """
        total, tail = _missed(self, active, np.full(len(active), k), target)
        alpha, beta = (t[active, :k] for t in self.columns[:2])
        finite = np.isfinite(alpha).all(1) & np.isfinite(beta).all(1)
        top, s = top_eigenpairs(*(np.where(finite[:, None], t, 0.0) for t in (alpha, beta)))
        hopeless = (top >= target) & (beta[:, -1] * np.abs(s[:, -1]) <= HOPELESS * top)
        return (total < self.epsilon) | (tail < 0.02 * total) | hopeless | ~finite


def excluded(rows: Recurrences, steps: Array, x: Array) -> Array:
    """Return whether every eigenvalue is below x (batch, ...) after ``steps`` (batch,) steps."""
    return _missed(rows, np.arange(len(x)), steps, x)[0] < rows.epsilon


def _missed(rows: Recurrences, index: Array, steps: Array, x: Array) -> tuple[Array, Array]:
    r"""Return upper values of :math:`\sum_j y_j(x) |R_j|`, and the share of the last vector.

    ``x`` is (entries of index, ...), with axes of its own behind the batch, and so are both
    results: infinite where x is not beyond the Ritz values.
    """
    k = int(steps.max(initial=0))
    if not k:
        return np.full(x.shape, np.inf), np.full(x.shape, np.inf)
    more = (...,) + (None,) * (x.ndim - 1)
    steps = steps[more]
    alpha, beta, lost, outside, reach = (t[index, :k][more] for t in rows.columns)
    with np.errstate(all="ignore"):
        # G is at most this much larger than B, if B is as large as x (Lemma 65)
        size, top, off = (t[index][more] / x for t in (rows.size, rows.top, rows.off))
        whole = np.minimum(size, np.maximum(top, 1.0) + off) * x
        p = rows.products[index][more]
        same = 2 * np.sqrt(whole) * p + p * p
        pivots = np.ones((len(x), k, *x.shape[1:]))
        inside, after = np.ones(x.shape, dtype=bool), np.zeros_like(x)
        for step in range(k - 1, -1, -1):
            live = step < steps
            pivot = x - alpha[:, step] - np.where(step + 1 < steps, after, 0.0)
            good = live & (pivot > 0)
            inside &= ~live | good
            pivots[:, step] = np.where(good, pivot, 1.0)
            after = beta[:, step - 1] ** 2 / pivots[:, step] if step else after
        y = np.cumprod(np.concatenate([1 / pivots[:, :1], beta[:, :-1] / pivots[:, 1:]], 1), 1)
        j = np.arange(k)[(None, slice(None), *more[1:])]
        unit = rows.project[index][more][:, None] + 2 * (j + 40) * UNIT
        missed = 1.01 * lost + whole[:, None] * outside + same[:, None] + reach * unit
        tail = np.where(j + 1 == steps[:, None], y * beta, 0.0).sum(1)
        total = np.where(j < steps[:, None], y * missed, 0.0).sum(1) + tail
        beyond = inside & (x > 0) & (steps > 0)
        total = np.where(beyond & ~np.isnan(total), total * (1 + 1e-6), np.inf)
        return total, np.where(beyond, tail, np.inf)


def smallest_excluded(rows: Recurrences, steps: Array, goal: Array) -> Array:
    """Return numbers that `excluded` shows, (batch,), infinity where there is none.

    As small as twelve bisections find them below ``goal``, where that is shown; elsewhere within
    5 % of the smallest excess over it.
    """
    base, reached = np.maximum(goal, 1e-300), excluded(rows, steps, goal)
    alpha, beta = (t.max(1, initial=0.0) for t in rows.columns[:2])

    def at(place: Array) -> Array:
        """Places are shares of the goal, or logarithms of the excess."""
        more = (..., None) if place.ndim > 1 else (...,)
        return np.where(reached[more], place * goal[more], base[more] * (1 + np.exp(place)))

    with np.errstate(all="ignore"):  # what overflows is not excluded
        size = np.clip(4 * np.nan_to_num(alpha + 2 * beta) / base, 4.0, 1e300)
        low, high = np.where(reached, 0.0, -30.0), np.where(reached, 1.0, np.log(size))
        while (more := ~(found := excluded(rows, steps, at(high))) & (high < 60)).any():
            high = np.where(more, high + 2, high)
        everyone = np.arange(len(goal))
        for _ in range(3):  # all that four bisections may ask for at once
            grid = np.linspace(low, high, 17, axis=1)
            shown = excluded(rows, steps, at(grid[:, 1:-1]))
            first = np.where(shown.any(1), shown.argmax(1), 15)
            low, high = grid[everyone, first], grid[everyone, first + 1]
        return np.where(found, at(high) * (1 + 1e-12), np.inf)
