"""Certified bound on the part of G that some vectors leave out, by a Lanczos run of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipbound.linalg.certificates import log_inverse_epsilon
from lipbound.linalg.enclosures.residual_certificate import (
    Recurrences,
    below,
    excluded,
    smallest_excluded,
)
from lipbound.linalg.enclosures.verified import Bordered
from lipbound.linalg.krylov import Dots, moved_up, with_room
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import JacobianOperator, Roundoff
from lipbound.linalg.solution import normal_numbers

LOOK = 2
"""Steps between two looks at the recurrences."""
RITZ = 2
"""Ritz vectors that a run leaves for a second attempt."""
WORTH_COPYING = 0.8
"""Share of a batch that is still at work below which it is copied to a smaller one."""
HOPELESS = 1e-3
"""Relative residual of a Ritz value beyond the target at which the run ends: the vectors it was
given have missed something."""


@dataclass
class Deflated:
    """Results of a run.

    Attributes:
        phi: upper bounds on the largest eigenvalue of the deflated matrix, (batch,).
        steps: products spent, (batch,).
        ritz: top Ritz vectors, (batch, at most `RITZ`, n).
    """

    phi: Tensor
    steps: Tensor
    ritz: Tensor


def deflated_bound(
    op: JacobianOperator,
    roundoff: Roundoff,
    small: Bordered,
    target: Tensor,
    delta: float,
    seeds: Sequence[int],
    max_steps: int,
) -> Deflated:
    r"""Bound :math:`\|(I - QQ^T)\,G\,(I - QQ^T)\|` from above, Q orthonormalising ``small.z``.

    Lemma 65 (docs/theory/rounding.md): every rounding of the run is measured step by step.

    Args:
        op: the operators J of :math:`G = J J^T`, in float64.
        roundoff: of their products.
        small: the vectors that are left out, and their images.
        target: values that would do, (batch,) float64.
        delta: probability with which each bound may fail.
        seeds: of the start vectors, one for each entry.
        max_steps: products of the run at most.

    Returns:
        Bounds: at most ``target`` where that can be shown, elsewhere the smallest number that can,
        or infinity.
    """
    n, r = math.prod(op.out_shape), small.z.shape[1]
    if r >= n:
        nothing = torch.zeros_like(target)
        return Deflated(nothing, nothing.long(), small.z[:, :0])
    limit, z, dots = min(max_steps, n - r), small.z, Dots(n)
    gamma = 2 * (dots.roundings + 4 * UNIT) * r**0.5  # of products with z
    epsilon = math.exp(-log_inverse_epsilon(n, delta))
    least = epsilon - 4 * float(small.skew.amax()) - 4 * gamma - 16 * UNIT
    rows = Recurrences(op.batch, limit, small, roundoff, least)
    ritz = z.new_zeros(op.batch, min(RITZ, limit), n)
    steps = torch.zeros(op.batch, dtype=torch.int64)
    active, going = torch.arange(op.batch), torch.ones(op.batch, dtype=torch.bool)
    v = _start(seeds, z, dots)
    basis, b = v.new_empty(op.batch, min(24, limit), n), v.new_zeros(op.batch)
    for j in range(limit):
        basis = with_room(basis, j, limit)
        basis[:, j] = v
        outside = torch.linalg.vector_norm(dots(v, z), dim=1) + gamma
        w, a, lost, reach = _step(op, v, z, basis[:, : j + 1], b, dots)
        b = torch.linalg.vector_norm(w, dim=1)
        shown = (t.cpu()[going].numpy() for t in (a, b, lost, outside, reach))
        rows.append(active[going].numpy(), j, *shown)
        v = w / b.clamp_min(1e-300)[:, None]
        if j % LOOK and j + 1 < limit and bool((b > 1e-12 * reach).all()):
            continue
        index, goal = active.numpy(), target[active].numpy()
        stop = rows.shown(index, j + 1, goal) | rows.hopeless(index, j + 1, goal, HOPELESS)
        stop |= (j + 1 == limit) | (b <= 1e-13 * reach).cpu().numpy()
        ended = (torch.from_numpy(stop) & going).nonzero()[:, 0]
        if not len(ended):
            continue
        steps[active[ended]] = j + 1
        turn = torch.from_numpy(rows.ritz(active[ended].numpy(), j + 1, RITZ)).to(basis)
        found = turn @ basis[ended.to(op.device), : j + 1]
        ritz[active[ended].to(op.device), : turn.shape[1]] = found
        going[ended] = False
        keep = going.nonzero()[:, 0]
        if not len(keep):
            break
        if len(keep) <= WORTH_COPYING * len(active):
            there, basis = keep.to(op.device), moved_up(basis, keep.numpy(), j + 1)
            op, v, b, z = op.select(there), v[there], b[there], z[there]
            active, going = active[keep], going[keep]
    return Deflated(_smallest(rows, steps.numpy(), target.numpy()), steps, ritz)


def _start(seeds: Sequence[int], z: Tensor, dots: Dots) -> Tensor:
    """Return random unit vectors (batch, n) without components along z (batch, r, n)."""
    v = torch.stack([normal_numbers(z.shape[2], seed) for seed in seeds]).to(z.device)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
    for _ in range(2):
        v = v - (dots(v, z)[:, None] @ z)[:, 0]
    return v / torch.linalg.vector_norm(v, dim=1, keepdim=True)


def _step(
    op: JacobianOperator, v: Tensor, z: Tensor, known: Tensor, b: Tensor, dots: Dots
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multiply the last vector v of a basis, and orthogonalise the image.

    Returns:
        What is left of the image (batch, n); the diagonal entry of T, what reorthogonalisation took
        away, and the length of the image, (batch,) each.
    """
    w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
    reach = torch.linalg.vector_norm(w, dim=1)
    w = w - (dots(w, z)[:, None] @ z)[:, 0]
    a = (w * v).sum(1).clamp_min(0)
    w.addcmul_(v, a[:, None], value=-1)
    if known.shape[1] > 1:
        w.addcmul_(known[:, -2], b[:, None], value=-1)
    lost = torch.zeros_like(a)
    for vectors in (z, known):  # what rounding has left of them, as measured
        c = w[:, None] @ vectors.mT
        lost += c.abs().sum((1, 2))
        w = (w[:, None] - c @ vectors)[:, 0]
    return w, a, lost, reach


def _smallest(rows: Recurrences, steps: np.ndarray, goal: np.ndarray) -> Tensor:
    """Return the smallest numbers that the runs exclude: below ``goal``, or else beyond it."""
    reached, under = excluded(rows, steps, goal), below(rows, steps, goal)
    if reached.all():
        return torch.from_numpy(under)
    return torch.from_numpy(np.where(reached, under, smallest_excluded(rows, steps, goal)))
