r"""Inputs at which a head is steep, and the limit of its Jacobian far from the origin.

Castin, Ablin and Peyré 2024, section 3 and appendix C.

All of it is about heads without biases: :math:`P_{ij} \propto e^{x_i^T A x_j}` with
:math:`A = \mathrm{scale}\,W_Q W_K^T`, D x D of rank at most d. A real eigenvalue :math:`\gamma` of
A with a unit eigenvector u makes the score of :math:`\alpha u` and :math:`\beta u` equal
:math:`\alpha\beta\gamma`, so that a few tokens on the line of u draw all attention. Eigenvalues
come from the d x d matrix :math:`\mathrm{scale}\,W_K^T W_Q`: Lemma 57 (docs/theory/inputs.md).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.bounds import factors
from lipbound.errors import LipboundError


class Steepness(NamedTuple):
    r"""Rate of growth of each head and its direction, from Proposition 3.4.

    Attributes:
        gamma: :math:`\max(-\gamma_{min}, \gamma_{max}/8)`, (heads,), float64.
        eigenvalue: the one of A, largest or smallest real, that attains it, (heads,).
        direction: its unit eigenvector, (heads, D), float64.
    """

    gamma: Tensor
    eigenvalue: Tensor
    direction: Tensor


@memoised
def steepness(att: Attention) -> Steepness:
    r"""Compute :math:`\gamma` of Proposition 3.4 for every head, with its eigenvector.

    Where A is singular (d < D) zero counts as an eigenvalue, so that :math:`\gamma \ge 0`.

    Raises:
        LipboundError: a head whose A has no real eigenvalue at all (d = D only), for which the
            proposition says nothing.
    """
    att.only("the curvature of scores")
    found = [
        _steepness(att.w_q[h].double(), att.w_k[h].double(), att.scale) for h in range(att.heads)
    ]
    gamma, eigenvalue, direction = zip(*found, strict=True)
    return Steepness(torch.stack(gamma), torch.stack(eigenvalue), torch.stack(direction))


def _steepness(w_q: Tensor, w_k: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    width, d = w_q.shape
    values, vectors = torch.linalg.eig(scale * (w_k.mT @ w_q))
    # LAPACK returns real eigenvalues of real matrices with imaginary part zero
    real = torch.nonzero(values.imag == 0)[:, 0]
    candidates = [(values.real[i], w_q @ vectors[:, i].real) for i in real]
    if d < width:  # a vector that no key sees
        kernel = torch.linalg.svd(w_k.mT, full_matrices=True).Vh[-1]
        candidates.append((torch.zeros((), dtype=torch.float64, device=w_q.device), kernel))
    candidates = [(value, u) for value, u in candidates if float(u.norm()) > 0]
    if not candidates:
        raise LipboundError(
            "W_Q W_K^T of a head has no real eigenvalue, so Proposition 3.4 says nothing about it"
        )
    gammas = torch.stack([_gamma(value) for value, _ in candidates])
    best = int(gammas.argmax())
    value, u = candidates[best]
    return gammas[best], value, u / u.norm()


def _gamma(eigenvalue: Tensor) -> Tensor:
    return torch.where(eigenvalue < 0, -eigenvalue, eigenvalue / 8)


def adversarial_inputs(att: Attention, tokens: int, radius: float) -> Tensor:
    r"""Build inputs at which a head's local constant grows like :math:`\sqrt N`.

    They lie in the ball of radius R and are (heads, N, D), in the dtype of ``att``.

    :math:`R(-u, u, \dots, u)` for a negative eigenvalue, :math:`R(u, u/2, \dots, u/2)` for a
    positive one (Lemma C.7): all tokens attend to the first.
    """
    att.only("Proposition 3.4")
    if tokens < 1 or not radius > 0:
        raise LipboundError(
            f"{tokens} tokens within radius {radius} are no input; give at least one token and a "
            "positive radius"
        )
    steep = steepness(att)
    negative = (steep.eigenvalue < 0)[:, None, None]
    shape = torch.ones(1, tokens, 1, dtype=torch.float64, device=att.device)
    shape[:, 0] = -1
    x = torch.where(negative, shape, (3 + shape.neg()) / 4)  # -1 and 1, or 1 and 1/2
    return (radius * x * steep.direction[:, None, :]).to(att.dtype)


def lower_bound(att: Attention, tokens: int, radius: float) -> Tensor:
    r"""Lower bound on every head's local constant at its `adversarial_inputs`.

    The heads are without their biases; (heads,), float64.

    .. math::
        \frac{\sqrt{N-1}}{1 + (N-1) e^{-2R^2\gamma}}\;\|W_V^T (I - w w^T)\|,\qquad w = A^T u / |A^T
        u|

    Proposition 3.4 for any values, without mask or with a causal one: Lemma 58
    (docs/theory/inputs.md). With :math:`W_V = I` and D > 1 the last factor is 1 and this is their
    statement.
    """
    att.only("Proposition 3.4")
    steep = steepness(att)
    p = 1 / (1 + (tokens - 1) * (-2 * radius**2 * steep.gamma).exp())
    factors = []
    for h in range(att.heads):
        w = att.scale * att.w_k[h].double() @ (att.w_q[h].double().mT @ steep.direction[h])
        length = w.norm()
        w_v = att.w_v[h].double()
        seen = w_v if float(length) == 0 else w_v - torch.outer(w / length, (w / length) @ w_v)
        factors.append(torch.linalg.matrix_norm(seen, 2))
    return math.sqrt(tokens - 1) * p * torch.stack(factors)


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
    real = (
        torch.ones_like(top[..., 0], dtype=torch.bool)
        if att.valid is None
        else att.valid[:, None, :].expand_as(top[..., 0])
    )
    gap = torch.full_like(top[..., 0], math.inf) if att.tokens == 1 else top[..., 0] - top[..., 1]
    counts = torch.zeros_like(top[..., 0]).scatter_add_(-1, where[..., 0], real.double())
    return Limit(
        factors.norm_v(att).value() * counts.amax(-1).sqrt(),
        gap.masked_fill(~real, math.inf).amin(-1),
    )


def quadratic_inputs(att: Attention, tokens: int, radius: float) -> Tensor:
    r"""Build inputs at which a head's local constant grows like :math:`R^2` (appendix C.7).

    They are (heads, N, D) for odd N.

    :math:`x_1 = 0`, half of the others :math:`R u`, half :math:`-R u`; u is the right singular
    vector of A that maximises :math:`|W_V^T u||A u|`.
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
    r"""Direction u (heads, D) and rate :math:`|W_V^T u||A u|` (heads,) of `quadratic_inputs`.

    Both in float64.

    There :math:`\|J\| \ge R^2 (1 - 1/N)\,rate - \|W_V\|/N`: Lemma 60 (docs/theory/inputs.md).
    """
    att.only("Proposition 3.6")
    directions, rates = [], []
    for h in range(att.heads):
        r = torch.linalg.qr(att.w_q[h].double(), mode="r").R
        vh = torch.linalg.svd(att.scale * r @ att.w_k[h].double().mT, full_matrices=False)
        rate = (vh.Vh @ att.w_v[h].double()).norm(dim=-1) * vh.S
        best = int(rate.argmax())
        directions.append(vh.Vh[best])
        rates.append(rate[best])
    return torch.stack(directions), torch.stack(rates)


def crossover_length(att: Attention) -> Tensor:
    r"""Compute log10 of the length from which the bound of Theorem 3.5 is below that of 3.3.

    Theorem 3.5 is the mean-field one; the length N* is that at the tokens' radius R, (samples,
    heads), float64.

    With :math:`t = \|A\|R^2`, :math:`N^* = \big((1+3t)^2 e^{4t}/3 - t^2\big) / (1 + 4t^2)`: Lemma
    61 (docs/theory/inputs.md). A logarithm, since N* exceeds the range of float64 on pretrained
    heads.
    """
    att.only("Proposition 3.4")
    t = factors.norm_a(att).value() * factors.radius(att).value() ** 2
    first = 4 * t + 2 * torch.log1p(3 * t) - math.log(3)  # log of the first term of the numerator
    rest = torch.log1p(-(t**2) * (-first).exp())
    return (first + rest - torch.log1p(4 * t**2)) / math.log(10)
