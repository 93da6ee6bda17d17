"""The benchmark of a GPU, on small layers and this processor: whole, and able to fail."""

import json
from dataclasses import replace

import pytest
import torch
from integration.test_readme import benchmark
from sitegen import measured

from lipbound.jacobians.spectral_norm import spectral_norm


@pytest.mark.slow
def test_all_parts_are_measured_and_shown(tmp_path, monkeypatch):
    """And what runs beside the norms, in the dtype of the layers, finds the same ones."""
    gpu, out = benchmark("gpu"), tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--small", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["device"] == "cpu"
    assert not found["failed"]
    assert not found["left_out"]
    for shape in gpu.SMALL:
        row = found["layers"][shape.name]
        assert 0 <= row["error"] <= row["width"] <= gpu.ENCLOSURE["tol"]
        assert row["settings_change"] <= row["width"]
        assert row["power_iteration_error"] <= 1e-5
        assert row["prototype_error"] <= 1e-5
        assert ("lipbound_ms" in row) == shape.bounds
    assert {row["apart"] for row in found["checkpoints"].values()} == {0.0}  # the CPU beside itself

    monkeypatch.setattr(measured, "BENCHMARKS", tmp_path)
    page = measured.gpu()
    for row in found["layers"].values():
        assert f"| {row['estimate_ms']:.3g} | {row['enclosure_ms']:.3g} |" in page
    assert measured.measured_with(found) in page
    checked = sum(shape.checked * (shape.name in page) for shape in gpu.SMALL)
    assert f"{checked} heads were computed again on the CPU" in page


def test_a_wrong_norm_is_found(tmp_path, monkeypatch, capsys):
    """The status says so, and the rest is measured nevertheless."""
    gpu, out = benchmark("gpu"), tmp_path / "gpu.json"

    def wrong(att, **options):
        norm, factor = spectral_norm(att, **options), 1 if att.dtype == torch.float64 else 2
        return replace(norm, lower=factor * norm.lower, upper=factor * norm.upper)

    def broken(*_):
        raise RuntimeError("CUDA error: it is\nbroken")

    monkeypatch.setattr(gpu, "spectral_norm", wrong)
    monkeypatch.setattr(gpu, "factors", broken)
    monkeypatch.setattr(gpu, "SMALL", gpu.SMALL[:1])
    monkeypatch.setattr(gpu, "SMALL_CHECKPOINTS", {})
    assert gpu.main(["--device", "cpu", "--small", "--out", str(out)]) == 1
    assert "wrong: layers, plain, N = 24: accuracy: the CPU finds" in capsys.readouterr().err
    found = json.loads(out.read_text())
    accuracy, prototype, lipbound = found["failed"]
    assert accuracy.startswith("layers, plain, N = 24: accuracy: the CPU finds")
    assert prototype == "layers, plain, N = 24: prototype: RuntimeError: CUDA error: it is"
    assert lipbound.endswith("lipbound is below the exact norm")
    assert found["layers"]["plain, N = 24"]["kim_ms"] > 0
