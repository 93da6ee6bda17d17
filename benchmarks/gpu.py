"""Exact norms on a GPU, checked against the CPU, in one command of a few minutes:
``python benchmarks/gpu.py``. Writes gpu.json.

Shapes: a layer of ViT-B/16 (N = 197), one of GPT-2 (N = 1024, causal), one of Llama 8B (N = 2048,
causal, rotary, 32 heads on 8 keys), with random weights at a trained scale, in float32. Of each:
time of certified norms (to 1e-3 at delta 1e-6) and, of the first two, of `lipbound`, heads per
second, memory at its peak, and what share of the rate of a large matrix product the products with J
J^T reach, in float32 and in float64. Checks, of which a failure ends the program with status 1:
some heads' norms lie where the enclosure says, as the CPU finds them in float64; all enclosures are
as narrow as was asked for; `lipbound` is above.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.attention.variants.rotary import Rotation
from lipbound.devices import device_name, resolve_device
from lipbound.errors import LipboundError
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm

TOL, DELTA = 1e-3, 1e-6
REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """A layer's shape. ``keys``: how many different keys its heads have. ``checked``: heads that
    the CPU computes again. ``bound``: of how many heads `lipbound` is computed."""

    name: str
    tokens: int
    width: int
    d: int
    heads: int
    keys: int
    causal: bool = False
    rotary: bool = False
    checked: int = 1
    bound: int = 0

    def layer(self) -> Attention:
        """Random weights at a trained scale, float32, on the CPU: logits of standard deviation 2 or
        so."""
        g = torch.Generator().manual_seed(0)
        x = torch.randn(1, self.tokens, self.width, generator=g)
        w_q = torch.randn(self.heads, self.width, self.d, generator=g) * (2 / self.width) ** 0.5
        w_k, w_v = (
            torch.randn(self.keys, self.width, self.d, generator=g) * (2 / self.width) ** 0.5
            for _ in range(2)
        )
        shared = self.heads // self.keys
        mask = torch.full((self.tokens, self.tokens), -math.inf).triu(1) if self.causal else None
        turn = None
        if self.rotary:
            angles = torch.arange(self.tokens)[:, None] * 500000.0 ** (
                -torch.arange(self.d // 2) * 2 / self.d
            )
            turn = Rotation.of_angles(angles)
        return Attention(
            x,
            w_q,
            w_k.repeat_interleave(shared, 0),
            w_v.repeat_interleave(shared, 0),
            mask=mask,
            rotation=turn,
        )


SHAPES = (
    Shape("ViT-B/16, N = 197", 197, 768, 64, 12, 12, checked=12, bound=12),
    Shape("GPT-2, N = 1024", 1024, 768, 64, 12, 12, causal=True, checked=2, bound=12),
    Shape("Llama 8B, N = 2048", 2048, 4096, 128, 32, 8, causal=True, rotary=True),
)
SMALL = (
    Shape("plain, N = 24", 24, 32, 8, 4, 4, checked=4, bound=4),
    Shape(
        "causal and rotary, N = 32", 32, 48, 8, 4, 2, causal=True, rotary=True, checked=2, bound=2
    ),
)


class Failed(Exception):
    """A number that is not what it should be."""


def check(right: bool, sentence: str) -> None:
    """Raise `Failed` with the sentence where something is not right."""
    if not right:
        raise Failed(sentence)


def seconds(f: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """The median of a few calls, after all work on the device has ended."""
    spent = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        f()
        _wait(device)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def gemm_rate(dtype: torch.dtype, device: str, order: int) -> float:
    """Operations per second of a large matrix product."""
    a = torch.randn(order, order, dtype=dtype, device=device)
    torch.mm(a, a)
    return 2 * order**3 / seconds(lambda: torch.mm(a, a), device, 9)


def products(att: Attention) -> float:
    """Floating-point operations of one product with J J^T of every head, those with masked scores
    included."""
    n, d, d_v = att.tokens, att.d, att.d_v
    return att.samples * att.heads * (2 * n * n * (4 * d + 4 * d_v) + 2 * n * (2 * d + d_v) ** 2)


def share(att: Attention, rate: float) -> float:
    """Of that rate, what products with J J^T of all heads reach in the layer's dtype."""
    op = HeadJacobian(att)
    y = torch.randn(op.batch, *op.out_shape, dtype=att.dtype, device=att.device)
    with torch.no_grad():
        op.gram(y)
        return products(att) / seconds(lambda: op.gram(y), str(att.device), 9) / rate


def measured(shape: Shape, device: str, rates: dict[torch.dtype, float]) -> dict[str, Any]:
    """Everything about one shape, checked; raises `Failed`."""
    cpu = shape.layer()
    att = cpu.to(device)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    norm = spectral_norm(att, tol=TOL, delta=DELTA)  # once to warm up
    spent = seconds(lambda: spectral_norm(cpu.to(device), tol=TOL, delta=DELTA), device)
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.startswith("cuda") else None
    width = float((norm.upper / norm.lower - 1).max())
    check(
        bool(norm.converged.all()),
        f"{shape.name}: {int((~norm.converged).sum())} enclosures are wider than {TOL:g}, up to "
        f"{width:.1e}",
    )

    heads = slice(0, shape.checked)
    reference = spectral_norm(cpu.select(heads=heads).double(), tol=1e-8).lower
    lower, upper = norm.lower[:, heads], norm.upper[:, heads]
    inside = bool(((lower <= reference * (1 + 1e-8)) & (reference <= upper)).all())
    check(
        inside,
        f"{shape.name}: the CPU finds {reference.tolist()} in float64, outside {lower.tolist()} "
        f"to {upper.tolist()}",
    )
    row: dict[str, Any] = {
        "heads": shape.heads,
        "seconds": spent,
        "heads_per_second": shape.heads / spent,
        "peak_gb": peak,
        "width": width,
        "error": float((1 - lower / reference).abs().max()),
        "checked": shape.checked,
        "share_float32": share(att, rates[torch.float32]),
        "share_float64": share(att.double(), rates[torch.float64]),
    }
    if shape.bound:
        some = slice(0, shape.bound)
        values = bounds.get("lipbound")(att.select(heads=some))
        check(
            bool((values >= norm.lower[:, some].to(values.device)).all()),
            f"{shape.name}: lipbound is below the exact norm",
        )
        row["lipbound_seconds"] = (
            seconds(lambda: bounds.get("lipbound")(cpu.to(device).select(heads=some)), device)
            / shape.bound
            * shape.heads
        )
        row["lipbound_ratio"] = float(
            (values / norm.lower[:, some].to(values.device)).log().mean().exp()
        )
    return row


def report(device: str, shapes: tuple[Shape, ...], order: int) -> dict[str, Any]:
    """Of all shapes on a device, shown as it comes."""
    start = time.perf_counter()
    rates = {dtype: gemm_rate(dtype, device, order) for dtype in (torch.float32, torch.float64)}
    found: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "tol": TOL,
        "delta": DELTA,
        "gemm_float32_tflops": rates[torch.float32] / 1e12,
        "gemm_float64_tflops": rates[torch.float64] / 1e12,
        "shapes": {},
    }
    for shape in shapes:
        row = found["shapes"][shape.name] = measured(shape, device, rates)
        print(
            f"{shape.name}: {row['heads_per_second']:.4g} heads/s, "
            f"{time.perf_counter() - start:.0f} s since the start; {row}",
            flush=True,
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, check, write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="where to compute")
    parser.add_argument(
        "--small", action="store_true", help="small layers, to try the script itself, on any device"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).with_suffix(".json"),
        help="the file that is written",
    )
    args = parser.parse_args(arguments)
    try:
        found = report(
            resolve_device(args.device),
            SMALL if args.small else SHAPES,
            256 if args.small else 8192,
        )
    except (Failed, LipboundError) as failed:
        print(f"wrong: {failed}" if isinstance(failed, Failed) else str(failed), file=sys.stderr)
        return 1
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
