r"""Sums over tokens of :math:`|\tilde q_{ij} \cdot \tilde q_{kj}|` for long heads with variants: inner products where terms are large, else lengths.

Proof: Lemma 118 (docs/theory/long_terms.md).
"""

import torch
from torch import Tensor

from lipbound.bounds.lipbound2026.parts import CHUNK
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import gamma

LARGEST = 32
"""How many tokens of a row have inner products."""


def inner_products(tangents: Tangents, kept: Tensor, q: Tensor, e: Tensor, length: Tensor, widths: int) -> Tensor:
    r"""Upper values of :math:`\sum_j E_{ij} E_{kj} |\tilde q_{ij} \cdot \tilde q_{kj}|` but for `positive_slack`, (N, N), float64.

    Args:
        tangents: of the head. kept: its tokens but for padding. q: c q_i, (N, d).
        e: E. length: upper values of :math:`|\tilde q_{ij}|`. (N, N). widths: of all numbers that a product of queries sees.
    """
    n, reach, size_q = len(q), e * length, q.norm(dim=-1)
    chosen = torch.zeros_like(e, dtype=torch.bool).scatter_(1, reach.topk(min(LARGEST, n), -1).indices, True)
    total = torch.where(chosen, 0.0, reach) @ reach.mT
    step, most = max(1, CHUNK // (8 * q.shape[1] ** 2)), max(1, CHUNK // (8 * n))
    for start in range(0, n, step):
        tokens = slice(start, min(start + step, n))
        products = tangents.product("k", "k", kept[tokens]).expand(tokens.stop - start, -1, -1)
        off = gamma(widths) * tangents.size("k", kept[tokens]).square().expand(tokens.stop - start)
        for j, product, lost in zip(range(start, tokens.stop), products, off, strict=True):
            for rows in chosen[:, j].nonzero()[:, 0].split(most):
                inner = (q[rows] @ product @ q.mT).abs_().addcmul_(lost * size_q[rows, None], size_q)
                inner = torch.minimum(inner, length[rows, j, None] * length[:, j])
                total[rows] += inner.mul_(e[rows, j, None] * e[:, j])
    return torch.minimum(total, total.mT)
