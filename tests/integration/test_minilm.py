"""The claims about real pretrained heads: all-MiniLM-L6-v2 (BERT, 6 layers x 12 heads), text, N =
128."""

import pytest
import torch
from support.oracles import capture_error
from support.reference import dense_jacobian

import lipbound as lb
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm
from lipbound.models.capture.capture import Capturer, LayerCapture


@pytest.fixture(scope="module")
def layers() -> list[LayerCapture]:
    """The first 128 tokens, special ones included, of the text that is embedded for
    demonstrations."""
    checkpoint = lb.load_checkpoint("builtin:minilm")
    inputs = lb.prepare(checkpoint, None, samples=1, max_length=128)
    return Capturer(checkpoint.model).run(inputs.batch)


def test_capture_reproduces_the_model(layers: list[LayerCapture]) -> None:
    assert len(layers) == 6
    assert all(layer.error < capture_error(layer.attention) for layer in layers)


@pytest.mark.slow
def test_norms_agree_with_500_power_steps(layers: list[LayerCapture]) -> None:
    """72 heads."""
    worst = 0.0
    for layer in layers:
        norm = spectral_norm(layer.attention, tol=1e-4)
        power = spectral_norm(layer.attention, method="power", tol=0, max_steps=500, seed=1)
        worst = max(worst, float((norm.lower / power.lower - 1).abs().max()))
    assert worst < 1e-4


@pytest.mark.slow
def test_norms_agree_with_dense_float64_svd(layers: list[LayerCapture]) -> None:
    for i, layer in enumerate(layers):
        short = layer.attention.at(layer.attention.x[:, :32])
        j = dense_jacobian(short.double(), 0, 2 * i)
        sigma = float(torch.linalg.eigvalsh(j @ j.mT)[-1].sqrt())
        lower = float(spectral_norm(short, tol=1e-5).lower[0, 2 * i])
        assert lower == pytest.approx(sigma, rel=1e-4)


@pytest.mark.slow
def test_bounds_are_as_loose_as_published(layers: list[LayerCapture]) -> None:
    """Geometric means of bound / exact within a quarter of reference measurements on this model;
    ours within a third of exact."""
    ratios = {name: [] for name in lb.bounds.names()}
    for layer in layers:
        norm = spectral_norm(layer.attention, tol=1e-4)
        exact = {"exact": norm.lower, "exact_l2": l2_spectral_norm(layer.attention).lower}
        for name in ratios:
            bound = lb.bounds.get(name)
            ratio = bound(layer.attention) / exact[bound.exact]
            assert bool(((ratio >= 1 - 1e-5) | ~bound.sound(layer.attention)).all())
            ratios[name].append(ratio)
    geomean = {name: float(torch.cat(values).log().mean().exp()) for name, values in ratios.items()}
    ours = torch.cat(ratios["lipbound"])
    assert geomean["lipbound"] <= 1.35
    assert float(ours.max()) <= 1.8
    assert float(ours.min()) >= 1
    published = {"specformer": 4.8e8, "castin": 1.4e3, "yudin_g1": 4.2e2, "yudin_sqrt_n": 65}
    for name, reference in published.items():
        assert 0.75 < geomean[name] / reference < 1.25, (name, geomean[name])


@pytest.mark.slow
def test_enclosures_are_as_narrow_as_asked(layers: list[LayerCapture]) -> None:
    for layer in layers:
        norm = spectral_norm(layer.attention, tol=1e-3, delta=1e-10 / 6)
        assert bool(norm.converged.all())
        assert float((norm.upper / norm.lower).max()) <= 1 + 1e-3
