"""Layers ready to be measured: in units of ordinary size, with the Jacobian of the map."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import check_sizes, of_ordinary_size, unit_values
from lipbound.attention.variants.base import Side
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.maps import BLOCKS, WHOLE, LayerJacobian
from lipbound.jacobians.one_side import OneSide
from lipbound.jacobians.rounding import folding_loss, layer_roundoff, roundoff
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.matrix_norms import UNIT, times_power
from lipbound.linalg.operators import JacobianOperator, Roundoff


class PreparedMap:
    """A layer whose map is measured, in units in which its tensors are of ordinary size.

    The output projection is folded in where the map has it.

    Args:
        att: the layer.
        map: of `lipbound.jacobians.maps.MAPS`.
        as_given: keep the layer's own units.
        estimate: heads are only to check what a search in float32 has found.
        side: that heads are a function of, "q", "k" or "v"; None for the inputs.

    Attributes:
        attention: the layer. op: the Jacobian of the map.
        exponents: of the powers of two that norms are to be multiplied with, (heads,), on the CPU.
        basis: (heads, D_out, r) of the outputs of "head_out", or None.
        alone: the side that moves, or None.
    """

    basis: Tensor | None

    def __init__(
        self,
        att: Attention,
        map: str,
        *,
        as_given: bool = False,
        estimate: bool = False,
        side: Side | None = None,
    ):
        check_sizes(att)
        self.map, self._given, self._as_given = map, att, as_given
        self._key = ("roundoff", map, as_given, estimate, side)
        att, self.basis = att.fold_output() if map == "head_out" else (att, None)
        self.exponents = torch.zeros(att.heads, dtype=torch.long)
        if not as_given and map not in BLOCKS:  # a residual's identity is seen in its own units
            together = map in WHOLE
            if att.dtype == torch.float64 and side is None:
                att, self.exponents = of_ordinary_size(att, together=together)
            att, unit = unit_values(att, together=together)
            self.exponents = self.exponents + unit.log2().round().long()
        self.attention, self.alone = att, None
        self.op = LayerJacobian(att, map) if map in WHOLE else head_jacobian(att)
        if side is not None and isinstance(self.op, HeadOperator):
            self.alone = self._one_side(side)
            self.op = self.alone.operator(self.op, att)
        if estimate and isinstance(self.op, HeadOperator):
            self.op = self.op.estimating()

    @property
    def roundoff(self) -> Roundoff:
        """Rounding of the Jacobian and its products, of a float64 layer, which keeps it."""
        return self._given.cache.get(self._key, self._roundoff)

    def _roundoff(self) -> Roundoff:
        heads, given = heads_of(self.op), self._given
        if self.map in WHOLE:
            return layer_roundoff(self.attention, heads, self.map)
        found = roundoff(self.attention, heads, self.alone)
        if self.basis is None or given.w_o is None:
            return found
        alone = self._plain(self.alone.side) if self.alone else None
        lost = times_power(folding_loss(given, self.basis, heads, alone).cpu(), -self.exponents)
        return found._replace(tensors=(found.tensors + lost.flatten()) * (1 + 4 * UNIT))

    def _plain(self, side: Side) -> OneSide:
        """A side as it moves by itself."""
        att = self._given
        width = att.d_v if side == "v" else att.d
        eye = torch.eye(width, dtype=att.dtype, device=att.device).expand(att.heads, -1, -1)
        return OneSide(side, eye)

    def _one_side(self, side: Side) -> OneSide:
        """A side as it moves, values through an output projection that is folded into them.

        Outputs are linear in values, whatever the units of these.
        """
        given, plain = self._given, self._plain(side)
        if side != "v":
            return plain
        self.exponents = torch.zeros_like(self.exponents)
        if given.gate is not None:
            return plain
        if self.basis is None or given.w_o is None:
            return OneSide.of_values(plain.through)
        through = given.w_o @ self.basis
        if not self._as_given:
            size = through.abs().amax((-1, -2))
            powers = torch.frexp(torch.where(size > 0, size, 1.0)).exponent.long()
            through, self.exponents = times_power(through, -powers[:, None, None]), powers.cpu()
        return OneSide.of_values(through.to(given.dtype))


def heads_of(op: JacobianOperator) -> HeadOperator:
    """The heads that an operator of a layer is made of."""
    assert isinstance(op, HeadOperator | LayerJacobian)
    return op if isinstance(op, HeadOperator) else op.heads
