"""Parts of our bounds on heads with variants: never below what products with the maps of single
tokens give, and hardly above, in float32 too."""

import pytest
import torch
from support.variants import MASKS, layer
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.bounds.ours import pairwise_variants, token_block_norms
from lipbound.bounds.ours.token_block_norms import VariantHead
from lipbound.errors import LipboundError
from lipbound.jacobians.token_tangents import Tangents

HAS = [
    (),
    ("rotation",),
    ("norm",),
    ("together", "cap"),
    ("sinks",),
    ("rotation", "norm"),
    ("rotation", "cap", "sinks"),
]


def pull(tangents: Tangents, a: str, y: Tensor, tokens: Tensor) -> Tensor:
    """Vectors y (n, d_a, r) of queries or keys brought back to their tokens, (n, D, r)."""
    g, y = tangents._direction(a, tokens), tangents.turned(a, y.mT, tokens).mT
    w = tangents._w[a]
    return w @ y if g is None else w @ y[:, :-1] + g[..., None] * y[:, -1:]


def direct(att: Attention, e: Tensor, cov: Tensor) -> dict[str, Tensor]:
    """`token_block_norms.TokenVectors` of all tokens of the first head, from the maps themselves:
    q~_ij is a vector of the layer's input."""
    tangents, tokens, q = Tangents(att, 0, 0), torch.arange(att.tokens), att.scale * att.q[0, 0]
    turned = pull(tangents, "k", q.mT[None].expand(att.tokens, -1, -1), tokens)  # (j, D, i)
    w_v = att.w_v[0]
    inner = torch.einsum("ij,kj,jik->ik", e, e, (turned.mT @ turned).abs())
    steep = pull(tangents, "q", cov.mT, tokens).mT  # B_i, (i, d_v, D)
    b, b_v = (torch.linalg.matrix_norm(m, 2) for m in (steep, steep @ w_v))
    return {
        "length": turned.norm(dim=1).mT,
        "image": (turned.mT @ w_v).norm(dim=-1).mT,
        "inner": inner,
        "b": b,
        "b_v": b_v,
        "b_q": (steep @ turned).norm(dim=1),
    }


@pytest.mark.parametrize("has", HAS)
def test_parts_are_those_of_the_maps(has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    att = layer(3, frozenset(has)).of_samples(slice(0, 1))
    g = torch.Generator().manual_seed(0)
    e = torch.rand(att.tokens, att.tokens, generator=g, dtype=torch.float64) ** 8
    cov = torch.randn(att.tokens, att.d_v, att.d, generator=g, dtype=torch.float64)
    head, every = VariantHead(att, 0), slice(0, att.tokens)
    monkeypatch.setattr(head, "covariances", lambda rows, keys: cov[rows])
    monkeypatch.setattr(head, "by_query", lambda rows: cov[rows].norm(dim=(1, 2)))
    found = head.vectors(every, every, head.queries(every, every, squarings=1), e)
    for name, true in direct(att, e, cov).items():
        value = getattr(found, name)
        largest = true.max()
        assert bool((value >= true - 1e-14 * largest).all()), name
        # norms of blocks are rounded upwards; roots of what rounding leaves of squares
        above = 2e-2 if name in ("b", "b_v") else 1e-6
        assert bool((value <= true * (1 + above) + above * 0.1 * largest).all()), name


@pytest.mark.parametrize("has", HAS)
def test_covariances_are_those_of_their_definition(has: tuple[str, ...]) -> None:
    att = layer(3, frozenset(has), n=7).of_samples(slice(0, 1))
    head = VariantHead(att, 0)
    t, k, v = att.weights[0, 0] / head.unit, att.centred_k[0, 0], att.centred_v[0, 0]
    a = t[..., None] * (v - (att.p[0, 0] @ v)[:, None])
    torch.testing.assert_close(head.covariances(slice(None)), att.scale * a.mT @ k)
    sizes = abs(att.scale) * a.abs().mT.matmul(k.abs()).norm(dim=(1, 2))
    sizes = sizes * Tangents(att, 0, 0).size("q", torch.arange(7))
    assert bool((head.by_query(slice(None)) >= sizes * (1 - 1e-12)).all())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "has", [("rotation",), ("rotation", "norm"), ("together", "cap"), ("sinks",)]
)
def test_what_a_mask_forbids_is_skipped_and_not_missed(
    has: tuple[str, ...], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_block_norms, "CHUNK", 2 * 8 * 9 * 9)  # two tokens at a time
    att = layer(7, frozenset(has), mask=mask, n=9)
    few = bounds.evaluate(att, ["lipbound", "lipbound_block"])
    formed: list[int] = []

    def all_of_them(t: Tensor, step: int) -> list[tuple[slice, slice, slice]]:
        found = plain_seen(t, step)
        formed.extend(
            [
                sum(rows.stop - rows.start for _, rows, _ in found),
                sum(keys.stop - keys.start for _, _, keys in found),
            ]
        )
        return [(part, slice(0, len(t)), slice(0, len(t))) for part, _, _ in found]

    plain_seen = token_block_norms.seen
    monkeypatch.setattr(token_block_norms, "seen", all_of_them)
    whole = bounds.evaluate(
        layer(7, frozenset(has), mask=mask, n=9), ["lipbound", "lipbound_block"]
    )
    for name, value in whole.items():
        # sums of other lengths round otherwise
        torch.testing.assert_close(few[name], value, rtol=1e-5, atol=0)
    if mask in ("causal", "window"):
        assert max(formed) < 5 * 9


def test_parts_and_what_they_see() -> None:
    t = torch.zeros(5, 5)
    t[1, 0] = t[2, 2] = t[4, 1] = t[4, 3] = 1
    assert token_block_norms.seen(t, 2) == [
        (slice(0, 2), slice(1, 5), slice(0, 1)),
        (slice(2, 4), slice(2, 5), slice(2, 3)),
        (slice(4, 5), slice(5, 5), slice(1, 4)),
    ]


@pytest.mark.parametrize("has", HAS[1:])
def test_long_heads_have_all_bounds_but_the_one_with_inner_products(
    has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    att = layer(4, frozenset(has), n=9)
    short = bounds.evaluate(att, ["lipbound_block"])["lipbound_block"]
    monkeypatch.setattr(pairwise_variants, "LONGEST", 8)
    att = layer(4, frozenset(has), n=9)
    torch.testing.assert_close(bounds.get("lipbound_block")(att), short, rtol=1e-6, atol=0)
    with pytest.raises(
        LipboundError,
        match=r"'lipbound' is computed up to 8 tokens of such heads, and there are 9; take "
        r"exact_upper",
    ):
        bounds.get("lipbound")(att)
