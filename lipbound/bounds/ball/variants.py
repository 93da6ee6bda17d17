r"""Our bound over a ball, `lipbound.bounds.over_ball`, for heads with rotary position embeddings, capped scores or sinks.

Queries :math:`q_i = R_i(W_Q^T x_i + b_Q)` and keys :math:`k_j = R_j(W_K^T x_j + b_K)` are affine in their tokens, so the maps of
`lipbound.bounds.lipbound2026.variants` are the same at every input, and with :math:`\tilde q_{ij} = c W_K R_j^T q_i`,
:math:`\tilde k_{ij} = c W_Q R_i^T k_j`, :math:`A_{ij} = c W_Q R_i^T R_j W_K^T` a move :math:`a_i` of every token changes

.. math::
    q_i \cdot k_j\,c \text{ by } a_i \cdot \tilde k_{ij} + a_j \cdot \tilde q_{ij} + a_i^T A_{ij} a_j, \qquad
    \tilde q_{ij} \text{ by } A_{ij}^T a_i, \qquad \tilde k_{ij} \text{ by } A_{ij} a_j .

With :math:`\|A\|` at least all :math:`\|A_{ij}\|` (`norm_a`), :math:`g_{ij} \in (0, 1]` the slope of the cap at score (i, j) (1 without a cap) and
:math:`T = P \circ g` the blocks of J are

.. math:: J_{ij} = P_{ij} W_V^T + T_{ij} (v_j - o_i) \tilde q_{ij}^T + \delta_{ij} B_i, \qquad
    B_i = \sum_j T_{ij} (v_j - o_i)(\tilde k_{ij} - \bar k_i)^T .

**The sink is one more token j = 0** with value 0, key 0, a constant score and no cap, that never moves; it is a column of P but not of J. Rows of P
then sum to one and :math:`o_i = \sum_{j \ge 0} P_{ij} v_j`. Sums over l or j below include it.

**The reference of keys** is :math:`\bar k_i = \sum_j P_{ij} \tilde k_{ij}` without a cap, where :math:`g = 1` and
:math:`\sum_j P_{ij}(v_j - o_i) = 0`, and 0 with one. :math:`F_{ij} = |\tilde k_{ij} - \bar k_i|`, :math:`u_{ij} = |\tilde q_{ij}|`,
:math:`D_{ij} = |v_j - o_i|`; for the sink :math:`u = 0`, :math:`D = |o_i|` and :math:`F = |\bar k_i|`.

**Statement.** With the changes listed here the bounds (a), (b), (c) of `over_ball` hold.

- :math:`\tau_{ij}` as in `lipbound.bounds.ball.softmax_interval` from this F and u; for the sink :math:`\rho F`. With a cap :math:`\phi` the change
  of score (i, j) is at most :math:`\max(\phi(z + \tau) - \phi(z), \phi(z) - \phi(z - \tau))`, z being the score before it.
- g' is between :math:`g^- = \mathrm{sech}^2((|z| + \tau)/cap)` and :math:`g^+ = \mathrm{sech}^2((|z| - \tau)_+/cap)`;
  :math:`\Delta^g = \max(g^+ - g, g - g^-)`, :math:`\Delta^T = g\Delta + P^+ \Delta^g`, :math:`T^+ = P^+ g^+`.
- :math:`w^k_i = \min(|\sum_j T_{ij}(\tilde k_{ij} - \bar k_i)| + \sum_j \Delta^T_{ij} F_{ij}, \max_j F_{ij})`.
- :math:`c^k_i = \min(\|\sum_j T_{ij} (\tilde k_{ij} - \bar k_i)(\cdot)^T\| + \sum_j \Delta^T_{ij} F_{ij}^2, \sum_j T^+_{ij} F_{ij}^2,
  \max_j F_{ij}^2)`.
- :math:`b_i` with :math:`\sum_j \Delta^T_{ij} D_{ij} F_{ij}` for its first term.
- :math:`t_{ij} = \|W_V\| + g^+_{ij} (\min(D_{ij} + w_i, 2 \max_l D_{il}) + a_V + m^V_i)(u_{ij} + a_A)`.
- (a) with :math:`\Delta \|W_V\| + \Delta^T D u + T^+ (e (u + a_A) + D a_A)` off its diagonal.

- :math:`\max_j D_{ij}`, :math:`\max_j D_{ij}^2` and the same of F are maxima over tokens, to which the sink adds at most
  :math:`P^+_{i0}` times what its value exceeds them by: all of them bound means over rows of P', or a token's D.

Without variants this is `over_ball`.

*Proof.* Scores. A constant added to all scores of row i changes nothing; without a cap :math:`a_i \cdot \bar k_i` is taken from all of them, the
sink's included, which then moves by :math:`-a_i \cdot \bar k_i`. All keys of row i are turned back by the one :math:`R_i`, so that
:math:`\tilde k_{ij} - \bar k_i` is the difference of vectors of the same row, whatever :math:`R_j` did to :math:`k_j`. What remains is at most
:math:`|a_i| F_{ij} + |a_j| u_{ij} + \|A\| |a_i| |a_j|`, hence :math:`\tau` in both balls. With a cap nothing is taken off (:math:`\bar k_i = 0`),
:math:`\phi` increases, and :math:`\mathrm{sech}^2` is even and decreases away from 0. :math:`|T' - T| \le |P' - P| g + P' |g' - g| \le \Delta^T`.

(i) Values are as in plain heads: :math:`v'_j - o'_i = (v_j - o_i) + (dv_j - \sum_l P'_{il} dv_l) - \omega_i`, :math:`\omega_i = \sum_l (P' -
P)_{il} (v_l - o_i)`, of which the parts are at most :math:`a_V + m^V_i` and :math:`w_i`; in :math:`\sum_l P'_{il} dv_l` the sink has no part. And
:math:`|\tilde q'_{ij} - \tilde q_{ij}| \le a_A`. (a) is Lemma 1 for :math:`(P' - P) W_V^T + (T' - T)(v_j - o_i) \tilde q_{ij}^T + T'[(v'_j -
o'_i) \tilde q'^T_{ij} - (v_j - o_i) \tilde q_{ij}^T] + \delta_{ij} (B'_i - B_i)`.

(ii) Write :math:`\hat k_{ij} = \tilde k_{ij} - \bar k_i` and :math:`\eta_j = A_{ij} a_j`. Then :math:`B'_i = \sum_j T'_{ij} (v'_j -
o'_i)(\hat k_{ij} + \eta_j)^T`, with a cap as it stands, without one because :math:`T' = P'` and :math:`\sum_j P'_{ij} (v'_j - o'_i) = 0`.
:math:`B'_i - B_i` is the sum of

- :math:`\sum_j (T' - T)_{ij} (v_j - o_i) \hat k_{ij}^T`, at most :math:`\sum \Delta^T D F`;
- :math:`-\omega_i (\sum_j T'_{ij} \hat k_{ij})^T`, at most :math:`w_i w^k_i`;
- :math:`\sum_j T'_{ij} (dv_j - \sum_l P'_{il} dv_l) \hat k_{ij}^T` and :math:`\sum_j T'_{ij} (v_j - \sum_l P'_{il} v_l) \eta_j^T` and
  :math:`\sum_j T'_{ij} (dv_j - \sum_l P'_{il} dv_l) \eta_j^T`.

For these three, :math:`\|\sum_j T'_j x_j y_j^T\|^2 \le \|\sum_j T'_j x_j x_j^T\| \|\sum_j T'_j y_j y_j^T\|`, and as :math:`T' \le P'`:
:math:`\sum_j T'_j x_j x_j^T \le Cov_{P'_i}(dv)`, of norm at most :math:`(m^V_i)^2`, for the deviations of dv; :math:`\le Cov_{P'_i}(v)
\le \sum_j P'_{ij} (v_j - o_i)(v_j - o_i)^T`, of norm at most :math:`c^v_i` (as it is defined for plain heads), for those of v; the norm of
:math:`\sum_j T'_{ij} \hat k_{ij} \hat k_{ij}^T` is at most :math:`c^k_i`, and that of :math:`\sum_j T'_{ij} \eta_j \eta_j^T` at most
:math:`\sum_j P'_{ij} |\eta_j|^2 \le (m^A_i)^2`. Hence :math:`b_i`, and the other value of :math:`B^+_i`. (b) is Lemma 1 for J', whose blocks are
at most :math:`P^+ t` off :math:`B^+`; (c) as for plain heads, rows of P' over tokens summing to at most one. QED

Where queries or keys are normalised their derivative changes with the input, and there is no statement.
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.cap import cap_slope
from lipbound.attention.variants.rotary import turned
from lipbound.bounds import ingredients as qty
from lipbound.bounds.ball.plain import BallCentre, Slopes
from lipbound.bounds.ball.softmax_interval import score_changes, softmax_interval
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import block_norm

COVERS = ("rotation", "cap", "sinks")
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
        self.norm_a, self.norm_v, self.cap = norm_a(att), qty.norm_v(att)[:, None, None], att.cap
        q, k = att.q[0], att.centred_k[0]
        self.z = att.scale * q @ k.mT  # before the cap
        self.rounding = 8 * torch.finfo(q.dtype).eps * abs(att.scale) * q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :]
        slope = torch.ones_like(self.p)
        if att.cap is not None:
            slope[..., : att.tokens] = self._slope(self.z.abs())
        heads = [_head(att, h, self.p[h], self.p[h] * slope[h]) for h in range(att.heads)]
        for name, values in zip(NAMES, zip(*heads, strict=True), strict=True):
            setattr(self, name, torch.stack(values))
        self.d, self.f = (torch.where(self.allowed, t, 0.0) for t in (self.d, self.f))
        self.slope = slope

    def _slope(self, size: Tensor) -> Tensor:
        """The cap's slope at scores of this size."""
        assert self.cap is not None
        return cap_slope(size / self.cap)

    def reach(self, radius: float, norm: str) -> tuple[Tensor, Tensor, Slopes]:
        n = self.p.shape[-2]
        tau = score_changes(self.f[..., :n], self.u[..., :n], self.norm_a, radius, norm) + self.rounding
        slopes: Slopes = (1.0, 1.0, 0.0)
        if self.cap is not None:
            high, low = self.slope.clone(), self.slope.clone()
            high[..., :n], low[..., :n] = self._slope((self.z.abs() - tau).clamp_min(0)), self._slope(self.z.abs() + tau)
            slopes = (self.slope, high, torch.maximum(high - self.slope, self.slope - low).clamp_min(0))
            here, above, below = (self.cap * torch.tanh(t / self.cap) for t in (self.z, self.z + tau, self.z - tau))
            tau = torch.maximum(above - here, here - below) + 4 * torch.finfo(tau.dtype).eps * self.cap
        if self.p.shape[-1] > n:
            tau = torch.cat([tau, radius * self.f[..., n:]], -1)
        low, up = softmax_interval(self.scores, tau)
        return low, up, slopes


def _head(att: Attention, h: int, p: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    """The attributes `NAMES` of one head, from P and T with the sink's column."""
    q, k, v, n = att.q[0, h], att.centred_k[0, h], att.centred_v[0, h], att.tokens
    if p.shape[-1] > n:  # shifted with the others, so that their differences keep their digits
        k, v = (torch.cat([x, torch.zeros_like(x[:1])]) - (0.0 if att.cap is not None and x is k else x.mean(0)) for x in (k, v))
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
        mean = weighted.sum(1).norm(dim=-1) if att.cap is not None else torch.zeros_like(d[part, 0])  # zero but for rounding
        cov_v, cov_k = (block_norm(w[part, :, None].sqrt() * x) ** 2 for w, x in ((p, values), (t, keys)))
        rows.append((block_norm(values.mT @ weighted), cov_v, cov_k, mean[:, None]))
    b, cov_v, cov_k, mean = (torch.cat(x) for x in zip(*rows, strict=True))
    return u, f, d, b, cov_v, cov_k, mean


def norm_a(att: Attention) -> Tensor:
    r"""At least :math:`\|A_{ij}\|` for all tokens of an unpadded float64 layer, (heads,).

    Where rotations depend on positions, :math:`R_i^T R_j` depends on their distance only but for rounding: one norm for each distance, and how far
    any pair of tokens is from the one that stands for its distance; never above the product of the parts' norms.
    """
    whole = qty.norm_a(att)
    if att.rotation is None:
        return whole
    z = torch.complex(att.rotation.cos.double(), att.rotation.sin.double())
    turns, off = [], []
    for distance in range(att.tokens):
        pairs = z[: att.tokens - distance].conj() * z[distance:]
        turns.append(pairs[0])
        off.append((pairs - pairs[0]).abs().amax())
    of = torch.cat([torch.stack(turns), torch.stack(turns).conj()])[:, None]  # either order of the two tokens
    away = torch.stack(off).repeat(2) * (1 + 1e-14) + 1e-15 * att.rotation.norm**2
    found = []
    for h in range(att.heads):
        r_q, r_k = (torch.linalg.qr(w[h].double(), mode="r").R for w in (att.w_q, att.w_k))
        apart = turned(r_k.expand(len(of), -1, -1), of.real, of.imag)
        norms = abs(att.scale) * block_norm(r_q @ apart.mT, squarings=4)
        found.append((norms + away * abs(att.scale) * qty.norm_q(att)[h] * qty.norm_k(att)[h]).amax())
    return torch.stack(found).minimum(whole)
