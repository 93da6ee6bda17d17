"""Every bound against its statement, written out naively with dense matrices, and the conditions
under which it is sound."""

import math

import pytest
import torch
import xarray as xr
from support.layers import HARD, causal, random_attention
from support.oracles import dense_norms
from torch import Tensor

from lipbound import bounds, devices
from lipbound.attention.layer import Attention
from lipbound.bounds.papers.kim2021 import inverse_phi
from lipbound.errors import LipboundError, UnknownNameError
from lipbound.jacobians.spectral_norm import l2_spectral_norm
from lipbound.linalg import covariance
from lipbound.linalg.covariance import weighted_deviation_norm


def norm(m: Tensor) -> float:
    return float(torch.linalg.matrix_norm(m.double(), 2))


def naive(att: Attention, s: int, h: int) -> dict[str, float]:
    """The statements, term by term, on one head at one sample."""
    keep = torch.ones(att.tokens, dtype=torch.bool) if att.valid is None else att.valid[s]
    x, p = att.x[s][keep], att.p[s, h][keep][:, keep]
    n = len(x)
    w_q, w_k, w_v = att.w_q[h], att.w_k[h], att.w_v[h]
    b_q = torch.zeros(att.d, dtype=x.dtype) if att.b_q is None else att.b_q[h]
    a, v, r = att.scale * w_q @ w_k.mT, norm(w_v), float(x.norm(dim=1).max())
    m = [torch.diag(row) - row[:, None] * row for row in p]
    largest_m = max(norm(mi) for mi in m)
    top = p.sort(dim=1, descending=True).values
    second = top[:, 1] if n > 1 else torch.zeros(n)
    g1 = float((top[:, 0] * (1 - top[:, 0] + second)).max())
    biased = att.b_q is not None
    xe = torch.cat([x, torch.ones(n, 1, dtype=x.dtype)], 1) if biased else x
    qe = torch.cat([w_q, b_q[None]]) if biased else w_q
    ke = torch.cat([w_k, torch.zeros(1, att.d, dtype=x.dtype)]) if biased else w_k
    ae = norm(att.scale * qe @ ke.mT)
    side, other = float((x @ a.mT).norm(dim=1).max()), float((x @ a).norm(dim=1).max())
    diameter = max(float((y - z).norm()) for y in x for z in x)
    frobenius = float(x.norm())
    t = norm(a) * r * r
    shift = float((att.scale * w_k @ b_q).norm())
    return {
        **our_bounds(x, p, att, s, h),
        "kim": math.sqrt(n)
        * att.scale
        * (4 * float(inverse_phi(torch.tensor(n - 1.0, dtype=torch.float64))) + 1)
        * norm(w_q) ** 2
        * v,
        "dasoulas": v
        * (
            float(p.norm())
            + math.sqrt(2) * r * (side + float((x @ a + att.scale * w_k @ b_q).norm()))
        ),
        "specformer": n * (n + 1) * frobenius**2 * (v * norm(w_q) * norm(w_k) + v),
        "castin": math.sqrt(3) * v * math.sqrt(norm(a) ** 2 * r**4 * (4 * n + 1) + n),
        "castin_bias": math.sqrt(3)
        * v
        * math.sqrt(t**2 + n * r**2 * (norm(a) * r + shift) ** 2 + n),
        "castin_c3": math.sqrt(3)
        * v
        * math.sqrt(max(side, other) ** 2 * diameter**2 * (n + 1) + n),
        "castin_c3_as_coded": v * math.sqrt(side**2 * diameter**2 * (n + 1) + n),
        "castin_mean_field": v * (1 + 3 * t) * math.exp(2 * t) if t < 350 else math.inf,
        "yudin": v * (norm(p) + 2 * norm(xe) ** 2 * ae * largest_m),
        "yudin_g1": v * (norm(p) + 2 * norm(xe) ** 2 * ae * g1),
        "yudin_nobias": v * (norm(p) + 2 * norm(x) ** 2 * norm(a) * largest_m),
        "yudin_sqrt_n": v * (norm(p) + 2 * max(norm(x.mT @ mi) for mi in m) * norm(xe) * ae),
        "yudin_closed": v * math.sqrt(n) * (1 + 2 * float(xe.norm(dim=1).max()) ** 2 * ae),
    }


def our_bounds(x: Tensor, p: Tensor, att: Attention, s: int, h: int) -> dict[str, float]:
    """Our bounds pair by pair, from explicit blocks and dense norms."""
    n = len(x)
    keep = torch.ones(att.tokens, dtype=torch.bool) if att.valid is None else att.valid[s]
    q, k, v = (t[s, h][keep] for t in (att.q, att.k, att.v))
    w_q, w_k, w_v, c = att.w_q[h], att.w_k[h], att.w_v[h], att.scale
    o = p @ v
    a = [(p[i][:, None] * (v - o[i])).T for i in range(n)]
    b = [c * a[i] @ k @ w_q.T for i in range(n)]
    qt = c * q @ w_k.T
    e0, kk = torch.zeros(n, n, dtype=x.dtype), torch.zeros(n, n, dtype=x.dtype)
    lengths = torch.stack([ai.norm(dim=0) for ai in a])
    norms = [norm(ai) for ai in a]
    for i in range(n):
        for j in range(n):
            reach = min(float(lengths[i] @ p[j]), norms[i] * float(p[j].norm()))
            cross = float(p[i, j]) * norm(b[j] @ w_v) + float(
                p[j, i] * (b[i] @ qt[j]).norm() * (v[i] - o[j]).norm()
            )
            cross += float((w_v.T @ qt[i]).norm()) * reach
            e0[i, j] += cross + float(p[i] @ p[j]) * norm(w_v) ** 2
            e0[j, i] += cross
            kk[i, j] = abs(float(qt[i] @ qt[j])) * min(
                norms[i] * norms[j], float(lengths[i] @ lengths[j])
            )
        e0[i, i] += norm(b[i]) ** 2
    stacked = sum(float(qt[i] @ qt[i]) * a[i].T @ a[i] for i in range(n))
    key = min(norm(torch.tensor(norms, dtype=x.dtype)[:, None] * qt) ** 2, norm(stacked))
    sizes = [
        [
            float(p[i, j]) * (norm(w_v) + float((v[j] - o[i]).norm() * qt[i].norm()))
            for j in range(n)
        ]
        for i in range(n)
    ]
    blocks = torch.tensor(sizes, dtype=x.dtype) + torch.diag(
        torch.tensor([norm(bi) for bi in b], dtype=x.dtype)
    )
    return {
        "lipbound": math.sqrt(min(norm(e0 + kk), norm(e0) + key)),
        "lipbound_block": norm(blocks),
    }


@pytest.mark.each_value(kind=HARD)
def test_bounds_are_their_statements(att: Attention) -> None:
    values = bounds.evaluate(att, "all")
    for s in range(att.samples):
        for h in range(att.heads):
            expected = naive(att, s, h)
            assert set(expected) == set(values)
            for name, value in expected.items():
                # ours takes the norms of small blocks rounded upwards by up to a percent
                assert float(values[name][s, h]) == pytest.approx(
                    value, rel=1e-2 if name.startswith("lipbound") else 2e-6
                ), name
                # rounded upwards, never down
                assert float(values[name][s, h]) >= value * (1 - 1e-12), name


@pytest.mark.parametrize("y", [0.0, 1e-9, 1.0, 127.0, 1e6])
def test_inverse_phi(y: float) -> None:
    x = float(inverse_phi(torch.tensor(y, dtype=torch.float64)))
    assert x * math.exp(x + 1) == pytest.approx(y, rel=1e-12)


def test_kim_is_attained_by_one_token() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    att = Attention(one, 3 * one, one, 2 * one)
    assert float(bounds.get("kim")(att)) == pytest.approx(
        float(l2_spectral_norm(att).lower), rel=1e-9
    )
    # degree two in W_Q; the printed degree one would give 6
    assert float(bounds.get("kim")(att)) == pytest.approx(18.0, rel=1e-9)


def test_yudin_improves_castin_and_g1_exceeds_the_norm() -> None:
    att = random_attention("plain")
    values = bounds.evaluate(att)
    assert bool((values["yudin_closed"] <= values["castin"]).all())
    assert bool((values["yudin"] <= values["yudin_g1"]).all())
    assert bool((values["yudin_sqrt_n"] <= values["yudin_closed"]).all())


def test_yudin_is_not_sharper_than_specformer_for_small_inputs() -> None:
    """The comparison in the paper holds where the inputs are not small: Specformer's formula goes
    to 0 with X, and no bound may."""
    att = random_attention("plain")
    for size, sharper in ((1.0, True), (1e-3, False)):
        small = Attention(size * att.x, att.w_q, att.w_k, att.w_v)
        values = bounds.evaluate(small, ["yudin", "specformer"])
        assert bool((values["yudin"] < values["specformer"]).all()) == sharper
    assert bool((values["specformer"] < dense_norms(small)).all())


@pytest.mark.parametrize("spread", [0.02, 0.5, 3.0])
def test_deviation_norm_never_falls_short(spread: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, 64, generator=g, dtype=torch.float64)
    p = torch.softmax(spread * torch.randn(2, 3, 40, 40, generator=g, dtype=torch.float64), -1)
    m = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    exact = torch.linalg.matrix_norm(x[:, None, None].mT @ m, 2).amax(-1)
    value = weighted_deviation_norm(x, p)
    assert bool((value >= exact * (1 - 1e-12)).all())
    assert bool((value <= exact * 1.5).all())
    if spread == 3.0:
        torch.testing.assert_close(value, exact, rtol=1e-9, atol=0)


def test_rows_in_parts_give_the_same_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 30, 12, generator=g, dtype=torch.float64)
    p = torch.softmax(torch.randn(2, 3, 30, 30, generator=g, dtype=torch.float64), -1)
    whole = weighted_deviation_norm(x, p)
    monkeypatch.setattr(covariance, "BYTES", 8 * 3 * 30 * 7)
    torch.testing.assert_close(weighted_deviation_norm(x, p), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["lipbound", "lipbound_block"])
def test_memory_that_is_not_free_is_refused_before_it_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "available", lambda device: 1000.0)
    with pytest.raises(
        LipboundError,
        match=r"need matrices over all their pairs, about .* GB, and 1e-06 GB of memory are free",
    ):
        bounds.get(name)(random_attention("plain"))


# -- published statements that fail, and the smallest cases that show it ---------------------------


def shortfall(name: str, att: Attention) -> float:
    """Smallest bound / exact."""
    return float((bounds.get(name)(att) / dense_norms(att)).min())


def audited(name: str, att: Attention) -> dict:
    """What the audit of a run of one layer says of a bound."""
    bound = bounds.get(name)
    values = {"exact": dense_norms(att), name: bound(att), f"{name}_sound": bound.sound(att)}
    return bounds.audit(run_of_layer(name, values))[name]


def run_of_layer(name: str, values: dict[str, Tensor]) -> xr.Dataset:
    """A run of one layer, with one bound."""
    ds = xr.Dataset(
        {key: (("sample", "head"), value.numpy()) for key, value in values.items()},
        attrs={"dtype": "float64", "bounds": [name]},
    )
    ds[name].attrs |= {"compared_with": "exact", "caveat": bounds.get(name).caveat}
    return ds


def test_missing_numbers_are_not_compared() -> None:
    att = random_attention("plain")
    bound = bounds.get("yudin")
    value = bound(att).clone()
    value[0, 0] = math.nan
    columns = {"exact": dense_norms(att), "yudin": value, "yudin_sound": bound.sound(att)}
    entry = bounds.audit(run_of_layer("yudin", columns))["yudin"]
    assert entry["broken"] == 0
    assert entry["compared"] == value.numel() - 1


def test_specformer_fails_for_small_inputs() -> None:
    att = random_attention("plain")
    small = Attention(att.x * 1e-4, att.w_q, att.w_k, att.w_v)
    assert shortfall("specformer", small) < 0.001
    assert not bool(bounds.get("specformer").sound(small).any())
    assert bool(bounds.get("specformer").sound(att).all())
    assert shortfall("specformer", att) >= 1


def biased() -> Attention:
    """Queries that come from their bias alone, so A = 0, while values differ by much: |J| grows
    with the bias."""
    x = torch.tensor([[[0.0, 10], [0, -10], [0, 5], [0, -5]]], dtype=torch.float64)
    w_q, w_k = (torch.tensor([[[c], [0.0]]], dtype=torch.float64) for c in (0.0, 1.0))
    return Attention(
        x,
        w_q,
        w_k,
        torch.eye(2, dtype=torch.float64)[None],
        b_q=torch.tensor([[10.0]], dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("plain", "repaired"), [("castin", "castin_bias"), ("yudin_nobias", "yudin")]
)
def test_query_biases_break_the_plain_statements(plain: str, repaired: str) -> None:
    assert shortfall(plain, biased()) < 0.1
    assert not bool(bounds.get(plain).sound(biased()).any())
    assert shortfall(repaired, biased()) >= 1
    assert bool(bounds.get(repaired).sound(biased()).all())


def test_dasoulas_needs_the_query_bias() -> None:
    att = biased()
    without = bounds.get("dasoulas")(Attention(att.x, att.w_q, att.w_k, att.w_v))
    assert float(without / dense_norms(att)) < 0.2
    assert shortfall("dasoulas", att) >= 1


def test_c3_as_coded_fails() -> None:
    worst, caught = 1.0, 0
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 2, 6, generator=g, dtype=torch.float64)
        w_q, w_k, w_v = (torch.randn(8, 6, 1, generator=g, dtype=torch.float64) for _ in range(3))
        # one token unseen by the keys
        w_k = w_k - x[0, 0][:, None] * (x[0, 0] @ w_k)[:, None] / (x[0, 0] @ x[0, 0])
        att = Attention(x, w_q, w_k, w_v)
        worst = min(worst, shortfall("castin_c3_as_coded", att))
        assert shortfall("castin_c3", att) >= 1
        assert not bool(bounds.get("castin_c3_as_coded").sound(att).any())
        if shortfall("castin_c3_as_coded", att) < 1:
            caught += audited("castin_c3_as_coded", att)["violations"]
            assert audited("castin_c3", att)["violations"] == 0
    assert worst < 1
    assert caught > 0


def test_mean_field_fails_with_a_causal_mask() -> None:
    n = 64
    one = torch.ones(1, n, 1, dtype=torch.float64)
    w = torch.ones(1, 1, 1, dtype=torch.float64)
    att = Attention(one, 0 * w, w, w, mask=causal(n))
    bound = bounds.get("castin_mean_field")
    assert float(bound(att)) == pytest.approx(1.0)
    assert 1.5 < float(dense_norms(att)) < 2.0
    assert not bool(bound.sound(att).any())
    assert bool(bound.sound(Attention(one, 0 * w, w, w)).all())


def test_conditions_see_masks_and_padding() -> None:
    kim, field = bounds.get("kim"), bounds.get("castin_mean_field")
    assert bool(kim.sound(random_attention("causal")).all())
    assert bool(kim.sound(random_attention("window")).all())
    assert not bool(kim.sound(random_attention("offsets")).any())
    att = random_attention("plain")
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    padding = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(
        ~valid[:, None, None], -math.inf
    )
    padded = Attention(att.x, att.w_q, att.w_k, att.w_v, mask=padding, valid=valid)
    assert bool(field.sound(padded).all())  # forbidding padding is no mask
    assert bool(kim.sound(padded).all())


def test_kim_needs_a_positive_scale() -> None:
    x = torch.tensor([[[0.0], [10.0], [-10.0]]], dtype=torch.float64)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    att = Attention(x, one, one, one, scale=-1.0)
    assert float(bounds.get("kim")(att) / dense_norms(att, "l2")) < 0.1
    assert not bool(bounds.get("kim").sound(att).any())


# -- the registry ----------------------------------------------------------------------------------


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'yudin_g1'"):
        bounds.get("yudin_g2")
    with pytest.raises(UnknownNameError, match="unknown bound 'nothing'"):
        bounds.evaluate(random_attention("plain"), ["nothing"])


def test_registry_is_complete() -> None:
    for name in bounds.names(None):
        bound = bounds.get(name)
        assert bound.citation in bounds.BIBTEX
        assert all((bound.label, bound.statement, bound.source, bound.assumptions, bound.cost))
        assert bound.function.__doc__
    assert bounds.names()[0] == "kim"
    assert bounds.resolve("castin, yudin,castin") == ["castin", "yudin"]
    assert bounds.resolve("all") == bounds.names()


def test_names_are_unique() -> None:
    texts = dict.fromkeys(
        ("label", "citation", "statement", "statement_latex", "source", "assumptions", "cost"), ""
    )
    with pytest.raises(ValueError, match="already registered"):
        bounds.bound("yudin", **texts, condition=lambda a: a.p)(lambda a: a.p)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["lipbound", "lipbound_block"])
def test_our_bounds_have_derivatives(kind: str, name: str) -> None:
    """Against central differences along one direction of everything the layer is made of."""
    att = random_attention(kind)
    given = {
        key: t
        for key in ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
        if (t := getattr(att, key)) is not None
    }
    g = torch.Generator().manual_seed(1)
    direction = {
        key: t.abs().max() * torch.randn(t.shape, generator=g, dtype=t.dtype)
        for key, t in given.items()
    }
    leaves = {key: t.clone().requires_grad_() for key, t in given.items()}

    def total(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return bounds.get(name)(Attention(**tensors, mask=att.mask, valid=att.valid)).sum()

    gradients = dict(
        zip(
            leaves,
            torch.autograd.grad(total(leaves), list(leaves.values()), materialize_grads=True),
            strict=True,
        )
    )
    step = 1e-6
    ahead, back = (
        total({key: t + sign * step * direction[key] for key, t in given.items()})
        for sign in (1, -1)
    )
    slope = sum(float((gradients[key] * direction[key]).sum()) for key in given)
    assert slope == pytest.approx(
        float(ahead - back) / (2 * step), rel=1e-2, abs=1e-3 * float(total(given))
    )


def test_gradients_of_zero_heads_are_finite() -> None:
    x, w = torch.randn(1, 4, 3, dtype=torch.float64), torch.randn(2, 3, 2, dtype=torch.float64)
    values = torch.zeros(2, 3, 2, dtype=torch.float64, requires_grad=True)
    for name in ("lipbound", "lipbound_block"):
        (gradient,) = torch.autograd.grad(
            bounds.get(name)(Attention(x, w, w, values)).sum(), values
        )
        assert bool(torch.isfinite(gradient).all())


def test_conditions_come_with_a_reason() -> None:
    """A statement that may fail to be a bound says why."""
    att = random_attention("biases")
    for name in bounds.names(None):
        bound = bounds.get(name)
        if not bool(bound.sound(att).all()):
            assert bound.caveat, name
