"""Heads that absorb their output slices, where what is left of the product is rounding: bounds and
enclosures against 80 digits."""

import pytest
import torch
from support import mp_oracle
from support.layers import random_attention

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.bounds import whole_layer
from lipbound.bounds.whole_layer_rules import RULES, with_output
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.jacobians.token_norms.token_norm import token_norm
from lipbound.runs.measure import MeasurementSpec, _measure

NAMES = [name for name in bounds.names() if bounds.get(name).map == "head"]


def cancelling(seed: int, *, sinks: bool = False, bias: float = 0.0, samples: int = 2) -> Attention:
    """Two heads whose values lie in a direction that the output projection does not see, but for
    the last digits of both."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    unseen = torch.nn.functional.normalize(draw(2, 3), dim=-1)
    w_o = draw(2, 3, 4)
    w_o = w_o - unseen[:, :, None] * (unseen[:, None] @ w_o)
    more = {"b_v": bias * draw(2, 1) * unseen} if bias else {}
    more |= {"sinks": draw(2)} if sinks else {}
    return Attention(
        draw(samples, 3, 5),
        draw(2, 5, 3),
        draw(2, 5, 3),
        draw(2, 5, 1) * unseen[:, None],
        w_o=w_o,
        **more,
    )


@pytest.mark.parametrize("seed", [0, 2])
def test_bounds_count_what_folding_rounds(seed: int) -> None:
    att = cancelling(seed, samples=1)
    exact = mp_oracle.norms(att, "head_out")
    layer = [row[0] for row in mp_oracle.norms(att, "layer")]
    for name in NAMES:
        if bounds.get(name).norm != "frobenius":
            continue
        values, sound = with_output(att, name)
        for s, row in enumerate(exact):
            for h, norm in enumerate(row):
                assert not sound[s, h] or float(values[s, h]) >= norm.upper, name
        for rule in RULES:
            together = whole_layer(att, name, rule=rule)
            assert all(
                not sound[s].all() or float(together[s]) >= norm.upper
                for s, norm in enumerate(layer)
            ), (name, rule)


@pytest.mark.parametrize("norm", ["one-token", "every-token"])
def test_bounds_in_norms_of_tokens_count_it_too(norm: str) -> None:
    att = cancelling(2)
    jacobian = [
        [mp_oracle.differentiated(att, s, h, "head_out").jacobian for h in range(2)]
        for s in range(2)
    ]
    for name in (name for name in NAMES if bounds.get(name).norm == norm):
        values, sound = with_output(att, name)
        for s in range(2):
            for h in range(2):
                blocks = torch.tensor(jacobian[s][h].astype(float)).permute(
                    0, 2, 1, 3
                )  # (N, N, D_out, D)
                columns = torch.linalg.matrix_norm(
                    blocks.transpose(0, 1).flatten(1, 2), 2
                ).amax()  # one token moves
                assert not sound[s, h] or float(values[s, h]) >= float(
                    columns if norm == "one-token" else torch.linalg.matrix_norm(blocks, 2).amax()
                )


def test_runs_store_these_values() -> None:
    att = cancelling(0)
    spec = MeasurementSpec(("lipbound", "lipbound_block"), "head_out", 1e-3, 1e-8, 0, 2)
    found = _measure(att, spec, [1, 2], 2)
    for s, row in enumerate(mp_oracle.norms(att, "head_out")):
        for h, norm in enumerate(row):
            assert float(found["lipbound"][s, h]) >= norm.upper
            assert float(found["exact"][s, h]) <= norm.upper
            assert float(found["exact_upper"][s, h]) >= norm.lower


@pytest.mark.parametrize("bias", [1e3, 1e13])
def test_enclosures_count_value_biases_where_a_sink_lets_them_be_seen(bias: float) -> None:
    att = cancelling(1, sinks=True, bias=bias, samples=1)
    exact = mp_oracle.norms(att, "head_out")[0]
    norm = spectral_norm(att, map="head_out", delta=1e-6)
    tokens = token_norm(att, map="head_out")
    for h, value in enumerate(exact):
        assert float(norm.lower[0, h]) <= value.upper
        assert float(norm.upper[0, h]) >= value.lower
        # three tokens: no less than this times the norm of all of them
        assert float(tokens.upper[0, h]) >= value.value / 3


@pytest.mark.parametrize("kind", ["plain", "padded", "biases", "wide_values"])
def test_ordinary_heads_pay_nothing(kind: str) -> None:
    att = random_attention(kind)
    folded = att.fold_output()[0]
    for name in ("lipbound", "yudin", "castin"):
        values, sound = with_output(att, name)
        torch.testing.assert_close(values, bounds.get(name)(folded), rtol=1e-9, atol=0)
        assert torch.equal(sound, bounds.get(name).sound(folded))
