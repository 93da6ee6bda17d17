"""One name for one thing: what import-linter and ruff cannot say of the package."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lipbound"


def test_a_name_means_one_thing() -> None:
    """Of classes in the package, of files in a folder of it."""
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        if path.name != "__init__.py":
            places[f"{where.parts[0]}/{path.name}"].append(where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(where)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
