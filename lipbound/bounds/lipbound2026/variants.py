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
from lipbound.bounds.lipbound2026.parts import CHUNK, RTOL, in_chunks, root
from lipbound.bounds.multihead import with_folded
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import UNIT, block_norm, gamma, matrix_norm, nonnegative_norm, power_of_two

ROWS = 2
"""Where the bounds in the norms of single tokens stand among those that are computed together: by rows, then by columns."""


@plain.lipbound.extends(*VARIANTS, condition=qty.always, layer=with_folded)
def _gram(att: Attention) -> Tensor:
    return together(att)[..., 0]


@plain.lipbound_block.extends(*VARIANTS, condition=qty.always, layer=with_folded)
def _block(att: Attention) -> Tensor:
    return together(att)[..., 1]


def together(att: Attention) -> Tensor:
    """All four bounds, (samples, heads, 4): both, and from `ROWS` on those where single tokens move, by Lemma 97 (docs/theory/token_bounds.md)."""
    return att.memo("lipbound and lipbound_block", lambda: in_chunks(att, variants, [1.0, 1.0, att.tokens**0.5 * (1 + 4 * UNIT), 1.0]))


def variants(att: Attention, sample: int, heads: slice) -> Tensor:
    """All four bounds for some heads of one sample, (heads, 4)."""
    return torch.stack([_one(att, sample, h) for h in range(*heads.indices(att.heads))])


def _one(att: Attention, sample: int, h: int) -> Tensor:
    keep: slice | Tensor = slice(None) if att.valid is None else att.valid[sample]  # the derivative of a norm at padding may be infinite
    kept = torch.arange(att.tokens, device=att.device)[keep]
    p, t = (w[sample, h][keep][:, keep] for w in (att.p, att.weights))
    q, k, v = att.q[sample, h][keep], att.centred_k[sample, h][keep], att.centred_v[sample, h][keep]
    tangents, c, n, o = Tangents(att, sample, h), att.scale, len(kept), p @ v
    unit = power_of_two(p.detach().amax())  # a sink may leave probabilities whose squares underflow; J is linear in P and T
    p, t = p / unit, t / unit
    norm_v, size_v = matrix_norm(att.w_v[h]), torch.linalg.matrix_norm(att.w_v[h].detach())
    e = t * torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
    size, length_k = (x.detach().norm(dim=-1) for x in (c * q, k))
    small = gamma(att.x.shape[2] + 6 * q.shape[1] + v.shape[1] + 40)  # of a product of two maps of one token, and of a vector with it

    # Key by key: q~_ij for all i.
    length, image, inner = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    step = max(1, CHUNK // (8 * n * max(n, q.shape[1])))
    for j in range(0, n, step):
        part = slice(j, j + step)
        s_k = tangents.size("k", kept[part]).detach().expand(len(kept[part]))
        reach = s_k[:, None] * size  # at least |q~_ij|, (j, i)
        image[:, part] = ((c * q @ tangents.product("k", "v", kept[part])).norm(dim=-1) + small * reach * size_v).mT  # |W_V^T q~_ij|
        metric = tangents.product("k", "k", kept[part])
        squares = ((c * q @ metric) * (c * q)).sum(-1).clamp_min(0) + small * reach**2
        length[:, part] = root(squares).mT
        weighted = e[:, part].mT[..., None] * (c * q)  # (j, i, d)
        tops = e.detach()[:, part].mT * reach
        inner += (weighted @ metric @ weighted.mT).abs().sum(0) + small * tops.mT @ tops

    # Query by query: B_i and the second moments of the row's keys.
    b, b_v, kappa, b_q = p.new_zeros(n), p.new_zeros(n), p.new_zeros(n), torch.zeros_like(p)
    step = max(1, CHUNK // (8 * n * max(v.shape[1], q.shape[1])))
    for i in range(0, n, step):
        part = slice(i, i + step)
        a = t[part, :, None] * (v[None] - o[part, None, :])  # (i, j, d_v)
        cov = c * a.mT @ k  # C_i, (i, d_v, d)
        size_c = abs(c) * e.detach()[part] @ length_k
        s_q = tangents.size("q", kept[part]).detach() * torch.ones_like(size_c)
        s_k = tangents.size("k", kept[part]).detach() * torch.ones_like(size_c)
        off = gamma(2 * n + att.x.shape[2] + 8 * q.shape[1] + v.shape[1] + 60) * size_c * s_q
        b[part] = root(block_norm(cov @ tangents.product("q", "q", kept[part]) @ cov.mT) + off * size_c * s_q)
        b_v[part] = block_norm(cov @ tangents.product("q", "v", kept[part])) + off * size_v
        b_q[part] = (cov @ tangents.product("q", "k", kept[part]) @ (c * q.mT)).norm(dim=-2) + (off * s_k)[:, None] * size  # |B_i q~_ki|, (i, k)
        kappa[part] = block_norm((a * length[part, :, None]).mT) + gamma(8) * (e * length).detach()[part].norm(dim=-1)

    squares = (p * norm_v) ** 2 + 2 * p * e * image + (e * length) ** 2
    tokens = root(squares) + torch.diag_embed(b)
    single = [tokens.sum(-1).amax(-1), root(tokens.square().sum(-2)).amax(-1)]
    block = nonnegative_norm((p * norm_v + e * length + torch.diag_embed(b))[None], rtol=RTOL)[0]
    x = p * b_v[None, :] + e.mT * b_q + (e * image) @ p.mT
    keys = torch.minimum(kappa[:, None] * kappa[None, :], inner)
    squared = nonnegative_norm((p @ p.mT * norm_v**2 + torch.diag_embed(b**2) + x + x.mT + keys)[None], rtol=RTOL)[0]
    return torch.stack([root(squared), block, *single]) * unit * (1 + gamma(10 * q.shape[1] + 200))
