"""Every bound against its statement, written out naively with dense matrices, and the conditions
under which it is sound."""

import math
from functools import partial

import pytest
import torch
from support.checks import close, normal, refused
from support.layers import HARD, causal, random_attention
from support.oracles import dense_norms
from torch import Tensor

from lipbound import bounds, devices
from lipbound.attention.layer import Attention
from lipbound.bounds.papers.kim2021 import inverse_phi
from lipbound.jacobians.spectral_norm import l2_spectral_norm
from lipbound.linalg import covariance
from lipbound.linalg.covariance import weighted_deviation_norm


def norm(m: Tensor) -> float:
    return float(torch.linalg.matrix_norm(m.double(), 2))


def longest(m: Tensor) -> float:
    """The largest length of a row."""
    return float(m.norm(dim=-1).max())


def naive(att: Attention, h: int) -> dict[str, float]:
    """The statements, term by term, on one head at one sample without padding."""
    x, p = att.x[0], att.p[0, h]
    n, one = len(x), torch.ones(len(x), 1, dtype=x.dtype)
    w_q, w_k, w_v = att.w_q[h], att.w_k[h], att.w_v[h]
    b_q = torch.zeros(att.d, dtype=x.dtype) if att.b_q is None else att.b_q[h]
    a, v, r = att.scale * w_q @ w_k.mT, norm(w_v), longest(x)
    m = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    largest_m = max(map(norm, m))
    top = torch.cat([p, 0 * one], 1).sort(dim=1, descending=True).values
    g1 = float((top[:, 0] * (1 - top[:, 0] + top[:, 1])).max())
    biased = att.b_q is not None
    xe = torch.cat([x, one], 1) if biased else x
    ae = norm(att.scale * torch.cat([w_q, b_q[None]]) @ w_k.mT) if biased else norm(a)
    side, other, diameter = longest(x @ a.mT), longest(x @ a), longest(x[:, None] - x)
    t, shift = norm(a) * r * r, att.scale * w_k @ b_q
    u = float(t + shift.norm() * r)
    yudin, closed = v * norm(p), v * math.sqrt(n)
    sides = [t[0, h] for t in (att.q, att.k, att.v)]
    phi, root3 = float(inverse_phi(torch.tensor(n - 1.0, dtype=torch.float64))), math.sqrt(3)
    castin = norm(a) ** 2 * r**4 * (4 * n + 1), n * r**2 * (norm(a) * r + float(shift.norm())) ** 2
    c3, keys = diameter**2 * (n + 1), float((x @ a + shift).norm())
    return {
        **our_bounds(p, *sides, w_q, w_k, w_v, scale=att.scale),
        "kim": closed * att.scale * (4 * phi + 1) * norm(w_q) ** 2,
        "dasoulas": v * (float(p.norm()) + math.sqrt(2) * r * (side + keys)),
        "specformer": n * (n + 1) * float(x.norm()) ** 2 * (v * norm(w_q) * norm(w_k) + v),
        "castin": root3 * v * math.sqrt(castin[0] + n),
        "castin_bias": root3 * v * math.sqrt(t**2 + castin[1] + n),
        "castin_c3": root3 * v * math.sqrt(max(side, other) ** 2 * c3 + n),
        "castin_c3_as_coded": v * math.sqrt(side**2 * c3 + n),
        "castin_mean_field": v * (1 + 3 * t) * math.exp(2 * t) if t < 350 else math.inf,
        "castin_masked_mean_field": v * (t + 2 * (1 + 2 * u) * math.exp(2 * u))
        if u < 350
        else math.inf,
        "yudin": yudin + v * 2 * norm(xe) ** 2 * ae * largest_m,
        "yudin_g1": yudin + v * 2 * norm(xe) ** 2 * ae * g1,
        "yudin_nobias": yudin + v * 2 * norm(x) ** 2 * norm(a) * largest_m,
        "yudin_sqrt_n": yudin + v * 2 * max(map(norm, x.mT @ m)) * norm(xe) * ae,
        "yudin_closed": closed * (1 + 2 * longest(xe) ** 2 * ae),
    }


def our_bounds(p: Tensor, *parts: Tensor, scale: float) -> dict[str, float]:
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
def test_bounds_are_their_statements(att: Attention) -> None:
    values = bounds.evaluate(att, "all")
    for s in range(att.samples):
        for h in range(att.heads):
            expected = naive(att.unpadded(s), h)
            assert set(expected) == set(values)
            for name, value in expected.items():
                # ours takes the norms of small blocks rounded upwards by up to a percent
                rel = 1e-2 if name.startswith("lipbound") else 2e-6
                # rounded upwards, never down
                least = value * (1 - 1e-12)
                assert least <= float(values[name][s, h]) <= value * (1 + rel), name


@pytest.mark.parametrize("y", [0.0, 1e-9, 1.0, 127.0, 1e6])
def test_inverse_phi(y: float) -> None:
    x = float(inverse_phi(torch.tensor(y, dtype=torch.float64)))
    assert x * math.exp(x + 1) == pytest.approx(y, rel=1e-12)


def test_kim_is_attained_by_one_token() -> None:
    """Of degree two in W_Q; the printed degree one would give 6."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    att = Attention(one, 3 * one, one, 2 * one)
    assert float(bounds.get("kim")(att)) == pytest.approx(18.0, rel=1e-9)
    assert float(l2_spectral_norm(att).lower) == pytest.approx(18.0, rel=1e-9)


def test_bounds_of_the_same_paper_are_in_order() -> None:
    att = random_attention("plain")
    values = bounds.evaluate(att)
    for less, more in (
        ("yudin_closed", "castin"),
        ("yudin", "yudin_g1"),
        ("yudin_sqrt_n", "yudin_closed"),
    ):
        assert bool((values[less] <= values[more]).all())
    # where inputs are small, Specformer's formula goes to 0 with X, and no bound may
    for size, sharper in ((1.0, True), (1e-3, False)):
        small = Attention(size * att.x, att.w_q, att.w_k, att.w_v)
        values = bounds.evaluate(small, ["yudin", "specformer"])
        assert bool((values["yudin"] < values["specformer"]).all()) == sharper
    assert bool((values["specformer"] < dense_norms(small)).all())


@pytest.mark.parametrize("spread", [0.02, 0.5, 3.0])
def test_deviation_norm_never_falls_short(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = normal()
    x, p = draw(2, 40, 64), torch.softmax(spread * draw(2, 3, 40, 40), -1)
    m = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    exact = torch.linalg.matrix_norm(x[:, None, None].mT @ m, 2).amax(-1)
    value = weighted_deviation_norm(x, p)
    assert bool((value >= exact * (1 - 1e-12)).all())
    assert bool((value <= exact * (1 + 1e-9 if spread == 3.0 else 1.5)).all())
    monkeypatch.setattr(covariance, "BYTES", 8 * 3 * 40 * 7)  # rows in parts
    close(weighted_deviation_norm(x, p), value, 1e-12)


@pytest.mark.parametrize("name", ["lipbound", "lipbound_block"])
def test_memory_that_is_not_free_is_refused_before_it_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "available", lambda device: 1000.0)
    call = partial(bounds.get(name), random_attention("plain"))
    refused(call, "matrices over all their pairs", " GB, and 1e-06 GB of memory are free")


# -- conditions; docs/sitegen/counterexamples.py has the smallest layers on which statements fail --


def sound(name: str, att: Attention) -> bool:
    """Of every head; of some alone is an error here."""
    found = bounds.get(name).sound(att)
    assert bool(found.all()) or not bool(found.any())
    return bool(found.all())


def test_conditions_see_masks_padding_and_scales() -> None:
    found = [sound("kim", random_attention(kind)) for kind in ("causal", "window", "offsets")]
    assert found == [True, True, False]
    att = random_attention("plain")
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    padding = torch.zeros(2, 1, 6, 6).double().masked_fill(~valid[:, None, None], -math.inf)
    padded = Attention(att.x, att.w_q, att.w_k, att.w_v, mask=padding, valid=valid)
    assert sound("castin_mean_field", padded)  # forbidding padding is no mask
    assert sound("kim", padded)
    forbidden = Attention(att.x, att.w_q, att.w_k, att.w_v, mask=causal(6))
    assert not sound("castin_mean_field", forbidden)


def test_masked_mean_field_is_of_causal_masks_and_of_none() -> None:
    """Among tokens that are not padding, whatever the mask says of the others."""
    kinds = ("plain", "causal", "window", "offsets", "biases", "one_token")
    found = [sound("castin_masked_mean_field", random_attention(kind)) for kind in kinds]
    assert found == [True, True, False, False, True, True]
    att, mask = random_attention("plain"), causal(6)
    for valid in ([True] * 4 + [False] * 2, [False] * 2 + [True] * 4):
        real = torch.tensor([[True] * 6, valid])
        seen = mask.expand(2, 1, 6, 6).masked_fill(~real[:, None, None], -math.inf)
        seen = seen.masked_fill(~real[:, None, :, None], 0.0)
        padded = Attention(att.x, att.w_q, att.w_k, att.w_v, mask=seen, valid=real)
        assert sound("castin_masked_mean_field", padded)
    for row, column, entry in ((2, 4, 0.0), (4, 2, -math.inf), (4, 2, 0.1), (0, 0, 1.0)):
        other = mask.clone()
        other[row, column] = entry
        head = Attention(att.x, att.w_q, att.w_k, att.w_v, mask=other)
        assert not sound("castin_masked_mean_field", head), (row, column, entry)


@pytest.mark.parametrize("tokens", [1, 2, 16, 64])
def test_averages_of_the_past_need_the_factor_two(tokens: int) -> None:
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


def test_means_over_the_past_are_at_most_twice_as_long() -> None:
    """With any weights of positions: the inequality in the proof of Lemma 38."""
    draw = normal()
    for scale in (0.1, 1.0, 4.0):
        weight, a = (scale * draw(200, 12)).exp(), draw(200, 12).abs()
        alpha = (weight * a).cumsum(1) / weight.cumsum(1)
        assert bool(((weight * alpha**2).sum(1) <= 4 * (weight * a**2).sum(1)).all())


def test_the_registry_is_complete() -> None:
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
