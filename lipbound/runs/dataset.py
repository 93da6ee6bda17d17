"""A run's Dataset: empty tables, then the labelled variables with their provenance."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.bounds.registry import get
from lipbound.devices import device_name
from lipbound.jacobians.maps import MAPS, WHOLE
from lipbound.runs.checksums import sealed
from lipbound.runs.config import RunConfig
from lipbound.runs.measure import LayerInfo
from lipbound.schema import AXES, LAYER_WORDS, Extent, RunInfo, sound

if TYPE_CHECKING:
    from lipbound.runs.plan import Plan, Sources

PACKAGES = (
    *("lipbound", "torch", "transformers", "numpy"),
    *("scipy", "xarray", "tokenizers", "datasets"),
)
"""Packages that the numbers of a run can depend on."""
LABELS = {
    "exact": ("Exact", "local Lipschitz constant ({norm} norm of the Jacobian), lower end"),
    "exact_upper": ("Exact, upper end", "local Lipschitz constant, upper end"),
    "exact_l2": (
        "Exact, L2 attention",
        "the same for L2 attention with these weights (Kim et al. 2021)",
    ),
}
"""Labels and long names of exact norms."""


def allocate(plan: Plan) -> dict[str, np.ndarray]:
    """Make the tables (samples, layers, heads) of a run, of NaN, 0 or False."""
    spec, shape = plan.spec, plan.shape
    l2 = any(get(name).exact == "exact_l2" for name in spec.names)
    ends = ["exact", *["exact_upper"] * spec.encloses, *["exact_l2"] * l2]
    tables = {name: np.full(shape, np.nan) for name in (*ends, *spec.names)}
    tables["exact_steps"] = np.zeros(shape, dtype=np.int32)
    flags = ("exact_converged", *map(sound, spec.names))
    return tables | {name: np.zeros(shape, dtype=bool) for name in flags}


def assemble(
    config: RunConfig,
    sources: Sources,
    plan: Plan,
    tables: dict[str, np.ndarray],
    lengths: np.ndarray,
    error: float,
) -> xr.Dataset:
    """Make the finished run of filled tables, with provenance, checksums and audit.

    Args:
        config: what was asked for. sources: what it led to. plan: of the run.
        tables: filled.
        lengths: (samples,) tokens of the inputs.
        error: the largest error of the captures.
    """
    ds = dataset(tables, plan.spec.names, plan.layers, lengths, config.norm)
    if config.map in WHOLE:
        ds = ds.isel(head=0, drop=True)
    checkpoint, inputs, capturer = sources.checkpoint, sources.inputs, sources.capturer
    packages = versions()
    made = Extent(
        samples=plan.samples,
        exact_samples=plan.spec.exact_samples,
        layers=[layer.index for layer in plan.layers],
        heads=None if config.map in WHOLE else plan.shape[2],
        model_layers=plan.model_layers,
    )
    info = RunInfo(
        lipbound=packages["lipbound"],
        model=checkpoint.name,
        revision=checkpoint.revision,
        loaded=checkpoint.loaded,
        commit=checkpoint.commit,
        architecture=type(checkpoint.model).__name__,
        data=inputs.description,
        data_fingerprint=inputs.fingerprint,
        source=source(config),
        preprocessing=inputs.preprocessing,
        bounds=list(plan.spec.names),
        map=config.map,
        map_description=MAPS[config.map],
        norm=config.norm,
        tol=config.tol,
        **config.drawn,
        dtype=config.dtype,
        device=device_name(sources.device),
        versions=packages,
        python=sys.version.split()[0],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        samples=plan.samples,
        exact_samples=plan.spec.exact_samples,
        tokens=int(lengths.max()),
        capture_error=error,
        block=plan.block,
        variants=sorted(plan.variants),
        not_applicable=plan.not_applicable,
        notes=[*checkpoint.notes, *inputs.notes, *capturer.notes],
        quantization=checkpoint.quantization,
        configuration=checkpoint.configuration,
        made=made,
    )
    return audited(sealed(ds, info))


def audited(ds: xr.Dataset) -> xr.Dataset:
    """Give a run its audit, and how often each bound is below the exact norm."""
    found = audit(ds)
    counts = {name: entry["violations"] for name, entry in found.items()}
    return ds.assign_attrs(audit=found, violations=counts)


def dataset(
    tables: dict[str, np.ndarray],
    names: Sequence[str],
    layers: Sequence[LayerInfo],
    lengths: np.ndarray,
    norm: str = "frobenius",
) -> xr.Dataset:
    """Label tables (samples, layers, heads) with names, coordinates and what each bound is.

    Args:
        tables: in the order that the Dataset gets.
        names: registry names of the bounds among them.
        layers: what the layers are.
        lengths: (samples,) tokens of the inputs.
        norm: of the numbers.
    """
    ds = xr.Dataset({name: (AXES, table) for name, table in tables.items()})
    ds = ds.assign_coords(
        sample=np.arange(len(lengths)),
        layer=[layer.index for layer in layers],
        head=np.arange(ds.sizes["head"]),
        length=("sample", lengths),
    )
    ds = ds.assign_coords({word: ("layer", _words(layers, word)) for word in LAYER_WORDS})
    kind = "spectral" if norm == "frobenius" else norm
    for name, (label, long_name) in LABELS.items():
        if name in ds:
            ds[name].attrs = {"label": label, "long_name": long_name.format(norm=kind)}
    for name in names:
        bound = get(name)
        ds[name].attrs = {
            "label": bound.label,
            "citation": bound.citation,
            "statement": bound.statement,
            "statement_latex": bound.statement_latex,
            "source": bound.source,
            "assumptions": bound.assumptions,
            "compared_with": bound.exact,
            "caveat": bound.caveat,
        }
    return ds.set_coords([name for name in tables if tables[name].dtype == bool])


def _words(layers: Sequence[LayerInfo], word: str) -> np.ndarray:
    """One of `LAYER_WORDS` of every layer."""
    name = "name" if word == "layer_name" else word
    return np.array([getattr(layer, name) for layer in layers], dtype=object)


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of packages, by default of those that numbers can depend on."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if "torch" in found:
        found["torch"] = str(torch.__version__)  # with what it was built for
    return found


def source(config: RunConfig) -> dict[str, Any]:
    """Record where model and data are found again, paths absolute.

    ``model`` is None for one in memory; ``data``, ``split``, ``column`` and ``max_length`` are what
    `lipbound.models.inputs.prepare` was given: ``data`` None for the default, False for objects in
    memory. The others are there where they were given.
    """
    data = config.data
    named = isinstance(data, str | Path)
    optional = {
        "gguf_file": config.gguf_file,
        "shuffle": config.shuffle,
        **{
            name: one if (one := getattr(config, name)) in (None, "none") else absolute(one)
            for name in ("adapter", "tokenizer", "processor")
        },
    }
    return {
        "model": absolute(config.model) if isinstance(config.model, str | Path) else None,
        "data": absolute(data) if named else None if data is None else False,
        "split": config.split,
        "column": config.column,
        "max_length": config.max_length,
    } | {name: value for name, value in optional.items() if value is not None}


def absolute(name: str | Path) -> str:
    """Resolve a path that is there, so that it leads to the same files from elsewhere.

    Any other name, or text, stays as it is.
    """
    try:
        path = Path(name).expanduser()
        return str(path.resolve()) if path.exists() else str(name)
    except (OSError, ValueError, RuntimeError):
        return str(name)
