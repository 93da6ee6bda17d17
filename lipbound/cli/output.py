"""Output on the terminal, and as JSON for programs."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import typer

from lipbound.schema import Contents

if TYPE_CHECKING:
    import xarray as xr


def columns() -> int:
    """Characters in a line of the terminal; 80 in a pipe, unless COLUMNS says otherwise."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def coloured() -> bool:
    """Tell whether standard output is a terminal with colours, which NO_COLOR switches off."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def emphasised(text: str) -> str:
    """Colour lines about bounds below the exact norm red, where there are colours."""
    if not coloured():
        return text
    lines = text.split("\n")
    return "\n".join(typer.style(line, fg="red") if "\u2021" in line else line for line in lines)


def echo_folded(text: str) -> None:
    """Print a line, folded between words to the width of the terminal, with a hanging indent."""
    from lipbound.reporting.layout import hanging

    indent = " " * (len(text) - len(text.lstrip()))
    for line in hanging(text.lstrip(), columns() - len(indent)):
        typer.echo(indent + emphasised(line))


def show(ds: xr.Dataset) -> None:
    """Print a run's summary as a table, the extent of its exact norms, and the audit's verdict."""
    from lipbound.bounds.audit import audit
    from lipbound.formatting import counted, number, small
    from lipbound.reporting import tables
    from lipbound.reporting.labels import places, reached

    typer.echo(emphasised(tables.render(ds, width=columns())))
    exact = ds["exact"].values[ds["exact"].notnull().values]
    extent = ""
    if exact.size:
        least, most = number(float(exact.min())), number(float(exact.max()))
        extent = f", {least}" if least == most else f", from {least} to {most}"
    error = small(float(f"{ds.attrs['capture_error']:.1e}"))
    samples = counted(Contents.of(ds).exact_samples, "sample")
    lines = [
        f"exact norms: {len(exact)} ({places(ds)}, {samples}){extent}; capture reproduces the "
        f"model to {error} relative"
    ]
    if open_ := reached(ds):
        tol = small(float(ds.attrs["tol"]))
        lines.append(f"the tolerance asked for, {tol}, was not reached by {open_}")
    if broken := {name: entry["broken"] for name, entry in audit(ds).items() if entry["broken"]}:
        lines.append(
            f"\u2021 A bound fell below the exact norm although its assumptions hold: {broken}. "
            "Please report this run."
        )
    for line in lines:
        echo_folded(line)


def echo_json(value: Any) -> None:
    """Print a value as JSON with full precision.

    ``"inf"`` and ``"-inf"`` stand for infinite numbers, null for missing ones.
    """
    typer.echo(json.dumps(plain_data(value), allow_nan=False, indent=2))


def plain_data(value: Any) -> Any:
    """Dictionaries, lists, text and numbers that JSON can hold; numpy's numbers as Python's own.

    >>> plain_data({"a": (1.5, float("nan"), float("inf"))})
    {'a': [1.5, None, 'inf']}
    """
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
