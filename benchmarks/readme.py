"""Rewrite the generated parts of README.md: its figure, and how tight the bounds are, from
tightness.json."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from sitegen.bounds import shown_ratio, tightness

from lipbound import bounds

ROOT = Path(__file__).parents[1]

FIGURE = "figures/minilm.png"
CAPTION = "Exact local Lipschitz constants and bounds on all-MiniLM-L6-v2, layer by head"


def figure() -> str:
    """The first figure."""
    return f"![{CAPTION}]({FIGURE})"


def table() -> str:
    """How far above the exact norm every bound is on the checkpoints of tightness.json."""
    rows = tightness()["checkpoints"]
    names = [model.removeprefix("builtin:") for model in rows]
    lines = [f"| bound | norm | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for bound in map(bounds.get, bounds.names(None)):
        found = [row["norms"][bound.norm]["bounds"].get(bound.name) for row in rows.values()]
        cells = [
            "" if one is None else shown_ratio(one["geomean"]) + (" †" if one["sound"] < 1 else "")
            for one in found
        ]
        lines.append(f"| `{bound.name}` | {bound.norm} | {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS = {"figure": figure, "tightness": table}


def written(text: str) -> str:
    """README.md with its generated parts as they should be."""
    for name, part in PARTS.items():
        text = re.sub(
            rf"(<!-- {name}: [^\n]*-->\n\n).*?(<!-- end -->)",
            lambda m, p=part: f"{m[1]}{p()}\n\n{m[2]}",
            text,
            count=1,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text()))
