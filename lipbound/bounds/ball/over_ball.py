"""Our bound on the local Lipschitz constant over a whole ball of inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import check_sizes
from lipbound.bounds.ball.centre_entries import COVERS
from lipbound.bounds.ball.centre_pairs import PairedBallCentre, PairedVariantCentre
from lipbound.bounds.ours.block_norms import TINY, sizes_of_values
from lipbound.bounds.registry import get
from lipbound.bounds.statement import check_radii
from lipbound.devices import in_own_modes
from lipbound.errors import AttentionError, LipboundError, check_layer
from lipbound.jacobians.spectral_norm import spectral_norm

CERTIFIED_TOL = 1e-3
CERTIFIED_DELTA = 1e-10


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

    Rotary position embeddings, capped scores and sinks change some of what follows:
    `lipbound.bounds.ball.centre_entries.VariantBallCentre`.

    With :math:`D_{ij} = |v_j - o_i|`, :math:`F_{ij} = |\tilde k_j - \sum_l P_{il} \tilde k_l|`,
    :math:`u_i = |\tilde q_i|`, P' between :math:`P^-` and :math:`P^+`
    (`lipbound.bounds.ball.softmax_interval`), :math:`\Delta = \max(P^+ - P, P - P^-)`,
    :math:`a_V = \|W_V\|\rho`, :math:`a_A = \|A\|\rho` and

    - :math:`w_i = \min(\sum_j \Delta_{ij} D_{ij}, \max_j D_{ij})`, :math:`w^k_i` the same with F
      for D;
    - :math:`m_i = \rho`, or :math:`\rho\,(\max_j P^+_{ij})^{1/2}` for a Frobenius ball,
      :math:`m^V = \|W_V\| m`, :math:`m^A = \|A\| m`;
    - :math:`e_i = a_V + m^V_i + w_i`;
    - :math:`c^v_i = \min(\|Cov_{P_i} v\| + \sum_j \Delta_{ij} D_{ij}^2, \sum_j P^+_{ij} D_{ij}^2,
      \max_j D_{ij}^2)`, :math:`c^k_i` the same for :math:`\tilde k` with F;
    - :math:`b_i = \sum_j \Delta_{ij} D_{ij} F_{ij} + w_i w^k_i + m^V_i (c^k_i)^{1/2} + m^A_i
      (c^v_i)^{1/2} + m^V_i m^A_i`, :math:`B^+_i = \min(\|B_i\| + b_i, ((c^v_i)^{1/2} +
      m^V_i)((c^k_i)^{1/2} + m^A_i))`;
    - :math:`t_{ij} = \|W_V\| + (\min(D_{ij} + w_i, 2 \max_l D_{il}) + a_V + m^V_i)(u_i + a_A)`,

    :math:`\sup \|J(X')\|` is at most the smallest of

    .. math::
        (a)\;& \|J(X)\| + \|\Delta \circ (\|W_V\| + D u) + P^+ \circ (e (u + a_A) + D a_A)
            + \mathrm{diag}\, b\| \\
        (b)\;& \|P^+ \circ t + \mathrm{diag}\, B^+\| \\
        (c)\;& (\max t \cdot \max_j \textstyle\sum_i P^+_{ij} t_{ij})^{1/2} + \max_i B^+_i

    Proof: Lemma 27 (docs/theory/balls.md).

    The value is the smaller of that and a bound by sums over pairs of tokens, which is tighter at
    most radii: Lemma 108 (docs/theory/ball_pairs.md) and Lemma 116 (docs/theory/ball_norm.md) for
    plain heads, Lemma 110 (docs/theory/ball_pairs.md) for those with rotary position embeddings or
    sinks. Heads with capped scores have the bound above alone.

    As the radius goes to 0, (a) goes to the value at the centre; (c) grows like
    :math:`\rho^2 \sqrt N`, as global bounds must.
    """
    return _over_ball(att, radius, ball, at, entries_only=False)


def _over_ball(
    att: Attention, radius: float | Sequence[float], ball: str, at: str, *, entries_only: bool
) -> Tensor:
    """`over_ball`; or, with ``entries_only``, what (a), (b) and (c) alone make of it."""
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
        parts = [_sample(double.unpadded(s), radii, ball, entries_only) for s in range(att.samples)]
    changed, whole = (torch.stack(values) for values in zip(*parts, strict=True))
    values = (centre[..., None] + changed).minimum(whole) * (1 + 4 * torch.finfo(torch.float64).eps)
    return values[..., 0] if single else values


def _sample(
    att: Attention, radii: list[float], ball: str, entries_only: bool
) -> tuple[Tensor, Tensor]:
    """Upper values of the change of J within balls around one unpadded float64 sample, and of J.

    (heads, radii) each.
    """
    around = PairedVariantCentre(att) if att.variants else PairedBallCentre(att)
    bounds = around.by_entries if entries_only else around.bounds
    found = [bounds(r, ball) for r in radii]
    hidden = TINY * sizes_of_values(att, torch.linalg.matrix_norm(att.w_v))[:, None]
    changed, whole = (torch.stack(values, -1) + hidden for values in zip(*found, strict=True))
    return changed.nan_to_num(nan=torch.inf), whole.nan_to_num(nan=torch.inf)


def _centre(att: Attention, at: str) -> Tensor:
    """Upper values of the norm at X, (samples, heads).

    Raises:
        LipboundError: no bound on the head in the Frobenius norm whose assumptions hold.
    """
    if isinstance(at, str) and at == "certified":
        return spectral_norm(att, tol=CERTIFIED_TOL, delta=CERTIFIED_DELTA).upper.to(att.device)
    bound = get(at)
    if bound.map != "head":
        raise LipboundError(
            f"at={at!r} bounds another map, {bound.map} attention; use at='certified' or a bound "
            "on the head"
        )
    if bound.norm != "frobenius":
        raise LipboundError(
            f"at={at!r} is stated in the {bound.norm} norm, and this one in Frobenius's; use "
            "at='certified' or 'lipbound'"
        )
    if not bool(bound.sound(att).all()):
        raise LipboundError(
            f"at={at!r} is not a bound here: it asks for {bound.assumptions}; use at='certified' "
            "or 'lipbound'"
        )
    return bound(att)
