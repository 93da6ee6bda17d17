"""Lanczos runs of a batch of operators, and what they are made of."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstemr, dstev
from torch import Tensor

from lipbound.linalg.matrix_norms import UNIT, power_of_two
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import normal_numbers, start_vectors

Array = np.ndarray
WORTH_COPYING = 0.8
"""Share of a batch that is still at work below which it is copied to a smaller one."""


def with_room(basis: Tensor, j: int, limit: int) -> Tensor:
    """Return the basis (batch, room, n) with room for vector j; it doubles up to ``limit``."""
    if j < basis.shape[1]:
        return basis
    return torch.cat([basis, basis.new_empty(len(basis), min(j, limit - j), basis.shape[2])], 1)


def moved_up(basis: Tensor, keep: Array, count: int) -> Tensor:
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


def top_eigenpairs(alpha: Array, beta: Array) -> tuple[Array, Array]:
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


def eigenpairs(alpha: Array, beta: Array) -> tuple[Array, Array]:
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


def ritz_vectors(alpha: Array, beta: Array, basis: Tensor, count: int) -> Tensor:
    """Return the top Ritz vectors of runs, largest first, (batch, at most count, n).

    From recurrences (batch, k) and bases (batch, k, n).
    """
    _, turns = eigenpairs(alpha, beta[:, :-1])
    turns = turns[:, :, ::-1][:, :, :count].swapaxes(1, 2).copy()
    return torch.from_numpy(turns).to(basis) @ basis


class Runs:
    """Lanczos runs on J J^T with full reorthogonalisation, each until a rule ends it.

    Runs that have ended are no longer computed.

    Args:
        op: the Jacobians.
        rule: from recurrences alpha and beta, (entries, k), their largest Ritz values and which
            runs end, (entries,) each.
        limit: steps of each run at most.
        every: steps between two looks of the rule at runs whose Krylov spaces have not ended.
        seed: of the start vectors, one for all entries or one for each part of the batch.
        ritz: initial vectors (batch, count, n), which the top Ritz vectors replace, as many as
            there are.
        restart: length of what is left of an image, relative to it, at which a run goes on from a
            random direction orthogonal to its Krylov space.

    Attributes:
        alpha, beta: recurrences, in units of ``unit``, (batch, limit); 1 beyond their end.
        unit: powers of two, (batch,).
        top: largest Ritz values, NaN where products were not finite, (batch,).
        steps: products spent, (batch,).
        ritz: top Ritz vectors, largest first, (batch, count, n).
    """

    def __init__(
        self,
        op: JacobianOperator,
        rule: Callable[[Array, Array], tuple[Array, Array]],
        *,
        limit: int,
        every: int,
        seed: int | Sequence[int],
        ritz: Tensor,
        restart: float = -1.0,
    ):
        self.alpha, self.beta = np.ones((op.batch, limit)), np.ones((op.batch, limit))
        self.unit, self.top = np.ones(op.batch), np.zeros(op.batch)
        self.steps, self.ritz = np.zeros(op.batch, dtype=np.int64), ritz
        self._rule, self._every, self._restart = rule, every, restart
        self._run(op, limit, start_vectors(op, op.out_shape, seed))

    def _run(self, op: JacobianOperator, limit: int, v: Tensor) -> None:
        finfo = torch.finfo(op.dtype)
        active, going = np.arange(op.batch), np.ones(op.batch, dtype=bool)
        alpha, beta = np.zeros((op.batch, limit)), np.zeros((op.batch, limit))
        basis, b, unit = v.new_empty(op.batch, min(32, limit), v.shape[1]), v[:, 0], v[:, :1]
        for j in range(limit):
            basis = with_room(basis, j, limit)
            basis[:, j] = v
            known = basis[:, : j + 1]
            w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
            if j == 0:  # squares of the entries are brought into range
                unit = power_of_two(w.abs().amax(1, keepdim=True))
                self.unit[:] = unit[:, 0].cpu().numpy()
                unit = unit.to(op.dtype)
            w = w / unit
            reach, a = torch.linalg.vector_norm(w, dim=1), (w * v).sum(1)
            # the recurrence removes the large components, then one pass against the whole basis
            # what rounding has left of them
            w.addcmul_(v, a[:, None], value=-1)
            if j:
                w.addcmul_(basis[:, j - 1], b[:, None], value=-1)
            w = project_out(w, known)
            b = torch.linalg.vector_norm(w, dim=1)
            v = w / b.clamp_min(finfo.tiny)[:, None]
            lost = b <= self._restart * reach
            if bool(lost.any()):
                fresh = normal_numbers(v.numel(), "fresh", j).view(v.shape).to(v)
                fresh = project_out(fresh, known, 2)
                fresh /= torch.linalg.vector_norm(fresh, dim=1, keepdim=True).clamp_min(finfo.tiny)
                b, v = torch.where(lost, 0.0, b), torch.where(lost[:, None], fresh, v)
            alpha[:, j], beta[:, j] = (t.double().cpu().numpy() for t in (a, b))
            largest = np.abs(alpha[:, : j + 1]).max(1) + 2 * beta[:, : j + 1].max(1)
            # beyond every Ritz value (Gershgorin)
            ended = ~(beta[:, j] > 4 * finfo.eps * largest)
            if j % self._every and j + 1 < limit and not ended.any():
                continue
            stop = self._look(active, going, alpha[:, : j + 1], beta[:, : j + 1], known)
            going &= ~stop
            if not going.any():
                break
            if going.sum() <= WORTH_COPYING * len(going):
                keep = going.nonzero()[0]
                there, basis = torch.from_numpy(keep).to(op.device), moved_up(basis, keep, j + 1)
                op, v, b, unit = op.select(there), v[there], b[there], unit[there]
                active, going, alpha, beta = active[keep], going[keep], alpha[keep], beta[keep]

    def _look(self, active: Array, going: Array, alpha: Array, beta: Array, basis: Tensor) -> Array:
        """Keep what has been found of the entries that end, and return where they are."""
        k, fine = alpha.shape[1], np.isfinite(alpha).all(1) & np.isfinite(beta).all(1)
        a, b = (np.where(fine[:, None], t, 0.0)[going] for t in (alpha, beta))
        top, ends = self._rule(a, b)
        ends |= ~fine[going] | (k == self.alpha.shape[1])
        stop, index = going.copy(), active[going][ends]
        stop[going] = ends
        self.top[index] = np.where(fine[going], top, np.nan)[ends]
        self.alpha[index, :k], self.beta[index, :k], self.steps[index] = a[ends], b[ends], k
        if (found := stop & fine).any():
            there = torch.from_numpy(active[found]).to(basis.device)
            own = basis[torch.from_numpy(found).to(basis.device)]
            vectors = ritz_vectors(alpha[found], beta[found], own, self.ritz.shape[1])
            self.ritz[there, : vectors.shape[1]] = vectors
        return stop


def top_vectors(
    op: JacobianOperator,
    *,
    count: int,
    residual: float,
    max_steps: int,
    seed: int | Sequence[int],
    restart: float = -1.0,
) -> tuple[Tensor, Tensor]:
    """Search for the top ``count`` Ritz vectors of J J^T; they need not be right, only good.

    Each run goes on until the largest Ritz value's residual is below ``residual`` times the value.
    Where a Krylov space ends before it holds so many vectors, the rest are random, unless it goes
    on by ``restart``, as of `Runs`.

    Returns:
        Vectors, largest first, (batch, count, n) in the dtype of ``op``, and products spent,
        (batch,) int64.
    """

    def rule(alpha: Array, beta: Array) -> tuple[Array, Array]:
        top, s = top_eigenpairs(alpha, beta)
        close = beta[:, -1] * np.abs(s[:, -1]) < residual * top
        zero = (alpha[:, 0] == 0) & (beta[:, 0] == 0)
        return top, close & (alpha.shape[1] >= count) | zero

    n = math.prod(op.out_shape)
    rest = normal_numbers(count * n, "rest").view(1, count, n).repeat(op.batch, 1, 1)
    limit = min(max_steps, n)
    ritz = rest.to(op.device, op.dtype)
    runs = Runs(op, rule, limit=limit, every=1, seed=seed, ritz=ritz, restart=restart)
    finite = torch.isfinite(runs.ritz).flatten(1).all(1)[:, None, None]
    return torch.where(finite, runs.ritz, 1.0), torch.from_numpy(runs.steps)
