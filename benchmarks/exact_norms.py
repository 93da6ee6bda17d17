"""Exact norms against what people use instead, and against the machine itself: ``make bench``.
Writes exact_norms.json and exact_norms.png.

Shapes: all 72 heads of builtin:minilm at N = 128 (real weights and text); a layer of the shape of
ViT-B/16 (N = 197), one of GPT-2 (N = 1024, causal), and a small one where dense Jacobians fit, with
random weights at a trained scale. Everything is asked for a relative error of 1e-4 against float64
Lanczos run to 1e-9; each rival gets the loosest tolerance with which all of its heads are that
accurate (`rivals.loosest`). Float32, medians of interleaved repeats; seconds per head. Sweeps: one
of N, d, heads and samples at a time, from 8 heads of N = 128, d = 32.
"""

import argparse
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import rivals
import torch
from matplotlib.ticker import FuncFormatter, LogLocator

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm

ACCURACY = 1e-4
REPEATS = 5
HERE = Path(__file__)


def random_layer(
    n: int, d: int, heads: int, *, samples: int = 1, width: int = 768, causal: bool = False
) -> Attention:
    """Random weights at a trained scale; P is at hand."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(samples, n, width, generator=g)
    w = [torch.randn(heads, width, d, generator=g) * 0.04 for _ in range(3)]
    mask = torch.full((n, n), -math.inf).triu(1) if causal else None
    return ready(Attention(x, *w, mask=mask))


def ready(att: Attention) -> Attention:
    """With everything at hand that belongs to the forward pass, so that only the norms
    are timed."""
    _ = att.p, att.q, att.centred_k, att.centred_v
    return att


def minilm() -> list[Attention]:
    """Every layer of the real checkpoint."""
    checkpoint = lb.load_checkpoint("builtin:minilm")
    inputs = lb.prepare(checkpoint, samples=1, max_length=128)
    return [ready(att) for att in lb.capture(checkpoint.model, inputs)]


ALL_HEADS = dict.fromkeys(
    ("power_iteration", "patient_power_iteration", "arpack", "propack", "lobpcg"), range(12)
)
SHAPES: dict[str, tuple[Callable[[], list[Attention]], dict[str, range]]] = {
    "MiniLM, 72 heads, N = 128": (
        minilm,
        ALL_HEADS | {"torch_lobpcg": range(1), "torch_svd_lowrank": range(1)},
    ),
    "ViT-B/16 shape, 12 heads, N = 197": (
        lambda: [random_layer(197, 64, 12)],
        ALL_HEADS,
    ),
    "GPT-2 shape, 12 heads, N = 1024": (
        lambda: [random_layer(1024, 64, 12, causal=True)],
        {"power_iteration": range(2), "patient_power_iteration": range(2), "arpack": range(2)},
    ),
    "8 heads, N = 32": (
        lambda: [random_layer(32, 32, 8, width=128)],
        dict.fromkeys(
            ("power_iteration", "patient_power_iteration", "arpack", "dense_svd"), range(8)
        ),
    ),
}
"""Layers, and on which heads of each the rivals run: a few where a head takes them seconds."""


def seconds(f: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def gemm_rate() -> float:
    """Float32 operations per second of a large matrix product."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / statistics.median(seconds(lambda: a @ a) for _ in range(9))


def products(att: Attention) -> float:
    """Floating-point operations of one product with J J^T of every head."""
    n, d, d_v = att.tokens, att.d, att.d_v
    return att.samples * att.heads * (2 * n * n * (4 * d + 4 * d_v) + 2 * n * (2 * d + d_v) ** 2)


def against_rivals(layers: list[Attention], who: dict[str, range], repeats: int) -> dict[str, Any]:
    """Seconds per head, errors and ratios of everything on one shape."""
    reference = [spectral_norm(att.double(), tol=1e-9).lower[0] for att in layers]
    settings = {}
    for name, heads in who.items():
        few = layers if len(heads) > 1 else layers[3:4]
        exact = reference if len(heads) > 1 else reference[3:4]
        settings[name] = (
            few,
            heads,
            *rivals.loosest(getattr(rivals, name), few, heads, exact, ACCURACY),
        )
    times: dict[str, list[float]] = {name: [] for name in ("lanczos", "enclosure", *who)}
    count = sum(att.heads for att in layers)
    for att in layers:  # once to warm up
        spectral_norm(att, tol=ACCURACY)
    for repeat in range(repeats):
        time.sleep(0.5)  # the last rival's threads spin for a while
        times["lanczos"].append(
            seconds(lambda: [spectral_norm(att, tol=ACCURACY) for att in layers]) / count
        )
        times["enclosure"].append(
            seconds(lambda: [spectral_norm(att, tol=1e-3, delta=1e-10) for att in layers]) / count
        )
        for name, (few, heads, tol, _, _) in settings.items():
            if repeat < 1 or len(heads) > 1:
                run = partial(rivals.values, getattr(rivals, name), heads=heads, tol=tol)
                spent = seconds(lambda run=run, few=few: [run(att=att) for att in few])
                times[name].append(spent / (len(few) * len(heads)))
    found = [spectral_norm(att, tol=ACCURACY) for att in layers]
    ours = statistics.median(times["lanczos"])
    enclosed = [spectral_norm(att, tol=1e-3, delta=1e-10) for att in layers]
    width = max(float((norm.upper / norm.lower - 1).max()) for norm in enclosed)
    error = max(
        float((norm.lower[0] / exact - 1).abs().max())
        for norm, exact in zip(found, reference, strict=True)
    )
    steps = sum(float(norm.steps.double().sum()) for norm in found) / count
    rows: dict[str, Any] = {
        "lanczos": {
            "seconds_per_head": ours,
            "error": error,
            "products": 2 * steps,
            "speedup": 1.0,
        },
        "enclosure": {
            "seconds_per_head": statistics.median(times["enclosure"]),
            "error": width,
            "speedup": ours / statistics.median(times["enclosure"]),
        },
    }
    for name, (_, heads, tol, off, spent) in settings.items():
        each = statistics.median(times[name])
        rows[name] = {
            "seconds_per_head": each,
            "error": off,
            "products": spent,
            "tol": tol,
            "heads_timed": len(heads),
            "speedup": each / ours,
        }
    return rows


def against_machine(layers: list[Attention], rate: float) -> dict[str, float]:
    """Fractions of the rate of a large matrix product: one product with J J^T, and all of
    `spectral_norm`."""
    att = layers[0]
    op = HeadJacobian(att)
    y = torch.randn(op.batch, *op.out_shape)
    with torch.no_grad():
        op.gram(y)
        product = statistics.median(seconds(lambda: op.gram(y)) for _ in range(15))
    whole = statistics.median(seconds(lambda: spectral_norm(att, tol=ACCURACY)) for _ in range(9))
    steps = float(spectral_norm(att, tol=ACCURACY).steps.double().mean())
    return {
        "product": products(att) / product / rate,
        "whole": products(att) * steps / whole / rate,
    }


def exponent(x: list[float], y: list[float]) -> float:
    """Slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def sweeps(quick: bool) -> dict[str, Any]:
    """Seconds per head as one of N, d, heads, samples grows; for N also of two rivals, on two
    heads."""
    result: dict[str, Any] = {
        "N": {"x": [64, 128, 256, 512] if quick else [64, 128, 256, 512, 1024, 2048], "lanczos": []}
    }
    theirs = ("power_iteration", "arpack")
    for name in theirs:
        result["N"][name] = []
    for n in result["N"]["x"]:
        att = random_layer(n, 32, 8, width=256)
        spectral_norm(att)
        result["N"]["lanczos"].append(
            statistics.median(seconds(lambda att=att: spectral_norm(att)) for _ in range(3)) / 8
        )
        reference = [spectral_norm(att.double(), tol=1e-9).lower[0]]
        for name in theirs:
            if n <= 1024:
                tol = rivals.loosest(getattr(rivals, name), [att], range(2), reference, ACCURACY)[0]
                result["N"][name].append(
                    seconds(
                        lambda att=att, tol=tol, name=name: rivals.values(
                            getattr(rivals, name), att, range(2), tol
                        )
                    )
                    / 2
                )
    for name in ("lanczos", *theirs):
        y = result["N"][name]
        result["N"][f"{name}_exponent"] = exponent(result["N"]["x"][: len(y)][-3:], y[-3:])
    for key, values in (
        ("d", [8, 16, 32, 64, 128]),
        ("heads", [1, 2, 4, 8, 16, 32]),
        ("samples", [1, 2, 4, 8]),
    ):
        row: dict[str, list[float]] = {"x": values, "lanczos": []}
        for value in values:
            shape = {"d": 32, "heads": 8, "samples": 1} | {key: value}
            att = random_layer(128, shape["d"], shape["heads"], samples=shape["samples"], width=256)
            spectral_norm(att)
            once = statistics.median(seconds(lambda att=att: spectral_norm(att)) for _ in range(5))
            row["lanczos"].append(once / (shape["heads"] * shape["samples"]))
        result[key] = row
    return result


def plot(result: dict[str, Any], path: Path) -> None:
    """Seconds per head against N, d, heads, samples, on logarithmic axes."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {
        "lanczos": "lipbound",
        "power_iteration": "autograd power iteration",
        "arpack": "svds (ARPACK), autograd",
    }
    fig, axes = plt.subplots(
        1,
        4,
        figsize=(12, 2.9),
        constrained_layout=True,
        gridspec_kw={"width_ratios": [1.7, 1, 1, 1]},
    )
    for ax, (key, row) in zip(axes, result.items(), strict=True):
        for name, label in labels.items():
            if name in row:
                slope = f", N^{row[f'{name}_exponent']:.2f}" if f"{name}_exponent" in row else ""
                ax.loglog(
                    row["x"][: len(row[name])],
                    np.array(row[name]) * 1e3,
                    marker="o",
                    markersize=3.5,
                    label=label + slope,
                )
        ax.set_xticks(row["x"], [str(x) for x in row["x"]])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if key != "N" else (1,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.minorticks_off()
        ax.set_xlabel(key)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("ms per head")
    axes[0].set_ylim(bottom=0.2)  # room for the legend
    axes[0].legend(fontsize=7.5, title="fit over the last three N", title_fontsize=7.5)
    fig.savefig(path, dpi=160)


def device() -> str:
    """Processor and threads."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else None
    name = found[1] if found else "CPU"
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def main() -> None:
    """Run everything, print a table, write the JSON and the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one repeat, MiniLM and ViT only, short sweep"
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(2)
    rate = gemm_rate()
    report: dict[str, Any] = {
        "device": device(),
        "torch": torch.__version__,
        "gemm_gflops": rate / 1e9,
        "accuracy": ACCURACY,
        "shapes": {},
    }
    for name, (make, who) in list(SHAPES.items())[: 2 if quick else None]:
        layers = make()
        rows = against_rivals(
            layers,
            {k: v for k, v in who.items() if not quick or len(v) > 1},
            1 if quick else REPEATS,
        )
        report["shapes"][name] = {
            "methods": rows,
            "fraction_of_gemm_rate": against_machine(layers, rate),
        }
        print(
            f"\n{name}  (fractions of the GEMM rate: "
            f"{report['shapes'][name]['fraction_of_gemm_rate']})"
        )
        for method, row in rows.items():
            print(
                f"  {method:18} {1e3 * row['seconds_per_head']:9.2f} ms/head  error "
                f"{row['error']:.0e}  {row['speedup']:7.2f}x",
                flush=True,
            )
    report["sweeps"] = sweeps(quick)
    print(json.dumps(report["sweeps"], indent=1))
    if not quick:
        HERE.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        plot(report["sweeps"], HERE.with_suffix(".png"))


if __name__ == "__main__":
    main()
