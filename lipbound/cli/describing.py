"""Commands that say what there is: bounds, models and info."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from lipbound.cli.application import app, echo_folded, echo_json
from lipbound.formatting import plain
from lipbound.schema import CHECKSUM, NORMS, is_diff


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
    from lipbound.models.sources.catalogue import BUILTINS, describe

    found = [describe(name) for name in BUILTINS]
    if json:
        echo_json([asdict(one) for one in found])
        return
    for one in found:
        if one.missing:
            typer.echo(f"{one.name}\n    not installed: {one.missing}")
            continue
        typer.echo(f"{one.name}: {plain(one.title)}")
        typer.echo(
            f"    {one.architecture}, {one.layers} layers x {one.heads} heads, width "
            f"{one.width}; reads {one.reads}"
        )
        typer.echo(f"    licence {one.license}; {one.origin}")
    typer.echo(
        "Any other model: a hub id such as owner/name, a directory with config.json and weights, "
        "or a GGUF file."
    )


@app.command(epilog="Example: lipbound info minilm.zarr")
def info(run: Path, *, json: bool = False) -> None:
    """Say what a stored run holds: model, data, settings, bounds, and whether it was altered.

    Args:
        run: A run saved by `lipbound compare --out`.
        json: JSON, for programs.
    """
    from lipbound.reporting.diffs import diff_facts
    from lipbound.reporting.labels import fact_words, facts
    from lipbound.runs.dataset import damage
    from lipbound.runs.pair import diff_damage
    from lipbound.runs.store import diff_of, load

    ds = load(run, damaged="accept")
    of_two = is_diff(ds)
    what = (diff_damage if of_two else damage)(ds)
    files = (file for file in run.expanduser().rglob("*") if file.is_file())
    found = {"run": str(run)} | (diff_facts(diff_of(ds)) if of_two else facts(ds))
    found["bytes on disk"] = sum(file.stat().st_size for file in files)
    found["checksums"] = what or ("hold" if of_two or CHECKSUM in ds else "none")
    if json:
        echo_json(found)
        return
    wide = max(map(len, found)) + 2
    for name, value in found.items():
        typer.echo(f"{name:{wide}}{fact_words(value) or 'none'}")
