"""Jacobians of heads as functions of their queries, keys or values alone."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import TensorErrors, length, tensor_errors
from lipbound.attention.variants.base import SIDES, UNIT, Side, TokenMap
from lipbound.attention.variants.gate import GateStep
from lipbound.attention.variants.other_stream import FixedStep
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.row_space import RowSpace


@dataclass(frozen=True, eq=False)
class OneSide:
    """One side of the heads of a layer, which moves while everything else is held.

    Queries and keys move as they enter the scores, after any normalisation and rotation; values as
    they are averaged: Lemma 6 (docs/theory/jacobian.md). Values that nothing but P and a matrix W
    acts on have a Kronecker product for Jacobian, whose norm is that of P times that of W: one
    column stands for all of them.

    Attributes:
        side: "q", "k" or "v".
        through: matrices by which a move is multiplied first, (heads, n, d or d_v); of one column
            the norm of W, (heads, 1, 1).
        pair: of one column, the top singular vectors of W, (heads, n) and (heads, d_v).
    """

    side: Side
    through: Tensor
    pair: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of_values(w: Tensor) -> "OneSide":
        """Return values that are averaged and multiplied by w (heads, n, d_v), as one column."""
        u, s, v = torch.linalg.svd(w, full_matrices=False)
        return OneSide("v", s[:, :1, None], (u[..., 0], v[:, 0]))

    def operator(self, op: HeadOperator, att: Attention) -> HeadOperator:
        """Return a Jacobian with respect to X as that with respect to the side.

        Inputs of the operator are all vectors of the side, (batch, rows or keys, n).

        Args:
            op: of the heads of ``att``.
            att: the layer.
        """
        place, units = SIDES.index(self.side), (att.scale, att.scale, 1.0)
        changes: dict[str, Any] = {}
        sizes, own = list(op.sizes[:4]), (att.rows, att.keys, att.keys)[place]
        if self.pair is not None:
            sizes[2], changes["out_shape"] = 1, (att.rows, 1)
            changes |= {name: torch.zeros_like(getattr(op, name)[..., :1]) for name in ("v", "o")}
        parts = [
            units[i] * self.through.to(op.dtype)
            if i == place
            else self.through.new_zeros(*self.through.shape[:2], size, dtype=op.dtype)
            for i, size in enumerate(sizes)
        ]
        w, counts = torch.cat(parts, -1), (att.rows, att.keys, att.keys)
        fixed = [[] if n == own else [FixedStep(own, n)] for n in counts]
        to_q, to_k, to_v = (TokenMap(steps, own, op.dtype, op.device) for steps in fixed)
        gate = op.gate
        if gate is not None:
            gate = GateStep(gate.factor, torch.zeros_like(gate.slope), gate.after)
        changes |= {"to_q": to_q, "to_k": to_k, "to_v": to_v, "gate": gate}
        changes |= {"extra": None, "cross": None, "own": None, "w": w}
        changes |= {"sizes": [*sizes, 0, 0, 0], "in_shape": (own, w.shape[1])}
        return op._with(rows=RowSpace(w, [], op.dtype, everything=True), **changes)

    def norms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return norms of what moves are multiplied by, (heads,) for each of `SIDES`."""
        own = length(self.through)
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
        if self.pair is not None:  # the norm of W is from a singular value decomposition
            per = 16 * sum(t.shape[-1] for t in self.pair) * UNIT
            slopes["v_slope_error"] = per * slopes["v_slope"]
        return replace(e, **slopes)

    def lifted(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return singular vectors of the operator (samples, heads, ...) as those of all columns."""
        if self.pair is None:
            return left, right
        u, v = self.pair
        return left * v[:, None], right * u[:, None]
