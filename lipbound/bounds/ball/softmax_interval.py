r"""The softmax rows that attention can reach when its input moves within a ball.

When every token moves by at most :math:`\rho`, score (i, j) changes by at most :math:`\tau_{ij}` up
to a shift of its row, and each probability lies between its values at two corners of that box of
scores: Lemmas 25 and 26 (docs/theory/balls.md).
"""

import math

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds import factors
from lipbound.linalg.matrix_norms import upper_factor


def key_spread(att: Attention) -> tuple[Tensor, Tensor]:
    """F_ij, (heads, N, N), and the keys kt_j, centred, (heads, N, .), of an unpadded float64 layer.

    The keys are in coordinates in which they are no shorter.
    """
    kt = att.scale * att.centred_k[0] @ upper_factor(att.w_q)[0].mT
    return torch.cdist(att.p[0] @ kt, kt, compute_mode="donot_use_mm_for_euclid_dist"), kt


def score_changes(f: Tensor, u: Tensor, norm_a: Tensor, radius: float, ball: str) -> Tensor:
    """tau_ij, (heads, N, N), from F (heads, N, N), u (heads, N, 1 or N) and ||A|| (heads,).

    Lemma 25 (docs/theory/balls.md).
    """
    square = norm_a[:, None, None] * radius**2
    together = radius * (f + u) + square
    if ball == "token":
        return together
    apart = radius * (f**2 + u**2).sqrt() + square / 2
    own = torch.eye(f.shape[-1], dtype=torch.bool, device=f.device)
    return torch.where(own, together, apart)


def softmax_interval(scores: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest probabilities, (..., N) each, when scores change by at most tau.

    Scores (..., N) are -inf where attention is forbidden.
    """
    allowed = scores > -math.inf
    finite = torch.where(allowed, scores, 0.0).abs().amax(-1, keepdim=True)
    # rounding of scores and of their logarithms
    tau = tau + 8 * torch.finfo(scores.dtype).eps * (finite + tau + scores.shape[-1])
    log_p = torch.log_softmax(scores, -1)
    low = torch.where(allowed, log_p - tau, log_p)
    high = torch.where(allowed, log_p + tau, log_p)
    p = log_p.exp()
    upper = torch.sigmoid(high - _others(low))
    lower = torch.sigmoid(low - _others(high))
    tiny = torch.finfo(scores.dtype).tiny  # below it, probabilities lose their digits
    up = torch.where(allowed, upper + tiny, 0.0).clamp(max=1.0)
    return torch.where(allowed, lower - tiny, 0.0).clamp_min(0).minimum(p), up.maximum(p)


def relative_interval(
    scores: Tensor, size: Tensor, mean_square: Tensor, low: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Smallest and largest probabilities when scores change by ``size`` at most, zero in the mean.

    Within ``low`` and ``up``; (..., N) each: Lemma 106 (docs/theory/ball_pairs.md).
    """
    allowed = scores > -math.inf
    finite = torch.where(allowed, scores, 0.0).abs().amax(-1, keepdim=True)
    log_p = torch.where(allowed, torch.log_softmax(scores, -1), 0.0)
    size = size + 8 * torch.finfo(scores.dtype).eps * (finite + size + scores.shape[-1])
    most = torch.where(allowed, size, 0.0).amax(-1, keepdim=True).clamp_min(1e-2)
    growth = mean_square * ((most.expm1() - most) / most.square()) * (1 + 1e-9)
    tiny = torch.finfo(scores.dtype).tiny
    largest = torch.where(allowed, (log_p + size).exp() + tiny, 0.0)
    smallest = torch.where(allowed, (log_p - size - growth.log1p()).exp() - tiny, 0.0).clamp_min(0)
    p = torch.where(allowed, log_p.exp(), 0.0)
    up = up.minimum(largest.nan_to_num(math.inf, math.inf))
    return low.maximum(smallest.nan_to_num(0.0)).minimum(p), up.maximum(p)


def _others(x: Tensor) -> Tensor:
    """Logarithm of the sum of exp over the other entries of each row.

    The sum without the largest entry is formed anew, in units of its own largest: subtraction would
    cancel, and exp underflow.
    """
    top, where = x.max(-1, keepdim=True)
    e = (x - top).exp()
    rest = (e.sum(-1, keepdim=True) - e).clamp_min(0).log() + top
    return rest.scatter(-1, where, x.scatter(-1, where, -math.inf).logsumexp(-1, keepdim=True))


def reachable_rows(att: Attention, radius: float, ball: str) -> tuple[Tensor, Tensor]:
    """Smallest and largest P' over the ball around an unpadded float64 sample, (heads, N, N)."""
    q = abs(att.scale) * att.q[0] @ upper_factor(att.w_k)[0].mT
    f, u = key_spread(att)[0], q.norm(dim=-1, keepdim=True)
    tau = score_changes(f, u, factors.norm_a(att), radius, ball)
    return softmax_interval(att.scores(att.q, att.centred_k)[0], tau)


def g1_over_box(low: Tensor, high: Tensor) -> Tensor:
    """Upper value of g_1 over all probability rows between two others, (..., N) -> (...).

    Hence of ||M(p)||. The maximum of one concave arc on either side of a point, in q = 1 - p_1,
    formed without cancellation near one-hot rows: Lemma 30 (docs/theory/balls.md).
    """
    top, where = high.max(-1, keepdim=True)
    others = high.scatter(-1, where, 0.0)
    second = others.amax(-1)
    most = others.sum(-1).minimum(1 - low.amax(-1) + 1e-13)
    least = (1 - top[..., 0] - 1e-13).clamp_min(0).minimum(most)

    def value(q: Tensor) -> Tensor:
        q = q.maximum(least).minimum(most)
        return (1 - q) * (q + second.minimum(q))

    tries = (least, most, (1 - second) / 2, second, torch.full_like(most, 0.5))
    return torch.stack([value(q) for q in tries]).amax(0).clamp(0.0, 0.5) * (1 + 1e-12)
