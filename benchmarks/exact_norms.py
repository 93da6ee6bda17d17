"""Time exact norms against power iteration by autograd, one head at a time, with the accuracy checked in the same run: ``make bench``.

Shapes: the 12 heads of a layer of builtin:minilm at N = 128 (real weights and text), and a ViT-B/16 layer with random weights (N = 197, d = 64).
Both methods are asked for a relative error of 1e-4 against a converged float64 reference; times are medians of interleaved runs, ratios are
within this run. Writes benchmarks/exact_norms.json.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lipbound.attention import Attention
from lipbound.capture import Capturer
from lipbound.checkpoints import load
from lipbound.inputs import prepare
from lipbound.norms import spectral_norm
from lipbound.operators import AutogradJacobian, head_function

TOL = 1e-4
REPEATS = 5


def minilm() -> Attention:
    """A middle layer of the real checkpoint."""
    checkpoint = load("builtin:minilm")
    return Capturer(checkpoint.model, [3]).run(prepare(checkpoint, samples=1, max_length=128).batch)[0].attention


def vit_base() -> Attention:
    """A layer of the shape of ViT-B/16, random weights at a trained scale."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 197, 768, generator=g)
    w_q, w_k, w_v = (torch.randn(12, 768, 64, generator=g) * 0.04 for _ in range(3))
    return Attention(x, w_q, w_k, w_v)


def power_by_autograd(att: Attention, reference: Tensor) -> tuple[Tensor, float]:
    """Norms by power iteration on J^T J through autograd, head by head, and the mean number of steps.

    Each head is stopped as soon as it is within TOL of the reference, which favours power iteration: in earnest it does not know.
    """
    values, steps = torch.zeros(att.heads, dtype=torch.float64), 0
    for h in range(att.heads):
        op = AutogradJacobian(head_function(att, 0, h), att.x[0])
        x = torch.randn(1, *op.in_shape, generator=torch.Generator().manual_seed(h))
        for _ in range(2000):
            x = x / x.norm()
            y = op.jvp(x)
            steps += 1
            values[h] = float(y.norm())
            if values[h] >= (1 - TOL) * reference[h]:
                break
            x = op.vjp(y)
    return values, steps / att.heads


def timed(f: Callable[[], object]) -> tuple[float, object]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    result = f()
    return time.perf_counter() - start, result


def main() -> None:
    """Run both shapes, print a table, write the JSON."""
    report = {}
    for name, make in (("minilm layer 3, N = 128", minilm), ("ViT-B/16 shape, N = 197", vit_base)):
        att = make()
        _ = att.p
        reference = spectral_norm(att.double(), tol=1e-9).lower[0]
        ours, certified, theirs = [], [], []
        errors = {}
        for _ in range(REPEATS):
            seconds, norm = timed(lambda att=att: spectral_norm(att, tol=TOL))
            ours.append(seconds)
            errors["lanczos"] = float((norm.lower[0] / reference - 1).abs().max())
            seconds, norm = timed(lambda att=att: spectral_norm(att, tol=TOL, delta=1e-10))
            certified.append(seconds)
            errors["certified"] = float((norm.upper[0] / norm.lower[0] - 1).max())
            seconds, (values, steps) = timed(lambda att=att, reference=reference: power_by_autograd(att, reference))
            theirs.append(seconds)
            errors["power"] = float((values / reference - 1).abs().max())
        row = {
            "lanczos_s": statistics.median(ours), "certified_s": statistics.median(certified), "power_s": statistics.median(theirs),
            "lanczos_steps": float(spectral_norm(att, tol=TOL).steps.double().mean()), "power_steps": steps, "errors": errors,
        }  # fmt: skip
        row["speedup"] = row["power_s"] / row["lanczos_s"]
        row["speedup_certified"] = row["power_s"] / row["certified_s"]
        report[name] = row
        print(
            f"{name}: lanczos {1e3 * row['lanczos_s']:.0f} ms ({row['lanczos_steps']:.0f} steps, error {errors['lanczos']:.0e}), certified "
            f"{1e3 * row['certified_s']:.0f} ms (width {errors['certified']:.0e}), autograd power iteration {1e3 * row['power_s']:.0f} ms "
            f"({steps:.0f} steps, error {errors['power']:.0e}): {row['speedup']:.1f}x and {row['speedup_certified']:.1f}x"
        )
    report["torch"], report["threads"] = torch.__version__, torch.get_num_threads()
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
