"""One product with J J^T, ours against the same formula through torch.compile: whether compiling
pays. Prints, and writes compiled.json."""

import json
import statistics
from functools import partial
from pathlib import Path

import torch
from exact_norms import SHAPES, device, seconds
from torch import Tensor

from lipbound.jacobians.head import HeadJacobian

REPEATS = 15


def gram(
    y: Tensor,
    p: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    w: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """J J^T y of every head as one expression, w the rows of `HeadJacobian`'s weights' Gram matrix
    for q, k and v."""
    g = (y @ v.mT - (y * o).sum(-1, keepdim=True)) * p
    z = (g @ k) @ w[0] + (g.mT @ q) @ w[1] + (p.mT @ y) @ w[2]
    z_q, z_k, z_v = z.split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
    t = (z_q @ k.mT + q @ z_k.mT) * p
    return t @ v - t.sum(-1, keepdim=True) * o + p @ z_v


def main() -> None:
    """Median times in milliseconds, interleaved, of the three ways on every shape of
    exact_norms.py."""
    torch.set_num_threads(2)
    compiled = torch.compile(gram)
    shapes = {}
    for name, (make, _) in SHAPES.items():
        op = HeadJacobian(make()[0])
        y = torch.randn(op.batch, *op.out_shape)
        parts = (op.p, op.q, op.k, op.v, op.o, (op.w.mT @ op.w)[op.head].split(op.sizes[:3], 1))
        ways = {
            "ours": partial(op.gram, y),
            "eager": partial(gram, y, *parts),
            "compiled": partial(compiled, y, *parts),
        }
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(y, *parts),
                op.gram(y),
                rtol=1e-3,
                atol=1e-4 * float(op.gram(y).abs().max()),
            )
            times = [{way: seconds(run) for way, run in ways.items()} for _ in range(REPEATS)]
        shapes[name] = {way: 1e3 * statistics.median(row[way] for row in times) for way in ways}
        print(f"{name:36}", {way: f"{ms:.2f} ms" for way, ms in shapes[name].items()}, flush=True)
    Path(__file__).with_suffix(".json").write_text(
        json.dumps({"device": device(), "torch": torch.__version__, "ms": shapes}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
