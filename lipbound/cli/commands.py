"""The commands: those that measure, and those that show bounds, models and stored runs."""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

import lipbound as lb
from lipbound.cli.application import app, loading, state
from lipbound.errors import LipboundError, shown
from lipbound.formatting import counted, hanging, outwards, plain, plain_data, small
from lipbound.runs.config import RunConfig, check_folder_name
from lipbound.schema import NORMS, Contents, is_diff, of_weights_alone

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


@app.used_as("compare builtin:minilm --data alice.txt --samples 8 --out minilm.zarr")
def compare_command(*, scheduler: str | None = None, **options: Any) -> None:
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
    show(ds, [])
    tell_saved(out)


@app.used_as("weights builtin:smollm2 --out weights.zarr")
def weights_command(model: str, *, out: Path | None = None) -> None:
    """Measure the weights of every head alone: no data, no forward pass.

    One layer at a time is in memory. What is measured are norms of W_Q W_K^T, with the factor of
    the scores, and of W_V W_O, and their stable ranks. Tables and heatmaps take the run.

    Args:
        model: As in `lipbound compare`, of a family whose weights are found by their names.
        out: Save the run here, a Zarr store that does not exist yet.
    """
    with loading():
        from lipbound.runs.compare import weight_norms

    show(weight_norms(model, out=out), [])
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


@app.used_as(
    "diff builtin:vit-baseline builtin:vit-jasmin --out vit.zarr", "diff before.zarr after.zarr"
)
def diff_command(a: str, b: str, *, scheduler: str | None = None, **options: Any) -> None:
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

    out = options["out"]
    for model in (a, b):
        known_builtin(model)
    kept = f"what was measured is kept beside {out}; the same command with --resume goes on"
    state["kept"] = lambda: kept if out else "nothing was kept, since there was no --out"
    asked = options | in_python_terms(options)
    given = {name: value for name, value in asked.items() if value != getattr(RunConfig, name)}
    with cluster(scheduler) as client:
        ds = lb.diff(a, b, **given, client=client, progress=not state["quiet"])
    # what both have in common once
    below = replace(lb.tables.table_of(ds, "layer"), caption="", notes=[])
    for table in (lb.tables.table_of(ds), below):
        typer.echo(lb.tables.text_table(table, columns()))
    tell_saved(out)


@app.used_as("sweep sweep.yaml --out runs")
def sweep_command(file: Path, *, out: Path = Path("runs"), scheduler: str | None = None) -> None:
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


@app.used_as("verify minilm.zarr --places 8")
def verify_command(
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
        from lipbound.runs.verify import verify
    asked: dict[str, Any] = {"model": model, "data": data, "device": device, "dtype": dtype}
    asked |= {"places": places, "seed": seed, "automatic": automatic}
    found = verify(lb.load(run, damaged="accept"), **asked)
    if json:
        said = {name: getattr(found, name) for name in ("ok", "problems", "notes", "places")}
        echo_json(said | {"table": found.table.reset_index().to_dict("records")})
    else:
        typer.echo(str(found))
    if not found.ok:
        raise typer.Exit(1)


@app.used_as("demo --out results")
def demo_command(*, out: Path = Path("lipbound-demo"), samples: int = 8) -> None:
    """Compare all bounds on the three builtin checkpoints, and draw their heatmaps.

    Args:
        out: Folder for runs and figures; must not exist yet.
        samples: Samples per checkpoint.
    """
    from lipbound.runs.store import check_target

    check_folder_name("out", out, "holds three runs and their figures")
    check_target(out.expanduser())
    state["kept"] = lambda: f"runs that were finished are kept in {out}"
    told: list[str] = []
    for model in ("builtin:minilm", "builtin:gpt2", "builtin:vit"):
        name = model.removeprefix("builtin:")
        config = RunConfig(model, samples=samples, out=out / f"{name}.zarr")
        ds = measured(config)
        show(ds, told)
        for kind in ("pdf", "png"):
            lb.plots.heatmaps(ds, out / f"{name}.{kind}")
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


def measured(config: RunConfig) -> Any:
    """Compute a run."""
    with loading():
        from lipbound.runs.compare import run

    return run(replace(config, progress=not state["quiet"]))


# -- what there is: stored runs, bounds, models ----------------------------------------------------


def labels_of(given: list[str] | None) -> dict[str, str]:
    """Read the texts given by --label, NAME=TEXT each, by their names."""
    found = {}
    for word in given or []:
        name, sign, text = word.partition("=")
        if not sign or not name.strip() or not text.strip():
            raise LipboundError(f"--label is {shown(word)}; it takes NAME=TEXT, as yudin=Yudin")
        found[name.strip()] = text.strip()
    return found


def stored(run: Path, step: int | None = None) -> Any:
    """Load a run as it was computed; of one over steps of training one step, or the last."""
    from lipbound.runs.store import at_step

    return at_step(lb.load(run, damaged="refuse"), step)


@app.used_as("heatmap minilm.zarr -o minilm.pdf --reduce geomean")
def heatmap_command(
    run: Path,
    *,
    output: Path,
    bounds: str | None = None,
    over: str | None = None,
    reduce: str | None = None,
    scale: str = "rows",
    width: str = "page",
    columns: int | None = None,
    style: str | None = None,
    caption: bool = False,
    label: list[str] | None = None,
    step: int | None = None,
) -> None:
    """Draw layer x head heatmaps of a run, and write the caption beside the figure.

    Args:
        run: A run saved by `lipbound compare --out`.
        output: File to write: .pdf, .svg, .png, .pgf, ...
        bounds: Names of bounds and extras, separated by commas; all of the run by default.
        over: 'exact': draw bound / exact, of the bound's own map, rather than values.
        reduce: mean (of values, by default), geomean (of ratios, by default), max, median or a
            quantile such as 0.9, over samples.
        scale: 'rows' (what is near the exact norm first, on its own scale), 'shared', or 'panel'
            (one each).
        width: 'page', 'column', 'slide' or inches.
        columns: Panels in a row.
        style: A venue known to tueplots, e.g. icml2024: its fonts and widths (extra `styles`).
        caption: Draw the caption into the picture too.
        label: NAME=TEXT: what to call a bound, by its name, or 'exact', 'model', 'data'; may be
            given several times.
        step: Of a run over steps of training: which one; the last by default.
    """
    options: Any = {"scale": scale, "columns": columns, "style": style, "caption": caption}
    options |= {"over": over, "width": number_or_name(width), "reduce": number_or_name(reduce)}
    lb.plots.heatmaps(stored(run, step), output, bounds=bounds, labels=labels_of(label), **options)
    typer.echo(f"wrote {output}, and its caption to {output.stem}.caption.txt and .tex beside it")


@app.used_as("table minilm.zarr --format markdown")
def table_command(
    run: Path,
    *,
    format: str = "text",
    by: str = "bound",
    bounds: str | None = None,
    reduce: str = "geomean",
    values: str = "ratio",
    json: bool = False,
    width: str | None = None,
    label: list[str] | None = None,
    step: int | None = None,
) -> None:
    """Print bound / exact per bound, with the audit; or exact norms and bounds per layer or head.

    Where a line has no room for all columns, words fold. Then a table per bound lacks, in this
    order, max, min, "range over samples", the interval, names, "assumptions hold" and "below exact"
    (marks and notes say the last two), and says so; a table per layer or head goes on below.
    Numbers stay whole; csv has everything.

    Args:
        run: A run saved by `lipbound compare --out`.
        format: text, markdown, latex (booktabs, siunitx) or csv (full precision).
        by: A row per bound, layer or head.
        bounds: Names separated by commas; all of the run by default.
        reduce: geomean, mean, max, median or a quantile, for rows per layer or head.
        values: 'ratio' (bound / exact) or 'value', for rows per layer or head.
        json: JSON with full precision, in place of --format.
        width: Of text: characters (the terminal's by default); of latex: column (the default),
            page, slide, or points.
        label: NAME=TEXT: what to call a bound, by its name, or 'exact', 'model', 'data'; may be
            given several times.
        step: Of a run over steps of training: which one; the last by default.
    """
    ds = stored(run, step)
    options: Any = {"by": by, "bounds": bounds, "values": values}
    options |= {"reduce": number_or_name(reduce), "labels": labels_of(label)}
    if json:
        echo_json(lb.tables.table_of(ds, **options).data())
        return
    wide = columns() if width is None and format == "text" else number_or_name(width)
    typer.echo(lb.tables.render(ds, format, width=wide, **options))


@app.used_as("cite minilm.zarr > references.bib", "cite minilm.zarr --format latex")
def cite_command(
    run: Path, *, format: str = "bib", label: list[str] | None = None, step: int | None = None
) -> None:
    """Print BibTeX for a run's bounds and for lipbound, and a methods paragraph on its settings.

    Args:
        run: A run saved by `lipbound compare --out`.
        format: bib (entries, the paragraph as a comment), or the paragraph alone: latex, natbib
            (latex with citep), text.
        label: NAME=TEXT: what to call a bound, by its name, or 'exact', 'model', 'data'; may be
            given several times.
        step: Of a run over steps of training: which one; the last by default.
    """
    typer.echo(lb.cite(stored(run, step), format, labels=labels_of(label)), nl=False)


@app.used_as("report minilm.zarr -o minilm.html", "report bert.zarr gpt2.zarr -o both.html")
def report_command(
    runs: list[Path],
    *,
    output: Path = Path("report.html"),
    reduce: str = "geomean",
    sample: int = 0,
    details: bool = True,
    model: str | None = None,
    data: str | None = None,
    device: str = "auto",
    label: list[str] | None = None,
    step: int | None = None,
) -> None:
    """Write a self-contained page: heatmaps, single heads, the audit, provenance, citations.

    Args:
        runs: Runs saved by `lipbound compare --out`; several are shown side by side.
        output: The page to write, an .html file.
        reduce: geomean, mean, max, median or a quantile, over samples.
        sample: The sample whose attention is shown.
        details: Load the model again, for attention and singular vectors of every head.
        model: In place of the recorded model (one run).
        data: In place of the recorded data (one run).
        device: As in `lipbound compare`.
        label: NAME=TEXT: what to call a bound, by its name, or 'exact', 'model', 'data'; may be
            given several times.
        step: Of runs over steps of training: which one; the last by default.
    """
    options: Any = {"sample": sample, "details": details}
    options |= {"model": model, "data": data, "device": device}
    options |= {"reduce": number_or_name(reduce), "labels": labels_of(label)}
    shown_runs = runs if step is None else [stored(run, step) for run in runs]
    for notice in lb.report(shown_runs, output, **options):
        typer.echo(f"note: {notice}", err=True)
    typer.echo(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")


@app.used_as("bounds")
def bounds_command(*, json: bool = False) -> None:
    """List all bounds: statement, norm, source, assumptions, cost.

    Args:
        json: JSON, for programs.
    """
    from lipbound.attention.variants import VARIANTS

    every = [lb.bounds.get(name) for name in lb.bounds.names(None)]
    if json:
        echo_json([bound.facts() for bound in every])
        return
    for bound in every:
        covers = ", ".join(VARIANTS[v] for v in VARIANTS if v in bound.covers) or "nothing"
        said = (
            f"{bound.name}: {bound.label}",
            f"    {bound.statement}",
            f"    norm: {bound.norm} ({NORMS[bound.norm]})",
            f"    source: {bound.source} [{bound.citation}]",
            f"    a bound when: {bound.assumptions}",
            f"    covers besides plain heads: {covers}",
            f"    cost per head: {bound.cost}",
        )
        for line in said:
            echo_folded(line)
        typer.echo()


@app.used_as("models")
def models_command(*, json: bool = False) -> None:
    """List the checkpoints that come with lipbound: what each is, and its licence.

    Args:
        json: JSON, for programs.
    """
    from lipbound.models.catalogue import BUILTINS, describe

    found = [describe(name) for name in BUILTINS]
    if json:
        echo_json([asdict(one) for one in found])
        return
    for one in found:
        if one.missing:
            typer.echo(f"{one.name}\n    not installed: {one.missing}")
            continue
        size = f"{one.layers} layers x {one.heads} heads, width {one.width}; reads {one.reads}"
        typer.echo(f"{one.name}: {plain(one.title)}\n    {one.architecture}, {size}")
        typer.echo(f"    licence {one.license}; {one.origin}")
    others = "a hub id such as owner/name, a directory with config.json and weights"
    typer.echo(f"Any other model: {others}, or a GGUF file.")


@app.used_as("info minilm.zarr")
def info_command(run: Path, *, json: bool = False) -> None:
    """Say what a stored run holds: model, data, settings, bounds, and whether it was altered.

    Args:
        run: A run saved by `lipbound compare --out`.
        json: JSON, for programs.
    """
    from lipbound.reporting.labels import diff_facts, fact_words, facts
    from lipbound.runs.checksums import faults
    from lipbound.runs.store import diff_faults, diff_of

    ds = lb.load(run, damaged="accept")
    of_two = is_diff(ds)
    wrong = (diff_faults if of_two else faults)(ds)
    files = (file for file in run.expanduser().rglob("*") if file.is_file())
    found = {"run": str(run)} | (diff_facts(diff_of(ds)) if of_two else facts(ds))
    found["bytes on disk"] = sum(file.stat().st_size for file in files)
    found["checksums"] = " and ".join(wrong) or "hold"
    if json:
        echo_json(found)
        return
    wide = max(map(len, found)) + 2
    for name, value in found.items():
        typer.echo(f"{name:{wide}}{fact_words(value) or 'none'}")


# -- output ----------------------------------------------------------------------------------------


def columns() -> int:
    """Characters in a line of the terminal; 80 in a pipe, unless COLUMNS says otherwise."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def echo_folded(text: str) -> None:
    """Print a line, folded between words to the width of the terminal, with a hanging indent."""
    indent = " " * (len(text) - len(text.lstrip()))
    for line in hanging(text.lstrip(), columns() - len(indent)):
        typer.echo(indent + line)


def show(ds: Any, told: list[str]) -> None:
    """Print a run's summary as a table, and the extent of its exact norms.

    ``told`` are notes that were printed before, and are not again; the table's are added to it.
    """
    from lipbound.reporting.labels import places
    from lipbound.reporting.statistics import ends, quantity

    made = lb.tables.table_of(ds)
    fresh = [note for note in made.notes if note not in told]
    told += fresh
    typer.echo(lb.tables.text_table(replace(made, notes=fresh), columns()))
    if of_weights_alone(ds):
        return
    found, extent = Contents.of(ds), ""
    if found.norms:
        least, most = (ends(quantity(ds, "exact", end))[end] for end in (0, 1))
        extent = f", {outwards(least, most, 3)}"
    error = small(float(f"{ds.attrs['capture_error']:.1e}"))
    what = f"exact norms: {found.norms} ({places(ds)}, {counted(found.exact_samples, 'sample')})"
    echo_folded(f"{what}{extent}; capture reproduces the model to {error} relative")


def echo_json(value: Any) -> None:
    """Print a value as JSON with full precision.

    ``"inf"`` and ``"-inf"`` stand for infinite numbers, null for missing ones.
    """
    typer.echo(json.dumps(plain_data(value), allow_nan=False, indent=2))


def number_or_name(text: str | None) -> Any:
    """Read a number, or leave the text, or what was not given, as it is."""
    try:
        return float(text or "")
    except ValueError:
        return text
