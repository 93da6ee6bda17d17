r"""Our bound over a ball, `lipbound.bounds.over_ball`, for heads with rotary position embeddings,
capped scores or sinks.

Statement and proof: Lemma 28 (docs/theory/balls.md). A sink counts as one more token that never
moves, the last column here. Where queries or keys are normalised their derivative changes with the
input, and there is no statement.
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.cap import cap_slope
from lipbound.attention.variants.rotary import turned
from lipbound.bounds import factors
from lipbound.bounds.ball.centre_entries import BallCentre, CentreErrors, Slopes
from lipbound.bounds.ball.softmax_interval import score_changes, softmax_interval
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import block_norm

COVERS = frozenset({"rotation", "cap", "sinks"})
"""The variants with a statement."""
BALL_CHUNK = 2**24
"""Bytes of the largest temporary."""
NAMES = ("u", "f", "d", "b", "cov_v", "cov_k", "mean_k")


class VariantBallCentre(BallCentre):
    """`BallCentre` for a layer with the variants of `COVERS`; the sink is the last column."""

    def __init__(self, att: Attention):
        scores = att.scores(att.q, att.centred_k)[0]
        if att.sinks is not None:
            scores = torch.cat([scores, att.sinks[:, None, None].expand(-1, att.tokens, 1)], -1)
        self.scores, self.p, self.allowed = scores, torch.softmax(scores, -1), scores > -torch.inf
        self.norm_a, self.norm_v, self.cap = (
            largest_a(att),
            factors.norm_v(att).value()[:, None, None],
            att.cap,
        )
        q, k = att.q[0], att.centred_k[0]
        self.z = att.scale * q @ k.mT  # before the cap
        off = CentreErrors(att)
        self.off_p, self.rounding = off.p, off.scores
        slope = torch.ones_like(self.p)
        if att.cap is not None:
            slope[..., : att.tokens] = self._slope(self.z.abs())
        heads = [_head(att, h, self.p[h], self.p[h] * slope[h]) for h in range(att.heads)]
        for name, values in zip(NAMES, zip(*heads, strict=True), strict=True):
            setattr(self, name, torch.stack(values))
        tokens = torch.arange(self.p.shape[-1], device=att.device) < att.tokens
        self.d, self.f = (
            torch.where(self.allowed, t, 0.0) for t in (self.d + off.d, self.f + off.f)
        )
        self.u, self.b = self.u + off.u * tokens, self.b + off.b
        self.cov_v, self.cov_k, self.mean_k = (
            self.cov_v + off.cov_v,
            self.cov_k + off.cov_k,
            self.mean_k + 2 * off.f,
        )
        self.slope = slope

    def _slope(self, size: Tensor) -> Tensor:
        """The cap's slope at scores of this size."""
        assert self.cap is not None
        return cap_slope(size / self.cap)

    def reach(self, radius: float, ball: str) -> tuple[Tensor, Tensor, Slopes]:
        n = self.p.shape[-2]
        tau = (
            score_changes(self.f[..., :n], self.u[..., :n], self.norm_a, radius, ball)
            + self.rounding
        )
        slopes: Slopes = (1.0, 1.0, 0.0)
        if self.cap is not None:
            high, low = self.slope.clone(), self.slope.clone()
            high[..., :n], low[..., :n] = (
                self._slope((self.z.abs() - tau).clamp_min(0)),
                self._slope(self.z.abs() + tau),
            )
            slopes = (
                self.slope,
                high,
                torch.maximum(high - self.slope, self.slope - low).clamp_min(0),
            )
            here, above, below = (
                self.cap * torch.tanh(t / self.cap) for t in (self.z, self.z + tau, self.z - tau)
            )
            tau = (
                torch.maximum(above - here, here - below)
                + 16 * torch.finfo(tau.dtype).eps * self.cap
                + self.rounding
            )
        if self.p.shape[-1] > n:
            tau = torch.cat([tau, radius * self.f[..., n:] + self.rounding], -1)
        low, up = softmax_interval(self.scores, tau)
        return low, up, slopes


def _head(att: Attention, h: int, p: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    """The attributes `NAMES` of one head, from P and T with the sink's column."""
    q, k, v, n = att.q[0, h], att.centred_k[0, h], att.centred_v[0, h], att.tokens
    if p.shape[-1] > n:  # shifted with the others, so that their differences keep their digits
        k, v = (
            torch.cat([x, torch.zeros_like(x[:1])])
            - (0.0 if att.cap is not None and x is k else x.mean(0))
            for x in (k, v)
        )
    tangents, c, o = Tangents(att, 0, h), abs(att.scale), p @ v
    u, f, d = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    step = max(1, BALL_CHUNK // (8 * p.shape[1] * max(q.shape[1], v.shape[1])))
    for j in range(0, n, step):
        part = slice(j, min(n, j + step))
        u[:, part] = (c * q @ tangents.factor("k", part)).norm(dim=-1).mT
    rows = []
    for i in range(0, n, step):
        part = slice(i, i + step)
        keys = k.expand(len(p[part]), -1, -1) if att.cap is not None else k - (p[part] @ k)[:, None]
        keys = c * keys @ tangents.factor("q", part)
        values = v - o[part, None]
        f[part], d[part] = keys.norm(dim=-1), values.norm(dim=-1)
        weighted = t[part, :, None] * keys
        mean = (
            weighted.sum(1).norm(dim=-1) if att.cap is not None else torch.zeros_like(d[part, 0])
        )  # zero but for rounding
        cov_v, cov_k = (
            block_norm(w[part, :, None].sqrt() * x) ** 2 for w, x in ((p, values), (t, keys))
        )
        rows.append((block_norm(values.mT @ weighted), cov_v, cov_k, mean[:, None]))
    b, cov_v, cov_k, mean = (torch.cat(x) for x in zip(*rows, strict=True))
    return u, f, d, b, cov_v, cov_k, mean


def largest_a(att: Attention) -> Tensor:
    r"""At least :math:`\|A_{ij}\|` for all tokens of an unpadded float64 layer, (heads,).

    Where rotations depend on positions, :math:`R_i^T R_j` depends on their distance only but for
    rounding: one norm for each distance, and how far any pair of tokens is from the one that stands
    for its distance; never above the product of the parts' norms: Lemma 29 (docs/theory/balls.md).
    """
    whole = factors.norm_a(att).value()
    if att.rotation is None:
        return whole
    z = torch.complex(att.rotation.cos.double(), att.rotation.sin.double())
    turns, off = [], []
    for distance in range(att.tokens):
        pairs = z[: att.tokens - distance].conj() * z[distance:]
        turns.append(pairs[0])
        off.append((pairs - pairs[0]).abs().amax())
    of = torch.cat([torch.stack(turns), torch.stack(turns).conj()])[
        :, None
    ]  # either order of the two tokens
    away = torch.stack(off).repeat(2) * (1 + 1e-14) + 1e-15 * att.rotation.norm**2
    found = []
    for h in range(att.heads):
        r_q, r_k = (torch.linalg.qr(w[h].double(), mode="r").R for w in (att.w_q, att.w_k))
        apart = turned(r_k.expand(len(of), -1, -1), of.real, of.imag)
        norms = abs(att.scale) * block_norm(r_q @ apart.mT, squarings=4)
        found.append(
            (
                norms
                + away
                * abs(att.scale)
                * factors.norm_q(att).value()[h]
                * factors.norm_k(att).value()[h]
            ).amax()
        )
    return torch.stack(found).minimum(whole)
