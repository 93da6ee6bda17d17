"""Commands that measure: compare and sweep."""

from __future__ import annotations

import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipbound.cli import interruption
from lipbound.cli.application import app, state
from lipbound.cli.completion import models
from lipbound.cli.summary import show
from lipbound.errors import LipboundError, StoreError, shown
from lipbound.formatting import plain

if TYPE_CHECKING:
    import xarray as xr

    from lipbound.runs.config import RunConfig


def probability(text: str | float) -> float:
    """A number that is 0 only where it says so: one too small for float64 is none."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1 or (
        value == 0 and isinstance(text, str) and any(c in text for c in "123456789")
    ):
        raise LipboundError(
            f"--delta is {shown(text)}; it must be a probability between 0 and 1, or 0 for plain "
            "estimates without upper ends"
        )
    return value


def count(text: str | int) -> int | str:
    """A number of samples, or "all"."""
    if str(text).strip().lower() == "all":
        return "all"
    try:
        return int(text)
    except ValueError:
        raise LipboundError(
            f"--samples must be a whole number or 'all', not {shown(text)}"
        ) from None


def refuse_given(norm: str, **options: Any) -> None:
    """Refuse options that a norm with deterministic ends does not have, where they were given, be
    it with their default."""
    from lipbound.errors import choice
    from lipbound.runs.config import refuse_drawn
    from lipbound.schema import NORMS

    for name, value in options.items():
        if choice("norm", norm, NORMS) != "frobenius" and name in state["given"]:
            refuse_drawn(name, value, norm)


def blocks_in(out: Path) -> str:
    """What of a run is kept while it is measured, and how to go on; for an interruption."""
    partial = out.with_name(out.name + ".partial")
    if out.exists():
        return f"{out} was there already, and nothing was written"
    if not partial.exists():
        return "nothing was measured yet"
    done = sum(1 for mark in (partial / ".done" / "c").rglob("*") if mark.is_file())
    blocks = (
        "1 measured block of one layer is"
        if done == 1
        else f"{done} measured blocks of one layer each are"
    )
    return f"{blocks} kept in {partial}; the same command with --resume goes on from there"


@app.command(
    epilog="Example: lipbound compare builtin:minilm --data alice.txt --samples 8 --max-length "
    "128 --out minilm.zarr"
)
def compare(
    model: Annotated[
        str,
        typer.Argument(
            help="Hub id (owner/name or owner/name@revision), checkpoint directory, GGUF file, "
            "or a builtin such as builtin:minilm "
            "(see `lipbound models`).",
            autocompletion=models,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Hub dataset (id or id:config), text file, folder of texts or images, "
            "parquet/csv/tsv/json, safetensors of inputs, or a text."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub dataset.")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of a dataset that holds the text or image.")
    ] = None,
    samples: Annotated[int, typer.Option(parser=count, help="How many samples, or 'all'.")] = 8,
    shuffle: Annotated[
        int | None,
        typer.Option(
            help="Draw the samples from all of the data, with this seed; the first ones otherwise."
        ),
    ] = None,
    exact_samples: Annotated[
        int | None, typer.Option(help="Exact norms on the first so many samples only.")
    ] = None,
    max_length: Annotated[
        int,
        typer.Option(
            help="Tokens per text, special tokens included; a text alone is cut into windows of "
            "so many."
        ),
    ] = 128,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of the tokenizer, where the checkpoint has none."),
    ] = None,
    processor: Annotated[
        str | None,
        typer.Option(
            help="Directory or hub id of the image processor, where the checkpoint has none."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layer numbers, e.g. 0,5,11 or 0-3,7; -1 is the last; all by default."),
    ] = None,
    bounds: Annotated[
        str,
        typer.Option(
            help="'default', 'all', 'none' (exact norms alone), or names separated by commas "
            "(see `lipbound bounds`)."
        ),
    ] = "default",
    map: Annotated[
        str,
        typer.Option(
            help="head, head_out (with its slice of the output projection), heads, layer (all "
            "together), residual, pre_norm or post_norm."
        ),
    ] = "head",
    norm: Annotated[
        str,
        typer.Option(
            help="frobenius, every-token (each moves by at most 1, the worst output counts) or "
            "one-token (one moves alone)."
        ),
    ] = "frobenius",
    tol: Annotated[
        float, typer.Option(help="Relative width (or error, with --delta 0) of exact norms.")
    ] = 1e-3,
    delta: Annotated[
        float,
        typer.Option(
            parser=probability,
            help="Total failure probability of exact_upper; 0 for plain estimates.",
        ),
    ] = 1e-6,
    device: Annotated[str, typer.Option(help="'auto', 'cpu', 'cuda', 'cuda:1', ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="'float32' or 'float64'.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the start vectors.")] = 0,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Save the run here, a Zarr store that does not exist yet.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take up the unfinished run of --out where it stopped.")
    ] = False,
    memory: Annotated[
        str,
        typer.Option(
            help="Working memory with its unit, e.g. 4GB: how many samples are taken at a time."
        ),
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            help="'whole' in memory, 'layers' (read layer by layer, for large models), or 'auto'."
        ),
    ] = "auto",
    gguf_file: Annotated[
        str | None,
        typer.Option(
            help="Which GGUF file of a directory or of a hub model; the file itself is a model, "
            "too."
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="LoRA adapter to merge into the weights: a directory or a hub id; 'none' leaves "
            "out one that lies beside the weights."
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Address of a dask scheduler whose workers share the run, or local:N for N "
            "processes here."
        ),
    ] = None,
) -> None:
    """Measure every attention head of a checkpoint and set every bound beside it."""
    from lipbound.models.sources.catalogue import PREFIX, builtin

    if model.lower().startswith(PREFIX):
        builtin(model[len(PREFIX) :])  # a mistyped name is told before seconds of imports
    from lipbound.runs.config import RunConfig

    refuse_given(norm, delta=delta, seed=seed)
    interruption.keeps(
        lambda: blocks_in(out) if out is not None else "nothing was kept, since there was no --out"
    )
    config = RunConfig(
        model,
        data,
        split=split,
        column=column,
        bounds=bounds,
        map=map,
        norm=norm,
        samples=samples,
        exact_samples=exact_samples,
        max_length=max_length,
        layers=layers,
        revision=revision,
        tol=tol,
        delta=delta or None,
        device=device,
        dtype=dtype,
        seed=seed,
        out=out,
        resume=resume,
        memory=memory,
        weights=weights,
        gguf_file=gguf_file,
        shuffle=shuffle,
        tokenizer=tokenizer,
        processor=processor,
        adapter=adapter,
    )
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
    """Do every combination of models, data and lengths; a run that fails does not stop
    the others."""
    from lipbound.runs.sweep import sweep as run_sweep

    interruption.keeps(
        lambda: f"what was measured is kept in {out}; the same command goes on from there"
    )
    ended: Counter[str] = Counter()
    with cluster(scheduler) as client:
        for row in run_sweep(file, out, client=client, progress=not state["quiet"]):
            ended[row["status"]] += 1
            typer.echo(
                f"{row['status']}: {row['run']}{'  ' + plain(row['error']) if row['error'] else ''}"
            )
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
    """A dask.distributed client: of N processes of one thread here ("local:N"), or of a scheduler
    at an address; None for None."""
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
    from lipbound.runs.execute import TRIMMING

    with (
        dask.config.set({TRIMMING: None}),
        LocalCluster(n_workers=int(count), threads_per_worker=1, dashboard_address=":0") as local,
        Client(local) as client,
    ):
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
        try:
            refuge = save(error.dataset, Path(tempfile.mkdtemp(prefix="lipbound-")) / "run.zarr")
        except (StoreError, OSError):  # what is wrong is told of the place that was asked for
            raise error from None
        raise StoreError(f"{error}; the finished run was saved to {refuge} instead") from error
