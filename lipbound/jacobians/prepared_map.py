"""Layers ready to be measured: in units of ordinary size, with the Jacobian of the map."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import on_one_scale, ordinary, unit_scales, unit_values
from lipbound.attention.variants.base import Side
from lipbound.attention.variants.gate import Gate
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.maps import BLOCKS, WHOLE
from lipbound.jacobians.one_side import OneSide
from lipbound.jacobians.rounding import (
    folding_error,
    layer_roundoff,
    roundoff,
    values_folding_error,
)
from lipbound.jacobians.streaming import head_jacobian
from lipbound.jacobians.whole_layer import BlockJacobian, LayerJacobian
from lipbound.linalg.matrix_norms import times_power
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
        exponents: of the powers of two that its norms are to be multiplied with, (heads,).
        known: whether the layer could be brought into these units exactly, (samples, heads) bool,
            or (samples,) for maps of the whole layer; None where it always can.
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
        self.map, self.known, before = map, None, att
        self._given, self._key = att, ("roundoff", map, as_given, estimate, side)
        att, self.basis = att.fold_output() if map == "head_out" else (att, None)
        self.folded = None if self.basis is None else folding_error(before, att, self.basis)
        self.exponents = values = torch.zeros(att.heads, dtype=torch.long)
        if as_given:
            pass
        elif att.dtype == torch.float64 and ordinary(att, projected=_projects(map)) is None:
            att, exponents, self.known, of_sides = unit_scales(att)
            values = exponents.cpu()
            exponents = exponents if side is None else of_sides.get(side, exponents)
            if map in WHOLE:
                projected, fixed = _projects(map), map in BLOCKS
                att, exponents, exact = on_one_scale(
                    att, exponents, projected=projected, fixed=fixed
                )
                att = att.with_parts(surroundings=before.surroundings, check=False)
                self.known = self.known.all(-1) & exact
            self.exponents = exponents.cpu()
        elif map not in BLOCKS:  # the identity of a residual must be seen in its own units
            att, unit = unit_values(att, together=map in WHOLE)
            self.exponents = values = unit.cpu().log2().round().long()
        # what follows a gate keeps its units, and what is before it is multiplied
        if self.folded is not None and att.scoring.find(Gate) is None:
            self.folded = self.folded.shifted(-values.to(self.folded.weights.device))
        self.attention, self.op, self.alone = att, _operator(att, map), None
        if side is not None and isinstance(self.op, HeadOperator):
            self.alone = self._one_side(side, before, as_given=as_given)
            self.op = self.alone.operator(self.op, att)
        if estimate and isinstance(self.op, HeadOperator):
            self.op = self.op.estimating()

    @property
    def roundoff(self) -> Roundoff:
        """Rounding of the Jacobian and its products, of a float64 layer, which keeps it."""
        return self._given.cache.get(self._key, self._roundoff)

    def _roundoff(self) -> Roundoff:
        heads, folded = heads_of(self.op), self.folded
        if self.map in WHOLE:
            return layer_roundoff(self.attention, heads, self.map)
        return roundoff(self.attention, heads, folding=folded, alone=self.alone)

    def _one_side(self, side: Side, given: Attention, *, as_given: bool) -> OneSide:
        """A side as it moves, values through an output projection that is folded into them.

        Outputs are linear in values, whatever the units of these.
        """
        att = self.attention
        width = att.d_v if side == "v" else att.d
        eye = torch.eye(width, dtype=att.dtype, device=att.device).expand(att.heads, -1, -1)
        if side != "v":
            return OneSide(side, eye)
        self.exponents = torch.zeros_like(self.exponents)
        if att.scoring.find(Gate) is not None:
            return OneSide(side, eye)
        if self.basis is None or given.w_o is None:
            return OneSide.of_values(eye)
        through = given.w_o @ self.basis
        self.folded = values_folding_error(given.w_o, self.basis, through)
        if as_given:
            return OneSide.of_values(through)
        size = through.abs().amax((-1, -2))
        self.exponents = torch.frexp(torch.where(size > 0, size, 1.0)).exponent.long()
        self.folded = self.folded.shifted(-self.exponents)
        self.exponents = self.exponents.cpu()
        unit = times_power(through, -self.exponents.to(through.device)[:, None, None])
        return OneSide.of_values(unit.to(through.dtype))


def _projects(map: str) -> bool:
    """Return whether heads are projected and added in a map."""
    return map in WHOLE and map != "heads"


def heads_of(op: JacobianOperator) -> HeadOperator:
    """The heads that an operator of a layer is made of."""
    while not isinstance(op, HeadOperator):
        assert isinstance(op, (LayerJacobian, BlockJacobian))
        op = op.layer if isinstance(op, BlockJacobian) else op.heads
    return op


def _operator(att: Attention, map: str) -> JacobianOperator:
    if map in BLOCKS:
        return BlockJacobian(att, map)
    return LayerJacobian(att, project=map == "layer") if map in WHOLE else head_jacobian(att)
