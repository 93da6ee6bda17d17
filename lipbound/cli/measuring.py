"""Commands that measure: compare and sweep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipbound.cli.application import app, numbers
from lipbound.cli.completion import models
from lipbound.cli.summary import show
from lipbound.errors import LipboundError, StoreError

if TYPE_CHECKING:
    import xarray as xr

    from lipbound.runs.config import RunConfig


@app.command(epilog="Example: lipbound compare builtin:minilm --data alice.txt --samples 8 --max-length 128 --out minilm.zarr")
def compare(
    model: Annotated[
        str,
        typer.Argument(
            help="Hub id (owner/name or owner/name@revision), checkpoint directory, or a builtin such as builtin:minilm (see `lipbound models`).",
            autocompletion=models,
        ),
    ],
    data: Annotated[
        str | None, typer.Option(help="Hub dataset (id or id:config), text file, image folder, parquet/csv/json, or safetensors of inputs.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub dataset.")] = None,
    column: Annotated[str | None, typer.Option(help="Column of a dataset that holds the text or image.")] = None,
    samples: Annotated[int, typer.Option(help="How many samples.")] = 8,
    exact_samples: Annotated[int | None, typer.Option(help="Exact norms on the first so many samples only.")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens per text, special tokens included.")] = 128,
    layers: Annotated[str | None, typer.Option(help="Layer numbers, e.g. 0,5,11; all by default.")] = None,
    bounds: Annotated[str, typer.Option(help="'default', 'all', or names separated by commas (see `lipbound bounds`).")] = "default",
    map: Annotated[
        str,
        typer.Option(help="head, head_out (with its slice of the output projection), heads, layer (all together), residual, pre_norm or post_norm."),
    ] = "head",
    tol: Annotated[float, typer.Option(help="Relative width (or error, with --delta 0) of exact norms.")] = 1e-3,
    delta: Annotated[float, typer.Option(help="Total failure probability of exact_upper; 0 for plain estimates.")] = 1e-6,
    device: Annotated[str, typer.Option(help="'auto', 'cpu', 'cuda', 'cuda:1', ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="'float32' or 'float64'.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the start vectors.")] = 0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the run here, a Zarr store that does not exist yet.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take up the unfinished run of --out where it stopped.")] = False,
    memory: Annotated[str, typer.Option(help="Working memory, e.g. 4GB: how many samples are taken at a time.")] = "auto",
    weights: Annotated[str, typer.Option(help="'whole' in memory, 'layers' (read layer by layer, for large models), or 'auto'.")] = "auto",
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a dask scheduler whose workers share the run, or local:N for N processes here.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Measure every attention head of a checkpoint and set every bound beside it."""
    from lipbound.runs.config import RunConfig

    config = RunConfig(
        model, data, split=split, column=column, bounds=bounds, map=map, samples=samples, exact_samples=exact_samples, max_length=max_length,
        layers=numbers(layers), revision=revision, tol=tol, delta=delta or None, device=device, dtype=dtype, seed=seed, out=out, resume=resume,
        memory=memory, weights=weights,
    )  # fmt: skip
    with cluster(scheduler) as client:
        ds = measured(config, client=client, progress=not quiet)
    show(ds)
    if out is not None:
        typer.echo(f"saved {out}; draw it with: lipbound heatmap {out} -o heatmap.pdf")


@app.command(epilog="Example: lipbound sweep sweep.yaml --out runs")
def sweep(
    file: Annotated[Path, typer.Argument(help="YAML: model, data, max_length (values or lists), and options that hold for every run.")],
    out: Annotated[Path, typer.Option(help="Folder for the runs and their index.csv; what it holds already is kept.")] = Path("runs"),
    scheduler: Annotated[str | None, typer.Option(help="As in `lipbound compare`.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Do every combination of models, data and lengths; a run that fails does not stop the others."""
    from lipbound.runs.sweep import sweep as run_sweep

    failed = 0
    with cluster(scheduler) as client:
        for row in run_sweep(file, out, client=client, progress=not quiet):
            failed += row["status"] == "failed"
            typer.echo(f"{row['status']}: {row['run']}{'  ' + row['error'] if row['error'] else ''}")
    if failed:
        raise LipboundError(f"{failed} runs of the sweep failed; {out / 'index.csv'} says why, and the same command tries them again")


@contextmanager
def cluster(scheduler: str | None) -> Iterator[Any]:
    """A dask.distributed client: of N processes of one thread here ("local:N"), or of a scheduler at an address; None for None."""
    if scheduler is None:
        yield None
        return
    try:
        from dask.distributed import Client, LocalCluster
    except ImportError as error:
        raise LipboundError("--scheduler needs dask.distributed; pip install 'lipbound[distributed]'") from error
    if not scheduler.startswith("local:"):
        try:
            client = Client(scheduler, timeout=10)
        except (OSError, ValueError) as error:
            raise LipboundError(f"no dask scheduler answers at {scheduler!r}; give its address, such as tcp://host:8786, or local:N") from error
        with client:
            yield client
        return
    count = scheduler.removeprefix("local:")
    if not count.isdigit() or int(count) < 1:
        raise LipboundError(f"--scheduler is {scheduler!r}; the number of local processes must be at least 1, such as local:2")
    with LocalCluster(n_workers=int(count), threads_per_worker=1, dashboard_address=":0") as local, Client(local) as client:
        typer.echo(f"dashboard: {client.dashboard_link}", err=True)
        yield client


def measured(config: RunConfig, *, client: Any = None, progress: bool = True) -> xr.Dataset:
    """A run, rescued to a temporary folder when it is finished and its own place fails."""
    from lipbound.runs.compare import run
    from lipbound.runs.store import save

    try:
        return run(config, client=client, progress=progress)
    except StoreError as error:
        if error.dataset is None:
            raise
        refuge = save(error.dataset, Path(tempfile.mkdtemp(prefix="lipbound-")) / "run.zarr")
        raise StoreError(f"{error}; the finished run was saved to {refuge} instead") from error
