"""Factors that several published bounds share, as upper values in float64.

They are of the numbers given, whatever their dtype. What rounding takes from norms and from P is
inside: Lemmas 84, 85 and 86 (docs/theory/upper_values.md); what it takes from the few sums and
products of them is the allowance of `Bound`. Each is computed once per `Attention`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.cache import memoised, memoised_routine
from lipbound.attention.layer import Attention
from lipbound.attention.rounding import probability_error
from lipbound.attention.softmax import g, largest_jacobian_routine, normalised
from lipbound.bounds.statement import Bound
from lipbound.devices import Routine, require
from lipbound.linalg.covariance import weighted_deviation_norm
from lipbound.linalg.matrix_norms import (
    LARGEST_DENSE_EIG,
    factor_of_gram,
    gamma,
    gram_of,
    matrix_norm,
    nonnegative_routine,
    with_derivative,
)

ROOT3 = math.sqrt(3)
TIGHT = 1e-10
"""Relative excess that the norm of P may have over the exact one."""
COPIES = 5
"""Number of matrices of the size of P that are in memory while it is formed and used."""
_STEPS = 100
UNKNOWN = 0.5
"""Relative errors of probabilities from which on nothing is taken from their values."""
_FAINT = 1e-100
"""More than what underflow can take from a distance of tokens, relative to the longest of them."""
TINY = 2.0**-900
"""More than what underflow can take from a sum of probabilities."""


@memoised
def wide(att: Attention) -> Attention:
    """The layer in float64, with the queries, keys and probabilities of the given numbers."""
    double = att.double()
    if double is not att:
        double.cache.share(att.cache, "wide_q", "wide_k", "centred_k")
    return double


# -- norms of what is given ------------------------------------------------------------------------


def size(t: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Lengths (Frobenius norms) over the last axis or axes."""
    t = t.double().flatten(-2) if isinstance(dims, tuple) else t.double()
    return torch.linalg.vector_norm(t, dim=-1) * (1 + gamma(t.shape[-1] + 4))


@memoised
def weight_grams(att: Attention) -> list[Tensor]:
    """Gram matrices of W_Q, W_K and W_V."""
    double = wide(att)
    return [gram_of(w.detach()) for w in (double.w_q, double.w_k, double.w_v)]


@memoised
def norm_v(att: Attention) -> Tensor:
    """Norm ||W_V||, (heads,)."""
    return matrix_norm(att.w_v, weight_grams(att)[2])


@memoised
def norm_q(att: Attention) -> Tensor:
    """Norm ||W_Q||, (heads,)."""
    return matrix_norm(att.w_q, weight_grams(att)[0])


@memoised
def norm_k(att: Attention) -> Tensor:
    """Norm ||W_K||, (heads,)."""
    return matrix_norm(att.w_k, weight_grams(att)[1])


def turn(att: Attention) -> float:
    """The largest norm of a token's rotation, 1 without."""
    return 1.0 if att.rotation is None else att.rotation.norm


@memoised
def norm_a(att: Attention) -> Tensor:
    """Norm ||A||, A = scale W_Q W_K^T (D x D), (heads,).

    A is not formed: Lemma 86 (docs/theory/upper_values.md). With a rotation |scale| max ||R_i||^2
    ||W_Q|| ||W_K||, which bounds those of all A_ij.
    """
    if att.rotation is not None:
        return abs(att.scale) * turn(att) ** 2 * norm_q(att) * norm_k(att)
    a, b, width = wide(att).w_q, wide(att).w_k, att.x.shape[2]
    f_a, f_b = a.detach(), b.detach()
    if width > att.d:
        f_a, f_b = factor_of_gram(torch.stack(weight_grams(att)[:2]), width)[0]
    inner, sizes = f_a @ f_b.mT, torch.linalg.matrix_norm(f_a) * torch.linalg.matrix_norm(f_b)
    norm = abs(att.scale) * (matrix_norm(inner) + gamma(att.d + 2) * sizes)
    if a.requires_grad or b.requires_grad:
        u, s, vh = (t.to(att.device) for t in torch.linalg.svd(inner.cpu()))
        top = torch.where(s[..., :1] > 0, s[..., :1], 1.0)[..., None]
        left = a.detach() @ (f_b.mT @ vh[..., 0, :, None]) / top
        right = b.detach() @ (f_a.mT @ u[..., :, :1]) / top
        form = ((left.mT @ a) @ (b.mT @ right))[..., 0, 0]
        norm = with_derivative(norm, abs(att.scale) * form)
    return norm


def length_of_bias(b: Tensor | None, att: Attention) -> Tensor:
    """Length |b|, (heads,); zero without."""
    if b is None:
        return torch.zeros(att.heads, dtype=torch.float64, device=att.device)
    return size(b, -1)


def pull_of_biases(att: Attention) -> tuple[Tensor, Tensor]:
    """Largest moves of gradients of scores by biases, with rotation or cap, (heads,) each.

    |scale| max ||R_i||^2 times ||W_K|| |b_Q| and ||W_Q|| |b_K|.
    """
    factor = abs(att.scale) * turn(att) ** 2
    by_q = factor * norm_k(att) * length_of_bias(att.b_q, att)
    return by_q, factor * norm_q(att) * length_of_bias(att.b_k, att)


def slope_by_lengths(att: Attention, r: Tensor) -> Tensor:
    """Slope of scores with rotation or cap, where tokens are no longer than r, (samples, heads)."""
    q, k = pull_of_biases(att)
    return r * (2 * norm_a(att) * r + q + k)


def shift(att: Attention) -> Tensor:
    """Length |scale W_K b_Q|, (heads,)."""
    if att.b_q is None:
        return length_of_bias(None, att)
    y = (att.w_k.double() @ att.b_q.double()[..., None])[..., 0]
    rounding = gamma(att.d + 4) * size(att.w_k, (-2, -1)) * size(att.b_q, -1)
    return abs(att.scale) * (size(y, -1) + rounding)


# -- inputs: (samples, 1), so that they broadcast against heads ------------------------------------


def count(att: Attention) -> Tensor:
    """Number N of tokens that are not padding, (samples, 1)."""
    return att.lengths[:, None]


def root_count(att: Attention) -> Tensor:
    """Root of N, (samples, 1)."""
    return count(att).sqrt()


@memoised
def radius(att: Attention) -> Tensor:
    """Largest length R = max_i |x_i| of a token, (samples, 1)."""
    x = wide(att).x
    where = x.detach().norm(dim=-1).argmax(-1)
    return size(x[torch.arange(len(x), device=x.device), where][:, None], -1)


@memoised
def frobenius(att: Attention) -> Tensor:
    """Frobenius norm ||X||_F, (samples, 1)."""
    return size(att.x[:, None], (-2, -1))


@memoised
def norm_x(att: Attention) -> Tensor:
    """Spectral norm ||X||, (samples, 1)."""
    return matrix_norm(att.x[:, None])


@memoised
def diameter(att: Attention) -> Tensor:
    """Largest distance |x_i - x_j| of tokens that are not padding, (samples, 1).

    The pair is found by inner products: Lemma 86 (docs/theory/upper_values.md).
    """
    x, row = wide(att).x, torch.arange(att.samples, device=att.device)
    y = x.detach() - x.detach()[row, 0 if att.valid is None else att.valid.int().argmax(-1), None]
    lengths = y.square().sum(-1)
    squares = torch.baddbmm(lengths[:, None] + lengths[..., None], y, y.mT, alpha=-2)
    if att.valid is not None:
        squares.masked_fill_(~(att.valid[:, None] & att.valid[..., None]), -torch.inf)
    pair = squares.flatten(1).argmax(-1)
    apart = (x[row, pair // x.shape[1]] - x[row, pair % x.shape[1]]).norm(dim=-1)
    return apart[:, None] * (1 + gamma(9 * x.shape[-1] + 80)) + _FAINT * radius(att)


def total_radius(att: Attention, radius: float, ball: str) -> Tensor:
    """Radius of a ball in the Frobenius norm of X, and so in the spectral norm, (samples, 1)."""
    return radius * (root_count(att) if ball == "token" else torch.ones_like(count(att)))


# -- attention: (samples, heads) -------------------------------------------------------------------


@memoised
def stretched(att: Attention) -> tuple[Tensor, Tensor]:
    """Factor 1/(1 - error) from computed P to the exact one, and where nothing is known of P.

    (samples, heads) each: Lemma 84 (docs/theory/upper_values.md).
    """
    error = probability_error(att)
    unknown = error >= UNKNOWN
    return (1 + gamma(att.tokens + 20)) / (1 - error.masked_fill(unknown, 0.0)), unknown


@memoised
def probabilities(att: Attention) -> Tensor:
    """P of all heads of all samples, of the given numbers, (samples, heads, N, N).

    Raises:
        LipboundError: the memory for them is not free.
    """
    needed = COPIES * 8.0 * att.samples * att.heads * att.tokens**2
    what = f"bounds that look at attention matrices need those of all heads at {att.tokens} tokens"
    advice = "measure shorter inputs, fewer samples or heads, or name other bounds"
    require(needed, att.device, what, advice)
    return wide(att).p


@memoised_routine
def norm_p(att: Attention) -> Routine[Tensor]:
    """Spectral norm ||P||, (samples, heads)."""
    factor, unknown = stretched(att)
    near = att.device.type == "cpu" or att.tokens > LARGEST_DENSE_EIG
    steps = _STEPS if near else 1  # a GPU need not wait for more where there is another way
    found = yield from nonnegative_routine(probabilities(att), rtol=TIGHT, max_steps=steps)
    norm = found * factor + TINY
    return torch.minimum(norm.masked_fill(unknown, torch.inf), root_count(att))


@memoised_routine
def norm_m(att: Attention) -> Routine[Tensor]:
    """Largest norm max_i ||M(P_i)|| of a softmax Jacobian, (samples, heads)."""
    return _of_rows(att, (yield from largest_jacobian_routine(probabilities(att))))


@memoised
def largest_g1(att: Attention) -> Tensor:
    """Largest max_i g_1(P_i), (samples, heads)."""
    return _of_rows(att, g(normalised(probabilities(att))).max(-1).values)


def _of_rows(att: Attention, largest: Tensor) -> Tensor:
    factor, unknown = stretched(att)
    value = largest * (factor**2 * (1 + gamma(10 * att.tokens + 140))) + TINY
    return torch.where(unknown | ~(value <= 0.5), 0.5, value)


@memoised_routine
def deviation(att: Attention) -> Routine[Tensor]:
    """Largest norm max_i ||X^T M(P_i)||, (samples, heads)."""
    factor, unknown = stretched(att)
    factor = torch.addcmul(factor, factor * factor, factor - 1, value=att.tokens)
    value = (yield from weighted_deviation_norm(wide(att).x, probabilities(att))) * factor
    return torch.fmin(value.masked_fill(unknown, torch.inf), radius(att))


def entering(att: Attention) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Queries and keys as they enter the scores, each with upper values of a token's rounding.

    (samples, heads, N, d) in float64, zero for padding, keys centred unless there is a cap; and
    (samples, heads).
    """
    layer = wide(att)
    q, k = layer.wide_q, layer.wide_k
    real = None if att.valid is None else att.valid[:, None, :, None]
    if real is not None:
        q, k = q * real, k * real
    if att.shift_invariant:
        k = k - k.sum(-2, keepdim=True) / att.lengths[:, None, None, None]
        k = k if real is None else k * real
    r = radius(att).detach()
    found = []
    for w, b, extra in ((att.w_q, att.b_q, 0), (att.w_k, att.b_k, att.tokens + 4)):
        bias = length_of_bias(None if b is None else b.detach(), att)
        largest = turn(att) * (r * size(w.detach(), (-2, -1)) + bias)
        found.append(largest * (3 * gamma(att.x.shape[2] + 12 + extra)))
    return (q, found[0]), (k, found[1])


def slope_of_scores(att: Attention) -> Tensor:
    r"""Upper value of the norm of dX -> dS before the softmax, rotation or cap, (samples, heads).

    :math:`|scale| \max_i \|R_i\| (\|Q\| \|W_K\| + \|K\| \|W_Q\|)`, Q and K the queries and keys as
    they enter the scores (keys centred, unless there is a cap): Lemma 32
    (docs/theory/published.md).
    """
    q, k = (matrix_norm(t) + error * root_count(att) for t, error in entering(att))
    return abs(att.scale) * turn(att) * (q * norm_k(att) + k * norm_q(att))


# -- shares of terms -------------------------------------------------------------------------------


def values_and_softmax(
    share: Callable[[Attention, Tensor], Tensor],
) -> Callable[[Bound, Attention], dict[str, Tensor]]:
    """The terms of a bound of two, from the share of "values".

    That is a function of the layer and the bound's value, (samples, heads) or broadcastable.
    """

    def terms(bound: Bound, att: Attention) -> dict[str, Tensor]:
        with torch.no_grad():
            value = bound(att)
            part = torch.where(value > 0, share(att, value), 1.0).clamp(0, 1).expand_as(value)
        return {"values": part, "softmax": 1 - part}

    return terms
