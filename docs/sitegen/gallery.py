"""The gallery: every notebook as a card, with a picture from its own outputs."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[2]
NOTEBOOKS = tuple(path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb")))
WIDTH = 640
"""Pixels of a thumbnail."""


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def title_and_claim(path: Path) -> tuple[str, str]:
    """The heading of a notebook, and the first sentence behind **Claim.**, which every notebook
    opens with.

    Raises:
        ValueError: a notebook that opens otherwise.
    """
    text = "".join(cells(path)[0]["source"])
    match = re.match(
        r"# (.+?)\n+\*\*Claims?\.?\*\*\.?\s*(?:\([^)]*\)\.?\s*)?(.+?)(?:\n\n|\Z)", text, re.DOTALL
    )
    if match is None:
        raise ValueError(f"{path.name} does not open with a title and a claim")
    claim = " ".join(match[2].split())
    return match[1].strip(), re.split(r"(?<=[a-z\d)$])[.:;] (?=[A-Z])|; ", claim)[0].rstrip(
        ".:;"
    ) + "."


def picture(path: Path) -> bytes:
    """The first picture among the outputs of a notebook, a PNG.

    Raises:
        ValueError: a notebook without one.
    """
    for cell in cells(path):
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                return base64.b64decode("".join(output["data"]["image/png"]))
    raise ValueError(f"{path.name} has no picture among its outputs; run `make notebooks`")


def thumbnail_place(number: int) -> str:
    """Where the picture of a notebook stands on the site."""
    return f"gallery/thumbnails/{Path(NOTEBOOKS[number]).stem}.png"


def thumbnail(path: Path, target: Path) -> None:
    """Write the picture of a notebook, made small: its top, three parts high for four wide."""
    image = Image.open(io.BytesIO(picture(path))).convert("RGB")
    image = image.crop((0, 0, image.width, min(image.height, image.width * 3 // 4)))
    image.thumbnail((WIDTH, WIDTH))
    image.save(target)


def card(number: int, name: str) -> str:
    """A notebook on the page of cards."""
    title, claim = title_and_claim(ROOT / "notebooks" / name)
    return f""":::{{grid-item-card}} {title}
:img-top: {Path(thumbnail_place(number)).relative_to("gallery").as_posix()}
:img-alt: A figure of the notebook: {title}
:link: {Path(name).stem}
:link-type: doc

{claim}
:::
"""


def pages() -> dict[str, str]:
    """The page of cards."""
    cards = "\n".join(card(number, name) for number, name in enumerate(NOTEBOOKS))
    listed = "\n".join(Path(name).stem for name in NOTEBOOKS)
    page = f"""# Gallery

Eight notebooks, executed: each states a claim and measures it. Each runs in about a minute on
two cores.

::::{{grid}} 1 2 2 3
:gutter: 3

{cards}
::::

```{{toctree}}
:hidden:

{listed}
```
"""
    return {"gallery/index.md": page}
