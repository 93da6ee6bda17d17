"""Commands that compute by themselves: verify and demo."""

from pathlib import Path
from typing import Any

import typer

from lipbound.cli.application import app, echo_json, loading, show, state
from lipbound.cli.measuring import measured

DEMO = ("builtin:minilm", "builtin:gpt2", "builtin:vit")


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
    from lipbound.runs.config import RunConfig, check_folder_name
    from lipbound.runs.store import check_target

    check_folder_name("out", out, "holds three runs and their figures")
    check_target(out)
    state["kept"] = lambda: f"runs that were finished are kept in {out}"
    told: list[str] = []
    for model in DEMO:
        name = model.removeprefix("builtin:")
        ds = measured(
            RunConfig(model, samples=samples, out=out / f"{name}.zarr"), progress=not state["quiet"]
        )
        show(ds, told)
        for kind in ("pdf", "png"):
            heatmaps(ds, out / f"{name}.{kind}")
        typer.echo(f"saved {out / name}.zarr, drew {out / name}.pdf and .png\n")
