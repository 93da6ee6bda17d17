"""Render the figures of this folder from fresh runs: ``make figures``.

For each builtin checkpoint a PDF, a PNG and a caption file, in the manner of Figure 6 of Yudin et al. 2025.
"""

from pathlib import Path

import lipbound as lb

HERE = Path(__file__).parent


def main() -> None:
    """Compare, draw, and write the caption next to the figure."""
    for name in ("minilm", "gpt2", "vit"):
        ds = lb.compare(f"builtin:{name}", samples=8, max_length=128)
        for kind in ("pdf", "png"):
            lb.plots.heatmaps(ds, HERE / f"{name}.{kind}")
        (HERE / f"{name}.txt").write_text(lb.plots.caption(ds) + "\n\n" + lb.tables.render(ds) + "\n")
        print(f"{name}: figures/{name}.pdf, .png and .txt")


if __name__ == "__main__":
    main()
