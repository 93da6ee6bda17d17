"""Commands that show stored runs: heatmap, table, cite and report."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from lipbound.cli.application import StoredRun, app, number_or_name
from lipbound.cli.completion import one_of
from lipbound.cli.output import echo_json
from lipbound.errors import LipboundError, shown

Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        help="NAME=TEXT: what to call a bound, by its name, or 'exact', 'model', 'data'; may be "
        "given several times.",
    ),
]
Bounds = Annotated[
    str | None, typer.Option(help="Names separated by commas; all of the run by default.")
]


def labels_of(given: list[str] | None) -> dict[str, str]:
    """Read the texts given by --label, NAME=TEXT each, by their names."""
    found = {}
    for word in given or []:
        name, sign, text = word.partition("=")
        if not sign or not name.strip() or not text.strip():
            raise LipboundError(
                f"--label is {shown(word)}; it takes NAME=TEXT, such as --label "
                f"{shlex.quote('yudin=Yudin et al.')}"
            )
        found[name.strip()] = text.strip()
    return found


@app.command(epilog="Example: lipbound heatmap minilm.zarr -o minilm.pdf --reduce geomean")
def heatmap(
    run: StoredRun,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write: .pdf, .svg, .png, .pgf, ...")
    ],
    bounds: Bounds = None,
    reduce: Annotated[
        str,
        typer.Option(help="mean, geomean, max, median or a quantile such as 0.9, over samples."),
    ] = "mean",
    scale: Annotated[
        str,
        typer.Option(
            help="'rows' (what is near the exact norm first, on its own scale), 'shared', or "
            "'panel' (one each)."
        ),
    ] = "rows",
    width: Annotated[str, typer.Option(help="'page', 'column', 'slide' or inches.")] = "page",
    columns: Annotated[int | None, typer.Option(min=1, help="Panels in a row.")] = None,
    style: Annotated[
        str | None,
        typer.Option(
            help="A venue known to tueplots, e.g. icml2024: its fonts and widths (extra `styles`)."
        ),
    ] = None,
    caption: Annotated[
        bool, typer.Option("--caption", help="Draw the caption into the picture too.")
    ] = False,
    label: Labels = None,
) -> None:
    """Draw layer x head heatmaps of a run, and write the caption beside the figure."""
    from lipbound.reporting.plots import heatmaps
    from lipbound.reporting.statistics import requested
    from lipbound.runs.store import load

    ds = load(run, damaged="refuse")
    chosen = None if bounds is None else requested(ds, bounds)
    options: Any = {"scale": scale, "columns": columns, "style": style, "caption": caption}
    options |= {"reduce": number_or_name(reduce), "width": number_or_name(width)}
    heatmaps(ds, output, bounds=chosen, labels=labels_of(label), **options)
    typer.echo(f"wrote {output}, and its caption to {output.stem}.caption.txt and .tex beside it")


@app.command(epilog="Example: lipbound table minilm.zarr --format markdown")
def table(
    run: StoredRun,
    format: Annotated[
        str,
        typer.Option(
            help="text, markdown, latex (booktabs, siunitx) or csv (full precision).",
            autocompletion=one_of("text", "markdown", "latex", "csv"),
        ),
    ] = "text",
    by: Annotated[
        str,
        typer.Option(
            help="A row per bound, layer or head.", autocompletion=one_of("bound", "layer", "head")
        ),
    ] = "bound",
    bounds: Bounds = None,
    reduce: Annotated[
        str,
        typer.Option(help="geomean, mean, max, median or a quantile, for rows per layer or head."),
    ] = "geomean",
    values: Annotated[
        str, typer.Option(help="'ratio' (bound / exact) or 'value', for rows per layer or head.")
    ] = "ratio",
    json: Annotated[
        bool, typer.Option("--json", help="JSON with full precision, in place of --format.")
    ] = False,
    width: Annotated[
        str | None,
        typer.Option(
            help="Of text: characters (the terminal's by default); of latex: column (the "
            "default), page, slide, or points."
        ),
    ] = None,
    label: Labels = None,
) -> None:
    """Print bound / exact per bound, with the audit; or exact norms and bounds per layer or head.

    Where a line has no room for all columns, words fold. Then a table per bound lacks, in this
    order, names, "assumptions hold", "below exact" (marks and notes say these), "range over
    samples", min and max, and says so; a table per layer or head goes on below. Numbers stay whole;
    csv has everything.
    """
    from lipbound.cli.output import columns, emphasised
    from lipbound.reporting import tables
    from lipbound.reporting.statistics import requested
    from lipbound.runs.store import load

    ds = load(run, damaged="refuse")
    chosen = None if bounds is None else requested(ds, bounds)
    options: Any = {"by": by, "bounds": chosen, "values": values}
    options |= {"reduce": number_or_name(reduce), "labels": labels_of(label)}
    if json:
        echo_json(tables.table_of(ds, **options).data())
        return
    wide = number_or_name(width) if width is not None else columns() if format == "text" else None
    typer.echo(emphasised(tables.render(ds, format, width=wide, **options)))


@app.command(
    epilog="Example: lipbound cite minilm.zarr > references.bib; lipbound cite minilm.zarr "
    "--format latex"
)
def cite(
    run: StoredRun,
    format: Annotated[
        str,
        typer.Option(
            help="bib (entries, the paragraph as a comment), or the paragraph alone: latex, text.",
            autocompletion=one_of("bib", "latex", "text"),
        ),
    ] = "bib",
    label: Labels = None,
) -> None:
    """Print BibTeX for a run's bounds and for lipbound, and a methods paragraph on its settings."""
    from lipbound.reporting import citations
    from lipbound.runs.store import load

    ds = load(run, damaged="refuse")
    typer.echo(citations.cite(ds, format, labels=labels_of(label)), nl=False)


@app.command(
    epilog="Example: lipbound report minilm.zarr -o minilm.html; lipbound report bert.zarr "
    "gpt2.zarr -o both.html"
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Runs saved by `lipbound compare --out`; several are shown side by side."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page to write, an .html file.")
    ] = Path("report.html"),
    reduce: Annotated[
        str, typer.Option(help="geomean, mean, max, median or a quantile, over samples.")
    ] = "geomean",
    sample: Annotated[int, typer.Option(help="The sample whose attention is shown.")] = 0,
    details: Annotated[
        bool,
        typer.Option(
            "--details/--no-details",
            help="Load the model again, for attention and singular vectors of every head.",
        ),
    ] = True,
    balls: Annotated[
        bool,
        typer.Option(
            "--balls",
            help="Bound every head over balls around that sample, too: minutes for long texts.",
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="In place of the recorded model (one run).")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="In place of the recorded data (one run).")
    ] = None,
    device: Annotated[str, typer.Option(help="As in `lipbound compare`.")] = "auto",
    label: Labels = None,
) -> None:
    """Write a self-contained page: heatmaps, single heads, the audit, provenance, citations."""
    from lipbound.reporting.page.render import report as write_report

    options: Any = {"sample": sample, "details": details, "balls": balls}
    options |= {"model": model, "data": data, "device": device}
    options |= {"reduce": number_or_name(reduce), "labels": labels_of(label)}
    for notice in write_report(runs, output, **options):
        typer.echo(f"note: {notice}", err=True)
    typer.echo(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
