"""Every token moves a little and all outputs count: a bracket, since the norm itself is hard to compute."""

import math

import torch
from torch import Tensor

from lipbound.jacobians.spectral_norm import Measured
from lipbound.linalg.enclosures.enclose import enclose
from lipbound.linalg.lanczos import lanczos
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operator_norm import DEFAULT_STEPS
from lipbound.linalg.operators import JacobianOperator, Roundoff
from lipbound.linalg.solution import Norm, normal_numbers

COLUMNS = 4
"""Of the matrices whose climb gives the weights, and vectors that climb."""
STEPS = 120
FLOOR = 1e-4
"""Weights are no smaller than this times their mean, which keeps rounding small."""


class Weighted(JacobianOperator):
    """The operators of a batch after every token's input is multiplied by a number, ``factors`` (batch, N)."""

    def __init__(self, op: JacobianOperator, factors: Tensor):
        self.op, self.factors = op, factors
        self.batch, self.in_shape, self.out_shape, self.dtype, self.device = op.batch, op.in_shape, op.out_shape, op.dtype, op.device

    def jvp(self, x: Tensor) -> Tensor:
        return self.op.jvp(x * self.factors[..., None])

    def vjp(self, y: Tensor) -> Tensor:
        return self.op.vjp(y) * self.factors[..., None]

    def select(self, index: Tensor) -> "Weighted":
        return Weighted(self.op.select(index), self.factors[index])


def every_to_all(measured: Measured, *, tol: float, delta: float, vectors: bool) -> Norm:
    r"""Ends of :math:`\max \|J X\|_F` over :math:`|x_j| \le 1`, for every map of a float64 layer: Lemma 103
    (docs/theory/token_bounds.md), and Lemma 93 (docs/theory/token_norms.md) for the lower end.

    Args:
        measured: the layer.
        tol: relative width at which ends count as met. delta: failure probability of each upper end.
        vectors: also return the perturbation that attains the lower end, and the direction of the outputs.
    """
    op, root = measured.op, measured.op.in_shape[0] ** 0.5
    error, product = (t.to(op.device) for t in (measured.roundoff.tensors, measured.roundoff.products))
    y, steps = _start(op), torch.full((op.batch,), 2 * STEPS, dtype=torch.int64)
    y, lengths = _climb(op, y / COLUMNS**0.5, together=True)
    upper = _above(measured, lengths, tol, delta) + (root * error * (1 + 1e-6)).cpu()
    y, lengths = _climb(op, _unit(y))
    best = lengths.sum(-1).argmax(0)
    left = y[best, torch.arange(op.batch, device=op.device)]
    pulled = op.vjp(left)
    parts = torch.linalg.vector_norm(pulled, dim=-1)
    sums = 2 * (sum(op.in_shape) + math.prod(op.out_shape) + 16) * UNIT
    lower = (parts.sum(-1) * (1 - sums) - root * (product + error) * (1 + 1e-6)).cpu()
    lower = torch.nan_to_num(lower, nan=0.0, posinf=0.0).clamp_min(0)
    upper = torch.nan_to_num(upper, nan=math.inf, posinf=math.inf)
    wide = torch.where(lower > 0, upper / lower.clamp_min(1e-300) - 1, torch.where(upper == 0, 0.0, math.inf))
    right = pulled / parts.clamp_min(1e-300)[..., None]
    return Norm(lower, upper, steps, wide <= tol, wide, left if vectors else None, right if vectors else None)


def _above(measured: Measured, lengths: Tensor, tol: float, delta: float) -> Tensor:
    r"""Upper values :math:`(\sum_j d_j)^{1/2} \|\hat J D^{-1/2}\|` for d near ``lengths`` (batch, N), on the CPU."""
    op, given = measured.op, measured.roundoff
    largest = lengths.amax(-1, keepdim=True)
    d = torch.where(largest > 0, lengths / largest.clamp_min(1e-300), 1.0)
    d = d + FLOOR * d.mean(-1, keepdim=True)
    factors = d.rsqrt()
    most = factors.amax(-1).cpu() * (1 + 1e-6)
    rounding = Roundoff(torch.zeros_like(given.tensors), (given.products + 8 * UNIT * given.size) * most, given.size * most)
    scaled = Weighted(op, factors)
    norm = enclose(scaled, rounding, scaled, tol=tol / 8, delta=delta, seed=0, max_steps=DEFAULT_STEPS["lanczos"])
    total = (1 / factors.square()).sum(-1).cpu()
    return norm.upper * total.sqrt() * (1 + (d.shape[-1] + 16) * UNIT)


def _start(op: JacobianOperator) -> Tensor:
    """Unit vectors of the outputs to climb from, (columns, batch, ...): the top singular vector, roughly, and fixed ones without preference."""
    found = lanczos(op, tol=1e-2, max_steps=40, seed=0, vectors=True)
    assert found.left is not None
    drawn = normal_numbers((COLUMNS - 1) * math.prod(op.out_shape), "every to all").view(COLUMNS - 1, 1, *op.out_shape)
    images = [op.jvp(op.vjp(one.to(op.device).expand(op.batch, *op.out_shape).contiguous())) for one in drawn]
    return _unit(torch.stack([found.left.double(), *images]))


def _unit(y: Tensor) -> Tensor:
    """Vectors (columns, batch, ...) divided by their length; zero stays."""
    return y / torch.linalg.vector_norm(y, dim=tuple(range(2, y.ndim)), keepdim=True).clamp_min(1e-300)


def _climb(op: JacobianOperator, y: Tensor, *, together: bool = False) -> tuple[Tensor, Tensor]:
    """Steps of Lemma 89 (docs/theory/token_norms.md) with all outputs as one, from y (columns, batch, ...): where they end, and lengths there,
    (columns, batch, N), or (batch, N) of columns that climb ``together``."""
    before = torch.zeros(y.shape[1], dtype=torch.float64, device=y.device)
    for step in range(STEPS):
        pulled = torch.stack([op.vjp(one) for one in y])
        lengths = torch.linalg.vector_norm(pulled, dim=-1)
        if together:
            lengths = lengths.square().sum(0).sqrt()
        total = lengths.sum(-1) if together else lengths.sum(-1).amax(0)
        if step == STEPS - 1 or bool((total <= before * (1 + 1e-7)).all()):
            break
        before = total
        pulled = torch.where(lengths[..., None] > 0, pulled / lengths[..., None].clamp_min(1e-300), 0.0)
        z = torch.stack([op.jvp(one) for one in pulled])
        z = _unit(z.transpose(0, 1)[None]).transpose(1, 2)[0] if together else _unit(z)
        y = torch.where(torch.isfinite(z), z, y)
    return y, lengths
