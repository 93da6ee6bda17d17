r"""One sublayer of a transformer block with its residual connection and layer normalisation, at one sample.

Pre-norm :math:`h \mapsto h + m(n(h))`, post-norm :math:`x \mapsto n(x + m(x))`, m being attention with its output projection, or an MLP. Its
Jacobian, and an upper value of how far it changes within a ball: Lemma 113 (docs/theory/networks.md).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lipbound.analysis.sublayers import normalisation
from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.bounds.ball.bound_over_ball import ball_difference
from lipbound.jacobians.multihead import LayerJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.matrix_norms import matrix_norm
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import JacobianOperator

TOL = 1e-3
"""Of norms of single sublayers."""
LARGEST = 1e50
"""Radius beyond which nothing is said: the bound is infinite."""


class Part(Protocol):
    """Attention or an MLP at one sample: products with its Jacobian, (N, D) -> (N, D)."""

    def jvp(self, dy: Tensor) -> Tensor: ...

    def vjp(self, dx: Tensor) -> Tensor: ...

    def norm(self) -> Tensor:
        """An upper value of its norm, ()."""

    def change(self, radius: float) -> Tensor:
        """An upper value of how far it is from that at inputs within a Frobenius ball, ()."""


@dataclass(frozen=True)
class AttentionPart:
    """All heads of a layer with the output projection, one unpadded float64 sample; ``delta``: probability that `norm` fails."""

    att: Attention
    delta: float

    @cached_property
    def _jacobian(self) -> LayerJacobian:
        return LayerJacobian(self.att, project=True)

    def jvp(self, dy: Tensor) -> Tensor:
        return self._jacobian.jvp(dy[None])[0]

    def vjp(self, dx: Tensor) -> Tensor:
        return self._jacobian.vjp(dx[None])[0]

    @cached_property
    def _norm(self) -> Tensor:
        return spectral_norm(self.att, map="layer", tol=TOL, delta=self.delta).upper[0]

    def norm(self) -> Tensor:
        return self._norm

    @cached_property
    def _folded(self) -> tuple[Attention, Tensor, Tensor]:
        """Heads that have absorbed their projections, norms of products of their bases, and that of all: Lemma 20 (docs/theory/layers.md)."""
        heads, bases = self.att.fold_output()
        return heads, matrix_norm(bases[:, None].mT @ bases[None]), matrix_norm(torch.cat(list(bases), 1))

    def change(self, radius: float) -> Tensor:
        if not radius <= LARGEST:
            return torch.tensor(torch.inf, dtype=torch.float64)
        heads, omega, whole = self._folded
        found = ball_difference(heads, radius, norm="frobenius")[0]
        return torch.minimum((found @ omega @ found).sqrt(), whole * found.norm()) * (1 + 1e-12)


@dataclass(frozen=True)
class Sublayer:
    """A part with what stands around it.

    Attributes:
        name: such as "block 2, attention".
        part: attention or MLP, or None for a normalisation alone.
        around: its layer normalisation, at this sample, or None.
        post: whether it stands behind the sum; else before the part.
        delta: probability that the norm of the sum, which post-norm needs, fails.
    """

    name: str
    part: Part | None
    around: Normaliser | None
    post: bool
    delta: float

    def jvp(self, x: Tensor) -> Tensor:
        """J x, (N, D)."""
        if self.part is None:
            return self._normalise(x)
        if self.post:
            return self._normalise(x + self.part.jvp(x))
        return x + self.part.jvp(self._normalise(x))

    def vjp(self, y: Tensor) -> Tensor:
        """J^T y, (N, D)."""
        if self.part is None:
            return self._normalise_back(y)
        if self.post:
            y = self._normalise_back(y)
            return y + self.part.vjp(y)
        return y + self._normalise_back(self.part.vjp(y))

    def change(self, radius: float) -> Tensor:
        """An upper value of how far its Jacobian is from the one here within a Frobenius ball of inputs, ()."""
        if not radius <= LARGEST:
            return torch.tensor(torch.inf, dtype=torch.float64)
        if self.part is None:
            assert self.around is not None
            return normalisation.change(self.around, radius)
        if self.around is None:
            return self.part.change(radius)
        if self.post:
            inside = self.part.change(radius)
            steepest = self._sum_norm + inside
            bent = normalisation.change(self.around, float(steepest) * radius)
            return bent * steepest + normalisation.norm(self.around) * inside
        before = normalisation.norm_within(self.around, radius)
        return self.part.change(float(before) * radius) * before + self.part.norm() * normalisation.change(self.around, radius)

    @cached_property
    def _sum_norm(self) -> Tensor:
        """An upper value of the norm of x + m(x), ()."""
        assert self.part is not None
        return upper_norm(Products([Sublayer(self.name, self.part, None, False, self.delta)], self.shape, self.device), self.delta)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D) of its inputs."""
        assert self.around is not None
        return self.around.x.shape[1], self.around.x.shape[2]

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        assert self.around is not None
        return self.around.x.device

    def _normalise(self, x: Tensor) -> Tensor:
        return x if self.around is None else self.around.jvp(x[None])[0]

    def _normalise_back(self, y: Tensor) -> Tensor:
        return y if self.around is None else self.around.vjp(y[None])[0]


class Products(JacobianOperator):
    """The Jacobian of some sublayers, one after the other; a batch of one."""

    def __init__(self, sublayers: list[Sublayer], shape: tuple[int, int], device: torch.device):
        self._sublayers = sublayers
        self.batch, self.in_shape, self.out_shape = 1, shape, shape
        self.dtype, self.device = torch.float64, device

    def jvp(self, x: Tensor) -> Tensor:
        x = x[0]
        for sublayer in self._sublayers:
            x = sublayer.jvp(x)
        return x[None]

    def vjp(self, y: Tensor) -> Tensor:
        y = y[0]
        for sublayer in reversed(self._sublayers):
            y = sublayer.vjp(y)
        return y[None]

    def select(self, index: Tensor) -> "Products":
        return self


def upper_norm(op: JacobianOperator, delta: float) -> Tensor:
    """The upper end of a norm in float64, (); fails with probability ``delta``."""
    return operator_norm(op, tol=TOL, delta=delta).upper[0]
