"""Every method against dense float64 decompositions of autograd Jacobians: ``make accuracy`` writes
accuracy.json, which the documentation shows.

Heads: 12 of builtin:minilm (two of each layer, 32 tokens of real text) and 24 random ones with
biases and sharp attention (8 tokens). The error is the largest relative distance of ``lower`` from
the reference, the width the largest ``upper / lower - 1``, and "outside" counts references that lie
beyond an enclosure by more than rounding of the dtype (the slack of the audit).
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipbound as lb

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.reference import dense_jacobian

CASES: list[tuple[str, dict[str, Any]]] = [
    ("lanczos", {"tol": 1e-4}),
    ("lanczos", {"tol": 1e-3, "delta": 1e-10}),
    ("lanczos", {"tol": 1e-6, "delta": 1e-10}),
    ("power", {"tol": 1e-4}),
    ("dense", {}),
]


def minilm() -> list[lb.Attention]:
    """Two heads of every layer, 32 tokens."""
    checkpoint = lb.load_checkpoint("builtin:minilm")
    layers = lb.capture(checkpoint.model, lb.prepare(checkpoint, samples=1, max_length=32))
    return [att.select(heads=slice(2 * i, 2 * i + 2)) for i, att in enumerate(layers)]


def random_heads() -> list[lb.Attention]:
    """24 heads from flat to saturated attention."""
    g = torch.Generator().manual_seed(0)
    layers = []
    for sharpness in (0.1, 1.0, 4.0):
        shapes = [(2, 8, 16), (4, 16, 6), (4, 16, 6), (4, 16, 5), (4, 6), (4, 6)]
        x, w_q, w_k, w_v, b_q, b_k = (torch.randn(shape, generator=g) for shape in shapes)
        layers.append(lb.Attention(x, sharpness * w_q, w_k, w_v, b_q=b_q, b_k=10 * b_k))
    return layers


def reference(att: lb.Attention) -> Tensor:
    """Float64 singular values of the autograd Jacobians, (samples, heads)."""
    att = att.double()
    places = itertools.product(range(att.samples), range(att.heads))
    jacobians = (dense_jacobian(att, s, h) for s, h in places)
    squares = [torch.linalg.eigvalsh(j @ j.mT)[-1] for j in jacobians]
    return torch.stack(squares).sqrt().view(att.samples, att.heads)


REFERENCE = 1e-11
"""Rounding of the reference itself, a float64 decomposition."""


def measure(name: str, layers: list[lb.Attention], device: str) -> list[dict[str, Any]]:
    """A row per method and dtype."""
    exact = torch.cat([reference(att).flatten() for att in layers])
    rows = []
    for method, options in CASES:
        for dtype in ("float32", "float64"):
            cast = [(att.double() if dtype == "float64" else att).to(device) for att in layers]
            norms = [lb.spectral_norm(att, method=method, **options) for att in cast]
            lower, upper = (
                torch.cat([getattr(norm, end).flatten() for norm in norms])
                for end in ("lower", "upper")
            )
            encloses = bool(torch.isfinite(upper).all())
            beyond = (exact < lower * (1 - REFERENCE)) | (exact > upper * (1 + REFERENCE))
            said = ", ".join([method, *(f"{key}={value:g}" for key, value in options.items())])
            rows.append(
                {
                    "heads": f"{name} ({len(exact)})",
                    "method": said,
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
