r"""`lipbound` and `lipbound_block` for heads with rotary position embeddings, normalised queries and keys, capped scores or sinks.

The compression of `lipbound.bounds.lipbound2026.plain`, block by block, with a vector :math:`\tilde q_{ij}` for each pair of tokens:
Lemma 18 (docs/theory/bounds.md). Blocks of J as in `lipbound.jacobians.token_tangents`.

Cost per head: O(N^3 d + N^2 d (d + d_v) + N d^3) operations, O(N^2 (d + d_v)) memory for some rows at a time. float64 throughout.
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants import VARIANTS
from lipbound.bounds import ingredients as qty
from lipbound.bounds.lipbound2026 import plain
from lipbound.bounds.lipbound2026.parts import CHUNK, RTOL, in_chunks
from lipbound.bounds.multihead import with_folded
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import SMALLEST, block_norm, matrix_norm, nonnegative_norm

LENGTH_SLACK = 1 + 1e-10
"""For the rounding of lengths and sums of non-negative terms in float64."""


@plain.lipbound.extends(*VARIANTS, condition=qty.always, layer=with_folded)
def _gram(att: Attention) -> Tensor:
    return _both(att)[..., 0]


@plain.lipbound_block.extends(*VARIANTS, condition=qty.always, layer=with_folded)
def _block(att: Attention) -> Tensor:
    return _both(att)[..., 1]


def _both(att: Attention) -> Tensor:
    """Both bounds, (samples, heads, 2)."""
    return att.memo("lipbound and lipbound_block", lambda: in_chunks(att, variants))


def variants(att: Attention, sample: int, heads: slice) -> Tensor:
    """Both bounds for some heads of one sample, (heads, 2)."""
    return torch.stack([_one(att, sample, h) for h in range(*heads.indices(att.heads))])


def _one(att: Attention, sample: int, h: int) -> Tensor:
    keep: slice | Tensor = slice(None) if att.valid is None else att.valid[sample]  # the derivative of a norm at padding may be infinite
    kept = torch.arange(att.tokens, device=att.device)[keep]
    p, t = (w[sample, h][keep][:, keep].double() for w in (att.p, att.weights))
    q, k, v = att.q[sample, h][keep].double(), att.centred_k[sample, h][keep], att.centred_v[sample, h][keep]
    tangents, c, n, o = Tangents(att, sample, h), att.scale, len(kept), p @ v
    norm_v = matrix_norm(att.w_v[h])
    e = t * torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")

    # Key by key: q~_ij for all i.
    length, image, inner = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    step = max(1, CHUNK // (8 * n * max(n, q.shape[1])))
    for j in range(0, n, step):
        part = slice(j, j + step)
        image[:, part] = (c * q @ tangents.product("k", "v", kept[part])).norm(dim=-1).mT  # |W_V^T q~_ij|
        reached = (c * q @ tangents.factor("k", kept[part])).expand(len(p[part]), -1, -1)  # (j, i, r), q~_ij up to an isometry for each j
        length[:, part] = reached.norm(dim=-1).mT
        weighted = reached * e[:, part].mT[..., None]
        inner += (weighted @ weighted.mT).abs().sum(0)

    # Query by query: B_i and the second moments of the row's keys.
    b, b_v, kappa, b_q = p.new_zeros(n), p.new_zeros(n), p.new_zeros(n), torch.zeros_like(p)
    step = max(1, CHUNK // (8 * n * max(v.shape[1], q.shape[1])))
    for i in range(0, n, step):
        part = slice(i, i + step)
        a = t[part, :, None] * (v[None] - o[part, None, :])  # (i, j, d_v)
        cov = c * a.mT @ k  # C_i, (i, d_v, d)
        b[part] = block_norm(cov @ tangents.factor("q", kept[part]))
        b_v[part] = block_norm(cov @ tangents.product("q", "v", kept[part]))
        b_q[part] = (cov @ tangents.product("q", "k", kept[part]) @ (c * q.mT)).norm(dim=-2)  # |B_i q~_ki|, (i, k)
        kappa[part] = block_norm((a * length[part, :, None]).mT)

    block = nonnegative_norm((p * norm_v + e * length + torch.diag_embed(b))[None], rtol=RTOL)[0]
    x = p * b_v[None, :] + e.mT * b_q + (e * image) @ p.mT
    keys = torch.minimum(kappa[:, None] * kappa[None, :], inner)
    squared = nonnegative_norm((p @ p.mT * norm_v**2 + torch.diag_embed(b**2) + x + x.mT + keys)[None], rtol=RTOL)[0]
    # a sink may leave probabilities whose squares underflow
    return torch.stack([torch.where(squared < SMALLEST**2, block, squared.sqrt()), block]) * LENGTH_SLACK
