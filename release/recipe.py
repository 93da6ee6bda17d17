"""The recipe for conda-forge with the sha256 of a source distribution:
``python release/recipe.py dist/lipbound-0.1.0.tar.gz > recipe.yaml``."""

import hashlib
import re
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "conda" / "recipe.yaml"


def filled(source: Path) -> str:
    """conda/recipe.yaml for this source distribution; SystemExit where the recipe is for another
    version."""
    text = RECIPE.read_text()
    version = re.search(r'(?m)^  version: "(.+)"$', text)
    if version is None or source.name != f"lipbound-{version[1]}.tar.gz":
        raise SystemExit(f"{RECIPE.name} is not the recipe of {source.name}")
    return re.sub(
        r'(?m)^  sha256: ".+"$',
        f'  sha256: "{hashlib.sha256(source.read_bytes()).hexdigest()}"',
        text,
        count=1,
    )


if __name__ == "__main__":
    print(filled(Path(sys.argv[1])), end="")
