"""What several bounds share, as float64 numbers rounded upwards, and the conditions of several statements.

The numbers are those of `lipbound.bounds.factors`, which keep their exponents apart while they are multiplied.
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.masking import BLOCKED
from lipbound.bounds import factors

LINEAR = ("rotation", "cap")
"""Variants under which queries and keys are still affine in their tokens and rows of P still sum to one: published bounds extend to them."""

# -- weights: (heads,) -----------------------------------------------------------------------------------------------


def norm_v(att: Attention) -> Tensor:
    """||W_V|| per head, (heads,)."""
    return factors.norm_v(att).value()


def norm_q(att: Attention) -> Tensor:
    """||W_Q|| per head, (heads,)."""
    return factors.norm_q(att).value()


def norm_k(att: Attention) -> Tensor:
    """||W_K|| per head, (heads,)."""
    return factors.norm_k(att).value()


def norm_a(att: Attention) -> Tensor:
    """||A||, A = scale W_Q W_K^T (D x D), per head, (heads,).

    With a rotation a bound on the norms of all A_ij = scale W_Q R_i^T R_j W_K^T, |scale| max ||R_i||^2 ||W_Q|| ||W_K||.
    """
    return factors.norm_a(att).value()


def has_query_bias(att: Attention) -> Tensor:
    """Whether a head has a nonzero query bias, (heads,), bool: the only bias that enters the Jacobian's shape."""
    if att.b_q is None:
        return torch.zeros(att.heads, dtype=torch.bool, device=att.device)
    return (att.b_q != 0).any(-1)


# -- inputs: (samples, 1), so that they broadcast against heads ---------------------------------------------------------


def count(att: Attention) -> Tensor:
    """N, the tokens that are not padding, (samples, 1)."""
    return factors.count(att)


def radius(att: Attention) -> Tensor:
    """R = max_i |x_i|, (samples, 1)."""
    return factors.radius(att).value()


def norm_x(att: Attention) -> Tensor:
    """||X||, spectral, (samples, 1)."""
    return factors.norm_x(att).value()


# -- attention: (samples, heads) ---------------------------------------------------------------------------------------


def norm_p(att: Attention) -> Tensor:
    """||P||, spectral, (samples, heads)."""
    return factors.norm_p(att).value()


def norm_m(att: Attention) -> Tensor:
    """max_i ||M(P_i)||, (samples, heads)."""
    return factors.norm_m(att).value()


def largest_g1(att: Attention) -> Tensor:
    """max_i g_1(P_i), (samples, heads)."""
    return factors.largest_g1(att).value()


# -- conditions that several statements share: (1 or samples, 1 or heads), bool -------------------------------------------


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
