"""What our bound over a ball needs to know of one sample, and the bound from it: Lemma 27
(docs/theory/balls.md)."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import tensor_errors
from lipbound.bounds import factors
from lipbound.bounds.ball.softmax_interval import (
    key_spread,
    query_lengths,
    score_changes,
    softmax_interval,
)
from lipbound.bounds.ours.block_norms import BlockNorms
from lipbound.linalg.matrix_norms import block_norm, gamma, matrix_norm, nonnegative_norm

Slopes = tuple[float | Tensor, float | Tensor, float | Tensor]


class BallCentre:
    r"""One unpadded sample of a float64 layer, whatever the radius: tensors (heads, ...).

    Attributes:
        p, d, f: P, D and F, (heads, N, M); M = N, or N + 1 with a sink. allowed: where P is not
            zero by the mask, (heads, N, M).
        u: (heads, N, 1 or M). norm_v: (heads, 1, 1). norm_a: (heads,).
        b, cov_v, cov_k, mean_k: at the centre, :math:`\|B_i\|`, :math:`\|Cov_{P_i} v\|`,
            :math:`\|Cov_{P_i} \tilde k\|`, and 0, (heads, N).
    """

    mean_k: float | Tensor = 0.0

    def __init__(self, att: Attention):
        parts, off = BlockNorms(att), CentreErrors(att)
        self.scores, self.p = att.scores(att.q, att.centred_k)[0], parts.p
        self.allowed = allowed = self.scores > -torch.inf
        self.off_scores, self.off_p = off.scores, off.p
        self.u = query_lengths(att)[..., None] + off.u
        f, kt = key_spread(att)
        self.d, self.f = (
            torch.where(allowed, parts.distance + off.d, 0.0),
            torch.where(allowed, f + off.f, 0.0),
        )
        self.norm_a, self.norm_v = factors.norm_a(att).value(), parts.norm_v
        self.b = parts.b + off.b
        self.cov_v, self.cov_k = (
            _covariance_norm(parts.p, parts.v) + off.cov_v,
            _covariance_norm(parts.p, kt) + off.cov_k,
        )

    def reach(self, radius: float, ball: str) -> tuple[Tensor, Tensor, Slopes]:
        """Smallest and largest P' over the ball, and the slope of a cap: at the centre, its largest
        value, its largest change."""
        low, up = softmax_interval(
            self.scores, score_changes(self.f, self.u, self.norm_a, radius, ball) + self.off_scores
        )
        return low, up, (1.0, 1.0, 0.0)

    def bounds(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """Upper values over the ball of the change of J from the centre, and of J itself, (heads,)
        each."""
        return self.by_entries(radius, ball)

    def by_entries(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """`bounds` by Lemma 27 (docs/theory/balls.md): (a) without the norm at the centre, and the
        smaller of (b) and (c)."""
        p, d, f, u = self.p, self.d, self.f, self.u
        low, up, (slope, slope_up, slope_change) = self.reach(radius, ball)
        change = (torch.maximum(up - p, p - low).clamp(0.0, 1.0) + p * self.off_p + 1e-289).clamp(
            max=1.0
        )
        change_t, up_t = slope * change + up * slope_change, up * slope_up  # of P times the slope
        a_v, a_a = self.norm_v * radius, self.norm_a[:, None, None] * radius  # (heads, 1, 1)
        far, far_k = _most(d, up), _most(f, up)  # (heads, N, 1) from here on
        w = (change * d).sum(-1, keepdim=True).minimum(far)
        w_k = (self.mean_k + (change_t * f).sum(-1, keepdim=True)).minimum(far_k)
        n = p.shape[-2]
        move = (
            torch.full_like(w, radius)
            if ball == "token"
            else radius * up[..., :n].amax(-1, keepdim=True).sqrt()
        )
        m_v, m_a = self.norm_v * move, self.norm_a[:, None, None] * move
        c_v, c_k = (
            (cov[..., None] + (delta * x * x).sum(-1, keepdim=True))
            .minimum((top * x * x).sum(-1, keepdim=True))
            .minimum(_most(x * x, up))
            .sqrt()
            for cov, delta, top, x in ((self.cov_v, change, up, d), (self.cov_k, change_t, up_t, f))
        )
        extra = (
            (change_t * d * f).sum(-1, keepdim=True) + w * w_k + m_v * c_k + m_a * c_v + m_v * m_a
        )
        b_up = (self.b[..., None] + extra).minimum((c_v + m_v) * (c_k + m_a))

        # blocks of J are those of tokens, without the sink
        change, up, d, u = (t[..., :n] for t in (change, up, d, u))
        slope, slope_up, slope_change = (
            t[..., :n] if isinstance(t, Tensor) else t for t in (slope, slope_up, slope_change)
        )
        e = a_v + m_v + w
        difference = change * (self.norm_v + slope * d * u) + up * (
            slope_change * d * u + slope_up * (e * (u + a_a) + d * a_a)
        )
        changed = nonnegative_norm(difference + torch.diag_embed(extra[..., 0]), rtol=1e-4)
        t = self.norm_v + slope_up * (((d + w).minimum(2 * far) + a_v + m_v) * (u + a_a))
        t = torch.where(self.allowed[..., :n], t, 0.0)
        blocks = up * t
        direct = nonnegative_norm(blocks + torch.diag_embed(b_up[..., 0]), rtol=1e-4)
        closed = (t.amax((-1, -2)) * blocks.sum(-2).amax(-1)).sqrt() + b_up.amax((-1, -2))
        slack = 2 * gamma(20 * (n + 20) + 2000)
        changed, direct, closed = (
            t.nan_to_num(torch.inf, torch.inf) * (1 + slack) for t in (changed, direct, closed)
        )
        return changed, direct.minimum(closed)


def _most(x: Tensor, up: Tensor) -> Tensor:
    """The largest mean of x >= 0 (..., N, M) over rows of P' of at most ``up``: that of tokens, and
    the sink's share of what it exceeds them by."""
    tokens, sink = x.split([n := x.shape[-2], x.shape[-1] - n], -1)
    most = tokens.amax(-1, keepdim=True)
    return most if sink.shape[-1] == 0 else most + up[..., n:] * (sink - most).clamp_min(0)


def _covariance_norm(p: Tensor, v: Tensor) -> Tensor:
    """||Cov_{P_i}(v)|| for every row, (heads, N, N) and centred (heads, N, d) -> (heads, N),
    rounded upwards."""
    d = v.shape[-1]
    o = p @ v
    second = (p @ (v[..., :, None] * v[..., None, :]).flatten(-2)).unflatten(-1, (d, d))
    size = v.norm(dim=-1).amax(-1)[:, None] ** 2
    return (
        block_norm(second - o[..., :, None] * o[..., None, :]) + 8 * gamma(p.shape[-1] + 8) * size
    )  # the difference cancels


class CentreErrors:
    """What rounding may have taken from the quantities of `BallCentre`, as upper values: Lemma 82
    (docs/theory/upper_values.md).

    Attributes:
        scores, p: absolute error of differences of scores, relative of P, (heads, N, 1). u, d, f,
            b, cov_v, cov_k: as there, broadcastable to them.
    """

    def __init__(self, att: Attention):
        e, n, c = tensor_errors(att), att.tokens, abs(att.scale)
        own = gamma(
            n + att.x.shape[2] + 8 * (att.d + att.d_v) + 100
        )  # relative to sizes, of everything that is formed of the tensors

        def most(t: Tensor) -> Tensor:
            return t[0].amax(-1, keepdim=True)  # (heads, 1)

        def slope(w: Tensor, t: Tensor) -> Tensor:
            """Frobenius norms of the maps of tokens: those of products with them are relative to
            these, (heads, 1)."""
            return (
                most(t)
                * (torch.linalg.matrix_norm(w) / matrix_norm(w).clamp_min(1e-300)).clamp_min(1.0)[
                    :, None
                ]
            )

        value, key, query, p = (
            most(e.v),
            most(e.k),
            e.q[0],
            e.weights[0].masked_fill(e.weights[0] > 0.5, torch.inf),
        )
        slope_q, slope_k = slope(att.w_q, e.q_slope), slope(att.w_k, e.k_slope)
        self.scores, self.p = 2 * e.score[0][..., None], 2 * p[..., None]
        output = (p + own) * value + most(e.v_error)
        self.d = (output + most(e.v_error) + own * value)[..., None]
        self.f = (
            c
            * (
                slope_q * ((p + 2 * own) * key + 2 * most(e.k_error))
                + 2 * most(e.q_slope_error) * key
            )[..., None]
        )
        self.u = (
            c * (slope_k * (e.q_error[0] + own * query) + most(e.k_slope_error) * query)[..., None]
        )
        moved = 2 * p * value + most(e.v_error) + output  # of P_ij (v_j - o_i), over a row
        self.b = (
            2
            * c
            * (
                slope_q * (moved * key + 2 * value * most(e.k_error) + own * value * key)
                + 2 * value * key * most(e.q_slope_error)
            )
        )
        self.cov_v = 8 * value * ((p + own) * value + output + most(e.v_error))
        self.cov_k = 8 * c * slope_q * key * (c * slope_q * key * (p + own) + self.f[..., 0])
        for name, t in vars(self).items():
            setattr(self, name, t.nan_to_num(torch.inf, torch.inf))
