"""What masks save, in one run on one thread: ``python benchmarks/masks.py``. Writes masks.json.

A layer of GPT-2's shape (N = 1024, d = 64, causal, two heads, random weights at a trained scale):
exact norms with products in blocks of rows and on whole matrices, against power iteration with
autograd at the loosest tolerance that is as accurate as 1e-4; `lipbound` against the same norms.
One head of N = 8192 under a causal mask and in a sliding window of 256, each in a process of its
own. Seconds of processor time, medians of interleaved repeats; gigabytes are the peak of the
process beyond what the layer itself took, its N x N mask included.
"""

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rivals
import torch
from bounds import fresh
from exact_norms import ACCURACY, device, random_layer

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.jacobians import streaming
from lipbound.jacobians.products import row_blocks
from lipbound.jacobians.spectral_norm import spectral_norm

REPEATS, HEADS, N = 2, 2, 1024
LONG, WINDOW = 8192, 256
HERE = Path(__file__)


def seconds(f: Callable[[], object]) -> float:
    """Of the processor, for one call."""
    start = time.process_time()
    f()
    return time.process_time() - start


def plain(att: Attention) -> object:
    """Norms from below, to 1e-4."""
    return spectral_norm(fresh(att), tol=ACCURACY)


def enclosed(att: Attention) -> object:
    """Norms between two ends, within 1e-3 but for a probability of 1e-10."""
    return spectral_norm(fresh(att), tol=1e-3, delta=1e-10)


def bounded(att: Attention) -> object:
    """`lipbound`."""
    return bounds.get("lipbound")(fresh(att))


def causal_heads() -> dict[str, Any]:
    """Seconds per head of everything on the layer of GPT-2's shape, with a mask and without, and
    the ratios that matter."""
    layers = {
        "causal": random_layer(N, 64, HEADS, causal=True),
        "no mask": random_layer(N, 64, HEADS),
    }
    jobs: dict[str, Callable[[], object]] = {}
    att = layers["causal"]
    exact = [spectral_norm(att.double(), tol=1e-9).lower[0]]
    tol, error, products = rivals.loosest(
        rivals.power_iteration, [att], range(HEADS), exact, ACCURACY
    )
    jobs["power iteration"] = partial(rivals.values, rivals.power_iteration, att, range(HEADS), tol)
    for name, layer in layers.items():
        jobs |= {
            f"{kind}, {name}": partial(f, layer)
            for kind, f in (("exact", plain), ("enclosed", enclosed), ("lipbound", bounded))
        }
    whole = {
        f"{kind}, causal, whole matrices": jobs[f"{kind}, causal"] for kind in ("exact", "enclosed")
    }
    times: dict[str, list[float]] = {}
    worth, few = row_blocks.WORTH, streaming.FEW
    for repeat in range(REPEATS + 1):
        for name, job in (jobs | whole).items():
            row_blocks.WORTH, streaming.FEW = (0.0, 0.0) if name in whole else (worth, few)
            spent = seconds(job) / HEADS
            if repeat:  # the first is to warm up
                times.setdefault(name, []).append(spent)
    row_blocks.WORTH, streaming.FEW = worth, few
    each = {name: statistics.median(values) for name, values in times.items()}
    power = each["power iteration"]
    return {
        "seconds_per_head": each,
        "power_iteration": {"tol": tol, "error": error, "products": products},
        "power_over_exact": {
            "blocks": power / each["exact, causal"],
            "whole matrices": power / each["exact, causal, whole matrices"],
        },
        "power_over_enclosed": {
            "blocks": power / each["enclosed, causal"],
            "whole matrices": power / each["enclosed, causal, whole matrices"],
        },
        "lipbound_over_enclosed": {
            name: each[f"lipbound, {name}"] / each[f"enclosed, {name}"] for name in layers
        },
        "lipbound_over_exact": {
            name: each[f"lipbound, {name}"] / each[f"exact, {name}"] for name in layers
        },
    }


def one(reach: int) -> dict[str, float]:
    """Seconds, peak memory and norm of one head of N = 8192 whose queries see so many tokens up to
    their own."""
    torch.set_num_threads(1)
    g, i = torch.Generator().manual_seed(0), torch.arange(LONG)
    mask = torch.zeros(LONG, LONG).masked_fill_(
        (i[:, None] < i) | (i[:, None] - i >= reach), -math.inf
    )
    x, w = (
        torch.randn(1, LONG, 256, generator=g),
        [torch.randn(1, 256, 64, generator=g) * 0.06 for _ in range(3)],
    )
    att = Attention(x, *w, mask=mask)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    norm = spectral_norm(att, tol=ACCURACY)
    spent, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": spent,
        "steps": int(norm.steps),
        "norm": float(norm.lower),
        "more_gb": (peak - before) / 1e6,
    }


def windows() -> dict[str, Any]:
    """Both masks, and the ratio of their times."""
    runs = {}
    for name, reach in (("window", WINDOW), ("causal", LONG)):
        done = subprocess.run(
            [sys.executable, __file__, str(reach)], capture_output=True, text=True, check=True
        )
        runs[name] = json.loads(done.stdout)
        print(name, runs[name], flush=True)
    return runs | {"window_over_causal": runs["window"]["seconds"] / runs["causal"]["seconds"]}


def main() -> None:
    """Run everything, print, write."""
    if len(sys.argv) > 1:
        print(json.dumps(one(int(sys.argv[1]))))
        return
    torch.set_num_threads(1)
    report: dict[str, Any] = {"device": device(), "torch": torch.__version__}
    for name, rows in (
        (f"{HEADS} heads, N = {N}", causal_heads),
        (f"one head, N = {LONG}", windows),
    ):
        report[name] = rows()
        print(name, json.dumps(report[name], indent=1), flush=True)
    HERE.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
