"""The application that commands are registered with, and what all of them share.

Commands import what they need when they run: ``lipbound --help`` loads neither torch nor anything
else of size.
"""

import contextlib
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from lipbound import __version__, _importing
from lipbound.errors import LipboundError, Notice
from lipbound.formatting import plain
from lipbound.runs.config import IN_PYTHON, RunConfig

Callback = TypeVar("Callback", bound=Callable[..., Any])
_VERBOSE = "LIPBOUND_VERBOSE"
"""Environment variable that lets other libraries speak, here and in processes started here."""
SWITCHES = {
    "quiet": "Neither signs of progress nor notes.",
    "verbose": "What other libraries say, too: their progress bars, warnings and retries.",
    "debug": "Show tracebacks.",
}
"""Options that every command takes, behind its name or before it."""
FRESH = dict.fromkeys(SWITCHES, False) | {"kept": lambda: "nothing was written"}
"""Initial state of every command: each of `SWITCHES`, off, and ``kept``, a function that says what
an interruption leaves."""
state: dict[str, Any] = dict(FRESH)
"""State of the running command, which begins as `FRESH`."""


class Command(TyperCommand):
    """Command that also takes `SWITCHES`, and each option once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        main_options(**{name: state[name] or f"--{name}" in args for name in SWITCHES})
        words = [word for word in args if word not in {f"--{name}" for name in SWITCHES}]
        for param in self.params:
            times = sum(word.partition("=")[0] in param.opts for word in words)
            repeatable = getattr(param, "multiple", False) or getattr(param, "is_flag", False)
            if times > 1 and not repeatable and not ctx.resilient_parsing:
                what = f"{param.opts[-1]} is given {times} times, and one would be ignored"
                raise LipboundError(f"{what}; give it once, several values separated by commas")
        return super().parse_args(ctx, words)

    def invoke(self, ctx: Any) -> Any:
        from lipbound.signs import Signs

        with Signs(f"{ctx.command_path}: at work", show=not state["quiet"]):
            return super().invoke(ctx)


class Application(typer.Typer):
    """Application whose commands are made from functions and what their docstrings say."""

    def used_as(self, *examples: str) -> Callable[[Callback], Callback]:
        """Register a `Command` called as a function is, less ``_command``, with examples of use."""
        also = "Every command also takes --quiet, --verbose and --debug."
        epilog = f"Example: lipbound {'; lipbound '.join(examples)}\n\n{also}"

        def register(command: Callback) -> Callback:
            how: Any = {"cls": Command, "epilog": epilog, "help": with_options(command)}
            return self.command(command.__name__.removesuffix("_command"), **how)(command)

        return register


app = Application(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lipbound {__version__}")
        raise typer.Exit


@app.callback(epilog="Errors end with status 2 and one sentence.")
def main_options(
    quiet: Annotated[bool, typer.Option("--quiet", help=SWITCHES["quiet"])] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help=SWITCHES["verbose"])] = False,
    debug: Annotated[bool, typer.Option("--debug", help=SWITCHES["debug"])] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact local Lipschitz constants of attention heads, beside published bounds.

    The bounds are every published l2 bound on softmax heads that we know of, and our own.
    """
    state.update(quiet=quiet, verbose=verbose, debug=debug)
    if verbose:
        os.environ[_VERBOSE] = "1"


def main(received: Sequence[int] = ()) -> None:
    """Run the command line: errors of input end with a sentence and status 2.

    An interruption ends with a sentence and status 130, also where a package took it for a failure
    of its own and raised something else.

    Args:
        received: Signals received so far, which grows where one comes.
    """
    state.update(FRESH)
    status = 0
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        try:
            program: Any = typer.main.get_command(app)
            status = program(prog_name="lipbound", standalone_mode=False)
            # what a full disk does not take is told here rather than by Python when it ends
            sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            status = 130
        except LipboundError as error:
            unsaved = getattr(error, "dataset", None) is not None  # what was measured is kept
            status = _failed(f"{error}; {state['kept']()}" if unsaved else str(error), error)
        except OSError as error:
            if not error.strerror:  # an error of a network library
                raise
            # Python would try at its end to write what is held back, and complain
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            where = f"{error.filename} cannot be read or" * bool(error.filename)
            status = _failed(f"{where or 'the output cannot be'} written: {error.strerror}", error)
        except Exception as error:
            if received:
                status = 130
            elif not hasattr(error, "format_message"):
                raise
            else:  # of typer; no message where the help was shown for want of a command
                said, within = error.format_message(), getattr(error, "ctx", None)
                command = within.command_path if within else "lipbound"
                status = _failed(f"{said.rstrip('.')}; see {command} --help", error) if said else 2
        finally:
            if state["verbose"]:
                os.environ.pop(_VERBOSE, None)
    status = status or 2 * (len(sys.argv) == 1)  # the help was shown for want of a command
    if status == 130:  # typer may have ended the command itself
        typer.echo(f"interrupted: {state['kept']()}", err=True)
    if status:
        sys.exit(status)


def _failed(message: str, error: Exception) -> int:
    """Print an error, with its traceback where that is wanted; return the status."""
    if state["debug"]:
        traceback.print_exception(error)
    else:
        typer.echo(f"error: {plain(message)}", err=True)
    return 2


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
) -> None:
    """Print notices as notes, and warnings of other libraries where they are wanted."""
    if issubclass(category, Notice) or category.__module__.split(".")[0] == "lipbound":
        kind = "note" if issubclass(category, Notice) else "warning"
        if kind == "warning" or not state["quiet"]:
            typer.echo(f"{kind}: {plain(str(message))}", err=True)
    elif state["verbose"]:
        typer.echo(f"{filename}:{lineno}: {category.__name__}: {message}", err=True)


# -- arguments and options, with their help --------------------------------------------------------


TYPES: dict[str, Any] = {"out": Path, "samples": str, "int": int, "float": float, "bool": bool}
"""Types on the command line, by an option's name or its type in Python; all others are text."""


def with_options(command: Callable[..., Any]) -> str:
    """Turn a command's parameters into arguments and options; return its docstring up to ``Args:``.

    Parameters by position are arguments, those by keyword options. Their help is what the docstring
    says of them. ``**options`` stands for the fields of `RunConfig`, with their names, types,
    defaults and help, before a command's own options. A command with arguments of its own takes
    them in place of the fields of `RunConfig` that have no default.
    """
    made, text = inspect.Parameter, inspect.cleandoc(command.__doc__ or "")
    own = [*inspect.signature(command, eval_str=True).parameters.values()]
    if own[-1].kind is made.VAR_KEYWORD:
        text += f"\n\n{inspect.cleandoc(RunConfig.__doc__ or '')}"
        first = [one for one in own if one.kind is made.POSITIONAL_OR_KEYWORD]
        of_run = []
        every = inspect.signature(RunConfig).parameters
        for one in [every[name] for name in every if name not in IN_PYTHON]:
            type_of = TYPES.get(one.name) or TYPES.get(str(one.annotation).split(" | ")[0], str)
            if one.default is not made.empty:
                type_of = type_of | None if one.default is None else type_of
                of_run.append(one.replace(annotation=type_of, kind=made.KEYWORD_ONLY))
            elif not first:
                of_run.append(one.replace(annotation=type_of))
        own = [*first, *of_run, *own[len(first) : -1]]
    help = dict(re.findall(r"^    (\w+): (.+(?:\n        .+)*)", text, re.M))
    found = []
    for one in own:
        names = ["-o", "--output"] if one.name == "output" else []
        if isinstance(one.default, bool):
            names = [f"--{one.name}/--no-{one.name}" if one.default else f"--{one.name}"]
        info: Any = typer.Option if one.kind is made.KEYWORD_ONLY else typer.Argument
        info = info(*names, help=" ".join(help.get(one.name, "").split()))
        found.append(one.replace(annotation=Annotated[one.annotation, info]))
    command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in found}
    text = re.split(r"\n\n(?:Args|Attributes):\n", text)[0]
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # paragraphs fold at the terminal's width


# -- modules that take long to import --------------------------------------------------------------


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Load modules for measuring, and say so."""
    from lipbound.signs import Signs

    with Signs("loading", show=not state["quiet"]) as signs, _importing():
        signs.say("loading PyTorch and transformers")
        yield
