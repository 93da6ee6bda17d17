"""Stopping rule of a Lanczos recurrence, and the bounds that it has shown by then."""

import math

import numpy as np
import torch
from torch import Tensor

from lipbound.errors import LipboundError, is_number
from lipbound.linalg.certificates import ROUNDING, excludes, log_inverse_epsilon, upper_bound
from lipbound.linalg.krylov import top_eigenpairs
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
        self.certify = delta is not None
        if delta is not None and not (is_number(delta) and 0 < delta < 1):
            wanted = "the failure probability must be between 0 and 1"
            raise LipboundError(f"delta is {delta!r}; {wanted}")
        self.rounding = ROUNDING[dtype] if self.certify else 0.0
        if self.certify and tol <= self.rounding:
            raise LipboundError(
                f"tol {tol:g} cannot be certified in {str(dtype).removeprefix('torch.')}, whose "
                f"rounding takes {self.rounding:g}; "
                f"use {'float64 or ' if dtype == torch.float32 else ''}a larger tol"
            )
        each = ESTIMATE_DELTA if delta is None else delta / max(1, batch)
        self.log_inverse = log_inverse_epsilon(n, each)
        self.tol = tol
        self.floor = 4 * torch.finfo(dtype).eps

    def look(
        self, alpha: Tensor, beta: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Look at recurrences alpha and beta (batch, k) after k steps.

        Returns:
            Top Ritz values (batch,), their vectors (batch, k), whether tol is reached, and whether
            the space is exhausted (batch,). Zero and False for entries that are ``done`` (batch,),
            whose recurrences have gone on beyond their end.
        """
        top, s, reached, exhausted = (torch.zeros_like(t) for t in (alpha[:, 0], alpha, done, done))
        seen = self._look(alpha[~done].numpy(), beta[~done].numpy())
        for whole, part in zip((top, s, reached, exhausted), seen, strict=True):
            whole[~done] = torch.from_numpy(part)
        return top, s, reached, exhausted

    def _look(
        self, a: np.ndarray, b: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        if not np.isfinite(b[:, -1]).all() or not np.isfinite(a[:, -1]).all():
            a, b = np.nan_to_num(a), np.nan_to_num(b)
        ritz, s = top_eigenpairs(a, b)
        top = np.maximum(ritz, 0)
        with np.errstate(over="ignore"):  # of what is not finite
            target = top * ((1 + self.tol) / (1 + self.rounding)) ** 2
        # a Ritz value that rounding has made negative is no zero
        zero = (np.abs(a).max(1, initial=0) == 0) & (b.max(1, initial=0) == 0)
        steps = np.full(len(a), a.shape[1])
        below = excludes(a, self._floored(b, top), steps, target, self.log_inverse)
        return top, s, below & (top > 0) | zero, b[:, -1] <= self.floor * top

    def _floored(self, beta: np.ndarray, top: np.ndarray) -> np.ndarray:
        """Return betas no smaller than rounding may have made them.

        A larger beta makes the bound larger, by Lemma 42 (docs/theory/certificates.md).
        """
        return np.maximum(np.maximum(beta, self.floor * top[:, None]), 1e-300)

    def finish(self, results: Results, op: JacobianOperator, top: Tensor) -> None:
        """Fill in the values of all entries from their recurrences and top Ritz values (batch,).

        Where the Krylov space of a small problem has ended too early, by a dense decomposition.
        """
        alpha, steps = results.alpha.numpy(), results.steps.numpy()
        beta = self._floored(results.beta.numpy(), top.numpy())
        bound = upper_bound(alpha, beta, steps, top.numpy(), self.log_inverse)
        upper = torch.from_numpy(bound).sqrt() * (1 + self.rounding)
        shown = upper.minimum(top.sqrt() * (1 + self.tol))
        upper = torch.where(results.converged, shown, upper)
        results.lower = top.sqrt()
        # a top of 0 is a zero, or a Ritz value that rounding has made negative
        none = torch.where(results.converged, 0.0, math.inf)
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
