"""Propositions of Castin et al. 2024 about steep inputs and far ones, against exact norms and the
dense oracle."""

import math
from functools import partial
from itertools import product

import castin_inputs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close, refused
from support.layers import causal, normal
from support.oracles import oracle
from support.strategies import examples

import lipbound as lb
from lipbound.analysis import adversarial_inputs
from lipbound.attention.layer import Attention


def layer(seed, *, width=7, d=4, heads=3, size=1.0, tokens=5):
    """A random layer without biases, one sample, float64."""
    draw = normal(seed)
    x, (w_q, w_k, w_v) = draw(1, tokens, width), (draw(heads, width, d) for _ in range(3))
    return Attention(x, size * w_q, w_k, w_v)


def single(att, x, h, mask=None):
    """One head at one input."""
    weights = (w[h][None] for w in (att.w_q, att.w_k, att.w_v))
    return Attention(x[None], *weights, scale=att.scale, mask=mask)


def test_steepness_is_that_of_the_big_matrix():
    att = layer(0)
    steep = adversarial_inputs.steepness(att)
    for h in range(att.heads):
        a = att.scale * att.w_q[h] @ att.w_k[h].mT
        values = torch.linalg.eigvals(a)
        real = values.real[values.imag.abs() < 1e-9]
        largest = max(float(-real.min()), float(real.max()) / 8)
        assert float(steep.gamma[h]) == pytest.approx(largest, rel=1e-9)
        u = steep.direction[h]
        close(a @ u, steep.eigenvalue[h] * u, atol=1e-9)
        assert float(u.norm()) == pytest.approx(1)


def test_steepness_without_real_eigenvalues():
    turn = torch.tensor([[[0.0, -1.0], [1.0, 0.0]]], dtype=torch.float64)
    eye, x = torch.eye(2, dtype=torch.float64)[None], torch.ones(1, 3, 3, dtype=torch.float64)
    with pytest.raises(lb.LipboundError, match="no real eigenvalue"):
        adversarial_inputs.steepness(Attention(x[..., :2], turn, eye, eye))
    wide, key = (torch.cat([w, torch.zeros_like(w[:, :1])], 1) for w in (turn, eye))
    steep = adversarial_inputs.steepness(Attention(x, wide, key, key))
    assert float(steep.gamma[0]) == float(steep.eigenvalue[0]) == 0


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 9),
    radius=st.floats(0.01, 6),
    size=st.floats(0.01, 3),
    masked=st.booleans(),
)
def test_lower_bound_holds_at_adversarial_inputs(seed, tokens, radius, size, masked):
    att = layer(seed, size=size)
    x = adversarial_inputs.adversarial_inputs(att, tokens, radius)
    lower = adversarial_inputs.lower_bound(att, tokens, radius)
    assert float(x.norm(dim=-1).amax()) <= radius * (1 + 1e-12)
    for h in range(att.heads):
        one = single(att, x[h], h, causal(tokens) if masked else None)
        exact = float(oracle(one)[0, 0])
        assert float(lower[h]) <= exact * (1 + 1e-9) + 1e-12
        assert exact <= float(lb.bounds.get("castin")(one)[0, 0]) * (1 + 1e-9)


def test_lower_bound_is_the_papers_for_identity_values():
    att = layer(3, width=4, d=4, heads=1)
    gamma = float(adversarial_inputs.steepness(att).gamma[0])
    plain = Attention(att.x, att.w_q, att.w_k, torch.eye(4, dtype=torch.float64)[None])
    n, radius = 12, 1.5
    assert float(adversarial_inputs.lower_bound(plain, n, radius)[0]) == pytest.approx(
        math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * radius**2 * gamma))
    )


def test_adversarial_growth_is_like_the_root_of_the_length():
    att = layer(1, size=4.0)
    lengths = [16, 64, 256]
    norms = []
    for n in lengths:
        x = adversarial_inputs.adversarial_inputs(att, n, 6.0)
        norms.append(float(lb.spectral_norm(single(att, x[0], 0)).lower))
    slope = math.log(norms[-1] / norms[0]) / math.log(lengths[-1] / lengths[0])
    assert 0.45 < slope < 0.55


@pytest.mark.parametrize("masked", [False, True])
def test_large_radius_limit_is_reached(masked):
    for seed in range(20):
        att = layer(seed, tokens=6)
        mask = causal(6) if masked else None
        plain = Attention(att.x, att.w_q, att.w_k, att.w_v, mask=mask)
        limit = castin_inputs.large_radius_limit(plain)
        radius = 60 / float(limit.gap.clamp(max=100).amin().sqrt())
        far = Attention(radius * att.x, att.w_q, att.w_k, att.w_v, mask=mask)
        torch.testing.assert_close(oracle(far), limit.norm, rtol=1e-3, atol=0)
        most = math.sqrt(6) * torch.linalg.matrix_norm(att.w_v, 2)
        assert bool((limit.norm <= most * (1 + 1e-12)).all())


def test_limit_of_padded_layers_counts_real_tokens():
    att = layer(2, tokens=6)
    valid = torch.tensor([[True] * 4 + [False] * 2])
    padded = Attention(att.x, att.w_q, att.w_k, att.w_v, valid=valid)
    short = Attention(att.x[:, :4], att.w_q, att.w_k, att.w_v)
    found = map(castin_inputs.large_radius_limit, (padded, short))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_one_token_attends_to_itself():
    att = layer(4, tokens=1)
    limit = castin_inputs.large_radius_limit(att)
    torch.testing.assert_close(limit.norm, torch.linalg.matrix_norm(att.w_v, 2)[None])
    assert bool(torch.isinf(limit.gap).all())


def test_quadratic_growth():
    att = layer(5)
    rate, n = castin_inputs.quadratic_direction(att)[1], 9
    for radius in (4.0, 64.0):
        x = castin_inputs.quadratic_inputs(att, n, radius)
        for h in range(att.heads):
            floor = radius**2 * (1 - 1 / n) * float(rate[h])
            floor -= float(torch.linalg.matrix_norm(att.w_v[h], 2)) / n
            exact = float(oracle(single(att, x[h], h))[0, 0])
            assert floor * (1 - 1e-9) <= exact
            assert radius < 10 or exact < 1.1 * floor
    refused(lambda: castin_inputs.quadratic_inputs(att, 4, 1.0), "odd number")


@examples(30)
@given(seed=st.integers(0, 10**6), size=st.floats(0.001, 2))
def test_crossover_length_is_where_the_bounds_meet(seed, size):
    att = layer(seed, size=size, heads=1)
    logs = float(adversarial_inputs.crossover_length(att)[0, 0])
    a = torch.linalg.matrix_norm(att.scale * att.w_q[0] @ att.w_k[0].mT, 2)
    t = float(a * att.x.norm(dim=-1).amax() ** 2)
    left = math.log(1 + 3 * t) + 2 * t
    if logs < 300:
        n = 10**logs
        assert left == pytest.approx(0.5 * math.log(3 * (t**2 * (4 * n + 1) + n)), rel=1e-6)


# -- attacks: each head's result is its own --------------------------------------------------------


def padded():
    """Three heads at three inputs of 6 tokens, the second input padded."""
    draw = normal(0, torch.float32)
    tensors = 2 * draw(3, 6, 8), *(2 * draw(3, 8, 4) for _ in range(3))
    valid = torch.arange(6) < torch.tensor([6, 4, 6])[:, None]
    return Attention(*tensors, valid=valid)


@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_a_head_is_attacked_the_same_whatever_stands_beside_it(ball):
    """Exactly: other heads, other samples and padding change no number."""
    att = padded()
    found = partial(adversarial_inputs.attack, radius=0.5, ball=ball, steps=3, starts=9)
    together = found(att)
    for s, h in product(range(3), (0, 2)):
        alone = found(att.select(slice(s, s + 1), slice(h, h + 1)))
        close(alone.norm[0, 0], together.norm[s, h])
    close(found(att.unpadded(1)).norm[0], together.norm[1])
    first = att.select(slice(0, 1), slice(0, 1)).double().at(together.x[0, :1].double())
    close(lb.spectral_norm(first, tol=1e-9).lower[0, 0], together.norm[0, 0], 1e-5)


def test_seeds_differ_and_repeat():
    att = padded().select(slice(0, 1))
    found = partial(adversarial_inputs.attack, att, 2.0, steps=1, starts=12)
    first, again, other = (found(seed=seed).norm for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
