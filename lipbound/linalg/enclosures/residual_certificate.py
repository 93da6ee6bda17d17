r"""Which numbers exceed the largest eigenvalue of a matrix? Answered from a Lanczos run whose every
rounding has been measured.

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

from lipbound.linalg.enclosures.inner_products import Dots
from lipbound.linalg.enclosures.verified import Bordered
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.stopping import eigenpairs, top_eigenpairs

Array = np.ndarray


class Recurrences:
    """T of a batch of runs, and upper values of what each column of R consists of.

    Args:
        batch, limit: runs, and steps of each at most.
        small: what has been deflated. roundoff: of the products.
        epsilon: the length that the start's component along an eigenvector has at least.
    """

    def __init__(self, batch: int, limit: int, small: Bordered, roundoff: Roundoff, epsilon: float):
        self.alpha, self.beta, self.lost, self.outside, self.reach = (
            np.zeros((batch, limit)) for _ in range(5)
        )
        self.products = roundoff.products.numpy()
        self.size = roundoff.size.numpy() ** 2
        self.top = small.values.numpy()[:, -1]
        self.off = (
            np.linalg.norm(small.r_c.numpy(), axis=(1, 2)) + small.slack(roundoff.size).numpy()
        )
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
        """Step j of the runs ``active``: entries of T, what reorthogonalisation took away, the part
        of v_j inside what is deflated, |G v_j|."""
        for name, value in (
            ("alpha", alpha),
            ("beta", beta),
            ("lost", lost),
            ("outside", outside),
            ("reach", reach),
        ):
            getattr(self, name)[active, j] = np.where(np.isnan(value), np.inf, value)

    def shown(self, active: Array, k: int, target: Array) -> Array:
        """Whether ``target`` is excluded after k steps of the runs ``active``."""
        total, tail = _missed(self, active, np.full(len(active), k), target)
        return (total < self.epsilon) | (tail < 0.02 * total)

    def hopeless(self, active: Array, k: int, target: Array, residual: float) -> Array:
        """Whether a Ritz value beyond ``target`` has come within a relative residual."""
        index = active
        if not (
            np.isfinite(self.alpha[index, :k]).all() and np.isfinite(self.beta[index, :k]).all()
        ):
            return np.asarray(
                ~(
                    np.isfinite(self.alpha[index, :k]).all(1)
                    & np.isfinite(self.beta[index, :k]).all(1)
                )
            )
        top, s = top_eigenpairs(self.alpha[index, :k], self.beta[index, :k])
        return np.asarray(
            (top >= target) & (self.beta[index, k - 1] * np.abs(s[:, -1]) <= residual * top)
        )

    def ritz(self, index: Array, k: int, count: int) -> Array:
        """Coordinates of the largest Ritz vectors of the runs ``index`` after k steps, (runs,
        count, k)."""
        _, s = eigenpairs(
            *(
                np.nan_to_num(t[index, :end], posinf=0.0)
                for t, end in ((self.alpha, k), (self.beta, k - 1))
            )
        )
        return s[:, :, ::-1][:, :, :count].swapaxes(1, 2).copy()


def excluded(rows: Recurrences, steps: Array, x: Array) -> Array:
    """Whether every eigenvalue is below x (batch, ...), bool, after ``steps`` (batch,) steps."""
    return _missed(rows, np.arange(len(x)), steps, x)[0] < rows.epsilon


def _missed(rows: Recurrences, index: Array, steps: Array, x: Array) -> tuple[Array, Array]:
    r"""Upper values of :math:`\sum_j y_j(x) |R_j|`, infinite where x is not beyond the Ritz values,
    and what the last vector has in it.

    ``x`` (entries of index, ...), with axes of its own behind the batch; so are both results.
    """
    k = int(steps.max(initial=0))
    if not k:
        return np.full(x.shape, np.inf), np.full(x.shape, np.inf)
    more = (...,) + (None,) * (x.ndim - 1)
    steps, (alpha, beta) = steps[more], (t[index, :k][more] for t in (rows.alpha, rows.beta))
    with np.errstate(all="ignore"):
        # G is at most this much larger than B, if B is as large as x (Lemma 65)
        whole = (
            np.minimum(
                rows.size[index][more] / x,
                np.maximum(rows.top[index][more] / x, 1.0) + rows.off[index][more] / x,
            )
            * x
        )
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
        missed = (
            1.01 * lost
            + whole[:, None] * outside
            + same[:, None]
            + reach * (rows.project[index][more][:, None] + 2 * (j + 40) * UNIT)
        )
        tail = np.where(j + 1 == steps[:, None], y * beta, 0.0).sum(1)
        total = np.where(j < steps[:, None], y * missed, 0.0).sum(1) + tail
        beyond = inside & (x > 0) & (steps > 0)
        return np.where(
            beyond, np.where(np.isnan(total), np.inf, total * (1 + 1e-6)), np.inf
        ), np.where(beyond, tail, np.inf)


def bisected(
    test: Callable[[Array], Array], low: Array, high: Array, rounds: int = 3
) -> tuple[Array, Array]:
    """Ends (batch,) of the intervals that four bisections a round leave of [low, high], where
    ``test`` holds from somewhere on.

    ``test`` takes numbers (batch, 15), all that the four bisections may ask for.
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
    """Numbers that `excluded` shows too, at most x (batch,), which it shows: as small as twelve
    bisections find them."""
    _, high = bisected(lambda middle: excluded(rows, steps, middle), np.zeros_like(x), x)
    return high * (1 + 1e-12)


def smallest_excluded(rows: Recurrences, steps: Array, start: Array) -> Array:
    """An x beyond ``start`` (batch,) that `excluded` shows, within 5 % of the smallest excess that
    it shows; infinity where there is none."""
    k = int(steps.max(initial=0))
    largest = np.nan_to_num(
        np.maximum(rows.alpha[:, :k], 0).max(1, initial=0.0)
        + 2 * rows.beta[:, :k].max(1, initial=0.0)
    )
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
        low, high = bisected(
            lambda middle: excluded(rows, steps, base[:, None] * (1 + np.exp(middle))), low, high
        )
        return np.where(found, base * (1 + np.exp(high)) * (1 + 1e-12), np.inf)
