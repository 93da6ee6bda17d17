"""Bounds in the norms of single tokens: their statements, and never below what brute force attains;
at any scale, and as they are printed."""

import math
from decimal import Decimal
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import hard_heads, judge, token_oracle
from support.layers import HARD, changed, random_attention
from support.oracles import dense_norms
from support.reference import dense_jacobian
from support.strategies import examples, layers
from support.variants import layer as variant_layer
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.attention.softmax import splitting_bound
from lipbound.errors import LipboundError
from lipbound.runs.config import RunConfig

NORMS = ("every-token", "one-token")
NAMES = [name for norm in NORMS for name in bounds.names(norm)]
OURS = [name for name in NAMES if bounds.get(name).citation == bounds.get("lipbound").citation]
SMOOTH = [name for name in NAMES if bounds.get(name).differentiable]
MODERATE = {
    "inputs": ("plain", "duplicates", "pairs", "collinear", "tiny"),
    "weights": ("plain", "tied", "no_query", "rank_one_values"),
}
HAS = (
    (),
    ("rotation",),
    ("norm",),
    ("together", "rotation"),
    ("cap",),
    ("sinks",),
    ("rotation", "cap", "sinks"),
)
PARTS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")


def brute_force(att: Attention, steps: int = 20) -> dict[str, Tensor]:
    """Attained values of both norms, (samples, heads). Biases that J does not see would cancel
    digits of the reference, and are left out."""
    j = token_oracle.all_blocks(att if att.variants else changed(att, b_k=None, b_v=None))
    return {
        "every-token": token_oracle.every_from_below(j, 2, steps),
        "one-token": token_oracle.one(j)[0],
    }


def check(att: Attention, slack: float = 1e-9, names: list[str] = NAMES) -> None:
    least = brute_force(att)
    for name in names:
        bound = bounds.get(name)
        if not bound.applies(att):
            continue
        value, sound = bound(att), bound.sound(att)
        assert value.shape == sound.shape == (att.samples, att.heads)
        assert not bool(value.isnan().any()), name
        assert bool((~sound | (value >= least[bound.norm] * (1 - slack))).all()), name


# -- the reference ---------------------------------------------------------------------------------


def test_brute_force_meets_itself(kind: str) -> None:
    """Both ends of the reference, so that what is compared with it is compared with the norm."""
    j = token_oracle.all_blocks(random_attention(kind))
    lower, upper = token_oracle.every_from_below(j, 6, 200), token_oracle.every_from_above(j)
    assert bool((lower <= upper * (1 + 1e-12)).all())
    assert float((upper / lower).max()) < 1.01


def test_a_perturbation_attains_it() -> None:
    """The value of the ascent is a length of an output: no formula of duality in between."""
    j = token_oracle.blocks(random_attention("plain"), 0)[0]
    n = len(j)
    g = torch.Generator().manual_seed(0)
    moves = torch.randn(2000, n, j.shape[-1], generator=g, dtype=torch.float64)
    moves = moves / moves.norm(dim=-1, keepdim=True)
    for _ in range(50):  # alternating: each token's best direction for the output's own
        out = torch.einsum("ijvd,mjd->miv", j, moves)
        row = out.norm(dim=-1).argmax(-1)
        y = out[torch.arange(len(out)), row]
        moves = torch.einsum("mjvd,mv->mjd", j[row], y)
        moves = moves / moves.norm(dim=-1, keepdim=True)
    best = float(torch.einsum("ijvd,mjd->miv", j, moves).norm(dim=-1).max())
    assert best == pytest.approx(float(token_oracle.every_from_below(j, 6)), rel=1e-9)


# -- soundness -------------------------------------------------------------------------------------


@examples(25)
@given(layers())
def test_no_sound_bound_is_below_what_is_attained(att: Attention) -> None:
    """25 shapes x 60 heads."""
    check(att)


@examples(20)
@given(layers(torch.float32, **MODERATE))
def test_no_sound_bound_is_below_what_is_attained_in_float32(att: Attention) -> None:
    """Of the given float32 numbers; 20 shapes x 60 heads."""
    check(att)


@pytest.mark.each_value
@pytest.mark.parametrize("side", [slice(4, None), slice(0, 2)], ids=["right", "left"])
@pytest.mark.parametrize("name", sorted({*NAMES, *bounds.names()}))
def test_padding_does_not_count(name: str, side: slice) -> None:
    """A padded sample has the bounds of its own tokens, also where those are far from zero."""
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 6, 5), *[(2, 5, 3)] * 3]
    x, *w = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    x += 9
    valid = torch.ones(1, 6, dtype=torch.bool)
    valid[:, side] = False
    padded, alone = Attention(x, *w, valid=valid), Attention(x[:, valid[0]], *w)
    found, own = (bounds.evaluate(att, [name])[name] for att in (padded, alone))
    assert torch.allclose(found, own, rtol=1e-7)


@pytest.mark.parametrize("mask", ["none", "causal", "padded"])
@pytest.mark.parametrize("has", HAS)
def test_heads_with_variants(has: tuple[str, ...], mask: str) -> None:
    for seed in range(3):
        check(variant_layer(seed, frozenset(has), mask=mask))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_hard_heads_in_80_digits(family: str, dtype: torch.dtype) -> None:
    """Nothing is allowed for rounding."""
    att = judge.case(family, dtype, 1).select(slice(0, 1), slice(0, 2))
    for h in range(att.heads):
        least = token_oracle.attained(att, 0, h)
        for name in NAMES:
            bound = bounds.get(name)
            if bound.applies(att) and bool(bound.sound(att)[0, h]):
                value = float(bound(att)[0, h])
                assert value == math.inf or Decimal(value) >= least[bound.norm], (
                    name,
                    value,
                    float(least[bound.norm]),
                )


@pytest.mark.each_value(kind=HARD)
def test_whole_layers(kind: str) -> None:
    """Heads put together, and projected: by the blocks of the dense Jacobian of the layer."""
    att = random_attention(kind)
    for map in ("heads", "layer"):
        for s in range(att.samples):
            (whole,) = token_oracle.blocks(att, s, map)
            least = {
                "every-token": float(token_oracle.every_from_below(whole, 6, 20)),
                "one-token": float(token_oracle.one(whole)[0]),
            }
            for name in NAMES:
                for rule in ("best", "sum", "root_sum_square", "folded"):
                    value = bounds.whole_layer(att, name, map=map, rule=rule)[s]
                    assert float(value) >= least[bounds.get(name).norm] * (1 - 1e-9), (name, rule)


# -- statements ------------------------------------------------------------------------------------


def splitting(row: list[float]) -> float:
    """The printed upper value of theta of a row: of the largest entry from 1/2 on, else 1."""
    return 4 * max(row) * (1 - max(row)) if max(row) >= 0.5 else 1.0


def subsets(row: list[float]) -> float:
    """theta of a row, over all sets of its entries; no sum is a difference from 1."""
    sides = torch.tensor(list(product((0.0, 1.0), repeat=len(row))), dtype=torch.float64)
    p = torch.tensor(row, dtype=torch.float64)
    return float((4 * (sides @ p) * ((1 - sides) @ p)).max())


def test_mass_splitting_uses_at_least_theta(kind: str) -> None:
    """Also where rows have their exact theta instead, nothing attained is above the statement."""
    att = random_attention(kind)
    least = brute_force(att)["every-token"]
    for s in range(att.samples):
        keep = torch.ones(att.tokens, dtype=torch.bool) if att.valid is None else att.valid[s]
        for h in range(att.heads):
            p = att.p[s, h][keep][:, keep]
            cheap, exact = splitting_bound(p), [subsets(row.tolist()) for row in p]
            for found, least_theta, top in zip(
                cheap.tolist(), exact, p.amax(-1).tolist(), strict=True
            ):
                assert found >= least_theta * (1 - 1e-12)
                assert found == pytest.approx(
                    least_theta if top >= 0.5 else 1.0, rel=1e-9, abs=1e-300
                )
            q, k, v = (t[s, h][keep] for t in (att.q, att.k, att.v))
            slopes = (att.scale * q @ att.w_k[h].T).norm(dim=-1)
            slopes = slopes + (att.scale * (k - k.mean(0)) @ att.w_q[h].T).norm(dim=-1).max()
            theta = torch.tensor(exact, dtype=torch.float64)
            moved = torch.cdist(v, v).max() / 2 * (theta * slopes).max()
            value = torch.linalg.matrix_norm(att.w_v[h], 2) + moved
            assert float(value) >= float(least[s, h]) * (1 - 1e-9)


def naive(att: Attention, s: int, h: int) -> dict[str, float]:
    """The statements from blocks of the autograd Jacobian of the definition and dense norms of
    their parts."""
    keep = torch.ones(att.tokens, dtype=torch.bool) if att.valid is None else att.valid[s]
    p, (q, k, v), (w_q, w_k, w_v) = (
        att.p[s, h][keep][:, keep],
        (t[s, h][keep] for t in (att.q, att.k, att.v)),
        (att.w_q[h], att.w_k[h], att.w_v[h]),
    )
    n, o, qt = len(p), p @ v, att.scale * q @ w_k.T
    dense = dense_jacobian(att, s, h).view(n, att.d_v, n, -1).transpose(1, 2)
    d = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        own = att.scale * (p[i][:, None] * (v - o[i])).T @ k @ w_q.T
        for j in range(n):
            a, z = v[j] - o[i], w_v.T @ qt[i]
            form = torch.outer(a, z) + torch.outer(z, a) + qt[i] @ qt[i] * torch.outer(a, a)
            top = max(0.0, float(torch.linalg.eigvalsh(form)[-1]))
            d[i, j] = p[i, j] * math.sqrt(float(torch.linalg.matrix_norm(w_v, 2)) ** 2 + top) + (
                i == j
            ) * torch.linalg.matrix_norm(own, 2)
    rounding = 1e-14 * float(d.max())  # of an entry of the dense Jacobian, whatever its own size
    assert bool((d >= torch.linalg.matrix_norm(dense, 2) * (1 - 1e-9) - rounding).all())
    theta = torch.tensor([splitting(row.tolist()) for row in p], dtype=torch.float64)
    slopes = qt.norm(dim=-1) + (att.scale * (k - k.mean(0)) @ w_q.T).norm(dim=-1).max()
    moved = torch.cdist(v, v).max() / 2 * (theta * slopes).max()
    forms = (torch.where(d > 1e-100, 1 / d, 0.0)[..., None, None] * dense @ dense.mT).sum(1)
    return {
        "lipbound_every": float((d.sum(1) * torch.linalg.eigvalsh(forms)[:, -1]).max().sqrt()),
        "lipbound_every_block": float(d.sum(1).max()),
        "lipbound_one": float(d.square().sum(0).max().sqrt()),
        "mass_splitting": float(torch.linalg.matrix_norm(w_v, 2) + moved),
    }


@pytest.mark.each_value(kind=HARD)
def test_our_bounds_are_their_statements(kind: str) -> None:
    """Up to the upper values of norms of small blocks, within a percent; they are weights in
    ``lipbound_every``, where larger ones may be better."""
    att = random_attention(kind)
    values = bounds.evaluate(att, "all", "every-token") | bounds.evaluate(att, "all", "one-token")
    for s in range(att.samples):
        for h in range(att.heads):
            for name, value in naive(att, s, h).items():
                least = 0.99 if name == "lipbound_every" else 1 - 1e-9
                assert value * least <= float(values[name][s, h]) <= value * 1.01, name
    assert bool((values["lipbound_every"] <= values["lipbound_every_block"] * (1 + 1e-12)).all())
    assert bool(
        (
            values["lipbound_every"]
            <= 1.12 * token_oracle.every_from_above(token_oracle.all_blocks(att))
        ).all()
    )


def printed_newhouse(att: Attention) -> float:
    """The statement for a head without biases."""
    q, k, v = (float(torch.linalg.matrix_norm(w[0], 2)) for w in (att.w_q, att.w_k, att.w_v))
    return v * (1 + 2 * att.scale * q * k * float(att.x.norm(dim=-1).max()) ** 2)


def biased() -> Attention:
    """Queries that come from their bias alone, so that the formula without it has no softmax term,
    while values differ by much."""
    x = torch.tensor([[[0.0, 10], [0, -10]]], dtype=torch.float64)
    w_q, w_k = (torch.tensor([[[c], [0.0]]], dtype=torch.float64) for c in (0.0, 1.0))
    return Attention(
        x,
        w_q,
        w_k,
        torch.eye(2, dtype=torch.float64)[None],
        b_q=torch.tensor([[10.0]], dtype=torch.float64),
    )


def test_newhouse_is_its_statement(kind: str) -> None:
    att = random_attention(kind)
    value = bounds.get("newhouse")(att)
    if att.b_q is None:
        for h in range(att.heads):
            for s in range(att.samples):
                one = att.select(slice(s, s + 1), slice(h, h + 1))
                assert float(value[s, h]) == pytest.approx(printed_newhouse(one), rel=1e-9)
                assert float(value[s, h]) >= printed_newhouse(one) * (1 - 1e-15)
        return
    ones = torch.cat(
        [
            att.x,
            torch.ones_like(att.x[..., :1]) * (1 if att.valid is None else att.valid[..., None]),
        ],
        -1,
    )
    with_row = [
        torch.cat([w, torch.zeros_like(w[:, :1]) if b is None else b[:, None]], 1)
        for w, b in ((att.w_q, att.b_q), (att.w_k, None), (att.w_v, None))
    ]
    torch.testing.assert_close(
        value,
        bounds.get("newhouse")(Attention(ones, *with_row, scale=att.scale)),
        rtol=1e-9,
        atol=0,
    )


def test_newhouse_needs_the_query_bias_and_no_third() -> None:
    att, least = biased(), float(brute_force(biased())["every-token"])
    assert printed_newhouse(att) < 0.1 * least
    assert float(bounds.get("newhouse")(att)) >= least
    one = random_attention("one_token").select(slice(0, 1), slice(0, 1))
    assert printed_newhouse(changed(one, x=0 * one.x)) / 3 < float(brute_force(one)["every-token"])


def test_newhouse_is_none_in_the_frobenius_norm() -> None:
    """All tokens attend to one: the Frobenius norm is sqrt(N) times that of the values, and numbers
    of both norms do not stand side by side."""
    n = 9
    mask = torch.full((n, n), -math.inf, dtype=torch.float64)
    mask[:, 0] = 0.0
    w = torch.ones(1, 1, 1, dtype=torch.float64)
    att = Attention(torch.ones(1, n, 1, dtype=torch.float64), 0 * w, w, w, mask=mask)
    assert float(bounds.get("newhouse")(att)) == pytest.approx(1.0)
    assert float(dense_norms(att)) == pytest.approx(3.0)
    assert float(brute_force(att)["every-token"]) == pytest.approx(1.0)


@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_newhouse_over_a_ball(ball: str) -> None:
    att = random_attention("biases")
    g = torch.Generator().manual_seed(0)
    for radius in (0.1, 1.0):
        value = bounds.get("newhouse").over_ball(att, radius, ball=ball)
        move = torch.randn(att.x.shape, generator=g, dtype=torch.float64)
        size = (
            move.norm(dim=-1, keepdim=True)
            if ball == "token"
            else move.norm(dim=(-1, -2), keepdim=True)
        )
        moved = changed(att, x=att.x + radius * move / size)
        assert bool((value >= brute_force(moved)["every-token"] * (1 - 1e-9)).all())
        assert bool((value >= bounds.get("newhouse")(moved) * (1 - 1e-12)).all())


def test_without_scores_the_block_norms_are_exact() -> None:
    """Where J is P times W_V."""
    att = random_attention("no_query")
    weight = torch.linalg.matrix_norm(att.w_v, 2)
    for name, factor in (
        ("lipbound_every", 1.0),
        ("lipbound_every_block", 1.0),
        ("lipbound_one", att.tokens**-0.5),
    ):
        torch.testing.assert_close(
            bounds.get(name)(att), factor * weight.expand(2, -1), rtol=1e-9, atol=0
        )


def test_one_token_has_one_norm() -> None:
    att = random_attention("one_token")
    for name in OURS:
        torch.testing.assert_close(
            bounds.get(name)(att), bounds.get("lipbound_block")(att), rtol=1e-9, atol=0
        )


# -- sizes, order, derivatives ---------------------------------------------------------------------


@examples(20)
@given(
    kind=st.sampled_from(("plain", "causal", "offsets", "padded", "wide_values", "flat")),
    power=st.integers(-50, 50),
    has=st.sampled_from(HAS),
)
def test_sizes_do_not_matter(kind: str, power: int, has: tuple[str, ...]) -> None:
    """Tokens in other units, and values times a number."""
    att, s = (
        variant_layer(1, frozenset(has), biases=False) if has else random_attention(kind),
        10.0**power,
    )
    if "together" in has:  # the weights that are normalised with are given apart
        return
    other = changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s)
    values = changed(att, w_v=att.w_v * s, b_v=None if att.b_v is None else att.b_v * s)
    for name in NAMES:
        if bounds.get(name).applies(att) and (name in OURS or att.b_q is None):
            before = bounds.get(name)(att)
            torch.testing.assert_close(bounds.get(name)(other), before, rtol=1e-9, atol=0)
            torch.testing.assert_close(bounds.get(name)(values) / s, before, rtol=1e-9, atol=0)


def test_order_of_tokens_and_heads_does_not_matter() -> None:
    att = random_attention("biases")
    order, again = torch.tensor([3, 0, 5, 2, 1, 4]), torch.tensor([2, 0, 2, 1])
    other = changed(
        att, x=att.x[:, order], **{name: getattr(att, name)[again] for name in (*PARTS[1:], "w_o")}
    )
    for name in NAMES:
        torch.testing.assert_close(
            bounds.get(name)(other), bounds.get(name)(att)[:, again], rtol=1e-9, atol=0
        )


@pytest.mark.each_value
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize(
    "kind", ["plain", "biases", "causal", "padded", "flat", "one_token", "wide_values"]
)
def test_derivatives(kind: str, name: str) -> None:
    """Against central differences along a direction of everything the layer is made of."""
    att = random_attention(kind)
    given = {key: t for key in PARTS if (t := getattr(att, key)) is not None}
    g = torch.Generator().manual_seed(1)
    direction = {
        key: t.abs().max() * torch.randn(t.shape, generator=g, dtype=t.dtype)
        for key, t in given.items()
    }
    leaves = {key: t.clone().requires_grad_() for key, t in given.items()}
    total = bounds.get(name)(changed(att, **leaves)).sum()
    found = dict(
        zip(
            leaves,
            torch.autograd.grad(total, list(leaves.values()), materialize_grads=True),
            strict=True,
        )
    )
    step = 1e-6
    ahead, back = (
        float(
            bounds.get(name)(
                changed(att, **{k: t + sign * step * direction[k] for k, t in given.items()})
            ).sum()
        )
        for sign in (1, -1)
    )
    slope = sum(float((found[key] * direction[key]).sum()) for key in given)
    assert slope == pytest.approx(
        (ahead - back) / (2 * step), rel=2e-3, abs=1e-4 * float(total.detach())
    )


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("change", ["equal", "zero", "saturated"])
def test_derivatives_are_finite(change: str, name: str) -> None:
    att = random_attention("plain")
    parts = {
        "equal": {"x": torch.ones_like(att.x)},
        "zero": {"x": 0 * att.x, "w_v": 0 * att.w_v},
        "saturated": {"w_q": 300 * att.w_q},
    }[change]
    leaves = {key: parts.get(key, getattr(att, key)).clone().requires_grad_() for key in PARTS[:4]}
    value = bounds.get(name)(changed(att, **leaves))
    assert all(
        bool(t.isfinite().all())
        for t in torch.autograd.grad(value.sum(), list(leaves.values()), materialize_grads=True)
    )


def test_what_has_no_derivatives_says_what_has() -> None:
    att = changed(random_attention("plain"), w_q=random_attention("plain").w_q.requires_grad_())
    with pytest.raises(
        LipboundError,
        match=r"'lipbound_every' has no derivatives; .* or take 'lipbound_every_block'",
    ):
        bounds.get("lipbound_every")(att)
    with torch.no_grad():
        assert bool(bounds.get("lipbound_every")(att).isfinite().all())


# -- the registry ----------------------------------------------------------------------------------


def test_norms_do_not_mix() -> None:
    att = random_attention("plain")
    assert not set(NAMES) & set(bounds.names())
    assert bounds.names(None) == [*bounds.names(), *NAMES]
    assert bounds.resolve("all") == bounds.names() == bounds.resolve("all", "frobenius")
    assert list(bounds.evaluate(att, "default", "one-token")) == bounds.names("one-token")
    assert list(bounds.evaluate(att, "lipbound_one")) == ["lipbound_one"]
    for call in (
        lambda: bounds.evaluate(att, ["yudin", "lipbound_one"]),
        lambda: bounds.resolve("lipbound_one, lipbound_every"),
        lambda: bounds.resolve(["lipbound_one"], "frobenius"),
        lambda: bounds.resolve("yudin", "every-token"),
    ):
        with pytest.raises(
            LipboundError,
            match=r"bound '\w+' is stated in the [\w-]+ norm and .* are not compared; take some "
            r"of ",
        ) as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.raises(LipboundError, match="unknown norm 'every'; did you mean 'every-token'"):
        bounds.names("every")
    with pytest.raises(LipboundError, match="at='lipbound_one' is stated in the one-token norm"):
        bounds.over_ball(att, 0.1, at="lipbound_one")


@pytest.mark.parametrize("given", ["lipbound_one", ("yudin", "lipbound_one"), ["lipbound_every"]])
def test_runs_are_in_one_norm(given: object) -> None:
    with pytest.raises(
        LipboundError,
        match=r"bound 'lipbound_\w+' is stated in the \w+-token norm and .* take some of kim, ",
    ) as error:
        RunConfig("builtin:minilm", bounds=given)
    assert "\n" not in str(error.value)


def test_facts_say_the_norm() -> None:
    assert {name: bounds.get(name).facts()["norm"] for name in bounds.names(None)} == {
        name: bounds.get(name).norm for name in bounds.names(None)
    }
    assert "every token moves by at most 1" in bounds.get("lipbound_every")._repr_html_()
