"""Bounds over balls: against an adversary, against points of the ball with dense Jacobians there,
against steepest ascent, and at radius 0; the adversary itself."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ball_ascent import climb, small_layer, unit
from support.checks import close, normal, refused
from support.layers import HARD, KINDS, causal, changed, random_attention
from support.oracles import dense_jacobians, oracle
from support.reference import head_function
from support.strategies import examples, part
from support.variants import MASKS, layer

import lipbound as lb
from lipbound.attention.variants.rotary import Rotation
from lipbound.bounds import ball as over_balls
from lipbound.bounds.ball import CERTIFIED_TOL, Centre
from lipbound.linalg.matrix_norms import matrix_norm

BALLS = pytest.mark.parametrize("ball", ["token", "frobenius"])
HOLDS = 1 + 1e-9
HAS = ("rotation", "sinks", "cap", "rotation sinks cap")
SINGLE = ("rotation", "norm", "together", "cap", "sinks")
WITH_RADIUS = [name for name in lb.bounds.names() if lb.bounds.get(name).ball is not None]


def size_of(att):
    """The mean length of a token."""
    return float(att.x.norm(dim=-1).mean())


def moves(x, radius, ball, count, seed):
    """Moves on the sphere around inputs (..., N, D), (count, ..., N, D); in every third of them one
    token moves alone."""
    found = normal(seed)(count, *x.shape)
    for k in range(0, count, 3):
        found[k, ..., torch.arange(x.shape[-2]) != k // 3 % x.shape[-2], :] = 0
    return unit(found, ball) * radius * (1 - 1e-12)


def dense(att):
    """Autograd Jacobians of the definition, of all heads at all inputs without padding, (samples,
    heads, N d_v, N D)."""
    if not att.variants:
        return dense_jacobians(att).flatten(4).flatten(2, 3)
    heads = [torch.func.jacrev(head_function(att, 0, h)) for h in range(att.heads)]
    found = torch.stack([torch.func.vmap(jacobian)(att.x) for jacobian in heads], 1)
    return found.flatten(4).flatten(2, 3)


def norms_at(att, points):
    """Of all heads at inputs (count, N, D), (count, heads)."""
    return torch.linalg.matrix_norm(dense(att.at(points)), 2)


# -- points of the ball ----------------------------------------------------------------------------


def hold(one, radius, ball, seed, points):
    """Rows of the softmax, the change of J and J itself, of one sample without padding."""
    centre, n = Centre(one), one.tokens
    low, up, _ = centre.reach(radius, ball)
    changed, whole = centre.bounds(radius, ball)
    there = one.at(one.x + torch.cat([0 * one.x, *moves(one.x, radius, ball, points, seed)]))
    assert bool((there.p <= up[..., :n] * HOLDS + 1e-300).all())
    assert bool((there.p >= low[..., :n] * (1 - 1e-9) - 1e-300).all())
    j = dense(there)
    size = torch.linalg.matrix_norm(j, 2)
    assert bool((size <= whole * HOLDS).all())
    change = torch.linalg.matrix_norm(j - j[0], 2)
    assert bool((change <= changed * HOLDS + 1e-13 * size[0]).all())
    end = lb.bounds.over_ball(one, [0.0, radius], ball=ball)[0]
    assert bool((end[:, 1] <= (end[:, 0] * (1 + CERTIFIED_TOL) + changed) * HOLDS).all())


@pytest.mark.parametrize("seed", range(14))
def test_small_layers_at_points_of_the_ball(seed):
    att, ball, radius = small_layer(seed, samples=1, heads=3)
    hold(att, radius, ball, seed, 12)


@pytest.mark.each_value(kind=("biases", "padded", "sharp", *HAS))
@BALLS
@pytest.mark.parametrize("relative", [1e-4, 0.03, 1.0])
@pytest.mark.parametrize("kind", [*KINDS, *HAS])
def test_layers_at_points_of_the_ball(kind, relative, ball):
    if kind in KINDS:
        layers = [random_attention(kind, seed=5).unpadded(s) for s in (0, 1)]
    else:
        sizes = zip(MASKS, (0.3, 1.0, 3.0), strict=False)
        made = (layer(i, kind, mask=m, n=5, scale=s) for i, (m, s) in enumerate(sizes))
        layers = [att.unpadded(0) for att in made]
    for seed, att in enumerate(layers):
        hold(att, relative * size_of(att), ball, seed, 30 if kind in KINDS else 12)


def inside(att, ball, radius, count, seed):
    """Inputs of the ball around an unpadded layer, half of them on its boundary, (count, N, D)."""
    part = torch.rand(count, 1, 1, generator=torch.Generator().manual_seed(seed)).double()
    part[::2] = 1
    return att.x + part * moves(att.x[0], radius, ball, count, seed)


def steepest(one, h, top):
    """Of the norm of one head by the inputs, (1, N, D)."""
    x = one.x.clone().requires_grad_()
    op = lb.HeadJacobian(one.select(heads=slice(h, h + 1)).at(x))
    return torch.autograd.grad((top.left[:, h] * op.along(top.right[:, h])).sum(), x)[0]


@examples(50)
@given(
    seed=st.integers(0, 10**6),
    has=st.frozensets(st.sampled_from(("rotation", "cap", "sinks"))),
    options=st.fixed_dictionaries(
        {
            "mask": st.sampled_from(MASKS),
            "n": st.integers(1, 6),
            "d": st.integers(2, 5),
            "d_v": st.integers(1, 4),
            "scale": st.sampled_from([1e-2, 0.3, 1.0, 10.0]),
            "biases": st.booleans(),
            "same": st.booleans(),
        }
    ),
    radius=st.sampled_from([0.0, 1e-4, 1e-2, 0.1, 0.5, 2.0, 10.0]),
    ball=st.sampled_from(("token", "frobenius")),
)
def test_no_point_of_the_ball_is_above(seed, has, options, radius, ball):
    one = layer(seed, has, **options).unpadded(1).select(heads=slice(0, 2))
    bound = lb.bounds.over_ball(one, radius, ball=ball)[0]
    top = lb.spectral_norm(one, tol=1e-6, vectors=True)
    points = [one.x, inside(one, ball, radius, 8, seed)]
    for h in range(2):
        up = steepest(one, h, top)
        # gradients at one-hot rows are so small that their squares vanish
        up = up / up.abs().amax().clamp_min(1e-300)
        step = radius * (1 - 1e-12) * unit(up, ball)
        points += [one.x + step, one.x - step]
    assert bool((bound >= norms_at(one, torch.cat(points)) * (1 - 1e-9)).all())


@pytest.mark.each_value
@pytest.mark.parametrize("has", ["rotation", "cap", "sinks", "rotation sinks"])
@BALLS
def test_keys_and_values_far_from_zero(has, ball):
    draw, b_v = normal(6), torch.full((3, 3), 1e3).double()
    att = layer(6, has, biases=False)
    att = changed(att, b_q=draw(3, 4), b_k=40 * draw(3, 4), b_v=b_v).unpadded(0)
    for radius in (1e-3, 0.1):
        found = norms_at(att, inside(att, ball, radius, 6, 0))
        assert bool((lb.bounds.over_ball(att, radius, ball=ball)[0] * HOLDS >= found).all())


# -- adversary and ascent --------------------------------------------------------------------------


def attacked(att, radius, ball, steps, starts):
    """What the adversary says it has reached, which is the norm there, in the ball, and no bound is
    below it."""
    found = lb.attack(att, radius, ball=ball, steps=steps, starts=starts)
    size = (found.x.double() - att.x[:, None].double()).norm(dim=-1)
    assert float((size if ball == "token" else size.norm(dim=-1)).max()) <= radius
    for h in range(att.heads) if att.dtype == torch.float64 else ():
        there = att.select(heads=slice(h, h + 1)).at(found.x[:, h])
        close(found.norm[:, h], oracle(there)[:, 0], 1e-5)
    if "qk_norm" not in att.variants:
        assert bool((lb.bounds.over_ball(att, radius, ball=ball) * HOLDS >= found.norm).all())
    for name in () if att.variants else WITH_RADIUS:
        if name != "specformer":  # which is none for small inputs
            above = lb.bounds.get(name).over_ball(att, radius, ball=ball) * HOLDS >= found.norm
            assert bool((~lb.bounds.get(name).sound(att) | above).all()), name
    return found.norm


@pytest.mark.each_value(kind=HARD)
@BALLS
def test_the_adversary_attains_its_norm(kind, ball):
    """12 kinds x 6 heads x 3 radii x 2 norms: 432 heads; of `make test` the largest radius."""
    att = random_attention(kind, seed=3)
    exact = oracle(att)
    for relative in (1.0, 0.03, 1e-3)[: part(3, 1)]:
        found = attacked(att, relative * size_of(att), ball, 8, 2)
        assert bool((found >= exact * (1 - 1e-6)).all())


VARIANTS = tuple(enumerate((*HAS, "norm", "together rotation")))
ATTACKED = [
    (has, mask, ("token", "frobenius")[(i + j) % 2])
    for (i, has), (j, mask) in product(VARIANTS, enumerate(MASKS))
]


@pytest.mark.each_value
@pytest.mark.parametrize(("has", "mask", "ball"), ATTACKED)
def test_the_adversary_on_every_variant(has, mask, ball):
    # one head of each would leave their order untested
    att = layer(7, has, mask=mask, scale=0.7).select(heads=slice(0, 2))
    exact = oracle(att)
    for radius in (0.03, 0.2, 1.0):
        found = attacked(att, radius, ball, 3, 1)
        assert bool((found >= exact * (1 - 1e-6)).all())
    assert bool((found > 1.01 * exact).any())


@pytest.mark.each_value
@BALLS
@pytest.mark.parametrize("relative", [1e-7, 1e-6, 1e-4])
def test_float32_attacks_stay_in_the_ball(ball, relative):
    att = random_attention("biases", dtype=torch.float32)
    attacked(att, relative * size_of(att), ball, 6, 2)


@pytest.mark.parametrize(("ball", "seed", "head"), [("frobenius", 0, (1, 0)), ("token", 1, (1, 1))])
def test_the_adversary_turns_sharp_queries_to_other_keys(ball, seed, head):
    """Where attention is nearly one-hot, J does not change at first, and grows by factors once
    another key is reached."""
    att = random_attention("sharp", seed=seed)
    radius = 0.03 * size_of(att)
    attack = partial(lb.attack, att, radius, ball=ball, steps=4)
    found, without = (attack(starts=starts).norm for starts in (7, 6))
    assert bool((found >= without).all())
    assert float(found[head]) > 1.7 * float(without[head])
    assert bool((found <= lb.bounds.over_ball(att, radius, ball=ball) * HOLDS).all())


def test_the_adversary_climbs():
    att = random_attention("plain")
    assert bool((lb.attack(att, 0.5, steps=8).norm > 1.02 * oracle(att)).all())


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 8 else ()) for seed in range(20)]
)
def test_no_ascent_gets_above(seed):
    """20 layers x 20 heads; 5,000 of them in benchmarks/balls.py."""
    att, ball, radius = small_layer(seed)
    found = climb(att, radius, ball, steps=8, seed=seed)
    assert bool((found >= oracle(att) * (1 - 1e-9)).all())
    assert bool((lb.bounds.over_ball(att, radius, ball=ball) * HOLDS >= found).all())
    close(climb(att, 0.0, ball, steps=1), oracle(att), atol=1e-12)


@BALLS
@pytest.mark.parametrize("kind", ["one_token", "duplicates", "flat", "no_query", "sharp"])
def test_degenerate_layers(kind, ball):
    att, radii = random_attention(kind), [0.0, 1e-300, 1e-12, 1e-3, 1e3, 1e60]
    values = lb.bounds.over_ball(att, radii, ball=ball)
    assert bool(torch.isfinite(values).all())
    assert bool((values * HOLDS >= oracle(att)[..., None]).all())
    for radius, value in zip(radii, values.unbind(-1), strict=True):
        if radius <= 1e3:
            assert bool((value * HOLDS >= climb(att, radius, ball, steps=4)).all())


@pytest.mark.each_value
@pytest.mark.parametrize("has", [*SINGLE, "norm rotation sinks", "together rotation cap"])
@pytest.mark.parametrize("mask", ["none", "padded"])
def test_gradients_are_those_of_the_norm(has, mask):
    """Of u^T J(X) v at the top singular pair, against differences of norms of dense Jacobians."""
    att = layer(7, has, mask=mask).unpadded(1).select(heads=slice(1, 2))
    gradient = steepest(att, 0, lb.spectral_norm(att, tol=1e-12, vectors=True))
    e, h = normal(1)(*att.x.shape), 1e-4
    steps = torch.tensor([1.0, -1, 2, -2]).double().view(4, 1, 1)
    a, b, c, d = norms_at(att, att.x + h * steps * e)[:, 0].tolist()
    difference = (8 * (a - b) - (c - d)) / (12 * h)
    assert float((gradient * e).sum()) == pytest.approx(difference, rel=1e-7, abs=1e-8)


def test_gradients_of_saturated_caps_are_numbers():
    att = layer(0, frozenset({"cap"}), scale=100.0)
    x = att.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(att.at(x).weights.sum(), x)
    assert bool(torch.isfinite(gradient).all())
    z = 3 * att.scale * torch.linspace(-5, 5, 11, dtype=torch.float64)
    close(att.slopes(z[:, None])[:, 0], (z / att.cap).cosh() ** -2, 1e-7, 1e-7)


# -- at radius 0, and as it grows ------------------------------------------------------------------

CENTRES = [(kind, ball) for kind in KINDS for ball in ("token", "frobenius")]
CENTRES += [("rotation", "token"), ("rotation sinks", "frobenius")]
CENTRES += [("cap", "frobenius"), ("cap sinks", "token")]


def of_name(name):
    """A layer of a kind, or with variants."""
    return random_attention(name) if name in KINDS else layer(9, name, mask="causal")


@pytest.mark.each_value(name=(*HARD, "rotation", "rotation sinks", "cap", "cap sinks"))
@pytest.mark.parametrize(("name", "ball"), CENTRES)
def test_radius_zero_is_the_point_and_bounds_grow(name, ball):
    att, radii = of_name(name), [0.0, 1e-7, 1e-4, 1e-2, 0.3, 3.0, 100.0, 1e60]
    exact, ours = oracle(att), lb.bounds.get("lipbound")(att)
    value = lb.bounds.over_ball(att, radii, ball=ball, at="lipbound")
    close(value[..., 0], ours.minimum(value[..., 0] * (1 + 1e-5)), 1e-5, 1e-12)
    value = lb.bounds.over_ball(att, radii, ball=ball)
    assert bool((value[..., 0] <= exact * (1 + 2 * CERTIFIED_TOL)).all())
    assert bool((value[..., 1] <= exact * (1 + 2e-3)).all())
    assert bool((value.diff(dim=-1) >= -1e-9 * value[..., 1:]).all())
    assert bool(torch.isfinite(value).all())
    if ball == "frobenius":
        assert bool((value <= lb.bounds.over_ball(att, radii) * (1 + 1e-3)).all())
    for other in WITH_RADIUS if name in KINDS else ():
        value, point = lb.bounds.get(other).over_ball(att, 0, ball=ball), lb.bounds.get(other)(att)
        if other == "yudin":  # g_1 for the exact norm
            assert bool(((value >= point * (1 - 1e-9)) & (value <= 2 * point)).all())
        else:
            close(value, point)


def test_radii_come_as_any_number():
    att = random_attention("plain")
    value = lb.bounds.over_ball(att, 0.25)
    assert torch.equal(lb.bounds.over_ball(att, torch.tensor(0.25)), value)
    assert torch.equal(lb.bounds.over_ball(att, torch.tensor([0.25]))[..., 0], value)


def test_neutral_variants_have_nearly_the_plain_bound():
    """With a rotation less is known of queries that move, with a sink it counts as one more key."""
    plain = layer(1, frozenset())
    still = changed(plain, rotation=Rotation.of_angles(torch.zeros(plain.tokens, 2)))
    sink = changed(plain, sinks=torch.full((3,), -1e4).double())
    for radius, most in ((1e-3, 1.1), (0.1, 2)):
        value, *others = (
            lb.bounds.over_ball(one, radius, at="lipbound_block") for one in (plain, still, sink)
        )
        for other in others:
            assert bool(((other >= 0.98 * value) & (other <= most * value)).all())


# -- the parts of a bound --------------------------------------------------------------------------


def test_softmax_interval_is_attained_at_corners():
    scores = torch.tensor([[0.0, 1.0, -2.0, float("-inf")]], dtype=torch.float64)
    tau = torch.tensor([[0.5, 0.1, 2.0, 1.0]], dtype=torch.float64)
    low, high = over_balls.softmax_interval(scores, tau)
    for j in range(3):
        move = torch.where(torch.arange(4) == j, tau, -tau)
        for end, corner in ((high, scores + move), (low, scores - move)):
            close(end[0, j], torch.softmax(corner, -1)[0, j], 1e-10)
    assert float(low[0, 3]) == float(high[0, 3]) == 0


def test_intervals_reach_zero_where_scores_are_far_apart():
    """Two one-hot tokens that a wide ball lets tie: the norm there is far above what rows that stay
    one-hot would allow."""
    scores, tau = torch.tensor([[[0.0, -1.0]], [[1600.0, 800.0]]], dtype=torch.float64)
    low, high = over_balls.softmax_interval(scores, tau)
    assert float(low.max()) < 1e-300
    assert float(high.min()) > 1 - 1e-12
    eye = torch.eye(2, dtype=torch.float64)[None]
    move = torch.tensor([[30.0, -30.0], [30.0, -30.0]], dtype=torch.float64) * 0.98
    att = lb.Attention(5 * eye, eye, eye, eye, scale=1.0)
    value = float(lb.bounds.get("yudin").over_ball(att, 60.0, ball="frobenius"))
    assert value >= max(985, float(oracle(att.at(att.x + move))))


@BALLS
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])  # 3 has no queries
def test_queries_that_all_move_the_worst_way_stay_below(seed, ball):
    """All in step along one direction, or the one of largest weight alone; the sum is nearly
    reached where this is the worst that there is."""
    att, _, radius = small_layer(seed, samples=1, heads=3)
    centre, g = Centre(att), torch.Generator().manual_seed(seed)
    w = torch.rand(3, att.tokens, att.tokens, generator=g, dtype=torch.float64)
    most = radius**2 * (w.sum(-2) if ball == "token" else w.amax(-2))
    qt, a = att.scale * att.q[0] @ att.w_k.mT, att.scale * att.w_q @ att.w_k.mT
    share = []
    limits = [moving.columns(w, most) for moving in centre.moving]
    for limit, x, map in zip(limits, (qt, qt @ att.w_v), (a, a @ att.w_v), strict=True):
        for j in range(att.tokens):
            weights = w[:, :, j, None].sqrt()
            first = torch.nn.functional.one_hot(w[:, :, j].argmax(-1), att.tokens)[..., None]
            for vectors in (weights * x, map):
                y = torch.linalg.svd(vectors).Vh[:, 0, :, None]
                still, turn = (x @ y).abs(), radius * (map @ y).norm(dim=1, keepdim=True)
                turn = turn if ball == "token" else turn * first
                reached = (weights * (still + turn)).norm(dim=(1, 2))
                assert bool((reached <= limit[:, j] * HOLDS).all())
                share.append(reached / limit[:, j])
    assert float(torch.stack(share).amax()) > 0.9


@pytest.mark.parametrize("kind", HARD)
def test_sums_over_pairs_are_those_of_dense_matrices(kind):
    one = random_attention(kind).unpadded(1)
    centre, p, v = Centre(one), one.p[0], one.v[0]
    apart = v[:, None] - (p @ v)[:, :, None]  # values less outputs
    qt, kt = one.scale * one.q[0] @ one.w_k.mT, one.scale * one.k[0] @ one.w_q.mT
    near, weights = kt[:, None] - (p @ kt)[:, :, None], p.sqrt()
    for found, vectors in (
        (centre.values(weights)[..., 0], weights.sqrt()[..., None] * apart),
        (centre.keys(weights)[..., 0], weights.sqrt()[..., None] * near),
        (centre.columns(weights), weights.mT.sqrt()[..., None] * qt[:, None]),
    ):
        exact = torch.linalg.matrix_norm(vectors, 2)
        # roots of allowances for rounding, and norms of small blocks rounded upwards
        most = 1.15 * exact + 1e-6 * float(exact.amax()) + 1e-12
        assert bool(((found * HOLDS >= exact) & (found <= most)).all())


def test_norms_of_turned_products():
    """At least all of them; no more than the largest where turns depend on distances."""
    for positions in (torch.arange(7.0), torch.tensor([0.0, 5.0, 1.0, 9.0, 2.0, 2.5, 30.0])):
        turn = Rotation.of_angles(positions[:, None] * torch.tensor([1.0, 0.1]))
        turn = Rotation((1.2 * turn.cos).float(), (1.2 * turn.sin).float())
        att = layer(3, frozenset(), n=7)
        att = att.with_parts(rotation=turn)
        eye = torch.eye(4, dtype=torch.float64)[:, None].expand(-1, 7, -1)
        turned = att.rotation.turn(eye).permute(1, 2, 0)  # R_i, (7, 4, 4)
        between = turned.mT[:, None] @ turned[None]
        products = att.scale * att.w_q[:, None, None] @ between @ att.w_k.mT[:, None, None]
        largest, value = matrix_norm(products).amax((-1, -2)), over_balls.largest_a(att)
        assert bool((value >= largest * (1 - 1e-10)).all())
        assert float(positions[1]) != 1 or bool((value <= largest * 1.05).all())


# -- curves, and the layer at other inputs ---------------------------------------------------------


def test_curves_bracket():
    att = random_attention("biases").select(slice(0, 1))
    ds = lb.radius_curve(att, [0.0, 0.1, 1.0], steps=4, starts=2)
    assert ds["over_ball"].dims == ("sample", "head", "radius")
    assert bool((ds["adversary"].diff("radius") >= 0).all())
    assert bool((ds["castin_bias"] >= ds["adversary"]).all())
    att = layer(2, frozenset({"rotation", "sinks"}))
    turned = lb.radius_curve(att, [0.0, 0.1, 1.0], steps=1, starts=1)
    assert set(turned) == {"over_ball", "adversary"}
    for curve in (ds, turned):
        assert bool((curve["adversary"] <= curve["over_ball"]).all())
        lb.plots.ball_curve(curve)
    curve = partial(lb.radius_curve, att, [0.1], bounds=("castin_bias",))
    refused(curve, "does not cover rotary", error=lb.errors.AttentionError)


def test_normalised_queries_and_keys_have_no_bound_over_balls():
    att = layer(1, frozenset({"norm", "rotation"}))
    for call in (
        partial(lb.bounds.over_ball, att, 0.1),
        partial(lb.radius_curve, att, [0.1], adversary=False),
    ):
        words = "over_ball does not cover normalised queries and keys, whose derivative changes"
        refused(call, words, error=lb.errors.AttentionError)
    assert set(lb.radius_curve(att, [0.0, 0.1], steps=2, starts=1)) == {"adversary"}


def test_the_layer_at_other_inputs():
    att = layer(4, frozenset({"rotation", "together", "cap", "sinks"}), mask="padded")
    close(oracle(att.at(att.x)), oracle(att))
    more = torch.cat([att.x, att.x])[:3]
    free = att.at(more, valid=None)
    assert (free.samples, free.valid, free.cap, free.sinks is att.sinks) == (3, None, 1.5, True)
    assert bool((att.at(att.x, mask=causal(5)).p[0, :, 0, 1:] == 0).all())
    refused(partial(att.at, more), "valid has shape")
    refused(partial(att.at, att.x[:, :3], valid=None), "rotation is of 5 tokens")
    for bare in (att.without_biases(), random_attention("biases").without_biases()):
        assert bare.b_q is bare.b_k is bare.b_v is None
    bare = att.without_biases()
    assert bare.norm_q.over[1] is None
    # normalised without biases
    sizes = [float(one.q[0].abs().max()) for one in (bare.at(2 * att.x), bare)]
    assert math.isclose(*sizes, rel_tol=1e-5)
