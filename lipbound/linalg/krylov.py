"""Lanczos runs of a batch of operators on their device, looked at every few steps."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstemr
from torch import Tensor
from torch.nn.functional import pad

from lipbound.graphs import graphed
from lipbound.linalg.operators import JacobianOperator

Array = np.ndarray
LOOK, FAR_LOOK = 2, 3
"""Steps between two looks at recurrences, whose small eigenvalue problems cost as much as a step:
on the CPU, and on other devices, which wait for every look."""
FIRST_LOOK, GRAPH_LOOK = 18, 6
"""Steps before the first look, and between two, where these are started as a graph and take less
time than a look."""
LARGE, FAR_LARGE = 2**14, 2**21
"""Entries of a vector from which every step is looked at, on the CPU, which also does in float64,
and on other devices."""


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

    def repeated(self, times: int) -> "Recurrence":
        """Return the same, each entry so many times in a row."""
        return Recurrence(*(np.repeat(getattr(self, f.name), times, 0) for f in fields(self)))


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
    """Lanczos runs on J J^T with full reorthogonalisation, each `until` a rule ends it.

    Steps up to the first look are started at once, and are under way on a GPU while the host does
    other work. Nothing is read from the device between two looks, and runs that have ended are no
    longer computed.

    Args:
        op: the Jacobians.
        start: unit vectors, (batch, n).
        limit: steps of each run at most.

    Attributes:
        recurrence: of each.
        vectors: top Ritz vectors, (batch, n).
    """

    def __init__(self, op: JacobianOperator, start: Tensor, *, limit: int):
        alpha, beta, lost = np.zeros((3, op.batch, limit))
        steps, top = np.zeros(op.batch, dtype=np.int64), np.zeros(op.batch)
        whole = np.zeros(op.batch, dtype=bool)
        self.recurrence = Recurrence(alpha, beta, lost, steps, top, whole)
        self.vectors, self._limit = torch.zeros_like(start), limit
        self._steps = (GraphSteps if op.graphable() else Steps)(op, start, limit)
        self._taken = self._take(0)

    def _take(self, k: int) -> int:
        """Take steps after the k-th up to that of the next look, and return which this is."""
        while True:
            self._steps.take()
            k += 1
            if k == self._limit or self._steps.looks(k):
                return k

    def until(self, rule: Rule) -> "Runs":
        """Go on until the rule ends each run whose Krylov space has not ended, and return this."""
        steps, k, active = self._steps, self._taken, np.arange(len(self.vectors))
        going = np.ones(len(active), dtype=bool)
        while True:
            places = going.nonzero()[0]
            self._read(active[places], places, *steps.numbers())
            ends = self._look(active[places], places, steps.basis, k, rule)
            going[places[ends]] = False
            if not going.any():
                break
            if going.sum() <= steps.worth_copying * len(going):
                keep = going.nonzero()[0]
                steps.keep(keep)
                active, going = active[keep], going[keep]
            k = self._take(k)
        del self._steps  # and with it the memory of its vectors
        found, most = self.recurrence, int(self.recurrence.steps.max(initial=1))
        for name in ("alpha", "beta", "lost"):
            setattr(found, name, getattr(found, name)[:, :most])
        return self

    def _read(self, index: Array, places: Array, rows: Array, lengths: Array) -> None:
        """Put `Steps.numbers`, of entries in places, into recurrences."""
        found, (steps, _, k), entries = self.recurrence, rows.shape, index[:, None]
        rows, each, j = rows[:, places], np.arange(steps), np.arange(k - steps, k)
        found.alpha[entries, j] = np.maximum(rows[each, :, j], 0).T
        found.beta[entries, j] = lengths[:, places].T
        with np.errstate(invalid="ignore"):  # of products that are not finite
            rows[each, :, j] -= found.alpha[entries, j].T
            after = j > 0
            rows[each[after], :, j[after] - 1] -= found.beta[entries, j[after] - 1].T
        found.lost[entries, j] = np.abs(rows).sum(2).T

    def _look(self, index: Array, places: Array, basis: Tensor, k: int, rule: Rule) -> Array:
        """Return which of some runs end after k steps, and keep what they have found.

        By a rule, or as their Krylov spaces have ended, maybe some steps ago.
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
        ends = rule(index, part) | ~fine | whole | (k == self._limit)
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


class Steps:
    """Steps of Lanczos' method on their device, of which nothing is read until it is asked for.

    Args:
        op: the Jacobians.
        start: unit vectors, (entries, n).
        limit: steps at most.

    Attributes:
        basis: the vectors, (room, entries, n).
    """

    room = 32
    """Vectors for which there is memory at first."""
    worth_copying = 0.8
    """Share of a batch that is still at work below which it is copied to a smaller one."""

    def __init__(self, op: JacobianOperator, start: Tensor, limit: int):
        self._op, self._limit, self._count, self._numbers = op, limit, 0, list[Tensor]()
        self.basis = self._new(start, min(self.room, limit) + 1)
        self.basis[0] = start

    def _new(self, like: Tensor, count: int) -> Tensor:
        """Room for more vectors."""
        return like.new_empty(count, *like.shape[-2:])

    def looks(self, k: int) -> bool:
        """Return whether recurrences are looked at after k steps."""
        n, double = self.basis.shape[2], self.basis.dtype == torch.float64
        if self._op.device.type == "cpu":
            return k % (1 if n >= LARGE or double else LOOK) == 0
        return k % (1 if n >= FAR_LARGE else FAR_LOOK) == 0

    def take(self) -> None:
        """Multiply the last vector, and put what is new in its image behind it."""
        j = self._count
        if j + 1 == len(self.basis):
            more = self._new(self.basis, min(len(self.basis), self._limit - j))
            self.basis = torch.cat([self.basis, more])
        known = self.basis[: j + 1]
        w, *numbers = _orthogonalised(self._op, known[-1], known[-2:], known)
        torch.div(w, numbers[2], out=self.basis[j + 1])
        self._numbers += numbers
        self._count = j + 1

    def numbers(self) -> tuple[Array, Array]:
        """Return what the steps since the last call have found, in one read, float64.

        Returns:
            Coefficients of images along all vectors, (steps, entries, k), and lengths of what is
            left of them, (steps, entries).
        """
        ends = np.cumsum([t.shape[1] for t in self._numbers])
        read = torch.cat(self._numbers, 1).to("cpu", torch.float64).numpy()
        parts, self._numbers = np.split(read, ends[:-1], 1), []
        rows = np.zeros((len(parts) // 3, len(read), self._count))
        for row, near, known in zip(rows, parts[::3], parts[1::3], strict=True):
            last = known.shape[1]
            row[:, :last] = known
            row[:, last - near.shape[1] : last] += near
        return rows, np.concatenate(parts[2::3], 1).T

    def keep(self, places: Array) -> None:
        """Go on with some of the entries, whose vectors are moved in place.

        A fresh copy would cost more than a step.
        """
        self._op = self._op.select(torch.from_numpy(places).to(self._op.device))
        for new, old in enumerate(places.tolist()):
            if new != old:
                self.basis[: self._count + 1, new] = self.basis[: self._count + 1, old]
        self.basis = self.basis[:, : len(places)]


class GraphSteps(Steps):
    """Steps that a GPU starts as one CUDA graph, where it takes longer to start their operations.

    Every image is orthogonalised against all of ``basis``, whose vectors to come are zero.
    """

    room = 24
    worth_copying = 0.0  # what starts its steps takes longer than they do

    def __init__(self, op: JacobianOperator, start: Tensor, limit: int):
        super().__init__(op, start, limit)
        self._near = torch.arange(2, device=start.device)
        room, self._read = len(self._rows), 0
        self._found = start.new_zeros(room, len(start), 3 + room)
        self._begin()

    def _new(self, like: Tensor, count: int) -> Tensor:
        self._rows = like.new_zeros(1 + count, *like.shape[-2:])  # before the first vector nothing
        return self._rows[1:]

    def _begin(self) -> None:
        """Have steps from now on taken on buffers that a graph works on."""
        args = self._op, self._rows, self._found, self._near
        self._launch, (self._op, self._rows, self._found, self._near) = graphed(_step, *args)
        self.basis = self._rows[1:]

    def looks(self, k: int) -> bool:
        return k >= FIRST_LOOK and (k - FIRST_LOOK) % GRAPH_LOOK == 0

    def take(self) -> None:
        if self._count + 1 == len(self.basis):
            more = min(len(self.basis), self._limit - self._count)
            self._rows = pad(self._rows, (0, 0, 0, 0, 0, more))
            self._found = pad(self._found, (0, more, 0, 0, 0, more))
            self._begin()
        self._launch()
        self._count += 1

    def numbers(self) -> tuple[Array, Array]:
        found = self._found[self._read : self._count].to("cpu", torch.float64).numpy()
        near, lengths, rows = found[..., :2], found[..., 2], found[..., 4 : 4 + self._count]
        each, j = np.arange(len(found)), np.arange(self._read, self._count)
        rows[each, :, j] += near[..., 1]
        after, self._read = j > 0, self._count
        rows[each[after], :, j[after] - 1] += near[after, :, 0]
        return rows, lengths


def _step(op: JacobianOperator, rows: Tensor, found: Tensor, near: Tensor) -> None:
    """A step of `GraphSteps`, from the last vectors in rows ``near`` (2,), which it moves on."""
    vectors = rows.index_select(0, near)
    w, first, second, length = _orthogonalised(op, vectors[1], vectors, rows)
    found.index_copy_(0, near[:1], torch.cat([first, length, second], 1)[None])
    near.add_(1)
    rows.index_copy_(0, near[1:], (w / length)[None])


def _orthogonalised(
    op: JacobianOperator, vector: Tensor, near: Tensor, known: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images of vectors (entries, n) less what they share with vectors (count, entries, n).

    Returns:
        What is left, (entries, n); coefficients (entries, r) of the image along the last vectors,
        ``near``, and of what is left of it along all that are known; and its length after that.
    """
    w = op.gram(vector.view(-1, *op.out_shape)).flatten(1)
    row, near, known = w[:, None], near.transpose(0, 1), known.transpose(0, 1)
    # the recurrence removes the large components, then one pass against the whole basis what
    # rounding has left of them; vectors are rows, since a product with a single column is an order
    # of magnitude slower on a CPU
    first = torch.bmm(row, near.mT)
    row.baddbmm_(first, near, alpha=-1)
    second = torch.bmm(row, known.mT)
    row.baddbmm_(second, known, alpha=-1)
    return w, first[:, 0], second[:, 0], torch.linalg.vector_norm(w, dim=1, keepdim=True)
