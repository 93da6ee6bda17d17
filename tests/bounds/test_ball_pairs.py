"""The bound over a ball: the change of J, and J, against dense Jacobians at points of the ball, and
the whole against steepest ascent."""

import pytest
import torch
from support.ball_ascent import Heads, climb, small_layer, unit
from support.layers import HARD, random_attention
from support.oracles import oracle
from support.variants import MASKS, layer
from torch import Tensor

from lipbound import bounds
from lipbound.analysis import adversarial_inputs
from lipbound.attention.layer import Attention
from lipbound.bounds.ball import CERTIFIED_TOL, Centre, spread
from lipbound.jacobians.head import HeadJacobian

BALLS = ("token", "frobenius")
HOLDS = 1 + 1e-9
HAS = ("rotation", "sinks", "cap", "all")


def variant(has: str, seed: int, **options) -> Attention:
    """A small layer with one variant or with all of them."""
    names = {"rotation", "sinks", "cap"} if has == "all" else {has}
    return layer(seed, frozenset(names), **options)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 8 else ()) for seed in range(20)]
)
def test_no_ascent_gets_above(seed: int) -> None:
    """20 layers x 20 heads; 5,000 of them in benchmarks/balls.py."""
    att, ball, radius = small_layer(seed)
    found = climb(att, radius, ball, steps=8, seed=seed)
    assert bool((found >= oracle(att) * (1 - 1e-9)).all())
    assert bool((bounds.over_ball(att, radius, ball=ball) * HOLDS >= found).all())


def moves(x: Tensor, radius: float, ball: str, count: int, seed: int) -> Tensor:
    """Moves on the sphere around inputs (..., N, D), (count, ..., N, D); in every third of them one
    token moves alone."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randn(count, *x.shape, generator=g, dtype=torch.float64)
    for k in range(0, count, 3):
        found[k, ..., torch.arange(x.shape[-2]) != k // 3 % x.shape[-2], :] = 0
    return unit(found, ball) * radius * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(14))
def test_rows_and_the_jacobian_hold_at_points_of_the_ball(seed: int) -> None:
    """Rows of the softmax, the change of J and J itself, all of them from dense tensors."""
    att, ball, radius = small_layer(seed, samples=1, heads=3)
    centre, heads = Centre(att), Heads(att)
    low, up, _ = centre.reach(radius, ball)
    changed, whole = centre.bounds(radius, ball)
    here, size = heads.jacobian(heads.x), torch.linalg.matrix_norm(heads.jacobian(heads.x), 2)
    for move in moves(heads.x, radius, ball, 12, seed):
        p, jacobian = heads.parts(heads.x + move)[0], heads.jacobian(heads.x + move)
        assert bool((p <= up * HOLDS + 1e-300).all())
        assert bool((p >= low * (1 - 1e-9) - 1e-300).all())
        assert bool((torch.linalg.matrix_norm(jacobian, 2) <= whole * HOLDS).all())
        difference = torch.linalg.matrix_norm(jacobian - here, 2)
        assert bool((difference <= changed * HOLDS + 1e-13 * size).all())


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("relative", [1e-4, 0.03, 1.0])
@pytest.mark.parametrize("has", HAS)
def test_rows_and_the_jacobian_of_variants_hold(has: str, relative: float, ball: str) -> None:
    for seed in range(3):
        one = variant(has, seed, mask=MASKS[seed], n=5, scale=(0.3, 1.0, 3.0)[seed]).unpadded(0)
        radius = relative * float(one.x.norm(dim=-1).mean())
        centre, (n, m) = Centre(one), one.x.shape[1:]
        low, up, _ = centre.reach(radius, ball)
        changed, whole = centre.bounds(radius, ball)
        points = one.x + torch.cat([torch.zeros(1, n, m), *moves(one.x, radius, ball, 12, seed)])
        there = one.at(points.double())
        assert bool((there.p <= up[..., :n] * HOLDS + 1e-300).all())
        assert bool((there.p >= low[..., :n] * (1 - 1e-9) - 1e-300).all())
        dense = HeadJacobian(there).dense().unflatten(0, (len(points), one.heads))
        assert bool((torch.linalg.matrix_norm(dense, 2) <= whole * HOLDS).all())
        assert bool((torch.linalg.matrix_norm(dense - dense[0], 2) <= changed * HOLDS).all())


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])  # 3 has no queries
def test_queries_that_all_move_the_worst_way_stay_below(seed: int, ball: str) -> None:
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
            for vectors in (weights * x, map):
                y = torch.linalg.svd(vectors).Vh[:, 0, :, None]
                still, turn = (x @ y).abs(), radius * (map @ y).norm(dim=1, keepdim=True)
                if ball == "frobenius":
                    turn = (
                        turn
                        * torch.nn.functional.one_hot(w[:, :, j].argmax(-1), att.tokens)[..., None]
                    )
                reached = (weights * (still + turn)).norm(dim=(1, 2))
                assert bool((reached <= limit[:, j] * HOLDS).all())
                share.append(reached / limit[:, j])
    assert float(torch.stack(share).amax()) > 0.9


@pytest.mark.parametrize("ball", BALLS)
def test_it_grows_with_the_radius(ball: str) -> None:
    for kind in ("biases", "offsets"):
        centre = Centre(random_attention(kind).unpadded(1))
        values = torch.stack(
            [torch.cat(centre.bounds(float(r), ball)) for r in torch.logspace(-5, 3, 40)]
        )
        # what norms of small blocks and of matrices are rounded upwards by
        assert bool((values.diff(dim=0) >= -3e-4 * values[1:]).all())


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("kind", ["one_token", "duplicates", "flat", "no_query", "sharp"])
def test_degenerate_layers(kind: str, ball: str) -> None:
    att, radii = random_attention(kind), [0.0, 1e-300, 1e-12, 1e-3, 1e3, 1e60]
    values = bounds.over_ball(att, radii, ball=ball)
    assert bool(torch.isfinite(values).all())
    assert bool((values * HOLDS >= oracle(att)[..., None]).all())
    for radius, value in zip(radii, values.unbind(-1), strict=True):
        if radius <= 1e3:
            assert bool((value * HOLDS >= climb(att, radius, ball, steps=4)).all())


def test_the_ascent_sees_the_norm_of_the_layer() -> None:
    for seed in range(14):
        att, ball, _ = small_layer(seed)
        torch.testing.assert_close(
            climb(att, 0.0, ball, steps=1), oracle(att), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("kind", HARD)
def test_sums_over_pairs_are_those_of_dense_matrices(kind: str) -> None:
    one = random_attention(kind).unpadded(1)
    centre, heads = Centre(one), Heads(one)
    p, apart, qt, kt, _ = heads.parts(heads.x)
    near = kt[:, None] - (p @ kt)[:, :, None]
    weights = p.sqrt()
    for found, vectors in (
        (centre.values(weights)[..., 0], weights.sqrt()[..., None] * apart),
        (centre.keys(weights)[..., 0], weights.sqrt()[..., None] * near),
        (centre.columns(weights), weights.mT.sqrt()[..., None] * qt[:, None]),
    ):
        dense = torch.linalg.matrix_norm(vectors, 2)
        assert bool((found * HOLDS >= dense).all())
        # roots of allowances for rounding, and norms of small blocks rounded upwards
        assert bool((found <= 1.15 * dense + 1e-6 * float(dense.amax()) + 1e-12).all())


def test_a_sum_over_pairs_is_mapped_row_by_row() -> None:
    g = torch.Generator().manual_seed(0)
    w, x, c, f = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in ((2, 5, 6), (2, 6, 3), (2, 5, 3), (2, 5, 3, 4))
    )
    found = spread(w.abs(), x, c, None, lambda rows: f[:, rows])[..., 0]
    apart = (x[:, None] - c[:, :, None]) @ f
    dense = torch.linalg.matrix_norm(w.abs().sqrt()[..., None] * apart, 2)
    assert bool((found * HOLDS >= dense).all())
    assert bool((found <= 1.1 * dense).all())


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("has", "mask", "ball"),
    [(has, mask, BALLS[(i + j) % 2]) for i, has in enumerate(HAS) for j, mask in enumerate(MASKS)],
)
def test_no_attack_on_heads_with_variants_gets_above(has: str, mask: str, ball: str) -> None:
    att, radii = variant(has, len(mask), mask=mask, n=6, samples=1, heads=2), [0.03, 1.0]
    values = bounds.over_ball(att, radii, ball=ball)
    for radius, value in zip(radii, values.unbind(-1), strict=True):
        found = adversarial_inputs.attack(att, radius, ball=ball, steps=3, starts=1, seed=1).norm
        assert bool((value * HOLDS >= found).all())


@pytest.mark.parametrize("kind", HARD)
def test_at_the_centre_it_is_the_exact_norm(kind: str) -> None:
    att = random_attention(kind)
    assert bool((bounds.over_ball(att, 0.0) <= oracle(att) * (1 + 2 * CERTIFIED_TOL)).all())
