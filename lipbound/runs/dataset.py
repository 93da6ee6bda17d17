"""What a run is made into: empty tables, then the labelled Dataset with its provenance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.bounds.registry import get
from lipbound.devices import device_name
from lipbound.jacobians.maps import MAPS, WHOLE
from lipbound.runs.config import RunConfig
from lipbound.runs.measure import LayerInfo
from lipbound.runs.plan import Plan, Sources
from lipbound.runs.provenance import provenance, sealed


def allocate(plan: Plan) -> dict[str, np.ndarray]:
    """Tables (samples, layers, heads) of everything a run holds: NaN, 0 or False where nothing is
    measured."""
    spec, shape = plan.spec, plan.shape
    names = spec.names
    tables: dict[str, np.ndarray] = {
        name: np.full(shape, np.nan)
        for name in ("exact", *(["exact_upper"] if spec.encloses else []), *names)
    }
    if any(get(name).exact == "exact_l2" for name in names):
        tables["exact_l2"] = np.full(shape, np.nan)
    tables["exact_steps"] = np.zeros(shape, dtype=np.int32)
    tables["exact_converged"] = np.zeros(shape, dtype=bool)
    tables |= {f"{name}_sound": np.zeros(shape, dtype=bool) for name in names}
    return tables


def assemble(
    config: RunConfig,
    sources: Sources,
    plan: Plan,
    tables: dict[str, np.ndarray],
    lengths: np.ndarray,
    error: float,
) -> xr.Dataset:
    """The finished run: labelled tables with provenance, checksums and audit.

    Args:
        config, sources, plan: of the run.
        tables: filled.
        lengths: (samples,) tokens of the inputs.
        error: the largest error of the captures.
    """
    ds = dataset(tables, plan.spec.names, plan.layers, lengths, config.norm)
    if config.map in WHOLE:
        ds = ds.isel(head=0, drop=True)
    settled = {
        "bounds": plan.spec.names,
        "map_description": MAPS[config.map],
        "device": device_name(sources.device),
    }
    ds.attrs = provenance(config, sources.checkpoint, sources.inputs, **settled) | {
        "samples": plan.samples,
        "exact_samples": plan.spec.exact_samples,
        "tokens": int(lengths.max()),
        "capture_error": error,
        "block": plan.block,
        "variants": sorted(plan.variants),
        "not_applicable": plan.not_applicable,
    }
    if sources.capturer.notes:
        ds.attrs["notes"] = [*ds.attrs.get("notes", []), *sources.capturer.notes]
    ds = sealed(ds, made(plan, config.map))
    ds.attrs["audit"] = audit(ds)
    ds.attrs["violations"] = {
        name: entry["violations"] for name, entry in ds.attrs["audit"].items()
    }
    return ds


def made(plan: Plan, map: str) -> dict[str, Any]:
    """The extent of a whole run, recorded for whoever sees a part of it."""
    return {
        "samples": plan.samples,
        "exact_samples": plan.spec.exact_samples,
        "layers": [layer.index for layer in plan.layers],
        "heads": None if map in WHOLE else plan.shape[2],
        "model_layers": plan.model_layers,
    }


def dataset(
    tables: dict[str, np.ndarray],
    names: Sequence[str],
    captured: Sequence[LayerInfo],
    lengths: np.ndarray,
    norm: str = "frobenius",
) -> xr.Dataset:
    """The tables with names, coordinates and labels."""
    dims = ("sample", "layer", "head")
    first = [name for name in ("exact", "exact_upper", "exact_l2", *names) if name in tables]
    order = first + [name for name in tables if name not in first]
    ds = xr.Dataset({name: (dims, tables[name]) for name in order})
    ds = ds.assign_coords(
        sample=np.arange(len(lengths)),
        layer=[layer.index for layer in captured],
        head=np.arange(ds.sizes["head"]),
        layer_name=("layer", np.array([layer.name for layer in captured], dtype=object)),
        length=("sample", lengths),
    )
    kind = "spectral" if norm == "frobenius" else norm
    ds["exact"].attrs = {
        "label": "Exact",
        "long_name": f"local Lipschitz constant ({kind} norm of the Jacobian), lower end",
    }
    if "exact_upper" in ds:
        ds["exact_upper"].attrs = {
            "label": "Exact, upper end",
            "long_name": "local Lipschitz constant, upper end",
        }
    if "exact_l2" in ds:
        ds["exact_l2"].attrs = {
            "label": "Exact, L2 attention",
            "long_name": "the same for L2 attention with these weights (Kim et al. 2021)",
        }
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
