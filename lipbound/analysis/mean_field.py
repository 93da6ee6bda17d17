r"""Attention on weighted tokens, as between probability measures, and on copies of tokens.

The maps between measures are those of appendix C of Castin, Ablin and Peyré 2024. With weights
:math:`a_j` on the tokens, :math:`P_{ij} \propto a_j e^{S_{ij}}`, and perturbations and outputs have
the norm :math:`(\sum_i a_i |x_i|^2)^{1/2}` (their Definition C.4 and Lemma C.5). Equal weights give
back attention and its norm: Lemma 62 (docs/theory/inputs.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.errors import AttentionError
from lipbound.jacobians.head import HeadJacobian
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import Between
from lipbound.linalg.solution import Norm, sample_seeds

_CHUNK = 2**24
"""Bytes of the d_v x d matrices of some tokens that are decomposed at a time."""


def weighted(att: Attention, weights: Tensor) -> Attention:
    r"""Put weights on the tokens of a layer by way of a mask.

    Args:
        att: the layer, without padding.
        weights: a, (samples, N), positive, adding up to one for every sample.

    Returns:
        The layer with :math:`P_{ij} \propto a_j e^{S_{ij}}`.

    Raises:
        AttentionError: weights that are not positive, or do not add up to one to 1e-6.
    """
    att.only("mean-field attention")
    if tuple(weights.shape) != (att.samples, att.tokens):
        known = f"(samples, N), here {(att.samples, att.tokens)}"
        raise AttentionError(f"weights have shape {tuple(weights.shape)}; they must be {known}")
    if att.valid is not None:
        raise AttentionError("weighted tokens are without padding; give one att.unpadded(i)")
    weights = weights.double()
    if not bool((weights > 0).all()) or float((weights.sum(-1) - 1).abs().max()) > 1e-6:
        raise AttentionError("weights must be positive and add up to one for every sample")
    logs = weights.log()[:, None, None, :]
    mask = logs if att.mask is None else att.mask.double() + logs
    return att.at(att.x, mask=mask.to(att.dtype))


def weighted_norm(
    att: Attention,
    weights: Tensor,
    *,
    tol: float = 1e-4,
    delta: float | None = None,
    seed: int | Sequence[int] = 0,
) -> Norm:
    """Compute the exact local constant of every head on weighted tokens, in the weighted norm.

    It is a lower end of the mean-field one (Lemma C.5).

    Args:
        att, tol, delta, seed: as in `lipbound.spectral_norm`.
        weights: (samples, N), positive, adding up to one for every sample.

    Returns:
        The norms, (samples, heads).
    """
    root = weights.sqrt().to(att.dtype).repeat_interleave(att.heads, 0)[..., None]
    op = Between(HeadJacobian(weighted(att, weights)), root, 1 / root)  # D^(1/2) J D^(-1/2)
    seeds = sample_seeds(att.samples, seed)
    return operator_norm(op, tol=tol, delta=delta, seed=seeds).view(att.samples, att.heads)


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
    # decompositions are left to the CPU, on which many take less time than on a GPU
    factor = torch.linalg.qr(att.w_q.double().cpu(), mode="r").R.mT  # (heads, d, min(d, D))
    pairs = (v[..., :, None] * k[..., None, :]).flatten(-2)  # (samples, heads, N, d_v d)
    step = max(1, int(_CHUNK // (8 * att.samples * att.heads * att.d_v * att.d)))
    norms = []
    for i in range(0, att.tokens, step):
        rows = slice(i, i + step)
        moments = (p[..., rows, :] @ pairs).unflatten(-1, (att.d_v, att.d))
        c = att.scale * (moments - o[..., rows, :, None] * mean[..., rows, None, :])
        norms.append(torch.linalg.matrix_norm(c.cpu() @ factor[:, None], 2))
    return torch.cat(norms, -1).to(att.device)


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
