"""Commands that measure: compare and sweep."""

from __future__ import annotations

import inspect
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipbound.cli import interruption
from lipbound.cli.application import app, state
from lipbound.cli.completion import models
from lipbound.cli.output import show
from lipbound.errors import LipboundError, StoreError, choice, shown
from lipbound.formatting import plain
from lipbound.runs.config import RunConfig, refuse_drawn
from lipbound.schema import NORMS

if TYPE_CHECKING:
    import xarray as xr


def probability(text: str | float) -> float:
    """Read a probability, which is 0 only where it says so: one too small for float64 is none."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    vanished = value == 0 and isinstance(text, str) and re.search("[1-9]", text)
    if not 0 <= value < 1 or vanished:
        raise LipboundError(
            f"--delta is {shown(text)}; it must be a probability between 0 and 1, or 0 for plain "
            "estimates without upper ends"
        )
    return value


def count(text: str | int) -> int | str:
    """Read a number of samples, or "all"."""
    if str(text).strip().lower() == "all":
        return "all"
    try:
        return int(text)
    except ValueError:
        raise LipboundError(
            f"--samples must be a whole number or 'all', not {shown(text)}"
        ) from None


TYPES: dict[str, Any] = {"out": Path, "samples": int, "int": int, "float": float, "bool": bool}
"""Types on the command line, by the name of an option or its type in Python; text for others."""
PARSERS = {"samples": count, "delta": probability}


def from_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an argument or option for every field of `RunConfig`, before its own.

    Names, types, defaults and help are those of the fields; the command takes them by keyword.
    """
    described = inspect.cleandoc(RunConfig.__doc__ or "")
    help = dict(re.findall(r"^    (\w+): (.+(?:\n        .+)*)", described, re.M))
    added = []
    for one in fields(RunConfig):
        first = str(one.type).split(" | ")[0]
        kind = TYPES.get(one.name) or TYPES.get(first, str)
        said: dict[str, Any] = {"help": " ".join(help.get(one.name, "").split())}
        if one.default is MISSING:
            info, default = typer.Argument(autocompletion=models, **said), inspect.Parameter.empty
        else:
            names = [f"--{one.name}"] if kind is bool else []
            info = typer.Option(*names, parser=PARSERS.get(one.name), **said)
            default = one.default
        kind = kind | None if default is None else kind
        annotation: Any = Annotated[kind, info]
        added.append(
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    own = inspect.signature(command, eval_str=True).parameters.values()
    added += [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = inspect.Signature(added)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in added}
    return command


def blocks_in(out: Path) -> str:
    """Say what of an unfinished run is kept, and how to go on."""
    partial = out.with_name(out.name + ".partial")
    if out.exists():
        return f"{out} was there already, and nothing was written"
    if not partial.exists():
        return "nothing was measured yet"
    done = sum(1 for _ in partial.glob("[!.]*.npz"))
    blocks = f"{done} measured blocks of one layer each are"
    blocks = "1 measured block of one layer is" if done == 1 else blocks
    return f"{blocks} kept in {partial}; the same command with --resume goes on from there"


@app.command(
    epilog="Example: lipbound compare builtin:minilm --data alice.txt --samples 8 --max-length "
    "128 --out minilm.zarr"
)
@from_config
def compare(
    *,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Address of a dask scheduler whose workers share the run, or local:N for N "
            "processes here."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Measure every attention head of a checkpoint and set every bound beside it."""
    from lipbound.models.sources.catalogue import PREFIX, builtin

    model, out = options["model"], options["out"]
    if model.lower().startswith(PREFIX):
        builtin(model[len(PREFIX) :])  # a mistyped name is told before seconds of imports
    if choice("norm", options["norm"], NORMS) != "frobenius":
        for name in state["given"] & {"delta", "seed"}:  # be it with its default
            refuse_drawn(name, options[name], options["norm"])
    interruption.keeps(
        lambda: blocks_in(out) if out is not None else "nothing was kept, since there was no --out"
    )
    config = RunConfig(**options | {"delta": options["delta"] or None})
    with cluster(scheduler) as client:
        ds = measured(config, client=client, progress=not state["quiet"])
    show(ds)
    if out is not None:
        typer.echo(
            f"saved {out}; draw it with: lipbound heatmap {shlex.quote(str(out))} -o heatmap.pdf"
        )


@app.command(epilog="Example: lipbound sweep sweep.yaml --out runs")
def sweep(
    file: Annotated[
        Path,
        typer.Argument(
            help="YAML: model, data, max_length (values or lists), or pairs of them; and options "
            "for every run."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the runs and their index.csv; what it holds already is kept."
        ),
    ] = Path("runs"),
    scheduler: Annotated[str | None, typer.Option(help="As in `lipbound compare`.")] = None,
) -> None:
    """Do every combination of models, data and lengths; runs that fail do not stop the others."""
    from lipbound.runs.sweep import rows

    interruption.keeps(
        lambda: f"what was measured is kept in {out}; the same command goes on from there"
    )
    ended: Counter[str] = Counter()
    with cluster(scheduler) as client:
        for row in rows(file, out, client=client, progress=not state["quiet"]):
            ended[row["status"]] += 1
            why = f"  {plain(row['error'])}" if row["error"] else ""
            typer.echo(f"{row['status']}: {row['run']}{why}")
    if ended["kept"] and not state["quiet"]:
        typer.echo(
            f"note: {ended['kept']} of {ended.total()} runs were finished before and are kept as "
            f"they are, in {out}",
            err=True,
        )
    if failed := ended["failed"]:
        runs = "1 run" if failed == 1 else f"{failed} runs"
        raise LipboundError(
            f"{runs} of the sweep failed; {out / 'index.csv'} says why, and the same command "
            "tries again"
        )


@contextmanager
def cluster(scheduler: str | None) -> Iterator[Any]:
    """Open a dask.distributed client, or None for None.

    Args:
        scheduler: its address, or "local:N" for N processes of one thread here.

    Yields:
        The client.
    """
    if scheduler is None:
        yield None
        return
    try:
        import dask
        from dask.distributed import Client, LocalCluster
    except ImportError as error:
        raise LipboundError(
            "--scheduler needs dask.distributed; pip install 'lipbound[distributed]'"
        ) from error
    if not scheduler.startswith("local:"):
        try:
            client = Client(scheduler, timeout=10)
        except (OSError, ValueError) as error:
            raise LipboundError(
                f"no dask scheduler answers at {scheduler!r}; give its address, such as "
                "tcp://host:8786, or local:N"
            ) from error
        with client:
            yield client
        return
    count = scheduler.removeprefix("local:")
    if not count.isdigit() or int(count) < 1:
        raise LipboundError(
            f"--scheduler is {scheduler!r}; the number of local processes must be at least 1, "
            "such as local:2"
        )
    from lipbound.runs.measure import TRIMMING

    with (
        dask.config.set({TRIMMING: None}),
        LocalCluster(n_workers=int(count), threads_per_worker=1, dashboard_address=":0") as local,
        Client(local) as client,
    ):
        typer.echo(f"dashboard: {client.dashboard_link}", err=True)
        yield client


def measured(config: RunConfig, *, client: Any = None, progress: bool = True) -> xr.Dataset:
    """Compute a run, and save it to a temporary folder where its own place fails."""
    from lipbound.runs.compare import run
    from lipbound.runs.store import save

    try:
        return run(config, client=client, progress=progress)
    except StoreError as error:
        if error.dataset is None:
            raise
        try:
            refuge = save(error.dataset, Path(tempfile.mkdtemp(prefix="lipbound-")) / "run.zarr")
        except (StoreError, OSError):  # what is wrong is told of the place that was asked for
            raise error from None
        raise StoreError(f"{error}; the finished run was saved to {refuge} instead") from error
