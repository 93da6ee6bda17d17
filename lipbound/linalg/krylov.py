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

NEGLIGIBLE = 1e-100
"""Share of the largest entry below which an off-diagonal one changes no digit of an eigenpair."""


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
        if info:  # entries whose squares underflow beside others keep it from converging
            size = max(np.abs(alpha[i]).max(), np.abs(off).max())
            off = np.where(np.abs(off) > NEGLIGIBLE * size, off, 0.0)
            values[i], vectors[i] = eigh_tridiagonal(alpha[i], off)
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
        rule: from the numbers of some entries and their recurrences alpha and beta, (entries, k),
            their largest Ritz values and which runs end, (entries,) each.
        start: unit vectors, (batch, n).
        limit: steps of each run at most.
        every: steps between two looks of the rule at runs whose Krylov spaces have not ended.
        ritz: initial vectors (batch, count, n), which the top Ritz vectors replace, as many as
            there are.
        restart: beta, relative to the largest there can be, at which a run goes on from a random
            direction orthogonal to its Krylov space.

    Attributes:
        columns: what is kept of every step, alpha and beta first, (at least 2, batch, limit); zero
            beyond the end of a run.
        unit: powers of two in units of which alpha and beta are, (batch,).
        top: largest Ritz values, NaN where products were not finite, (batch,).
        steps: products spent, (batch,).
        ritz: top Ritz vectors, largest first, (batch, count, n).
    """

    kinds = 2
    """Numbers that are kept of every step."""
    _own: Tensor
    """State of each entry that is still at work, here its unit."""

    def __init__(
        self,
        op: JacobianOperator,
        rule: Callable[[Array, Array, Array], tuple[Array, Array]],
        start: Tensor,
        *,
        limit: int,
        every: int,
        ritz: Tensor,
        restart: float = 0.0,
    ):
        self.columns = np.zeros((self.kinds, op.batch, limit))
        self.unit, self.top = np.ones(op.batch), np.zeros(op.batch)
        self.steps, self.ritz = np.zeros(op.batch, dtype=np.int64), ritz
        self._rule, self._every, self._restart = rule, every, restart
        self._run(op, start)

    def _run(self, op: JacobianOperator, v: Tensor) -> None:
        limit, finfo = self.columns.shape[2], torch.finfo(op.dtype)
        active, going = np.arange(op.batch), np.ones(op.batch, dtype=bool)
        basis, b = v.new_empty(op.batch, min(32, limit), v.shape[1]), v[:, 0]
        for j in range(limit):
            basis = with_room(basis, j, limit)
            basis[:, j] = v
            known = basis[:, : j + 1]
            w, (a, *others) = self._step(op, v, known, b)
            b = torch.linalg.vector_norm(w, dim=1)
            v = w / b.clamp_min(finfo.tiny)[:, None]
            shown = torch.stack((a, b, *others)).double().cpu().numpy()[:, going]
            self.columns[:, active[going], j] = np.where(np.isnan(shown), np.inf, shown)
            alpha, beta = self.columns[:2, active, : j + 1]
            largest = np.abs(alpha).max(1) + 2 * beta.max(1)  # beyond every Ritz value (Gershgorin)
            lost = going & (beta[:, j] <= self._restart * largest)
            if self._restart and lost.any():
                there = torch.from_numpy(lost).to(v.device)
                fresh = normal_numbers(v.numel(), "fresh", j).view(v.shape).to(v)
                fresh = project_out(fresh, known, 2)
                fresh /= torch.linalg.vector_norm(fresh, dim=1, keepdim=True).clamp_min(finfo.tiny)
                b, v = torch.where(there, 0.0, b), torch.where(there[:, None], fresh, v)
                self.columns[1, active[lost], j] = 0.0
            ended = going & ~(beta[:, j] > max(4 * finfo.eps, 1e-12) * largest)
            if j % self._every and j + 1 < limit and not ended.any():
                continue
            going = going & ~self._look(active, going, known)
            if not going.any():
                break
            if going.sum() <= WORTH_COPYING * len(going):
                keep = going.nonzero()[0]
                there, basis = torch.from_numpy(keep).to(op.device), moved_up(basis, keep, j + 1)
                op, v, b, self._own = op.select(there), v[there], b[there], self._own[there]
                active, going = active[keep], going[keep]

    def _step(
        self, op: JacobianOperator, v: Tensor, known: Tensor, b: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Multiply the last vector v of bases ``known``, and orthogonalise the image.

        Returns:
            What is left of the image (entries, n), and the numbers that are kept but for beta, of
            which b is the last, (entries,) each.
        """
        w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        if known.shape[1] == 1:  # squares of the entries are brought into range
            unit = power_of_two(w.abs().amax(1, keepdim=True))
            self.unit, self._own = unit[:, 0].cpu().numpy(), unit.to(op.dtype)
        w = w / self._own
        a = (w * v).sum(1)
        # the recurrence removes the large components, then one pass against the whole basis what
        # rounding has left of them
        w.addcmul_(v, a[:, None], value=-1)
        if known.shape[1] > 1:
            w.addcmul_(known[:, -2], b[:, None], value=-1)
        return project_out(w, known), (a,)

    def _look(self, active: Array, going: Array, basis: Tensor) -> Array:
        """Keep what has been found of the entries that end, and return where they are."""
        k, index = basis.shape[1], active[going]
        alpha, beta = self.columns[:2, index, :k]
        fine = np.isfinite(alpha).all(1) & np.isfinite(beta).all(1)
        alpha, beta = (np.where(fine[:, None], t, 0.0) for t in (alpha, beta))
        top, ends = self._rule(index, alpha, beta)
        ends = ends | ~fine | (k == self.columns.shape[2])
        self.top[index[ends]], self.steps[index[ends]] = np.where(fine, top, np.nan)[ends], k
        found = ends & fine
        if found.any():
            there = torch.from_numpy(going.nonzero()[0][found]).to(basis.device)
            vectors = ritz_vectors(alpha[found], beta[found], basis[there], self.ritz.shape[1])
            self.ritz[torch.from_numpy(index[found]).to(basis.device), : vectors.shape[1]] = vectors
        stop = going.copy()
        stop[going] = ends
        return stop


def top_vectors(
    op: JacobianOperator,
    *,
    count: int,
    residual: float,
    max_steps: int,
    seed: int | Sequence[int],
    restart: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Search for the top ``count`` Ritz vectors of J J^T; they need not be right, only good.

    Each run goes on until the largest Ritz value's residual is below ``residual`` times the value.
    Where a Krylov space ends before it holds so many vectors, the rest are random, unless it goes
    on by ``restart``, as of `Runs`.

    Returns:
        Vectors, largest first, (batch, count, n) in the dtype of ``op``, and products spent,
        (batch,) int64.
    """

    def rule(_: Array, alpha: Array, beta: Array) -> tuple[Array, Array]:
        top, s = top_eigenpairs(alpha, beta)
        close = beta[:, -1] * np.abs(s[:, -1]) < residual * top
        zero = (alpha[:, 0] == 0) & (beta[:, 0] == 0)
        return top, close & (alpha.shape[1] >= count) | zero

    n = math.prod(op.out_shape)
    rest = normal_numbers(count * n, "rest").view(1, count, n).repeat(op.batch, 1, 1)
    start, limit = start_vectors(op, op.out_shape, seed), min(max_steps, n)
    ritz = rest.to(op.device, op.dtype)
    runs = Runs(op, rule, start, limit=limit, every=1, ritz=ritz, restart=restart)
    finite = torch.isfinite(runs.ritz).flatten(1).all(1)[:, None, None]
    return torch.where(finite, runs.ritz, 1.0), torch.from_numpy(runs.steps)
