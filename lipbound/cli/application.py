"""The application that commands are registered with, and what all of them share.

Commands import what they need when they run: ``lipbound --help`` loads neither torch nor anything
else of size.
"""

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, _typer_param_setup_autocompletion_compat

from lipbound import __version__
from lipbound.cli import interruption
from lipbound.cli.completion import COMPLETERS
from lipbound.errors import LipboundError, Notice, nearest, neighbours
from lipbound.formatting import plain

Callback = TypeVar("Callback", bound=Callable[..., Any])
VERBOSE = "LIPBOUND_VERBOSE"
"""Environment variable that lets other libraries speak, here and in processes started here."""
LISTS = {"bounds": "names", "layers": "numbers"}
"""Options that take several values in one text."""
SWITCHES = {
    "quiet": "Neither progress bar nor notes.",
    "verbose": "What other libraries say, too: their progress bars, warnings and retries.",
    "debug": "Show tracebacks.",
}
"""Options that every command takes, behind its name or before it."""

state: dict[str, Any] = {
    "debug": False,
    "quiet": False,
    "verbose": False,
    "options": {},
    "given": frozenset(),
}
"""Switches that are on; of the running command the options by argument, and the arguments given."""


def switch(name: str, wanted: bool) -> None:
    """Turn one of `SWITCHES` on, where it is wanted."""
    if wanted:
        state[name] = True
        if name == "verbose":
            os.environ[VERBOSE] = "1"


def _completing(complete: Callable[[str], list[str]]) -> Callable[[Any, list[str], str], list[Any]]:
    """Wrap a completer as typer calls it."""
    return lambda ctx, words, start: [*complete(start)]


class Command(TyperCommand):
    """Command that also takes `SWITCHES`, completes its options, and names them in its errors."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for param in self.params:
            if param.name in COMPLETERS and param._custom_shell_complete is None:
                _typer_param_setup_autocompletion_compat(
                    param, autocompletion=_completing(COMPLETERS[param.name])
                )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in SWITCHES:
            switch(name, f"--{name}" in args)
        words = [word for word in args if word not in {f"--{name}" for name in SWITCHES}]
        if not ctx.resilient_parsing:
            self._once(ctx, words)
        return super().parse_args(ctx, words)

    def _once(self, ctx: Any, words: list[str]) -> None:
        """Refuse an option that is given twice, of which the parser would take the last."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(words))
        for param, times in Counter(id(param) for param in order).items():
            option = next(one for one in order if id(one) == param)
            repeatable = option.multiple or getattr(option, "is_flag", False)
            if times > 1 and option.opts[-1].startswith("-") and not repeatable:
                kind = LISTS.get(option.name)
                more = f", with its {kind} separated by commas" if kind else ""
                raise LipboundError(
                    f"{option.opts[-1]} is given {times} times, and one of them would be "
                    f"ignored; give it once{more}"
                )

    def invoke(self, ctx: Any) -> Any:
        options = {param.name: param.opts[-1] for param in self.params if param.name and param.opts}
        state["options"] = {name: opt for name, opt in options.items() if opt.startswith("-")}
        sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
        state["given"] = frozenset(
            name for name in sources if getattr(sources[name], "name", "DEFAULT") != "DEFAULT"
        )
        try:
            return super().invoke(ctx)
        except LipboundError as error:
            error.args = (in_options(str(error), state["options"]), *error.args[1:])
            raise


class Application(typer.Typer):
    """Application that registers every command as a `Command`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Callback], Callback]:
        settings["epilog"] = (
            f"{settings.get('epilog') or ''}\n\nEvery command also takes --quiet, --verbose and "
            "--debug."
        )
        return super().command(name, **({"cls": Command} | settings))


app = Application(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")

StoredRun = Annotated[Path, typer.Argument(help="A run saved by `lipbound compare --out`.")]


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
    # whatever an earlier call in this process wanted
    state.update(quiet=False, verbose=False, debug=False)
    for name, wanted in (("quiet", quiet), ("verbose", verbose), ("debug", debug)):
        switch(name, wanted)


@cache
def _program() -> Any:
    """Build the application with all its commands, once."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line: errors of input end with a sentence and status 2.

    An interruption ends with a sentence and status 130.
    """
    state.update(debug=False, quiet=False, verbose=False, options={})
    interruption.forget()
    before = os.environ.get(VERBOSE)
    status = 0
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        try:
            status = _program()(prog_name="lipbound", standalone_mode=False)
            # what a full disk does not take is told here rather than by Python when it ends
            sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            status = 130
        except LipboundError as error:
            _say(str(error), error)
            status = 2
        except typer.Exit as end:
            status = end.exit_code
        except OSError as error:
            if not error.strerror:  # an error of a network library
                raise
            _abandon_output()
            file = error.filename
            where = f"{file} cannot be read or" if file else "the output cannot be"
            _say(f"{where} written: {error.strerror}", error)
            status = 2
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            if error.format_message():  # none where the help was shown for want of a command
                _say(_of_usage(error), error)
            status = 2
        finally:
            os.environ.pop(VERBOSE, None)
            os.environ |= {} if before is None else {VERBOSE: before}
    if status == 130:
        typer.echo(interruption.sentence(), err=True)
    if status:
        sys.exit(status)


def _abandon_output() -> None:
    """Drop what standard output holds back: Python would try again at its end, and complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str, error: Exception) -> None:
    """Print an error, with its traceback where that is wanted."""
    if state["debug"]:
        traceback.print_exception(error)
    else:
        typer.echo(f"error: {plain(message)}", err=True)


def _of_usage(error: Any) -> str:
    """Write typer's complaint about a command line in one sentence that quotes what was given."""
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command_path", "lipbound")
    unknown = re.fullmatch(r"No such command '(.*?)'.*", message)
    if unknown:
        names = [
            c.name or c.callback.__name__.replace("_", "-")
            for c in app.registered_commands
            if c.callback is not None
        ]
        return f"there is no command {unknown[1]!r}; {nearest(unknown[1], names)}"
    if wrong := re.fullmatch(r"No such option: (\S+).*", message):
        params = error.ctx.command.params
        names = [name for param in params for name in (*param.opts, *param.secondary_opts)]
        known = [name for name in names if name.startswith("--")]
        return f"no such option: {wrong[1]}; {_meant(wrong[1], known) or f'see {command} --help'}"
    if "Value error, " in message:  # a sentence of ours
        return message.partition("Value error, ")[2]
    expected = re.fullmatch(r"Invalid value for '(.*?)': Input should be a valid (\w+).*", message)
    if expected:
        known_kinds = {"integer": "a whole number", "number": "a number"}
        what = known_kinds.get(expected[2], f"a {expected[2]}")
        return f"{expected[1].split(' / ')[-1]} must be {what}{_given(expected[1])}"
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _meant(word: str, known: list[str]) -> str:
    """Guess the option that a mistyped one was meant to be; "" where unclear.

    The one that it begins, or that begins it, else the likest, of which a part is enough.
    """
    word = word.lstrip("-")
    names = [*dict.fromkeys([*(name.removeprefix("--") for name in known), *SWITCHES])]
    near = [name for name in names if name.startswith(word) or word.startswith(name)]
    if len(near) != 1:
        parts = {name: name for name in names}
        for name in names:
            for part in name.split("-"):
                parts.setdefault(part, name)
        near = [parts[part] for part in neighbours(word, parts, cutoff=0.75)]
    return f"did you mean --{near[0]}?" if near else ""


def _given(option: str) -> str:
    """Quote the value behind an option on the command line, ", not ...", where it stands there."""
    names = [name.strip("'") for name in option.split(" / ")]
    for i, word in enumerate(sys.argv):
        if word in names and i + 1 < len(sys.argv):
            return f", not {sys.argv[i + 1]!r}"
        if any(word.startswith(f"{name}=") for name in names):
            return f", not {word.partition('=')[2]!r}"
    return ""


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
) -> None:
    """Print notices as notes, and warnings of other libraries where they are wanted."""
    if issubclass(category, Notice) or category.__module__.split(".")[0] == "lipbound":
        kind = "note" if issubclass(category, Notice) else "warning"
        if kind == "warning" or not state["quiet"]:
            typer.echo(f"{kind}: {plain(in_options(str(message), state['options']))}", err=True)
    elif state["verbose"]:
        typer.echo(f"{filename}:{lineno}: {category.__name__}: {message}", err=True)


def in_options(message: str, options: dict[str, str]) -> str:
    """Write the names of Python's arguments in a message as options of the command line.

    >>> options = {"exact_samples": "--exact-samples", "column": "--column"}
    >>> in_options("exact_samples is 0; name another with column=", options)
    '--exact-samples is 0; name another with --column'
    >>> in_options("leave it out, or take bounds='default'", {"bounds": "--bounds"})
    'leave it out, or take --bounds default'
    """
    for name, option in options.items():
        message = re.sub(rf"(?<![\w/.'\"-]){name}=True\b", option, message)
        message = re.sub(rf"(?<![\w/.'\"-]){name}='([^']*)'", rf"{option} \1", message)
        message = re.sub(rf"(?<![\w/.'\"-]){name}=(?=[\s;,.)]|$)", option, message)
        message = re.sub(rf"(?<![\w/.'\"-]){name}=(?=\S)", f"{option} ", message)
        message = re.sub(rf"^{name} (?=is |has |exceeds |leaves |\d)", f"{option} ", message)
    return message


def number_or_name(text: str) -> str | float:
    """Read a number, or leave the text as it is."""
    try:
        return float(text)
    except ValueError:
        return text
