"""The ingredients that several bounds share, each computed once per `Attention` and rounded upwards (float64)."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.masking import BLOCKED
from lipbound.attention.softmax import g, largest_jacobian_norm, normalised
from lipbound.linalg.matrix_norms import matrix_norm, nonnegative_norm, product_norm

# -- weights: (heads,) -----------------------------------------------------------------------------------------------


def norm_v(att: Attention) -> Tensor:
    """||W_V|| per head, (heads,)."""
    return att.memo("norm_v", lambda: matrix_norm(att.w_v))


def norm_q(att: Attention) -> Tensor:
    """||W_Q|| per head, (heads,)."""
    return att.memo("norm_q", lambda: matrix_norm(att.w_q))


def norm_k(att: Attention) -> Tensor:
    """||W_K|| per head, (heads,)."""
    return att.memo("norm_k", lambda: matrix_norm(att.w_k))


LINEAR = ("rotation", "cap")
"""Variants under which queries and keys are still affine in their tokens and rows of P still sum to one: published bounds extend to them."""


def turn(att: Attention) -> float:
    """The largest norm of a token's rotation, 1 without."""
    return 1.0 if att.rotation is None else att.rotation.norm


def norm_a(att: Attention) -> Tensor:
    """||A||, A = scale W_Q W_K^T (D x D), per head, (heads,).

    With a rotation a bound on the norms of all A_ij = scale W_Q R_i^T R_j W_K^T, |scale| max ||R_i||^2 ||W_Q|| ||W_K||.
    """
    if att.rotation is not None:
        return abs(att.scale) * turn(att) ** 2 * norm_q(att) * norm_k(att)
    return att.memo("norm_a", lambda: abs(att.scale) * product_norm(att.w_q, att.w_k))


def pull_of_biases(att: Attention) -> tuple[Tensor, Tensor]:
    """How far biases move gradients of scores, with rotation or cap: |scale| max ||R_i||^2 times ||W_K|| |b_Q| and ||W_Q|| |b_K|, (heads,)."""
    factor = abs(att.scale) * turn(att) ** 2
    zero = torch.zeros(att.heads, dtype=torch.float64, device=att.device)
    q, k = (zero if b is None else torch.linalg.vector_norm(b.double(), dim=-1) for b in (att.b_q, att.b_k))
    return factor * norm_k(att) * q, factor * norm_q(att) * k


def entering(att: Attention) -> tuple[Tensor, Tensor]:
    """Queries and keys as they enter the scores, (samples, heads, N, d) in float64, zero for padding; keys centred unless there is a cap."""
    q, k = att.wide_q, att.wide_k
    if att.valid is not None:
        real = att.valid[:, None, :, None]
        q, k = q * real, k * real
    if att.scoring.shift_invariant:
        k = k - k.sum(-2, keepdim=True) / att.lengths[:, None, None, None]
        k = k if att.valid is None else k * real
    return q, k


def slope_of_scores(att: Attention) -> Tensor:
    r"""Bound on the norm of dX -> dS before the softmax, with rotation or cap, (samples, heads).

    :math:`|scale| \max_i \|R_i\| (\|Q\| \|W_K\| + \|K\| \|W_Q\|)`, Q and K the queries and keys as they enter the scores (keys centred, unless
    there is a cap): Lemma 32 (docs/theory/published.md).
    """
    q, k = (matrix_norm(t) for t in entering(att))
    return abs(att.scale) * turn(att) * (q * norm_k(att) + k * norm_q(att)) * (1 + 1e-12)


def has_query_bias(att: Attention) -> Tensor:
    """Whether a head has a nonzero query bias, (heads,), bool: the only bias that enters the Jacobian's shape."""
    if att.b_q is None:
        return torch.zeros(att.heads, dtype=torch.bool, device=att.device)
    return (att.b_q != 0).any(-1)


# -- inputs: (samples, 1), so that they broadcast against heads ---------------------------------------------------------


def count(att: Attention) -> Tensor:
    """N, the tokens that are not padding, (samples, 1)."""
    return att.lengths[:, None]


def token_norms(att: Attention) -> Tensor:
    """|x_i|, zero for padding, (samples, N)."""
    return att.memo("token_norms", lambda: att.x.double().norm(dim=-1))


def radius(att: Attention) -> Tensor:
    """R = max_i |x_i|, (samples, 1)."""
    return token_norms(att).amax(-1, keepdim=True)


def frobenius(att: Attention) -> Tensor:
    """||X||_F, (samples, 1)."""
    return torch.linalg.vector_norm(token_norms(att), dim=-1, keepdim=True)


def norm_x(att: Attention) -> Tensor:
    """||X||, spectral, (samples, 1)."""
    return att.memo("norm_x", lambda: matrix_norm(att.x)[:, None])


def diameter(att: Attention) -> Tensor:
    """max_ij |x_i - x_j| over tokens that are not padding, (samples, 1)."""

    def make() -> Tensor:
        x = att.x.double()
        distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        if att.valid is not None:
            distances = distances * (att.valid[:, None, :] & att.valid[:, :, None])
        return distances.amax((-1, -2))[:, None] * (1 + 1e-13)

    return att.memo("diameter", make)


def total_radius(att: Attention, radius: float, norm: str) -> Tensor:
    """How far X can move in the Frobenius norm within a ball, hence also in the spectral norm, (samples, 1)."""
    return radius * (count(att).sqrt() if norm == "token" else torch.ones_like(count(att)))


# -- attention: (samples, heads) ---------------------------------------------------------------------------------------


def norm_p(att: Attention) -> Tensor:
    """||P||, spectral, (samples, heads)."""
    return att.memo("norm_p", lambda: nonnegative_norm(att.p))


def norm_m(att: Attention) -> Tensor:
    """max_i ||M(P_i)||, exact, (samples, heads)."""
    return att.memo("norm_m", lambda: largest_jacobian_norm(att.p))


def largest_g1(att: Attention) -> Tensor:
    """max_i g_1(P_i), (samples, heads)."""
    return att.memo("largest_g1", lambda: g(normalised(att.p)).amax(-1) * (1 + 1e-13))


def hides_or_shows(att: Attention) -> Tensor:
    """Whether the mask only forbids or allows (no finite offsets) and lets every token attend to itself, (1, 1), bool."""
    if att.mask is None:
        return torch.ones(1, 1, dtype=torch.bool, device=att.device)
    blocked = att.mask <= BLOCKED
    n = att.tokens
    diagonal = blocked.expand(*blocked.shape[:-2], n, n).diagonal(dim1=-2, dim2=-1)
    if att.valid is not None:
        diagonal = diagonal & att.valid[:, None]
    return (((att.mask == 0) | blocked).all() & ~diagonal.any()).view(1, 1)


def unmasked(att: Attention) -> Tensor:
    """Whether every token may attend to every other that is not padding, at no offset, (1, 1), bool."""
    if att.mask is None:
        return torch.ones(1, 1, dtype=torch.bool, device=att.device)
    free = att.mask == 0
    if att.valid is not None:
        both = att.valid[:, None, :, None] & att.valid[:, None, None, :]
        free = free | ~both
    return free.all().view(1, 1)


# -- conditions that several statements share: (1 or samples, 1 or heads), bool -------------------------------------------


def always(att: Attention) -> Tensor:
    """True for every layer."""
    return torch.ones(1, 1, dtype=torch.bool, device=att.device)


def never(att: Attention) -> Tensor:
    """False for every layer."""
    return ~always(att)


def no_query_bias(att: Attention) -> Tensor:
    """Where queries have no bias, nor keys if theirs does not drop out (rotation, cap), (heads,)."""
    free = ~has_query_bias(att)
    return free & (att.b_k == 0).all(-1) if att.variants and att.b_k is not None else free
