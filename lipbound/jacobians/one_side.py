"""Jacobians of heads as functions of their queries, keys or values alone.

And norms of those in which every output follows its own token alone, such as those by queries.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import TensorErrors, length, tensor_errors
from lipbound.attention.variants.base import SIDES, UNIT, Side, TokenMap
from lipbound.attention.variants.other_stream import FixedStep
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.row_space import RowSpace
from lipbound.linalg.matrix_norms import matrix_norm, power_of_two
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.solution import Norm, solved, widened

BLOCK_BYTES = 2**28
"""Bytes of the blocks that are formed at a time, of one entry of the batch at least."""


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
    def by_itself(att: Attention, side: Side) -> "OneSide":
        """Return a side of a layer as it moves by itself."""
        eye = torch.eye(att.projection(side)[0].shape[2], dtype=att.dtype, device=att.device)
        return OneSide(side, eye.expand(att.heads, -1, -1))

    @staticmethod
    def of_values(att: Attention, basis: Tensor | None) -> "tuple[OneSide, Tensor]":
        """Return values as they move, as one column unless they are gated.

        Through an output projection, as its slices and their ``basis`` (heads, D_out, r), if there
        is one. Outputs are linear in values, whatever the units of these.

        Returns:
            The side, and the exponents of the powers of two that norms are to be multiplied with,
            (heads,) on the CPU.
        """
        alone = OneSide.by_itself(att, "v")
        if att.gate is not None:
            return alone, torch.zeros(att.heads, dtype=torch.long)
        w = alone.through if basis is None or att.w_o is None else att.w_o @ basis
        unit = power_of_two(w.abs().amax((-1, -2)))
        w = (w / unit[:, None, None]).to(att.dtype)
        u, s, v = (t.to(w) for t in torch.linalg.svd(w.cpu(), full_matrices=False))
        alone = OneSide("v", s[:, :1, None], (u[..., 0], v[:, 0]))
        return alone, unit.log2().round().long().cpu()

    def operator(self, op: HeadOperator, att: Attention) -> HeadOperator:
        """Return a Jacobian with respect to X as that with respect to the side.

        Inputs of the operator are all vectors of the side, (batch, rows or keys, n).

        Args:
            op: of the heads of ``att``.
            att: the layer.
        """
        place, counts = SIDES.index(self.side), (att.rows, att.keys, att.keys)
        changes: dict[str, Any] = {}
        sizes, own, unit = list(op.sizes[:4]), counts[place], (att.scale, att.scale, 1.0)[place]
        if self.pair is not None:
            sizes[2], changes["out_shape"] = 1, (att.rows, 1)
            changes |= {name: torch.zeros_like(getattr(op, name)[..., :1]) for name in ("v", "o")}
        w = self.through.new_zeros(*self.through.shape[:2], sum(sizes), dtype=op.dtype)
        w.split(sizes, -1)[place].copy_(unit * self.through.to(op.dtype))
        fixed = [[] if n == own else [FixedStep(own, n)] for n in counts]
        to_q, to_k, to_v = (TokenMap(steps, own, op.dtype, op.device) for steps in fixed)
        gate = op.gate and replace(op.gate, slope=torch.zeros_like(op.gate.slope))
        changes |= {"to_q": to_q, "to_k": to_k, "to_v": to_v, "gate": gate}
        changes |= {"extra": None, "cross": None, "own": None, "w": w}
        changes |= {"sizes": [*sizes, 0, 0, 0], "in_shape": (own, w.shape[1])}
        return op._with(rows=RowSpace(w, [], op.dtype, everything=True), **changes)

    def errors(self, att: Attention) -> TensorErrors:
        """Return errors of the layer's tensors, of which the side alone moves."""
        e, size, slopes = tensor_errors(att), length(self.through), {}
        for side in SIDES:
            none = torch.zeros_like(getattr(e, f"{side}_slope"))
            slopes[f"{side}_slope"] = size.expand_as(none) if side == self.side else none
            slopes[f"{side}_slope_error"] = none
        if self.pair is not None:  # the norm of W is from a singular value decomposition
            per = 16 * sum(t.shape[-1] for t in self.pair) * UNIT
            slopes["v_slope_error"] = per * slopes["v_slope"]
        return e._replace(**slopes)

    def lifted(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return singular vectors of the operator (samples, heads, ...) as those of all columns."""
        if self.pair is None:
            return left, right
        u, v = self.pair
        return left * v[:, None], right * u[:, None]


def own_block_norms(op: HeadOperator, roundoff: Roundoff, *, tol: float, vectors: bool) -> Norm:
    """Return the norms of block diagonal Jacobians, both ends proved, (batch,).

    Each is the largest norm of its blocks, d_v x D for every token: deterministic, and no search.
    The one with the largest upper value is decomposed, and no other is above its own. Lemma 17
    (docs/theory/bounds.md).

    Args:
        op: float64, of heads whose keys and values do not follow the inputs.
        roundoff: of its tensors and products.
        tol: relative width of the enclosures.
        vectors: whether singular vectors are wanted.
    """
    step = max(1, BLOCK_BYTES // (8 * math.prod(op.out_shape) * op.in_shape[1]))
    if step < op.batch:
        parts = torch.arange(op.batch).split(step)
        pieces = [(op.select(part.to(op.device)), roundoff.select(part)) for part in parts]
        return Norm.cat([own_block_norms(*one, tol=tol, vectors=vectors) for one in pieces])
    n, d_v = op.out_shape
    eye = torch.eye(d_v, dtype=op.dtype, device=op.device)
    # one row of every token's block from one product
    rows = [op.vjp(e.expand(op.batch, n, d_v).contiguous()) for e in eye]
    blocks = torch.stack(rows, 2)  # (batch, N, d_v, m)
    upper = matrix_norm(blocks)
    at = torch.arange(op.batch, device=op.device), upper.argmax(-1)
    u, s, _ = torch.linalg.svd(blocks[at].cpu(), full_matrices=False)
    left = torch.zeros(op.batch, n, d_v, dtype=op.dtype, device=op.device)
    left[at] = u[..., 0].to(left)
    upper[at] = 0.0  # what is left are the others
    value, rounding = s[:, 0], 8 * (d_v + blocks.shape[-1]) * torch.finfo(op.dtype).eps
    low, high = value * (1 - rounding), torch.maximum(value * (1 + rounding), upper.amax(-1).cpu())
    norm = solved(op, low, upper=high, steps=d_v, left=left if vectors else None)
    return widened(norm, roundoff.tensors + d_v**0.5 * roundoff.products, tol)
