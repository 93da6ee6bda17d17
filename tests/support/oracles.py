"""What is tested against: dense autograd Jacobians of the definition, and their norms by float64
SVD."""

import math

import torch
from support.reference import head_function
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.linalg.solution import Norm


def encloses(norm: Norm, exact: Tensor, tol: float, error: Tensor) -> bool:
    """Whether the ends of enclosures (or lower ends alone) hold values known to 1e-12, and are no
    further off than ``tol`` and rounding ask for.

    ``error``: how far rounding of a layer's tensors may move its norms.
    """
    below = (norm.lower <= exact * (1 + 1e-12)) & (
        norm.lower >= exact * (1 - tol - 1e-12) - 3 * error
    )
    above = (norm.upper >= exact * (1 - 1e-12)) & (
        torch.isinf(norm.upper) | (norm.upper <= exact * (1 + tol + 1e-12) + 5 * error)
    )
    return bool((below & above).all())


def capture_error(att: Attention) -> float:
    """How far float32 arithmetic may move head outputs of a captured layer from the model's, in the
    units of its ``error``.

    A score rounds by its own size, which is the relative error of a probability, and moves outputs
    by as much of the deviation of values from them; values round by their own size. Both are
    compared with the outputs of the same head.
    """
    att = att.double()
    scores = (att.scale * att.q @ att.k.mT).abs().amax((-1, -2))
    deviation = (att.p @ att.v.square() - att.out.square()).clamp_min(0).sqrt().amax((-1, -2))
    out, values = att.out.abs().amax((-1, -2)), att.v.abs().amax((-1, -2))
    return (
        8
        * 2.0**-24
        * float(
            (((1 + scores) * deviation + 2 * values) / torch.maximum(out, 1e-3 * values)).amax()
        )
    )


def jacobians(att: Attention, sample: int) -> Tensor:
    """Autograd Jacobians of all heads side by side, padding left out: (n, heads, d_v, n D)."""
    heads = [head_function(att, sample, h) for h in range(att.heads)]
    x = att.x[sample] if att.valid is None else att.x[sample][att.valid[sample]]
    return torch.func.jacrev(lambda x: torch.stack([head(x) for head in heads], 1))(x).flatten(3)


def oracle(att: Attention) -> Tensor:
    """Exact norms by float64 SVD of the autograd Jacobian of the definition, (samples, heads)."""
    att = att.double()
    rows = [jacobians(att, s).transpose(0, 1).flatten(1, 2) for s in range(att.samples)]
    return torch.stack([torch.linalg.svdvals(row)[:, 0] for row in rows])


def dense_norms(att: Attention, map: str = "head") -> Tensor:
    """Exact norms by autograd Jacobians of the definition and float64 SVD, all samples and heads at
    once, (samples, heads)."""
    j = dense_jacobians(att, map)
    return torch.linalg.svdvals(j.reshape(*j.shape[:2], att.tokens * att.d_v, -1))[..., 0]


def dense_jacobians(att: Attention, map: str = "head") -> Tensor:
    """Autograd Jacobians of the definition, all samples and heads of a layer without variants at
    once, (samples, heads, N, d_v, N, D), float64."""
    att = att.double()
    n, heads, samples = att.tokens, att.heads, att.samples
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64) if att.mask is None else att.mask
    mask = mask.expand(samples, heads, n, n).clone()
    real = torch.ones(samples, n, dtype=torch.bool) if att.valid is None else att.valid
    mask = mask.masked_fill(~real[:, None, None], -math.inf).masked_fill(
        ~real[:, None, :, None], 0.0
    )
    b_q, b_k, b_v = (
        torch.zeros(heads, w.shape[2]).double() if b is None else b
        for b, w in ((att.b_q, att.w_q), (att.b_k, att.w_k), (att.b_v, att.w_v))
    )

    def head(
        x: Tensor,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        b_q: Tensor,
        b_k: Tensor,
        b_v: Tensor,
        m: Tensor,
        rows: Tensor,
    ) -> Tensor:
        if map == "head":
            return rows[:, None] * (
                torch.softmax(att.scale * (x @ w_q + b_q) @ (x @ w_k + b_k).mT + m, -1)
                @ (x @ w_v + b_v)
            )
        q = x @ w_q
        distances = ((q[:, None] - q[None]) ** 2).sum(-1)
        return rows[:, None] * (
            torch.softmax(-att.scale * distances + m, -1) @ (x @ (att.scale * w_q @ w_q.mT @ w_v))
        )

    over_heads = torch.func.vmap(torch.func.jacrev(head), in_dims=(None, 0, 0, 0, 0, 0, 0, 0, None))
    found: Tensor = torch.func.vmap(
        over_heads, in_dims=(0, None, None, None, None, None, None, 0, 0)
    )(att.x, att.w_q, att.w_k, att.w_v, b_q, b_k, b_v, mask, real.double())
    return found
