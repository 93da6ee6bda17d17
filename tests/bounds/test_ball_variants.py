"""Bounds over balls and the adversary for rotary, capped and sink heads: against dense Jacobians
all over the ball."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import causal, changed, random_attention
from support.oracles import oracle
from support.reference import dense_jacobian, head_function
from support.strategies import examples
from support.variants import MASKS, layer
from torch import Tensor

import lipbound as lb
from lipbound import bounds
from lipbound.analysis import adversarial_inputs
from lipbound.attention.layer import Attention
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.bounds.ball import largest_a
from lipbound.errors import AttentionError
from lipbound.jacobians.head import HeadJacobian
from lipbound.linalg.matrix_norms import matrix_norm

BALLS = ("token", "frobenius")
PROVED = st.frozensets(st.sampled_from(("rotation", "cap", "sinks")))


def moves(att: Attention, ball: str, radius: float, count: int, seed: int) -> Tensor:
    """Inputs of the ball around an unpadded layer, half of them on its boundary; the last moves one
    token only. (count, N, D)"""
    g = torch.Generator().manual_seed(seed)
    move = torch.randn(count, *att.x.shape[1:], generator=g, dtype=torch.float64)
    move[-1, 1:] = 0
    part = torch.rand(count, 1, 1, generator=g, dtype=torch.float64)
    part[::2] = 1 - 1e-12
    return att.x + part * radius * adversarial_inputs._unit(move, ball)


def norms_at(att: Attention, h: int, points: Tensor) -> Tensor:
    """Of the autograd Jacobians of the definition of one head at inputs (count, N, D), (count,)."""
    jacobians = torch.func.vmap(torch.func.jacrev(head_function(att, 0, h)))(points)
    return torch.linalg.matrix_norm(jacobians.flatten(1, 2).flatten(2), 2)


@examples(50)
@given(
    seed=st.integers(0, 10**6),
    has=PROVED,
    mask=st.sampled_from(MASKS),
    n=st.integers(1, 6),
    d=st.integers(2, 5),
    d_v=st.integers(1, 4),
    scale=st.sampled_from([1e-2, 0.3, 1.0, 10.0]),
    radius=st.sampled_from([0.0, 1e-4, 1e-2, 0.1, 0.5, 2.0, 10.0]),
    ball=st.sampled_from(BALLS),
    biases=st.booleans(),
    same=st.booleans(),
)
def test_no_point_of_the_ball_is_above(
    seed: int,
    has: frozenset[str],
    mask: str,
    n: int,
    d: int,
    d_v: int,
    scale: float,
    radius: float,
    ball: str,
    biases: bool,
    same: bool,
) -> None:
    att = layer(seed, has, mask=mask, n=n, d=d, d_v=d_v, scale=scale, biases=biases, same=same)
    one = att.unpadded(1).select(heads=slice(0, 2))
    bound = bounds.over_ball(one, radius, ball=ball)[0]
    top = lb.spectral_norm(one, tol=1e-6, vectors=True)
    points = moves(one, ball, radius, 8, seed)
    for h in range(2):
        x = one.x.clone().requires_grad_()
        part = one.select(heads=slice(h, h + 1))
        (up,) = torch.autograd.grad(
            (top.left[:, h] * HeadJacobian(part.at(x)).along(top.right[:, h])).sum(), x
        )
        # gradients at one-hot rows are so small that their squares vanish
        up = up / up.abs().amax().clamp_min(1e-300)
        step = radius * (1 - 1e-12) * adversarial_inputs._unit(up, ball)
        found = norms_at(one, h, torch.cat([one.x, one.x + step, one.x - step, points]))
        assert bool((bound[h] >= found * (1 - 1e-9)).all())


def large_biases(seed: int, has: frozenset[str]) -> Attention:
    """Keys and values far from zero compared with their differences."""
    att = layer(seed, has, biases=False)
    g = torch.Generator().manual_seed(seed)
    return changed(
        att,
        b_q=torch.randn(3, 4, generator=g).double(),
        b_k=40 * torch.randn(3, 4, generator=g).double(),
        b_v=torch.full((3, 3), 1e3).double(),
    )


@pytest.mark.each_value
@pytest.mark.parametrize("has", [{"rotation"}, {"cap"}, {"sinks"}, {"rotation", "sinks"}])
@pytest.mark.parametrize("ball", BALLS)
def test_large_biases(has: set[str], ball: str) -> None:
    att = large_biases(6, frozenset(has)).unpadded(0)
    for radius in (1e-3, 0.1):
        bound = bounds.over_ball(att, radius, ball=ball)[0]
        points = moves(att, ball, radius, 6, 0)
        assert all(
            bool((bound[h] >= norms_at(att, h, points) * (1 - 1e-9)).all()) for h in range(3)
        )


@pytest.mark.parametrize(
    ("has", "ball"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"rotation"}, "token"),
                ({"rotation"}, "frobenius"),
                ({"norm"}, "token"),
                ({"cap"}, "token"),
                ({"sinks"}, "frobenius"),
            )
        ),
        ({"together", "rotation"}, "frobenius"),
        ({"rotation", "cap", "sinks"}, "token"),
    ],
)
def test_the_adversary_on_every_variant(has: set[str], ball: str) -> None:
    # one head of each would leave their order untested
    att = layer(7, frozenset(has), mask="padded", scale=0.7).select(heads=slice(0, 2))
    radius = 0.2
    found = adversarial_inputs.attack(att, radius, ball=ball, steps=3, starts=1)
    move = (found.x - att.x[:, None]).norm(dim=-1)
    assert float((move if ball == "token" else move.norm(dim=-1)).max()) <= radius
    assert bool((found.norm >= oracle(att) * (1 - 1e-6)).all())
    assert bool((found.norm > 1.01 * oracle(att)).any())
    for h in range(2):
        torch.testing.assert_close(
            found.norm[:, h], oracle(att.at(found.x[:, h]))[:, h], rtol=1e-5, atol=0
        )
    if not has & {"norm", "together"}:
        assert bool((bounds.over_ball(att, radius, ball=ball) >= found.norm * (1 - 1e-9)).all())


@pytest.mark.each_value
@pytest.mark.parametrize(
    "has",
    [
        {"rotation"},
        {"norm"},
        {"together"},
        {"cap"},
        {"sinks"},
        {"norm", "rotation", "sinks"},
        {"together", "rotation", "cap"},
    ],
)
@pytest.mark.parametrize("mask", ["none", "padded"])
def test_gradients_are_those_of_the_norm(has: set[str], mask: str) -> None:
    """Of u^T J(X) v at the top singular pair, against differences of norms of dense Jacobians."""
    att = layer(7, frozenset(has), mask=mask).unpadded(1).select(heads=slice(1, 2))
    top = lb.spectral_norm(att, tol=1e-12, vectors=True)
    x = att.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        (top.left[:, 0] * HeadJacobian(att.at(x)).along(top.right[:, 0])).sum(), x
    )
    e = torch.randn(att.x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def there(step: float) -> float:
        return float(torch.linalg.matrix_norm(dense_jacobian(att.at(att.x + step * e)), 2))

    h = 1e-4
    difference = (8 * (there(h) - there(-h)) - (there(2 * h) - there(-2 * h))) / (12 * h)
    assert float((gradient * e).sum()) == pytest.approx(difference, rel=1e-7, abs=1e-8)


def test_gradients_of_saturated_caps_are_numbers() -> None:
    att = layer(0, frozenset({"cap"}), scale=100.0)
    x = att.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(att.at(x).weights.sum(), x)
    assert bool(torch.isfinite(gradient).all())
    z = torch.linspace(-5, 5, 11, dtype=torch.float64)
    far = layer(0, frozenset({"cap"}))
    torch.testing.assert_close(
        far.slopes(3 * z[:, None] * far.scale)[:, 0],
        (3 * z * far.scale / far.cap).cosh() ** -2,
    )


@pytest.mark.parametrize(
    ("has", "ball"),
    [
        ({"rotation"}, "token"),
        ({"rotation", "sinks"}, "frobenius"),
        ({"cap"}, "frobenius"),
        ({"cap", "sinks"}, "token"),
    ],
)
def test_radius_zero_and_growth(has: set[str], ball: str) -> None:
    att = layer(9, frozenset(has), mask="causal")
    radii = [0.0, 1e-4, 1e-2, 0.3, 3.0, 100.0, 1e60]
    values = bounds.over_ball(att, radii, ball=ball, at="lipbound")
    torch.testing.assert_close(
        values[..., 0],
        bounds.get("lipbound")(att).minimum(values[..., 0] * (1 + 1e-5)),
        rtol=1e-5,
        atol=0,
    )
    assert bool((values.diff(dim=-1) >= -1e-9 * values[..., 1:]).all())
    assert bool(torch.isfinite(values).all())
    exact = oracle(att)
    assert bool(
        (bounds.over_ball(att, [0.0, 1e-7], ball=ball) <= exact[..., None] * (1 + 2e-3)).all()
    )
    if ball == "frobenius":
        assert bool((values <= bounds.over_ball(att, radii, at="lipbound") * (1 + 1e-3)).all())


def test_neutral_variants_have_nearly_the_plain_bound() -> None:
    """With a rotation less is known of queries that move, with a sink it counts as one more key."""
    plain = layer(1, frozenset())
    still = changed(plain, rotation=Rotation.of_angles(torch.zeros(plain.tokens, 2)))
    sink = changed(plain, sinks=torch.full((3,), -1e4).double())
    for radius in (1e-3, 0.1):
        value, turned, sunk = (
            bounds.over_ball(one, radius, at="lipbound_block") for one in (plain, still, sink)
        )
        for other in (turned, sunk):
            assert bool((other >= 0.98 * value).all())
            assert bool((other <= (2 if radius == 0.1 else 1.1) * value).all())


def test_norms_of_turned_products() -> None:
    """At least all of them; no more than the largest where turns depend on distances."""
    for positions in (torch.arange(7.0), torch.tensor([0.0, 5.0, 1.0, 9.0, 2.0, 2.5, 30.0])):
        att = layer(3, frozenset(), n=7)
        turn = Rotation.of_angles(positions[:, None] * torch.tensor([1.0, 0.1]))
        turn = Rotation((1.2 * turn.cos).float(), (1.2 * turn.sin).float())
        att = att.with_parts(rotation=turn)
        turned = att.rotation.turn(
            torch.eye(4, dtype=torch.float64)[:, None].expand(-1, 7, -1)
        ).permute(1, 2, 0)  # R_i, (7, 4, 4)
        between = turned.mT[:, None] @ turned[None]
        largest = matrix_norm(
            att.scale * att.w_q[:, None, None] @ between @ att.w_k.mT[:, None, None]
        ).amax((-1, -2))
        value = largest_a(att)
        assert bool((value >= largest * (1 - 1e-10)).all())
        if float(positions[1]) == 1:
            assert bool((value <= largest * 1.05).all())


def test_normalised_queries_and_keys_have_no_bound_over_balls() -> None:
    att = layer(1, frozenset({"norm", "rotation"}))
    with pytest.raises(
        AttentionError,
        match=r"over_ball does not cover normalised queries and keys, whose derivative changes",
    ):
        bounds.over_ball(att, 0.1)
    with pytest.raises(AttentionError, match="over_ball does not cover"):
        lb.radius_curve(att, [0.1], adversary=False)
    ds = lb.radius_curve(att, [0.0, 0.1], steps=2, starts=1)
    assert set(ds) == {"adversary"}
    lb.plots.ball_curve(ds)


def test_curves_of_variants() -> None:
    att = layer(2, frozenset({"rotation", "sinks"}))
    ds = lb.radius_curve(att, [0.0, 0.1, 1.0], steps=1, starts=1)
    assert set(ds) == {"over_ball", "adversary"}
    assert bool((ds["adversary"] <= ds["over_ball"]).all())
    lb.plots.ball_curve(ds)
    with pytest.raises(AttentionError, match="does not cover rotary"):
        lb.radius_curve(att, [0.1], bounds=("castin_bias",))


def test_the_layer_at_other_inputs() -> None:
    att = layer(4, frozenset({"rotation", "together", "cap", "sinks"}), mask="padded")
    torch.testing.assert_close(oracle(att.at(att.x)), oracle(att))
    more = torch.cat([att.x, att.x])[:3]
    free = att.at(more, valid=None)
    assert (free.samples, free.valid, free.cap, free.sinks is att.sinks) == (3, None, 1.5, True)
    assert bool((att.at(att.x, mask=causal(5)).p[0, :, 0, 1:] == 0).all())
    with pytest.raises(AttentionError, match="valid has shape"):
        att.at(more)
    with pytest.raises(AttentionError, match="rotation is of 5 tokens"):
        att.at(att.x[:, :3], valid=None)
    bare = att.without_biases()
    assert bare.b_q is bare.b_k is bare.b_v is None
    assert isinstance(bare.norm_q, QKNorm)
    assert bare.norm_q.over[1] is None
    # normalised without biases
    assert math.isclose(
        float(bare.at(2 * att.x).q[0].abs().max()), float(bare.q[0].abs().max()), rel_tol=1e-5
    )
    plain = random_attention("biases").without_biases()
    assert plain.b_q is plain.b_k is plain.b_v is None
