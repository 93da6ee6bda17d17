"""Numbers do not depend on the modes of torch that the caller has set; what they are without any is
the oracle."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
import transformers as tf
from robustness import embedding_accuracy
from support.models import TEXT, build

import lipbound as lb

SHAPES = [(2, 5, 6), (2, 6, 3), (2, 6, 3), (2, 6, 3)]
TENSORS = [torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in SHAPES]
IDS = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(0))


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
}


def classifier():
    return build(lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3)))


def ends(norm):
    return torch.cat([norm.lower.flatten(), norm.upper.flatten()])


def one(a):
    """Of searches, which take long, one head at one input."""
    return a.select(slice(0, 1), slice(0, 1))


CURVE = {"steps": 1, "ball": "frobenius", "bounds": ["yudin"]}
OF_LAYERS = {
    "attack": lambda a: lb.attack(one(a), 0.5, steps=2).norm,
    "radius_curve": lambda a: list(lb.radius_curve(one(a), [0.1], **CURVE).values()),
    "enclosure": lambda a: ends(lb.spectral_norm(a, delta=1e-6)),
    "power": lambda a: lb.spectral_norm(a, method="power").lower,
    "layer": lambda a: ends(lb.spectral_norm(a, map="heads")),
    "token_norm": lambda a: ends(lb.token_norm(a)),
    "bounds": lambda a: torch.stack(list(lb.bounds.evaluate(a, "default").values())),
    "over_ball": lambda a: lb.bounds.over_ball(a, 0.5),
    "outputs": lambda a: a.out,
}
OF_MODELS = {
    "network_norm": lambda m, x: ends(lb.network_norm(m, x, end="logits")),
    "block": lambda m, x: ends(lb.network_norm(m, x, start=1, end=1, tol=1e-2)),
    "accuracy": lambda m, x: list(
        embedding_accuracy(m, x, x["input_ids"].sum(1) % 3, 0.5, steps=2).values()
    ),
    "capture": lambda m, x: lb.capture(m, x)[1].out,
    "compare": lambda m, x: [
        lb.compare(m, x, bounds=["castin"], progress=False)[name].values
        for name in ("exact", "exact_upper", "castin")
    ],
}


def same(mine, exact):
    np.testing.assert_allclose(np.asarray(mine), np.asarray(exact), rtol=1e-12)


@cache
def without(name):
    """What there is without a mode."""
    return OF_LAYERS[name](lb.Attention(*TENSORS))


@pytest.mark.parametrize("name", OF_LAYERS)
@pytest.mark.parametrize("mode", MODES)
def test_layers(mode, name):
    exact = without(name)
    kept = lb.Attention(*TENSORS)
    with MODES[mode]():
        same(OF_LAYERS[name](kept), exact)
        made = lb.Attention(*TENSORS if mode == "device" else [t * 1 for t in TENSORS])
        same(OF_LAYERS[name](made), exact)
    same(OF_LAYERS[name](kept), exact)  # what was computed in the mode is kept, and serves outside


@pytest.mark.each_value
@pytest.mark.parametrize("name", OF_MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_models(mode, name):
    model = classifier()
    exact = OF_MODELS[name](model, {"input_ids": IDS})
    with MODES[mode]():
        batch = {"input_ids": IDS if mode == "device" else IDS * 1}
        same(OF_MODELS[name](model, batch), exact)


def test_models_made_in_inference_mode():
    batch = {"input_ids": IDS}
    exact = ends(lb.network_norm(classifier(), batch))
    with torch.inference_mode():
        model = classifier()
        same(ends(lb.network_norm(model, batch)), exact)
    same(ends(lb.network_norm(model, batch)), exact)


def test_derivatives_after_inference_mode():
    """What a layer derives in inference mode serves where derivatives are wanted later."""
    x = TENSORS[0].clone().requires_grad_()
    layer = lb.Attention(TENSORS[0], *TENSORS[1:])
    with torch.inference_mode():
        lb.spectral_norm(layer)
    (gradient,) = torch.autograd.grad((layer.p @ x[:, None] @ torch.ones(6, 1)).sum(), x)
    assert bool(torch.isfinite(gradient).all())


def test_modes_are_as_before():
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        lb.spectral_norm(lb.Attention(*TENSORS))
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        lb.attack(lb.Attention(*TENSORS), 0.1, steps=1)
        assert not torch.is_grad_enabled()
