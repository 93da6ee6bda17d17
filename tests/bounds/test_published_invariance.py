"""Published bounds at any scale: what leaves the formula as it is leaves the value, whatever
squares do on the way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import changed, random_attention
from support.strategies import examples, layers
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention

PUBLISHED = [
    name for name in bounds.names() if bounds.get(name).citation != bounds.get("lipbound").citation
]
WITH_ONES = ("yudin", "yudin_g1", "yudin_sqrt_n", "yudin_closed")
"""With a query bias they append a one to every token (Remark 2), which does not scale with them."""
MODERATE = {
    "inputs": ("plain", "duplicates", "pairs", "collinear", "tiny"),
    "weights": ("plain", "tied", "no_query", "rank_one_values"),
}
EXPONENTS = st.sampled_from([-55, -40, -20, -5, 5, 20, 40, 55])


def assert_same(value: Tensor, expected: Tensor, name: str) -> None:
    assert not bool(value.isnan().any()), name
    torch.testing.assert_close(
        value, expected, rtol=1e-9, atol=0, msg=lambda text: f"{name}: {text}"
    )


def shifted(att: Attention, s: float) -> Attention:
    """The same head in other units of its tokens: queries and keys, P and J stay as they are,
    values are in the new units too."""
    return changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s)


@examples(20)
@given(layers(**MODERATE), EXPONENTS)
def test_units_of_tokens_do_not_matter(att: Attention, exponent: int) -> None:
    """Of Kim's map, of degree two in W_Q, the value changes by the square; Specformer's value term
    is multiplied by ||X||_F^2."""
    s = 10.0**exponent
    other = shifted(att, s)
    ones, frobenius = att.b_q is not None, (att.x.norm(dim=(-1, -2)) ** 2)[:, None]
    n, norm_v = att.lengths[:, None], torch.linalg.matrix_norm(att.w_v, 2)
    for name in PUBLISHED:
        value, expected = bounds.get(name)(other), bounds.get(name)(att)
        if name in WITH_ONES and ones:
            assert not bool(value.isnan().any())
            continue
        if name == "kim":
            expected = expected / s / s
        if name == "specformer":
            term = n * (n + 1) * frobenius * norm_v
            expected = (expected - term) + s * s * term if exponent > 0 else expected
            if exponent < 0:
                assert bool((value <= expected * (1 + 1e-9)).all())
                continue
        assert_same(value, expected, name)


@examples(10)
@given(layers(torch.float32, **MODERATE), st.sampled_from([-18, -9, -3, 3, 9, 18]))
def test_units_of_tokens_do_not_matter_in_float32(att: Attention, exponent: int) -> None:
    """Against the same numbers in float64, in units in which nothing is large or small."""
    s = 10.0**exponent
    other = changed(
        att,
        **{
            key: torch.from_numpy(t.numpy().astype("float32"))
            for key, t in {
                "x": att.x.double() * s,
                "w_q": att.w_q.double() / s,
                "w_k": att.w_k.double() / s,
            }.items()
        },
    )
    plain = other.double()
    plain = changed(plain, x=plain.x / s, w_q=plain.w_q * s, w_k=plain.w_k * s)
    for name in PUBLISHED:
        value = bounds.get(name)(other)
        assert not bool(value.isnan().any())
        if name not in ("kim", "specformer") and not (name in WITH_ONES and att.b_q is not None):
            assert_same(value, bounds.get(name)(plain), name)


@examples(15)
@given(layers(**MODERATE), EXPONENTS)
def test_values_come_out_in_front(att: Attention, exponent: int) -> None:
    s = 10.0**exponent
    other = changed(att, w_v=att.w_v * s)
    for name in PUBLISHED:
        value, expected = bounds.get(name)(other), bounds.get(name)(att)
        # near the end of the range the one is infinite, the other not
        inside = expected.isfinite() & (expected.log10() + exponent < 300)
        assert_same(value[inside], expected[inside] * s, name)


@examples(15)
@given(layers(**MODERATE), st.integers(0, 10**6))
def test_order_of_tokens_and_number_of_heads_do_not_matter(att: Attention, seed: int) -> None:
    order = torch.randperm(att.tokens, generator=torch.Generator().manual_seed(seed))
    mask = None if att.mask is None else att.mask[..., order, :][..., order]
    other = changed(
        att, x=att.x[:, order], mask=mask, valid=None if att.valid is None else att.valid[:, order]
    )
    twice = {
        key: torch.cat([t, t])
        for key in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
        if (t := getattr(att, key)) is not None
    }
    mask = att.mask if att.mask is None or att.mask.ndim < 4 else torch.cat([att.mask, att.mask], 1)
    doubled = changed(att, **twice, mask=mask)
    for name in PUBLISHED:
        expected = bounds.get(name)(att)
        assert_same(bounds.get(name)(other), expected, name)
        assert_same(bounds.get(name)(doubled), torch.cat([expected, expected], 1), name)


@pytest.mark.parametrize("exponent", [-55, -40, 40, 55])
def test_no_sound_bound_is_no_number(exponent: int) -> None:
    att = random_attention("plain")
    other = shifted(att, 10.0**exponent)
    for name in PUBLISHED:
        value, sound = bounds.get(name)(other), bounds.get(name).sound(other)
        assert not bool((value.isnan() | (value <= 0))[sound].any()), name
    assert_same(bounds.get("castin")(other), bounds.get("castin")(att), "castin")


@pytest.mark.parametrize("exponent", [-55, 55])
def test_terms_are_fractions_at_any_scale(exponent: int) -> None:
    other = shifted(random_attention("plain"), 10.0**exponent)
    for name in PUBLISHED:
        terms = bounds.get(name).terms(other)
        if terms is not None:
            assert_same(sum(terms.values()), torch.ones(2, 3, dtype=torch.float64), name)


@pytest.mark.parametrize("exponent", [-55, 55])
def test_whole_layers_at_any_scale(exponent: int) -> None:
    att = random_attention("plain")
    other = shifted(att, 10.0**exponent)
    large = changed(att, w_o=att.w_o * 10.0**exponent)
    for rule in ("sum", "root_sum_square", "folded", "best"):
        expected = bounds.whole_layer(att, "yudin", rule=rule)
        assert_same(bounds.whole_layer(other, "yudin", rule=rule), expected, rule)
        assert_same(bounds.whole_layer(large, "yudin", rule=rule), expected * 10.0**exponent, rule)
