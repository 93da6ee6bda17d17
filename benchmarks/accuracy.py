"""Every method against dense float64 decompositions of autograd Jacobians: ``make accuracy`` writes
accuracy.json, which the documentation shows.

Heads: 12 of builtin:minilm (two of each layer, 32 tokens of real text) and 24 random ones with
biases and sharp attention (8 tokens). The error is the largest relative distance of ``lower`` from
the reference, the width the largest ``upper / lower - 1``, and "outside" counts references that lie
beyond an enclosure by more than rounding of the dtype (the slack of the audit).
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.reference import dense_jacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import Capturer
from lipbound.models.inputs import prepare
from lipbound.models.loading import load_checkpoint

CASES: list[tuple[str, dict[str, Any]]] = [
    ("lanczos", {"tol": 1e-4}),
    ("lanczos", {"tol": 1e-3, "delta": 1e-10}),
    ("lanczos", {"tol": 1e-6, "delta": 1e-10}),
    ("power", {"tol": 1e-4}),
    ("dense", {}),
    ("deflation", {"tol": 1e-7}),
]


def minilm() -> list[Attention]:
    """Two heads of every layer, 32 tokens."""
    checkpoint = load_checkpoint("builtin:minilm")
    layers = Capturer(checkpoint.model).run(prepare(checkpoint, samples=1, max_length=32).batch)
    return [layer.attention.select(heads=slice(2 * i, 2 * i + 2)) for i, layer in enumerate(layers)]


def random_heads() -> list[Attention]:
    """24 heads from flat to saturated attention."""
    g = torch.Generator().manual_seed(0)
    layers = []
    for sharpness in (0.1, 1.0, 4.0):
        x, w_q, w_k, w_v = (
            torch.randn(s, generator=g) for s in [(2, 8, 16), (4, 16, 6), (4, 16, 6), (4, 16, 5)]
        )
        layers.append(
            Attention(
                x,
                sharpness * w_q,
                w_k,
                w_v,
                b_q=torch.randn(4, 6, generator=g),
                b_k=10 * torch.randn(4, 6, generator=g),
            )
        )
    return layers


def reference(att: Attention) -> Tensor:
    """Float64 singular values of the autograd Jacobians, (samples, heads)."""
    att = att.double()
    jacobians = ((dense_jacobian(att, s, h) for h in range(att.heads)) for s in range(att.samples))
    return torch.stack(
        [
            torch.stack([torch.linalg.eigvalsh(j @ j.mT)[-1].sqrt() for j in row])
            for row in jacobians
        ]
    )


REFERENCE = 1e-11
"""Rounding of the reference itself, a float64 decomposition."""


def measure(name: str, layers: list[Attention], device: str) -> list[dict[str, Any]]:
    """A row per method and dtype."""
    exact = torch.cat([reference(att).flatten() for att in layers])
    rows = []
    for method, options in CASES:
        for dtype in ("float32", "float64"):
            norms = [
                spectral_norm(
                    (att.double() if dtype == "float64" else att).to(device),
                    method=method,
                    **options,
                )
                for att in layers
            ]
            lower, upper = (
                torch.cat([getattr(norm, end).flatten() for norm in norms])
                for end in ("lower", "upper")
            )
            encloses = bool(torch.isfinite(upper).all())
            beyond = (exact < lower * (1 - REFERENCE)) | (exact > upper * (1 + REFERENCE))
            rows.append(
                {
                    "heads": f"{name} ({len(exact)})",
                    "method": f"{method}, "
                    + ", ".join(f"{key}={value:g}" for key, value in options.items())
                    if options
                    else method,
                    "dtype": dtype,
                    "device": device,
                    "error": float((lower / exact - 1).abs().max()),
                    "width": float((upper / lower - 1).max()) if encloses else None,
                    "outside": int(beyond.sum()) if encloses else None,
                }
            )
    return rows


def main() -> None:
    """Measure on every device there is, and write."""
    rows = []
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for name, layers in (("minilm", minilm()), ("random", random_heads())):
            rows += measure(name, layers, device)
    Path(__file__).with_suffix(".json").write_text(
        json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
