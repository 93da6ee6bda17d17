r"""Probabilistic upper bounds on the largest eigenvalue, from a Lanczos run.

Lanczos on a symmetric positive semi-definite :math:`G` from a start vector uniform on the sphere
gives a polynomial :math:`p_k`. Where it exceeds :math:`1/\varepsilon` beyond the largest Ritz
value, the largest eigenvalue is smaller, with a failure probability that belongs to
:math:`\varepsilon` (Hochstenbach 2013): Lemmas 41 and 42 (docs/theory/certificates.md). Unlike
residuals, it cannot be fooled by clustered eigenvalues.
"""

import math

import numpy as np
import torch
from scipy.special import betaincinv, betaln

from lipbound.errors import LipboundError, real
from lipbound.linalg.krylov import top_eigenpairs

Array = np.ndarray
ESTIMATE_DELTA = 1e-3
"""Failure probability, per norm, behind the error estimate of a norm for which no certificate was
asked."""
RESCALE = 8
"""Steps between two rescalings of the polynomial, which grows at most by the inverse of the
rounding unit in each: far from overflow."""
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Relative allowance for products in this dtype: the recurrence belongs to a matrix that is off by
rounding."""


def log_inverse_epsilon(n: int, delta: float) -> float:
    """Return log(1 / eps) of the least component eps of a random vector, but for probability delta.

    A uniform unit vector of R^n has a component below eps along a given direction with probability
    at most ``delta``: Lemma 41 (docs/theory/certificates.md).
    """
    if n == 1:
        return 0.0
    if delta < 1e-100 and n > 2:
        # beyond the range of the quantile: the density of the squared component is at most
        # x^(-1/2) / B
        return -math.log(delta) - float(betaln(0.5, (n - 1) / 2)) + math.log(2)
    return -0.5 * math.log(float(betaincinv(0.5, (n - 1) / 2, delta)))


def log_polynomial(alpha: Array, beta: Array, steps: Array, x: Array) -> Array:
    """Return log p_k(x) of a batch of recurrences, -inf where p_k(x) <= 0.

    Arrays are of numpy and float64, as everywhere in this module: the arithmetic is of a few
    numbers per norm.

    Args:
        alpha, beta: recurrences, (batch, at least k).
        steps: k, (batch,).
        x: where to evaluate, (batch,).
    """
    older, p = np.zeros_like(x), np.ones_like(x)
    total, before = np.zeros_like(x), np.zeros_like(x)
    fewest = int(steps.min())
    ahead, b = x - alpha.T, np.ascontiguousarray(beta.T)
    with np.errstate(all="ignore"):  # what overflows all the same is counted as "not excluded"
        for j in range(int(steps.max())):
            following = (ahead[j] * p - before * older) / b[j]
            if j >= fewest:
                following = np.where(j < steps, following, p)
            older, p, before = p, following, b[j]
            if j % RESCALE == RESCALE - 1:
                size = np.maximum(np.maximum(np.abs(p), np.abs(older)), 1e-300)
                p, older, total = p / size, older / size, total + np.log(size)
        p = np.where(np.isfinite(p), p, 0.0)
        return np.where(p > 0, total + np.log(p), -math.inf)


def excludes(alpha: Array, beta: Array, steps: Array, x: Array, log_inverse: float) -> Array:
    """Return whether the largest eigenvalue is below x, beyond the Ritz values, (batch,) bool.

    At the failure probability behind ``log_inverse``: Lemma 42 (docs/theory/certificates.md).
    """
    return log_polynomial(alpha, beta, steps, x) >= log_inverse


def upper_bound(alpha: Array, beta: Array, steps: Array, top: Array, log_inverse: float) -> Array:
    """Return upper bounds on the largest eigenvalues, (batch,).

    Within 2 % of the excess over ``top``, the largest Ritz values, that the recurrences allow:
    found by bisection on the logarithm of the excess, and rounded upwards.
    """
    low, high = np.full_like(top, -36.0), np.full_like(top, -6.0)
    for _ in range(40):
        outside = ~excludes(alpha, beta, steps, top * (1 + np.exp(high)), log_inverse)
        if not outside.any():
            break
        low, high = np.where(outside, high, low), np.where(outside, high + 4.0, high)
    for _ in range(11):
        middle = (low + high) / 2
        inside = excludes(alpha, beta, steps, top * (1 + np.exp(middle)), log_inverse)
        high, low = np.where(inside, middle, high), np.where(inside, low, middle)
    return np.where(top > 0, top * (1 + np.exp(high)), 0.0)


class StoppingRule:
    """Decide when a Lanczos recurrence may stop, and what it has then shown.

    Args:
        n: dimension of the sphere the start vectors were drawn from.
        batch: how many norms share the failure probability ``delta`` (union bound).
        tol: relative width ``upper / lower - 1`` to reach.
        delta: total failure probability of the upper bounds, or None for an estimate.
        dtype: of the products.

    Raises:
        LipboundError: ``delta`` is not between 0 and 1, or ``tol`` is below rounding of the dtype.
    """

    def __init__(self, n: int, batch: int, tol: float, delta: float | None, dtype: torch.dtype):
        if delta is not None:
            real("delta", delta, "between 0 and 1, a probability of failure", above=0, below=1)
        self.rounding = 0.0 if delta is None else ROUNDING[dtype]
        if delta is not None and tol <= self.rounding:
            raise LipboundError(
                f"tol {tol:g} cannot be certified in {str(dtype).removeprefix('torch.')}, whose "
                f"rounding takes {self.rounding:g}; "
                f"use {'float64 or ' if dtype == torch.float32 else ''}a larger tol"
            )
        each = ESTIMATE_DELTA if delta is None else delta / max(1, batch)
        self.log_inverse = log_inverse_epsilon(n, each)
        self.tol = tol
        self.floor = 4 * torch.finfo(dtype).eps

    def look(self, _: Array, alpha: Array, beta: Array) -> tuple[Array, Array]:
        """Return top Ritz values of recurrences (batch, k), and which of them end, (batch,)."""
        top = np.maximum(top_eigenpairs(alpha, beta)[0], 0)
        reached = self._reached(alpha, beta, np.full(len(alpha), alpha.shape[1]), top)
        return top, reached | self.exhausted(beta[:, -1], top)

    def exhausted(self, beta: Array, top: Array) -> Array:
        """Return whether Krylov spaces have ended, from their last betas, (batch,) bool."""
        return beta <= self.floor * top

    def _reached(self, alpha: Array, beta: Array, steps: Array, top: Array) -> Array:
        """Return whether tol is reached, (batch,) bool."""
        with np.errstate(over="ignore"):  # of what is not finite
            target = top * ((1 + self.tol) / (1 + self.rounding)) ** 2
        # a Ritz value that rounding has made negative is no zero
        zero = (alpha[:, 0] == 0) & (beta[:, 0] == 0)
        below = excludes(alpha, self._floored(beta, top), steps, target, self.log_inverse)
        return below & (top > 0) | zero

    def _floored(self, beta: Array, top: Array) -> Array:
        """Return betas no smaller than rounding may have made them.

        A larger beta makes the bound larger, by Lemma 42 (docs/theory/certificates.md).
        """
        return np.maximum(np.maximum(beta, self.floor * top[:, None]), 1e-300)

    def shown(self, alpha: Array, beta: Array, steps: Array, top: Array) -> tuple[Array, Array]:
        """Return upper bounds on square roots of eigenvalues, and whether tol is reached, (batch,).

        From recurrences (batch, at least k) after k = ``steps`` and their top Ritz values.
        """
        bound = upper_bound(alpha, self._floored(beta, top), steps, top, self.log_inverse)
        upper = np.sqrt(bound) * (1 + self.rounding)
        reached = self._reached(alpha, beta, steps, top)
        return np.where(reached, np.minimum(upper, np.sqrt(top) * (1 + self.tol)), upper), reached
