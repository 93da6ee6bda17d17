"""How large the error is that rounding leaves in exact norms."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.base import Side
from lipbound.jacobians.maps import BLOCKS, WHOLE, block_bound
from lipbound.linalg.matrix_norms import matrix_norm


def rounding(att: Attention, *, map: str = "head") -> Tensor:
    r"""Size of the absolute error that rounding of q, k, v and P leaves in the norms of a layer, (samples, heads) or (samples,), float64.

    For one head :math:`\varepsilon\,\max_i|v_i|\,(\max_i|c W_K q_i| + \max_j|c W_Q k_j|)`, v and k centred and c = ``scale``
    (products of norms where there are rotations, normalised queries or keys, caps or sinks): the differences
    ``v_j - o_i`` of J cancel where attention saturates. To this comes the rounding of scores in float64, relative to
    :math:`\|W_V\|_F` and to the same product. For whole layers the heads' errors, times :math:`\|W_O^h\|` for "layer", add up. Far below the norm
    on ordinary heads; an estimate of size, not a bound.
    """

    def longest(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1).amax(-1).double()

    q, k, v = longest(att.q), longest(att.centred_k), longest(att.centred_v)
    if att.variants:
        gradient = abs(att.scale) * (q * _largest_slope(att, "k") + k * _largest_slope(att, "q"))
    else:
        gradient = abs(att.scale) * (longest(att.q @ att.w_k.mT) + longest(att.centred_k @ att.w_q.double().mT))
    error = torch.finfo(att.dtype).eps * gradient * v
    error = error + torch.finfo(torch.float64).eps * abs(att.scale) * q * k * (torch.linalg.matrix_norm(att.w_v.double()) + gradient * v)
    if map in WHOLE:
        total = (error if map == "heads" or att.w_o is None else error * matrix_norm(att.w_o)).sum(-1)
        return block_bound(att, total, map) - block_bound(att, torch.zeros_like(total), map) if map in BLOCKS else total
    return error


def _largest_slope(att: Attention, side: Side) -> Tensor:
    """How much a token's query or key can change with its token at most, about: ||W|| and what variants make of it, (samples, heads)."""
    size = matrix_norm(att.w_q if side == "q" else att.w_k).expand(att.samples, -1)
    for step in reversed(att.scoring.steps):
        size = step.stretch(side, size, att.x, lambda: att.projected(side), att.valid)
    return size


def tensor_error(att: Attention) -> Tensor:
    """Stand-in."""
    return 64 * rounding(att)
