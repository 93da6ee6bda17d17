"""The benchmark of a GPU, on small layers and this processor: whole, and able to fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.test_readme import benchmark

from lipbound.jacobians.spectral_norm import spectral_norm


def test_a_wrong_norm_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = benchmark("gpu")

    def wrong(att: Any, **options: Any) -> Any:
        norm, factor = spectral_norm(att, **options), 1 if att.dtype == torch.float64 else 1.01
        return replace(norm, lower=factor * norm.lower, upper=factor * norm.upper)

    monkeypatch.setattr(gpu, "spectral_norm", wrong)
    assert gpu.main(["--device", "cpu", "--small", "--out", str(tmp_path / "gpu.json")]) == 1
    assert "plain, N = 24: the CPU finds" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()
