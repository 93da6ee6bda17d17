"""Bounds on whole layers and on heads with their output slices: their rules, never below the norm,
and what rounding of the product with an output projection adds to them."""

import numpy as np
import pytest
import torch
from support import mp_oracle
from support.checks import close, normal
from support.judge import assert_holds, below
from support.layers import HARD, places, random_attention
from support.oracles import oracle

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.bounds import whole_layer
from lipbound.bounds.whole_layer_rules import RULES, with_output

NAMES = [name for name in lb.bounds.names() if lb.bounds.get(name).map == "head"]
MAPS = ("heads", "layer")


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("rule", ["best", "sum", "root_sum_square", "folded"])
def test_no_sound_bound_is_below_a_layers_norm(att: Attention, map: str, rule: str) -> None:
    exact = oracle(att, map)
    for name in NAMES:
        value = whole_layer(att, name, map=map, rule=rule)
        sound = lb.bounds.get(name).sound(att).all(-1)
        assert value.shape == exact.shape
        assert bool((~sound | (value >= exact * (1 - 1e-9))).all()), name


def test_rules_are_their_statements(att: Attention) -> None:
    heads, slices = lb.bounds.get("yudin")(att), torch.linalg.matrix_norm(att.w_o, 2)
    together = heads.square().sum(1).sqrt()
    whole = torch.linalg.matrix_norm(att.w_o.flatten(0, 1), 2) * together
    summed = (heads * slices).sum(1)
    for map, rule, value in (
        ("heads", "sum", heads.sum(1)),
        ("heads", "root_sum_square", together),
        ("layer", "sum", summed),
        ("layer", "root_sum_square", whole),
        ("layer", "best", torch.minimum(summed, whole)),
    ):
        close(whole_layer(att, "yudin", map=map, rule=rule), value, 1e-10)


def test_folded_heads_are_their_statement(att: Attention) -> None:
    folded, e = att.fold_output()
    values = lb.bounds.get("lipbound")(folded)
    omega = torch.linalg.matrix_norm(e[:, None].mT @ e[None], 2)
    pairs = torch.einsum("sh,hk,sk->s", values, omega, values).sqrt()
    stacked = torch.linalg.matrix_norm(torch.cat(list(e), 1), 2) * values.norm(dim=1)
    close(whole_layer(att, "lipbound", rule="folded"), torch.minimum(pairs, stacked), 1e-8)


SHORT = {"samples": 2, "max_length": 12, "bounds": "all", "progress": False}


@pytest.mark.parametrize(
    "map", ["layer", *(pytest.param(m, marks=pytest.mark.slow) for m in ("residual", "pre_norm"))]
)
def test_runs_over_layers(map: str) -> None:
    ds = lb.compare("builtin:gpt2", map=map, **SHORT)
    assert ds["exact"].dims == ("sample", "layer")
    assert not {"kim", "exact_l2"} & set(ds)
    assert all(entry["broken"] == 0 for entry in ds.attrs["audit"].values())
    assert bool((ds["exact_upper"] <= ds["exact"] * 1.001).all())
    mean = lb.tables.summary(ds)["geomean"]
    assert mean["lipbound"] < mean["lipbound_block"]
    assert "sample" in [axes.get_xlabel() for axes in lb.plots.heatmaps(ds, bounds=["yudin"]).axes]
    checkpoint = lb.load_checkpoint("builtin:gpt2")
    inputs = lb.prepare(checkpoint, samples=2, max_length=12)
    (att,) = lb.capture(checkpoint, inputs, layers=[1], around=True)
    direct = lb.spectral_norm(att, map=map, tol=1e-9).lower
    np.testing.assert_allclose(ds["exact"][:, 1], direct, rtol=2e-3)


# -- heads that absorb their output slices, where what is left of the product is rounding ----------


def cancelling(seed: int, *, sinks: bool = False, bias: float = 0.0, samples: int = 2) -> Attention:
    """Two heads whose values lie in a direction that the output projection does not see, but for
    the last digits of both."""
    draw = normal(seed)
    unseen = torch.nn.functional.normalize(draw(2, 3), dim=-1)
    w_o = draw(2, 3, 4)
    w_o = w_o - unseen[:, :, None] * (unseen[:, None] @ w_o)
    more = {"b_v": bias * draw(2, 1) * unseen} if bias else {}
    more |= {"sinks": draw(2)} if sinks else {}
    x, w_q, w_k, w_v = draw(samples, 3, 5), draw(2, 5, 3), draw(2, 5, 3), draw(2, 5, 1)
    return Attention(x, w_q, w_k, w_v * unseen[:, None], w_o=w_o, **more)


@pytest.mark.parametrize("seed", [0, 2])
def test_bounds_count_what_folding_rounds(seed: int) -> None:
    att = cancelling(seed, samples=1)
    (exact,), ((layer,),) = mp_oracle.norms(att, "head_out"), mp_oracle.norms(att, "layer")
    for name in NAMES:
        values, sound = with_output(att, name)
        for value, keep, norm in zip(values[0].tolist(), sound[0], exact, strict=True):
            assert not keep or not below(value, norm), name
        for rule in RULES:
            together = float(whole_layer(att, name, rule=rule))
            assert not sound.all() or not below(together, layer), (name, rule)


@pytest.mark.parametrize("norm", ["one-token", "every-token"])
def test_bounds_in_norms_of_tokens_count_it_too(norm: str) -> None:
    att = cancelling(2)
    for at in places(att):
        j = mp_oracle.differentiated(att, *at, "head_out").jacobian.astype(float)
        blocks = torch.tensor(j).permute(0, 2, 1, 3)  # (N, N, D_out, D)
        moving = blocks.transpose(0, 1).flatten(1, 2) if norm == "one-token" else blocks
        least = float(torch.linalg.matrix_norm(moving, 2).amax())
        for name in lb.bounds.names(norm):
            values, sound = with_output(att, name)
            assert not sound[at] or float(values[at]) >= least, name


def test_runs_store_these_values() -> None:
    att = cancelling(0)
    options = {"map": "head_out", "bounds": ["lipbound"], "dtype": "float64", "progress": False}
    ds = lb.compare([att], **options)
    exact = mp_oracle.norms(att, "head_out")
    for upper in ("exact_upper", "lipbound"):
        assert_holds(*(torch.from_numpy(ds[name].values[:, 0]) for name in ("exact", upper)), exact)


@pytest.mark.parametrize("bias", [1e3, 1e13])
def test_enclosures_count_value_biases_where_a_sink_lets_them_be_seen(bias: float) -> None:
    att = cancelling(1, sinks=True, bias=bias, samples=1)
    norm = lb.spectral_norm(att, map="head_out", delta=1e-6)
    tokens = lb.token_norm(att, map="head_out")
    exact = mp_oracle.norms(att, "head_out")
    assert_holds(norm.lower, norm.upper, exact)
    # three tokens: no less than this times the norm of all of them
    assert all(t >= one.value / 3 for t, one in zip(tokens.upper[0], exact[0], strict=True))


@pytest.mark.parametrize("kind", ["plain", "padded", "biases", "wide_values"])
def test_ordinary_heads_pay_nothing(kind: str) -> None:
    att = random_attention(kind)
    folded = att.fold_output()[0]
    for name in ("lipbound", "yudin", "castin"):
        values, sound = with_output(att, name)
        close(values, lb.bounds.get(name)(folded))
        assert torch.equal(sound, lb.bounds.get(name).sound(folded))
