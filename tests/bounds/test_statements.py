"""Every bound against its statement, written out naively with dense matrices, and the conditions
under which it is sound."""

import math
from functools import partial

import mpmath as mp
import numpy as np
import pytest
import torch
from support.checks import close, normal, refused
from support.layers import HARD, causal, changed, places, random_attention
from support.oracles import dense_norms

from lipbound import bounds, devices
from lipbound.attention.layer import Attention
from lipbound.bounds.papers.kim2021 import inverse_phi
from lipbound.devices import finished
from lipbound.jacobians.spectral_norm import l2_spectral_norm
from lipbound.linalg import covariance
from lipbound.linalg.covariance import weighted_deviation_norm


def norm(m):
    return float(torch.linalg.matrix_norm(m.double(), 2))


def longest(m):
    """The largest length of a row."""
    return ((m * m).sum(-1) ** 0.5).max()


def norm_in_digits(m):
    gram = m.T @ m if m.shape[1] <= m.shape[0] else m @ m.T
    return mp.sqrt(max(*mp.eigsy(mp.matrix(gram.tolist()), eigvals_only=True), 0))


number, exp = np.frompyfunc(mp.mpf, 1, 1), np.frompyfunc(mp.exp, 1, 1)
FLOAT64 = lambda t: t.double().numpy(), partial(np.linalg.norm, ord=2)
DIGITS = lambda t: number(t.double().numpy()), norm_in_digits
"""What statements are written out in: numbers of a tensor, and norms of matrices of them."""


def published(att, h, p, arithmetic):
    """The statements, term by term, on one head at one sample without padding."""
    numbers, norm = arithmetic
    x, w_q, w_k, w_v = map(numbers, (att.x[0], att.w_q[h], att.w_k[h], att.w_v[h]))
    zero, c = 0 * x[0, 0], att.scale
    n, root2, root3 = zero + len(x), (zero + 2) ** 0.5, (zero + 3) ** 0.5
    b_q = 0 * w_q[0] if att.b_q is None else numbers(att.b_q[h])
    a, shift = c * (w_q @ w_k.T), c * (w_k @ b_q)
    v, r, norm_a = norm(w_v), longest(x), norm(a)
    m = [np.diag(row) - np.outer(row, row) for row in p]
    largest_m = max(map(norm, m))
    top = -np.sort(-np.hstack([p, 0 * p[:, :1]]), axis=1)
    g1 = (top[:, 0] * (1 - top[:, 0] + top[:, 1])).max()
    biased = att.b_q is not None
    xe = np.hstack([x, 0 * x[:, :1] + 1]) if biased else x
    ae = norm(c * (np.vstack([w_q, b_q]) @ w_k.T)) if biased else norm_a
    side, other, diameter = longest(x @ a.T), longest(x @ a), longest(x[:, None] - x)
    t, size = norm_a * r * r, longest(shift[None])
    u, c3, keys = t + size * r, diameter**2 * (n + 1), longest((x @ a + shift).reshape(1, -1))
    yudin, closed = v * norm(p), v * n**0.5
    phi = float(inverse_phi(torch.tensor(len(x) - 1.0, dtype=torch.float64)))
    steep, steeper = (math.exp(2 * float(one)) if one < 350 else math.inf for one in (t, u))
    return {
        "kim": closed * c * (4 * phi + 1) * norm(w_q) ** 2,
        "dasoulas": v * (longest(p.reshape(1, -1)) + root2 * r * (side + keys)),
        "specformer": n * (n + 1) * (x * x).sum() * v * (norm(w_q) * norm(w_k) + 1),
        "castin": root3 * v * (t**2 * (4 * n + 1) + n) ** 0.5,
        "castin_bias": root3 * v * (t**2 + n * r**2 * (norm_a * r + size) ** 2 + n) ** 0.5,
        "castin_c3": root3 * v * (max(side, other) ** 2 * c3 + n) ** 0.5,
        "castin_c3_as_coded": v * (side**2 * c3 + n) ** 0.5,
        "castin_mean_field": v * (1 + 3 * t) * steep,
        "castin_masked_mean_field": v * (t + 2 * (1 + 2 * u) * steeper),
        "yudin": yudin + v * 2 * norm(xe) ** 2 * ae * largest_m,
        "yudin_g1": yudin + v * 2 * norm(xe) ** 2 * ae * g1,
        "yudin_nobias": yudin + v * 2 * norm(x) ** 2 * norm_a * largest_m,
        "yudin_sqrt_n": yudin + v * 2 * max(norm(x.T @ one) for one in m) * norm(xe) * ae,
        "yudin_closed": closed * (1 + 2 * longest(xe) ** 2 * ae),
    }


def naive(att, h):
    """All statements in float64, of a head at one sample without padding."""
    p, *sides = (t[0, h] for t in (att.p, att.q, att.k, att.v))
    ours = our_bounds(p, *sides, att.w_q[h], att.w_k[h], att.w_v[h], scale=att.scale)
    return ours | published(att, h, p.numpy(), FLOAT64)


def our_bounds(p, *parts, scale):
    """Our bounds pair by pair, from explicit blocks and dense norms."""
    q, k, v, w_q, w_k, w_v = parts
    o, qt, size = p @ v, scale * q @ w_k.T, norm(w_v)
    a = (p[..., None] * (v - o[:, None])).mT  # (i, d_v, j)
    b = scale * a @ k @ w_q.T  # B_i, (i, d_v, D)
    norms, own, seen = (torch.linalg.matrix_norm(t, 2) for t in (a, b, b @ w_v))
    lengths = a.norm(dim=1)
    reach = torch.minimum(lengths @ p.T, norms[:, None] * p.norm(dim=1))
    cross = p * seen + p.T * (b @ qt.T).norm(dim=1) * (v[:, None] - o).norm(dim=-1)
    cross = cross + (qt @ w_v).norm(dim=1)[:, None] * reach
    e0 = cross + cross.T + p @ p.T * size**2 + own.square().diag()
    kk = (qt @ qt.T).abs() * torch.minimum(norms[:, None] * norms, lengths @ lengths.T)
    stacked = torch.einsum("i,iva,ivb->ab", qt.square().sum(1), a, a)
    key = min(norm(norms[:, None] * qt) ** 2, norm(stacked))
    blocks = p * (size + (v - o[:, None]).norm(dim=-1) * qt.norm(dim=1)[:, None]) + own.diag()
    return {
        "lipbound": math.sqrt(min(norm(e0 + kk), norm(e0) + key)),
        "lipbound_block": norm(blocks),
    }


@pytest.mark.each_value(kind=HARD)
def test_bounds_are_their_statements(att):
    values = bounds.evaluate(att, "all")
    for s, h in places(att):
        expected = naive(att.unpadded(s), h)
        assert set(expected) == set(values)
        for name, value in expected.items():
            # ours takes the norms of small blocks rounded upwards by up to a percent
            rel = 1e-2 if name.startswith("lipbound") else 2e-6
            # rounded upwards, never down
            least = value * (1 - 1e-12)
            assert least <= float(values[name][s, h]) <= value * (1 + rel), name


COMPARED = "castin castin_bias castin_c3 dasoulas newhouse specformer".split()
COMPARED += "yudin_closed yudin_g1 yudin_nobias yudin_sqrt_n".split()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logits", [1.0, 30.0, 1e3, 1e6, 1e12])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_values_are_upper_values_in_real_arithmetic(offset, logits, dtype):
    """In 60 digits never below, and hardly above. ``offset`` is common to all tokens; W_K nearly
    annihilates it, so that scores cancel."""
    draw = normal(int(logits) % 1000 + int(offset))
    x, w_q, w_k, w_v, common = draw(1, 4, 3), draw(2, 3, 2), draw(2, 3, 2), draw(2, 3, 2), draw(3)
    common = common / common.norm()
    w_k = w_k - common[:, None] * (common @ w_k)[:, None] * (1 - 1e-6)
    att = Attention(*(t.to(dtype) for t in (x + offset * common, w_q * logits, w_k, w_v)))
    numbers, norm = DIGITS
    with mp.workdps(60):
        for h in range(att.heads):
            x, w_q, w_k, w_v = map(numbers, (att.x[0], att.w_q[h], att.w_k[h], att.w_v[h]))
            scores = att.scale * ((x @ w_q) @ (x @ w_k).T)
            e = exp(scores - scores.max(1, keepdims=True))
            found = published(att, h, e / e.sum(1, keepdims=True), DIGITS)
            slope = 2 * att.scale * norm(w_q) * norm(w_k) * longest(x) ** 2
            found["newhouse"] = norm(w_v) * (1 + slope)
            for name in COMPARED:
                excess = mp.mpf(float(bounds.get(name)(att)[0, h])) / found[name] - 1
                assert excess >= 0, (name, mp.nstr(excess, 5))
                assert excess <= 1e-9 or logits * max(1.0, offset) > 30, (name, mp.nstr(excess, 5))


@pytest.mark.parametrize("y", [0.0, 1e-9, 1.0, 127.0, 1e6])
def test_inverse_phi(y):
    x = float(inverse_phi(torch.tensor(y, dtype=torch.float64)))
    assert x * math.exp(x + 1) == pytest.approx(y, rel=1e-12)


def test_kim_is_attained_by_one_token():
    """Of degree two in W_Q; the printed degree one would give 6."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    att = Attention(one, 3 * one, one, 2 * one)
    assert float(bounds.get("kim")(att)) == pytest.approx(18.0, rel=1e-9)
    assert float(l2_spectral_norm(att).lower) == pytest.approx(18.0, rel=1e-9)


@pytest.mark.parametrize("spread", [0.02, 0.5, 3.0])
def test_deviation_norm_never_falls_short(spread, monkeypatch):
    draw = normal()
    x, p = draw(2, 40, 64), torch.softmax(spread * draw(2, 3, 40, 40), -1)
    m = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    exact = torch.linalg.matrix_norm(x[:, None, None].mT @ m, 2).amax(-1)
    value = finished(weighted_deviation_norm(x, p))
    assert bool((value >= exact * (1 - 1e-12)).all())
    assert bool((value <= exact * (1 + 1e-9 if spread == 3.0 else 1.5)).all())
    monkeypatch.setattr(covariance, "BYTES", 8 * 3 * 40 * 7)  # rows in parts
    close(finished(weighted_deviation_norm(x, p)), value, 1e-12)


@pytest.mark.parametrize(("rounds", "spread"), [((1, 5), 2.0), ((1,), 0.02)])
def test_derivative_of_the_deviation_norm(rounds, spread, monkeypatch):
    """Of a row that was solved for, or, where rows are alike and one round does not suffice, of a
    cheap upper value."""
    monkeypatch.setattr(covariance, "ROUNDS", rounds)
    draw = normal()
    given = draw(1, 8, 10).requires_grad_(), (spread * draw(1, 1, 8, 8)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, scores: finished(weighted_deviation_norm(x, torch.softmax(scores, -1))),
        given,
        eps=1e-7,
        atol=1e-6,
        rtol=1e-4,
    )


@pytest.mark.parametrize("name", ["lipbound", "lipbound_block"])
def test_memory_that_is_not_free_is_refused_before_it_is_taken(name, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda device: 1000.0)
    call = partial(bounds.get(name), random_attention("plain"))
    refused(call, "matrices over all their pairs", " GB, and 1e-06 GB of memory are free")


# -- conditions; docs/sitegen/counterexamples.py has the smallest layers on which statements fail --


def test_conditions_see_masks_padding_and_scales():
    """Forbidding padding is no mask; and among tokens that are not padding, whatever a mask says of
    the others."""
    kim, mean, masked = "kim", "castin_mean_field", "castin_masked_mean_field"
    plain, past = random_attention("plain"), causal(6)
    cases = [(mean, changed(plain, mask=past), False)]
    for name, kinds, sound in (
        (kim, ("causal", "window"), True),
        (kim, ("offsets",), False),
        (masked, ("plain", "causal", "biases", "one_token"), True),
        (masked, ("window", "offsets"), False),
    ):
        cases += [(name, random_attention(kind), sound) for kind in kinds]
    for valid in ([True] * 4 + [False] * 2, [False] * 2 + [True] * 4):
        real = torch.tensor([[True] * 6, valid])
        padding = torch.zeros(2, 1, 6, 6).double().masked_fill(~real[:, None, None], -math.inf)
        padded = changed(plain, mask=padding, valid=real)
        seen = (past + padding).masked_fill(~real[:, None, :, None], 0.0)
        cases += [(mean, padded, True), (kim, padded, True)]
        cases += [(masked, changed(plain, mask=seen, valid=real), True)]
    for row, column, entry in ((2, 4, 0.0), (4, 2, -math.inf), (4, 2, 0.1), (0, 0, 1.0)):
        other = past.clone()
        other[row, column] = entry
        cases += [(masked, changed(plain, mask=other), False)]
    for name, att, sound in cases:
        found = bounds.get(name).sound(att)
        assert found.tolist() == [[sound] * 3] * 2, (name, att)


@pytest.mark.parametrize("tokens", [1, 2, 16, 64])
def test_averages_of_the_past_need_the_factor_two(tokens):
    """At A = 0 the norm is that of P (Hardy), beyond every bound that tends to ||W_V||."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    att = Attention(torch.ones(1, tokens, 1).double(), 0 * one, one, one, mask=causal(tokens))
    p = torch.ones(tokens, tokens).double().tril() / torch.arange(1, tokens + 1)[:, None]
    exact = dense_norms(att)
    assert float(exact) == pytest.approx(norm(p), rel=1e-9)
    masked, plain = (bounds.get(name) for name in ("castin_masked_mean_field", "castin_mean_field"))
    assert float(exact) <= float(masked(att)) == pytest.approx(2, rel=1e-9)
    assert (float(plain(att)) < float(exact)) == (tokens > 1)
    if tokens == 64:
        assert float(exact) > 1.59


def test_the_registry_is_complete():
    """A statement that may fail to be a bound says why."""
    att = random_attention("biases")
    for name in bounds.names(None):
        bound = bounds.get(name)
        assert bound.citation in bounds.BIBTEX
        assert all((bound.label, bound.statement, bound.source, bound.assumptions, bound.cost))
        assert bound.function.__doc__
        assert bound.caveat or bool(bound.sound(att).all()), name
    assert bounds.names()[0] == "kim"
    assert bounds.resolve("castin, yudin,castin") == ["castin", "yudin"]
    assert bounds.resolve("all") == bounds.names()
