"""Rounding of the Jacobians of gated heads, from that of the heads before their gates."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import MARGIN, TensorErrors
from lipbound.attention.variants.gate import Gate
from lipbound.jacobians.head import HeadOperator
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import Roundoff


def gated(
    att: Attention,
    gate: Gate,
    op: HeadOperator,
    e: TensorErrors,
    before: Roundoff,
    *,
    logits_move: bool = True,
) -> Roundoff:
    """Return roundings of gated heads of a float64 layer: Lemma 17 (docs/theory/bounds.md).

    Args:
        att: the layer.
        gate: its gate.
        op: its Jacobian.
        e: errors of its tensors.
        before: roundings of the heads before their gates, (samples x heads,).
        logits_move: False where the gate is held, and scales outputs alone.
    """
    step, shape = op.gate, (att.samples, att.heads, att.rows)
    assert step is not None
    size = torch.linalg.matrix_norm(gate.w)[:, None]
    bias = 0.0 if gate.b is None else torch.linalg.vector_norm(gate.b, dim=-1)[:, None]
    length = torch.linalg.vector_norm(att.x, dim=-1)[:, None]
    logits = 2 * (gate.w.shape[1] + 8) * UNIT * (length * size + bias)  # (samples, heads, N)
    factor, slope = logits / 4 + 16 * UNIT, logits / 10 + 16 * UNIT
    if att.valid is not None:
        factor, slope = (t.masked_fill(~att.valid[:, None], 0.0) for t in (factor, slope))
    values = torch.linalg.vector_norm(att.wide_v, dim=-1)
    output = torch.linalg.vector_norm(att.p.double() @ att.wide_v, dim=-1)
    longest = (values if att.valid is None else values.masked_fill(~att.valid[:, None], 0)).amax(-1)
    weights = torch.linalg.matrix_norm(att.w_v)[:, None]
    own_bias = 0.0 if att.b_v is None else torch.linalg.vector_norm(att.b_v, dim=-1)[:, None]
    made = 4 * (att.x.shape[2] + att.tokens + 32) * UNIT * (length * weights + own_bias)
    off = e.p * longest[..., None] + (1 + e.p) * (e.v_error + made).amax(-1, keepdim=True)
    steepest = step.slope.abs().amax(-1).view(shape)
    moved = (output * slope + (0.25 + slope) * off).amax(-1)
    own, spread = size[:, 0] * steepest.amax(-1), size[:, 0]
    largest = step.factor.amax((-1, -2)).view(shape[:2])
    inner = [t.view(shape[:2]).to(att.device) for t in before]
    if not logits_move:
        own, spread = torch.zeros_like(own), torch.zeros_like(spread)
        moved = torch.zeros_like(moved)
    tensors = largest * inner[0] + factor.amax(-1) * inner[2] + spread * moved
    tensors = tensors + op.rows.loss * own
    width = op.w.shape[2] + 2 * op.in_shape[1] + 40
    products = largest * inner[1] + UNIT * (width * own + 8 * inner[2])
    whole = largest * inner[2] + own
    if gate.after is not None:
        norm = torch.linalg.matrix_norm(gate.after)
        products = norm * (products + 2 * (att.d_v + 8) * UNIT * whole)
        tensors, whole = norm * tensors, norm * whole
    return Roundoff(*(_upper(t).flatten().cpu() for t in (tensors, products, whole)))


def _upper(x: Tensor) -> Tensor:
    return torch.nan_to_num(x * MARGIN, nan=torch.inf, posinf=torch.inf)
