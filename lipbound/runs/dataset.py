"""What a run is made into: empty tables, then the labelled Dataset."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from lipbound.bounds.registry import get
from lipbound.jacobians.maps import WHOLE
from lipbound.runs.measure import LayerInfo


def allocate(names: Sequence[str], count: int, captured: Sequence[LayerInfo], *, certify: bool, map: str) -> dict[str, np.ndarray]:
    """Tables (samples, layers, heads) of everything a run holds: NaN, 0 or False where nothing is measured."""
    heads = 1 if map in WHOLE else max(layer.heads for layer in captured)
    shape = (count, len(captured), heads)
    tables: dict[str, np.ndarray] = {name: np.full(shape, np.nan) for name in ("exact", *(["exact_upper"] if certify else []), *names)}
    if any(get(name).exact == "exact_l2" for name in names):
        tables["exact_l2"] = np.full(shape, np.nan)
    tables["exact_rounding"] = np.full(shape, np.nan)
    tables["exact_steps"] = np.zeros(shape, dtype=np.int32)
    tables["exact_converged"] = np.zeros(shape, dtype=bool)
    tables |= {f"{name}_sound": np.zeros(shape, dtype=bool) for name in names}
    return tables


def dataset(tables: dict[str, np.ndarray], names: Sequence[str], captured: Sequence[LayerInfo], lengths: np.ndarray) -> xr.Dataset:
    """The tables with names, coordinates and labels."""
    dims = ("sample", "layer", "head")
    first = [name for name in ("exact", "exact_upper", "exact_l2", *names) if name in tables]
    order = first + [name for name in tables if name not in first]
    ds = xr.Dataset({name: (dims, tables[name]) for name in order})
    ds = ds.assign_coords(
        sample=np.arange(len(lengths)), layer=[layer.index for layer in captured], head=np.arange(ds.sizes["head"]),
        layer_name=("layer", np.array([layer.name for layer in captured], dtype=object)), length=("sample", lengths),
    )  # fmt: skip
    ds["exact"].attrs = {"label": "Exact", "long_name": "local Lipschitz constant (spectral norm of the Jacobian), lower end"}
    if "exact_upper" in ds:
        ds["exact_upper"].attrs = {"label": "Exact, upper end", "long_name": "probabilistic upper bound on the local Lipschitz constant"}
    if "exact_l2" in ds:
        ds["exact_l2"].attrs = {"label": "Exact, L2 attention", "long_name": "the same for L2 attention with these weights (Kim et al. 2021)"}
    for name in names:
        bound = get(name)
        ds[name].attrs = {
            "label": bound.label, "citation": bound.citation, "statement": bound.statement, "source": bound.source,
            "assumptions": bound.assumptions, "compared_with": bound.exact, "caveat": bound.caveat,
        }  # fmt: skip
    return ds
