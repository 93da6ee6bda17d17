"""The oracle of 80 digits against float64 decompositions of autograd Jacobians, and against itself
in more digits."""

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from support import hard_heads, judge, mp_oracle
from support.layers import changed
from support.oracles import dense_norms, oracle
from support.variants import MASKS, VARIANTS, layer

from lipbound.attention.layer import Attention
from lipbound.attention.variants.qk_norm import QKNorm

COMBINATIONS = [
    frozenset(has)
    for size in range(5)
    for has in itertools.combinations(VARIANTS, size)
    if not {"norm", "together"} <= set(has)
    and not {"values", "latent"} <= set(has)
    and (size < 4 or not {"values", "latent", "gate"} & set(has))
]


def agree(att: Attention, exact: torch.Tensor, map: str = "head") -> None:
    for row, values in zip(mp_oracle.norms(att, map), exact.view(att.samples, -1), strict=True):
        assert [norm.value for norm in row] == pytest.approx(values.tolist(), rel=1e-12)
        assert all(norm.width < 2e-14 for norm in row)


def test_plain_heads_and_l2_attention(att: Attention) -> None:
    att = att.select(slice(1, 2))  # of "padded" the sample that is
    agree(att, oracle(att))
    agree(att, dense_norms(att, "l2"), "l2")


FEW = [has for has in COMBINATIONS if len(has) < 3]
SOME = tuple(hard_heads.FAMILIES)[::2]


@pytest.mark.each_value(has=FEW)
@pytest.mark.parametrize("has", COMBINATIONS, ids=lambda has: "-".join(sorted(has)) or "plain")
def test_variants(has: frozenset[str]) -> None:
    seed = COMBINATIONS.index(has)
    att = layer(seed, has, mask=MASKS[seed % len(MASKS)], samples=1, heads=2, n=4)
    agree(att, oracle(att))


def test_normalisation_without_eps() -> None:
    att = layer(3, frozenset({"norm"}), samples=1, heads=2, n=4)
    att = changed(att, norm_q=QKNorm(att.norm_q.gain, att.norm_q.bias, 0.0), norm_k=None)
    agree(att, oracle(att))


@pytest.mark.parametrize("map", ["head_out", "heads", "layer"])
def test_maps_with_output_projection(map: str) -> None:
    att = layer(2, frozenset({"rotation", "sinks"}), mask="padded", samples=2, heads=2, n=4)
    agree(att, oracle(att, map), map)


def test_equal_singular_values_are_enclosed() -> None:
    """Uniform attention to all tokens alike, repeated values: the closed form |W_V|."""
    eye = torch.eye(3, dtype=torch.float64)[None]
    norm = mp_oracle.norm(Attention(torch.zeros(1, 4, 3, dtype=torch.float64), eye, eye, 3 * eye))
    assert norm.lower <= 3 <= norm.upper
    assert norm.width < 2e-14


def test_numbers_beyond_float64() -> None:
    """A sink takes all but e^-800 of the probability."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(Attention(0 * one, one, one, one, sinks=torch.tensor([800.0]).double()))
    with mp_oracle.exactly(600):
        expected = 1 / (1 + Decimal(800).exp())
        assert norm.lower <= expected <= norm.upper
        assert norm.upper / norm.lower - 1 < Decimal("1e-20")
    assert norm.value == 0.0


@pytest.mark.each_value(family=SOME)
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_errors_are_upper_values(family: str) -> None:
    """Each entry in 80 digits is as near that in 160 as is said; hard heads lose digits where
    others do not."""
    att = judge.case(family, torch.float64, 1)
    with mp_oracle.exactly(80):
        rough = mp_oracle.differentiated(att, 0, 0, "head")
    with mp_oracle.exactly(160):
        fine = mp_oracle.differentiated(att, 0, 0, "head")
        assert max(abs(rough.jacobian - fine.jacobian).flat) <= rough.error
        assert fine.error < rough.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_are_known_to_many_digits(dtype: torch.dtype) -> None:
    """Of every family, whatever its size: no comparison hangs on the oracle's own width."""
    for family in hard_heads.FAMILIES:
        norm = mp_oracle.norm(judge.case(family, dtype, 2))
        assert norm.lower <= norm.upper
        assert norm.width < 2e-14 or norm.upper < Decimal("1e-330")
        assert not math.isnan(norm.value)


@pytest.mark.each_value(family=SOME)
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_a_step_of_1e_minus_60(family: str) -> None:
    """Differences of outputs in 200 digits along a random direction, on heads where float64 cannot
    tell; what is differentiated is compared with autograd above."""
    g = torch.Generator().manual_seed(3)
    att = hard_heads.FAMILIES[family](g, torch.float64).unpadded(0)
    size = Decimal(float(att.x.abs().max()) or 1.0)
    direction = torch.randint(-8, 9, att.x[0].shape, generator=g) * 1.0
    with mp_oracle.exactly(200):
        x, along = mp_oracle.exact(att.x[0]), mp_oracle.exact(direction)
        step = size.scaleb(-60)
        ahead, behind = (
            mp_oracle.differentiated(att, 0, 0, "head", x=x + way * step * along).outputs
            for way in (1, -1)
        )
        expected = (ahead - behind) / (2 * step)
    with mp_oracle.exactly(80):
        found = mp_oracle.differentiated(att, 0, 0, "head")
        away = abs(np.tensordot(found.jacobian, along, ([2, 3], [0, 1])) - expected)
        most = mp_oracle.norm(att).upper * Decimal("1e-30") + 1000 * found.error
        assert max(away.flat) <= most


def test_one_unit_in_the_last_place_is_a_miss() -> None:
    """One token, values times 3: the norm is 3."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(Attention(one, one, one, 3 * one))
    assert judge.above(3.0, norm) == judge.below(3.0, norm) == 0
    assert 0 < judge.above(math.nextafter(3.0, 4.0), norm) < 1e-15
    assert 0 < judge.below(math.nextafter(3.0, 2.0), norm) < 1e-15
    worst = judge.above(math.nan, norm), judge.below(math.nan, norm), judge.below(0.0, norm)
    assert worst == (math.inf,) * 3
    assert judge.below(math.inf, norm) == judge.above(0.0, norm) == 0


def test_a_variant_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp_oracle, "KNOWN", mp_oracle.KNOWN - {"cap"})
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="does not know"):
        mp_oracle.norm(Attention(one, one, one, one, cap=1.0))
