r"""Upper bounds on exact norms that hold with certainty, by compression of :math:`G = J J^T`.

The float64 arrays P, v - o, q, k and the weights are taken as exact; every rounding after them is
allowed for.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lipbound.devices import require
from lipbound.errors import LipboundError
from lipbound.linalg.krylov import top_vectors
from lipbound.linalg.matrix_norms import SMALLEST, UNIT, block_norm, nonnegative_norm
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import Norm, normal_numbers, seeds_each, solved, widened

RANKS = (8, 24)
"""Numbers of Ritz vectors that are deflated, in successive attempts."""
STEPS = 60
"""Lanczos steps the Ritz vectors come from."""


class BlockMatrix(Protocol):
    r"""A symmetric positive semi-definite :math:`G = J J^T` in float64, known block by block.

    Attributes:
        tokens: number of blocks in a row or column.
        width: order of a block.
        device: of its tensors.
        keep: which tokens of the operator these are.
        error: bound on the 2-norm of the rounding error of G.
    """

    tokens: int
    width: int
    device: torch.device
    keep: slice | Tensor

    @property
    def error(self) -> float: ...

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield blocks on and above the diagonal, (rows, width, cols, width) at a time."""

    def apply(self, y: Tensor) -> Tensor:
        """Return G y for r vectors at a time, (tokens, width, r)."""


def deflate(gram: BlockMatrix, q: Tensor) -> tuple[float, float, Tensor]:
    r"""Enclose :math:`\lambda_{max}(G)` by a few vectors; best when they span top eigenvectors.

    :math:`\lambda_{max}(T) \le \lambda_{max}(G) \le \lambda_{max}\begin{pmatrix} T & R_C^T \\ R_C &
    \varphi I \end{pmatrix}` with Q orthonormal, :math:`T = Q^T G Q`, :math:`GQ - QT = Q_C R_C` and
    :math:`\varphi` at least the norm of the deflated :math:`(I - QQ^T) G (I - QQ^T)`, by
    compression to norms of blocks or Frobenius: Lemmas 44 and 45 (docs/theory/certificates.md).
    Where :math:`\varphi` is below the top of T, the gap is of the order of the squared residuals.

    Args:
        gram: G, n x n with n = tokens x width.
        q: vectors (n, r), which are orthonormalised first.

    Returns:
        A lower and an upper bound, rounding included, and the vector (n,) that attains the lower
        one up to rounding.
    """
    n, w = gram.tokens, gram.width
    q = torch.linalg.qr(q).Q
    r = q.shape[1]
    y = gram.apply(q.view(n, w, r)).reshape(n * w, r)
    t = q.mT @ y
    t = (t + t.mT) / 2
    c = y - q @ t
    sizes = torch.zeros(n, n, dtype=torch.float64, device=gram.device)
    squares, trace = 0.0, 0.0
    for rows, cols, tile in gram.tiles():
        if rows == cols:
            trace += float(tile.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum())
        q_i, c_i = (s.view(n, w, r)[rows].reshape(-1, r) for s in (q, c))
        y_j, q_j = (s.view(n, w, r)[cols].reshape(-1, r) for s in (y, q))
        flat = tile.reshape(len(q_i), len(q_j)) - q_i @ y_j.mT - c_i @ q_j.mT
        norms = block_norm(flat.view(tile.shape).transpose(1, 2))
        sizes[rows, cols] = norms
        squares += float((flat * flat).sum()) * (1 if rows == cols else 2)
        if rows != cols:
            sizes[cols, rows] = norms.mT
    phi = min(float(nonnegative_norm(sizes)), squares**0.5)
    r_c = torch.linalg.qr(c, mode="r").R
    corner = phi * torch.eye(len(r_c)).to(t)
    bordered = torch.cat([torch.cat([t, r_c.mT], 1), torch.cat([r_c, corner], 1)])
    values, vectors = torch.linalg.eigh(t)
    # The rounding of G in the tiles and in Y, proved, and an allowance for Q, T and C, which are
    # products of the size of tr G.
    slack = (2 + r**0.5) * gram.error + 8 * (n * w + n + 4 * r + 40) * UNIT * trace
    upper = float(torch.linalg.eigvalsh(bordered)[-1]) + slack
    return max(float(values[-1]) - slack, 0.0), upper, q @ vectors[:, -1]


def deflation(
    op: JacobianOperator,
    grams: Sequence[Callable[[], BlockMatrix]],
    off: Tensor,
    *,
    tol: float,
    seed: int | Sequence[int],
    vectors: bool,
) -> Norm:
    """Enclose norms by `deflate`, with Ritz vectors of a Lanczos run.

    Memory O(STEPS n + tile) per norm; time that of one or two passes over the blocks of G.

    Args:
        op: the operators J.
        grams: makes G of every entry of the batch.
        off: how far the operators are from those that are meant, (batch,).
        tol: relative width of the enclosures to reach.
        seed: of the start vectors, one for all or one for each of equal parts of the batch.
        vectors: whether to return top singular vectors.

    Returns:
        The norms; ``converged`` where the enclosure is no wider than ``tol``.
    """
    lower = torch.zeros(op.batch, dtype=torch.float64)
    upper = torch.full_like(lower, math.inf)
    left = torch.zeros(op.batch, *op.out_shape, dtype=op.dtype, device=op.device)
    size = math.prod(op.out_shape)
    count = STEPS + 4 * max(RANKS)
    what = f"method 'deflation' needs {count} vectors of {size}"
    require(8.0 * size * count, op.device, what, "use 'lanczos'")
    together, seeds = max(1, int(2.5e8 // (8 * size * STEPS))), seeds_each(op.batch, seed)
    for entries in torch.arange(op.batch, device=op.device).split(together):
        own = [seeds[i] for i in entries.tolist()]
        ritz, _ = top_vectors(
            op.select(entries).double(),
            count=max(RANKS),
            residual=0.0,
            max_steps=STEPS,
            seed=own,
            restart=1e-12,
        )
        for i, basis in zip(entries.tolist(), ritz, strict=True):
            gram = grams[i]()
            columns = basis.view(-1, *op.out_shape)[:, gram.keep].flatten(1).mT
            for rank in RANKS:
                low, high, top = deflate(gram, columns[:, :rank])
                if low**0.5 > float(lower[i]):
                    lower[i] = low**0.5
                    left[i][gram.keep] = top.view(gram.tokens, gram.width)
                upper[i] = min(float(upper[i]), high**0.5)
                if upper[i] <= lower[i] * (1 + tol):
                    break
    _refuse_underflow(upper, op)
    norm = solved(op, lower, upper, steps=min(STEPS, size), left=left if vectors else None)
    return widened(norm, off, tol)


def _refuse_underflow(upper: Tensor, op: JacobianOperator) -> None:
    """Check that G stays in the range of float64 where J is not zero.

    Raises:
        LipboundError: it does not; attention next to a sink has norms of any size.
    """
    tiny = (upper < SMALLEST).nonzero()[:, 0].to(op.device)
    size = op.out_shape[0] * op.out_shape[1]
    if not len(tiny):
        return
    y = normal_numbers(len(tiny) * size, "underflow").view(len(tiny), *op.out_shape).to(op.device)
    if bool((op.select(tiny).vjp(y) != 0).any()):
        raise LipboundError(
            f"a norm is below {SMALLEST:g} and its square underflows float64; use "
            "method='dense', or rescale the weights"
        )
