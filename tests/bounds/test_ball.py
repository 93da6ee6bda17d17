"""Bounds over balls against an adversary, against samples of the ball, and at radius 0."""

import pytest
import torch
from support.layers import HARD, random_attention
from support.oracles import oracle
from support.strategies import part

from lipbound import bounds
from lipbound.analysis import adversarial_inputs
from lipbound.attention.layer import Attention
from lipbound.attention.softmax import jacobian_norm
from lipbound.bounds.ball import CERTIFIED_TOL, _sample, reachable_rows, softmax_interval
from lipbound.bounds.papers.yudin2025 import g1_over_box
from lipbound.errors import LipboundError
from lipbound.jacobians.head import HeadJacobian

BALLS = ("token", "frobenius")
WITH_RADIUS = [name for name in bounds.names() if bounds.get(name).ball is not None]


@pytest.mark.each_value(kind=("biases", "padded", "sharp"))
@pytest.mark.parametrize("ball", BALLS)
def test_no_bound_is_below_the_adversary(kind: str, ball: str) -> None:
    """12 kinds x 6 heads x 3 radii x 2 norms: 432 heads; of `make test` the largest radius."""
    att = random_attention(kind, seed=3)
    exact, radii = (
        oracle(att),
        [
            relative * float(att.x.norm(dim=-1).mean())
            for relative in (1.0, 0.03, 1e-3)[: part(3, 1)]
        ],
    )
    values = bounds.over_ball(att, radii, ball=ball)
    for radius, value in zip(radii, values.unbind(-1), strict=True):
        found = adversarial_inputs.attack(att, radius, ball=ball, steps=8, starts=2).norm
        assert bool((found >= exact * (1 - 1e-6)).all())
        assert bool((value >= found * (1 - 1e-9)).all())
        for name in WITH_RADIUS:
            bound = bounds.get(name)
            if name != "specformer":  # which is none for small inputs
                assert bool(
                    (
                        ~bound.sound(att)
                        | (bound.over_ball(att, radius, ball=ball) >= found * (1 - 1e-9))
                    ).all()
                ), name


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("ball", BALLS)
def test_the_adversary_stays_in_the_ball_and_attains_its_norm(att: Attention, ball: str) -> None:
    radius = 0.5
    found = adversarial_inputs.attack(att, radius, ball=ball, steps=6, starts=2)
    move = (found.x - att.x[:, None]).norm(dim=-1)
    assert float((move if ball == "token" else move.norm(dim=-1)).max()) <= radius
    for h in range(att.heads):
        there = Attention(
            found.x[:, h],
            att.w_q,
            att.w_k,
            att.w_v,
            b_q=att.b_q,
            b_k=att.b_k,
            b_v=att.b_v,
            scale=att.scale,
            mask=att.mask,
            valid=att.valid,
        )
        torch.testing.assert_close(found.norm[:, h], oracle(there)[:, h], rtol=1e-5, atol=0)


def test_the_adversary_climbs() -> None:
    att = random_attention("plain")
    assert bool((adversarial_inputs.attack(att, 0.5, steps=8).norm > 1.02 * oracle(att)).all())


@pytest.mark.parametrize(("ball", "seed", "head"), [("frobenius", 0, (1, 0)), ("token", 1, (1, 1))])
def test_the_adversary_turns_sharp_queries_to_other_keys(
    ball: str, seed: int, head: tuple[int, int]
) -> None:
    """Where attention is nearly one-hot, J does not change at first, and grows by factors once
    another key is reached."""
    att = random_attention("sharp", seed=seed)
    radius = 0.03 * float(att.x.norm(dim=-1).mean())
    found, without = (
        adversarial_inputs.attack(att, radius, ball=ball, steps=4, starts=starts).norm
        for starts in (7, 6)
    )
    assert bool((found >= without).all())
    assert float(found[head]) > 1.7 * float(without[head])
    assert bool((found <= bounds.over_ball(att, radius, ball=ball) * (1 + 1e-9)).all())


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("ball", BALLS)
def test_radius_zero_is_the_point(att: Attention, ball: str) -> None:
    torch.testing.assert_close(
        bounds.over_ball(att, 0.0, ball=ball, at="lipbound"),
        bounds.get("lipbound")(att),
        rtol=1e-5,
        atol=1e-12,
    )
    assert bool((bounds.over_ball(att, 0, ball=ball) <= oracle(att) * (1 + 2e-3)).all())
    for name in WITH_RADIUS:
        value, point = bounds.get(name).over_ball(att, 0, ball=ball), bounds.get(name)(att)
        if name == "yudin":  # g_1 for the exact norm
            assert bool(((value >= point * (1 - 1e-9)) & (value <= 2 * point)).all())
        else:
            torch.testing.assert_close(value, point)


@pytest.mark.each_value(kind=HARD)
def test_bounds_grow_with_the_radius(att: Attention) -> None:
    radii = [0.0, 1e-4, 1e-2, 0.3, 3.0, 100.0]
    values = bounds.over_ball(att, radii)
    assert values.shape == (2, 3, 6)
    assert bool((values.diff(dim=-1) >= -1e-9 * values[..., 1:]).all())
    assert bool((bounds.over_ball(att, radii, ball="frobenius") <= values * (1 + 1e-3)).all())


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("ball", BALLS)
def test_intervals_hold_the_rows_of_moved_inputs(att: Attention, ball: str) -> None:
    g = torch.Generator().manual_seed(0)
    for s in range(att.samples):
        one = att.unpadded(s)
        for radius in (1e-2, 0.5):
            low, high = reachable_rows(one, radius, ball)
            move = torch.randn(40, *one.x.shape[1:], generator=g, dtype=torch.float64)
            size = (
                move.norm(dim=-1, keepdim=True)
                if ball == "token"
                else torch.linalg.vector_norm(move, dim=(1, 2), keepdim=True)
            )
            moved = Attention(
                one.x + radius * move / size,
                one.w_q,
                one.w_k,
                one.w_v,
                b_q=one.b_q,
                b_k=one.b_k,
                b_v=one.b_v,
                scale=one.scale,
                mask=one.mask,
            )
            assert bool((moved.p >= low * (1 - 1e-9)).all())
            assert bool((moved.p <= high * (1 + 1e-9)).all())
            g1 = g1_over_box(low, high)
            norms = jacobian_norm(moved.p).lower
            assert bool((norms <= g1 * (1 + 1e-9)).all())


def test_softmax_interval_is_attained_at_corners() -> None:
    scores = torch.tensor([[0.0, 1.0, -2.0, float("-inf")]], dtype=torch.float64)
    tau = torch.tensor([[0.5, 0.1, 2.0, 1.0]], dtype=torch.float64)
    low, high = softmax_interval(scores, tau)
    for j in range(3):
        sign = -torch.ones(4, dtype=torch.float64)
        sign[j] = 1
        assert float(high[0, j]) == pytest.approx(
            float(torch.softmax(scores + sign * tau, -1)[0, j]), rel=1e-10
        )
        assert float(low[0, j]) == pytest.approx(
            float(torch.softmax(scores - sign * tau, -1)[0, j]), rel=1e-10
        )
    assert float(low[0, 3]) == float(high[0, 3]) == 0


def test_intervals_reach_zero_where_scores_are_far_apart() -> None:
    low, high = softmax_interval(
        torch.tensor([[0.0, -1.0]], dtype=torch.float64),
        torch.tensor([[1600.0, 800.0]], dtype=torch.float64),
    )
    assert float(low.max()) < 1e-300
    assert float(high.min()) > 1 - 1e-12
    # two one-hot tokens that a wide ball lets tie: the norm there is far above what rows that stay
    # one-hot would allow
    eye = torch.eye(2, dtype=torch.float64)
    move = torch.tensor([[30.0, -30.0], [30.0, -30.0]], dtype=torch.float64) * 0.98
    att = Attention(5 * eye[None], eye[None], eye[None], eye[None], scale=1.0)
    moved = Attention(att.x + move, eye[None], eye[None], eye[None], scale=1.0)
    assert float(bounds.get("yudin").over_ball(att, 60.0, ball="frobenius")) >= float(oracle(moved))
    assert float(bounds.get("yudin").over_ball(att, 60.0, ball="frobenius")) >= 985


@pytest.mark.each_value
@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("relative", [1e-7, 1e-6, 1e-4])
def test_float32_attacks_stay_in_the_ball(ball: str, relative: float) -> None:
    att = random_attention("biases", dtype=torch.float32)
    radius = relative * float(att.x.norm(dim=-1).mean())
    found = adversarial_inputs.attack(att, radius, ball=ball, steps=6, starts=2)
    move = found.x.double() - att.x[:, None].double()
    size = move.norm(dim=-1).amax() if ball == "token" else move.flatten(2).norm(dim=-1).amax()
    assert float(size) <= radius
    assert bool((found.norm <= bounds.over_ball(att, radius, ball=ball) * (1 + 1e-9)).all())


def test_radii_come_as_any_number_that_is_in_range() -> None:
    att = random_attention("plain")
    for radius in (torch.tensor(0.25), torch.tensor([0.25])):
        torch.testing.assert_close(
            bounds.over_ball(att, radius).flatten(), bounds.over_ball(att, 0.25).flatten()
        )
    with pytest.raises(LipboundError, match="at most 1e60"):
        bounds.over_ball(att, 1e200)
    assert bool(torch.isfinite(bounds.over_ball(att, 1e60)).all())


def test_the_curve_brackets() -> None:
    att = random_attention("biases")
    ds = adversarial_inputs.radius_curve(att, [0.0, 0.1, 1.0], steps=4, starts=2)
    assert ds["over_ball"].dims == ("sample", "head", "radius")
    assert bool((ds["adversary"] <= ds["over_ball"]).all())
    assert bool((ds["adversary"].diff("radius") >= 0).all())
    assert bool((ds["castin_bias"] >= ds["adversary"]).all())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1.0,), {}, "radius is -1"),
        ((float("nan"),), {}, "radius is nan"),
        ((1.0,), {"ball": "tokens"}, "did you mean 'token'"),
        ((1.0,), {"at": "kim"}, "bounds another map"),
        ((1.0,), {"at": "castin"}, "is not a bound here"),
    ],
)
def test_bad_balls(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(LipboundError, match=message):
        bounds.over_ball(random_attention("biases"), *arguments, **options)


def test_bounds_without_a_radius_say_so() -> None:
    with pytest.raises(LipboundError, match="without a radius"):
        bounds.get("yudin_g1").over_ball(random_attention("plain"), 1.0)
    with pytest.raises(LipboundError, match="starts is 0; it must be a whole number, at least 1"):
        adversarial_inputs.attack(random_attention("plain"), 1.0, starts=0)


@pytest.mark.each_value(kind=("biases", "padded", "sharp"))
@pytest.mark.parametrize("ball", BALLS)
def test_no_point_of_the_ball_changes_the_jacobian_more(kind: str, ball: str) -> None:
    """12 kinds x 6 heads x 3 radii x 2 norms, 30 points each: dense Jacobians there and at the
    centre."""
    att = random_attention(kind, seed=5)
    radii = [relative * float(att.x.norm(dim=-1).mean()) for relative in (1e-4, 0.03, 1.0)]
    with torch.no_grad():
        values = torch.stack(
            [_sample(att.double().unpadded(s), radii, ball)[0] for s in range(att.samples)]
        )
    for r, radius in enumerate(radii):
        g = torch.Generator().manual_seed(1)
        for s in range(att.samples):
            one = att.unpadded(s)
            here = HeadJacobian(one).dense()
            move = torch.randn(30, *one.x.shape[1:], generator=g, dtype=torch.float64)
            move = move / move.norm(dim=-1 if ball == "token" else (-2, -1), keepdim=True)
            there = (
                HeadJacobian(one.at(one.x + radius * move)).dense().unflatten(0, (30, one.heads))
            )
            assert bool(
                (torch.linalg.matrix_norm(there - here, 2) <= values[s, :, r] * (1 + 1e-9)).all()
            )
    ends = bounds.over_ball(att, [0.0, *radii], ball=ball)
    assert bool(
        (ends[..., 1:] <= (ends[..., :1] * (1 + CERTIFIED_TOL) + values) * (1 + 1e-9)).all()
    )
