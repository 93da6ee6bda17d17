"""Commands that measure: compare, diff, sweep, verify and demo."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lipbound.cli.application import app, columns, echo_json, loading, show, state
from lipbound.errors import LipboundError
from lipbound.formatting import counted, plain
from lipbound.runs.config import RunConfig, check_folder_name

if TYPE_CHECKING:
    import xarray as xr


DEMO = ("builtin:minilm", "builtin:gpt2", "builtin:vit")

TRIMMING = "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_"
"""Setting of dask for what its workers' allocators do with freed memory.

By default they give all of it back to the system, and fresh memory costs more than the arithmetic
on it; None leaves them as they are.
"""


def blocks_in(out: Path | None) -> str:
    """Say what is kept of a run that is saved there, if anywhere, and how to go on."""
    if out is None:
        return "nothing was kept, since there was no --out"
    if out.exists():
        return f"the run is finished and saved in {out}"
    partial = out.with_name(out.name + ".partial")
    if not partial.exists():
        return "nothing was measured yet"
    done = sum(1 for _ in partial.glob("[!.]*.npz"))
    kept = f"{counted(done, 'measured block')}, of one layer each, kept in {partial}"
    return f"{kept}; the same command with --resume goes on from there"


@app.command(
    epilog="Example: lipbound compare builtin:minilm --data alice.txt --samples 8 --max-length "
    "128 --out minilm.zarr"
)
def compare(*, scheduler: str | None = None, **options: Any) -> None:
    """Measure every attention head of a checkpoint and set every bound beside it.

    Args:
        scheduler: Address of a dask scheduler whose workers share the run, or local:N for N
            processes here.

    """
    from lipbound.models.catalogue import known_builtin

    out = options["out"]
    known_builtin(options["model"])
    state["kept"] = lambda: blocks_in(out)
    config = RunConfig(**options | in_python_terms(options))
    with cluster(scheduler) as client:
        ds = measured(replace(config, client=client))
    show(ds)
    tell_saved(out)


@app.command(epilog="Example: lipbound weights builtin:smollm2 --out weights.zarr")
def weights(model: str, *, out: Path | None = None) -> None:
    """Measure the weights of every head alone: no data, no forward pass.

    One layer at a time is in memory. What is measured are norms of W_Q W_K^T, with the factor of
    the scores, and of W_V W_O, and their stable ranks. Tables and heatmaps take the run.

    Args:
        model: As in `lipbound compare`, of a family whose weights are found by their names.
        out: Save the run here, a Zarr store that does not exist yet.
    """
    with loading():
        from lipbound.runs.weights import weight_norms

    show(weight_norms(model, out=out))
    tell_saved(out)


def tell_saved(out: Path | None) -> None:
    """Print where a run is, if anywhere, and how to draw it."""
    if out is not None:
        drawn = f"lipbound heatmap {shlex.quote(str(out))} -o heatmap.pdf"
        typer.echo(f"saved {out}; draw it with: {drawn}")


def in_python_terms(options: dict[str, Any]) -> dict[str, Any]:
    """Read the options that mean something else on the command line than in Python."""
    samples: Any = options["samples"]
    with suppress(ValueError):
        samples = int(samples)
    return {"samples": samples, "delta": options["delta"] or None}


@app.command(
    epilog="Example: lipbound diff builtin:vit-baseline builtin:vit-jasmin --out vit.zarr; "
    "lipbound diff before.zarr after.zarr"
)
def diff(a: str, b: str, *, scheduler: str | None = None, **options: Any) -> None:
    """Set two runs, or two checkpoints on the same inputs, side by side: ratios B / A.

    Before and after fine-tuning, an adapter, quantisation, another step. Options are for
    checkpoints, both of them; but --revision, --gguf-file and --adapter are of B alone. With
    --out diff.zarr, the runs of checkpoints are saved too, as diff-a.zarr and diff-b.zarr.

    Args:
        a: A run saved by `lipbound compare --out`, or a checkpoint as `lipbound compare` takes it.
        b: Another of the same kind.
        scheduler: As in `lipbound compare`.

    """
    from lipbound.models.catalogue import known_builtin
    from lipbound.reporting import tables
    from lipbound.reporting.text_tables import text_table
    from lipbound.runs.diff import diff as diff_runs

    out = options["out"]
    for model in (a, b):
        known_builtin(model)
    kept = f"what was measured is kept beside {out}; the same command with --resume goes on"
    state["kept"] = lambda: kept if out else "nothing was kept, since there was no --out"
    asked = options | in_python_terms(options)
    given = {name: value for name, value in asked.items() if value != getattr(RunConfig, name)}
    with cluster(scheduler) as client:
        ds = diff_runs(a, b, **given, client=client, progress=not state["quiet"])
    # what both have in common once
    below = replace(tables.table_of(ds, "layer"), caption="", notes=[])
    for table in (tables.table_of(ds), below):
        typer.echo(text_table(table, columns()))
    tell_saved(out)


@app.command(epilog="Example: lipbound sweep sweep.yaml --out runs")
def sweep(file: Path, *, out: Path = Path("runs"), scheduler: str | None = None) -> None:
    """Do every combination of models, data and lengths; runs that fail do not stop the others.

    Args:
        file: YAML: model, data, max_length (values or lists), or pairs of them; and options for
            every run.
        out: Folder for the runs and their index.csv; what it holds already is kept.
        scheduler: As in `lipbound compare`.
    """
    from lipbound.runs.sweep import rows

    kept_in = f"what was measured is kept in {out}; the same command goes on from there"
    state["kept"] = lambda: kept_in
    ended: Counter[str] = Counter()
    with cluster(scheduler) as client:
        for row in rows(file, out, client=client, progress=not state["quiet"]):
            ended[row["status"]] += 1
            why = f"  {plain(row['error'])}" if row["error"] else ""
            typer.echo(f"{row['status']}: {row['run']}{why}")
    if (kept := ended["kept"]) and not state["quiet"]:
        typer.echo(f"note: {kept} of {ended.total()} runs in {out} were finished before", err=True)
    if failed := ended["failed"]:
        what = f"{counted(failed, 'run')} of the sweep failed; {out / 'index.csv'} says why"
        raise LipboundError(f"{what}, and the same command tries again")


@app.command(epilog="Example: lipbound verify minilm.zarr --places 8")
def verify(
    run: Path,
    *,
    places: int = 4,
    seed: int = 0,
    model: str | None = None,
    data: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    automatic: bool = False,
    json: bool = False,
) -> None:
    """Compute some numbers of a run again from its provenance; status 1 where they do not hold.

    Args:
        run: A run saved by `lipbound compare --out`.
        places: How many pairs of sample and layer to compute again, all heads of each.
        seed: Which ones.
        model: In place of the recorded model, e.g. where its directory has moved.
        data: In place of the recorded data.
        device: As in `lipbound compare`.
        dtype: Compute again in another dtype; float64 tells how far off float32 is.
        automatic: Also compute exact norms there by automatic differentiation of the model.
        json: JSON, for programs; the status is the same.
    """
    with loading():
        from lipbound.runs.store import load
        from lipbound.runs.verify import verify as run_verify
    asked: dict[str, Any] = {"model": model, "data": data, "device": device, "dtype": dtype}
    asked |= {"places": places, "seed": seed, "automatic": automatic}
    found = run_verify(load(run, damaged="accept"), **asked)
    if json:
        said = {name: getattr(found, name) for name in ("ok", "problems", "notes", "places")}
        echo_json(said | {"table": found.table.reset_index().to_dict("records")})
    else:
        typer.echo(str(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command(epilog="Example: lipbound demo --out results")
def demo(*, out: Path = Path("lipbound-demo"), samples: int = 8) -> None:
    """Compare all bounds on the three builtin checkpoints, and draw their heatmaps.

    Args:
        out: Folder for runs and figures; must not exist yet.
        samples: Samples per checkpoint.
    """
    from lipbound.reporting.plots import heatmaps
    from lipbound.runs.store import check_target

    check_folder_name("out", out, "holds three runs and their figures")
    check_target(out)
    state["kept"] = lambda: f"runs that were finished are kept in {out}"
    told: list[str] = []
    for model in DEMO:
        name = model.removeprefix("builtin:")
        config = RunConfig(model, samples=samples, out=out / f"{name}.zarr")
        ds = measured(config)
        show(ds, told)
        for kind in ("pdf", "png"):
            heatmaps(ds, out / f"{name}.{kind}")
        typer.echo(f"saved {out / name}.zarr, drew {out / name}.pdf and .png\n")


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
        what = "--scheduler needs dask.distributed; pip install 'lipbound[distributed]'"
        raise LipboundError(what) from error
    with ExitStack() as opened:
        address: Any = scheduler
        if scheduler.startswith("local:"):
            processes = scheduler.removeprefix("local:")
            if not processes.isdigit() or int(processes) < 1:
                what = f"--scheduler is {scheduler!r}; the number of processes must be at least 1"
                raise LipboundError(f"{what}, as in local:2")
            opened.enter_context(dask.config.set({TRIMMING: None}))
            options: Any = {"threads_per_worker": 1, "dashboard_address": ":0"}
            address = opened.enter_context(LocalCluster(n_workers=int(processes), **options))
            typer.echo(f"dashboard: {address.dashboard_link}", err=True)
        try:
            client = opened.enter_context(Client(address, timeout=10))
        except (OSError, ValueError) as error:
            what = f"no dask scheduler answers at {scheduler!r}; give tcp://host:8786 or local:N"
            raise LipboundError(what) from error
        yield client


def measured(config: RunConfig) -> xr.Dataset:
    """Compute a run."""
    with loading():
        from lipbound.runs.compare import run

    return run(replace(config, progress=not state["quiet"]))
