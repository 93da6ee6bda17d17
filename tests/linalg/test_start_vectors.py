"""What is drawn at random under a failure probability: independent of whatever users draw, and of
what shares the batch."""

import math

import pytest
import torch
from support.checks import close, normal
from support.layers import random_attention
from support.models import TEXT, build, inputs_for, model_of

import lipbound as lb
from lipbound.analysis import mean_field
from lipbound.attention.layer_norm import Normaliser, ResidualContext
from lipbound.jacobians.maps import MAPS
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import AutogradJacobian
from lipbound.linalg.solution import normal_numbers, seeds_each, start_vectors


def norm_of_rms(x):
    """Of the normalisation of tokens by their root mean squares: the inverse of the smallest, by
    correctly rounded sums."""
    return max(1 / math.sqrt(math.fsum((row.double() ** 2).tolist()) / len(row)) for row in x)


@pytest.mark.parametrize("shape", [(8, 80), (40, 32)])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_data_drawn_with_the_same_seed_do_not_blind_a_norm(seed, shape):
    # a normalisation does not see its own point, which was where the search started
    x = normal(seed)(*shape)
    op = AutogradJacobian(lambda t: t / t.square().mean(-1, keepdim=True).sqrt(), x)
    exact = norm_of_rms(x)
    upper, lower = operator_norm(op, delta=1e-6, seed=seed), operator_norm(op, seed=seed)
    assert float(upper.upper) >= exact * (1 - 1e-12)
    assert float(lower.lower) == pytest.approx(exact, rel=2e-4)
    assert bool(lower.converged)


def test_nor_does_it_that_of_a_layer_with_its_normalisation():
    x = normal()(1, 40, 32)
    zero, ones = torch.zeros(1, 32, 4).double(), torch.ones(32).double()
    att = lb.Attention(x, normal(1)(1, 32, 4), normal(2)(1, 32, 4), zero, w_o=zero.mT)
    att.surroundings = ResidualContext(None, "post", Normaliser(x, ones, centred=False))
    exact = norm_of_rms(x[0])
    for delta in (None, 1e-6):
        norm = spectral_norm(att, map="post_norm", delta=delta)
        assert float(norm.lower) == pytest.approx(exact, rel=2e-4)
        assert float(norm.upper) >= exact * (1 - 1e-12)


def bert_norm(delta):
    model = build(model_of("Bert", **TEXT))
    return lb.network_norm(model, inputs_for(model), end="last_hidden_state", delta=delta, tol=1e-2)


def layer(map):
    """With the normalisation that a map takes."""
    att = random_attention("plain")
    norm = Normaliser(att.x, torch.ones(att.x.shape[2], dtype=torch.float64))
    if map == "pre_norm":
        att.surroundings = ResidualContext(norm, "pre", None)
    if map == "post_norm":
        att.surroundings = ResidualContext(None, "post", norm)
    return att


SINE = AutogradJacobian(torch.sin, torch.ones(5, dtype=torch.float64))
ENTRIES = {
    "operator_norm": lambda delta: operator_norm(SINE, delta=delta),
    "network_norm": bert_norm,
    "weighted_norm": lambda delta: mean_field.weighted_norm(
        random_attention("plain"), torch.full((2, 6), 1 / 6, dtype=torch.float64), delta=delta
    ),
    "l2": lambda delta: l2_spectral_norm(random_attention("plain")),
    **{
        f"spectral_norm {map}": lambda delta, map=map: spectral_norm(
            layer(map), map=map, delta=delta
        )
        for map in MAPS
    },
}


@pytest.mark.parametrize("delta", [None, 1e-6])
@pytest.mark.parametrize("entry", list(ENTRIES))
def test_every_norm_draws_from_the_one_stream(entry, delta, monkeypatch):
    streams = []

    def spy(count, *key):
        streams.append((count, *key))
        return normal_numbers(count, *key)

    ENTRIES[entry](delta)  # models and layers are made before generators are taken away
    monkeypatch.setattr("lipbound.linalg.solution.normal_numbers", spy)
    before = torch.random.get_rng_state()
    ENTRIES[entry](delta)
    assert streams
    assert len(set(streams)) == len(streams)  # all independent
    if entry != "network_norm":  # whose model is drawn
        assert torch.equal(before, torch.random.get_rng_state())


def test_the_stream_is_not_what_users_draw():
    ours = torch.stack([normal_numbers(64, seed) for seed in range(50)])
    theirs = torch.stack([normal(seed)(64) for seed in range(50)])
    unit = torch.nn.functional.normalize
    # of 2500 pairs of independent directions one in 10,000 has such a pair
    assert float((unit(ours, dim=1) @ unit(theirs, dim=1).mT).abs().max()) < 0.65


def test_the_stream_is_normal_and_its_parts_are_independent():
    x = torch.stack([normal_numbers(4096, seed) for seed in range(32)])
    assert abs(float(x.mean())) < 5 / x.numel() ** 0.5
    assert float(x.var()) == pytest.approx(1, abs=0.02)
    assert float((x @ x.mT / 4096 - torch.eye(32)).abs().max()) < 0.1
    assert torch.equal(x[3], normal_numbers(4096, 3))


def test_a_start_does_not_depend_on_what_shares_the_batch():
    sine = AutogradJacobian(torch.sin, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(start_vectors(sine, (7,), 4), start_vectors(sine, (7,), [4]))
    assert seeds_each(6, [1, 2, 3])[2:4] == seeds_each(2, [2])
    att = random_attention("plain", dtype=torch.float32)
    whole = spectral_norm(att, delta=1e-6, seed=3)
    part = att.select(slice(0, 1), slice(0, 2))
    alone = spectral_norm(part, delta=1e-6 * 2 / 6, seed=3)  # the same for each norm
    assert torch.equal(whole.steps[:1, :2], alone.steps)
    close(whole.lower[:1, :2], alone.lower, 1e-12)


def test_what_is_drawn_is_known_digit_by_digit():
    # a release that draws other vectors changes the last digits of everybody's runs: it must say so
    assert [round(v, 6) for v in normal_numbers(3, 0).tolist()] == [1.101424, -0.238983, 0.228571]
