"""The reference of the command line, from the commands themselves."""

import inspect
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

from lipbound.cli import app

INTRODUCTION = """# Command line

`lipbound COMMAND --help` prints the same. Errors are one sentence and status 2; `lipbound verify` ends with status 1 where numbers differ.
What is done otherwise than asked (fewer samples than wanted, a copy in another precision) is told in a note, and kept in the run's attribute
`notes`.

`table`, `info`, `verify`, `bounds` and `models` print JSON with `--json`. `lipbound --install-completion` teaches your shell the commands.
"""  # noqa: E501


def program() -> Any:
    """The application with all its commands."""
    return typer.main.get_command(app)


def cell(text: str) -> str:
    """Text in a cell of a table of Markdown: nothing in it is markup but code between backticks."""
    parts = " ".join(text.split()).split("`")
    plain = [
        part
        if i % 2
        else part.replace("*", "\\*").replace("<", "\\<").replace("[", "\\[").replace("$", "\\$")
        for i, part in enumerate(parts)
    ]
    return "`".join(plain).replace("|", "\\|")


def usage(parameter: Any) -> str:
    """How a parameter is written: its names, the one that switches it off too."""
    names = [f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)]
    return ", ".join(names)


def default(parameter: Any) -> str:
    """The value that holds where nothing is given."""
    if parameter.required:
        return "required"
    return (
        ""
        if parameter.default in (None, False) or callable(parameter.default)
        else f"`{parameter.default}`"
    )


def type_in_words(annotation: Any) -> str:
    """The type of a parameter: "str" for ``str | None``, "list of path" for ``list[Path]``."""
    first, *_ = [one for one in get_args(annotation) if one is not NoneType] or [None]
    if first is None:
        return "path" if annotation is Path else str(annotation.__name__)
    return (
        f"list of {type_in_words(first)}"
        if getattr(annotation, "__origin__", None) is list
        else type_in_words(first)
    )


def parameters(command: Any) -> list[str]:
    """A table of arguments and options; types are those of the function, which every version of
    typer keeps."""
    lines = ["| argument or option | type | default | |", "|---|---|---|---|"]
    types = get_type_hints(inspect.unwrap(command.callback))
    shown = [one for one in command.params if not one.hidden]
    lines += [
        f"| {usage(one)} | {type_in_words(types.get(one.name, bool))} | {default(one)} | "
        f"{cell(one.help or '')} |"
        for one in shown
    ]
    return [*lines, ""]


def section(name: str, command: Any) -> list[str]:
    """Everything about one command."""
    arguments = " ".join(
        one.name.upper() for one in command.params if one.param_type_name == "argument"
    )
    lines = [
        f"## {name}",
        "",
        "```console",
        f"$ lipbound {name} {arguments} [OPTIONS]".replace("  ", " "),
        "```",
        "",
    ]
    lines += [
        part
        for paragraph in (command.help or "").split("\n\n")
        for part in (cell(paragraph).replace("\\|", "|"), "")
    ]
    examples = (
        (command.epilog or "").split("\n\n")[0].removeprefix("Examples: ").removeprefix("Example: ")
    )
    lines += parameters(command)
    if examples.startswith("lipbound"):
        lines += [
            "Example:",
            "",
            "```console",
            *(f"$ {one.strip()}" for one in examples.split("; ")),
            "```",
            "",
        ]
    return lines


def pages() -> dict[str, str]:
    """One page, a section a command."""
    commands = program().commands
    lines = [INTRODUCTION, "| command | |", "|---|---|"]
    lines += [
        f"| [`lipbound {name}`](#{name}) | {cell((one.help or '').split('.')[0])} |"
        for name, one in commands.items()
    ]
    lines += ["", "## Options of the program", ""]
    lines += parameters(program())
    lines += [
        "Every command takes `--quiet`, `--verbose` and `--debug` as well, before its name or "
        "behind it.",
        "",
    ]
    for name, one in commands.items():
        lines += section(name, one)
    return {"reference/cli.md": "\n".join(lines)}
