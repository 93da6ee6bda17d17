"""The command line."""

import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import xarray as xr
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lipbound import formatting
from lipbound.analysis.recipes.registry import RECIPES, Setting, recipe
from lipbound.attention.variants import VARIANTS
from lipbound.bounds import registry
from lipbound.bounds.audit import audit
from lipbound.errors import LipboundError, StoreError
from lipbound.formatting import plain
from lipbound.reporting import citations, labels, plots, statistics, tables
from lipbound.reporting.page.render import report as write_report
from lipbound.runs import store
from lipbound.runs.compare import compare as run_compare
from lipbound.runs.sweep import sweep as run_sweep
from lipbound.runs.verify import verify as run_verify

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


DEMO = ("builtin:minilm", "builtin:gpt2", "builtin:vit")


@app.callback(epilog="Errors end with status 2 and one sentence.")
def main_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Exact local Lipschitz constants of attention heads, beside every published upper bound."""
    state["debug"] = debug


state = {"debug": False}


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise LipboundError(f"--layers is {text!r}; give numbers separated by commas, such as 0,3,5") from error


@app.command(epilog="Example: lipbound compare builtin:minilm --data alice.txt --samples 8 --max-length 128 --out minilm.zarr")
def compare(
    model: Annotated[
        str,
        typer.Argument(
            help="Hub id (owner/name or owner/name@revision), checkpoint directory, or builtin:minilm|gpt2|llama|qwen3|vit|vit-baseline|vit-jasmin."
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
    delta: Annotated[float, typer.Option(help="Total failure probability of exact_upper; 0 for plain estimates.")] = 1e-10,
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
    with _client(scheduler) as client:
        ds = _run(
            model, data, split=split, column=column, bounds=bounds, map=map, samples=samples, exact_samples=exact_samples,
            max_length=max_length, layers=_numbers(layers), revision=revision, tol=tol, delta=delta or None, device=device, dtype=dtype,
            seed=seed, out=out, resume=resume, memory=memory, weights=weights, client=client, progress=not quiet,
        )  # fmt: skip
    _show(ds)
    if out is not None:
        typer.echo(f"saved {out}; draw it with: lipbound heatmap {out} -o heatmap.pdf")


@contextmanager
def _client(scheduler: str | None) -> Iterator[Any]:
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
    with LocalCluster(n_workers=int(count), threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        typer.echo(f"dashboard: {client.dashboard_link}", err=True)
        yield client


def _run(model: str, data: Any = None, **options: Any) -> xr.Dataset:
    """`lipbound.compare`, with a finished run rescued to a temporary folder when its own place fails."""
    try:
        return run_compare(model, data, **options)
    except StoreError as error:
        finished = getattr(error, "dataset", None)
        if finished is None:
            raise
        refuge = store.save(finished, Path(tempfile.mkdtemp(prefix="lipbound-")) / "run.zarr")
        raise StoreError(f"{error}; the finished run was saved to {refuge} instead") from error


def _show(ds: xr.Dataset) -> None:
    """The summary as a table on standard output, then what the audit says."""
    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False)
    table = Table(title=escape(labels.run_caption(ds)), title_justify="left", title_style="dim")
    table.add_column("bound / exact", no_wrap=True)
    numbers = ("geom. mean", "over samples", "min", "max")
    for title in (*numbers, "below exact"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("assumptions hold")
    for name, row in tables.readable(ds).iterrows():
        below = f"{row['below exact']} of {row['of']}"
        table.add_row(
            f"{escape(plain(row['bound']))} [dim]{name}[/dim]", *(row[c] for c in numbers),
            below if row["below exact"] == "0" else f"[bold red]{below}[/bold red]", row["assumptions hold"],
        )  # fmt: skip
    console.print(table)
    unconverged = int(ds["exact"].notnull().sum() - ds["exact_converged"].sum())
    exact = ds["exact"].values[ds["exact"].notnull().values]
    console.print(
        f"exact norms: {len(exact)} heads, from {formatting.number(float(exact.min()))} to {formatting.number(float(exact.max()))}, "
        f"{unconverged} not converged; capture reproduces the model to {ds.attrs['capture_error']:.1e} relative"
    )
    for line in labels.left_out(ds):
        console.print(line, style="dim", soft_wrap=True)
    broken = {name: entry["broken"] for name, entry in audit(ds).items() if entry["broken"]}
    if broken:
        console.print(f"[bold red]A bound fell below the exact norm although its assumptions hold: {broken}. Please report this run.[/bold red]")


@app.command(epilog="Example: lipbound sweep sweep.yaml --out runs")
def sweep(
    file: Annotated[Path, typer.Argument(help="YAML: model, data, max_length (values or lists), and options that hold for every run.")],
    out: Annotated[Path, typer.Option(help="Folder for the runs and their index.csv; what it holds already is kept.")] = Path("runs"),
    scheduler: Annotated[str | None, typer.Option(help="As in `lipbound compare`.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Do every combination of models, data and lengths; a run that fails does not stop the others."""
    failed = 0
    with _client(scheduler) as client:
        for row in run_sweep(file, out, client=client, progress=not quiet):
            failed += row["status"] == "failed"
            typer.echo(f"{row['status']}: {row['run']}{'  ' + row['error'] if row['error'] else ''}")
    if failed:
        raise LipboundError(f"{failed} runs of the sweep failed; {out / 'index.csv'} says why, and the same command tries them again")


@app.command(epilog="Example: lipbound heatmap minilm.zarr -o minilm.pdf --reduce geomean")
def heatmap(
    run: Annotated[Path, typer.Argument(help="A run saved by `lipbound compare --out`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write: .pdf, .svg, .png, .pgf, ...")],
    bounds: Annotated[str | None, typer.Option(help="Names separated by commas; all of the run by default.")] = None,
    reduce: Annotated[str, typer.Option(help="mean, geomean, max, median or a quantile such as 0.9, over samples.")] = "mean",
    scale: Annotated[str, typer.Option(help="'shared', or 'panel' for a colour scale each.")] = "shared",
    width: Annotated[str, typer.Option(help="'page', 'column', 'slide' or inches.")] = "page",
    columns: Annotated[int | None, typer.Option(help="Panels in a row.")] = None,
    style: Annotated[str | None, typer.Option(help="A venue known to tueplots, e.g. icml2024: its fonts and widths (extra `styles`).")] = None,
) -> None:
    """Draw layer x head heatmaps of a run."""
    ds = store.load(run)
    chosen = None if bounds is None else statistics.requested(ds, bounds)
    how, inches = _number_or_name(reduce), _number_or_name(width)
    plots.heatmaps(ds, output, bounds=chosen, reduce=how, scale=scale, width=inches, columns=columns, style=style)
    typer.echo(f"wrote {output}")


def _number_or_name(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


@app.command(epilog="Example: lipbound table minilm.zarr --format markdown")
def table(
    run: Annotated[Path, typer.Argument(help="A run saved by `lipbound compare --out`.")],
    format: Annotated[str, typer.Option(help="text, markdown, latex (booktabs, siunitx) or csv (full precision).")] = "text",
    by: Annotated[str, typer.Option(help="A row per bound, layer or head.")] = "bound",
    bounds: Annotated[str | None, typer.Option(help="Names separated by commas; all of the run by default.")] = None,
    reduce: Annotated[str, typer.Option(help="geomean, mean, max, median or a quantile, for rows per layer or head.")] = "geomean",
    values: Annotated[str, typer.Option(help="'ratio' (bound / exact) or 'value', for rows per layer or head.")] = "ratio",
) -> None:
    """Print bound / exact per bound, with the audit; or exact norms and bounds per layer or head."""
    ds = store.load(run)
    chosen = None if bounds is None else statistics.requested(ds, bounds)
    typer.echo(tables.render(ds, format, by=by, bounds=chosen, reduce=_number_or_name(reduce), values=values))


@app.command(epilog="Example: lipbound cite minilm.zarr > references.bib; lipbound cite minilm.zarr --format latex")
def cite(
    run: Annotated[Path, typer.Argument(help="A run saved by `lipbound compare --out`.")],
    format: Annotated[str, typer.Option(help="bib (entries, the paragraph as a comment), or the paragraph alone: latex, text.")] = "bib",
) -> None:
    """Print BibTeX for every bound in a run and for lipbound, and a methods paragraph with the run's settings."""
    typer.echo(citations.cite(store.load(run), format), nl=False)


@app.command(epilog="Example: lipbound report minilm.zarr -o minilm.html; lipbound report bert.zarr gpt2.zarr -o both.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Runs saved by `lipbound compare --out`; several are shown side by side.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write, an .html file.")] = Path("report.html"),
    reduce: Annotated[str, typer.Option(help="geomean, mean, max, median or a quantile, over samples.")] = "geomean",
    sample: Annotated[int, typer.Option(help="The sample whose attention is shown.")] = 0,
    details: Annotated[
        bool, typer.Option("--details/--no-details", help="Load the model again, for attention and singular vectors of every head.")
    ] = True,
    model: Annotated[str | None, typer.Option(help="In place of the recorded model (one run).")] = None,
    data: Annotated[str | None, typer.Option(help="In place of the recorded data (one run).")] = None,
    device: Annotated[str, typer.Option(help="As in `lipbound compare`.")] = "auto",
) -> None:
    """Write a self-contained page: heatmaps to hover and click, single heads, the audit, provenance, what to cite."""
    how = _number_or_name(reduce)
    for notice in write_report(runs, output, reduce=how, sample=sample, details=details, model=model, data=data, device=device):
        typer.echo(f"note: {notice}", err=True)
    typer.echo(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")


@app.command(epilog="Example: lipbound verify minilm.zarr --places 8")
def verify(
    run: Annotated[Path, typer.Argument(help="A run saved by `lipbound compare --out`.")],
    places: Annotated[int, typer.Option(help="How many pairs of sample and layer to compute again, all heads of each.")] = 4,
    seed: Annotated[int, typer.Option(help="Which ones.")] = 0,
    model: Annotated[str | None, typer.Option(help="In place of the recorded model, e.g. where its directory has moved.")] = None,
    data: Annotated[str | None, typer.Option(help="In place of the recorded data.")] = None,
    device: Annotated[str, typer.Option(help="As in `lipbound compare`.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Compute again in another dtype; float64 tells how far off float32 is.")] = None,
) -> None:
    """Compute some numbers of a run again, from its recorded provenance; ends with status 1 where they do not hold."""
    found = run_verify(store.load(run), places=places, seed=seed, model=model, data=data, device=device, dtype=dtype)
    typer.echo(str(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command("bounds", epilog="Example: lipbound bounds")
def list_bounds() -> None:
    """List all bounds: statement, source, assumptions, cost."""
    for name in registry.names():
        bound = registry.get(name)
        typer.echo(f"{name}: {bound.label}\n    {bound.statement}")
        typer.echo(f"    source: {bound.source} [{bound.citation}]\n    a bound when: {bound.assumptions}")
        covers = ", ".join(VARIANTS[v] for v in VARIANTS if v in bound.covers) or "nothing"
        typer.echo(f"    covers besides plain heads: {covers}\n    cost per head: {bound.cost}\n")


@app.command(epilog="Example: lipbound reproduce castin-1 bert-base-uncased --data alice.txt --full -o figures")
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A recipe, or 'all'; without one the recipes are listed.")] = None,
    model: Annotated[str, typer.Argument(help="As for `lipbound compare`.")] = "builtin:minilm",
    data: Annotated[list[str] | None, typer.Option(help="As for `lipbound compare`; may be given several times.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub dataset.")] = None,
    column: Annotated[str | None, typer.Option(help="Column of a table.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples, or sequences of each length.")] = None,
    full: Annotated[bool, typer.Option("--full", help="The paper's sizes rather than small ones.")] = False,
    device: Annotated[str, typer.Option(help="As for `lipbound compare`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for `lipbound compare`.")] = "float32",
    seed: Annotated[int, typer.Option(help="As for `lipbound compare`.")] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for data, figures and captions; runs it holds are drawn again.")] = Path(
        "reproduced"
    ),
) -> None:
    """Compute and draw a figure or a claim of a paper, for any checkpoint."""
    if name is None:
        for one in RECIPES.values():
            typer.echo(f"{one.name}: {one.title}\n    {one.source}; about {one.cost} with small settings on two cores")
        return
    setting = Setting(model, tuple(data or ()), column, split, samples, full, device, dtype, seed)
    for one in RECIPES.values() if name == "all" else [recipe(name)]:
        ds = one.reproduce(setting, output)
        typer.echo(f"{one.title} ({one.source}).\n{one.caption(ds)}\nwrote {output / one.name}.pdf, .png and .txt, from {output / one.stored}\n")


@app.command(epilog="Example: lipbound demo --out results")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs and figures; must not exist yet.")] = Path("lipbound-demo"),
    samples: Annotated[int, typer.Option(help="Samples per checkpoint.")] = 8,
) -> None:
    """Compare all bounds on the three builtin checkpoints, and draw their heatmaps."""
    store.check_target(out)
    for model in DEMO:
        name = model.removeprefix("builtin:")
        ds = _run(model, samples=samples, out=out / f"{name}.zarr")
        _show(ds)
        for kind in ("pdf", "png"):
            plots.heatmaps(ds, out / f"{name}.{kind}")
        typer.echo(f"saved {out / name}.zarr, drew {out / name}.pdf and .png\n")


def main() -> None:
    """Entry point: errors of input become one sentence and status 2."""
    try:
        app()
    except LipboundError as error:
        if state["debug"]:
            traceback.print_exc()
        else:
            typer.echo(f"error: {plain(str(error))}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
