"""A run's summary on the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import xarray as xr


def columns() -> int:
    """Characters in a line of the terminal; 80 in a pipe or a file, unless COLUMNS says
    otherwise."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def coloured() -> bool:
    """Whether standard output is a terminal with colours that nobody has switched off
    (NO_COLOR)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def emphasised(text: str) -> str:
    """Lines about bounds below the exact norm in red, where there are colours."""
    if not coloured():
        return text
    return "\n".join(
        typer.style(line, fg="red") if "\u2021" in line else line for line in text.split("\n")
    )


def echo_folded(text: str) -> None:
    """Print a line, folded between words to the width of the terminal; what goes on is indented
    further."""
    from lipbound.reporting.layout import hanging

    indent = " " * (len(text) - len(text.lstrip()))
    for line in hanging(text.lstrip(), columns() - len(indent)):
        typer.echo(indent + emphasised(line))


def show(ds: xr.Dataset) -> None:
    """The summary as a table on standard output, what the exact norms are, and what the
    audit says."""
    from lipbound.bounds.audit import audit
    from lipbound.formatting import number, small
    from lipbound.reporting import tables
    from lipbound.reporting.labels import counted, places, reached
    from lipbound.schema import Contents

    typer.echo(emphasised(tables.render(ds, width=columns())))
    exact = ds["exact"].values[ds["exact"].notnull().values]
    ends = (
        list(dict.fromkeys(number(float(end)) for end in (exact.min(), exact.max())))
        if exact.size
        else []
    )
    extent = (
        f", from {ends[0]} to {ends[1]}" if len(ends) > 1 else "".join(f", {end}" for end in ends)
    )
    error = small(float(f"{ds.attrs['capture_error']:.1e}"))
    off = f"capture reproduces the model to {error} relative"
    lines = [
        f"exact norms: {len(exact)} ({places(ds)}, "
        f"{counted(Contents.of(ds).exact_samples, 'sample')}){extent}; {off}"
    ]
    if open_ := reached(ds):
        lines.append(
            f"the tolerance asked for, {small(float(ds.attrs['tol']))}, was not reached by {open_}"
        )
    if broken := {name: entry["broken"] for name, entry in audit(ds).items() if entry["broken"]}:
        lines.append(
            f"\u2021 A bound fell below the exact norm although its assumptions hold: {broken}. "
            "Please report this run."
        )
    for line in lines:
        echo_folded(line)
