"""Hashes that a run is sealed with, which tell whether it was changed since.

Hashes guard against accidents (a value edited, a file damaged), not against somebody who computes
them anew.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import xarray as xr

from lipbound import schema
from lipbound.bounds.audit import audit
from lipbound.errors import StoreError

HASHED = {one.name for one in fields(schema.RunInfo)} | {"audit", "violations"}
HASHED -= {"block", "block_bytes", "settings_checksum"}
"""Attributes that enter the hash of the settings."""
OF_BOUND = ["label", "citation", "statement", "statement_latex", "source", "assumptions", "caveat"]
"""What a bound's variable says about it."""
SAID = (*OF_BOUND, "compared_with", "long_name")
"""Attributes of variables that are sealed, each variable's together."""


def sealed(ds: xr.Dataset, info: schema.RunInfo) -> xr.Dataset:
    """Give a finished run its attributes, audit, and checksums of settings and of every place.

    Args:
        ds: its variables and coordinates.
        info: what it says about itself; the names of its variables, and how many tokens its longest
            sample has, are filled in.
    """
    ds = ds.assign_attrs(info.attributes() | {"tokens": int(ds["length"].max())})
    said = json.dumps([ds.attrs.get(name) for name in schema.IDENTITY])
    identity = hashlib.sha256(said.encode()).hexdigest()
    ds.attrs["made"] = asdict(replace(info.made, variables=schema.own(ds), identity=identity))
    found = audit(ds)
    ds.attrs |= {"audit": found, "violations": {k: one["violations"] for k, one in found.items()}}
    ds.attrs["settings_checksum"] = settings_checksum(ds.attrs)
    ds[schema.CHECKSUM] = checksums(ds)
    return ds.set_coords(schema.flags(ds))


def settings_checksum(attrs: Mapping[str, Any]) -> str:
    """Hash (sha256) over what a run says about itself, whatever part of it is there."""
    said = {name: attrs[name] for name in HASHED if name in attrs}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def settings_altered(ds: xr.Dataset) -> bool:
    """Tell whether settings, of the run or of those put together, are not as they were recorded."""
    every = ds.attrs, *ds.attrs.get("runs", [])
    return any(settings_checksum(one) != one.get("settings_checksum") for one in every)


def checksums(ds: xr.Dataset) -> xr.DataArray:
    """Four bytes of a hash over everything that stands at a place, int32, as ``exact``.

    Over the values of all variables, the numbers of sample, layer and head, of the step of training
    if there is one, the layer's words (`LAYER_WORDS`), the sample's length, and what decides the
    numbers of the run that it is from (`IDENTITY`); so every part of a run can be checked, and
    places of other runs do not pass.
    """
    if schema.STEP in ds.dims:
        steps = [checksums(ds.isel({schema.STEP: i})) for i in range(ds.sizes[schema.STEP])]
        return xr.concat(steps, ds[schema.STEP]).transpose(*ds["exact"].dims)
    sizes = dict(ds["exact"].sizes)
    names = sorted(schema.own(ds))
    sample = schema.RUN_SAMPLE if schema.RUN_SAMPLE in ds.variables else "sample"
    numbers = [sample, "layer", "length", *(n for n in ("head", schema.STEP) if n in ds.coords)]
    # neither the type on disk nor the kind of NaN or zero changes a column
    given: Any = ds.variables
    columns = [given[name].astype("<f8").set_dims(sizes) for name in [*names, *numbers]]
    rows = np.stack([one.values for one in columns], -1) + 0.0
    rows[np.isnan(rows)] = np.nan
    shape = rows.shape[:-1]
    run = ds[schema.RUN].transpose("sample", "layer").values if schema.RUN in ds.variables else 0
    run = np.broadcast_to(run, shape[:2])
    identities = [str(one["made"]["identity"]) for one in ds.attrs.get("runs", [ds.attrs])]
    words = [ds[name].values for name in schema.LAYER_WORDS if name in ds.variables]
    of_layers = list(zip(*words, strict=True)) or [("",)] * shape[1]
    values = np.zeros(shape, dtype=np.int32)
    for s, layer in np.ndindex(*shape[:2]):
        said = [identities[int(run[s, layer])], *map(str, of_layers[layer]), *names]
        start = hashlib.sha256(json.dumps(said).encode())
        for place in np.ndindex(*shape[2:]):
            digest = start.copy()
            digest.update(rows[s, layer][place].tobytes())
            first = digest.digest()[:4]
            values[(s, layer, *place)] = int.from_bytes(first, "little", signed=True)
    long_name = "hash of what stood at this place when it was computed"
    return xr.DataArray(values, dims=[*sizes], attrs={"long_name": long_name, "said": sayings(ds)})


def sayings(ds: xr.Dataset) -> dict[str, str]:
    """Hash over what each variable of a run says about itself, by its name."""
    of = {name: ds.variables[name].attrs for name in schema.own(ds)}
    said = {name: [attrs.get(word) for word in SAID] for name, attrs in of.items()}
    return {n: hashlib.sha256(json.dumps(one).encode()).hexdigest()[:16] for n, one in said.items()}


def altered(ds: xr.Dataset) -> list[tuple[int, int]]:
    """Positions (sample, layer) that are not as they were computed, as far as checksums tell."""
    if schema.CHECKSUM not in ds.variables or schema.lacks_variables(ds):
        return []
    wrong = checksums(ds) != ds[schema.CHECKSUM].transpose(*ds["exact"].dims).variable
    places = wrong.any([dim for dim in wrong.dims if dim not in schema.AXES[:2]]).values
    return [(int(s), int(layer)) for s, layer in np.argwhere(places)]


def edited(ds: xr.Dataset) -> bool | None:
    """Tell whether something is not as it was computed; None where variables were left out.

    Parts of a run (``ds.isel(sample=[0])``) are as they were computed; arithmetic, and runs joined
    by ``xarray.concat``, whose attributes are those of one of them, are not.
    """
    if settings_altered(ds) or schema.CHECKSUM not in ds.variables or schema.repeated(ds):
        return True
    return None if schema.lacks_variables(ds) else bool(altered(ds))


def check_whole(ds: xr.Dataset, name: str) -> None:
    """Refuse a run, under its name in messages, that is not as it was computed.

    Raises:
        StoreError: it was damaged or edited, or lacks variables.
    """
    if found := faults(ds):
        raise StoreError(f"{name} is not as it was computed: {' and '.join(found)}; give another")


def faults(ds: xr.Dataset) -> list[str]:
    """Describe what is no longer as it was computed: words of variables, settings, numbers."""
    was = ds[schema.CHECKSUM].attrs.get("said", {}) if schema.CHECKSUM in ds.variables else {}
    said = [repr(name) for name, now in sayings(ds).items() if was.get(name, now) != now]
    found = [f"what {', '.join(said)} says (its attributes) is not what it said"] if said else []
    if settings_altered(ds):
        found.append("its settings (attributes) are not those that were recorded")
    if schema.CHECKSUM not in ds.variables:
        found.append("the checksums of its numbers are missing")
    elif schema.lacks_variables(ds):
        found.append("variables that it was made with were left out")
    elif places := altered(ds):
        where = [f"sample {int(ds['sample'][s])} layer {int(ds['layer'][i])}" for s, i in places]
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        every = len(where) == ds.sizes["sample"] * ds.sizes["layer"]
        at = "every sample and layer" if every else ", ".join(where[:3]) + more
        found.append(f"its numbers at {at} are not those that were computed")
    return found
