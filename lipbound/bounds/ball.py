r"""Our bound on the local Lipschitz constant over a whole ball of inputs.

Lemmas 108 (docs/theory/ball_pairs.md) and 116 (docs/theory/ball_norm.md). The vectors that pairs of
tokens contribute to the Jacobian point in different directions: their positive semi-definite
matrices are added up, with weights from the softmax rows that scores can reach within the ball.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import tensor_errors
from lipbound.attention.scoring import cap_slope
from lipbound.attention.validation import check_sizes
from lipbound.attention.variants.rotary import turned
from lipbound.bounds import factors
from lipbound.bounds.ours.block_norms import SUM_BYTES, RowMaps, distances, spread
from lipbound.bounds.registry import get, resolve
from lipbound.bounds.statement import check_radii
from lipbound.devices import in_own_modes
from lipbound.errors import AttentionError, LipboundError, check_layer
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.matrix_norms import (
    UNIT,
    block_norm,
    gamma,
    matrix_norm,
    nonnegative_norm,
    upper_factor,
)

CERTIFIED_TOL, CERTIFIED_DELTA = 1e-3, 1e-10
COVERS = frozenset({"rotation", "cap", "sinks"})
"""The variants with a statement."""
UNEVEN = 1.5
"""Exponent of the ratio of two lengths in the weights between which their sum is shared: 1 is best
where both are along one direction, 2 where they are orthogonal."""
_HIDDEN = 2.0**-100
"""At least what underflow can take from a norm, relative to what sizes of tensors let it be."""
# -- softmax rows that can be reached --------------------------------------------------------------


def softmax_interval(scores: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest probabilities, (..., N) each, when scores change by at most tau.

    Scores (..., N) are -inf where attention is forbidden: Lemma 26 (docs/theory/balls.md).
    """
    allowed = scores > -math.inf
    tau = tau + _rounding(scores, tau)
    log_p = torch.log_softmax(scores, -1)
    low = torch.where(allowed, log_p - tau, log_p)
    high = torch.where(allowed, log_p + tau, log_p)
    p = log_p.exp()
    tiny = torch.finfo(scores.dtype).tiny  # below it, probabilities lose their digits
    up = torch.where(allowed, torch.sigmoid(high - _others(low)) + tiny, 0.0).clamp(max=1.0)
    down = torch.where(allowed, torch.sigmoid(low - _others(high)) - tiny, 0.0).clamp_min(0)
    return down.minimum(p), up.maximum(p)


def relative_interval(
    scores: Tensor, size: Tensor, root: Tensor, low: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Smallest and largest probabilities when scores change by ``size`` at most, zero in the mean.

    And by ``root`` (..., 1) in the root mean square. Within ``low`` and ``up``; (..., N) each:
    Lemma 106 (docs/theory/ball_pairs.md).
    """
    allowed = scores > -math.inf
    log_p = torch.where(allowed, torch.log_softmax(scores, -1), 0.0)
    size = size + _rounding(scores, size)
    most = torch.where(allowed, size, 0.0).amax(-1, keepdim=True).clamp_min(1e-2)
    growth = (root * (1 + 1e-9)).square() * ((most.expm1() - most) / most.square())
    tiny = torch.finfo(scores.dtype).tiny
    largest = torch.where(allowed, (log_p + size).exp() + tiny, 0.0)
    smallest = torch.where(allowed, (log_p - size - growth.log1p()).exp() - tiny, 0.0).clamp_min(0)
    p = torch.where(allowed, log_p.exp(), 0.0)
    up = up.minimum(largest.nan_to_num(math.inf, math.inf))
    return low.maximum(smallest.nan_to_num(0.0)).minimum(p), up.maximum(p)


def _rounding(scores: Tensor, change: Tensor) -> Tensor:
    """Upper value of the rounding in scores, their changes and logarithms."""
    finite = torch.where(scores > -math.inf, scores, 0.0).abs().amax(-1, keepdim=True)
    return 16 * UNIT * (finite + change + scores.shape[-1])


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
    return Centre(att).reach(radius, ball)[:2]


# -- sums over pairs of tokens ---------------------------------------------------------------------


class MovingQueries(NamedTuple):
    r"""Vectors :math:`x_i` of queries, moved by :math:`G h_i` when token i moves by :math:`h_i`.

    Lemma 116 (docs/theory/ball_norm.md).

    Attributes:
        x, off: the vectors, (heads, N, r), and how far they are known, (heads, 1, 1).
        g, off_g: rows whose sum of squares is at least :math:`G G^T`, (heads, s, r), and how far
            they are known in the Frobenius norm, (heads, 1, 1).
    """

    x: Tensor
    off: Tensor
    g: Tensor
    off_g: Tensor

    def columns(self, w: Tensor, most: Tensor) -> Tensor:
        r"""Upper values of :math:`(\sum_i w_{ij} (y \cdot x'_i)^2)^{1/2}` for unit y, (heads, N).

        The weights w are (heads, N, N); :math:`\sum_i w_{ij} (y \cdot G h_i)^2` is at most ``most``
        (heads, N) times :math:`|G^T y|^2`.
        """
        w, move = w.mT, most.sqrt()[..., None]
        size = matrix_norm(self.g)[:, None, None] + self.off_g
        squares = w.sum(-1, keepdim=True) * self.off.square()
        still = spread(w, self.x) + squares.sqrt()
        ratio = (still / (move * size)).nan_to_num(1.0).clamp(1e-6, 1e6) ** UNEVEN
        share, rest = 1 + 1 / ratio, (1 + ratio) * move.square()
        weights = torch.cat([share * w, rest.expand(-1, -1, self.g.shape[1])], -1)
        joint = spread(weights, torch.cat([self.x, self.g], 1))
        joint = joint + (share * squares).sqrt() + rest.sqrt() * self.off_g
        return (still + move * size).minimum(joint)[..., 0]


# -- the bound -------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """Upper values of the errors of scores, probabilities and vectors of heads, (heads, 1, 1).

    Absolute, that of P relative; ``own`` is relative to sizes, of what is formed of the tensors:
    Lemma 82 (docs/theory/upper_values.md).
    """

    scores: Tensor
    p: Tensor
    d: Tensor
    f: Tensor
    u: Tensor
    own: float

    @classmethod
    def of(cls, att: Attention) -> "Errors":
        """Errors of an unpadded float64 sample."""
        e, c = tensor_errors(att), abs(att.scale)
        own = gamma(att.tokens + att.x.shape[2] + 8 * (att.d + att.d_v) + 100)
        p = e.p.masked_fill(~(e.p <= 0.5), torch.inf)
        d = (p + 2 * own) * e.v + 2 * e.v_error
        f = c * e.q_slope * ((p + 2 * own) * e.k + 2 * e.k_error)
        found = 2 * e.score, 2 * p, d, f, c * e.k_slope * (e.q_error + own * e.q)
        score, p, d, f, u = ((t[0] * (1 + 1e-6)).nan_to_num(math.inf)[:, None, None] for t in found)
        return cls(score, p, d, f, u, own)


class Centre:
    r"""The centre of a ball: one unpadded sample of a float64 layer.

    Tensors are (heads, ...), upper values but for relative roundings; M = N, or N + 1 with a sink.
    :math:`x_{ij} = v_j - o_i`, :math:`\hat k_{ij} = \tilde k_{ij} - \bar k_i`, where
    :math:`\bar k_i` is the mean of row i, or 0 with a cap.

    Attributes:
        scores, p, d, f: scores, P, :math:`D_{ij} = |x_{ij}|`, :math:`F_{ij} = |\hat k_{ij}|`,
            (heads, N, M); the last two are 0 where attention is forbidden.
        u: largest :math:`|\tilde q_{ij}|` of a row, (heads, N, 1).
        norm_v, norm_a: (heads, 1, 1).
        v, k, q: values, keys and queries, (heads, N or M, .), the latter two times the scale and,
            without rotation, as :math:`\tilde k_j` and :math:`\tilde q_i`.
        map_k, map_q: with a rotation, maps that make them of keys and queries, of rows.
        o, mean_k: :math:`o_i`, and :math:`\bar k_i` before it is mapped; None is 0.
        half, half_k: half the largest distance of two values, of two :math:`\tilde k_j` (infinite
            with rotation or cap), (heads, 1, 1).
        moving: without rotation, :math:`\tilde q_i` and :math:`W_V^T \tilde q_i`.
        off: what rounding may have taken from all this.
    """

    def __init__(self, att: Attention):
        n, c = att.tokens, abs(att.scale)
        scores, sink = att.scores(att.q, att.centred_k)[0], att.sinks
        self.z, self.cap = att.scale * att.q[0] @ att.centred_k[0].mT, att.cap
        v, k, self.q = att.centred_v[0], c * att.centred_k[0], c * att.q[0]
        f_q, f_k = (upper_factor(w)[0] for w in (att.w_q, att.w_k))
        self.map_k, self.map_q = _row_maps(att, f_q), _row_maps(att, f_k)
        if self.map_q is None:
            k, self.q = k @ f_q.mT, self.q @ f_k.mT
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(-1, n, 1)], -1)
            v, k = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (v, k))
            v = v - v.mean(1, keepdim=True)  # differences keep their digits
            k = k if self.cap is not None else k - k.mean(1, keepdim=True)
        self.scores, self.p, self.v, self.k = scores, torch.softmax(scores, -1), v, k
        self.off, allowed = (off := Errors.of(att)), scores > -math.inf
        self.norm_a = largest_a(att)[:, None, None]
        self.norm_v = factors.norm_v(att)[:, None, None]
        self.o, self.mean_k = self.p @ v, None if self.cap is not None else self.p @ k
        self.d = torch.where(allowed, distances(self.o, v) + off.d, 0.0)
        self.f = self._lengths(k, self.mean_k, self.map_k) + off.f
        self.f = torch.where(allowed, self.f, 0.0)
        self.u = self._lengths(self.q, None, self.map_q).amax(1)[..., None] + off.u
        self.half, self.half_k = (
            distances(x, x).amax((-1, -2), keepdim=True) / 2 + e
            for x, e in ((v, off.d), (k, off.f))
        )
        if self.map_k is not None or self.cap is not None:
            self.half_k = torch.full_like(self.half, math.inf)
        self.moving = None if self.map_q is not None else self._moving(att, f_q, f_k)

    def _lengths(self, x: Tensor, centre: Tensor | None, maps: RowMaps | None) -> Tensor:
        r"""Lengths :math:`|F_i^T (x_j - c_i)|`, as of `spread`, (heads, N or 1, M)."""
        if maps is None:
            return x.norm(dim=-1)[:, None] if centre is None else distances(centre, x)
        step, found = max(1, SUM_BYTES // (8 * x.numel())), []
        for rows in (slice(i, i + step) for i in range(0, self.p.shape[1], step)):
            apart = x[:, None] if centre is None else x[:, None] - centre[:, rows, None]
            found.append((apart @ maps(rows)).norm(dim=-1))
        return torch.cat(found, 1)

    def _moving(self, att: Attention, f_q: Tensor, f_k: Tensor) -> list[MovingQueries]:
        c, through, own = abs(att.scale), att.w_k.mT @ att.w_v, self.off.own
        of_q, of_k, of_w, of_v = (
            torch.linalg.matrix_norm(w)[:, None, None] for w in (f_q, f_k, att.w_k, att.w_v)
        )
        lost, lost_v = own * c * of_q * of_k, own * c * of_q * of_w * of_v
        return [
            MovingQueries(self.q, self.off.u, c * f_q @ f_k.mT, lost),
            MovingQueries(c * att.q[0] @ through, of_v * self.off.u, c * f_q @ through, lost_v),
        ]

    def values(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} x_{ij} x_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return spread(w, self.v, self.o, self.off.d)

    def keys(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_j w_{ij} \hat k_{ij} \hat k_{ij}^T\|^{1/2}`, (heads, N, 1)."""
        return spread(w, self.k, self.mean_k, self.off.f, self.map_k)

    def columns(self, w: Tensor) -> Tensor:
        r""":math:`\|\sum_i w_{ij} \tilde q_{ij} \tilde q_{ij}^T\|^{1/2}` of all j, (heads, N)."""
        w = w[..., : w.shape[-2]].mT
        return spread(w, self.q, None, self.off.u, self.map_q)[..., 0]

    def reach(
        self, radius: float, ball: str
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Smallest and largest P' over the ball, and a cap's largest slope and its largest change.

        (heads, N, M) each: Lemmas 25, 26 (docs/theory/balls.md), 106 (docs/theory/ball_pairs.md).
        """
        n, off, slopes = self.p.shape[-2], self.off.scores, None
        f, u, square = self.f[..., :n], self.u, self.norm_a * radius**2
        tau = radius * (f + u) + square
        if ball == "frobenius":
            apart = radius * (f.square() + u.square()).sqrt() + square / 2
            tau = torch.where(torch.eye(n, dtype=torch.bool, device=f.device), tau, apart)
        tau = tau + off
        if self.cap is not None:
            slopes, tau = self._capped(tau)
        if self.p.shape[-1] > n:
            tau = torch.cat([tau, radius * self.f[..., n:] + off], -1)
        low, up = softmax_interval(self.scores, tau)
        if self.cap is None:
            low, up = relative_interval(self.scores, *self._relative(radius, ball), low, up)
        return low, up, slopes

    def _capped(self, tau: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Slopes of the cap, and how far capped scores move, where scores move by tau."""
        assert self.cap is not None
        size, extra = self.z.abs(), [0, self.p.shape[-1] - self.p.shape[-2]]
        here, low = (cap_slope(t / self.cap) for t in (size, size + tau))
        high = cap_slope((size - tau).clamp_min(0) / self.cap) * (1 + 64 * UNIT)
        # the slope at the centre is known up to the error of its score
        change = torch.maximum(high - here, here - low) + self.off.scores / self.cap + 64 * UNIT
        capped = [self.cap * torch.tanh(t / self.cap) for t in (self.z, self.z + tau, self.z - tau)]
        move = torch.maximum(capped[1] - capped[0], capped[0] - capped[2])
        pad = torch.nn.functional.pad
        slopes = pad(high.clamp(max=1.0), extra, value=1.0), pad(change, extra)
        return slopes, move + 32 * UNIT * self.cap + self.off.scores

    def _relative(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        r"""Largest moves of scores beyond the mean of their row, and roots of mean squares.

        Lemma 106 (docs/theory/ball_pairs.md): (heads, N, M), and (heads, N, 1).
        """
        p, u, norm_a = self.p, self.u, self.norm_a
        off = 2 * self.off.p + 1e-13  # the differences cancel
        move: float | Tensor = radius
        if ball == "token":
            size = 2 * ((1 - p).clamp_min(0) + off) * (radius * u + norm_a * radius**2)
            size = radius * self.f + size
        else:
            square = p.square().sum(-1, keepdim=True)
            own = torch.zeros_like(p) - p.diagonal(dim1=-2, dim2=-1)[..., None]
            own.diagonal(dim1=-2, dim2=-1).add_(1.0)
            every = (1 - 2 * p + square).clamp_min(0)
            others = ((every - own.square()).clamp_min(0) + 2 * off) * u.square()
            size = radius * ((self.f + (own.abs() + off) * u).square() + others).sqrt()
            size = size + norm_a * radius**2 * (every + off).sqrt()
            move = radius * (p.amax(-1, keepdim=True) * (1 + off)).sqrt()
        root = radius * self.keys(p * (1 + self.off.p)) + (u + norm_a * radius) * move
        return size + self.off.scores + self.off.p, root

    def bounds(self, radius: float, ball: str) -> tuple[Tensor, Tensor]:
        """Upper values of the change of J over the ball, and of J itself, (heads,) each.

        Lemmas 108 (docs/theory/ball_pairs.md) and 116 (docs/theory/ball_norm.md).
        """
        p, d, f, n = self.p, self.d, self.f, self.p.shape[-2]
        low, up, slopes = self.reach(radius, ball)
        change = torch.maximum(up - p, p - low).clamp(0.0, 1.0) + p * self.off.p + 1e-289
        up_t, change_t = up, (change := change.clamp(max=1.0))
        if slopes is not None:
            up_t = up * slopes[0]
            change_t = change * slopes[0] + p * (1 + self.off.p) * slopes[1]
        total = change.sum(-1, keepdim=True).clamp(max=2.0)
        move = torch.full_like(total, radius)
        if ball == "frobenius":
            move = move * up[..., :n].amax(-1, keepdim=True).sqrt()
        m_v, m_a = self.norm_v * move, self.norm_a * move
        most_d, most_f = d.amax(-1, keepdim=True), f.amax(-1, keepdim=True)
        c = self.values(up).minimum(most_d).minimum(self.half) + m_v
        c_k = self.keys(up_t).minimum(most_f).minimum(self.half_k)

        moved, moved_k = self.values(change), self.keys(change_t)
        w, w_k = (
            (change * x).sum(-1, keepdim=True).minimum(total.sqrt() * sums).minimum(most)
            for x, sums, most in ((d, moved, most_d), (f, moved_k, most_f))
        )
        if slopes is not None:
            moved, w_k = self.values(change_t), c_k
        own = (change_t * d * f).sum(-1, keepdim=True).minimum(moved * moved_k)
        own = own + w * w_k + m_v * c_k + c * m_a

        held = c.square() * up_t[..., :n]
        most = radius**2 * (held.sum(-2) if ball == "token" else held.amax(-2))
        keys = sum(
            self.columns(x.square() * y).amax(-1)
            for x, y in ((moved, change_t), (w, up_t), (m_v, up_t))
        )
        turn = self.norm_a[:, 0, 0] * most.amax(-1).sqrt()
        changed = keys + turn + self._values(change, own, total)
        whole = self._whole(up, held, most, c * (c_k + m_a))
        slack = 2 * gamma(20 * (n + 20) + 2000)  # of sums of numbers >= 0
        changed, whole = (t.nan_to_num(math.inf, math.inf) * (1 + slack) for t in (changed, whole))
        return changed, whole

    def _whole(self, up: Tensor, held: Tensor, most: Tensor, own: Tensor) -> Tensor:
        """Upper values of ||J'||, from K' and V' + B': Lemma 116 (docs/theory/ball_norm.md)."""
        if self.moving is None:
            by_token = self.columns(held) + self.norm_a[:, 0] * most.sqrt()
            through = self.norm_v[:, 0] * by_token
        else:
            by_token, through = (moving.columns(held, most) for moving in self.moving)
        keys, values = by_token.amax(-1), self._values(up, own, torch.ones_like(own))
        sums = up[..., : up.shape[-2]].sum(-2).amax(-1).sqrt()
        cross = through.amax(-1) * sums + (own[..., 0] * by_token).amax(-1)
        return (keys.square() + values.square() + 2 * cross.minimum(keys * values)).sqrt()

    def _values(self, weights: Tensor, own: Tensor, total: Tensor) -> Tensor:
        """Upper values of the norm of ||W_V|| weights + diag own, (heads,).

        The smaller of the norm itself and what sums of rows (at most ``total``) and columns make of
        it.
        """
        weights = weights[..., : weights.shape[-2]]
        whole = nonnegative_norm(self.norm_v * weights + torch.diag_embed(own[..., 0]), rtol=1e-4)
        sums = (total.amax((-1, -2)) * weights.sum(-2).amax(-1)).sqrt()
        return whole.minimum(self.norm_v[:, 0, 0] * sums + own.amax((-1, -2)))


def _row_maps(att: Attention, f: Tensor) -> RowMaps | None:
    """Maps R_i F^T of a rotation, from F (heads, r, d); None without."""
    if att.rotation is None:
        return None
    cos, sin = att.rotation.cos.double()[:, None], att.rotation.sin.double()[:, None]
    return lambda rows: turned(f[:, None], cos[rows], sin[rows]).mT


def largest_a(att: Attention) -> Tensor:
    r"""Upper value of :math:`\|A_{ij}\|` over all tokens of an unpadded float64 layer, (heads,).

    Where rotations depend on positions, :math:`R_i^T R_j` depends on their distance only but for
    rounding: one norm for each distance, and how far any pair of tokens is from the one that stands
    for its distance; never above the product of the parts' norms: Lemma 29 (docs/theory/balls.md).
    """
    whole = factors.norm_a(att)
    if att.rotation is None:
        return whole
    z = torch.complex(att.rotation.cos.double(), att.rotation.sin.double())
    pairs = [z[: att.tokens - m].conj() * z[m:] for m in range(att.tokens)]
    of = torch.stack([turns[0] for turns in pairs])
    off = torch.stack([(turns - turns[0]).abs().amax() for turns in pairs])
    of = torch.cat([of, of.conj()])[:, None]  # either order of the two tokens
    off = off.repeat(2) * (1 + 1e-14) + 1e-15 * att.rotation.norm**2
    both, found = factors.norm_q(att) * factors.norm_k(att), []
    f_q, f_k = (upper_factor(w)[0] for w in (att.w_q, att.w_k))
    lost = torch.linalg.matrix_norm(f_q) * torch.linalg.matrix_norm(f_k)
    lost = gamma(att.d + 12) * att.rotation.norm**2 * lost
    for h in range(att.heads):
        apart = turned(f_k[h].expand(len(of), -1, -1), of.real, of.imag)
        found.append((block_norm(f_q[h] @ apart.mT, squarings=4) + off * both[h]).amax())
    return (abs(att.scale) * (torch.stack(found) + lost)).minimum(whole)


@in_own_modes
def over_ball(
    att: Attention, radius: float | Sequence[float], *, ball: str = "token", at: str = "certified"
) -> Tensor:
    r"""An upper bound on :math:`\|J(X')\|` for every X' in a ball around the layer's input.

    Args:
        att: the layer at the centre; computed in float64.
        radius: of the ball, in the units of ``x`` (0 is the centre); a sequence gives a curve.
        ball: "token": every token moves by at most ``radius``; "frobenius": all of X does.
        at: the value at the centre: "certified" (the upper end of the exact norm, with failure
            probability 1e-10 for the call) or the registry name of a bound on the head.

    Returns:
        (samples, heads), or (samples, heads, radii), float64.

    Raises:
        LipboundError: a negative radius, an unknown ball, a bound at the centre that is about
            another map or whose assumptions do not hold, normalised queries or keys.

    The smaller of two bounds: the value at the centre and a bound on the change of J, which goes to
    0 with the radius; and one on the norm itself, which grows like :math:`\rho^2 \sqrt N`, as
    global bounds must. Rotary position embeddings, capped scores and sinks are covered: Lemmas 108
    (docs/theory/ball_pairs.md) and 116 (docs/theory/ball_norm.md).
    """
    check_layer(att, "over_ball")
    if "qk_norm" in att.variants:
        raise AttentionError(
            "over_ball does not cover normalised queries and keys, whose derivative changes with "
            "the input; lipbound.attack does"
        )
    att.only("over_ball", COVERS)
    single, radii = check_radii(radius, ball)
    if att.cache.recording:
        raise LipboundError("over_ball has no derivatives; call it under torch.no_grad()")
    check_sizes(att)
    double = att.double()
    centre = _centre(double, at)
    with torch.no_grad():
        parts = [_sample(double.unpadded(s), radii, ball) for s in range(att.samples)]
    changed, whole = (torch.stack(values) for values in zip(*parts, strict=True))
    values = (centre[..., None] + changed).minimum(whole) * (1 + 8 * UNIT)
    return values[..., 0] if single else values


def _sample(att: Attention, radii: list[float], ball: str) -> tuple[Tensor, Tensor]:
    """Upper values of the change of J within balls around one unpadded float64 sample, and of J.

    (heads, radii) each, with what underflow may hide.
    """
    around = Centre(att)
    found = [around.bounds(r, ball) for r in radii]
    size = att.d_v**0.5 * torch.linalg.matrix_norm(att.w_v) + att.centred_v[0].norm(dim=-1).amax(-1)
    slope = 1 + around.u.amax((-1, -2)) + around.f.amax((-1, -2))
    turned = around.norm_a[:, 0] * att.x.new_tensor(radii)
    hidden = _HIDDEN * size[:, None] * (slope[:, None] + turned)
    changed, whole = (torch.stack(values, -1) + hidden for values in zip(*found, strict=True))
    return changed.nan_to_num(torch.inf), whole.nan_to_num(torch.inf)


def _centre(att: Attention, at: str) -> Tensor:
    """Upper values of the norm at X, (samples, heads).

    Raises:
        LipboundError: no bound on the head in the Frobenius norm whose assumptions hold.
    """
    if isinstance(at, str) and at == "certified":
        return spectral_norm(att, tol=CERTIFIED_TOL, delta=CERTIFIED_DELTA).upper.to(att.device)
    bound = get(*resolve([at], "frobenius"))
    if bound.map != "head":
        raise LipboundError(
            f"at={at!r} bounds another map, {bound.map} attention; use at='certified' or a bound "
            "on the head"
        )
    if not bool(bound.sound(att).all()):
        raise LipboundError(
            f"at={at!r} is not a bound here: it asks for {bound.assumptions}; use at='certified' "
            "or 'lipbound'"
        )
    return bound(att)
