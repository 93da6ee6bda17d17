"""How far the bound over a ball of inputs is above what an adversary finds, and whether any
adversary gets above it.

``python benchmarks/balls.py`` takes all heads of three layers of builtin:minilm on its default
input at N = 64, radii from 1e-4 to 1 of the mean length of a token, both kinds of ball, one thread.
Times are CPU seconds for the three layers, the certified norm at the
centre included. Where the adversary found less at a radius than at a smaller one, that counts.
``--balls`` many balls around small plain heads are attacked in float64 by steepest ascent with
dense Jacobians, and half as many around heads with rotary position embeddings, caps and sinks by
`lipbound.attack`. Prints, and writes balls.json and balls.png; ``--draw`` draws what balls.json
holds.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.bounds.ball import COVERS, over_ball
from lipbound.models.capture.capture import Capturer
from lipbound.models.inputs import prepare
from lipbound.models.loading import load_checkpoint

HERE = Path(__file__)
sys.path.insert(0, str(HERE.parents[1] / "tests"))
RADII = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
LAYERS = (0, 2, 4)
BALLS = ("token", "frobenius")


def layers(tokens: int) -> list[Attention]:
    """One input of the checkpoint."""
    checkpoint = load_checkpoint("builtin:minilm")
    found = Capturer(checkpoint.model).run(prepare(checkpoint, samples=1, max_length=tokens).batch)
    return [found[k].attention for k in LAYERS]


def fresh(att: Attention) -> Attention:
    """The same layer in float64 with nothing computed."""
    return att.with_parts(surroundings=None).double()


def summary(values: Tensor) -> list[float]:
    """Geometric mean and largest."""
    return [float(values.log().mean().exp()), float(values.max())]


def of_model(
    ball: str, radii: list[float], tokens: int, steps: int, starts: int
) -> list[dict[str, Any]]:
    """A row for each radius."""
    atts = layers(tokens)
    exact = torch.cat([lb.spectral_norm(att, tol=1e-4).lower[0] for att in atts])
    found, rows = exact, []
    for relative in sorted(radii):
        row: dict[str, Any] = {
            "ball": ball,
            "steps": steps,
            "radius": relative,
            "tokens": atts[0].tokens,
            "heads": len(exact),
        }
        start = time.process_time()
        sizes = [relative * float(att.x.double().norm(dim=-1).mean()) for att in atts]
        each = list(zip(atts, sizes, strict=True))
        bound = torch.cat([over_ball(fresh(att), r, ball=ball)[0] for att, r in each])
        row["bound_s"] = time.process_time() - start
        start = time.process_time()
        for_radius = [
            lb.attack(att.double(), r, ball=ball, steps=steps, starts=starts).norm[0]
            for att, r in each
        ]
        row["attack_s"] = time.process_time() - start
        found = torch.maximum(found, torch.cat(for_radius))
        row["adversary_over_centre"] = summary(found / exact)
        row["bound_over_adversary"] = summary(bound / found)
        row["below_adversary"] = int((bound < found * (1 - 1e-9)).sum())
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def attacked(balls: int, steps: int) -> dict[str, Any]:
    """Balls around small heads without variants."""
    from support.ball_ascent import climb, small_layer

    ratios = []
    for seed in range(-(-balls // 20)):
        att, ball, radius = small_layer(1000 + seed)
        found = climb(att, radius, ball, steps=steps, seed=seed)
        ratios.append(against(att, ball, radius, found))
    return judged(ratios, steps)


def attacked_variants(balls: int, steps: int) -> dict[str, Any]:
    """Balls around small heads with variants, under every mask."""
    from support.variants import MASKS, layer

    variants = sorted(COVERS)
    ratios = []
    for seed in range(-(-balls // 12)):
        g = torch.Generator().manual_seed(seed)
        has = frozenset(name for i, name in enumerate(variants) if (1 + seed % 7) >> i & 1)
        n = 3 + int(torch.randint(5, (), generator=g))
        att = layer(
            seed,
            has,
            mask=MASKS[seed % len(MASKS)],
            n=n,
            scale=10 ** (float(torch.rand((), generator=g)) - 0.5),
            samples=4,
            heads=3,
        )
        radius = 10 ** float(torch.rand((), generator=g) * 4.5 - 4) * float(
            att.x.norm(dim=-1).mean()
        )
        ball = BALLS[seed // 7 % 2]
        found = lb.attack(att, radius, ball=ball, steps=steps, starts=4, seed=seed).norm
        ratios.append(against(att, ball, radius, found))
    return judged(ratios, steps)


def against(att: Attention, ball: str, radius: float, found: Tensor) -> Tensor:
    """Our bound over what an attack found."""
    return (over_ball(att, radius, ball=ball) / found).flatten()


def judged(ratios: list[Tensor], steps: int) -> dict[str, Any]:
    """Of many balls."""
    ratio = torch.cat(ratios)
    return {
        "balls": len(ratio),
        "steps": steps,
        "below": int((ratio < 1 - 1e-9).sum()),
        "smallest": float(ratio.min()),
        "bound_over_ascent": summary(ratio),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The gap between bound and adversary against the radius: geometric means, and the worst head
    dotted."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {"token": "every token moves by the radius", "frobenius": "all tokens together"}
    fig, axes = plt.subplots(1, 2, figsize=(7.1, 2.7), constrained_layout=True, sharey=True)
    for ax, (ball, title) in zip(axes, titles.items(), strict=True):
        found = sorted((row for row in rows if row["ball"] == ball), key=lambda row: row["radius"])
        x = [row["radius"] for row in found]
        mean, worst = zip(*(row["bound_over_adversary"] for row in found), strict=True)
        ax.loglog(x, mean, "o-", color="#004488", markersize=3.5, label="geometric mean")
        ax.loglog(x, worst, ":", color="#004488", linewidth=1.2, label="worst head")
        ax.set(title=title, xlabel="radius / mean length of a token")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("bound / adversary")
    axes[0].legend(fontsize=7, loc="upper left")
    fig.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--balls", type=int, default=5000)
    parser.add_argument("--kinds", nargs="*", default=list(BALLS), choices=BALLS)
    parser.add_argument(
        "--radii", nargs="*", type=float, default=list(RADII), help="of the mean length of a token"
    )
    parser.add_argument("--out", type=Path, default=HERE.with_suffix(".json"))
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.out.read_text())["rows"], args.out.with_suffix(".png"))
        return
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "model": "builtin:minilm",
        "layers": list(LAYERS),
        "steps": args.steps,
        "starts": args.starts,
    }
    if args.balls:
        result["attacked"] = attacked(args.balls, steps=10)
        result["attacked_variants"] = attacked_variants(args.balls // 2, steps=10)
        print(json.dumps([result["attacked"], result["attacked_variants"]]), flush=True)
    result["rows"] = [
        row
        for ball in args.kinds
        for row in of_model(ball, args.radii, args.tokens, args.steps, args.starts)
    ]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result["rows"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
