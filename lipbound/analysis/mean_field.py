r"""Attention on copies of tokens, which bounds on attention between measures have to allow for."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention

CHUNK = 2**24
"""Bytes of the d_v x d matrices of some tokens that are decomposed at a time."""


def query_block_norms(att: Attention) -> Tensor:
    r"""Compute the norm :math:`\|B_i\|` of the effect of every token's own query.

    :math:`B_i = \mathrm{scale}\,V^T M(P_i) K W_Q^T`. Dense singular values of d_v x d matrices,
    exact to rounding.

    Args:
        att: the layer.

    Returns:
        The norms, (samples, heads, N), float64.
    """
    att.only("query_block_norms")
    p, k, v = att.p.double(), att.centred_k, att.centred_v
    o, mean = p @ v, p @ k
    factor = torch.linalg.qr(att.w_q.double(), mode="r").R.mT  # (heads, d, min(d, D))
    pairs = (v[..., :, None] * k[..., None, :]).flatten(-2)  # (samples, heads, N, d_v d)
    step = max(1, int(CHUNK // (8 * att.samples * att.heads * att.d_v * att.d)))
    norms = []
    for i in range(0, att.tokens, step):
        rows = slice(i, i + step)
        moments = (p[..., rows, :] @ pairs).unflatten(-1, (att.d_v, att.d))
        c = att.scale * (moments - o[..., rows, :, None] * mean[..., rows, None, :])
        norms.append(torch.linalg.matrix_norm(c @ factor[:, None], 2))
    return torch.cat(norms, -1)


def duplicated_norm(att: Attention, norm: Tensor) -> Tensor:
    r"""Compute the exact local constant when every token stands twice or more often.

    .. math:: \|J'\| = \max\big(\|J\|,\ \max_i \|B_i\|\big)

    whatever the number of copies :math:`m \ge 2`. So mass splitting (perturbing copies of a token
    differently) makes a head steeper at an input exactly where :math:`\max_i \|B_i\| > \|J\|`,
    which is what the local constant between probability measures allows.

    Proof: Lemma 64 (docs/theory/inputs.md). (A causal mask is meant to let copies see each other:
    the mask repeated block by block.)

    Args:
        att: the layer.
        norm: exact norms of the layer as it is, (samples, heads).

    Returns:
        The constants, (samples, heads), float64 on the CPU.
    """
    att.only("duplicated_norm")
    return torch.maximum(norm.double().cpu(), query_block_norms(att).amax(-1).cpu())
