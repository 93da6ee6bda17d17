import itertools
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from singular_values import interlacing, singular_value
from support.checks import close, normal, refused
from support.strategies import examples

from lipbound.attention.softmax import (
    LARGEST_LP_NORM,
    g,
    jacobian_norm,
    largest_entry_norm,
    largest_jacobian_norm,
    splitting_bound,
)

REGIMES = ("random", "tie", "tied_rest", "uniform", "one_hot", "near_tie")


def rows(regime, n, spread, seed):
    """16 probability rows of one regime."""
    s = spread * normal(seed)(16, n)
    if regime == "tie":
        s[:, 0] = s[:, 1] = s.amax(-1) + 1
    if regime == "tied_rest":
        s[:, 1:] = s[:, 1:2]
    if regime == "uniform":
        s[:] = 0
    if regime == "one_hot":
        s[:, 0] = s.amax() + 40 * spread
    if regime == "near_tie":
        s[:, 1] = s[:, 0] + 1e-13
    return torch.softmax(s, -1)


@examples(200)
@given(st.sampled_from(REGIMES), st.integers(2, 40), st.floats(1e-4, 30), st.integers(0, 1000))
def test_enclosure_holds_the_dense_norm(regime, n, spread, seed):
    p = rows(regime, n, spread, seed)
    norm = jacobian_norm(p)
    q = p / p.sum(-1, keepdim=True)
    dense = torch.linalg.eigvalsh(torch.diag_embed(q) - q[..., :, None] * q[..., None, :])[..., -1]
    absolute = 3e-15 * n  # accuracy of the dense reference
    assert bool((norm.lower <= dense + absolute).all())
    assert bool((dense <= norm.upper + absolute).all())
    assert bool((norm.upper - norm.lower <= 1e-13 * norm.upper + 1e-300).all())
    # Theorem 4 of Yudin et al.: p_(1) >= g_1 >= sigma_1 >= p_(2)
    top = p.sort(-1, descending=True).values
    assert bool((norm.lower <= g(p) * (1 + 1e-13)).all())
    assert bool((g(p) <= top[:, 0] * (1 + 1e-13)).all())
    assert bool((top[:, 1] <= norm.upper * (1 + 1e-13)).all())


@pytest.mark.parametrize("a", [1e-3, 1e-8, 1e-16, 1e-100, 1e-290, 1e-310])
def test_relative_accuracy_near_one_hot(a):
    """Against 60 digits: a norm of 1e-310 is still enclosed to rounding."""
    rest = np.array([a, 0.7 * a, 1e-5 * a, 0.7 * a])
    with mpmath.workdps(400):
        q = [mpmath.mpf(float(x)) for x in rest]
        p1 = 1 - sum(q)
        low, high = max(q), p1 * (sum(q) + max(q))
        for _ in range(300):
            mid = (low + high) / 2
            above = p1 / (p1 - mid) - sum(x / (mid - x) for x in q) < 0
            low, high = (mid, high) if above else (low, mid)
        exact = low
        norm = jacobian_norm(torch.tensor([[1 - rest.sum(), *rest]], dtype=torch.float64))
        slack = 1e-13 if a > 1e-300 else 1e-12
        assert mpmath.mpf(float(norm.lower)) <= exact * (1 + slack)
        assert exact <= mpmath.mpf(float(norm.upper)) * (1 + slack)
        assert float(mpmath.mpf(float(norm.upper)) / exact) < 1 + 1e-12


def test_degenerate_rows():
    assert jacobian_norm(torch.ones(3, 1)).upper.tolist() == [0, 0, 0]
    assert float(jacobian_norm(torch.zeros(5)).upper) == 0  # padding
    assert float(jacobian_norm(torch.tensor([0.0, 1.0, 0.0])).upper) == 0
    assert jacobian_norm(torch.zeros(0, 4)).upper.shape == (0,)
    assert float(jacobian_norm(torch.full((8,), 0.125)).upper) == pytest.approx(0.125, rel=1e-12)


def test_g1_does_not_cancel_in_float32():
    z = torch.zeros(1, 100, dtype=torch.float64)
    z[0, 0] = 22.1
    p = torch.softmax(z, -1)
    naive = p.float().topk(2).values[0]
    # the printed form is no upper bound
    assert float(naive[0] * (1 - naive[0] + naive[1])) < 0.5 * float(jacobian_norm(p).lower)
    assert float(g(p.float())) == pytest.approx(float(g(p)), rel=1e-5)
    assert float(g(p)) >= float(jacobian_norm(p).lower)


def test_values_are_differentiable():
    z = normal()(3, 6).requires_grad_()
    for f in (g, largest_entry_norm):
        assert torch.autograd.gradcheck(lambda t, f=f: f(torch.softmax(t, -1)), z)


def test_largest_norm_is_the_maximum_over_rows():
    p = torch.stack([rows(regime, 16, 2.0, 1) for regime in REGIMES])
    p = torch.softmax(p.log() * 1.3, -1)
    close(largest_jacobian_norm(p), jacobian_norm(p).upper.amax(-1), 1e-14)
    padded = p.clone()
    padded[:, 8:] = 0
    close(largest_jacobian_norm(padded), jacobian_norm(p[:, :8]).upper.amax(-1), 1e-14)
    assert largest_jacobian_norm(torch.ones(2, 3, 1, 1)).tolist() == [[0, 0, 0], [0, 0, 0]]


@examples(150)
@given(st.sampled_from(REGIMES), st.integers(1, 12), st.floats(1e-4, 30), st.integers(0, 1000))
def test_all_singular_values_against_dense_ones(regime, n, spread, seed):
    p = rows(regime, n, spread, seed) if n > 1 else torch.ones(3, 1, dtype=torch.float64)
    q = p / p.sum(-1, keepdim=True)
    dense = torch.linalg.eigvalsh(torch.diag_embed(q) - q[..., :, None] * q[..., None, :]).flip(-1)
    for k in range(1, n + 1):
        found = singular_value(p, k)
        assert bool((dense[..., k - 1] <= g(p, k) * (1 + 1e-12) + 3e-15 * n).all())
        assert bool((found.lower <= found.upper).all())
        for end in (found.lower, found.upper):
            close(end, dense[..., k - 1].clamp_min(0), 1e-9, 3e-15 * n)


@examples(100)
@given(st.sampled_from(REGIMES), st.integers(2, 9), st.floats(1e-4, 30), st.integers(0, 1000))
def test_interlacing_holds(regime, n, spread, seed):
    slack = interlacing(rows(regime, n, spread, seed), 3 * n - 1)
    assert slack.shape == (16, 3 * n - 1)
    assert float(slack.min()) > -1e-13


def test_interlacing_would_notice():
    """The chain of other numbers than a softmax Jacobian's: g_1 without its second term is no
    bound."""
    p = torch.tensor([[0.4, 0.35, 0.25]], dtype=torch.float64)
    assert float(jacobian_norm(p).lower) > 0.4 * (1 - 0.4)
    slack = interlacing(p, 8)[0]
    values = []
    for k, entry in enumerate(p[0].tolist(), 1):
        values += [entry, float(g(p, k)), float(singular_value(p, k).upper)]
    values[-1] = 0.0
    expected = [(a - b) / a for a, b in itertools.pairwise(values)]
    np.testing.assert_allclose(slack.numpy(), expected, rtol=1e-12)


def test_orders_outside_the_row():
    p = rows("random", 4, 1.0, 0)
    for call, words in ((g, "k is 5"), (singular_value, "k is 5"), (interlacing, "has 1 to 11")):
        refused(partial(call, p, 12 if call is interlacing else 5), words)


# -- other norms -----------------------------------------------------------------------------------


def jacobian(p):
    """diag(p) - p p^T, p_i - p_i^2 as p_i times the sum of the others, from which
    nothing cancels."""
    off = p[..., :, None] * p[..., None, :] * (1 - torch.eye(p.shape[-1], dtype=p.dtype))
    return torch.diag_embed(off.sum(-1)) - off


def signs(n):
    """All vectors of n signs, (2^n, n)."""
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=torch.float64)


@examples(100)
@given(st.sampled_from(REGIMES), st.integers(2, 10), st.floats(1e-4, 30), st.integers(0, 1000))
def test_norms_by_enumeration(regime, n, spread, seed):
    """The image of every vector of signs: its largest entry, and the sum of its entries."""
    p = rows(regime, n, spread, seed)
    images = (jacobian(p / p.sum(-1, keepdim=True)) @ signs(n).T).abs()  # (rows, n, signs)
    largest, total = images.amax((-1, -2)), images.sum(-2).amax(-1)
    torch.testing.assert_close(largest_entry_norm(p), largest, rtol=1e-9, atol=1e-15)
    half, value = p.amax(-1) >= 0.5, splitting_bound(p)
    assert bool((total <= value + 1e-14).all())
    torch.testing.assert_close(value[half], total[half], rtol=1e-9, atol=1e-15)


def test_rows_that_saturate_keep_their_digits():
    """4 p (1 - p) near one-hot rows, and rows of padding."""
    p = torch.tensor(
        [[1 - 2.0**-40, 2.0**-40, 0.0], [1.0, 1e-200, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        dtype=torch.float64,
    )
    expected = torch.tensor([4 * 2.0**-40 * (1 - 2.0**-40), 4e-200, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(splitting_bound(p), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(2 * largest_entry_norm(p), expected, rtol=1e-12, atol=0)


def lp_length(x, power):
    """Length of each row in l_p, of entries whose powers would be out of range too."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    return largest[..., 0] * torch.linalg.vector_norm(x / largest, power, dim=-1)


@examples(50)
@given(
    st.sampled_from(REGIMES),
    st.integers(2, 8),
    st.floats(1e-2, 10),
    st.floats(1, 20),
    st.integers(0, 1000),
)
def test_no_change_exceeds_the_norm_in_any_lp(regime, n, spread, power, seed):
    """Vectors of every kind, and steps of power iteration in l_q from them, which only increase the
    quotient."""
    p = rows(regime, n, spread, seed)
    m, bound = jacobian(p), largest_entry_norm(p)
    assert bool((bound <= LARGEST_LP_NORM * (1 + 1e-14)).all())  # rows sum to one up to rounding
    y = normal(seed)(16, n)

    def powered(t, exponent):
        return t.sign() * (t.abs() / t.abs().amax(-1, keepdim=True).clamp_min(1e-300)) ** exponent

    for _ in range(20):
        image = (m @ y[..., None])[..., 0]
        limit = bound * lp_length(y, power) * (1 + 1e-12) + 1e-300
        assert bool((lp_length(image, power) <= limit).all())
        y = (m @ powered(image, power - 1)[..., None])[..., 0]
        y = powered(y, 1 / max(power - 1, 0.05))
