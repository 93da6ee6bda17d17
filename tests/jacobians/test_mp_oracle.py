"""The oracle of 80 digits against float64 decompositions of autograd Jacobians, and against itself in more digits."""

import itertools
import math
from decimal import Decimal

import pytest
import torch
from support import hard_heads, judge, mp_oracle
from support.layers import changed
from support.oracles import dense_norms, jacobians, oracle
from support.variants import MASKS, VARIANTS, layer

from lipbound.attention.layer import Attention
from lipbound.attention.variants.base import REGISTERED, Variant
from lipbound.attention.variants.qk_norm import QKNorm

COMBINATIONS = [frozenset(has) for size in range(5) for has in itertools.combinations(VARIANTS, size) if not {"norm", "together"} <= set(has)]


def agree(att: Attention, exact: torch.Tensor, map: str = "head", within: float = 1e-12) -> None:
    for row, expected in zip(mp_oracle.norms(att, map), exact.tolist(), strict=True):
        for norm, value in zip(row, expected if isinstance(expected, list) else [expected], strict=True):
            assert norm.value == pytest.approx(value, rel=within)
            assert norm.width < 2e-14


def test_plain_heads(att: Attention) -> None:
    agree(att, oracle(att))


@pytest.mark.parametrize("has", COMBINATIONS, ids=lambda has: "-".join(sorted(has)) or "plain")
def test_variants(has: frozenset[str]) -> None:
    seed = COMBINATIONS.index(has)
    att = layer(seed, has, mask=MASKS[seed % len(MASKS)], samples=1, heads=2, n=4)
    agree(att, oracle(att))


def test_normalisation_without_eps() -> None:
    att = layer(3, frozenset({"norm"}), samples=1, heads=2, n=4)
    assert att.norm_q is not None
    att = changed(att, norm_q=QKNorm(att.norm_q.gain, att.norm_q.bias, 0.0), norm_k=None)
    agree(att, oracle(att))


def test_l2_attention(att: Attention) -> None:
    agree(att, dense_norms(att, "l2"), "l2")


@pytest.mark.parametrize("map", ["head_out", "heads", "layer"])
def test_maps_with_output_projection(map: str) -> None:
    att = layer(2, frozenset({"rotation", "sinks"}), mask="padded", samples=2, heads=2, n=4)
    assert att.w_o is not None
    expected = []
    for s in range(att.samples):
        j = jacobians(att, s)  # (n, heads, d_v, n D)
        projected = torch.einsum("nhvx,hvo->hnox", j, att.w_o)
        rows = {"head_out": projected.flatten(1, 2), "heads": j.flatten(0, 2)[None], "layer": projected.sum(0).flatten(0, 1)[None]}[map]
        expected.append(torch.linalg.svdvals(rows)[:, 0])
    agree(att, torch.stack(expected), map)


def test_equal_singular_values_are_enclosed() -> None:
    """Uniform attention to all tokens alike, repeated values: the closed form |W_V|."""
    eye = torch.eye(3, dtype=torch.float64)[None]
    norm = mp_oracle.norm(Attention(torch.zeros(1, 4, 3, dtype=torch.float64), eye, eye, 3 * eye))
    assert norm.lower <= 3 <= norm.upper
    assert norm.width < 2e-14


def test_numbers_beyond_float64() -> None:
    """A sink takes all but e^-800 of the probability."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(Attention(0 * one, one, one, one, sinks=torch.tensor([800.0], dtype=torch.float64)))
    with mp_oracle.exactly(600):
        expected = 1 / (1 + Decimal(800).exp())
        assert norm.lower <= expected <= norm.upper
        assert norm.upper / norm.lower - 1 < Decimal("1e-20")
    assert norm.value == 0.0


@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_errors_are_upper_values(family: str) -> None:
    """The enclosure of 80 digits holds that of 300; hard heads lose digits where others do not."""
    att = hard_heads.FAMILIES[family](torch.Generator().manual_seed(1), torch.float64)
    for sample in range(2):
        with mp_oracle.exactly(80):
            rough = mp_oracle.differentiated(att, sample, 0, "head")
        with mp_oracle.exactly(300):
            fine = mp_oracle.differentiated(att, sample, 0, "head")
            assert max(abs(rough.jacobian - fine.jacobian).flat) <= rough.error
            assert fine.error < rough.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_are_known_to_many_digits(dtype: torch.dtype) -> None:
    """Of every family, whatever its size: no comparison hangs on the oracle's own width."""
    for make in hard_heads.FAMILIES.values():
        norm = mp_oracle.norm(make(torch.Generator().manual_seed(2), dtype))
        assert norm.lower <= norm.upper
        assert norm.width < 2e-14 or norm.upper < Decimal("1e-330")
        assert not math.isnan(norm.value)


def test_one_unit_in_the_last_place_is_a_miss() -> None:
    """One token, values times 3: the norm is 3."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(Attention(one, one, one, 3 * one))
    assert judge.above(3.0, norm) == judge.below(3.0, norm) == 0
    assert 0 < judge.above(math.nextafter(3.0, 4.0), norm) < 1e-15
    assert 0 < judge.below(math.nextafter(3.0, 2.0), norm) < 1e-15
    assert judge.above(math.nan, norm) == judge.below(math.nan, norm) == judge.below(0.0, norm) == math.inf
    assert judge.below(math.inf, norm) == judge.above(0.0, norm) == 0


def test_a_variant_that_is_not_known_is_refused() -> None:
    class Alibi(Variant):
        name = title = "alibi"
        stage, place = 2, 9

    one = torch.ones(1, 1, 1, dtype=torch.float64)
    try:
        with pytest.raises(AssertionError, match="does not know"):
            mp_oracle.norm(Attention(one, one, one, one, steps=[Alibi()]))
    finally:
        REGISTERED.remove(Alibi)
