"""Inputs and limits of propositions of Castin, Ablin and Peyré 2024."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.analysis.adversarial_inputs import growth_rate
from lipbound.attention.layer import Attention
from lipbound.bounds import factors
from lipbound.errors import LipboundError


class Limit(NamedTuple):
    """Local constant far from the origin, and how clear-cut the attention is there.

    Each (samples, heads), float64.
    """

    norm: Tensor
    gap: Tensor


def large_radius_limit(att: Attention) -> Limit:
    r"""Compute the limit of :math:`\|J(rX)\|` as r grows.

    Each token attends to one other, :math:`j_i = \arg\max_j x_i^T A x_j` (Theorems 3.7 and 4.5).

    The Jacobian tends to :math:`[j = j_i]\,W_V^T`, of norm :math:`\|W_V\|\,(\max_j \#\{i : j_i =
    j\})^{1/2} \le \sqrt N\,\|W_V\|`. The mask's forbidden entries stay forbidden; finite ones and
    biases vanish beside scores that grow like :math:`r^2`: Lemma 59 (docs/theory/inputs.md).

    Returns:
        `Limit`; ``gap`` is the smallest difference between the best and the second best score of a
        token: the limit is reached like :math:`r^2 e^{-r^2 gap}`, and does not exist where it is 0
        (inputs of measure zero). Infinite where a token sees only one.
    """
    att.only("Theorem 3.7")
    x = att.x.double()
    q, k = (torch.einsum("snd,hde->shne", x, w.double()) for w in (att.w_q, att.w_k))
    blocked = att.forbid(torch.zeros_like(q @ k.mT)) == -math.inf
    scores = (att.scale * (q @ k.mT)).masked_fill(blocked, -math.inf)
    top, where = scores.topk(min(2, att.tokens), -1)
    gap = torch.full_like(top[..., 0], math.inf) if att.tokens == 1 else top[..., 0] - top[..., 1]
    real = torch.ones_like(gap) if att.valid is None else att.valid[:, None].to(gap).expand_as(gap)
    counts = torch.zeros_like(gap).scatter_add_(-1, where[..., 0], real)
    return Limit(
        factors.norm_v(att) * counts.amax(-1).sqrt(),
        gap.masked_fill(real == 0, math.inf).amin(-1),
    )


def quadratic_inputs(att: Attention, tokens: int, radius: float) -> Tensor:
    r"""Build inputs at which a head's local constant grows like :math:`R^2` (appendix C.7).

    :math:`x_1 = 0`, half of the others :math:`R u`, half :math:`-R u`; u is the right singular
    vector of A that maximises :math:`|W_V^T u||A u|`.

    Args:
        att: the heads.
        tokens: N, odd.
        radius: R.

    Returns:
        An input of each head, (heads, N, D), in the dtype of ``att``.

    Raises:
        LipboundError: an even number of tokens, or fewer than three.
    """
    att.only("Proposition 3.6")
    if tokens < 3 or tokens % 2 == 0:
        raise LipboundError(
            f"{tokens} tokens cannot be one at 0 and two equal halves; give an odd number of at "
            "least 3"
        )
    sign = torch.ones(tokens, dtype=torch.float64, device=att.device)
    sign[0], sign[1 + tokens // 2 :] = 0.0, -1.0
    return (radius * sign[:, None] * quadratic_direction(att)[0][:, None, :]).to(att.dtype)


def quadratic_direction(att: Attention) -> tuple[Tensor, Tensor]:
    r"""Compute the direction u of `quadratic_inputs` and its rate :math:`|W_V^T u||A u|`.

    There :math:`\|J\| \ge R^2 (1 - 1/N)\,rate - \|W_V\|/N`: Lemma 60 (docs/theory/inputs.md).

    Returns:
        Directions (heads, D) and rates (heads,), float64.
    """
    att.only("Proposition 3.6")
    r = torch.linalg.qr(att.w_q.double(), mode="r").R
    svd = torch.linalg.svd(att.scale * r @ att.w_k.double().mT, full_matrices=False)
    rate, best = ((svd.Vh @ att.w_v.double()).norm(dim=-1) * svd.S).max(-1)
    return svd.Vh[torch.arange(att.heads, device=att.device), best], rate


def two_diracs(u: Tensor, eigenvalue: float, radius: float) -> tuple[Tensor, Tensor]:
    r"""Build two weighted tokens at which the mean-field constant explodes with the radius.

    Proposition 3.6: for a negative eigenvalue of A the points :math:`-Ru` and :math:`Ru`, else
    :math:`Ru` and :math:`Ru/2`; the first has the weight a with
    :math:`a/(1-a) = e^{-2\gamma R^2}`, :math:`\gamma` of
    `lipbound.analysis.adversarial_inputs.steepness`.

    Args:
        u: unit eigenvector of A, (D,).
        eigenvalue: its eigenvalue.
        radius: R.

    Returns:
        Tokens (2, D) and their weights (2,), float64.
    """
    gamma, u = growth_rate(eigenvalue), u.double()
    x = radius * torch.stack([-u, u] if eigenvalue < 0 else [u, u / 2])
    log_odds = 2 * gamma * radius**2
    return x, u.new_tensor([-log_odds, log_odds]).sigmoid()


def two_dirac_growth(eigenvalue: float, radius: float, direction: Tensor, image: Tensor) -> float:
    r"""Compute what the local constant at `two_diracs` approaches as the radius grows.

    For :math:`W_V = I` that is

    .. math::
        \tfrac12 e^{\gamma R^2}\,\|I - R^2 u (A^T u)^T\| \quad\text{or, for a positive
        eigenvalue,}\quad
              \tfrac12 e^{\gamma R^2}\,\|I + \tfrac18 R^2 u (A^T u)^T\|

    which for symmetric A is :math:`\tfrac12 e^{\gamma R^2} (1 + \gamma R^2)`. It is what the heavy
    token sees of the light one: Lemma 63 (docs/theory/inputs.md).

    Args:
        eigenvalue, radius: as for `two_diracs`.
        direction: u, (D,).
        image: :math:`A^T u`, (D,).

    Returns:
        The value.
    """
    u, w = direction.double(), image.double()
    factor = (-1 if eigenvalue < 0 else 1 / 8) * radius**2
    eye = torch.eye(len(u), dtype=torch.float64, device=u.device)
    size = float(torch.linalg.matrix_norm(eye + factor * torch.outer(u, w), 2))
    return math.exp(growth_rate(eigenvalue) * radius**2) / 2 * size


def ellipsoid_radius(weight: Tensor, bias: Tensor | None = None, *, centred: bool = True) -> float:
    r"""Return the largest length of an output of LayerNorm (``centred``) or RMSNorm.

    Over all inputs, from parameters alone: R of the published bounds.

    .. math:: \max\{|w \circ z + b| : |z|^2 \le D,\ \textstyle\sum_k z_k = 0\}

    (without the sum for RMSNorm). Outputs lie on this ellipsoid but for eps, which keeps them
    inside. Computed as the minimum of its dual over one number, every value of which is an upper
    value: Lemma 23 (docs/theory/layers.md). Cost O(D^3) for LayerNorm, O(D) for RMSNorm.
    """
    w = weight.detach().double()
    b = torch.zeros_like(w) if bias is None else bias.detach().double()
    width = len(w)
    if centred:
        z = torch.eye(width, dtype=torch.float64, device=w.device) - 1 / width
        values, vectors = torch.linalg.eigh(z @ torch.diag(w**2) @ z)
        g = vectors.mT @ (z @ (w * b))
    else:
        values, g = w**2, w * b
    top = values.amax()
    low, high = 0.0, float(g.norm() / width**0.5)
    distances = (top - values).clamp_min(0)
    # where the derivative D - sum g^2/(mu - lambda)^2 changes sign, mu = top + middle
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        too_small = float((g / (middle + distances)).square().sum()) > width
        low, high = (middle, high) if too_small else (low, middle)
    rest = torch.where(g == 0, 0.0, g**2 / (high + distances).clamp_min(1e-300))
    dual = (top + high) * width + rest.sum()
    return float((dual + b.square().sum()).sqrt() * (1 + 1e-12))
