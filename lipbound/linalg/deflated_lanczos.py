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
from lipbound.linalg.krylov import Dots, Runs, top_eigenpairs
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
    if small.z.shape[1] >= math.prod(op.out_shape):
        nothing = torch.zeros_like(target)
        return Deflated(nothing, nothing.long(), small.z[:, :0])
    goal = target.numpy()
    runs = DeflatedRuns(op, roundoff, small, goal, delta, seeds, max_steps)
    phi = torch.from_numpy(smallest_excluded(runs, runs.steps, goal))
    return Deflated(phi, torch.from_numpy(runs.steps), runs.ritz)


class DeflatedRuns(Runs):
    """Runs on the deflated matrix, and upper values of what each column of R consists of.

    Arguments as of `deflated_bound`.

    Attributes:
        columns: entries alpha and beta of T, size of what reorthogonalisation took away, size of
            the part of v_j inside what is deflated, and :math:`|G v_j|`, (5, batch, limit).
        epsilon: the length that the start's component along an eigenvector has at least.
    """

    kinds = 5

    def __init__(
        self,
        op: JacobianOperator,
        roundoff: Roundoff,
        small: Bordered,
        goal: Array,
        delta: float,
        seeds: Sequence[int],
        max_steps: int,
    ):
        z, (r, n) = small.z, small.z.shape[1:]
        self._dots, self._own, self._goal = Dots(n), z, goal
        self._gamma = 2 * (self._dots.roundings + 4 * UNIT) * r**0.5  # of products with z
        epsilon = math.exp(-log_inverse_epsilon(n, delta))
        self.epsilon = epsilon - 4 * float(small.skew.amax()) - 4 * self._gamma - 16 * UNIT
        self.products, self.size = roundoff.products.numpy(), roundoff.size.numpy() ** 2
        self.largest = small.values.numpy()[:, -1]
        slack = small.slack(roundoff.size).numpy()
        self.off = np.linalg.norm(small.r_c.numpy(), axis=(1, 2)) + slack
        self.project = 2 * small.skew.numpy() + 4 * (self._dots.roundings + (r + 8) * UNIT) * r**0.5
        limit, start = min(max_steps, n - r), self._outside(seeds)
        ritz = z.new_zeros(op.batch, min(RITZ, limit), n)
        super().__init__(op, self._end, start, limit=limit, every=LOOK, ritz=ritz)

    def _outside(self, seeds: Sequence[int]) -> Tensor:
        """Return random unit vectors (batch, n) without components along z (batch, r, n)."""
        z = self._own
        v = torch.stack([normal_numbers(z.shape[2], seed) for seed in seeds]).to(z.device)
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
        for _ in range(2):
            v = v - (self._dots(v, z)[:, None] @ z)[:, 0]
        return v / torch.linalg.vector_norm(v, dim=1, keepdim=True)

    def _step(
        self, op: JacobianOperator, v: Tensor, known: Tensor, b: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        z = self._own
        outside = torch.linalg.vector_norm(self._dots(v, z), dim=1) + self._gamma
        w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        reach = torch.linalg.vector_norm(w, dim=1)
        w = w - (self._dots(w, z)[:, None] @ z)[:, 0]
        a = (w * v).sum(1).clamp_min(0)
        w.addcmul_(v, a[:, None], value=-1)
        if known.shape[1] > 1:
            w.addcmul_(known[:, -2], b[:, None], value=-1)
        lost = torch.zeros_like(a)
        for vectors in (z, known):  # what rounding has left of them, as measured
            c = w[:, None] @ vectors.mT
            lost += c.abs().sum((1, 2))
            w = (w[:, None] - c @ vectors)[:, 0]
        return w, (a, lost, outside, reach)

    def _end(self, index: Array, alpha: Array, beta: Array) -> tuple[Array, Array]:
        """End where the goal is excluded, or where a Ritz value beyond it is near an eigenvalue."""
        k, goal = alpha.shape[1], self._goal[index]
        total, tail = _missed(self, index, np.full(len(index), k), goal)
        top, s = top_eigenpairs(alpha, beta)
        hopeless = (top >= goal) & (beta[:, -1] * np.abs(s[:, -1]) <= HOPELESS * top)
        exhausted = beta[:, -1] <= 1e-13 * self.columns[4, index, k - 1]
        return top, (total < self.epsilon) | (tail < 0.02 * total) | hopeless | exhausted


def excluded(rows: DeflatedRuns, steps: Array, x: Array) -> Array:
    """Return whether every eigenvalue is below x (batch, ...) after ``steps`` (batch,) steps."""
    return _missed(rows, np.arange(len(x)), steps, x)[0] < rows.epsilon


def _missed(rows: DeflatedRuns, index: Array, steps: Array, x: Array) -> tuple[Array, Array]:
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
        size, top, off = (t[index][more] / x for t in (rows.size, rows.largest, rows.off))
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


def smallest_excluded(rows: DeflatedRuns, steps: Array, goal: Array) -> Array:
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
