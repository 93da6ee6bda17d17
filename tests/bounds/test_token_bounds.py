"""Bounds in the norms of single tokens: their statements, and never below what brute force
attains."""

import math
from decimal import Decimal
from itertools import product

import pytest
import torch
from hypothesis import given
from support import hard_heads, judge, token_oracle
from support.checks import close, normal
from support.layers import HARD, changed, places, query_bias_alone, random_attention
from support.oracles import dense_norms
from support.reference import dense_jacobian
from support.strategies import MODERATE, examples, layers, part
from support.variants import HAS
from support.variants import layer as variant_layer

import lipbound as lb
from lipbound import bounds
from lipbound.attention.softmax import splitting_bound

NAMES = [name for norm in ("every-token", "one-token") for name in bounds.names(norm)]
OURS = [name for name in NAMES if name != "newhouse"]


def brute_force(att, steps=20):
    """Attained values of both norms, (samples, heads). Biases that J does not see would cancel
    digits of the reference, and are left out."""
    j = token_oracle.all_blocks(att if att.variants else changed(att, b_k=None, b_v=None))
    return {
        "every-token": token_oracle.every_from_below(j, 2, steps),
        "one-token": token_oracle.one(j)[0],
    }


def check(att, slack=1e-9):
    least = brute_force(att)
    for name in NAMES:
        bound = bounds.get(name)
        if not bound.applies(att):
            continue
        value, sound = bound(att), bound.sound(att)
        assert value.shape == sound.shape == (att.samples, att.heads)
        assert not bool(value.isnan().any()), name
        assert bool((~sound | (value >= least[bound.norm] * (1 - slack))).all()), name


# -- the reference ---------------------------------------------------------------------------------


def test_brute_force_meets_itself(kind):
    """Both ends of the reference, so that what is compared with it is compared with the norm."""
    j = token_oracle.all_blocks(random_attention(kind))
    lower, upper = token_oracle.every_from_below(j, 6, 200), token_oracle.every_from_above(j)
    assert bool((lower <= upper * (1 + 1e-12)).all())
    assert float((upper / lower).max()) < 1.01


def test_a_perturbation_attains_it():
    """The value of the ascent is a length of an output: no formula of duality in between."""
    j = token_oracle.blocks(random_attention("plain"), 0)[0]
    moves = normal()(2000, len(j), j.shape[-1])
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
def test_no_sound_bound_is_below_what_is_attained(att):
    """25 shapes x 60 heads."""
    check(att)


@examples(20)
@given(layers(torch.float32, **MODERATE))
def test_no_sound_bound_is_below_what_is_attained_in_float32(att):
    """Of the given float32 numbers; 20 shapes x 60 heads."""
    check(att)


@pytest.mark.each_value
@pytest.mark.parametrize("side", [slice(4, None), slice(0, 2)], ids=["right", "left"])
@pytest.mark.parametrize("name", sorted({*NAMES, *bounds.names()}))
def test_padding_does_not_count(name, side):
    """A padded sample has the bounds of its own tokens, also where those are far from zero."""
    draw = normal()
    x, w = 9 + draw(1, 6, 5), [draw(2, 5, 3) for _ in range(3)]
    valid = torch.ones(1, 6, dtype=torch.bool)
    valid[:, side] = False
    padded, alone = lb.Attention(x, *w, valid=valid), lb.Attention(x[:, valid[0]], *w)
    found, own = (bounds.evaluate(att, [name])[name] for att in (padded, alone))
    close(found, own, 1e-7)


@pytest.mark.parametrize("mask", ["none", "causal", "padded"])
@pytest.mark.parametrize("has", HAS)
def test_heads_with_variants(has, mask):
    for seed in range(part(3, 1)):
        check(variant_layer(seed, frozenset(has), mask=mask))


@pytest.mark.each_value(family=tuple(hard_heads.FAMILIES)[::2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_hard_heads_in_80_digits(family, dtype):
    """Nothing is allowed for rounding."""
    att = judge.case(family, dtype, 1).select(slice(0, 1), slice(0, 2))
    for h in range(att.heads):
        least = token_oracle.attained(att, 0, h)
        for name in NAMES:
            bound = bounds.get(name)
            if bound.applies(att) and bool(bound.sound(att)[0, h]):
                value = float(bound(att)[0, h])
                assert value == math.inf or Decimal(value) >= least[bound.norm], name


@pytest.mark.each_value(kind=HARD)
def test_whole_layers(kind):
    """Heads put together, and projected: by the blocks of the dense Jacobian of the layer."""
    att = random_attention(kind)
    for map in ("heads", "layer"):
        for s in range(att.samples):
            (whole,) = token_oracle.blocks(att, s, map)
            every, one = token_oracle.every_from_below(whole, 6, 20), token_oracle.one(whole)[0]
            for name, rule in product(NAMES, ("best", "sum", "root_sum_square", "folded")):
                least = float(every if bounds.get(name).norm == "every-token" else one)
                value = bounds.whole_layer(att, name, map=map, rule=rule)[s]
                assert float(value) >= least * (1 - 1e-9), (name, rule)


# -- statements ------------------------------------------------------------------------------------


def subsets(p):
    """theta of rows, over all sets of their entries; no sum is a difference from 1."""
    sides = torch.tensor(list(product((0.0, 1.0), repeat=p.shape[-1])), dtype=torch.float64)
    return (4 * (p @ sides.T) * (p @ (1 - sides).T)).amax(-1)


def split(one, h, theta):
    """The statement of mass splitting, of one sample without padding."""
    q, k, v = (t[0, h] for t in (one.q, one.k, one.v))
    slopes = (one.scale * q @ one.w_k[h].T).norm(dim=-1)
    slopes = slopes + (one.scale * (k - k.mean(0)) @ one.w_q[h].T).norm(dim=-1).max()
    moved = torch.cdist(v, v).max() / 2 * (theta * slopes).max()
    return float(torch.linalg.matrix_norm(one.w_v[h], 2) + moved)


def test_mass_splitting_uses_at_least_theta(kind):
    """Also where rows have their exact theta instead, nothing attained is above the statement."""
    att = random_attention(kind)
    least = brute_force(att)["every-token"]
    for s in range(att.samples):
        one = att.unpadded(s)
        cheap, exact = splitting_bound(one.p[0]), subsets(one.p[0])
        assert bool((cheap >= exact * (1 - 1e-12)).all())
        close(cheap, torch.where(one.p[0].amax(-1) >= 0.5, exact, 1.0), 1e-9, 1e-300)
        for h in range(att.heads):
            assert split(one, h, exact[h]) >= float(least[s, h]) * (1 - 1e-9)


@pytest.mark.each_value(kind=HARD)
def test_layers_are_below_the_form_of_theorem_5_1(kind):
    """||W_O|| sum_h (||W_V^h|| + theta_h Phi_h / tau) with the Phi_h of Lemma 104 and the exact
    theta, of Emadi 2026, and no less than what mass splitting makes of the layer."""
    att = random_attention(kind)
    for s in range(att.samples):
        one, total = att.unpadded(s), 0.0
        for h in range(att.heads):
            theta, cheap = subsets(one.p[0, h]), splitting_bound(one.p[0, h])
            total += split(one, h, torch.full_like(theta, float(theta.max())))
            assert split(one, h, theta) <= split(one, h, cheap) * (1 + 1e-12)
        form = float(torch.linalg.matrix_norm(one.w_o.flatten(0, 1), 2)) * total
        (whole,) = token_oracle.blocks(att, s, "layer")
        assert form >= float(token_oracle.every_from_below(whole, 6, 20)) * (1 - 1e-9)
        if bool((one.p.amax(-1) >= 0.5).all()):  # where the cheap theta is exact
            assert float(bounds.whole_layer(att, "mass_splitting")[s]) <= form * (1 + 1e-9)


def naive(one, h):
    """The statements from blocks of the autograd Jacobian of the definition and dense norms of
    their parts, of one sample without padding."""
    p, q, k, v = (t[0, h] for t in (one.p, one.q, one.k, one.v))
    n, qt, size = len(p), one.scale * q @ one.w_k[h].T, torch.linalg.matrix_norm(one.w_v[h], 2)
    dense = dense_jacobian(one, 0, h).view(n, one.d_v, n, -1).transpose(1, 2)
    a, z = v - (p @ v)[:, None], (qt @ one.w_v[h])[:, None, :, None]  # (i, j, d_v)
    outer, square = a[..., None] * z.mT, qt.square().sum(1)[:, None, None, None]
    form = outer + outer.mT + square * a[..., None] * a[..., None, :]
    top = torch.linalg.eigvalsh(form)[..., -1].clamp_min(0)
    own = one.scale * (p[..., None] * a).mT @ k @ one.w_q[h].T
    d = p * (size**2 + top).sqrt() + torch.linalg.matrix_norm(own, 2).diag()
    rounding = 1e-14 * float(d.max())  # of an entry of the dense Jacobian, whatever its own size
    assert bool((d >= torch.linalg.matrix_norm(dense, 2) * (1 - 1e-9) - rounding).all())
    top = p.amax(-1)  # the printed upper value of theta: of the largest entry from 1/2 on, else 1
    forms = (torch.where(d > 1e-100, 1 / d, 0.0)[..., None, None] * dense @ dense.mT).sum(1)
    return {
        "lipbound_every": float((d.sum(1) * torch.linalg.eigvalsh(forms)[:, -1]).max().sqrt()),
        "lipbound_every_block": float(d.sum(1).max()),
        "lipbound_one": float(d.square().sum(0).max().sqrt()),
        "mass_splitting": split(one, h, torch.where(top >= 0.5, 4 * top * (1 - top), 1.0)),
    }


@pytest.mark.each_value(kind=HARD)
def test_our_bounds_are_their_statements(kind):
    """Up to the upper values of norms of small blocks, within a percent; they are weights in
    ``lipbound_every``, where larger ones may be better."""
    att = random_attention(kind)
    values = bounds.evaluate(att, "all", "every-token") | bounds.evaluate(att, "all", "one-token")
    for s, h in places(att):
        for name, value in naive(att.unpadded(s), h).items():
            least = 0.99 if name == "lipbound_every" else 1 - 1e-9
            assert value * least <= float(values[name][s, h]) <= value * 1.01, name
    assert bool((values["lipbound_every"] <= values["lipbound_every_block"] * (1 + 1e-12)).all())
    above = token_oracle.every_from_above(token_oracle.all_blocks(att))
    assert bool((values["lipbound_every"] <= 1.12 * above).all())


def printed_newhouse(att):
    """The statement for a head without biases."""
    q, k, v = (float(torch.linalg.matrix_norm(w[0], 2)) for w in (att.w_q, att.w_k, att.w_v))
    return v * (1 + 2 * att.scale * q * k * float(att.x.norm(dim=-1).max()) ** 2)


def test_newhouse_is_its_statement(kind):
    att = random_attention(kind)
    value = bounds.get("newhouse")(att)
    if att.b_q is None:
        for s, h in places(att):
            printed = printed_newhouse(att.select(slice(s, s + 1), slice(h, h + 1)))
            assert printed * (1 - 1e-15) <= float(value[s, h]) <= printed * (1 + 1e-9)
        return
    ones = torch.ones_like(att.x[..., :1]) * (1 if att.valid is None else att.valid[..., None])
    with_row = [
        torch.cat([w, torch.zeros_like(w[:, :1]) if b is None else b[:, None]], 1)
        for w, b in ((att.w_q, att.b_q), (att.w_k, None), (att.w_v, None))
    ]
    longer = lb.Attention(torch.cat([att.x, ones], -1), *with_row, scale=att.scale)
    close(value, bounds.get("newhouse")(longer))


def test_newhouse_needs_the_query_bias_and_no_third():
    att = query_bias_alone(10, -10)  # without it the formula has no softmax term
    least = float(brute_force(att)["every-token"])
    assert printed_newhouse(att) < 0.1 * least
    assert float(bounds.get("newhouse")(att)) >= least
    one = random_attention("one_token").select(slice(0, 1), slice(0, 1))
    assert printed_newhouse(changed(one, x=0 * one.x)) / 3 < float(brute_force(one)["every-token"])


def test_newhouse_is_none_in_the_frobenius_norm():
    """All tokens attend to one: the Frobenius norm is sqrt(N) times that of the values, and numbers
    of both norms do not stand side by side."""
    mask = torch.full((9, 9), -math.inf, dtype=torch.float64)
    mask[:, 0] = 0.0
    x, w = torch.ones(1, 9, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    att = lb.Attention(x, 0 * w, w, w, mask=mask)
    assert float(bounds.get("newhouse")(att)) == pytest.approx(1.0)
    assert float(dense_norms(att)) == pytest.approx(3.0)
    assert float(brute_force(att)["every-token"]) == pytest.approx(1.0)


@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_newhouse_over_a_ball(ball):
    att, draw = random_attention("biases"), normal()
    for radius in (0.1, 1.0):
        value, move = bounds.get("newhouse").over_ball(att, radius, ball=ball), draw(*att.x.shape)
        size = move.norm(dim=-1 if ball == "token" else (-1, -2), keepdim=True)
        moved = changed(att, x=att.x + radius * move / size)
        assert bool((value >= brute_force(moved)["every-token"] * (1 - 1e-9)).all())
        assert bool((value >= bounds.get("newhouse")(moved) * (1 - 1e-12)).all())


def test_where_block_norms_are_exact():
    """Where J is P times W_V; and one token has one norm."""
    att = random_attention("no_query")
    weight = torch.linalg.matrix_norm(att.w_v, 2).expand(2, -1)
    for name in ("lipbound_every", "lipbound_every_block", "lipbound_one"):
        share = att.tokens**-0.5 if name == "lipbound_one" else 1.0
        close(bounds.get(name)(att), share * weight)
    att = random_attention("one_token")
    for name in OURS:
        close(bounds.get(name)(att), bounds.get("lipbound_block")(att))


def test_weights_that_would_overflow():
    """Where keys are far away, and what a token does at others all but vanishes."""
    att = judge.case("common_offset", torch.float64, 50002)
    every = bounds.get("lipbound_every")
    close(every(att)[4, 1], every(att.select(slice(4, 5), slice(1, 2)))[0, 0], 1e-9)
    norm = lb.token_norm(att.select(slice(4, 5), slice(1, 2)))
    assert float(norm.lower) <= float(every(att)[4, 1]) < 2 * float(norm.upper)
