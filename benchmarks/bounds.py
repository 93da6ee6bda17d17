"""Time our bounds and the certificates against plain exact norms, in one run: ``make bench``.
Writes benchmarks/bounds.json.

On all heads of builtin:minilm (N = 128, real text): bound / exact, and time of each bound and of
the enclosures as a multiple of the plain norms' time (tol 1e-4). Scaling: the same ratio of times
for 12 heads of width 32 at N = 64 ... 1024, random weights at a trained scale, N = 1024 on 2 of
them. Default: all bounds but `yudin_sqrt_n`, which is timed apart, together, for heads of width 64
at N = 197 and 1024. Medians of interleaved repeats.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lipbound as lb
from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.jacobians.spectral_norm import spectral_norm

REPEATS = 3


def fresh(att: Attention) -> Attention:
    """The same layer with P at hand and nothing else remembered."""
    other = att.select()
    other.cache.keep("p", att.p)
    return other


def timed(
    jobs: dict[str, Callable[[Attention], Any]], layers: list[Attention], repeats: int = REPEATS
) -> dict[str, float]:
    """Median seconds of each job over all layers, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            inputs = [fresh(att) for att in layers]
            start = time.perf_counter()
            for att in inputs:
                job(att)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def random_layer(n: int, width: int, heads: int, d: int, scale: float) -> Attention:
    """Random weights at a trained scale, with P at hand before the clock starts."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, n, width, generator=g)
    att = Attention(x, *(torch.randn(heads, width, d, generator=g) * scale for _ in range(3)))
    att.p  # noqa: B018
    return att


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(2)
    checkpoint = lb.load_checkpoint("builtin:minilm")
    layers = lb.capture(checkpoint.model, lb.prepare(checkpoint, samples=1, max_length=128))
    heads = sum(att.heads for att in layers)
    jobs: dict[str, Callable[[Attention], Any]] = {
        "exact": lambda att: spectral_norm(att, tol=1e-4),
        "enclosure": lambda att: spectral_norm(att, tol=1e-3, delta=1e-10 * att.heads / heads),
        "lipbound": bounds.get("lipbound"),
        "lipbound_block": bounds.get("lipbound_block"),
    }
    seconds = timed(jobs, layers, 5)
    exact = torch.cat([spectral_norm(att, tol=1e-6).lower for att in layers])
    result: dict[str, Any] = {"minilm": {"heads": heads, "exact_seconds": seconds.pop("exact")}}
    for name, value in seconds.items():
        row = {"time_over_exact": value / result["minilm"]["exact_seconds"]}
        if name != "enclosure":
            ratio = torch.cat([bounds.get(name)(att) for att in layers]) / exact
            row |= {"geomean": float(ratio.log().mean().exp()), "max": float(ratio.max())}
        result["minilm"][name] = row
    result["scaling"] = {}
    for n in (64, 128, 256, 512, 1024):
        count = 2 if n == 1024 else 12
        att = random_layer(n, 384, count, 32, 0.06)
        pair = timed({name: jobs[name] for name in ("exact", "lipbound")}, [att])
        result["scaling"][n] = {
            "heads": count,
            "lipbound_seconds": pair["lipbound"],
            "lipbound_over_exact": pair["lipbound"] / pair["exact"],
        }
    result["default"] = {}
    for n, count in ((197, 12), (1024, 2)):
        att = random_layer(n, 768, count, 64, 0.04)
        names = [name for name in bounds.resolve("default") if name != "yudin_sqrt_n"]
        several: dict[str, Callable[[Attention], Any]] = {
            "exact": jobs["exact"],
            "default": partial(bounds.evaluate, bounds=names),
            **{name: bounds.get(name) for name in ("lipbound", "yudin_sqrt_n")},
        }
        row = timed(several, [att])
        result["default"][n] = {"heads": count, "exact_seconds": row["exact"]} | {
            f"{k}_over_exact": v / row["exact"] for k, v in row.items() if k != "exact"
        }
    print(json.dumps(result, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
