"""The reference of the command line, from the commands themselves."""

import inspect
import re
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

from lipbound.cli import app
from sitegen.measured import table

INTRODUCTION = """# Command line

`lipbound COMMAND --help` prints the same. Errors are one sentence and status 2; `lipbound verify` ends with status 1 where numbers differ.
What is done otherwise than asked (fewer samples than wanted, a copy in another precision) is told in a note, and kept in the run's attribute
`notes`.

`table`, `info`, `verify`, `bounds` and `models` print JSON with `--json`. `lipbound --install-completion` teaches your shell the commands.
"""  # noqa: E501


EVERYWHERE = (
    "`--quiet`, `--verbose` and `--debug` go with every command, before its name or behind it."
)


def program() -> Any:
    """The application with all its commands."""
    return typer.main.get_command(app)


def cell(text: str) -> str:
    """Text in a cell of a table of Markdown: nothing in it is markup but code between backticks."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"[*<\[$]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def usage(parameter: Any) -> str:
    """How a parameter is written: its names, the one that switches it off too."""
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def default(parameter: Any) -> str:
    """The value that holds where nothing is given."""
    if parameter.required:
        return "required"
    plain = parameter.default not in (None, False) and not callable(parameter.default)
    return f"`{parameter.default}`" if plain else ""


def type_in_words(annotation: Any) -> str:
    """The type of a parameter: "str" for ``str | None``, "list of path" for ``list[Path]``."""
    first, *_ = [one for one in get_args(annotation) if one is not NoneType] or [None]
    if first is None:
        return "path" if annotation is Path else str(annotation.__name__)
    several = getattr(annotation, "__origin__", None) is list
    return "list of " * several + type_in_words(first)


def parameters(command: Any) -> list[str]:
    """A table of arguments and options; types are those of the function, which every version of
    typer keeps."""
    types = get_type_hints(inspect.unwrap(command.callback))
    shown = [one for one in command.params if not one.hidden]
    rows = (
        (usage(one), type_in_words(types.get(one.name, bool)), default(one), cell(one.help or ""))
        for one in shown
    )
    return [*table("argument or option | type | default | ", rows), ""]


def section(name: str, command: Any) -> list[str]:
    """Everything about one command."""
    arguments = [one.name.upper() for one in command.params if one.param_type_name == "argument"]
    usage_line = " ".join(["$ lipbound", name, *arguments, "[OPTIONS]"])
    lines = [f"## {name}", "", "```console", usage_line, "```", ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [cell(paragraph).replace("\\|", "|"), ""]
    lines += parameters(command)
    first = (command.epilog or "").split("\n\n")[0]
    examples = first.removeprefix("Examples: ").removeprefix("Example: ")
    if examples.startswith("lipbound"):
        shown = (f"$ {one.strip()}" for one in examples.split("; "))
        lines += ["Example:", "", "```console", *shown, "```", ""]
    return lines


def pages() -> dict[str, str]:
    """One page, a section a command."""
    commands = program().commands
    rows = (
        (f"[`lipbound {name}`](#{name})", cell((one.help or "").split(".")[0]))
        for name, one in commands.items()
    )
    lines = [INTRODUCTION, *table("command | ", rows), "", "## Options of the program", ""]
    lines += parameters(program())
    lines += [EVERYWHERE, ""]
    for name, one in commands.items():
        lines += section(name, one)
    return {"reference/cli.md": "\n".join(lines)}
