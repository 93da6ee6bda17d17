"""Which stored numbers and settings are not those of the computation: short hashes, kept with the run."""

import hashlib
import json
from typing import Any

import numpy as np
import xarray as xr

NAME = "checksum"
SETTINGS = (
    "lipbound", "model", "revision", "loaded", "commit", "architecture", "data", "data_fingerprint", "source", "preprocessing", "bounds", "map",
    "map_description", "method", "tol", "delta", "dtype", "device", "seed", "versions", "python", "date", "command", "samples", "exact_samples",
    "tokens", "capture_error",
)  # fmt: skip
"""Attributes that tables, figures and methods paragraphs quote."""


def own(ds: xr.Dataset) -> list[str]:
    """The variables that a run computed, whatever was added to it since."""
    bounds = list(ds.attrs["bounds"])
    names = ["exact", "exact_upper", "exact_l2", "exact_rounding", "exact_steps", "exact_converged", *bounds, *(f"{name}_sound" for name in bounds)]
    return [name for name in names if name in ds]


def checksums(ds: xr.Dataset) -> xr.DataArray:
    """First eight bytes of the sha256 over all values of a sample and layer, (sample, layer), int64.

    Guards against accidents (a value edited, a file damaged), not against somebody who computes it anew.
    """
    names = sorted(own(ds))
    arrays = [np.ascontiguousarray(ds[name].transpose("sample", "layer", ...).values) for name in names]
    values = np.zeros((ds.sizes["sample"], ds.sizes["layer"]), dtype=np.int64)
    for s, layer in np.ndindex(*values.shape):
        digest = hashlib.sha256()
        for name, array in zip(names, arrays, strict=True):
            digest.update(name.encode())
            digest.update(array[s, layer].tobytes())
        values[s, layer] = int.from_bytes(digest.digest()[:8], "big", signed=True)
    return xr.DataArray(values, dims=("sample", "layer"), attrs={"long_name": "hash of this sample's and layer's values when they were computed"})


def settings_checksum(ds: xr.Dataset) -> str:
    """sha256 over `SETTINGS`, the numbers of the layers and the lengths of the samples."""
    said: dict[str, Any] = {name: ds.attrs.get(name) for name in SETTINGS}
    said |= {name: ds.attrs[name] for name in ("variants", "not_applicable") if name in ds.attrs}
    said |= {"layer": ds["layer"].values.tolist(), "length": ds["length"].values.tolist()}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def altered(ds: xr.Dataset) -> list[tuple[int, int]] | None:
    """Positions (sample, layer) whose values are not those that were computed; None for a run without checksums."""
    if NAME not in ds:
        return None
    return [(int(s), int(layer)) for s, layer in np.argwhere(checksums(ds).values != ds[NAME].values)]
