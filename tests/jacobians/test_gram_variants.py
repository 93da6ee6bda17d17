"""J J^T of heads with rotation, q/k-norm, caps and sinks: against dense Jacobians of the
definition, and what is made of it."""

from dataclasses import replace

import pytest
import torch
from support.layers import changed
from support.oracles import assembled, oracle
from support.variants import LINEAR, MASKS, layer
from torch import Tensor

import lipbound as lb
from lipbound.attention.reference import dense_jacobian
from lipbound.bounds.whole_layer_rules import RULES
from lipbound.errors import AttentionError, LipboundError
from lipbound.jacobians import gram as gram_module
from lipbound.jacobians.gram import Gram, VariantGram, gram_of
from lipbound.jacobians.rounding import tensor_error

SETS = [
    frozenset(has)
    for has in (
        (),
        *((v,) for v in LINEAR),
        ("rotation", "cap"),
        ("rotation", "norm", "sinks"),
        LINEAR,
    )
]


def two_norm(m: Tensor) -> float:
    return float(torch.linalg.matrix_norm(m, 2))


@pytest.mark.parametrize("tile", [2**23, 1500])
@pytest.mark.parametrize("has", SETS, ids=lambda has: "+".join(sorted(has)) or "plain")
def test_gram_is_the_product_of_autograd_jacobians(
    has: frozenset[str], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gram_module.TILE, "cpu", tile)
    for seed, mask in enumerate(MASKS if tile > 1500 else ("padded",)):
        att = layer(seed, has, mask=mask, n=4 if tile > 1500 else 6)
        for s in (0, 1) if mask == "padded" else (0,):
            g, j = VariantGram(att, s, 1), dense_jacobian(att, s, 1)
            reference = j @ j.mT
            size = two_norm(reference)
            off = two_norm(assembled(g) - reference)
            assert off <= 1e-12 * size
            assert off <= g.error + 1e-14 * size
            y = torch.randn(
                g.tokens,
                g.width,
                3,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(0),
            )
            image, apart = g.apply(y).flatten(0, 1), y.flatten(0, 1)
            torch.testing.assert_close(
                image, reference @ apart, rtol=0, atol=1e-12 * size * float(y.norm())
            )
            assert two_norm(image - assembled(g) @ apart) <= 2 * g.error * two_norm(apart)
            assert g.error < 1e-10 * size


@pytest.mark.parametrize("mask", MASKS)
def test_plain_heads_have_the_same_gram(mask: str) -> None:
    att = layer(1, frozenset(), mask=mask)
    for s in range(att.samples):
        mine, plain = VariantGram(att, s, 2), Gram(att, s, [2])
        assert two_norm(assembled(mine) - assembled(plain)) <= mine.error + plain.error
        assert type(gram_of(att, s, [2])) is Gram
        assert 0.1 * plain.error < mine.error < 10 * plain.error


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"n": 1},
        {"same": True},
        {"scale": 100.0},
        {"scale": 1e-3},
        {"n": 12, "d_v": 1},
        {"mask": "padded"},
        {"mask": "causal"},
    ],
    ids=str,
)
def test_enclosures_hold_and_close(inputs: dict) -> None:
    for seed, has in enumerate(SETS[-4:]):
        att = layer(seed, has, **inputs).select(slice(1, 2), slice(1))
        exact = oracle(att)
        slack = tensor_error(att) + 1e-13 * exact
        norm = lb.spectral_norm(att, method="deflation", tol=1e-6, vectors=True)
        assert bool((norm.lower <= exact + slack).all())
        assert bool((exact <= norm.upper + slack).all())
        assert bool((norm.upper <= norm.lower * (1 + 1e-6) + 4 * slack).all())
        assert norm.left is not None
        assert norm.left.shape == (1, 1, att.tokens, att.d_v)


def test_heads_with_their_output_projection() -> None:
    att = layer(2, frozenset(LINEAR), mask="padded")
    dense = lb.spectral_norm(att, map="head_out", method="dense")
    norm = lb.spectral_norm(att, map="head_out", method="deflation", tol=1e-7)
    assert bool(norm.converged.all())
    assert bool((norm.lower <= dense.upper).all() and (dense.lower <= norm.upper).all())


def test_float32_layers() -> None:
    att = layer(3, frozenset(LINEAR))
    single = att._map(lambda t: t.float() if t.is_floating_point() else t)
    torch.testing.assert_close(
        lb.spectral_norm(single, method="deflation", tol=1e-8).lower,
        oracle(single.double()),
        rtol=1e-8,
        atol=0,
    )


def test_whole_layers_are_known_by_their_heads_only() -> None:
    att = layer(4, frozenset({"rotation", "sinks"}), n=3).select(slice(1))
    for map, w_o in (("heads", None), ("layer", att.w_o)):
        with pytest.raises(
            AttentionError,
            match="rotary position embeddings and sink logits has a closed form one head at a "
            "time only; use map",
        ):
            gram_of(att, 0, [0, 1, 2], w_o)
        with pytest.raises(AttentionError, match="one head at a time only"):
            lb.spectral_norm(att, map=map, method="deflation")
        exact = lb.spectral_norm(att, map=map, method="dense").lower
        for rule in RULES:
            assert bool((lb.bounds.whole_layer(att, "lipbound", map=map, rule=rule) >= exact).all())


def test_probabilities_next_to_a_sink_whose_squares_underflow() -> None:
    att = layer(1, frozenset({"sinks"}))
    att = changed(att, sinks=torch.tensor([500.0, 0.0, 1e4], dtype=torch.float64))
    exact = oracle(att)
    assert 0 < float(exact[0, 0]) < 1e-150
    dense = lb.spectral_norm(att, method="dense")
    assert bool((dense.lower <= exact).all() and (exact <= dense.upper).all())
    for name in ("lipbound", "lipbound_block"):
        assert bool((lb.bounds.get(name)(att) >= exact * (1 - 1e-12)).all())
    with pytest.raises(LipboundError, match="underflow"):
        lb.spectral_norm(att, method="deflation")
    assert (
        lb.spectral_norm(att.select(heads=slice(2, 3)), method="deflation").upper.amax() <= 1e-280
    )


@pytest.mark.parametrize("together", [False, True])
def test_padding_where_a_normalisation_has_no_derivative(together: bool) -> None:
    att = layer(1, frozenset({"together" if together else "norm"}), mask="padded", biases=False)
    att = changed(att, norm_q=replace(att.norm_q, eps=0.0), norm_k=replace(att.norm_k, eps=0.0))
    exact = oracle(att)
    for name in ("lipbound", "lipbound_block"):
        value = lb.bounds.get(name)(att)
        assert bool(((value >= exact) & (value <= 3 * exact)).all())
    torch.testing.assert_close(
        lb.spectral_norm(att, method="deflation", tol=1e-7).upper, exact, rtol=1e-7, atol=0
    )
