r"""`lipbound` and `lipbound_block` for heads with variants.

Rotary position embeddings, normalised queries, keys and values, capped scores or sinks. The
compression of `lipbound.bounds.ours.pairwise`, block by block, with a vector
:math:`\tilde q_{ij}` for each pair of tokens: Lemma 18 (docs/theory/bounds.md). Blocks of J as in
`lipbound.jacobians.token_tangents`.

Cost per head: O(N^3 d + N^2 d (d + d_v) + N d^3) operations, most of them inner products of
:math:`\tilde q_{ij}` and :math:`\tilde q_{kj}`, O(N^2 (d + d_v)) memory for some rows at a time.
Above `LONGEST` tokens `lipbound` is not computed: the exact norm is enclosed in a tenth of the time
and less.
"""

import torch
from torch import Tensor

from lipbound import devices
from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.variants import VARIANTS
from lipbound.bounds.ours import pairwise
from lipbound.bounds.ours.block_norms import CHUNK, RTOL, at_once, in_chunks, longest, root, seen
from lipbound.bounds.ours.pairwise import PARTS
from lipbound.bounds.ours.token_block_norms import VariantHead
from lipbound.devices import Routine
from lipbound.linalg.matrix_norms import UNIT, block_norm, gamma, nonnegative_routine

LONGEST = 1024
"""Tokens up to which inner products of q~_ij and q~_kj are formed, and with them `lipbound`; they
would take minutes a head beyond."""
BY_TOKENS = 2
"""Where the bounds in the norms of single tokens stand among those that are computed together: by
rows, then by columns."""


@memoised
def variant_bounds(att: Attention) -> Tensor:
    """Both bounds, and from `BY_TOKENS` on those where single tokens move, (samples, heads, 4).

    Lemma 97 (docs/theory/token_bounds.md). `lipbound` is infinite above `LONGEST` tokens, where its
    inner products are left out.
    """
    reach = [1.0, 1.0, att.tokens**0.5 * (1 + 4 * UNIT), 1.0]
    return in_chunks(att, _of_heads, reach)


_FEWER = PARTS | {"longest": lambda heads: min(LONGEST, longest(heads))}
pairwise.lipbound.extends(*VARIANTS, **_FEWER)(lambda att: variant_bounds(att)[..., 0])
pairwise.lipbound_block.extends(*VARIANTS, **PARTS)(lambda att: variant_bounds(att)[..., 1])


def _of_heads(att: Attention, heads: slice) -> Routine[Tensor]:
    """All four bounds for some heads of one sample, (heads, 4)."""
    every = (VariantHead(att, h) for h in range(*heads.indices(att.heads)))
    if not att.values_move:
        return torch.stack([_of_queries(head) for head in every])
    return torch.stack((yield from devices.together(*map(_of_head, every))))


def _of_head(head: VariantHead) -> Routine[Tensor]:
    """The bounds; for the memory of cross-attention without what tokens do as queries."""
    p, e, values = head.gate_factor * head.p, head.e, head.values()
    found = head.token_vectors(inner=len(head.kept) <= LONGEST)
    reach = e * found.length
    own = torch.diag_embed(found.b) if head.own_queries else torch.zeros_like(e)
    tokens = root(values**2 + 2 * p * e * found.image + reach**2) + own
    single = [tokens.sum(-1).amax(-1), root(tokens.square().sum(-2)).amax(-1)]
    compressed = [values + reach + own]
    if found.inner is not None:
        kappa = _key_norms(head, found.length)
        x = (e * found.image) @ p.mT
        if head.own_queries:
            x = x + p * found.b_v[None, :] + e.mT * found.b_q + own.square() / 2
        keys = torch.minimum(kappa[:, None] * kappa[None, :], found.inner)
        compressed.append(values @ values.mT + x + x.mT + keys)
    # of which the first is not square for the memory of cross-attention
    routines = (nonnegative_routine(t[None], rtol=RTOL) for t in compressed)
    norms = yield from devices.together(*routines)
    block, squared = torch.cat([*norms, torch.full_like(norms[0], torch.inf)])[:2]
    slack = gamma(10 * head.width + 200)
    return torch.stack([root(squared), block, *single]) * (head.unit * head.after * (1 + slack))


def _of_queries(head: VariantHead) -> Tensor:
    """The norm for the queries of cross-attention, four times: the largest of B_i."""
    n, size = len(head.kept), 8 * max(head.p.shape) * head.width
    step = max(1, at_once(CHUNK, head.p.device) // size)
    parts = [slice(i, min(i + step, n)) for i in range(0, n, step)]
    own = torch.cat([head.own(part, slice(None), squarings=4)[1] for part in parts])
    return own.amax().expand(4) * (head.unit * (1 + gamma(10 * head.width + 200)))


def _key_norms(head: VariantHead, length: Tensor) -> Tensor:
    r""":math:`\kappa_i`, the norms of :math:`\|[T_{ij} (v_j - o_i) |\tilde q_{ij}|]_j\|`, (N,)."""
    weights, n = head.t * length, max(length.shape)
    found = weights.new_zeros(len(weights))
    step = max(1, at_once(CHUNK, weights.device) // (8 * n * max(n, head.width)))
    for part, keys, _ in seen(head.t.mT, step):
        if keys.start < keys.stop:
            moved = weights[part, keys, None] * head.moved(part, keys)
            found[part] = block_norm(moved.mT)
    return found + gamma(6) * (head.e * length).detach().norm(dim=-1)
