"""The reference of the package: a page for each public name, and one for each folder with all its
modules."""

import ast
import itertools
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lipbound"
GROUPS = {
    "Measure": (
        "compare",
        "spectral_norm",
        "token_norm",
        "token_profile",
        "frobenius_norm",
        "condition_number",
        "singular_values",
        "weight_norms",
        "network_norm",
        "cache_bits",
        "Norm",
        "SingularValues",
        "TokenProfile",
        "HeadJacobian",
    ),
    "Models, inputs, layers": (
        "load_checkpoint",
        "prepare",
        "capture",
        "attention_layers",
        "attention_probabilities",
        "Attention",
        "cross_attention",
        "ModuleAttention",
    ),
    "Training": ("Monitor",),
    "Runs": ("load", "save", "concat", "diff", "sweep", "verify", "report", "cite"),
    "Balls of inputs": ("attack", "radius_curve"),
    "Errors": ("LipboundError", "Notice"),
}
"""Public names of the package, by what they are for."""
MODULES = {
    "bounds": (
        "lipbound.bounds",
        "the registry of bounds: `names`, `get`, `evaluate`, `over_ball`",
    ),
    "plots": ("lipbound.reporting.plots", "heatmaps and curves of runs"),
    "tables": (
        "lipbound.reporting.tables",
        "tables of runs, as text, Markdown, LaTeX, CSV and DataFrames",
    ),
    "regularizers": ("lipbound.regularizers", "penalties for training"),
}
"""Public modules: the name that ``lipbound`` gives them, their home, what they hold."""
MEMBERS = (":members:", ":member-order: bysource")
"""Options that list what an object has."""
LEFT_OUT = ("lipbound.__main__", "lipbound.cli")
"""Modules that nobody calls: paths of the last release, the entry point, the command line (which
has a page of its own)."""
INDEX = """API
===

Public names are attributes of ``lipbound``: ``import lipbound as lb``, then ``lb.compare``. What is listed here keeps its name and its meaning
between releases. Every module is documented below as well, for those who build on the parts.

"""  # noqa: E501


def home(name: str) -> str:
    """The module in which a public name is defined.

    Raises:
        KeyError: no public name.
    """
    import lipbound

    return str(lipbound._HOME[name])


def public() -> dict[str, str]:
    """Public functions and classes: the module and name where they are defined -> the
    public name."""
    return {f"{home(name)}.{name}": name for names in GROUPS.values() for name in names}


def modules() -> dict[str, list[str]]:
    """Folders of the package, dotted, and the modules in each, the folder itself first."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        folder = ".".join(path.parent.relative_to(ROOT).parts)
        if not name.startswith(LEFT_OUT):
            found.setdefault(folder, []).append(name)
    return {
        folder: [folder, *sorted(set(names) - {folder})] for folder, names in sorted(found.items())
    }


def source_of(module: str) -> Path:
    """The file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definitions(module: str) -> list[str]:
    """Functions and classes that a module defines, in order, without those whose names begin with
    an underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(source_of(module).read_text(encoding="utf-8")).body
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def first_sentence(module: str) -> str:
    """What the docstring of a module says first."""
    docstring = ast.get_docstring(ast.parse(source_of(module).read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def title(text: str, line: str = "=") -> list[str]:
    """A heading of reStructuredText."""
    return [text, line * len(text), ""]


def page_of(name: str) -> str:
    """The page of one public name."""
    kind = "autoclass" if name[0].isupper() else "autofunction"
    members = [*MEMBERS, ":show-inheritance:"] if kind == "autoclass" else []
    lines = [*title(name), *directive(f"{kind}:: lipbound.{name}", members)]
    return "\n".join([*lines, f"Defined in :py:mod:`{home(name)}`.", ""])


def directive(name: str, options: Iterable[str], content: Iterable[str] = ()) -> list[str]:
    """A directive of reStructuredText with its options and lines of content."""
    lines = [f".. {name}", *(f"   {option}" for option in options), ""]
    return [*lines, *(f"   {line}" for line in content), *([""] if content else [])]


def section(module: str, line: str) -> list[str]:
    """One module on the page of its folder."""
    here = [name for name in definitions(module) if f"{module}.{name}" in public()]
    options = [*MEMBERS, ":ignore-module-all:", ":show-inheritance:"]
    options += [f":exclude-members: {', '.join(here)}"] if here else []
    lines = title(module.removeprefix("lipbound."), line)
    lines += directive(f"automodule:: {module}", options)
    links = ", ".join(f":py:obj:`lipbound.{name}`" for name in here)
    return [*lines, f"Public: {links}.", ""] if here else lines


def folder_page(folder: str, names: list[str]) -> str:
    """The page of one folder."""
    lines = title(folder)
    for name in names:
        lines += section(name, "-")
    return "\n".join(lines)


def index(folders: list[str]) -> str:
    """The page that leads to all others."""
    lines = [INDEX]
    for group, names in GROUPS.items():
        full = [f"lipbound.{name}" for name in names]
        lines += [*title(group, "-"), *directive("autosummary::", [":nosignatures:"], full)]
    lines += [*title("Public modules", "-")]
    for name, (where, what) in MODULES.items():
        lines += [f"``lb.{name}``", f"   :py:mod:`{where}`: {what}.", ""]
    lines += [*title("Folders", "-"), "Data flows one way; each folder does one thing.", ""]
    rows = [(f"* - :doc:`{folder}`", f"  - {first_sentence(folder)}") for folder in folders]
    lines += directive("list-table::", [":widths: 30 70"], itertools.chain(*rows))
    public_names = [f"{name} <lipbound.{name}>" for names in GROUPS.values() for name in names]
    for caption, listed in (("Public names", public_names), ("Folders", folders)):
        lines += directive("toctree::", [":hidden:", f":caption: {caption}"], listed)
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """All pages of the reference of the package."""
    folders = modules()
    found = {"reference/api/index.rst": index(list(folders))}
    found |= {
        f"reference/api/lipbound.{name}.rst": page_of(name)
        for names in GROUPS.values()
        for name in names
    }
    return found | {
        f"reference/api/{folder}.rst": folder_page(folder, names)
        for folder, names in folders.items()
    }
