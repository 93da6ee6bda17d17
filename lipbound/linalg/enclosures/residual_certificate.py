r"""Numbers proved to exceed the largest eigenvalue, from a Lanczos run with measured rounding.

Let B be symmetric positive semi-definite, :math:`v_1, \dots, v_k` *any* stored vectors, T *any*
symmetric tridiagonal matrix with entries >= 0, and :math:`R = B V - V T` what they miss by. For an
eigenpair :math:`B x = \varphi x` with :math:`\varphi` beyond the eigenvalues of T

.. math:: x \cdot v_1 = x^T R\,y(\varphi),\qquad y(\varphi) = (\varphi - T)^{-1} e_1 \ge 0,

so that a random :math:`v_1` rules out every :math:`\varphi` with
:math:`\sum_j y_j |R_j| < \varepsilon`: Lemma 65 (docs/theory/rounding.md). float64 arrays of numpy,
a few numbers for every norm.
"""

from collections.abc import Callable

import numpy as np

from lipbound.linalg.enclosures.verified import Bordered
from lipbound.linalg.krylov import Dots, eigenpairs, top_eigenpairs
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import Roundoff

Array = np.ndarray


class Recurrences:
    """T of a batch of runs, and upper values of what each column of R consists of.

    Args:
        batch: number of runs.
        limit: steps of each at most.
        small: what has been deflated.
        roundoff: of the products.
        epsilon: the length that the start's component along an eigenvector has at least.
    """

    def __init__(self, batch: int, limit: int, small: Bordered, roundoff: Roundoff, epsilon: float):
        self.alpha, self.beta, self.lost, self.outside, self.reach = (
            np.zeros((batch, limit)) for _ in range(5)
        )
        self.products = roundoff.products.numpy()
        self.size = roundoff.size.numpy() ** 2
        self.top = small.values.numpy()[:, -1]
        slack = small.slack(roundoff.size).numpy()
        self.off = np.linalg.norm(small.r_c.numpy(), axis=(1, 2)) + slack
        r, n = small.z.shape[1:]
        self.project = 2 * small.skew.numpy() + 4 * (Dots(n).roundings + (r + 8) * UNIT) * r**0.5
        self.epsilon = epsilon

    def append(
        self,
        active: Array,
        j: int,
        alpha: Array,
        beta: Array,
        lost: Array,
        outside: Array,
        reach: Array,
    ) -> None:
        """Store step j of the runs ``active``.

        Args:
            active: indices of the runs.
            j: the step.
            alpha, beta: entries of T.
            lost: size of what reorthogonalisation took away.
            outside: size of the part of v_j inside what is deflated.
            reach: |G v_j|.
        """
        into = (self.alpha, self.beta, self.lost, self.outside, self.reach)
        for kept, value in zip(into, (alpha, beta, lost, outside, reach), strict=True):
            kept[active, j] = np.where(np.isnan(value), np.inf, value)

    def shown(self, active: Array, k: int, target: Array) -> Array:
        """Return whether ``target`` is excluded after k steps of the runs ``active``."""
        total, tail = _missed(self, active, np.full(len(active), k), target)
        return (total < self.epsilon) | (tail < 0.02 * total)

    def hopeless(self, active: Array, k: int, target: Array, residual: float) -> Array:
        """Return whether a Ritz value beyond ``target`` has come within a relative residual."""
        alpha, beta = self.alpha[active, :k], self.beta[active, :k]
        finite = np.isfinite(alpha).all(1) & np.isfinite(beta).all(1)
        if not finite.all():
            return np.asarray(~finite)
        top, s = top_eigenpairs(alpha, beta)
        return np.asarray((top >= target) & (beta[:, -1] * np.abs(s[:, -1]) <= residual * top))

    def ritz(self, index: Array, k: int, count: int) -> Array:
        """Return coordinates (runs, count, k) of the top Ritz vectors of the runs ``index``."""
        alpha, beta = self.alpha[index, :k], self.beta[index, : k - 1]
        _, s = eigenpairs(np.nan_to_num(alpha, posinf=0.0), np.nan_to_num(beta, posinf=0.0))
        return s[:, :, ::-1][:, :, :count].swapaxes(1, 2).copy()


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
    steps, (alpha, beta) = steps[more], (t[index, :k][more] for t in (rows.alpha, rows.beta))
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
        lost, outside, reach = (t[index, :k][more] for t in (rows.lost, rows.outside, rows.reach))
        unit = rows.project[index][more][:, None] + 2 * (j + 40) * UNIT
        missed = 1.01 * lost + whole[:, None] * outside + same[:, None] + reach * unit
        tail = np.where(j + 1 == steps[:, None], y * beta, 0.0).sum(1)
        total = np.where(j < steps[:, None], y * missed, 0.0).sum(1) + tail
        beyond = inside & (x > 0) & (steps > 0)
        total = np.where(beyond & ~np.isnan(total), total * (1 + 1e-6), np.inf)
        return total, np.where(beyond, tail, np.inf)


def bisected(
    test: Callable[[Array], Array], low: Array, high: Array, rounds: int = 3
) -> tuple[Array, Array]:
    """Return intervals in [low, high] (batch,) in which ``test`` begins to hold.

    Four bisections a round; ``test`` takes numbers (batch, 15), all that the four bisections may
    ask for.
    """
    rows = np.arange(len(low))
    for _ in range(rounds):
        grid = np.stack([low, high], 1)
        for _ in range(4):
            finer = np.empty((len(low), 2 * grid.shape[1] - 1))
            finer[:, ::2], finer[:, 1::2] = grid, (grid[:, 1:] + grid[:, :-1]) / 2
            grid = finer
        holds = test(grid[:, 1:-1])
        first, last = np.zeros(len(low), dtype=int), np.full(len(low), 16)
        for _ in range(4):
            middle = (first + last) // 2
            inside = holds[rows, middle - 1]
            first, last = np.where(inside, first, middle), np.where(inside, middle, last)
        low, high = grid[rows, first], grid[rows, last]
    return low, high


def below(rows: Recurrences, steps: Array, x: Array) -> Array:
    """Return numbers at most x (batch,), as small as twelve bisections find them.

    Where `excluded` shows x, it shows them too.
    """
    _, high = bisected(lambda middle: excluded(rows, steps, middle), np.zeros_like(x), x)
    return high * (1 + 1e-12)


def smallest_excluded(rows: Recurrences, steps: Array, start: Array) -> Array:
    """Return numbers beyond ``start`` (batch,) that `excluded` shows, infinity if there is none.

    They are within 5 % of the smallest excess that it shows.
    """
    k = int(steps.max(initial=0))
    alpha, beta = np.maximum(rows.alpha[:, :k], 0), rows.beta[:, :k]
    largest = np.nan_to_num(alpha.max(1, initial=0.0) + 2 * beta.max(1, initial=0.0))
    base = np.maximum(np.maximum(start, 0.0), 1e-300)
    with np.errstate(all="ignore"):  # what overflows is not excluded
        low, high = np.full_like(base, -30.0), np.log(np.clip(4 * largest / base, 4.0, 1e300))
        found = excluded(rows, steps, base * (1 + np.exp(high)))
        for _ in range(30):
            more = ~found & (high < 60)
            if not more.any():
                break
            high = np.where(more, high + 2, high)
            found = excluded(rows, steps, base * (1 + np.exp(high)))

        def shows(middle: Array) -> Array:
            return excluded(rows, steps, base[:, None] * (1 + np.exp(middle)))

        low, high = bisected(shows, low, high)
        return np.where(found, base * (1 + np.exp(high)) * (1 + 1e-12), np.inf)
