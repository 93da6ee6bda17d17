r"""Probabilistic upper bounds on the largest eigenvalue, from a Lanczos run.

A run on a symmetric positive semi-definite G leaves vectors V and a tridiagonal T with
:math:`G V - V T = R`. For an eigenpair :math:`G x = \lambda x` with :math:`\lambda` beyond the
eigenvalues of T

.. math:: x \cdot v_1 = x^T R\,y(\lambda),\qquad y(\lambda) = (\lambda - T)^{-1} e_1 \ge 0,

so that a random :math:`v_1` rules out every :math:`\lambda` with
:math:`\sum_j y_j |R_j| < \varepsilon`: Lemma 65 (docs/theory/rounding.md). Without rounding
R has one column, and the sum is the inverse of a Lanczos polynomial: Lemma 42
(docs/theory/certificates.md). Unlike residuals, it cannot be fooled by clustered eigenvalues.

Arrays are of numpy and float64: the arithmetic is of a few numbers per norm.
"""

import math

import numpy as np
import torch
from scipy.special import betaincinv, betaln

from lipbound.linalg.krylov import Array, Recurrence
from lipbound.linalg.matrix_norms import UNIT

STARTS = (1, 2, 4, 8, 16)
"""Numbers of independent starts over which a probability is multiplied up, with an epsilon that is
the larger the more they are: where rounding hides what one sees."""
SHARES = (0.84, 0.04, 0.04, 0.04, 0.04)
"""Shares of the probability that each of these numbers may fail with, since the first run decides
which it is."""
LEAST_EXCESS, MOST_EXCESS = -36.0, 60.0
"""Logarithms of the excess over the largest Ritz value, relative to it, between which a bound is
sought."""
LEAST_LOST = 32
"""Units of the eigenvalue's rounding that orthogonalisation is taken to lose at least."""
_EXCESS = 0.03
"""Accuracy of that excess."""
_TOGETHER = 7
"""Numbers between two bounds that are tried together: numpy takes as long for one."""
_BETWEEN = np.arange(1, _TOGETHER + 1) / (_TOGETHER + 1)
ESTIMATE_DELTA = 1e-3
"""Failure probability, per norm, behind the error estimate of a norm for which no certificate was
asked."""
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Relative allowance for products in this dtype, where nothing is known of their rounding."""


def log_inverse_epsilon(n: int, delta: float) -> float:
    """Return log(1 / eps) of the least component eps of a random vector, but for probability delta.

    A uniform unit vector of R^n has a component below eps along a given direction with probability
    at most ``delta``: Lemma 41 (docs/theory/certificates.md).
    """
    if n == 1:
        return 0.0
    if delta < 1e-100:
        # beyond the range of the quantile: the density of the squared component is at most
        # x^(-1/2) / B
        return -math.log(delta) - float(betaln(0.5, (n - 1) / 2)) + math.log(2)
    return -0.5 * math.log(float(betaincinv(0.5, (n - 1) / 2, delta)))


class Certificate:
    r"""Upper bounds on largest eigenvalues from recurrences, with a failure probability.

    Args:
        n: dimension of the sphere that start vectors were drawn from.
        delta: with which each bound may fail.
        products: distances of products of J with unit vectors from exact ones, (batch,); None to
            leave rounding out.
        floor: without products, the betas' rounding relative to the eigenvalue.

    Attributes:
        epsilon: components that starts have at least along every eigenvector, where each of 1, 2,
            ... independent ones (`STARTS`) may fail with its root of the probability.
    """

    def __init__(self, n: int, delta: float, products: Array | None = None, floor: float = 0.0):
        self._products, self._floor = products, floor
        each = [(1.0, 1)] if products is None else zip(SHARES, STARTS, strict=True)
        exact = [log_inverse_epsilon(n, (share * delta) ** (1 / k)) for share, k in each]
        lost = 0.0 if products is None else 16 * UNIT  # what starts are rounded by
        self.epsilon = np.exp(-np.array(exact)) - lost

    def _missed(self, index: Array, part: Recurrence, x: Array) -> tuple[Array, Array]:
        r"""Return upper values of :math:`\sum_j y_j(x) |R_j|`, and the share of the last vector.

        ``x`` is one number for each entry; both are infinite where it is not beyond the Ritz
        values.
        """
        alpha, inside, k = part.alpha, part.inside, part.alpha.shape[1]
        everyone, last = np.arange(len(x)), part.steps - 1
        with np.errstate(all="ignore"):
            if self._products is None:  # a larger beta makes the bound larger (Lemma 42)
                live = np.arange(k) < last[:, None]
                inside = np.where(live, np.maximum(inside, self._floor * x[:, None]), 0.0)
            ahead, squares = np.subtract(x, alpha.T, order="C"), np.square(inside.T, order="C")
            for j in range(k - 1, 0, -1):  # what is ahead of each becomes its pivot
                ahead[j - 1] -= squares[j - 1] / ahead[j]
            pivots = ahead.T
            ratios = np.concatenate([np.ones((len(x), 1)), inside[:, :-1]], 1) / pivots
            y = np.exp(np.cumsum(np.log(ratios), 1))
            tail = y[everyone, last] * np.maximum(part.last, self._floor * x)
            total = tail
            if self._products is not None:
                # if x is the largest eigenvalue, J is no longer than its root (Lemma 65)
                p, root = self._products[index][:, None], np.sqrt(x)[:, None]
                # digits that differ from run to run count as no fewer than some units
                lost = np.maximum(part.lost, LEAST_LOST * UNIT * x[:, None])
                images = np.sqrt(alpha + lost + 3 * root * p + p * p)
                sums = 2 * (np.arange(k) + 40) * UNIT * x[:, None]
                each = 1.01 * (lost + (root + images + p) * p) + sums
                total = tail + (y * each).sum(1)
            beyond = (pivots > 0).all(1) & np.isfinite(total) & (x > 0)
        total, tail = (np.where(beyond, t * (1 + 1e-6), np.inf) for t in (total, tail))
        return total, tail

    def shows(
        self, index: Array, part: Recurrence, x: Array, starts: Array
    ) -> tuple[Array, Array, Array]:
        """Return whether all eigenvalues are below x, (entries,) bool.

        With at least so many ``starts``, and as few as rounding allows: also how many these are,
        and where more steps cannot help since rounding alone is too much.
        """
        total, tail = self._missed(index, part, x)
        with np.errstate(invalid="ignore"):
            noise = np.nan_to_num(total - tail, nan=np.inf)
            # the end of a Krylov space leaves its last vector's share as it is
            enough = np.where(part.whole, total, noise / 0.9)[:, None] < self.epsilon
            place = np.where(enough.any(1), enough.argmax(1), len(self.epsilon) - 1)
            place = np.maximum(place, np.searchsorted(STARTS, starts))
            hopeless = ~enough.any(1) & (tail < noise / 8)
            return total < self.epsilon[place], np.array(STARTS)[place], hopeless

    def bound(self, found: Recurrence, starts: Array, goal: Array) -> Array:
        """Return upper bounds on the largest eigenvalues, (batch,); infinite where there is none.

        At most ``goal`` where that is shown. Within `_EXCESS` of the excess over Ritz values that
        recurrences allow, in ever smaller parts of its logarithm.

        Args:
            found: recurrences.
            starts: over how many the probability is multiplied up, (batch,).
            goal: eigenvalues that would do.
        """
        epsilon = self.epsilon[np.searchsorted(STARTS, starts)]
        everyone, p = np.arange(len(goal)), self._products
        with np.errstate(all="ignore"):
            base = found.top if p is None else np.maximum(found.top, p * p)
            x = np.where(goal > base, goal, 2 * base)
            high = np.maximum(np.log(x / base - 1), LEAST_EXCESS)
            total = self._missed(everyone, found, x)[0]
            at_once = reached = total < epsilon
            while not (reached | ~(high < MOST_EXCESS)).all():
                high = np.where(reached, high, high + 3.0)
                total = self._missed(everyone, found, base * (1 + np.exp(high)))[0]
                reached = total < epsilon
            # the sum falls at least as fast as the excess grows
            low = np.maximum(high - np.log(epsilon / total), LEAST_EXCESS)
            index, part = np.repeat(everyone, _TOGETHER), found.repeated(_TOGETHER)
            while np.where(reached, high - low, 0.0).max(initial=0.0) > _EXCESS:
                tried = low[:, None] + (high - low)[:, None] * _BETWEEN
                total = self._missed(index, part, (base[:, None] * (1 + np.exp(tried))).ravel())[0]
                shown = total.reshape(tried.shape) < epsilon[:, None]
                high = np.where(shown, tried, high[:, None]).min(1)
                low = np.where(shown, low[:, None], tried).max(1)
            bound = np.where(reached, base * (1 + np.exp(high)), np.inf)
            bound = np.where(at_once, np.minimum(bound, x), bound)
        # the rounding of a few units in the solution enlarges it
        bound = np.where(base > 0, bound * (1 + 1e-12), 0.0)
        return np.where(np.isnan(base), np.inf, bound)
