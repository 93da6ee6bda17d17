"""Derivatives of bounds: against differences, at kinks, and where rows saturate."""

import math

import pytest
import torch
from support import layers
from support.checks import gradients, normal, normal_layer, refused, slopes
from support.hard_heads import sink_token
from support.layers import HARD, changed, random_attention
from support.variants import layer

import lipbound as lb
from lipbound.bounds.ours import block_norms, pairwise, pairwise_variants
from lipbound.linalg import matrix_norms

OURS = ("lipbound", "lipbound_block")
PUBLISHED = [name for name in lb.bounds.names() if name not in OURS]
TOKENS = [
    name
    for norm in ("every-token", "one-token")
    for name in lb.bounds.names(norm)
    if lb.bounds.get(name).differentiable
]


@pytest.fixture
def tight(monkeypatch):
    """Values that are smooth enough for differences: norms to 1e-12, products in float64."""
    for module in (block_norms, pairwise, pairwise_variants):
        monkeypatch.setattr(module, "RTOL", 1e-12)
    monkeypatch.setattr(matrix_norms, "reproducible_float32", lambda: False)


KINDS = ("plain", "biases", "causal", "padded", "flat", "one_token", "wide_values")
TURNED = ("rotation", "cap", "rotation cap")
COVERED = [(kind, name) for kind in KINDS for name in (*PUBLISHED, *TOKENS)]
WITH_VARIANTS = [name for name in PUBLISHED if "rotation" in lb.bounds.get(name).covers]
COVERED += [(has, name) for has in TURNED for name in WITH_VARIANTS]


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(("kind", "name"), COVERED)
def test_bounds_of_papers_and_in_norms_of_tokens(kind, name):
    bound = lb.bounds.get(name)
    att = layer(0, frozenset(kind.split())) if kind in TURNED else random_attention(kind)
    if bound(att).isinf().any():  # the mean-field bound of steep heads: smaller ones have a number
        att = changed(att, w_q=0.01 * att.w_q)
    exact, difference = slopes(bound, att, 1e-6)
    assert exact == pytest.approx(difference, rel=1e-4, abs=1e-8 * float(bound(att).sum()))


def smooth_heads(att, name):
    """How many heads are at smooth points of a bound of ours; there derivatives are right to
    1e-4."""
    size = 1e-2 * lb.bounds.get(name)(att).flatten()
    exact, coarse, fine = slopes(lb.bounds.get(name), att, 1e-5, 1e-6)
    size = torch.maximum(fine.abs(), size)
    smooth = (coarse - fine).abs() <= 1e-5 * size
    assert bool(torch.isfinite(exact).all())
    assert bool(((exact - fine).abs() <= 1e-4 * size)[smooth].all())
    return int(smooth.sum())


LONGER = "longer"
"""A case where the value stops long before the vector has converged."""
MIXED = ("norm", "together cap", "rotation cap sinks")


@pytest.mark.usefixtures("tight")
@pytest.mark.each_value(case=(*HARD, *MIXED, LONGER))
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("case", [*layers.KINDS, *MIXED, "rotation", "sinks", LONGER])
def test_our_bounds(case, name):
    att = normal_layer(0, 40, 12, 4, heads=2)
    att = changed(att, w_q=0.3 * att.w_q)
    if case != LONGER:
        plain = case in layers.KINDS
        att = random_attention(case, 5) if plain else layer(3, frozenset(case.split()))
    assert smooth_heads(att, name) >= (2 if case == LONGER else 4)


def extreme(case, dtype):
    """Layers at which formulas divide by nothing."""
    what, _, size = case.partition(" ")
    if what == "sink":
        att = layer(7, frozenset({"sinks"}))
        return changed(att, sinks=torch.full((3,), float(size), dtype=torch.float64))
    if what == "key":
        return sink_token(12, torch.float64, float(size))
    kinds = ("sharp", "duplicates", "no_query")
    att = random_attention(what if what in kinds else "plain", dtype=dtype)
    other = {
        "equal": {"x": torch.ones_like(att.x)},
        "saturated": {"w_q": 300 * att.w_q},
        "one_hot": {"w_q": 1e5 * att.w_q},
        "zero": {"x": 0 * att.x, "w_v": 0 * att.w_v},
        "no_values": {"w_v": 0 * att.w_v},
    }
    return changed(att, **other.get(what, {}))


PLAIN = ("sharp", "duplicates", "no_query", "equal", "saturated", "zero", "one_hot", "no_values")
SINKS = tuple(f"sink {size}" for size in (30, 100, 800, 1e4))
KEYS = tuple(f"key {pull}" for pull in (10, 100, 1e4))


@pytest.mark.parametrize("name", [*PUBLISHED, *OURS, *TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_are_finite_where_bounds_are(dtype, name):
    bound = lb.bounds.get(name)
    for case in (*PLAIN, *(SINKS + KEYS if name in OURS and dtype == torch.float64 else ())):
        att = extreme(case, dtype)
        value, found = gradients(bound, att)
        # what is finite in float64 alone has derivatives beyond the range of float32
        if bool(torch.isfinite(1e6 * value.sum().to(dtype))):
            assert all(bool(torch.isfinite(t).all()) for t in found.values()), case
        assert bool(torch.isfinite(value).all()) or name in PUBLISHED, case


@pytest.mark.parametrize("name", ["castin", "castin_c3", "yudin", "yudin_sqrt_n", "yudin_closed"])
def test_at_a_kink_the_derivative_is_that_of_one_side(name):
    """Two tokens of the same length, farther out than all others: moving one of them outwards is
    seen in full, or not at all."""
    x = torch.zeros(1, 4, 3, dtype=torch.float64)
    x[0, 0, 0], x[0, 1, 1], x[0, 2, 2], x[0, 3, 2] = 2.0, 2.0, 0.3, -0.4
    w, step = torch.eye(3, dtype=torch.float64)[None], 1e-6
    att = lb.Attention(x, w, w, w)
    found = gradients(lb.bounds.get(name), att)[1]["x"]
    for token in (0, 1):
        along = torch.zeros_like(x)
        along[0, token, token] = step
        back, value, ahead = (
            float(lb.bounds.get(name)(changed(att, x=x + t * along))) for t in (-1, 0, 1)
        )
        sides = sorted(((ahead - value) / step, (value - back) / step))
        slope = float(found[0, token, token])
        assert sides[0] - 1e-4 * value <= slope <= sides[1] + 1e-4 * value


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", OURS)
def test_derivatives_at_ties_are_along_a_top_pair(name):
    """Two groups of tokens that do not see each other, alike: the norm is the larger of two equal
    ones."""
    alone, bound = normal_layer(0, 3, 5, 2), lb.bounds.get(name)
    apart = torch.kron(torch.eye(2), torch.ones(3, 3)) == 0
    both = changed(
        alone,
        x=torch.cat([alone.x, alone.x], 1),
        mask=torch.zeros(6, 6, dtype=torch.float64).masked_fill(apart, -math.inf),
    )
    move = normal(1)(*both.x.shape)
    along = float((gradients(bound, both)[1]["x"] * move).sum())

    def at(step):
        with torch.enable_grad():
            return float(bound(changed(alone, x=(alone.x + step).requires_grad_())).detach())

    single = [(at(1e-6 * part) - at(-1e-6 * part)) / 2e-6 for part in move.split(3, 1)]
    assert min(single) - 1e-5 <= along <= max(single) + 1e-5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda att: lb.bounds.over_ball(att, 0.1), ()),
        (lambda att: lb.bounds.get("yudin").over_ball(att, 0.1), ()),
        (lambda att: lb.bounds.get("dasoulas")(changed(att, sinks=torch.zeros(3).double())), ()),
        (lb.bounds.get("lipbound_every"), ("'lipbound_every'", "take 'lipbound_every_block'")),
    ],
)
def test_bounds_without_derivatives_say_so(call, words):
    att = random_attention("plain")
    att = changed(att, w_q=att.w_q.requires_grad_())
    refused(lambda: call(att), "no derivatives", *words)
    with torch.no_grad():
        assert bool(torch.isfinite(call(att)).all())
