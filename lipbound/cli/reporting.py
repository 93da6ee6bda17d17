"""Commands that show what there is: bounds, models, and stored runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from lipbound.cli.application import app, columns, echo_folded, echo_json, number_or_name
from lipbound.errors import LipboundError, shown
from lipbound.formatting import plain
from lipbound.schema import NORMS, is_diff


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
    from lipbound.runs.store import at_step, load

    return at_step(load(run, damaged="refuse"), step)


@app.command(epilog="Example: lipbound heatmap minilm.zarr -o minilm.pdf --reduce geomean")
def heatmap(
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
    from lipbound.reporting.plots import heatmaps

    options: Any = {"scale": scale, "columns": columns, "style": style, "caption": caption}
    options |= {"over": over, "width": number_or_name(width), "reduce": number_or_name(reduce)}
    heatmaps(stored(run, step), output, bounds=bounds, labels=labels_of(label), **options)
    typer.echo(f"wrote {output}, and its caption to {output.stem}.caption.txt and .tex beside it")


@app.command(epilog="Example: lipbound table minilm.zarr --format markdown")
def table(
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
    from lipbound.reporting import tables

    ds = stored(run, step)
    options: Any = {"by": by, "bounds": bounds, "values": values}
    options |= {"reduce": number_or_name(reduce), "labels": labels_of(label)}
    if json:
        echo_json(tables.table_of(ds, **options).data())
        return
    wide = columns() if width is None and format == "text" else number_or_name(width)
    typer.echo(tables.render(ds, format, width=wide, **options))


@app.command(
    epilog="Example: lipbound cite minilm.zarr > references.bib; lipbound cite minilm.zarr "
    "--format latex"
)
def cite(
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
    from lipbound.reporting import citations

    ds = stored(run, step)
    typer.echo(citations.cite(ds, format, labels=labels_of(label)), nl=False)


@app.command(
    epilog="Example: lipbound report minilm.zarr -o minilm.html; lipbound report bert.zarr "
    "gpt2.zarr -o both.html"
)
def report(
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
    from lipbound.reporting.page.render import report as write_report

    options: Any = {"sample": sample, "details": details}
    options |= {"model": model, "data": data, "device": device}
    options |= {"reduce": number_or_name(reduce), "labels": labels_of(label)}
    shown_runs = runs if step is None else [stored(run, step) for run in runs]
    for notice in write_report(shown_runs, output, **options):
        typer.echo(f"note: {notice}", err=True)
    typer.echo(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")


@app.command("bounds", epilog="Example: lipbound bounds")
def list_bounds(*, json: bool = False) -> None:
    """List all bounds: statement, norm, source, assumptions, cost.

    Args:
        json: JSON, for programs.
    """
    from lipbound.attention.variants import VARIANTS
    from lipbound.bounds import get, names

    if json:
        echo_json([get(name).facts() for name in names(None)])
        return
    for name in names(None):
        bound = get(name)
        covers = ", ".join(VARIANTS[v] for v in VARIANTS if v in bound.covers) or "nothing"
        said = (
            f"{name}: {bound.label}",
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


@app.command(epilog="Example: lipbound models")
def models(*, json: bool = False) -> None:
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


@app.command(epilog="Example: lipbound info minilm.zarr")
def info(run: Path, *, json: bool = False) -> None:
    """Say what a stored run holds: model, data, settings, bounds, and whether it was altered.

    Args:
        run: A run saved by `lipbound compare --out`.
        json: JSON, for programs.
    """
    from lipbound.reporting.diffs import diff_facts
    from lipbound.reporting.labels import fact_words, facts
    from lipbound.runs.checksums import faults
    from lipbound.runs.store import diff_faults, diff_of, load

    ds = load(run, damaged="accept")
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
