"""Which stored numbers are not those that were computed: a short hash for every layer of every sample."""

import hashlib

import numpy as np
import xarray as xr

NAME = "checksum"


def checksums(ds: xr.Dataset) -> xr.DataArray:
    """First eight bytes of the sha256 over all values of a sample and layer, (sample, layer), int64.

    Guards against accidents (a value edited, a file damaged), not against somebody who computes it anew.
    """
    names = sorted(str(name) for name in ds.data_vars if name != NAME and {"sample", "layer"} <= set(ds[name].dims))
    arrays = [np.ascontiguousarray(ds[name].transpose("sample", "layer", ...).values) for name in names]
    values = np.zeros((ds.sizes["sample"], ds.sizes["layer"]), dtype=np.int64)
    for s, layer in np.ndindex(*values.shape):
        digest = hashlib.sha256()
        for name, array in zip(names, arrays, strict=True):
            digest.update(name.encode())
            digest.update(array[s, layer].tobytes())
        values[s, layer] = int.from_bytes(digest.digest()[:8], "big", signed=True)
    return xr.DataArray(values, dims=("sample", "layer"), attrs={"long_name": "hash of this sample's and layer's values when they were computed"})


def altered(ds: xr.Dataset) -> list[tuple[int, int]] | None:
    """Positions (sample, layer) whose values are not those that were computed; None for a run without checksums."""
    if NAME not in ds:
        return None
    return [(int(s), int(layer)) for s, layer in np.argwhere(checksums(ds).values != ds[NAME].values)]
