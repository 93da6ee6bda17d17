"""The application that commands are registered with, and what all of them share.

Commands import what they need when they run: ``lipbound --help`` loads neither torch nor anything else of size.
"""

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from lipbound import __version__
from lipbound.errors import LipboundError
from lipbound.formatting import plain

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")

state = {"debug": False}

StoredRun = Annotated[Path, typer.Argument(help="A run saved by `lipbound compare --out`.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lipbound {__version__}")
        raise typer.Exit


@app.callback(epilog="Errors end with status 2 and one sentence.")
def main_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Exact local Lipschitz constants of attention heads, beside every published upper bound."""
    state["debug"] = debug


def main() -> None:
    """Entry point: errors of input become one sentence and status 2."""
    try:
        app(prog_name="lipbound")
    except LipboundError as error:
        if state["debug"]:
            traceback.print_exc()
        else:
            typer.echo(f"error: {plain(str(error))}", err=True)
        sys.exit(2)


def numbers(text: str | None) -> list[int] | None:
    """Layer numbers separated by commas."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise LipboundError(f"--layers is {text!r}; give numbers separated by commas, such as 0,3,5") from error


def number_or_name(text: str) -> str | float:
    """A number where the text is one, else the text."""
    try:
        return float(text)
    except ValueError:
        return text
