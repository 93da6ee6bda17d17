"""The floors of the package: arrows one way only, one name for one thing, and files that can be
read in one sitting."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lipbound"
FLOORS = [
    {"schema", "errors", "devices", "formatting", "signs"},
    {"attention"},
    {"linalg", "models"},
    {"jacobians"},
    {"bounds"},
    {"runs", "regularizers"},
    {"reporting"},
    {"analysis"},
    {"cli"},
]
"""From the ground up. Whoever stands on one floor imports from its own folder and from the floors
below."""
OUTSIDE = {"", "__main__"}
"""The package itself and its entry point: they lead to every floor, and no floor imports them."""
SIDEWAYS = {("errors", "devices", "formatting")}
"""Folders of one floor that may import one another."""
NEVER: dict[str, set[str]] = {
    folder: {"transformers", "xarray"} for folder in ("attention", "linalg", "jacobians", "bounds")
}

MODULE_LINES, FUNCTION_LINES = 600, 80
EXCEPTIONS: dict[str, str] = {
    "cli.application -> lipbound": "the number of the version stands in the package itself, and "
    "nowhere else",
    "attention.layer": "one class: a layer, the names of its parts, and its copies",
}
"""What may break a rule, as the tests name it, and why."""


def name_of(path: Path) -> str:
    """``runs/store.py`` -> ``runs.store``; the package itself is ''."""
    return (
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
    )


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node, without the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If) and ast.unparse(child.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            for other in child.orelse:
                yield other
                yield from at_run_time(other)
        else:
            yield from at_run_time(child)


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that ``from ... import`` names, dots resolved."""
    if not node.level:
        return node.module or ""
    parts = ["lipbound", *module.split(".")] if module else ["lipbound"]
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported(source: str, module: str = "", is_package: bool = False) -> set[str]:
    """Full names of everything imported, at the top or inside functions: ``a.b`` and, for
    ``from a import b``, ``a.b`` too."""
    names: set[str] = set()
    for node in at_run_time(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


@cache
def imports_of(module: str) -> frozenset[str]:
    path = MODULES[module]
    return frozenset(imported(path.read_text(), module, path.name == "__init__.py"))


def own(name: str) -> str | None:
    """The module of ours behind an imported name: ``lipbound.runs.store.load`` -> ``runs.store``;
    None for other packages."""
    if name.split(".")[0] != "lipbound":
        return None
    parts = name.split(".")[1:]
    while ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def own_imports(module: str) -> set[str]:
    return {
        other for name in imports_of(module) if (other := own(name)) is not None and other != module
    }


def folder(module: str) -> str:
    return module.split(".")[0]


def floor(module: str) -> int:
    return next(number for number, members in enumerate(FLOORS) if folder(module) in members)


INSIDE = [module for module in MODULES if folder(module) not in OUTSIDE]


def test_every_module_has_a_floor() -> None:
    known = set().union(*FLOORS)
    assert {folder(module) for module in INSIDE} <= known
    assert known <= {folder(module) for module in INSIDE}


@pytest.mark.parametrize("module", INSIDE)
def test_imports_go_down(module: str) -> None:
    wrong = []
    for other in own_imports(module):
        pair = f"{module} -> {other or 'lipbound'}"
        if other in OUTSIDE:
            wrong.append(pair)
            continue
        beside = floor(other) == floor(module) and folder(other) != folder(module)
        if floor(other) > floor(module) or (
            beside and not any({folder(module), folder(other)} <= set(group) for group in SIDEWAYS)
        ):
            wrong.append(pair)
    assert [pair for pair in sorted(wrong) if pair not in EXCEPTIONS] == []


@pytest.mark.parametrize("module", [module for module in INSIDE if folder(module) in NEVER])
def test_tensors_know_neither_models_nor_runs(module: str) -> None:
    wrong = {
        f"{module} -> {package}"
        for name in imports_of(module)
        if (package := name.split(".")[0]) in NEVER[folder(module)]
    }
    assert sorted(wrong - EXCEPTIONS.keys()) == []


def test_no_module_imports_itself_in_a_circle() -> None:
    """A package counts as its own ``__init__``; what leads to it from its parts is an import like
    any other."""
    graph = {
        module: {other for other in own_imports(module) if f"{module} -> {other}" not in EXCEPTIONS}
        for module in INSIDE
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("circle: " + " <- ".join(error.args[1]))


def test_a_class_name_means_one_thing() -> None:
    classes = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(module)
    assert {name: where for name, where in classes.items() if len(where) > 1} == {}


def test_a_subpackage_has_no_two_files_of_one_name() -> None:
    names = Counter(
        (folder(module), path.name)
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    )
    assert [name for name, count in names.items() if count > 1] == []


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has from its first statement to its last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_are_short(module: str) -> None:
    text = MODULES[module].read_text()
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {f"{module}.{node.name}": code_lines(node) for node in functions}
    long = {
        name: count
        for name, count in lengths.items()
        if count > FUNCTION_LINES and name not in EXCEPTIONS
    }
    if (count := len(text.splitlines())) > MODULE_LINES and module not in EXCEPTIONS:
        long[module] = count
    assert long == {}


def test_exceptions_are_of_this_package() -> None:
    """An exception that is no longer needed would hide the next mistake."""
    for key, reason in EXCEPTIONS.items():
        assert reason
        module = key.split(" -> ")[0]
        assert module in MODULES or module.rpartition(".")[0] in MODULES, key


def test_imports_are_read_wherever_they_stand() -> None:
    source = """
import typing
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import transformers
else:
    import numpy
def f():
    from lipbound.runs import store
    import xarray as xr
class C:
    def m(self):
        from .. import errors
        from ..linalg.operators import Gram
"""
    found = imported(source, "attention.layer")
    assert found == {
        "typing",
        "typing.TYPE_CHECKING",
        "numpy",
        "lipbound.runs.store",
        "xarray",
        "lipbound.errors",
        "lipbound.linalg.operators.Gram",
    }
    assert own("lipbound.linalg.operators.Gram") == "linalg.operators"
    assert own("numpy") is None
    assert floor("linalg.operators") < floor("jacobians.head") < floor("cli")
