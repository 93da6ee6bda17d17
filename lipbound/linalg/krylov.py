"""Lanczos runs of a batch of operators on their device, looked at every few steps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstemr
from torch import Tensor

from lipbound.linalg.operators import JacobianOperator

Array = np.ndarray
WORTH_COPYING = 0.8
"""Share of a batch that is still at work below which it is copied to a smaller one."""
LOOK, FAR_LOOK = 2, 3
"""Steps between two looks at recurrences, whose small eigenvalue problems cost as much as a step:
on the CPU, and on other devices, which wait for every look."""
LARGE = 2**14
"""Entries of a vector from which the CPU looks at every step, as it does in float64."""


@dataclass
class Recurrence:
    r"""Tridiagonal matrices of Lanczos runs on :math:`G = J J^T`, (entries, k) of float64 each.

    With the stored vectors v, :math:`G v_j` is :math:`\beta_{j-1} v_{j-1} + \alpha_j v_j + \beta_j
    v_{j+1}` but for rounding, and vectors whose lengths sum to ``lost``.

    Attributes:
        alpha: diagonals of the tridiagonal matrices, at least zero.
        beta: off-diagonals, of which the last leads out of the Krylov space.
        lost: what orthogonalisation has taken away beyond the recurrence.
        steps: of each run, (entries,) int64; all numbers are zero beyond.
        top: largest Ritz values, (entries,); NaN where products were not finite.
        whole: whether Krylov spaces have ended, (entries,).
    """

    alpha: Array
    beta: Array
    lost: Array
    steps: Array
    top: Array
    whole: Array

    @property
    def last(self) -> Array:
        """The betas that lead out of Krylov spaces, (entries,)."""
        return self.beta[np.arange(len(self.beta)), np.maximum(self.steps - 1, 0)]

    @property
    def inside(self) -> Array:
        """All other betas, zero where there is none, (entries, k)."""
        beyond = np.arange(self.beta.shape[1]) >= (self.steps - 1)[:, None]
        return np.where(beyond, 0.0, self.beta)


Rule = Callable[[Array, Recurrence], Array]
"""Which runs end, from the numbers of some entries and their recurrences."""


def top_eigenpairs(alpha: Array, inside: Array) -> tuple[Array, Array]:
    """Return the largest eigenvalue and its vector of each of a batch of tridiagonal matrices.

    By LAPACK's tridiagonal solver: a dense one costs more than a step, and numpy's threads would
    fight with torch's over the cores.

    Args:
        alpha: diagonals, (batch, k), float64.
        inside: off-diagonals, (batch, k), of which the last entry plays no part.

    Returns:
        Values (batch,) and vectors (batch, k), float64.
    """
    k = alpha.shape[1]
    values, vectors = np.empty(len(alpha)), np.empty((len(alpha), k))
    for i in range(len(alpha)):  # dstemr overwrites what it is given
        found, value, vector, info = dstemr(alpha[i].copy(), inside[i].copy(), 2, 0.0, 0.0, k, k)
        if info or found != 1:
            top = (k - 1, k - 1)
            value, vector = eigh_tridiagonal(alpha[i], inside[i, :-1], select="i", select_range=top)
        values[i], vectors[i] = value[0], vector[:, 0]
    return values, vectors


class Runs:
    """Lanczos runs on J J^T with full reorthogonalisation, each until a rule ends it.

    Nothing is read from the device between two looks, and runs that have ended are no longer
    computed.

    Args:
        op: the Jacobians.
        start: unit vectors, (batch, n).
        rule: ends runs whose Krylov spaces have not.
        limit: steps of each run at most.

    Attributes:
        recurrence: of each.
        vectors: top Ritz vectors, (batch, n).
    """

    def __init__(self, op: JacobianOperator, start: Tensor, rule: Rule, *, limit: int):
        alpha, beta, lost = np.zeros((3, op.batch, limit))
        steps, top = np.zeros(op.batch, dtype=np.int64), np.zeros(op.batch)
        whole = np.zeros(op.batch, dtype=bool)
        self.recurrence = Recurrence(alpha, beta, lost, steps, top, whole)
        self.vectors, self._rule, self._limit = torch.zeros_like(start), rule, limit
        near = 1 if start.shape[1] >= LARGE or start.dtype == torch.float64 else LOOK
        self._every = near if op.device.type == "cpu" else FAR_LOOK
        self._run(op, start)
        found, most = self.recurrence, int(self.recurrence.steps.max(initial=1))
        for name in ("alpha", "beta", "lost"):
            setattr(found, name, getattr(found, name)[:, :most])

    def _run(self, op: JacobianOperator, start: Tensor) -> None:
        active, going = np.arange(op.batch), np.ones(op.batch, dtype=bool)
        basis = start.new_empty(min(32, self._limit) + 1, *start.shape)
        basis[0] = start
        unread: list[Tensor] = []
        for j in range(self._limit):
            if j + 1 == len(basis):
                more = min(len(basis), self._limit - j)
                basis = torch.cat([basis, basis.new_empty(more, *basis.shape[1:])])
            unread += _step(op, basis, j)
            if (j + 1) % self._every and j + 1 < self._limit:
                continue
            places = going.nonzero()[0]
            self._read(active[places], torch.cat(unread, 1), places, j + 1, len(unread) // 3)
            unread = []
            going[places[self._look(active[places], places, basis, j + 1)]] = False
            if not going.any():
                break
            if going.sum() <= WORTH_COPYING * len(going):
                keep = going.nonzero()[0]
                op = op.select(torch.from_numpy(keep).to(op.device))
                basis = _moved_up(basis, keep, j + 2)
                active, going = active[keep], going[keep]

    def _read(self, index: Array, numbers: Tensor, places: Array, k: int, steps: int) -> None:
        """Take what the last steps have found from the device, into recurrences of k steps."""
        rest, found = numbers.to("cpu", torch.float64).numpy()[places], self.recurrence
        for j in range(k - steps, k):
            near = min(j + 1, 2)
            first, row, length, rest = np.split(rest, [near, near + j + 1, near + j + 2], 1)
            row[:, j + 1 - near :] += first
            found.alpha[index, j], found.beta[index, j] = np.maximum(row[:, j], 0), length[:, 0]
            with np.errstate(invalid="ignore"):  # of products that are not finite
                row[:, j] -= found.alpha[index, j]
                if j:
                    row[:, j - 1] -= found.beta[index, j - 1]
            found.lost[index, j] = np.abs(row).sum(1)

    def _look(self, index: Array, places: Array, basis: Tensor, k: int) -> Array:
        """Return which of some runs end after k steps, and keep what they have found.

        By the rule, or as their Krylov spaces have ended, maybe some steps ago.
        """
        found, floor = self.recurrence, max(4 * torch.finfo(basis.dtype).eps, 1e-12)
        alpha, beta = found.alpha[index, :k], found.beta[index, :k]
        with np.errstate(invalid="ignore"):
            # beyond every Ritz value (Gershgorin)
            largest = np.maximum.accumulate(alpha, 1) + 2 * np.maximum.accumulate(beta, 1)
            over = ~(beta > floor * largest)
        whole = over.any(1)
        steps = np.where(whole, over.argmax(1) + 1, k)
        live = np.arange(k) < steps[:, None]
        numbers = np.stack([alpha, beta, found.lost[index, :k]])
        numbers = np.where(live, numbers, 0.0)
        fine = np.isfinite(numbers).all((0, 2))
        alpha, beta, lost = np.where(fine[:, None], numbers, 0.0)
        part = Recurrence(alpha, beta, lost, steps, np.zeros(len(index)), whole)
        top, turns = top_eigenpairs(part.alpha, part.inside)
        part.top = np.maximum(top, 0)
        ends = self._rule(index, part) | ~fine | whole | (k == self._limit)
        part.top = np.where(fine, part.top, np.nan)
        for name in ("alpha", "beta", "lost"):
            getattr(found, name)[index[ends], :k] = getattr(part, name)[ends]
        for name in ("steps", "top", "whole"):
            getattr(found, name)[index[ends]] = getattr(part, name)[ends]
        for count in np.unique(steps[ends & fine]):
            here = ends & fine & (steps == count)
            there = torch.from_numpy(places[here]).to(basis.device)
            turn = torch.from_numpy(turns[here, None, :count]).to(basis)
            vectors = torch.bmm(turn, basis[:count, there].transpose(0, 1))[:, 0]
            self.vectors[torch.from_numpy(index[here]).to(basis.device)] = vectors
        return ends


def _step(op: JacobianOperator, basis: Tensor, j: int) -> list[Tensor]:
    """Multiply vector j of bases (room, entries, n), and put what is new in its image behind it.

    Returns:
        Coefficients (entries, r): of the image along the last two vectors, of what is left of it
        along all, and its length after that.
    """
    w = op.gram(basis[j].view(-1, *op.out_shape)).flatten(1)
    row, known = w[:, None], basis[: j + 1].transpose(0, 1)
    near = known[:, -2:]
    # the recurrence removes the large components, then one pass against the whole basis what
    # rounding has left of them; vectors are rows, since a product with a single column is an order
    # of magnitude slower on a CPU
    first = torch.bmm(row, near.mT)
    row.baddbmm_(first, near, alpha=-1)
    second = torch.bmm(row, known.mT)
    row.baddbmm_(second, known, alpha=-1)
    length = torch.linalg.vector_norm(w, dim=1, keepdim=True)
    torch.div(w, length, out=basis[j + 1])
    return [first[:, 0], second[:, 0], length]


def _moved_up(basis: Tensor, keep: Array, count: int) -> Tensor:
    """Return a view of the first vectors of bases (room, entries, n), of entries ``keep``.

    They are moved in place: a fresh copy would cost more than a step of Lanczos.
    """
    for new, old in enumerate(keep.tolist()):
        if new != old:
            basis[:count, new] = basis[:count, old]
    return basis[:, : len(keep)]
