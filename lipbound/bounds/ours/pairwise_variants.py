r"""`lipbound` and `lipbound_block` for heads with rotary position embeddings, normalised queries
and keys, capped scores or sinks.

The compression of `lipbound.bounds.ours.pairwise`, block by block, with a vector
:math:`\tilde q_{ij}` for each pair of tokens: Lemma 18 (docs/theory/bounds.md). Blocks of J as in
`lipbound.jacobians.token_tangents`.

Cost per head: O(N^3 d + N^2 d (d + d_v) + N d^3) operations, most of them inner products of
:math:`\tilde q_{ij}` and :math:`\tilde q_{kj}`, O(N^2 (d + d_v)) memory for some rows at a time.
Above `LONGEST` tokens `lipbound` is not computed: the exact norm is enclosed in a tenth of the time
and less. Most products are in float32, their rounding allowed for; where derivatives are wanted
they are in float64.
"""

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.variants import VARIANTS
from lipbound.bounds import conditions
from lipbound.bounds.ours import pairwise
from lipbound.bounds.ours.block_norms import CHUNK, RTOL, in_chunks, longest
from lipbound.bounds.ours.rounded_products import TINIEST, root, scaled_lengths, seen
from lipbound.bounds.ours.token_block_norms import Covariances, Maps, TokenVectors
from lipbound.bounds.whole_layer_rules import with_folded
from lipbound.devices import Room
from lipbound.linalg.matrix_norms import (
    UNIT,
    block_norm,
    gamma,
    matrix_norm,
    nonnegative_norm,
    power_of_two,
)

LONGEST = 1024
"""Tokens up to which inner products of q~_ij and q~_kj are formed, and with them `lipbound`; they
would take minutes a head beyond."""
ROWS = 2
"""Where the bounds in the norms of single tokens stand among those that are computed together: by
rows, then by columns."""


@pairwise.lipbound.extends(
    *VARIANTS,
    condition=conditions.always,
    layer=with_folded,
    longest=lambda heads: min(LONGEST, longest(heads)),
)
def _gram(att: Attention) -> Tensor:
    return together(att)[..., 0]


@pairwise.lipbound_block.extends(
    *VARIANTS, condition=conditions.always, layer=with_folded, longest=longest
)
def _block(att: Attention) -> Tensor:
    return together(att)[..., 1]


@memoised
def together(att: Attention) -> Tensor:
    """All four bounds, (samples, heads, 4): both, and from `ROWS` on those where single tokens
    move, by Lemma 97 (docs/theory/token_bounds.md).

    `lipbound` is infinite above `LONGEST` tokens, where its inner products are left out.
    """
    reach = [1.0, 1.0, att.tokens**0.5 * (1 + 4 * UNIT), 1.0]
    return in_chunks(att, variants, reach)


def variants(att: Attention, sample: int, heads: slice) -> Tensor:
    """All four bounds for some heads of one sample, (heads, 4)."""
    room = Room()
    return torch.stack([_one(att, sample, h, room) for h in range(*heads.indices(att.heads))])


def _one(att: Attention, sample: int, h: int, room: Room) -> Tensor:
    keep: slice | Tensor = (
        slice(None) if att.valid is None else att.valid[sample]
    )  # the derivative of a norm at padding may be infinite
    kept = torch.arange(att.tokens, device=att.device)[keep]
    p, t = (w[sample, h][keep][:, keep] for w in (att.p, att.weights))
    k, v = att.centred_k[sample, h][keep], att.centred_v[sample, h][keep]
    c, o = abs(att.scale), p @ v
    unit = power_of_two(
        p.detach().amax()
    )  # a sink may leave probabilities whose squares underflow; J is linear in P and T
    p, t = p / unit, t / unit
    norm_v = matrix_norm(att.w_v[h])
    e = t * torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
    maps = Maps(att, sample, h, keep)
    found, kappa = _of_tokens(maps, kept, Covariances(c, v, k, room), t, e, v, o)

    reach = e * found.length
    squares = (p * norm_v) ** 2 + 2 * p * e * found.image + reach**2
    tokens = root(squares) + torch.diag_embed(found.b)
    single = [tokens.sum(-1).amax(-1), root(tokens.square().sum(-2)).amax(-1)]
    block = nonnegative_norm((p * norm_v + reach + torch.diag_embed(found.b))[None], rtol=RTOL)[0]
    squared = block.new_tensor(torch.inf)
    if found.inner is not None:
        x = p * found.b_v[None, :] + e.mT * found.b_q + (e * found.image) @ p.mT
        keys = torch.minimum(kappa[:, None] * kappa[None, :], found.inner)
        squared = nonnegative_norm(
            (p @ p.mT * norm_v**2 + torch.diag_embed(found.b**2) + x + x.mT + keys)[None], rtol=RTOL
        )[0]
    return torch.stack([root(squared), block, *single]) * unit * (1 + gamma(10 * maps.width + 200))


def _of_tokens(
    maps: Maps, kept: Tensor, covariances: Covariances, t: Tensor, e: Tensor, v: Tensor, o: Tensor
) -> tuple[TokenVectors, Tensor]:
    """`TokenVectors` of all tokens t, lengths as (i, t), and kappa, (N,).

    Some tokens at a time: q~_it for all i that see t as a key, B_t where it is the query. What a
    mask forbids is left at zero.
    """
    n = len(kept)
    inner = torch.zeros_like(t) if n <= LONGEST else None
    step = max(1, CHUNK // (8 * n * max(n if n <= LONGEST else 1, maps.width)))
    parts = seen(t, step)
    length, image, b_q = (torch.zeros_like(t) for _ in range(3))
    b, b_v = t.new_zeros(n), t.new_zeros(n)
    for part, rows, keys in parts:
        own = maps.own(kept[part], *covariances.of(t[part, keys], o[part], keys))
        b[part], b_v[part] = own.b, own.b_v
        if rows.start == rows.stop:
            continue
        found = maps.parts(kept[part], e[rows, part].mT if inner is not None else None, own, rows)
        length[rows, part], image[rows, part], b_q[part, rows] = (
            found.length.mT,
            found.image.mT,
            found.b_q,
        )
        if inner is not None and found.inner is not None:
            inner[rows, rows] += found.inner
    reach, kappa = e * length, t.new_zeros(n)
    for part, _, keys in (each for each in parts if each[2].start < each[2].stop):
        size = scaled_lengths(reach[part])
        weight = (t[part, keys] * length[part, keys] / size.clamp_min(TINIEST))[..., None]
        kappa[part] = (
            block_norm((weight * (v[None, keys] - o[part, None, :])).to(maps.work).mT)
            + gamma(6, maps.work)
        ) * size[:, 0]
    return TokenVectors(length, image, inner, b, b_v, b_q), kappa
