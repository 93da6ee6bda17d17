"""Today's attention, family by family: how well it is captured, and how near our bounds are. Writes
families.json, which the documentation shows.

Random models: two layers of four heads, the configurations of the tests, weights large enough for
uneven attention, two samples of 24 tokens. "module" is the largest relative distance of our exact
norms from those of the dense autograd Jacobian of the model's own attention module, in float64
(first sample, last layer, 9 tokens). Trained ones: one sample of 128 tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.models import MODERN, build, inputs_for
from support.modules import own_norms

import lipbound as lb
from lipbound.models.capture.capture import Capturer, LayerCapture
from lipbound.models.inputs import prepare
from lipbound.models.loading import load_checkpoint

TRAINED = ("builtin:smollm2", "builtin:gpt2", "builtin:llama", "builtin:qwen3")


def ratios(layers: list[LayerCapture]) -> dict[str, Any]:
    """Geometric mean and maximum of bound / exact over all heads and samples, and of the sharpest
    published bound that applies and holds."""
    exact = torch.stack([lb.spectral_norm(layer.attention, tol=1e-6).lower for layer in layers])
    row: dict[str, Any] = {
        "variants": sorted(frozenset().union(*(layer.attention.variants for layer in layers))),
        "masked": any(layer.attention.mask is not None for layer in layers),
        "capture": max(layer.error for layer in layers), "heads": exact.numel(), "published": None,
    }  # fmt: skip
    for name in lb.bounds.names():
        bound = lb.bounds.get(name)
        if bound.map != "head" or not all(bound.applies(layer.attention) for layer in layers):
            continue
        if not all(bool(bound.sound(layer.attention).all()) for layer in layers):
            continue
        quotient = torch.stack([bound(layer.attention) for layer in layers]) / exact
        entry = {
            "name": name,
            "geomean": float(quotient.log().mean().exp()),
            "max": float(quotient.max()),
            "min": float(quotient.min()),
        }
        if name.startswith("lipbound"):
            row[name] = entry
        elif row["published"] is None or entry["geomean"] < row["published"]["geomean"]:
            row["published"] = entry
    return row


def module_error(make: Any) -> float:
    """Largest relative distance of exact norms from those of autograd through the model's own
    module."""
    model = build(make).double()
    inputs = inputs_for(model)
    (layer,) = Capturer(model, [1]).run(inputs)
    att, sigma = layer.attention, own_norms(model, layer.name, inputs, layer.attention)
    return float((lb.spectral_norm(att, tol=1e-10).lower[0] / sigma - 1).abs().max())


def main() -> None:
    """Measure, print, write."""
    rows = {}
    for name, make in MODERN.items():
        model = build(make)
        rows[name] = ratios(Capturer(model).run(inputs_for(model, length=24))) | {
            "module": module_error(make)
        }
        print(name, json.dumps(rows[name]), flush=True)
    for name in TRAINED:
        checkpoint = load_checkpoint(name)
        rows[name] = ratios(
            Capturer(checkpoint.model).run(prepare(checkpoint, samples=1, max_length=128).batch)
        )
        print(name, json.dumps(rows[name]), flush=True)
    report = {"torch": torch.__version__, "transformers": tf.__version__, "families": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
