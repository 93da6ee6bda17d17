"""Parts of our bounds on heads with variants: never below what products with the maps of single tokens give, and hardly above, in float32 too."""

import pytest
import torch
from support import judge
from support.hard_heads import FAMILIES
from support.oracles import oracle
from support.variants import MASKS, layer
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.bounds.lipbound2026 import variant_forms, variant_inner, variant_maps, variants
from lipbound.bounds.lipbound2026.variant_forms import Covariances, Forms
from lipbound.bounds.lipbound2026.variant_maps import Maps
from lipbound.jacobians.token_tangents import Tangents

HAS = [(), ("rotation",), ("norm",), ("together", "cap"), ("sinks",), ("rotation", "norm"), ("rotation", "cap", "sinks")]


def direct(att: Attention, e: Tensor, cov: Tensor) -> tuple[Tensor, ...]:
    """`variant_maps.Parts` of all tokens of the first head, from the maps themselves: q~_ij is a vector of the layer's input."""
    tangents, tokens, q = Tangents(att, 0, 0), torch.arange(att.tokens), att.scale * att.q[0, 0]
    turned = tangents.pull("k", q.mT[None].expand(att.tokens, -1, -1), tokens)  # (j, D, i)
    w_v = att.w_v[0]
    inner = torch.einsum("ij,kj,jik->ik", e, e, (turned.mT @ turned).abs())
    steep = tangents.pull("q", cov.mT, tokens).mT  # B_i, (i, d_v, D)
    b, b_v = (torch.linalg.matrix_norm(m, 2) for m in (steep, steep @ w_v))
    return turned.norm(dim=1), (turned.mT @ w_v).norm(dim=-1), inner, b, b_v, (steep @ turned).norm(dim=1)


@pytest.mark.parametrize("work", [torch.float32, torch.float64])
@pytest.mark.parametrize("has", HAS)
def test_parts_are_those_of_the_maps(has: tuple[str, ...], work: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_maps, "reproducible_float32", lambda: work == torch.float32)
    att = layer(3, frozenset(has)).of_samples(slice(0, 1))
    g = torch.Generator().manual_seed(0)
    e = torch.rand(att.tokens, att.tokens, generator=g, dtype=torch.float64) ** 8
    cov = torch.randn(att.tokens, att.d_v, att.d, generator=g, dtype=torch.float64)
    maps, tokens = Maps(att, 0, 0, slice(None)), torch.arange(att.tokens)
    found = maps.parts(tokens, e.mT, maps.own(tokens, cov, cov.norm(dim=(1, 2))))
    for name, true in zip(found._fields, direct(att, e, cov), strict=True):
        value = getattr(found, name)
        largest = true.max()
        assert bool((value >= true - 1e-14 * largest).all()), name
        above = 2e-2 if name in ("b", "b_v") else 1e-9 + (2e-4 if work == torch.float32 else 0)  # norms of blocks are rounded upwards
        assert bool((value <= true * (1 + above) + above * 0.1 * largest).all()), name


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("has", HAS)
def test_forms_of_long_heads_are_those_of_the_maps(has: tuple[str, ...], whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_forms, "PAIR_BYTES", 2**28 if whole else 0)
    att = layer(3, frozenset(has), n=7).of_samples(slice(0, 1))
    t, k, v = att.weights[0, 0], att.centred_k[0, 0], att.centred_v[0, 0]
    o = att.p[0, 0] @ v
    forms, covariances = Forms(att, 0, 0, slice(None)), Covariances(2.0, v, k)
    cov, size_c = covariances.of(t, o)
    torch.testing.assert_close(cov, 2 * (t[..., None] * (v - o[:, None])).mT @ k)
    assert bool((size_c >= 2 * (t[..., None] * (v - o[:, None])).abs().mT.matmul(k.abs()).norm(dim=(1, 2)) * (1 - 1e-12)).all())
    found = forms.of(torch.arange(7), cov, size_c)
    assert found.inner is None
    for name, true in zip(found._fields, direct(att, t, cov), strict=True):
        value = getattr(found, name)
        if value is not None:
            largest = true.max()
            assert bool((value >= true - 1e-14 * largest).all()), name
            above = 2e-2 if name in ("b", "b_v") else 1e-9
            assert bool((value <= true * (1 + above) + 1e-5 * largest + above * 0.1 * largest).all()), name


@pytest.mark.parametrize("has", HAS[1:])
def test_float32_hardly_moves_the_bounds(has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    att = layer(5, frozenset(has))
    values = {}
    for narrow in (True, False):
        monkeypatch.setattr(variant_maps, "reproducible_float32", lambda narrow=narrow: narrow)
        values[narrow] = [bounds.get(name)(att.select(slice(None))) for name in ("lipbound", "lipbound_block")]
    for found, wide in zip(values[True], values[False], strict=True):
        assert bool((found >= wide * (1 - 1e-6)).all())
        assert bool((found <= wide * (1 + 2e-4)).all())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has", [("rotation",), ("rotation", "norm"), ("together", "cap"), ("sinks",)])
def test_what_a_mask_forbids_is_skipped_and_not_missed(has: tuple[str, ...], mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "CHUNK", 2 * 8 * 9 * 9)  # two tokens at a time
    att = layer(7, frozenset(has), mask=mask, n=9)
    few = bounds.evaluate(att, ["lipbound", "lipbound_block"])
    formed: list[int] = []

    def all_of_them(t: Tensor, step: int) -> list[tuple[slice, slice, slice]]:
        found = variants_seen(t, step)
        formed.extend([sum(rows.stop - rows.start for _, rows, _ in found), sum(keys.stop - keys.start for _, _, keys in found)])
        return [(part, slice(0, len(t)), slice(0, len(t))) for part, _, _ in found]

    variants_seen = variants.seen
    monkeypatch.setattr(variants, "seen", all_of_them)
    whole = bounds.evaluate(layer(7, frozenset(has), mask=mask, n=9), ["lipbound", "lipbound_block"])
    for name, value in whole.items():
        torch.testing.assert_close(few[name], value, rtol=1e-5, atol=0)  # sums of other lengths round otherwise
    if mask in ("causal", "window"):
        assert max(formed) < 5 * 9


def test_parts_and_what_they_see() -> None:
    t = torch.zeros(5, 5)
    t[1, 0] = t[2, 2] = t[4, 1] = t[4, 3] = 1
    assert variants.seen(t, 2) == [
        (slice(0, 2), slice(1, 5), slice(0, 1)), (slice(2, 4), slice(2, 5), slice(2, 3)), (slice(4, 5), slice(5, 5), slice(1, 4)),
    ]  # fmt: skip


@pytest.mark.parametrize("has", HAS)
def test_largest_terms_of_long_heads_have_inner_products(has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest have products of lengths; sums that leave out nothing are those of all pairs."""
    att = layer(3, frozenset(has), n=7).of_samples(slice(0, 1))
    e = torch.rand(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    length, _, inner, *_ = direct(att, e, torch.zeros(7, att.d_v, att.d, dtype=torch.float64))
    length, q, before = length.mT, att.scale * att.q[0, 0], (e * length.mT) @ (e * length.mT).mT
    monkeypatch.setattr(variant_inner, "CHUNK", 8 * 7 * 3)  # three rows at a time
    for count in (0, 1, 3, 7):
        monkeypatch.setattr(variant_inner, "LARGEST", count)
        found = variant_inner.sums_of(variant_inner.InnerProducts(att, Tangents(att, 0, 0), torch.arange(7), q), e, length)
        assert torch.equal(found, found.mT)
        assert bool((found >= inner * (1 - 1e-13)).all())
        assert bool((found <= before * (1 + 1e-13)).all())
        before = found
    torch.testing.assert_close(found, inner, rtol=1e-9, atol=1e-11)


@pytest.mark.each_value
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has", HAS[1:])
def test_lengths_take_the_place_of_inner_products_in_long_inputs(has: tuple[str, ...], mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    att = layer(4, frozenset(has), mask=mask, n=9)
    pairs = bounds.evaluate(att, ["lipbound", "lipbound_block"])
    monkeypatch.setattr(variants, "ALL_PAIRS", att.tokens - 1)
    monkeypatch.setattr(variant_forms, "FORM_BYTES", 8 * 40)  # two tokens at a time
    exact, found = oracle(att), {}
    for count in (0, 1, 9):
        monkeypatch.setattr(variant_inner, "LARGEST", count)
        found[count] = bounds.evaluate(layer(4, frozenset(has), mask=mask, n=9), ["lipbound", "lipbound_block"])
        torch.testing.assert_close(found[count]["lipbound_block"], pairs["lipbound_block"], rtol=1e-5, atol=0)  # it has no inner products
        assert bool((found[count]["lipbound"] >= exact).all())
    torch.testing.assert_close(found[9]["lipbound"], pairs["lipbound"], rtol=1e-3, atol=0)  # norms of small matrices are rounded upwards
    ratio, lengths = found[1]["lipbound"] / pairs["lipbound"], found[0]["lipbound"] / pairs["lipbound"]
    assert bool(((ratio >= 1 - 1e-5) & (ratio <= lengths * (1 + 1e-12)) & (lengths <= 1.5)).all())
    assert bool((lengths > 1.001).any())  # the two are not the same


@pytest.mark.parametrize("family", [name for name in sorted(FAMILIES) if judge.case(name, torch.float64, 0).variants])
def test_lengths_are_not_wrong_on_hard_heads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are known to 80 digits; nothing is allowed for rounding."""
    monkeypatch.setattr(variants, "ALL_PAIRS", 0)
    monkeypatch.setattr(variant_inner, "LARGEST", 2)
    att = judge.case(family, torch.float64, 0).select(slice(0, 2))
    verdicts = list(judge.judge(att, family, methods=(), chosen=["lipbound"], l2=False))
    assert verdicts
    wrong = [verdict for verdict in verdicts if verdict.miss > 0]
    assert not wrong, judge.summary(wrong)


@pytest.mark.parametrize("has", [("rotation",), ("rotation", "norm"), ("rotation", "cap", "sinks")])
def test_derivatives_of_long_heads(has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that are formed again for derivatives give those of terms that are kept, and these are what differences of values show."""
    monkeypatch.setattr(variants, "ALL_PAIRS", 0)
    monkeypatch.setattr(variant_inner, "LARGEST", 3)
    att = layer(4, frozenset(has), n=9)

    def slope() -> Tensor:
        x = att.x.clone().requires_grad_(True)
        return torch.autograd.grad(bounds.get("lipbound")(att.at(x)).sum(), x)[0]

    found = slope()
    monkeypatch.setattr(variant_inner, "checkpoint", lambda terms, *inputs, **options: terms(*inputs))
    torch.testing.assert_close(found, slope(), rtol=1e-12, atol=1e-12)

    y, step = torch.randn(att.x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1e-4
    values = [float(bounds.get("lipbound")(att.at((att.x + t * y).requires_grad_(True))).sum()) for t in (step, -step)]
    assert float((found * y).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=0.02)
