"""Render the figures of this folder from fresh runs: ``make figures``.

For each builtin checkpoint a PDF, a PNG and a caption file, in the manner of Figure 6 of Yudin et al. 2025; and bounds over balls against the radius.
"""

from pathlib import Path

import lipbound as lb
from lipbound.capture import Capturer
from lipbound.checkpoints import load
from lipbound.inputs import prepare

HERE = Path(__file__).parent


def main() -> None:
    """Compare, draw, and write the caption next to the figure."""
    for name in ("minilm", "gpt2", "vit"):
        ds = lb.compare(f"builtin:{name}", samples=8, max_length=128)
        for kind in ("pdf", "png"):
            lb.plots.heatmaps(ds, HERE / f"{name}.{kind}")
        (HERE / f"{name}.txt").write_text(lb.plots.caption(ds) + "\n\n" + lb.tables.render(ds) + "\n")
        print(f"{name}: figures/{name}.pdf, .png and .txt")
    ball()
    print("figures/ball.pdf and .png")


def ball() -> None:
    """Bounds over balls for four real heads, from 1e-4 of the tokens' length to three times it, with an adversary."""
    checkpoint = load("builtin:minilm")
    att = Capturer(checkpoint.model, [2]).run(prepare(checkpoint, samples=1, max_length=128).batch)[0].attention.select(heads=slice(0, 4))
    length = float(att.x.norm(dim=-1).mean())
    ds = lb.radius_curve(att, [length * r for r in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)])
    for kind in ("pdf", "png"):
        lb.plots.ball_curve(ds, HERE / f"ball.{kind}", title="builtin:minilm, layer 2, 128 tokens")


if __name__ == "__main__":
    main()
