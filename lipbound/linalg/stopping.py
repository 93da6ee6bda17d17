"""When a Lanczos recurrence may stop, and what it has shown by then."""

import math

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstemr, dstev
from torch import Tensor

from lipbound.errors import LipboundError, is_number
from lipbound.linalg.certificates import ROUNDING, excludes, log_inverse_epsilon, upper_bound
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.reference_solvers import dense_svd
from lipbound.linalg.solution import Results

ESTIMATE_DELTA = 1e-3
"""Failure probability, per norm, behind the error estimate of a norm for which no certificate was
asked."""
LARGEST_DENSE_SVD = 512
"""Largest output dimension for which a Krylov space that ends before a certificate is reached is
replaced by a dense decomposition."""


class StoppingRule:
    """When a Lanczos recurrence may stop, and what it has then shown.

    Args:
        n: dimension of the sphere the start vectors were drawn from.
        batch: how many norms share the failure probability ``delta`` (union bound).
        tol: relative width ``upper / lower - 1`` to reach.
        delta: total failure probability of the upper bounds, or None for an estimate.
        dtype: of the products.
    """

    def __init__(self, n: int, batch: int, tol: float, delta: float | None, dtype: torch.dtype):
        self.certify = delta is not None
        if delta is not None and not (is_number(delta) and 0 < delta < 1):
            raise LipboundError(
                f"delta is {delta!r}; the failure probability must be between 0 and 1"
            )
        self.rounding = ROUNDING[dtype] if self.certify else 0.0
        if self.certify and tol <= self.rounding:
            raise LipboundError(
                f"tol {tol:g} cannot be certified in {str(dtype).removeprefix('torch.')}, whose "
                f"rounding takes {self.rounding:g}; "
                + ("use float64 or a larger tol" if dtype == torch.float32 else "use a larger tol")
            )
        self.log_inverse = log_inverse_epsilon(
            n, ESTIMATE_DELTA if delta is None else delta / max(1, batch)
        )
        self.tol = tol
        self.floor = 4 * torch.finfo(dtype).eps

    def look(
        self, alpha: Tensor, beta: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """After k steps, alpha and beta (batch, k): top Ritz value, its vector (batch, k), whether
        tol is reached, whether the space is exhausted.

        Zero and False for entries that are ``done`` (batch,), whose recurrences have gone on beyond
        their end.
        """
        top, s, reached, exhausted = (torch.zeros_like(t) for t in (alpha[:, 0], alpha, done, done))
        for whole, part in zip(
            (top, s, reached, exhausted),
            self._look(alpha[~done].numpy(), beta[~done].numpy()),
            strict=True,
        ):
            whole[~done] = torch.from_numpy(part)
        return top, s, reached, exhausted

    def _look(
        self, a: np.ndarray, b: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        if not np.isfinite(b[:, -1]).all() or not np.isfinite(a[:, -1]).all():
            a, b = np.nan_to_num(a), np.nan_to_num(b)
        k = a.shape[1]
        ritz, s = top_eigenpairs(a, b)
        top = np.maximum(ritz, 0)
        with np.errstate(over="ignore"):  # of what is not finite
            target = top * ((1 + self.tol) / (1 + self.rounding)) ** 2
        zero = (np.abs(a).max(1, initial=0) == 0) & (
            b.max(1, initial=0) == 0
        )  # a Ritz value that rounding has made negative is no zero
        reached = (
            excludes(a, self._floored(b, top), np.full(len(a), k), target, self.log_inverse)
            & (top > 0)
            | zero
        )
        return top, s, reached, b[:, -1] <= self.floor * top

    def _floored(self, beta: np.ndarray, top: np.ndarray) -> np.ndarray:
        """A beta below rounding is rounding: taking it larger makes the bound larger, by Lemma 42
        (docs/theory/certificates.md)."""
        return np.maximum(np.maximum(beta, self.floor * top[:, None]), 1e-300)

    def finish(self, results: Results, op: JacobianOperator, top: Tensor) -> None:
        """Values of all entries from their recurrences and largest Ritz values ``top``; dense ones
        where the Krylov space ended too early."""
        beta = self._floored(results.beta.numpy(), top.numpy())
        bound = upper_bound(
            results.alpha.numpy(), beta, results.steps.numpy(), top.numpy(), self.log_inverse
        )
        upper = torch.from_numpy(bound).sqrt() * (1 + self.rounding)
        upper = torch.where(
            results.converged, upper.minimum(top.sqrt() * (1 + self.tol)), upper
        )  # what `look` has shown
        results.lower = top.sqrt()
        none = torch.where(
            results.converged, 0.0, math.inf
        )  # a zero, or a Ritz value that rounding has made negative
        results.error = torch.where(top > 0, upper / results.lower.clamp_min(1e-300) - 1, none)
        results.converged |= results.error <= self.tol
        if self.certify:
            results.upper = upper
        scale = results.unit.sqrt()
        results.lower, results.upper = results.lower * scale, results.upper * scale
        # A Krylov space that has ended may have ended on rounding, short of the top: what it shows
        # is in `error`; small cases are settled densely.
        early = results.exhausted & ~results.converged & torch.isfinite(top)
        if bool(early.any()) and math.prod(op.out_shape) <= LARGEST_DENSE_SVD:
            dense = dense_svd(op.select(early.nonzero()[:, 0].to(op.device)))
            results.lower[early], results.error[early] = dense.lower, dense.error
            if self.certify:
                results.upper[early] = dense.upper
            results.converged[early] = dense.error <= max(self.tol, 1e-12)


def top_eigenpairs(alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest eigenvalues (batch,) and their vectors (batch, k) of tridiagonal matrices: diagonal
    alpha, off-diagonal beta[:, :-1], both (batch, k).

    By LAPACK's tridiagonal solver: a dense one costs more than a step, and numpy's threads would
    fight with torch's over the cores.
    """
    k = alpha.shape[1]
    values, vectors = np.empty(len(alpha)), np.empty((len(alpha), k))
    for i in range(len(alpha)):
        found, value, vector, info = dstemr(
            alpha[i].copy(), beta[i].copy(), 2, 0.0, 0.0, k, k
        )  # which overwrites them
        if info or found != 1:
            value, vector = eigh_tridiagonal(
                alpha[i], beta[i, :-1], select="i", select_range=(k - 1, k - 1)
            )
        values[i], vectors[i] = value[0], vector[:, 0]
    return values, vectors


def eigenpairs(alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, ascending (batch, k), and vectors (batch, k, k) of tridiagonal matrices:
    diagonal (batch, k), off-diagonal (batch, k - 1).

    By LAPACK's implicit QL, which is single-threaded for the same reason.
    """
    values, vectors = np.empty(alpha.shape), np.empty((*alpha.shape, alpha.shape[1]))
    for i in range(len(alpha)):
        values[i], vectors[i], info = dstev(
            alpha[i], beta[i] if alpha.shape[1] > 1 else np.zeros(1)
        )
        if info:
            values[i], vectors[i] = eigh_tridiagonal(alpha[i], beta[i])
    return values, vectors


def project_out(x: Tensor, basis: Tensor, passes: int = 1) -> Tensor:
    """x (batch, n), in place, without its components along the orthonormal rows of basis (batch, k,
    n).

    Vectors are rows here: a product with a single column is an order of magnitude slower on a CPU.
    """
    row = x[:, None]
    for _ in range(passes):
        row.baddbmm_(row @ basis.mT, basis, alpha=-1)
    return x
