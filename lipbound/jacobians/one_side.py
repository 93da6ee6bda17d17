"""Jacobians of heads as functions of their queries, keys or values alone."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import TensorErrors, spectral, tensor_errors
from lipbound.attention.variants.base import SIDES, Side
from lipbound.attention.variants.gate import GateStep
from lipbound.attention.variants.other_stream import FixedStep
from lipbound.attention.variants.token_maps import TokenMap
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.row_space import RowSpace

Op = TypeVar("Op", bound=HeadOperator)


@dataclass(frozen=True, eq=False)
class OneSide:
    """One side of the heads of a layer, which moves while everything else is held.

    Queries and keys move as they enter the scores, after any normalisation and rotation; values as
    they are averaged.

    Attributes:
        side: "q", "k" or "v".
        through: matrices by which a move is multiplied first, (heads, n, d or d_v).
    """

    side: Side
    through: Tensor

    def operator(self, op: Op, att: Attention) -> Op:
        """Return a Jacobian with respect to X as that with respect to the side.

        Inputs of the operator are all vectors of the side, (batch, rows or keys, n).

        Args:
            op: of the heads of ``att``.
            att: the layer.
        """
        place, units = SIDES.index(self.side), (att.scale, att.scale, 1.0)
        parts = [
            units[i] * self.through.to(op.dtype)
            if i == place
            else self.through.new_zeros(*self.through.shape[:2], size, dtype=op.dtype)
            for i, size in enumerate(op.sizes[:4])
        ]
        w, counts = torch.cat(parts, -1), (att.rows, att.keys, att.keys)
        own = counts[place]
        fixed = [[] if n == own else [FixedStep(own, n)] for n in counts]
        to_q, to_k, to_v = (TokenMap(steps, own, op.dtype, op.device) for steps in fixed)
        gate = op.gate
        if gate is not None:
            gate = GateStep(gate.factor, torch.zeros_like(gate.slope), gate.after)
        changes: dict[str, Any] = {"to_q": to_q, "to_k": to_k, "to_v": to_v, "gate": gate}
        changes |= {"extra": None, "cross": None, "own": None, "w": w}
        changes |= {"sizes": [*op.sizes[:4], 0, 0, 0], "in_shape": (own, w.shape[1])}
        return op._with(rows=RowSpace(w, [], op.dtype, everything=True), **changes)

    def norms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return norms of what moves are multiplied by, (heads,) for each of `SIDES`."""
        own = spectral(self.through.double())
        q, k, v = (own if side == self.side else torch.zeros_like(own) for side in SIDES)
        return q, k, v

    def errors(self, att: Attention) -> TensorErrors:
        """Return errors of the layer's tensors, of which the side alone moves."""
        e, norms = tensor_errors(att), dict(zip(SIDES, self.norms(), strict=True))
        slopes = {}
        for side, size in norms.items():
            like = getattr(e, f"{side}_slope")
            slopes[f"{side}_slope"] = size[:, None].expand_as(like)
            slopes[f"{side}_slope_error"] = torch.zeros_like(like)
        return replace(e, **slopes)
