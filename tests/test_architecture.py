"""What import-linter and ruff cannot say of the package (pyproject.toml has what they can): one
name for one thing, and files that can be read in one sitting."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lipbound"
MODULES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
MODULE_LINES, FUNCTION_LINES = 600, 80


def docstrings(tree: ast.Module) -> set[int]:
    """Lines of texts that are statements of their own."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def code_lines(path: Path, tree: ast.Module) -> list[int]:
    """Which lines are neither blank nor comment nor docstring."""
    texts = enumerate(path.read_text().splitlines(), 1)
    lines = [i for i, text in texts if text.strip() and not text.strip().startswith("#")]
    return sorted(set(lines) - docstrings(tree))


def test_modules_and_functions_are_short() -> None:
    long = {}
    for path, tree in MODULES.items():
        lines, place = code_lines(path, tree), str(path.relative_to(PACKAGE))
        spans = {place: (1, lines[-1] if lines else 0, MODULE_LINES)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                spans[f"{place}:{node.name}"] = node.lineno, node.end_lineno or 0, FUNCTION_LINES
        counts = {
            name: (sum(first <= line <= last for line in lines), most)
            for name, (first, last, most) in spans.items()
        }
        long |= {name: count for name, (count, most) in counts.items() if count > most}
    assert long == {}


def test_a_name_means_one_thing() -> None:
    """Of classes in the package, of files in a folder of it."""
    places = defaultdict(list)
    for path, tree in MODULES.items():
        where = path.relative_to(PACKAGE)
        if path.name != "__init__.py":
            places[f"{where.parts[0]}/{path.name}"].append(where)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(where)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
