"""Commands that say what there is: bounds, models and info."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lipbound.cli.application import app, echo_folded, echo_json
from lipbound.formatting import number, plain
from lipbound.schema import CHECKSUM, NORMS, Contents

if TYPE_CHECKING:
    import xarray as xr


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
    from lipbound.runs.store import load

    found = facts(load(run, damaged="accept"), run)
    if json:
        echo_json(found)
        return
    wide = max(map(len, found)) + 2
    for name, value in found.items():
        typer.echo(f"{name:{wide}}{plain(_words(value))}")


def facts(ds: xr.Dataset, path: Path) -> dict[str, Any]:
    """Contents and settings of a run, by names in words."""
    from lipbound.bounds.audit import audit
    from lipbound.reporting.labels import model_name, norm_words
    from lipbound.runs.checksums import damage

    a, exact, there = ds.attrs, ds["exact"], Contents.of(ds)
    entries = audit(ds)
    return {
        "run": str(path),
        "model": a["model"],
        "called": model_name(ds),
        "architecture": a["architecture"],
        "revision": a["revision"],
        "quantization": a.get("quantization"),
        "data": a["data"],
        "data fingerprint": a["data_fingerprint"],
        "preprocessing": a.get("preprocessing", ""),
        "samples": there.samples,
        "exact on samples": there.exact_samples,
        "tokens at most": there.tokens,
        "layers": ds["layer"].values.tolist(),
        "layers of the model": there.made.model_layers,
        "heads": int(ds.sizes["head"]) if "head" in ds.dims else "none: whole layers",
        "map": a["map_description"],
        "norm": norm_words(ds),
        "exact from": float(exact.min()),
        "exact to": float(exact.max()),
        "not converged": there.norms - there.closed,
        "bounds": list(a["bounds"]),
        "below exact": {
            name: entry["violations"] for name, entry in entries.items() if entry["violations"]
        },
        "left out": list(a.get("not_applicable", {})),
        "method": a.get("method"),
        "tol": float(a["tol"]),
        "delta": float(a["delta"]) if a.get("delta") else None,
        "dtype": a["dtype"],
        "device": a["device"],
        "seed": a.get("seed"),
        "date": a["date"],
        "command": a["command"],
        "versions": a["versions"],
        "bytes on disk": sum(
            file.stat().st_size for file in path.expanduser().rglob("*") if file.is_file()
        ),
        "checksums": damage(ds) or ("hold" if CHECKSUM in ds else "none"),
    }


def _words(value: Any) -> str:
    """Write a value on one line."""
    if isinstance(value, dict):
        value = [f"{key} {item}" for key, item in value.items()]
    if isinstance(value, list) or value is None:
        return ", ".join(map(str, value or ())) or "none"
    short = isinstance(value, float) and (value == 0 or value >= 1e-2)
    return number(value, 4) if short else str(value)
