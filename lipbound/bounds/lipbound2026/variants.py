r"""`lipbound` and `lipbound_block` for heads with rotary position embeddings, normalised queries and keys, capped scores or sinks.

Whatever stands between token i and its query :math:`q_i` or key :math:`k_i` as they enter the scores, at a given input its derivative is a linear
map, :math:`D^q_i` or :math:`D^k_i` (d x D; `lipbound.jacobians.token_tangents`). A cap multiplies changes of score (i, j) by its slope :math:`g_{ij}
\in (0, 1]` (1 without a cap). With c = ``scale``, :math:`A_i[:,j] = P_{ij} g_{ij} (v_j - o_i)` and the notation of
`lipbound.bounds.lipbound2026.plain`, the block of J from token j to output i is

.. math:: J_{ij} = P_{ij} W_V^T + A_i[:,j]\,\tilde q_{ij}^T + \delta_{ij} B_i, \qquad
    \tilde q_{ij} = c\,D_j^{kT} q_i, \quad B_i = C_i D^q_i, \quad C_i = c\,A_i K

since :math:`ds_{ij} = c\,g_{ij} (k_j \cdot D^q_i dx_i + q_i \cdot D^k_j dx_j)` and :math:`do_i = \sum_j P_{ij} (ds_{ij} (v_j - o_i) + dv_j)`, the
latter with a sink too: its score does not change and its value is zero, so that rows of P sum to less than one and :math:`o_i = \sum_j P_{ij} v_j`
is no mean of values. Keys are centred unless there is a cap or a sink, values unless there is a sink.

What was one vector :math:`\tilde q_i` for each output now depends on j. With :math:`E_{ij} = P_{ij} g_{ij} |v_j - o_i|` and

.. math::
    X_{ik} &= P_{ik}\,\|B_k W_V\| + E_{ki}\,|B_i \tilde q_{ki}| + \sum_j E_{ij} |W_V^T \tilde q_{ij}| P_{kj} \\
    K_{ik} &= \min\big(\kappa_i \kappa_k,\ \sum_j E_{ij} E_{kj} |\tilde q_{ij}\cdot\tilde q_{kj}|\big), \qquad
    \kappa_i^2 = \big\|\sum_j |\tilde q_{ij}|^2 A_i[:,j] A_i[:,j]^T\big\|

the same compression gives :math:`\|J\|^2 \le \|E_0 + K\|`, :math:`E_0 = P P^T \|W_V\|^2 + \mathrm{diag}\,\|B_i\|^2 + X + X^T`, and
:math:`\|J\| \le \|[P_{ij} \|W_V\| + E_{ij} |\tilde q_{ij}|]_{ij} + \mathrm{diag}\,\|B_i\|\|`.

*Proof.* As that of `lipbound.bounds.lipbound2026.plain.lipbound`, block by block. Block (i, k) of :math:`J J^T` is the sum over j of the products of
the three terms of :math:`J_{ij}` with those of :math:`J_{kj}`. (V,V): :math:`\sum_j P_{ij} P_{kj} W_V^T W_V`. (Q,Q): :math:`\delta_{ik} B_i B_i^T`.
(V,Q) meets only j = k: :math:`P_{ik} W_V^T B_k^T`; (Q,K) only j = i: :math:`B_i \tilde q_{ki} A_k[:,i]^T`; each with its transpose. (K,V) is
:math:`\sum_j A_i[:,j] (\tilde q_{ij}^T W_V) P_{kj}`, bounded by the triangle inequality. (K,K) is :math:`\sum_j (\tilde q_{ij}\cdot\tilde q_{kj})
A_i[:,j] A_k[:,j]^T`, at most the sum of its terms' norms, and at most :math:`\|J^K_i\| \|J^K_k\|` with :math:`J^K_i` the row
:math:`[A_i[:,j] \tilde q_{ij}^T]_j`, whose squared norm is :math:`\kappa_i^2`. QED The second branch of Theorem 2, and the factor
:math:`|A_i P_k|` in (K,V), need one :math:`\tilde q_i` for all j and are lost.

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

SLACK = 1 + 1e-10
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
    return torch.stack([torch.where(squared < SMALLEST**2, block, squared.sqrt()), block]) * SLACK
