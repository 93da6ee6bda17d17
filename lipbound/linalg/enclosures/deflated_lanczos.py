r"""How large can the part of G be that some vectors leave out? Certified by a Lanczos run of its
own, its rounding measured step by step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipbound.linalg.certificates import log_inverse_epsilon
from lipbound.linalg.enclosures.inner_products import Dots
from lipbound.linalg.enclosures.residual_certificate import (
    Recurrences,
    below,
    excluded,
    smallest_excluded,
)
from lipbound.linalg.enclosures.verified import Bordered
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import JacobianOperator, Roundoff
from lipbound.linalg.solution import normal_numbers

LOOK = 2
"""Steps between two looks at the recurrences."""
RITZ = 2
"""How many Ritz vectors a run leaves for a second attempt."""
WORTH_COPYING = 0.8
"""Share of a batch that is still at work below which it is copied to a smaller one."""
HOPELESS = 1e-3
"""Relative residual of a Ritz value beyond the target at which the run ends: the vectors it was
given have missed something."""


@dataclass
class Deflated:
    """What a run has shown, (batch,) each: an upper bound on the largest eigenvalue of the deflated
    matrix, products spent, its top Ritz vectors."""

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
    r"""Upper bounds on :math:`\|(I - QQ^T)\,G\,(I - QQ^T)\|`, Q orthonormalising ``small.z``:
    ``target`` (batch,) where that can be shown.

    Lemma 65 (docs/theory/rounding.md). Each fails with probability ``delta`` at most. Where the
    target cannot be shown, the smallest number that can, or infinity; where it can, a smaller one
    if there is.
    """
    n, r = math.prod(op.out_shape), small.z.shape[1]
    if r >= n:
        nothing = torch.zeros_like(target)
        return Deflated(nothing, nothing.long(), small.z[:, :0])
    limit = min(max_steps, n - r)
    epsilon = math.exp(-log_inverse_epsilon(n, delta))
    dots = Dots(n)
    gamma = 2 * (dots.roundings + 4 * UNIT) * r**0.5  # of products with z
    z, rows = (
        small.z,
        Recurrences(
            op.batch,
            limit,
            small,
            roundoff,
            epsilon - 4 * float(small.skew.amax()) - 4 * gamma - 16 * UNIT,
        ),
    )
    result = Deflated(
        torch.full_like(target, math.inf),
        torch.zeros(op.batch, dtype=torch.int64),
        z.new_zeros(op.batch, min(RITZ, limit), n),
    )
    active, going = torch.arange(op.batch), torch.ones(op.batch, dtype=torch.bool)
    v = torch.stack([normal_numbers(n, seed) for seed in seeds]).to(op.device)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
    for _ in range(2):
        v = v - (dots(v, z)[:, None] @ z)[:, 0]
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
    basis, b = v.new_empty(op.batch, min(24, limit), n), v.new_zeros(op.batch)
    for j in range(limit):
        if j == basis.shape[1]:
            basis = torch.cat([basis, basis.new_empty(len(active), min(j, limit - j), n)], 1)
        basis[:, j] = v
        outside = torch.linalg.vector_norm(dots(v, z), dim=1) + gamma
        w = op.gram(v.view(-1, *op.out_shape)).flatten(1)
        reach = torch.linalg.vector_norm(w, dim=1)
        w = w - (dots(w, z)[:, None] @ z)[:, 0]
        a = (w * v).sum(1).clamp_min(0)
        w.addcmul_(v, a[:, None], value=-1)
        if j:
            w.addcmul_(basis[:, j - 1], b[:, None], value=-1)
        lost = torch.zeros_like(a)
        for known in (z, basis[:, : j + 1]):  # what rounding has left of them, as measured
            c = w[:, None] @ known.mT
            lost += c.abs().sum((1, 2))
            w = (w[:, None] - c @ known)[:, 0]
        b = torch.linalg.vector_norm(w, dim=1)
        rows.append(
            active[going].numpy(),
            j,
            *(t.cpu()[going].numpy() for t in (a, b, lost, outside, reach)),
        )
        v = w / b.clamp_min(1e-300)[:, None]
        if j % LOOK and j + 1 < limit and bool((b > 1e-12 * reach).all()):
            continue
        stop = rows.shown(active.numpy(), j + 1, target[active].numpy()) | (j + 1 == limit)
        stop |= (
            rows.hopeless(active.numpy(), j + 1, target[active].numpy(), HOPELESS)
            | (b <= 1e-13 * reach).cpu().numpy()
        )
        ended = (torch.from_numpy(stop) & going).nonzero()[:, 0]
        if not len(ended):
            continue
        result.steps[active[ended]] = j + 1
        turn = torch.from_numpy(rows.ritz(active[ended].numpy(), j + 1, RITZ)).to(basis)
        result.ritz[active[ended].to(op.device), : turn.shape[1]] = (
            turn @ basis[ended.to(op.device), : j + 1]
        )
        going[ended] = False
        keep = going.nonzero()[:, 0]
        if not len(keep):
            break
        if len(keep) <= WORTH_COPYING * len(active):
            there = keep.to(op.device)
            for new, old in enumerate(
                keep.tolist()
            ):  # in place: a fresh copy would cost more than a step
                if new != old:
                    basis[new, : j + 1] = basis[old, : j + 1]
            op, basis, v, b, z = op.select(there), basis[: len(keep)], v[there], b[there], z[there]
            active, going = active[keep], going[keep]
    steps = result.steps.numpy()
    reached, goal = excluded(rows, steps, target.numpy()), target.numpy()
    smallest = (
        below(rows, steps, goal)
        if reached.all()
        else np.where(reached, below(rows, steps, goal), smallest_excluded(rows, steps, goal))
    )
    result.phi = torch.from_numpy(smallest)
    return result
