"""Building blocks of Lanczos runs: bases of batches, inner products, tridiagonal eigenproblems."""

import math

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstemr, dstev
from torch import Tensor

from lipbound.linalg.matrix_norms import UNIT


def with_room(basis: Tensor, j: int, limit: int) -> Tensor:
    """Return the basis (batch, room, n) with room for vector j; it doubles up to ``limit``."""
    if j < basis.shape[1]:
        return basis
    return torch.cat([basis, basis.new_empty(len(basis), min(j, limit - j), basis.shape[2])], 1)


def moved_up(basis: Tensor, keep: Tensor, count: int) -> Tensor:
    """Return a view of ``basis`` whose entries are ``keep`` (ascending), by their first vectors.

    They are moved in place: a fresh copy would cost more than a step of Lanczos.
    """
    for new, old in enumerate(keep.tolist()):
        if new != old:
            basis[new, :count] = basis[old, :count]
    return basis[: len(keep)]


def project_out(x: Tensor, basis: Tensor, passes: int = 1) -> Tensor:
    """Return x (batch, n), changed in place, without components along rows of ``basis``.

    These are orthonormal, (batch, k, n). Vectors are rows here: a product with a single column is
    an order of magnitude slower on a CPU.
    """
    row = x[:, None]
    for _ in range(passes):
        row.baddbmm_(row @ basis.mT, basis, alpha=-1)
    return x


class Dots:
    """Inner products of vectors with n entries, summed in two stages.

    No term then sees many more roundings than the square root of the length.

    Attributes:
        roundings: an upper value of their error over the product of the lengths of both vectors,
            float64.
    """

    def __init__(self, n: int):
        self._width = next(w for w in range(math.isqrt(n), 0, -1) if n % w == 0)
        self.roundings = (self._width + n // self._width + 2) * UNIT

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        """Return products of x (batch, n) with the rows of z (batch, r, n), (batch, r)."""
        return (z * x[:, None]).unflatten(-1, (-1, self._width)).sum(-1).sum(-1)

    def gram(self, z: Tensor) -> Tensor:
        """Return products of the rows of z (batch, r, n) with each other, (batch, r, r)."""
        return torch.stack([self(row, z) for row in z.unbind(1)], 1)


def top_eigenpairs(alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest eigenvalue and its vector of each of a batch of tridiagonal matrices.

    By LAPACK's tridiagonal solver: a dense one costs more than a step, and numpy's threads would
    fight with torch's over the cores.

    Args:
        alpha: diagonals, (batch, k), float64.
        beta: off-diagonals, (batch, k), of which the last entry plays no part.

    Returns:
        Values (batch,) and vectors (batch, k), float64.
    """
    k = alpha.shape[1]
    values, vectors = np.empty(len(alpha)), np.empty((len(alpha), k))
    for i in range(len(alpha)):  # dstemr overwrites what it is given
        found, value, vector, info = dstemr(alpha[i].copy(), beta[i].copy(), 2, 0.0, 0.0, k, k)
        if info or found != 1:
            last = (k - 1, k - 1)
            value, vector = eigh_tridiagonal(alpha[i], beta[i, :-1], select="i", select_range=last)
        values[i], vectors[i] = value[0], vector[:, 0]
    return values, vectors


def eigenpairs(alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all eigenvalues and vectors of a batch of tridiagonal matrices.

    By LAPACK's implicit QL, which is single-threaded as well.

    Args:
        alpha: diagonals, (batch, k), float64.
        beta: off-diagonals, (batch, k - 1), float64.

    Returns:
        Values (batch, k), ascending, and vectors (batch, k, k), in columns, float64.
    """
    values, vectors = np.empty(alpha.shape), np.empty((*alpha.shape, alpha.shape[1]))
    for i in range(len(alpha)):
        off = beta[i] if alpha.shape[1] > 1 else np.zeros(1)
        values[i], vectors[i], info = dstev(alpha[i], off)
        if info:
            values[i], vectors[i] = eigh_tridiagonal(alpha[i], beta[i])
    return values, vectors
