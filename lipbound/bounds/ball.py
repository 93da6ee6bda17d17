r"""Our bound on the local Lipschitz constant over a whole ball of inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.attention import Attention
from lipbound.bounds import quantities as qty
from lipbound.bounds.interval import key_spread, query_lengths, score_changes, softmax_interval
from lipbound.bounds.ours import Parts
from lipbound.bounds.registry import check_ball, get
from lipbound.errors import LipboundError
from lipbound.linalg import UNIT, block_norm, nonnegative_norm
from lipbound.norms import spectral_norm

CERTIFIED_TOL = 1e-3
CERTIFIED_DELTA = 1e-10


def over_ball(att: Attention, radius: float | Sequence[float], *, norm: str = "token", at: str = "certified") -> Tensor:
    r"""An upper bound on :math:`\|J(X')\|` for every X' in a ball around the layer's input.

    Args:
        att: the layer at the centre; computed in float64.
        radius: of the ball, in the units of ``x`` (0 is the centre); a sequence gives a curve.
        norm: "token": every token moves by at most ``radius``; "frobenius": all of X does.
        at: the value at the centre: "certified" (the upper end of the exact norm, with failure probability 1e-10 for the call) or
            the registry name of a bound on the head.

    Returns:
        (samples, heads), or (samples, heads, radii), float64.

    Raises:
        LipboundError: a negative radius, an unknown norm, a bound at the centre that is about another map or whose assumptions do not hold.

    Notation as in `lipbound.bounds.interval` (:math:`\tau, F, u`) and `lipbound.bounds.ours`; :math:`D_{ij} = |v_j - o_i|`, P' between
    :math:`P^-` and :math:`P^+`, :math:`\Delta = \max(P^+ - P, P - P^-)`, :math:`a_V = \|W_V\|\rho`, :math:`a_A = \|A\|\rho`. With

    - :math:`w_i = \min(\sum_j \Delta_{ij} D_{ij}, \max_j D_{ij})`, :math:`w^k_i` the same with F for D;
    - :math:`m_i = \rho`, or :math:`\rho\,(\max_j P^+_{ij})^{1/2}` for a Frobenius ball, :math:`m^V = \|W_V\| m`, :math:`m^A = \|A\| m`;
    - :math:`e_i = a_V + m^V_i + w_i`;
    - :math:`c^v_i = \min(\|Cov_{P_i} v\| + \sum_j \Delta_{ij} D_{ij}^2, \sum_j P^+_{ij} D_{ij}^2, \max_j D_{ij}^2)`, :math:`c^k_i` the same for
      :math:`\tilde k` with F;
    - :math:`b_i = \sum_j \Delta_{ij} D_{ij} F_{ij} + w_i w^k_i + m^V_i (c^k_i)^{1/2} + m^A_i (c^v_i)^{1/2} + m^V_i m^A_i`,
      :math:`B^+_i = \min(\|B_i\| + b_i, ((c^v_i)^{1/2} + m^V_i)((c^k_i)^{1/2} + m^A_i))`;
    - :math:`t_{ij} = \|W_V\| + (\min(D_{ij} + w_i, 2 \max_l D_{il}) + a_V + m^V_i)(u_i + a_A)`,

    :math:`\sup \|J(X')\|` is at most the smallest of

    .. math::
        (a)\;& \|J(X)\| + \|\Delta \circ (\|W_V\| + D u) + P^+ \circ (e (u + a_A) + D a_A) + \mathrm{diag}\, b\| \\
        (b)\;& \|P^+ \circ t + \mathrm{diag}\, B^+\| \\
        (c)\;& (\max t \cdot \max_j \textstyle\sum_i P^+_{ij} t_{ij})^{1/2} + \max_i B^+_i

    *Proof.* The block of J from token j to output i is :math:`P_{ij}[W_V^T + (v_j - o_i)\tilde q_i^T] + \delta_{ij} B_i` with
    :math:`B_i = Cov_{P_i}(v, \tilde k)`.

    (i) :math:`v'_j - o'_i` differs from :math:`v_j - o_i` by at most :math:`e_i`: by :math:`dv_j`, at most :math:`a_V`; by :math:`\sum_l P'_{il}
    dv_l`, at most :math:`m^V_i` (in a Frobenius ball :math:`|\sum_l P'_{il} dv_l|^2 \le \sum_l P'^2_{il} \sum_l |dv_l|^2 \le \max_l P'_{il}\,
    a_V^2`); and by :math:`\sum_l (P' - P)_{il}(v_l - o_i) = \sum_l P'_{il} (v_l - o_i)`, at most :math:`w_i`. And :math:`|\tilde q'_i - \tilde
    q_i| \le a_A`. (a) is then Lemma 1, compression to norms of blocks, for the difference :math:`(P' - P)[W_V^T + (v_j - o_i)\tilde q_i^T] +
    P'[(v'_j - o'_i)\tilde q_i'^T - (v_j - o_i)\tilde q_i^T] + \delta_{ij}(B'_i - B_i)`.

    (ii) :math:`Cov_{P'}(v, \tilde k) = \sum_j P'_j (v_j - o)(\tilde k_j - \bar k)^T - (\cdot)(\cdot)^T` differs from that under P by at most
    :math:`\sum \Delta D F + w w^k`; moving v and :math:`\tilde k` as well adds :math:`Cov_{P'}(dv, \tilde k) + Cov_{P'}(v, d\tilde k) +
    Cov_{P'}(dv, d\tilde k)`, where :math:`\|Cov(a, b)\|^2 \le \|Cov\,a\|\,\|Cov\,b\|` (the joint covariance is positive semi-definite),
    :math:`\|Cov_{P'} dv\|^{1/2} \le m^V` and :math:`\|Cov_{P'} v\| \le c^v`. That is :math:`b_i`; the other value of :math:`B^+` is
    :math:`\|Cov_{P'}(v', \tilde k')\|` by the same inequalities.

    (b) is Lemma 1 for J', whose blocks are at most :math:`P^+ t` and :math:`B^+`. (c): :math:`\|M\|^2 \le \|M\|_1 \|M\|_\infty`, and rows of P'
    sum to one. QED

    As the radius goes to 0, (a) goes to the value at the centre; (c) grows like :math:`\rho^2 \sqrt N`, as global bounds must.
    """
    att.only("over_ball")
    given = torch.as_tensor(radius, dtype=torch.float64)
    single, radii = given.ndim == 0, given.reshape(-1).tolist()
    for one in radii:
        check_ball(one, norm)
    double, unit = att.double().unit_values()  # everything below is linear in the values
    centre = _centre(double, at)
    with torch.no_grad():
        rows = []
        for s in range(att.samples):
            around = _Surroundings(double.unpadded(s))
            rows.append(torch.stack([around.bound(r, norm, centre[s]) for r in radii], -1))
    values = torch.stack(rows) * unit[:, None]
    return values[..., 0] if single else values


def _centre(att: Attention, at: str) -> Tensor:
    """An upper value of the norm at X, (samples, heads)."""
    if at == "certified":
        return spectral_norm(att, tol=CERTIFIED_TOL, delta=CERTIFIED_DELTA).upper.to(att.device)
    bound = get(at)
    if bound.map != "head":
        raise LipboundError(f"at={at!r} bounds another map, {bound.map} attention; use at='certified' or a bound on the head")
    if not bool(bound.sound(att).all()):
        raise LipboundError(f"at={at!r} is not a bound here: it asks for {bound.assumptions}; use at='certified' or 'lipbound'")
    return bound(att)


class _Surroundings:
    """What the bound needs to know of one sample, whatever the radius; float64, (heads, ...)."""

    def __init__(self, att: Attention):
        parts = Parts(att, 0, slice(None))
        self.scores, self.p = att.scores(att.q, att.centred_k)[0], parts.p
        allowed = self.scores > -torch.inf
        self.u, self.d = query_lengths(att), torch.where(allowed, parts.distance, 0.0)
        f, kt = key_spread(att)
        self.f = torch.where(allowed, f, 0.0)
        self.allowed = allowed
        self.norm_a, self.norm_v = qty.norm_a(att), parts.norm_v
        self.b = parts.b
        self.cov_v, self.cov_k = _covariance_norm(parts.p, parts.v), _covariance_norm(parts.p, kt)

    def bound(self, radius: float, norm: str, centre: Tensor) -> Tensor:
        """The bound of `over_ball`, (heads,)."""
        p, d, f, u = self.p, self.d, self.f, self.u[..., None]
        low, up = softmax_interval(self.scores, score_changes(f, self.u, self.norm_a, radius, norm))
        change = torch.maximum(up - p, p - low).clamp(0.0, 1.0)
        a_v, a_a = self.norm_v * radius, self.norm_a[:, None, None] * radius  # (heads, 1, 1)
        far, far_k = d.amax(-1, keepdim=True), f.amax(-1, keepdim=True)  # (heads, N, 1) from here on
        w = (change * d).sum(-1, keepdim=True).minimum(far)
        w_k = (change * f).sum(-1, keepdim=True).minimum(far_k)
        move = torch.full_like(w, radius) if norm == "token" else radius * up.amax(-1, keepdim=True).sqrt()
        m_v, m_a = self.norm_v * move, self.norm_a[:, None, None] * move
        c_v, c_k = (
            (cov[..., None] + (change * x * x).sum(-1, keepdim=True)).minimum((up * x * x).sum(-1, keepdim=True)).minimum(most**2).sqrt()
            for cov, x, most in ((self.cov_v, d, far), (self.cov_k, f, far_k))
        )
        extra = (change * d * f).sum(-1, keepdim=True) + w * w_k + m_v * c_k + m_a * c_v + m_v * m_a
        b_up = (self.b[..., None] + extra).minimum((c_v + m_v) * (c_k + m_a))

        e = a_v + m_v + w
        difference = change * (self.norm_v + d * u) + up * (e * (u + a_a) + d * a_a)
        near = centre + nonnegative_norm(difference + torch.diag_embed(extra[..., 0]), rtol=1e-4)
        t = torch.where(self.allowed, self.norm_v + ((d + w).minimum(2 * far) + a_v + m_v) * (u + a_a), 0.0)
        blocks = up * t
        direct = nonnegative_norm(blocks + torch.diag_embed(b_up[..., 0]), rtol=1e-4)
        closed = (t.amax((-1, -2)) * blocks.sum(-2).amax(-1)).sqrt() + b_up.amax((-1, -2))
        return torch.stack([near, direct, closed]).amin(0) * (1 + 1e-11)


def _covariance_norm(p: Tensor, v: Tensor) -> Tensor:
    """||Cov_{P_i}(v)|| for every row, (heads, N, N) and centred (heads, N, d) -> (heads, N), rounded upwards."""
    d = v.shape[-1]
    o = p @ v
    second = (p @ (v[..., :, None] * v[..., None, :]).flatten(-2)).unflatten(-1, (d, d))
    size = v.norm(dim=-1).amax(-1)[:, None] ** 2
    return block_norm(second - o[..., :, None] * o[..., None, :]) + (1e-13 + 2 * p.shape[-1] * UNIT) * size  # the difference cancels
