"""The bound over a ball by pairs of tokens: every part of it against dense Jacobians at points of
the ball, and the whole against steepest ascent."""

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
from lipbound.bounds.ball.centre_pairs import PairedBallCentre, PairedVariantCentre
from lipbound.bounds.ball.over_ball import CERTIFIED_TOL, _over_ball

BALLS = ("token", "frobenius")
HOLDS = 1 + 1e-9
HAS = ("rotation", "sinks", "both")


def by_entries(att: Attention, radius: float | list[float], ball: str) -> Tensor:
    return _over_ball(att, radius, ball, "certified", entries_only=True)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 8 else ()) for seed in range(20)]
)
def test_no_ascent_gets_above(seed: int) -> None:
    """20 layers x 20 heads; 5,000 of them in benchmarks/balls.py."""
    att, ball, radius = small_layer(seed)
    found = climb(att, radius, ball, steps=8, seed=seed)
    assert bool((found >= oracle(att) * (1 - 1e-9)).all())
    assert bool((bounds.over_ball(att, radius, ball=ball) * HOLDS >= found).all())


@pytest.mark.parametrize("seed", range(14))
def test_every_part_holds_at_points_of_the_ball(seed: int) -> None:
    """Rows of the softmax, means, covariances, B and the part of J through keys, all of them from
    dense tensors."""
    att, ball, radius = small_layer(seed, samples=1, heads=3)
    centre, heads = PairedBallCentre(att), Heads(att)
    to, g = centre._moved(radius, ball), torch.Generator().manual_seed(seed)
    own, own_up = centre._own(to)
    p, apart, qt, kt, b = heads.parts(heads.x)
    n = att.tokens
    near_k = kt[:, None] - (p @ kt)[:, :, None]
    held = (to.c_v + to.m_v).square() * to.up
    most = radius**2 * (held.sum(-2) if ball == "token" else held.amax(-2))
    turned = centre.norm_a * most.amax(-1).sqrt()
    reached, whole = centre._reached(held, most), centre._whole(to, held, most, own_up)
    assert bool(
        (reached[0] <= (centre.columns(held) + centre.norm_a[:, None] * most.sqrt()) * HOLDS).all()
    )
    for k in range(12):
        move = (
            unit(torch.randn(heads.x.shape, generator=g, dtype=torch.float64), ball)
            * radius
            * (1 - 1e-12)
        )
        if k % 3 == 0 and ball == "frobenius":
            move = torch.zeros_like(move).index_copy(
                1, torch.tensor([k % n]), unit(move[:, [k % n]], "token") * radius * (1 - 1e-12)
            )
        p2, apart2, qt2, _, b2 = heads.parts(heads.x + move)
        assert bool((p2 <= to.up * HOLDS + 1e-300).all())
        assert bool(((p2 - p).abs() <= to.change * HOLDS + 1e-15).all())
        mean, mean_k = (
            (p2[..., None] * apart).sum(2).norm(dim=-1),
            (p2[..., None] * near_k).sum(2).norm(dim=-1),
        )
        assert bool((mean <= to.w[..., 0] * HOLDS + 1e-14 * apart.norm(dim=-1).amax()).all())
        assert bool((mean_k <= to.w_k[..., 0] * HOLDS + 1e-14 * near_k.norm(dim=-1).amax()).all())
        spread = torch.linalg.matrix_norm(p2.sqrt()[..., None] * apart2, 2)
        assert bool((spread <= (to.c_v + to.m_v)[..., 0] * HOLDS).all())
        size = torch.linalg.matrix_norm(b, 2).amax() + 1e-300
        assert bool(
            (torch.linalg.matrix_norm(b2 - b, 2) <= own[..., 0] * HOLDS + 1e-13 * size).all()
        )
        assert bool(
            (torch.linalg.matrix_norm(b2, 2) <= own_up[..., 0] * HOLDS + 1e-13 * size).all()
        )
        keys, keys2 = (
            torch.einsum("bij,bijv,bid->bivjd", *t).flatten(3).flatten(1, 2)
            for t in ((p, apart, qt), (p2, apart2, qt2))
        )
        for limit, vectors in zip(reached, (qt2, qt2 @ att.w_v), strict=True):
            columns = torch.linalg.matrix_norm(held.mT.sqrt()[..., None] * vectors[:, None], 2)
            assert bool((columns <= limit * HOLDS).all())
        rest2 = torch.einsum("bij,bdv->bivjd", p2, att.w_v).flatten(3).flatten(1, 2)
        rest2 = rest2 + torch.einsum(
            "ij,bivd->bivjd", torch.eye(n, dtype=torch.float64), b2
        ).flatten(3).flatten(1, 2)
        for limit, matrix in zip(whole, (keys2, rest2, keys2 @ rest2.mT), strict=True):
            assert bool((torch.linalg.matrix_norm(matrix, 2) <= limit * HOLDS).all())
        changed = (centre._keys(to) + turned) * HOLDS + 1e-13 * torch.linalg.matrix_norm(keys, 2)
        assert bool((torch.linalg.matrix_norm(keys2 - keys, 2) <= changed).all())


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])  # 3 has no queries
def test_queries_that_all_move_the_worst_way_stay_below(seed: int, ball: str) -> None:
    """All in step along one direction, or the one of largest weight alone; the sum is nearly
    reached where this is the worst that there is."""
    att, _, radius = small_layer(seed, samples=1, heads=3)
    centre, g = PairedBallCentre(att), torch.Generator().manual_seed(seed)
    w = torch.rand(3, att.tokens, att.tokens, generator=g, dtype=torch.float64)
    most = radius**2 * (w.sum(-2) if ball == "token" else w.amax(-2))
    qt, a = att.scale * att.q[0] @ att.w_k.mT, att.scale * att.w_q @ att.w_k.mT
    share = []
    for limit, x, map in zip(
        centre._reached(w, most), (qt, qt @ att.w_v), (a, a @ att.w_v), strict=True
    ):
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
@pytest.mark.parametrize("kind", HARD)
def test_nothing_rises_and_much_falls(kind: str, ball: str) -> None:
    att = random_attention(kind)
    radii = [0.0, 1e-6, 1e-3, 0.1, 1.0, 50.0, 1e6]
    new, old = (
        bounds.over_ball(att, radii, ball=ball),
        _over_ball(att, radii, ball, "certified", entries_only=True),
    )
    assert bool((new <= old * (1 + 1e-12)).all())
    assert bool((new < 0.8 * old).any())
    assert bool((new[..., 0] <= oracle(att) * (1 + 2 * CERTIFIED_TOL)).all())


@pytest.mark.parametrize("ball", BALLS)
def test_it_grows_with_the_radius(ball: str) -> None:
    for kind in ("biases", "offsets"):
        centre = PairedBallCentre(random_attention(kind).unpadded(1))
        values = torch.stack(
            [torch.cat(centre.by_pairs(float(r), ball)) for r in torch.logspace(-5, 3, 40)]
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
def test_sums_of_variants_are_those_of_plain_heads(kind: str) -> None:
    one = random_attention(kind).unpadded(1)
    centre = PairedBallCentre(one)
    other = PairedVariantCentre(one)
    weights = centre.p.sqrt() * centre.allowed
    for name in ("values", "keys", "columns"):
        expected = getattr(centre, name)(weights)
        allowance = 1e-6 * float(expected.amax())  # roots of allowances for rounding
        torch.testing.assert_close(
            getattr(other, name)(weights), expected, rtol=1e-3, atol=allowance
        )


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("has", "mask", "ball"),
    [(has, mask, BALLS[(i + j) % 2]) for i, has in enumerate(HAS) for j, mask in enumerate(MASKS)],
)
def test_no_attack_on_rotary_and_sink_heads_gets_above(has: str, mask: str, ball: str) -> None:
    att, radii = (
        layer(
            len(mask),
            frozenset({"rotation", "sinks"} if has == "both" else {has}),
            mask=mask,
            n=6,
            samples=1,
            heads=2,
        ),
        [0.03, 1.0],
    )
    values = bounds.over_ball(att, radii, ball=ball)
    for radius, value in zip(radii, values.unbind(-1), strict=True):
        found = adversarial_inputs.attack(att, radius, ball=ball, steps=3, starts=1, seed=1).norm
        assert bool((value * HOLDS >= found).all())
    assert bool((values <= by_entries(att, radii, ball) * (1 + 1e-12)).all())


@pytest.mark.parametrize("has", ["rotation", "sinks"])
def test_variants_gain_too_and_caps_do_not(has: str) -> None:
    att = layer(3, frozenset({has}), n=12, d=4, d_v=4)
    share = bounds.over_ball(att, 0.1) / by_entries(att, 0.1, "token")
    assert bool((share <= 1 + 1e-12).all())
    assert float(share.log().mean().exp()) < 0.9
    capped = layer(3, frozenset({has, "cap"}))
    torch.testing.assert_close(
        bounds.over_ball(capped, 0.1), by_entries(capped, 0.1, "token"), rtol=0, atol=0
    )
