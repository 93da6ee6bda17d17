"""The penalty on exact norms: its derivative against differences of dense norms, and its value."""

import pytest
import torch
from support.checks import close, given_parts, slopes
from support.layers import changed
from support.models import AFFINE, build, inputs_for
from support.oracles import oracle
from support.variants import layer

from lipbound.attention.layer import Attention
from lipbound.models.capture.capture import capture
from lipbound.models.training import attention_layers
from lipbound.regularizers import ExactNorm

KINDS = (
    *(((), mask) for mask in ("none", "causal", "padded", "offsets")),
    *((("rotation",), mask) for mask in ("none", "causal")),
    *(((name,), "causal") for name in ("norm", "cap", "sinks", "values")),
    (("together", "rotation"), "none"),
)
STEP = 1e-5


def keys_shared(att: Attention) -> Attention:
    """The layer with the first head's keys and values in all of its heads."""
    names = ("w_k", "w_v", "b_k", "b_v")
    first = {name: t for name, t in given_parts(att).items() if name in names}
    return changed(att, **{name: t[:1].expand(t.shape) for name, t in first.items()})


@pytest.mark.parametrize("grouped", [False, True], ids=["own keys", "grouped"])
@pytest.mark.parametrize(("has", "mask"), KINDS)
def test_derivative_is_the_difference_of_dense_norms(
    has: tuple[str, ...], mask: str, grouped: bool
) -> None:
    """Eleven kinds, with and without shared keys: 264 heads, at a random direction each."""
    made, norms = keys_shared if grouped else changed, ExactNorm(tol=1e-12).norms
    for seed in (0, 1):
        att = layer(seed, frozenset(has), mask=mask)
        exact = oracle(made(att)).flatten()
        close(norms(made(att)).detach().flatten(), exact, 1e-7)
        found, expected = slopes(
            lambda one: norms(made(one)), att, STEP, seed=seed, reference=lambda a: oracle(made(a))
        )
        # a derivative near zero is compared at the scale of the norm
        size = torch.maximum(expected.abs(), 1e-2 * exact)
        assert bool(((found - expected).abs() <= 1e-4 * size).all())


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
