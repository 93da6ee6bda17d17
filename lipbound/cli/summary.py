"""A run's summary on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


def show(ds: xr.Dataset) -> None:
    """The summary as a table on standard output, then what the audit says."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lipbound.bounds.audit import audit
    from lipbound.formatting import number, plain
    from lipbound.reporting import labels, tables

    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False)
    table = Table(title=escape(labels.run_caption(ds)), title_justify="left", title_style="dim")
    table.add_column("bound / exact", no_wrap=True)
    columns = ("geom. mean", "over samples", "min", "max")
    for title in (*columns, "below exact"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("assumptions hold")
    for name, row in tables.readable(ds).iterrows():
        below = f"{row['below exact']} of {row['of']}"
        table.add_row(
            f"{escape(plain(row['bound']))} [dim]{name}[/dim]", *(row[c] for c in columns),
            below if row["below exact"] == "0" else f"[bold red]{below}[/bold red]", row["assumptions hold"],
        )  # fmt: skip
    console.print(table)
    unconverged = int(ds["exact"].notnull().sum() - ds["exact_converged"].sum())
    exact = ds["exact"].values[ds["exact"].notnull().values]
    console.print(
        f"exact norms: {len(exact)} heads, from {number(float(exact.min()))} to {number(float(exact.max()))}, "
        f"{unconverged} not converged; capture reproduces the model to {ds.attrs['capture_error']:.1e} relative"
    )
    for line in labels.left_out(ds):
        console.print(line, style="dim", soft_wrap=True)
    broken = {name: entry["broken"] for name, entry in audit(ds).items() if entry["broken"]}
    if broken:
        console.print(f"[bold red]A bound fell below the exact norm although its assumptions hold: {broken}. Please report this run.[/bold red]")
