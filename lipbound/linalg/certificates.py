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

Array = np.ndarray
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
