"""What is tested against: dense autograd Jacobians of the definition, and their norms by float64
SVD."""

import math

import torch
from support.reference import head_function
from torch import Tensor

import lipbound as lb
from lipbound.jacobians.in_range import in_range
from lipbound.jacobians.maps import WHOLE


def allowance(att: lb.Attention, map: str = "head") -> Tensor:
    """How far the rounding of a layer's tensors may move its norms, as the layer itself says:
    (samples, heads), of maps of whole layers (samples,)."""
    wide = in_range(att.double(), map)
    error, unit = wide.allowance(wide.jacobian()).tensors, 2.0**wide.exponents
    return error.view(att.samples, -1) * unit if map in ("head", "head_out") else error * unit


def assert_encloses(
    att: lb.Attention, norm: lb.Norm, exact: Tensor, tol: float, map: str = "head"
) -> None:
    """Ends hold norms of a layer that are known to 1e-12, no further off than ``tol`` and its own
    rounding; and norms are converged where rounding is a tenth of ``tol`` at most."""
    error = allowance(att, map)
    assert encloses(norm, exact, tol, error)
    assert bool((norm.converged | (error > 0.1 * tol * exact)).all())


def encloses(norm: lb.Norm, exact: Tensor, tol: float, error: Tensor) -> bool:
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


def capture_error(att: lb.Attention) -> float:
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
    share = ((1 + scores) * deviation + 2 * values) / torch.maximum(out, 1e-3 * values)
    return 8 * 2.0**-24 * float(share.amax())


def jacobians(att: lb.Attention, sample: int) -> Tensor:
    """Autograd Jacobians of all heads side by side, padding left out: (n, heads, d_v, n D)."""
    heads = [head_function(att, sample, h) for h in range(att.heads)]
    x = att.x[sample] if att.valid is None else att.x[sample][att.valid[sample]]
    return torch.func.jacrev(lambda x: torch.stack([head(x) for head in heads], 1))(x).flatten(3)


def matrices(att: lb.Attention, sample: int, map: str = "head") -> Tensor:
    """Autograd Jacobians of the heads of a sample, or of all of them together, padding left out:
    (heads or 1, outputs, n D)."""
    j = jacobians(att.double(), sample)
    if map in ("head_out", "layer"):
        j = torch.einsum("nhvx,hvo->nhox", j, att.w_o.double())
    j = j.sum(1, keepdim=True) if map == "layer" else j
    return j.flatten(0, 2)[None] if map in WHOLE else j.transpose(0, 1).flatten(1, 2)


def oracle(att: lb.Attention, map: str = "head") -> Tensor:
    """Exact norms by float64 SVD of the autograd Jacobian of the definition, (samples, heads); of
    maps of whole layers (samples,)."""
    rows = [torch.linalg.svdvals(matrices(att, s, map))[:, 0] for s in range(att.samples)]
    return torch.cat(rows) if map in WHOLE else torch.stack(rows)


def dense_norms(att: lb.Attention, map: str = "head") -> Tensor:
    """Exact norms by autograd Jacobians of the definition and float64 SVD, all samples and heads at
    once, (samples, heads)."""
    j = dense_jacobians(att, map)
    return torch.linalg.svdvals(j.reshape(*j.shape[:2], att.tokens * att.d_v, -1))[..., 0]


def dense_jacobians(att: lb.Attention, map: str = "head", x: Tensor | None = None) -> Tensor:
    """Autograd Jacobians of the definition, all samples and heads of a layer without variants at
    once, (samples, heads, N, d_v, N, D), float64; or at other tokens x (samples, heads, N, D)."""
    att = att.double()
    x = att.x[:, None].expand(-1, att.heads, -1, -1) if x is None else x
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

    def head(x, w_q, w_k, w_v, b_q, b_k, b_v, m, rows):
        if map == "head":
            scores, v = att.scale * (x @ w_q + b_q) @ (x @ w_k + b_k).mT, x @ w_v + b_v
        else:
            q, v = x @ w_q, x @ (att.scale * w_q @ w_q.mT @ w_v)
            scores = -att.scale * ((q[:, None] - q[None]) ** 2).sum(-1)
        return rows[:, None] * (torch.softmax(scores + m, -1) @ v)

    over_heads = torch.func.vmap(torch.func.jacrev(head), (*[0] * 8, None))
    over_samples = torch.func.vmap(over_heads, (0, *[None] * 6, 0, 0))
    return over_samples(x, att.w_q, att.w_k, att.w_v, b_q, b_k, b_v, mask, real.double())
