"""The penalty on exact norms: its derivative against differences of dense norms, and its value."""

import pytest
import torch
from support.layers import changed
from support.models import AFFINE, build, inputs_for
from support.oracles import oracle
from support.variants import layer
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.models.capture.capture import capture
from lipbound.models.training import attention_layers
from lipbound.regularizers import ExactNorm

PARTS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
KINDS = (
    *(((), mask) for mask in ("none", "causal", "padded", "offsets")),
    *((("rotation",), mask) for mask in ("none", "causal")),
    *(((name,), "causal") for name in ("norm", "cap", "sinks", "values")),
    (("together", "rotation"), "none"),
)
STEP = 1e-5


def leaves_of(att: Attention, grouped: bool) -> dict[str, Tensor]:
    """What a layer is made of; ``grouped``: one head of keys and values, which all share."""
    given = {name: getattr(att, name) for name in PARTS if getattr(att, name) is not None}
    if grouped:
        given |= {name: given[name][:1] for name in ("w_k", "w_v", "b_k", "b_v")}
    return {name: t.detach().clone().requires_grad_() for name, t in given.items()}


def made(att: Attention, leaves: dict[str, Tensor]) -> Attention:
    """The layer of other tensors."""
    heads = {name: t.expand(att.heads, *t.shape[1:]) for name, t in leaves.items() if name != "x"}
    return changed(att, x=leaves["x"], **heads)


@pytest.mark.parametrize("grouped", [False, True], ids=["own keys", "grouped"])
@pytest.mark.parametrize(("has", "mask"), KINDS)
def test_derivative_is_the_difference_of_dense_norms(
    has: tuple[str, ...], mask: str, grouped: bool
) -> None:
    """Eleven kinds, with and without shared keys: 264 heads, at a random direction each."""
    for seed in (0, 1):
        att = layer(seed, frozenset(has), mask=mask)
        leaves = leaves_of(att, grouped)
        norms = ExactNorm(tol=1e-12).norms(made(att, leaves))
        g = torch.Generator().manual_seed(seed)
        along = {n: torch.randn(t.shape, generator=g, dtype=t.dtype) for n, t in leaves.items()}
        sides = [
            oracle(made(att, {n: (t + sign * STEP * along[n]).detach() for n, t in leaves.items()}))
            for sign in (1, -1)
        ]
        expected, exact = (sides[0] - sides[1]) / (2 * STEP), oracle(made(att, leaves)).detach()
        torch.testing.assert_close(norms.detach(), exact, rtol=1e-7, atol=0)
        for place in range(norms.numel()):
            found = torch.autograd.grad(
                norms.view(-1)[place],
                list(leaves.values()),
                retain_graph=True,
                materialize_grads=True,  # values' biases do not enter J
            )
            value = sum(float((a * b).sum()) for a, b in zip(found, along.values(), strict=True))
            # a derivative near zero is compared at the scale of the norm
            floor = 1e-2 * float(exact.view(-1)[place])
            difference = float(expected.view(-1)[place])
            assert value == pytest.approx(difference, rel=1e-4, abs=1e-4 * floor)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_value_is_the_mean_of_logarithms(name: str) -> None:
    model = build(AFFINE[name])
    inputs = inputs_for(model, padded=name == "bert")
    with attention_layers(model) as layers:
        model(**inputs)
    value = ExactNorm(tol=1e-8)(layers)
    expected = sum(float(oracle(att).log().sum(-1).mean()) for att in capture(model, inputs))
    assert float(value.detach()) == pytest.approx(expected, rel=1e-4)
    value.backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
