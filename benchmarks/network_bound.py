"""How far `lb.network_bound` is above the exact constant at the centre and above what an attack finds, and whether any attack gets above it.

``python benchmarks/network_bound.py`` takes 1, 2, 3 and 6 blocks of builtin:vit-baseline and one and two layers of builtin:minilm, one sample each,
Frobenius balls of 1e-5 to 1e-1 of the mean length of the tokens that enter, one thread. The attack is projected ascent on |J v|, v being the top
right singular vector where it stands. ``--balls`` many balls around small random models (BERT, ViT, GPT-2, Llama) are attacked too, with dense
Jacobians. Prints, and writes network_bound.json.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipbound as lb
from lipbound.analysis.network import NetworkJacobian, chain
from lipbound.linalg.operator_norm import operator_norm

HERE = Path(__file__)
sys.path.insert(0, str(HERE.parents[1] / "tests"))
RADII = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
CASES = (("builtin:vit-baseline", (1, 2, 3, 6), 128), ("builtin:minilm", (1, 2), 32))
FAMILIES = ("bert", "vit", "gpt2", "Llama")


def climb(f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor | None, radius: float, steps: int, norm: Callable[[Tensor], Any]) -> float:
    """The largest norm met on the way up inside the ball around x; ``norm``: its value and top right singular vector at a point."""
    move, most = torch.zeros_like(x), 0.0
    for step in range(steps + 1):
        value, v = norm(x + move)
        most = max(most, value)
        if step == steps:
            break
        with torch.enable_grad():
            at = (x + move).requires_grad_()
            (up,) = torch.autograd.grad(torch.func.jvp(f, (at,), (v,))[1].norm(), at)
        up = up if real is None else up * real
        move = move + radius * up / up.norm().clamp_min(1e-300) / (1 if step == 0 else 2)
        move = move * min(1.0, radius / float(move.norm()))
    return most


def by_products(f: Callable[[Tensor], Tensor], real: Tensor | None) -> Callable[[Tensor], Any]:
    """By Lanczos."""

    def norm(x: Tensor) -> tuple[float, Tensor]:
        found = operator_norm(NetworkJacobian(f, x, real), tol=1e-6, vectors=True)
        return float(found.lower[0]), found.right.view_as(x)

    return norm


def by_dense(f: Callable[[Tensor], Tensor], real: Tensor | None) -> Callable[[Tensor], Any]:
    """By the dense matrix."""

    def norm(x: Tensor) -> tuple[float, Tensor]:
        with torch.enable_grad():
            jacobian = torch.autograd.functional.jacobian(f, x, vectorize=True).reshape(-1, x.numel())
        _, s, v = torch.linalg.svd(jacobian)
        return float(s[0]), v[0].view_as(x)

    return norm


def double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}


def entering(model: Any, inputs: dict[str, Tensor], block: int) -> float:
    """The mean length of the tokens that enter a block."""
    with chain(model, inputs, block, block) as (_, x, _real):
        return float(x.norm(dim=-1).mean())


def of_model(name: str, blocks: tuple[int, ...], tokens: int, steps: int) -> list[dict[str, Any]]:
    """A row for each number of blocks and radius."""
    checkpoint = lb.load_checkpoint(name, dtype="float64")
    inputs = double(lb.prepare(checkpoint, samples=1, max_length=tokens).batch)
    rows = []
    for count in blocks:
        length = entering(checkpoint.model, inputs, 0)
        start = time.process_time()
        found = lb.network_bound(checkpoint.model, inputs, [r * length for r in RADII], end=count - 1)
        seconds, most = time.process_time() - start, 0.0
        with chain(checkpoint.model, inputs, 0, count - 1) as (f, x, real):
            for i, radius in enumerate(RADII):
                most = max(most, climb(f, x, real, radius * length, steps, by_products(f, real)))
                row = {
                    "model": name, "blocks": count, "tokens": x.shape[1], "radius": radius, "bound": float(found.upper[0, i]),
                    "centre": float(found.centre[0]), "attack": most, "product": float(found.product[0, i]), "curve_s": seconds,
                }  # fmt: skip
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def attacked(balls: int, steps: int) -> dict[str, Any]:
    """Balls around small random models, a hundredth to ten thousandth of a token's length and further."""
    from support.models import AFFINE, MODERN, build, inputs_for

    ratios: list[float] = []
    radii = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    for seed in range(-(-balls // len(radii))):
        family = FAMILIES[seed % len(FAMILIES)]
        model = build((AFFINE | MODERN)[family], seed).double()
        inputs = double({k: t[:1] for k, t in inputs_for(model, length=4).items()})
        first = seed // len(FAMILIES) % 2
        length = entering(model, inputs, first)
        found = lb.network_bound(model, inputs, [r * length for r in radii], start=first, end=1)
        with chain(model, inputs, first, 1) as (f, x, real):
            for i, radius in enumerate(radii):
                ratios.append(float(found.upper[0, i]) / climb(f, x, real, radius * length, steps, by_dense(f, real)))
    ratio = torch.tensor(ratios, dtype=torch.float64).view(-1, len(radii))
    means = ratio.log().mean(0).exp().tolist()
    return {"balls": ratio.numel(), "steps": steps, "below": int((ratio < 1 - 1e-6).sum()), "smallest": float(ratio.min()), "means": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--balls", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE.with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"torch": torch.__version__, "processor": platform.processor() or platform.machine(), "radii": list(RADII)}
    result["rows"] = [row for name, blocks, tokens in CASES for row in of_model(name, blocks, tokens, args.steps)]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.balls:
        result["attacked"] = attacked(args.balls, 2)
        print(json.dumps(result["attacked"]), flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
