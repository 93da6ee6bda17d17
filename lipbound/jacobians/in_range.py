"""Layers in units in which their tensors are of ordinary size, and what is measured there."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import of_ordinary_size, unit_values
from lipbound.attention.validation import check_sizes
from lipbound.attention.variants.base import Side
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.maps import BLOCKS, WHOLE, LayerJacobian
from lipbound.jacobians.one_side import OneSide
from lipbound.jacobians.rounding import folding_loss, layer_roundoff, roundoff
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.matrix_norms import UNIT, times_power
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.solution import Norm

MapOperator = HeadOperator | LayerJacobian
"""The Jacobian of every head, or of whole layers."""


@dataclass(frozen=True, eq=False)
class InRange:
    """A layer whose map is measured, in units in which its tensors are of ordinary size.

    Attributes:
        map: of `lipbound.jacobians.maps.MAPS`.
        given: the layer in its own units.
        layer: that in these units, with the output projection folded in where the map has it.
        exponents: of the powers of two that norms are to be multiplied with, (heads,), or (1,) of
            maps of the whole layer, on the CPU.
        basis: (heads, D_out, r) of the outputs of "head_out", or None.
        alone: the side that moves, or None.
    """

    map: str
    given: Attention
    layer: Attention
    exponents: Tensor
    basis: Tensor | None
    alone: OneSide | None

    def jacobian(self, *, estimate: bool = False) -> MapOperator:
        """Return the Jacobian of the map.

        Args:
            estimate: heads are only to check what a search in float32 has found.
        """
        heads = head_jacobian(self.layer)
        if self.map in WHOLE:
            return LayerJacobian(self.layer, heads, self.map)
        heads = heads if self.alone is None else self.alone.operator(heads, self.layer)
        return heads.estimating() if estimate else heads

    def allowance(self, op: MapOperator) -> Roundoff:
        """Return the rounding of the `jacobian` of a float64 layer and of its products."""
        if isinstance(op, LayerJacobian):
            return layer_roundoff(self.layer, op.heads, self.map)
        found = roundoff(self.layer, op, self.alone)
        if self.basis is None:
            return found
        alone = None if self.alone is None else OneSide.by_itself(self.given, self.alone.side)
        lost = folding_loss(self.given, self.basis, op, alone).cpu()
        lost = times_power(lost, -self.exponents).flatten()
        return found._replace(tensors=(found.tensors + lost) * (1 + 4 * UNIT))

    def brought_back(self, norm: Norm, op: MapOperator, dtype: torch.dtype) -> Norm:
        """Return norms of the `jacobian`, and vectors, in the units and coordinates of the layer.

        (samples, heads), or (samples,); vectors in ``dtype``.
        """
        heads, left, right = self.given.heads, norm.left, norm.right
        norm = (norm if self.map in WHOLE else norm.view(-1, heads)).times_power(self.exponents)
        if left is None or right is None:
            return norm
        if isinstance(op, HeadOperator):
            left, right = (t.unflatten(0, (-1, heads)) for t in (left, op.lift(right)))
            left, right = (left, right) if self.alone is None else self.alone.lifted(left, right)
            left = left if self.basis is None else left @ self.basis.mT
        return replace(norm, left=left.to(dtype), right=right.to(dtype))


def in_range(att: Attention, map: str, side: Side | None = None) -> InRange:
    """Return a layer in units of ordinary size.

    Args:
        att: the layer.
        map: of `lipbound.jacobians.maps.MAPS`.
        side: that heads are a function of, "q", "k" or "v"; None for the inputs.

    Raises:
        AttentionError: the output projection is asked for and not known.
        LipboundError: sizes of tensors as of `lipbound.attention.validation.check_sizes`.
    """
    check_sizes(att)
    if map == "layer":
        att.output_projection(map, "heads")
    layer, basis = att.fold_output() if map == "head_out" else (att, None)
    exponents, together = torch.zeros(att.heads, dtype=torch.long), map in WHOLE
    if map not in BLOCKS:  # a residual's identity is seen in its own units
        if att.dtype == torch.float64 and side is None:
            layer, exponents = of_ordinary_size(layer, together=together)
        layer, more = unit_values(layer, together=together)
        exponents = exponents + more
    alone = None if side is None else OneSide.by_itself(att, side)
    if side == "v":
        alone, exponents = OneSide.of_values(att, basis)
    return InRange(map, att, layer, exponents[:1] if together else exponents, basis, alone)
