"""Our bound over a ball by norms of single blocks of J, for one sample.

Lemma 27 (docs/theory/balls.md) for plain heads; Lemma 28 (docs/theory/balls.md) for heads with
rotary position embeddings, capped scores or sinks. A sink counts as one more token that never
moves, the last column here. Where queries or keys are normalised their derivative changes with the
input, and there is no statement.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import tensor_errors
from lipbound.attention.variants.cap import cap_slope
from lipbound.attention.variants.rotary import turned
from lipbound.bounds import factors
from lipbound.bounds.ball.softmax_interval import (
    key_spread,
    score_changes,
    softmax_interval,
)
from lipbound.bounds.ours.block_norms import BlockNorms
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import (
    block_norm,
    gamma,
    nonnegative_norm,
    upper_factor,
)

COVERS = frozenset({"rotation", "cap", "sinks"})
"""The variants with a statement."""
BALL_CHUNK = 2**24
"""Bytes of the largest temporary."""
RowMaps = Callable[[slice], Tensor]
"""Maps of some tokens, (heads, tokens, d, r): vectors are mapped by their transposes."""
Slopes = tuple[float | Tensor, float | Tensor, float | Tensor]
"""Slope of a cap at the centre, its largest value and its largest change over the ball."""


class BallCentre:
    r"""The centre of a ball: one unpadded sample of a plain float64 layer, tensors (heads, ...).

    Attributes:
        p, d, f: P, D and F, (heads, N, M); M = N, or N + 1 with a sink.
        allowed: where P is not zero by the mask, (heads, N, M) bool.
        u: (heads, N, 1 or M). norm_v: (heads, 1, 1). norm_a: (heads,).
        v, k, q: values, :math:`\tilde k_j` and :math:`\tilde q_i`, (heads, N or M, .), before the
            maps of tokens where there are such.
        map_k, map_q: these maps of some rows, or None.
        b, cov_v, cov_k, mean_k: at the centre, :math:`\|B_i\|`, :math:`\|Cov_{P_i} v\|`,
            :math:`\|Cov_{P_i} \tilde k\|`, and 0, (heads, N).
        off: what rounding may have taken from them.
    """

    map_k: RowMaps | None = None
    map_q: RowMaps | None = None
    mean_k: float | Tensor = 0.0

    def __init__(self, att: Attention):
        parts, self.off = BlockNorms(att), (off := CentreErrors(att))
        self.scores, self.p = att.scores(att.q, att.centred_k)[0], parts.p
        self.allowed = allowed = self.scores > -torch.inf
        f, self.k = key_spread(att)
        self.v, self.q = parts.v, abs(att.scale) * att.q[0] @ upper_factor(att.w_k)[0].mT
        self.u = self.q.norm(dim=-1, keepdim=True) + off.u
        self.d = torch.where(allowed, parts.distance + off.d, 0.0)
        self.f = torch.where(allowed, f + off.f, 0.0)
        self.norm_a, self.norm_v = factors.norm_a(att), parts.norm_v
        self.b = parts.b + off.b
        self.cov_v = _covariance_norm(parts.p, parts.v) + off.cov_v
        self.cov_k = _covariance_norm(parts.p, self.k) + off.cov_k

    def reach(self, radius: float, ball: str) -> tuple[Tensor, Tensor, Slopes]:
        """Smallest and largest P' over the ball, (heads, N, M), and the slope of a cap."""
        tau = score_changes(self.f, self.u, self.norm_a, radius, ball) + self.off.scores
        low, up = softmax_interval(self.scores, tau)
        return low, up, (1.0, 1.0, 0.0)

    def change(self, low: Tensor, up: Tensor) -> Tensor:
        """Upper values of the change of P over the ball, (heads, N, M)."""
        change = torch.maximum(up - self.p, self.p - low).clamp(0.0, 1.0)
        return (change + self.p * self.off.p + 1e-289).clamp(max=1.0)

    def move(self, up: Tensor, radius: float, ball: str) -> Tensor:
        """Largest move of the mean token of each row, (heads, N, 1), from the largest P'."""
        most = up[..., : self.p.shape[-2]].amax(-1, keepdim=True).sqrt()
        return torch.full_like(most, radius) if ball == "token" else radius * most

    def enlarged(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Values with the rounding of sums of numbers >= 0; what is no number is infinite."""
        slack = 2 * gamma(20 * (self.p.shape[-2] + 20) + 2000)
        return tuple(t.nan_to_num(torch.inf, torch.inf) * (1 + slack) for t in values)

    def by_entries(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """Upper values of the change of J over the ball, and of J itself, (heads,) each.

        Lemma 27 (docs/theory/balls.md): (a) without the norm at the centre, and the smaller of (b)
        and (c).
        """
        d, f, u, n = self.d, self.f, self.u, self.p.shape[-2]
        low, up, (slope, slope_up, slope_change) = self.reach(radius, ball)
        change = self.change(low, up)
        change_t, up_t = slope * change + up * slope_change, up * slope_up  # of P times the slope
        a_v, a_a = self.norm_v * radius, self.norm_a[:, None, None] * radius  # (heads, 1, 1)
        far, far_k = _most(d, up), _most(f, up)  # (heads, N, 1) from here on
        w = (change * d).sum(-1, keepdim=True).minimum(far)
        w_k = (self.mean_k + (change_t * f).sum(-1, keepdim=True)).minimum(far_k)
        move = self.move(up, radius, ball)
        m_v, m_a = self.norm_v * move, self.norm_a[:, None, None] * move
        c_v = self._spread(self.cov_v, change, up, d, up)
        c_k = self._spread(self.cov_k, change_t, up_t, f, up)
        both = (change_t * d * f).sum(-1, keepdim=True)
        extra = both + w * w_k + m_v * c_k + m_a * c_v + m_v * m_a
        b_up = (self.b[..., None] + extra).minimum((c_v + m_v) * (c_k + m_a))

        # blocks of J are those of tokens, without the sink
        change, up, d, u = (t[..., :n] for t in (change, up, d, u))
        slope, slope_up, slope_change = (
            t[..., :n] if isinstance(t, Tensor) else t for t in (slope, slope_up, slope_change)
        )
        e = a_v + m_v + w
        moved = slope_change * d * u + slope_up * (e * (u + a_a) + d * a_a)
        difference = change * (self.norm_v + slope * d * u) + up * moved
        changed = nonnegative_norm(difference + torch.diag_embed(extra[..., 0]), rtol=1e-4)
        t = self.norm_v + slope_up * (((d + w).minimum(2 * far) + a_v + m_v) * (u + a_a))
        t = torch.where(self.allowed[..., :n], t, 0.0)
        blocks = up * t
        direct = nonnegative_norm(blocks + torch.diag_embed(b_up[..., 0]), rtol=1e-4)
        closed = (t.amax((-1, -2)) * blocks.sum(-2).amax(-1)).sqrt() + b_up.amax((-1, -2))
        changed, direct, closed = self.enlarged(changed, direct, closed)
        return changed, direct.minimum(closed)

    @staticmethod
    def _spread(cov: Tensor, change: Tensor, most: Tensor, x: Tensor, up: Tensor) -> Tensor:
        """Upper values of the root of a covariance's norm over the ball, (heads, N, 1)."""
        moved = cov[..., None] + (change * x * x).sum(-1, keepdim=True)
        whole = (most * x * x).sum(-1, keepdim=True)
        return moved.minimum(whole).minimum(_most(x * x, up)).sqrt()


def _most(x: Tensor, up: Tensor) -> Tensor:
    """The largest mean of x >= 0 (..., N, M) over rows of P' of at most ``up``, (..., N, 1).

    That of tokens, and the sink's share of what it exceeds them by.
    """
    tokens, sink = x.split([n := x.shape[-2], x.shape[-1] - n], -1)
    most = tokens.amax(-1, keepdim=True)
    return most if sink.shape[-1] == 0 else most + up[..., n:] * (sink - most).clamp_min(0)


def _covariance_norm(p: Tensor, v: Tensor) -> Tensor:
    """Upper values of ||Cov_{P_i}(v)||, (heads, N, N) and centred (heads, N, d) -> (heads, N)."""
    d, o = v.shape[-1], p @ v
    second = (p @ (v[..., :, None] * v[..., None, :]).flatten(-2)).unflatten(-1, (d, d))
    norm = block_norm(second - o[..., :, None] * o[..., None, :])
    # the difference cancels
    return norm + 8 * gamma(p.shape[-1] + 8) * v.norm(dim=-1).amax(-1)[:, None] ** 2


class CentreErrors:
    """Upper values of what rounding may have taken from the quantities of `BallCentre`.

    Lemma 82 (docs/theory/upper_values.md).

    Attributes:
        scores, p: absolute error of differences of scores, relative of P, (heads, N, 1).
        u, d, f, b, cov_v, cov_k: as there, broadcastable to them.
    """

    def __init__(self, att: Attention):
        e, c = tensor_errors(att), abs(att.scale)
        # relative to sizes, of everything that is formed of the tensors
        own = gamma(att.tokens + att.x.shape[2] + 8 * (att.d + att.d_v) + 100)
        value, key, v_error, k_error = (_row_maximum(t) for t in (e.v, e.k, e.v_error, e.k_error))
        query, p = e.q[0], e.weights[0].masked_fill(e.weights[0] > 0.5, torch.inf)
        slope_q, slope_k = _row_maximum(e.q_slope), _row_maximum(e.k_slope)
        q_off, k_off = _row_maximum(e.q_slope_error), _row_maximum(e.k_slope_error)
        self.scores, self.p = 2 * e.score[0][..., None], 2 * p[..., None]
        output = (p + own) * value + v_error
        self.d = (output + v_error + own * value)[..., None]
        f = slope_q * ((p + 2 * own) * key + 2 * k_error) + 2 * q_off * key
        self.f = c * f[..., None]
        self.u = c * (slope_k * (e.q_error[0] + own * query) + k_off * query)[..., None]
        moved = 2 * p * value + v_error + output  # of P_ij (v_j - o_i), over a row
        b = slope_q * (moved * key + 2 * value * k_error + own * value * key)
        self.b = 2 * c * (b + 2 * value * key * q_off)
        self.cov_v = 8 * value * ((p + own) * value + output + v_error)
        self.cov_k = 8 * c * slope_q * key * (c * slope_q * key * (p + own) + self.f[..., 0])
        for name, t in vars(self).items():
            setattr(self, name, t.nan_to_num(torch.inf, torch.inf))


def _row_maximum(t: Tensor) -> Tensor:
    return t[0].amax(-1, keepdim=True)  # (heads, 1)


class VariantBallCentre(BallCentre):
    """`BallCentre` for a layer with the variants of `COVERS`; the sink is the last column."""

    def __init__(self, att: Attention):
        scores = att.scores(att.q, att.centred_k)[0]
        if att.sinks is not None:
            scores = torch.cat([scores, att.sinks[:, None, None].expand(-1, att.tokens, 1)], -1)
        self.scores, self.p, self.allowed = scores, torch.softmax(scores, -1), scores > -torch.inf
        self.norm_a, self.norm_v = largest_a(att), factors.norm_v(att)[:, None, None]
        self.z = att.scale * att.q[0] @ att.centred_k[0].mT  # before the cap
        self.cap, self.off = att.cap, (off := CentreErrors(att))
        self.slope = slope = torch.ones_like(self.p)
        if att.cap is not None:
            slope[..., : att.tokens] = self._slope(self.z.abs())
        tangents = [Tangents(att, 0, h) for h in range(att.heads)]

        def maps(name: str) -> RowMaps:
            return lambda rows: torch.stack([t.factor(name, rows) for t in tangents])

        self.map_k, self.map_q = maps("q"), maps("k")
        v, k = att.centred_v[0], abs(att.scale) * att.centred_k[0]
        if att.sinks is not None:  # shifted with the others, so that differences keep their digits
            means = v.mean(1, keepdim=True), 0.0 if att.cap is not None else k.mean(1, keepdim=True)
            v, k = (
                torch.cat([x, torch.zeros_like(x[:, :1])], 1) - mean
                for x, mean in zip((v, k), means, strict=True)
            )
        self.v, self.k, self.q = v, k, abs(att.scale) * att.q[0]
        heads = [self._head(h, tangents[h]) for h in range(att.heads)]
        u, f, d, b, cov_v, cov_k, mean_k = (torch.stack(t) for t in zip(*heads, strict=True))
        tokens = torch.arange(self.p.shape[-1], device=att.device) < att.tokens
        self.d, self.f = (torch.where(self.allowed, t, 0.0) for t in (d + off.d, f + off.f))
        self.u, self.b, self.mean_k = u + off.u * tokens, b + off.b, mean_k + 2 * off.f
        self.cov_v, self.cov_k = cov_v + off.cov_v, cov_k + off.cov_k

    def _head(self, h: int, tangents: Tangents) -> tuple[Tensor, ...]:
        """u, f, d, b, cov_v, cov_k and mean_k of one head, with the sink's column."""
        p, t, q, k, v = (x[h] for x in (self.p, self.p * self.slope, self.q, self.k, self.v))
        capped, n, o = self.cap is not None, len(p), p @ v
        u, f, d = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
        step = max(1, BALL_CHUNK // (8 * p.shape[1] * max(q.shape[1], v.shape[1])))
        rows = []
        for part in (slice(i, min(n, i + step)) for i in range(0, n, step)):
            u[:, part] = (q @ tangents.factor("k", part)).norm(dim=-1).mT
            keys = k.expand(len(p[part]), -1, -1) if capped else k - (p[part] @ k)[:, None]
            keys, values = keys @ tangents.factor("q", part), v - o[part, None]
            f[part], d[part] = keys.norm(dim=-1), values.norm(dim=-1)
            weighted = t[part, :, None] * keys
            # without a cap zero but for rounding
            mean = weighted.sum(1).norm(dim=-1) if capped else torch.zeros_like(d[part, 0])
            cov_v, cov_k = (
                block_norm(w[part, :, None].sqrt() * x) ** 2 for w, x in ((p, values), (t, keys))
            )
            rows.append((block_norm(values.mT @ weighted), cov_v, cov_k, mean[:, None]))
        return u, f, d, *(torch.cat(x) for x in zip(*rows, strict=True))

    def _slope(self, size: Tensor) -> Tensor:
        """The cap's slope at scores of this size."""
        assert self.cap is not None
        return cap_slope(size / self.cap)

    def reach(self, radius: float, ball: str) -> tuple[Tensor, Tensor, Slopes]:
        n, off = self.p.shape[-2], self.off.scores
        tau = score_changes(self.f[..., :n], self.u[..., :n], self.norm_a, radius, ball) + off
        slopes: Slopes = (1.0, 1.0, 0.0)
        if self.cap is not None:
            high, low, size = self.slope.clone(), self.slope.clone(), self.z.abs()
            high[..., :n] = self._slope((size - tau).clamp_min(0))
            low[..., :n] = self._slope(size + tau)
            change = torch.maximum(high - self.slope, self.slope - low).clamp_min(0)
            slopes = self.slope, high, change
            here, above, below = (
                self.cap * torch.tanh(t / self.cap) for t in (self.z, self.z + tau, self.z - tau)
            )
            rounding = 16 * torch.finfo(tau.dtype).eps * self.cap + off
            tau = torch.maximum(above - here, here - below) + rounding
        if self.p.shape[-1] > n:
            tau = torch.cat([tau, radius * self.f[..., n:] + off], -1)
        low, up = softmax_interval(self.scores, tau)
        return low, up, slopes


def largest_a(att: Attention) -> Tensor:
    r"""Upper value of :math:`\|A_{ij}\|` over all tokens of an unpadded float64 layer, (heads,).

    Where rotations depend on positions, :math:`R_i^T R_j` depends on their distance only but for
    rounding: one norm for each distance, and how far any pair of tokens is from the one that stands
    for its distance; never above the product of the parts' norms: Lemma 29 (docs/theory/balls.md).
    """
    whole = factors.norm_a(att)
    if att.rotation is None:
        return whole
    c, z = abs(att.scale), torch.complex(att.rotation.cos.double(), att.rotation.sin.double())
    turns, off = [], []
    for distance in range(att.tokens):
        pairs = z[: att.tokens - distance].conj() * z[distance:]
        turns.append(pairs[0])
        off.append((pairs - pairs[0]).abs().amax())
    of = torch.stack(turns)
    of = torch.cat([of, of.conj()])[:, None]  # either order of the two tokens
    away = torch.stack(off).repeat(2) * (1 + 1e-14) + 1e-15 * att.rotation.norm**2
    both = c * factors.norm_q(att) * factors.norm_k(att)
    found = []
    for h in range(att.heads):
        r_q, r_k = (torch.linalg.qr(w[h].double(), mode="r").R for w in (att.w_q, att.w_k))
        apart = turned(r_k.expand(len(of), -1, -1), of.real, of.imag)
        norms = c * block_norm(r_q @ apart.mT, squarings=4)
        found.append((norms + away * both[h]).amax())
    return torch.stack(found).minimum(whole)
