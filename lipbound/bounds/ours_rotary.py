r"""`lipbound` and `lipbound_block` for heads with rotary position embeddings.

Token i's query and key pass through a linear map :math:`R_i` (`lipbound.rotation`). With rotated queries :math:`\hat q_i` and keys :math:`\hat k_j`
and the notation of `lipbound.bounds.ours`, the block of J from token j to output i is

.. math:: J_{ij} = P_{ij} W_V^T + A_i[:,j]\,\tilde q_{ij}^T + \delta_{ij} B_i, \qquad
    \tilde q_{ij} = c\,W_K R_j^T \hat q_i, \quad B_i = c\,C_i R_i W_Q^T, \quad C_i = A_i \hat K

since :math:`dS_{ij} = c\,(R_i W_Q^T dx_i)\cdot\hat k_j + c\,\hat q_i\cdot(R_j W_K^T dx_j)`. What was one vector :math:`\tilde q_i` for each output
now depends on j. With :math:`D_{ij} = |v_j - o_i|` and

.. math::
    X_{ik} &= P_{ik}\,\|B_k W_V\| + P_{ki}\,|B_i \tilde q_{ki}|\,D_{ki} + \sum_j P_{ij} D_{ij} |W_V^T \tilde q_{ij}| P_{kj} \\
    K_{ik} &= \min\big(\kappa_i \kappa_k,\ \sum_j P_{ij} D_{ij} P_{kj} D_{kj} |\tilde q_{ij}\cdot\tilde q_{kj}|\big), \qquad
    \kappa_i^2 = \big\|\sum_j |\tilde q_{ij}|^2 A_i[:,j] A_i[:,j]^T\big\|

the same compression gives :math:`\|J\|^2 \le \|E_0 + K\|`, :math:`E_0 = P P^T \|W_V\|^2 + \mathrm{diag}\,\|B_i\|^2 + X + X^T`.

*Proof.* As that of `lipbound.bounds.ours.lipbound`, block by block: (V,V), (Q,Q) and (V,Q) are unchanged; (Q,K) meets only j = i; (K,V) is
:math:`\sum_j A_i[:,j] (\tilde q_{ij}^T W_V) P_{kj}`, bounded by the triangle inequality; (K,K) is :math:`\sum_j (\tilde q_{ij}\cdot\tilde q_{kj})
A_i[:,j] A_k[:,j]^T`, at most the sum of its terms' norms, and at most :math:`\|J^K_i\| \|J^K_k\|` with :math:`J^K_i` the row
:math:`[A_i[:,j] \tilde q_{ij}^T]_j`, whose squared norm is :math:`\kappa_i^2`. QED The second branch of Theorem 2, and the factor
:math:`|A_i P_k|` in (K,V), need one :math:`\tilde q_i` for all j and are lost.

Cost per head: O(N^3 d + N^2 d (d + d_v)) operations, O(N^2 (d + d_v)) memory for some rows at a time. float64 throughout.
"""

import torch
from torch import Tensor

from lipbound.attention import Attention
from lipbound.linalg import block_norm, matrix_norm, nonnegative_norm
from lipbound.rotation import Rotation, turned

CHUNK = 2**22
"""Bytes of the largest temporary."""
RTOL = 1e-5
"""How far above the exact norms of N x N matrices their upper values may stay."""
SLACK = 1 + 1e-10
"""For the rounding of lengths and sums of non-negative terms in float64."""


def rotary(att: Attention, sample: int, heads: slice) -> Tensor:
    """Both bounds for some heads of one sample, (heads, 2)."""
    assert att.rotation is not None
    return torch.stack([_one(att, sample, h, att.rotation) for h in range(*heads.indices(att.heads))])


def _one(att: Attention, sample: int, h: int, rotation: Rotation) -> Tensor:
    p, q = att.p[sample, h].double(), att.q[sample, h].double()
    k, v = att.centred_k[sample, h], att.centred_v[sample, h]
    w_q, w_k, w_v = (w[h].double() for w in (att.w_q, att.w_k, att.w_v))
    c, n, o = att.scale, att.tokens, p @ v
    keyed, valued, mixed = _factor(w_k).mT, w_k.mT @ w_v, w_q.mT @ w_k
    norm_v = matrix_norm(w_v)
    distance = torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
    e = p * distance
    cos, sin = (t.double()[:, None] for t in (rotation.cos, rotation.sin))  # each token's map applies to a whole matrix of row vectors

    # Key by key: q~_ij for all i.
    length, image, inner = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    step = max(1, CHUNK // (8 * n * max(n, q.shape[1])))
    for j in range(0, n, step):
        part = slice(j, j + step)
        unturned = c * turned(q[None], cos[part], -sin[part])  # (j, i, d)
        image[:, part] = (unturned @ valued).norm(dim=-1).mT
        reached = unturned @ keyed  # q~_ij in coordinates of the columns of W_K
        length[:, part] = reached.norm(dim=-1).mT
        weighted = reached * e[:, part].mT[..., None]
        inner += (weighted @ weighted.mT).abs().sum(0)

    # Query by query: B_i and the second moments of the row's keys.
    b, b_v, kappa, b_q = p.new_zeros(n), p.new_zeros(n), p.new_zeros(n), torch.zeros_like(p)
    outer_norm = _factor(w_q).mT
    step = max(1, CHUNK // (8 * n * max(v.shape[1], q.shape[1])))
    for i in range(0, n, step):
        part = slice(i, i + step)
        a = p[part, :, None] * (v[None] - o[part, None, :])  # (i, j, d_v)
        cov = turned(c * a.mT @ k, cos[part], -sin[part])  # c C_i R_i, (i, d_v, d)
        b[part] = block_norm(cov @ outer_norm)
        b_v[part] = block_norm(cov @ (w_q.mT @ w_v))
        b_q[part] = (turned(cov @ mixed, cos[part], sin[part]) @ (c * q.mT)).norm(dim=-2)  # |B_i q~_ki|, (i, k)
        weighted = a * length[part, :, None]
        kappa[part] = block_norm(weighted.mT)

    block = nonnegative_norm((p * (norm_v + distance * length) + torch.diag_embed(b))[None], rtol=RTOL)[0]
    x = p * b_v[None, :] + p.mT * b_q * distance.mT + (e * image) @ p.mT
    keys = torch.minimum(kappa[:, None] * kappa[None, :], inner)
    squared = nonnegative_norm((p @ p.mT * norm_v**2 + torch.diag_embed(b**2) + x + x.mT + keys)[None], rtol=RTOL)[0]
    return torch.stack([squared.sqrt(), block]) * SLACK


def _factor(w: Tensor) -> Tensor:
    """F with F^T F = w^T w."""
    return torch.linalg.qr(w, mode="r").R if w.shape[0] > w.shape[1] else w
