"""Commands that compute again and reproduce: verify, reproduce and demo."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lipbound.cli import interruption
from lipbound.cli.application import StoredRun, app, state
from lipbound.cli.completion import RECIPES, models, one_of
from lipbound.cli.measuring import measured
from lipbound.cli.output import echo_json, show
from lipbound.errors import tell, whole

DEMO = ("builtin:minilm", "builtin:gpt2", "builtin:vit")


@app.command(epilog="Example: lipbound verify minilm.zarr --places 8")
def verify(
    run: StoredRun,
    places: Annotated[
        int,
        typer.Option(
            help="How many pairs of sample and layer to compute again, all heads of each."
        ),
    ] = 4,
    seed: Annotated[int, typer.Option(help="Which ones.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(help="In place of the recorded model, e.g. where its directory has moved."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="In place of the recorded data.")] = None,
    device: Annotated[str, typer.Option(help="As in `lipbound compare`.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="Compute again in another dtype; float64 tells how far off float32 is."),
    ] = None,
    automatic: Annotated[
        bool,
        typer.Option(
            "--automatic",
            help="Also compute exact norms there by automatic differentiation of the model.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON, for programs; the status is the same.")
    ] = False,
) -> None:
    """Compute some numbers of a run again from its provenance; status 1 where they do not hold."""
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


@app.command(
    epilog="Example: lipbound reproduce castin-1 bert-base-uncased --data alice.txt --full -o "
    "figures"
)
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, or 'all'; without one the recipes are listed.",
            autocompletion=one_of(*RECIPES, "all"),
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(
            help="As for `lipbound compare`; builtin:minilm by default.", autocompletion=models
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="As for `lipbound compare`; may be given several times."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub dataset.")] = None,
    column: Annotated[str | None, typer.Option(help="Column of a table.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples, or sequences of each length.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's sizes rather than small ones.")
    ] = False,
    device: Annotated[str, typer.Option(help="As for `lipbound compare`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for `lipbound compare`.")] = "float32",
    seed: Annotated[int, typer.Option(help="As for `lipbound compare`.")] = 0,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="Folder for data, figures and captions; runs it holds are drawn again.",
        ),
    ] = Path("reproduced"),
) -> None:
    """Compute and draw a figure or a claim of a paper, for any checkpoint."""
    from lipbound.analysis.recipes.registry import RECIPES as recipes
    from lipbound.analysis.recipes.registry import Setting, recipe
    from lipbound.runs.config import check_folder_name

    if name is None:
        for one in recipes.values():
            typer.echo(
                f"{one.name}: {one.title}\n    {one.source}; about {one.cost} with small "
                "settings on two cores"
            )
        return
    chosen = list(recipes.values()) if name == "all" else [recipe(name)]
    if not any(one.of_model for one in chosen) and (model is not None or data):
        tell(
            f"{chosen[0].name} measures no model, so "
            f"{', '.join(filter(None, (model, *(data or ()))))} is not looked at"
        )
    check_folder_name("output", output, "holds data, figures and captions")
    if samples is not None:
        whole("samples", samples, least=1)
    setting = Setting(
        model or Setting.model, tuple(data or ()), column, split, samples, full, device, dtype, seed
    )
    interruption.keeps(
        lambda: (
            f"figures that were finished are kept in {output}; the same command goes on from there"
        )
    )
    for one in chosen:
        ds = one.saved(setting, output)
        one.render(ds, output)
        typer.echo(
            f"{one.title} ({one.source}).\n{one.caption(ds)}\nwrote {output / one.name}.pdf, "
            f".png, .txt and .tex, from {output / one.stored}\n"
        )


@app.command(epilog="Example: lipbound demo --out results")
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for runs and figures; must not exist yet.")
    ] = Path("lipbound-demo"),
    samples: Annotated[int, typer.Option(help="Samples per checkpoint.")] = 8,
) -> None:
    """Compare all bounds on the three builtin checkpoints, and draw their heatmaps."""
    from lipbound.reporting.plots import heatmaps
    from lipbound.runs.config import RunConfig, check_folder_name
    from lipbound.runs.store import check_target

    check_folder_name("out", out, "holds three runs and their figures")
    check_target(out)
    interruption.keeps(lambda: f"runs that were finished are kept in {out}")
    for model in DEMO:
        name = model.removeprefix("builtin:")
        ds = measured(
            RunConfig(model, samples=samples, out=out / f"{name}.zarr"), progress=not state["quiet"]
        )
        show(ds)
        for kind in ("pdf", "png"):
            heatmaps(ds, out / f"{name}.{kind}")
        typer.echo(f"saved {out / name}.zarr, drew {out / name}.pdf and .png\n")
