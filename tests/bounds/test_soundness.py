"""No sound bound below the norm: of thousands of random, degenerate and adversarial heads by dense
norms, and as bounds are printed, of the given numbers, by many digits."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from support import mp_oracle
from support.checks import close, normal, normal_layer
from support.judge import below
from support.layers import changed, random_attention
from support.oracles import allowance, dense_norms, encloses
from support.strategies import MODERATE, examples, layers, part

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.attention.variants.rotary import Rotation
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm

OURS = ("lipbound", "lipbound_block")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def check(att, exact, exact_l2, slack=1e-9):
    """``slack``: rounding of the references, relative."""
    for name in bounds.names():
        bound = bounds.get(name)
        value, sound = bound(att), bound.sound(att)
        assert value.shape == sound.shape == exact.shape
        assert not bool(value.isnan().any()), name
        reference = exact if bound.map == "head" else exact_l2
        assert bool((~sound | (value >= reference * (1 - slack))).all()), name


@examples(100)
@given(layers())
def test_no_sound_bound_is_below_the_dense_norm(att):
    """100 shapes x 60 heads."""
    check(att, dense_norms(att), dense_norms(att, "l2"))


@examples(12)
@given(layers(torch.float32, **MODERATE))
def test_no_sound_bound_is_below_the_float32_norm(att):
    """12 shapes x 60 heads."""
    check(att, spectral_norm(att, tol=1e-5).lower, l2_spectral_norm(att, tol=1e-5).lower)


@examples(50)
@given(layers())
def test_certified_enclosures_hold_the_dense_norm(att):
    """50 shapes x 60 heads: every norm enclosed, and to the width asked for."""
    norm = spectral_norm(att, tol=1e-6, delta=1e-10)
    dense, tiny = spectral_norm(att, method="dense"), allowance(att)
    exact = (dense.lower + dense.upper) / 2  # the same P: rounding of huge scores moves P itself
    assert bool((norm.converged | (tiny > 1e-7 * norm.lower)).all())
    assert bool(((norm.lower <= dense.upper) & (dense.lower <= norm.upper)).all())
    # elsewhere little is known of P, and the middle of the dense ends is nothing to compare with
    known = tiny < 0.1 * norm.lower
    part = replace(norm, lower=norm.lower[known], upper=norm.upper[known])
    assert encloses(part, exact[known], 1e-6, tiny[known])


# -- ours against the norm in 80 digits ------------------------------------------------------------


@pytest.mark.parametrize("sharp", [1.0, 30.0, 1e3, 1e6])
def test_saturated_float32_heads(sharp):
    for seed in range(part(8, 2)):
        att = random_attention("biases", seed, torch.float32).select(slice(0, 1), slice(0, 1))
        w_q, w_k, w_v = (w[:, :3] for w in (att.w_q, att.w_k, att.w_v))
        x = att.x[:, :4, :3]
        att = changed(att, x=x, w_q=sharp * w_q, w_k=w_k, w_v=w_v, w_o=None)
        norm = mp_oracle.norm(att)
        assert not any(below(float(value), norm) for value in bounds.evaluate(att, OURS).values())


def test_scores_beyond_what_can_be_resolved():
    """One token, whose score does not matter; the other head is as it was."""
    att = random_attention("plain").select(slice(0, 1), slice(0, 2))
    att = changed(att, x=att.x[:, :1])
    size = torch.tensor([1e50, 1.0], dtype=torch.float64)[:, None, None]
    there = changed(att, w_q=att.w_q * size, w_k=att.w_k * size)
    for name in OURS:
        value = bounds.get(name)(there)
        assert float(value[0, 0]) >= float(torch.linalg.matrix_norm(att.w_v[0], 2))
        close(value[:, 1], bounds.get(name)(att)[:, 1])


def nearly_nothing(case):
    """Layers with ordinary norms, some of whose numbers have squares that underflow."""
    if case.startswith("rotary scores"):
        att = normal_layer(0, 8, 6, 4)
        turn = Rotation.of_angles(torch.arange(8)[:, None] * torch.tensor([1.0, 0.1]))
        return changed(att, w_q=att.w_q * float(case.split()[-1]), rotation=turn)
    att = normal_layer(0, 3, 4, 4)
    x, mask = att.x, torch.zeros(3, 3, dtype=torch.float64)
    if case.endswith("mask"):
        mask = -400 * (torch.arange(3)[:, None] - torch.arange(3)).abs().double()
        return changed(att, mask=mask, cap=5.0 if case == "capped mask" else None)
    if case == "zero key":
        x[0, 0], x[0, 2], mask[0, 1:] = 0, -x[0, 1], -400
        return changed(att, mask=mask)
    x[0, 0] *= 1e-170
    turn = Rotation.of_angles(normal(1)(3, 2))
    return changed(att, rotation=turn if case == "rotary tiny token" else None)


NEARLY = ("capped mask", "plain mask", "zero key", "tiny token", "rotary tiny token")
NEARLY += tuple(f"rotary scores {size}" for size in (30, 100, 200, 300, 600))


@pytest.mark.parametrize("case", NEARLY)
def test_what_nearly_vanishes_leaves_bounds_finite(case):
    att = nearly_nothing(case)
    exact = float(spectral_norm(att, method="dense").lower)
    for recorded in (False, True):
        x = att.x.clone().requires_grad_(recorded)
        for name in OURS:
            assert exact <= float(bounds.get(name)(att.with_parts(x=x))) <= 2 * exact


@DTYPES
@pytest.mark.parametrize("width", [40, 640, 1000])
def test_one_token_and_a_sink_with_wide_values(width, dtype):
    """J = p (1 + (1 - p) c) w for the logit c: known without a decomposition, and our bound is it
    but for rounding."""
    w = torch.full((width,), 2.0**-13.51, dtype=torch.float64)
    w[:7] = 7**-0.5
    w, one = w.to(dtype), torch.ones(1, 1, 1, dtype=dtype)
    length = math.fsum(float(t) ** 2 for t in w) ** 0.5

    def att(logit):
        w_v = w.view(1, 1, -1)
        return Attention(one, 0 * one, one, w_v, b_q=logit[None], scale=1.0, sinks=logit)

    for logit in (0.5, 1.0, 3.0):
        exact = 0.5 * length * (1 + 0.5 * logit)
        for value in bounds.evaluate(att(torch.tensor([logit], dtype=dtype)), OURS).values():
            assert exact <= float(value) <= exact * (1 + 5e-5)
