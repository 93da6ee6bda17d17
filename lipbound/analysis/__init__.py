"""Questions beyond one run."""

from collections.abc import Sequence
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from lipbound.devices import device_name, versions
from lipbound.models.checkpoint import Checkpoint


def tabled(found: Sequence[dict[str, Tensor]], *axes: str) -> xr.Dataset:
    """Put what was found in each layer into a Dataset.

    Args:
        found: tensors by name, for each layer.
        axes: names of their axes; a tensor with fewer axes has the first of these.

    Returns:
        Dataset of the same names, with dims layer and ``axes``.
    """
    tables = {name: torch.stack([one[name].cpu() for one in found]) for name in found[0]}
    named = {name: (("layer", *axes[: t.ndim - 1]), t.numpy()) for name, t in tables.items()}
    return xr.Dataset(named)


def annotated(ds: xr.Dataset, variables: dict[str, str], layers: Sequence[int]) -> xr.Dataset:
    """Return these variables of a study, each with its description, and the numbers of layers."""
    ds = ds[list(variables)].assign_coords(layer=list(layers))
    for name, text in variables.items():
        ds[name].attrs["description"] = text
    return ds


def provenance(
    checkpoint: Checkpoint | None, data: str, device: str, dtype: str, seed: int
) -> dict[str, Any]:
    """Return model, data, versions and settings, for the attributes of a Dataset."""
    of = {"model": checkpoint.name, "revision": checkpoint.revision} if checkpoint else {}
    how = {"dtype": dtype, "device": device_name(device), "seed": seed, "data": data}
    return of | how | {"versions": versions(), "lipbound": versions()["lipbound"]}
