"""Rewrite the generated parts of README.md: its figure with the caption, which docs/index.md has as
well, and how tight the bounds are, from tightness.json."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from sitegen.bounds import OURS, shown_ratio, tightness

from lipbound import bounds
from lipbound.formatting import directed
from lipbound.reporting.labels import TITLES

ROOT = Path(__file__).parents[1]

FIGURE, MODEL = "figures/minilm.png", "builtin:minilm"
CAPTION = "Exact local Lipschitz constants and bounds on all-MiniLM-L6-v2, layer by head"


def figure() -> str:
    """The first figure."""
    return f"![{CAPTION}]({FIGURE})"


def caption() -> str:
    """What the first figure shows, with the numbers of the table."""
    row = tightness()["checkpoints"][MODEL]
    norm = row["norms"]["frobenius"]
    exact = [directed(end, 2, up) for up, end in enumerate(norm["exact"])]
    known = {name: one["geomean"] for name, one in norm["bounds"].items() if one["geomean"]}
    published = [known[name] for name in known if bounds.get(name).citation != OURS]
    least, most = (f"{float(f'{end:.3g}'):,.16g}" for end in (min(published), max(published)))
    ours = shown_ratio(norm["bounds"]["lipbound"]["geomean"])
    heads = row["heads"] // row["layers"]
    return (
        f"*{TITLES[MODEL]} ({row['layers']} layers x {heads} heads), {row['samples']} samples of "
        f"{row['tokens']} tokens, log10, mean over samples. The exact constants lie\nbetween "
        f"{exact[0]} and {exact[1]}. Published bounds are {least} to {most} times larger "
        f"(geometric means); `lipbound`, our own, is {ours} times larger.*"
    )


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


PARTS = {"figure": figure, "caption": caption, "tightness": table}


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
    readme, page = ROOT / "README.md", ROOT / "docs" / "index.md"
    readme.write_text(written(readme.read_text()))
    first = f"{TITLES[MODEL]} (.|\n)*?times larger\\."
    page.write_text(re.sub(first, caption().strip("*"), page.read_text(), count=1))
