"""Where the numbers of a run come from, and short hashes that tell whether they are still those
that were computed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Hashable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from lipbound.bounds.audit import norm_of

if TYPE_CHECKING:  # reading a run needs no torch
    from lipbound.models.checkpoint import Inputs
    from lipbound.models.checkpoints import Checkpoint
    from lipbound.runs.config import RunConfig

CHECKSUM = "checksum"
DRAWN = ("method", "delta", "seed")
"""Attributes about exact norms found from random vectors, in runs in the Frobenius norm alone."""
SETTINGS = (
    "lipbound",
    "model",
    "revision",
    "loaded",
    "commit",
    "architecture",
    "data",
    "data_fingerprint",
    "source",
    "preprocessing",
    "bounds",
    "map",
    "map_description",
    "method",
    "tol",
    "delta",
    "dtype",
    "device",
    "seed",
    "versions",
    "python",
    "date",
    "command",
    "samples",
    "exact_samples",
    "tokens",
    "capture_error",
    "made",
    "runs",
)
"""Attributes that tables, figures and methods paragraphs quote, or need."""
IDENTITY = (
    "revision",
    "data_fingerprint",
    "map",
    "norm",
    "method",
    "tol",
    "delta",
    "seed",
    "dtype",
)
"""Those that decide what the numbers are."""
COORDINATES = ("sample", "layer", "head", "layer_name", "length")
RUN, RUN_SAMPLE = "run", "run_sample"
"""Coordinates of runs that `lipbound.concat` put together: which of attrs["runs"] a place is from,
and the number of its sample there."""


def _names(ds: xr.Dataset) -> list[str]:
    """Everything that a run with these bounds can hold."""
    bounds = list(ds.attrs["bounds"])
    return [
        "exact",
        "exact_upper",
        "exact_l2",
        "exact_steps",
        "exact_converged",
        *bounds,
        *(f"{name}_sound" for name in bounds),
    ]


def own(ds: xr.Dataset) -> list[str]:
    """The variables that a run computed, whatever was added to it since."""
    return [name for name in _names(ds) if name in ds.variables]


def flags(ds: xr.Dataset) -> list[str]:
    """The variables that are annotations of places, not quantities: what is true or false,
    checksums, and where a place is from.

    They are coordinates, so that arithmetic leaves them alone.
    """
    names = [
        "exact_converged",
        *(f"{name}_sound" for name in ds.attrs["bounds"]),
        CHECKSUM,
        RUN,
        RUN_SAMPLE,
    ]
    return [name for name in names if name in ds.variables]


def lacks_variables(ds: xr.Dataset) -> bool:
    """Tell whether variables of the run were left out, so that checksums, which are over all of
    them, say nothing."""
    return set(ds.attrs["made"]["variables"]) - set(own(ds)) != set()


def checksums(ds: xr.Dataset) -> xr.DataArray:
    """Four bytes of a hash over everything that stands at a place, int32, with the axes of
    ``exact``.

    Over the values of all variables, the numbers of sample, layer and head, the layer's name, the
    sample's length, and what decides the numbers of the run that it is from (`IDENTITY`); so every
    part of a run can be checked, and places of other runs do not pass. Guards against accidents (a
    value edited, a file damaged), not against somebody who computes it anew.
    """
    dims = ds["exact"].dims
    shape = tuple(ds.sizes[dim] for dim in dims)
    names = sorted(own(ds))
    sample = RUN_SAMPLE if RUN_SAMPLE in ds.variables else "sample"
    columns = [_column(ds, name, dims) for name in names]
    columns += [
        _column(ds, name, dims)
        for name in (sample, "layer", "length", *(["head"] if "head" in dims else []))
    ]
    rows = np.ascontiguousarray(np.stack(columns, axis=-1)).reshape(*shape, -1)
    from_run = np.broadcast_to(
        ds[RUN].transpose("sample", "layer").values if RUN in ds.variables else 0, shape[:2]
    )
    identities = [
        str(one.get("made", {}).get("identity")) for one in ds.attrs.get("runs", [ds.attrs])
    ]
    layer_names = ds["layer_name"].values if "layer_name" in ds.variables else [""] * shape[1]
    values = np.zeros(shape, dtype=np.int32)
    for s, layer in np.ndindex(*shape[:2]):
        said = [identities[int(from_run[s, layer])], str(layer_names[layer]), *names]
        start = hashlib.blake2b(json.dumps(said).encode(), digest_size=4)
        for place in np.ndindex(*shape[2:]):
            digest = start.copy()
            digest.update(rows[(s, layer, *place)].tobytes())
            values[(s, layer, *place)] = int.from_bytes(digest.digest(), "little", signed=True)
    return xr.DataArray(
        values,
        dims=dims,
        attrs={"long_name": "hash of what stood at this place when it was computed"},
    )


def _column(ds: xr.Dataset, name: str, dims: tuple[Hashable, ...]) -> np.ndarray:
    """A variable at every place, as eight bytes that neither its type on disk nor the kind of NaN
    or zero changes."""
    if name not in ds.variables:
        return np.zeros([ds.sizes[dim] for dim in dims], dtype=np.int64)
    sizes = {dim: ds.sizes[dim] for dim in dims}
    widened = ds.variables[name].set_dims(sizes)  # type: ignore[no-untyped-call]
    values = widened.transpose(*dims).values
    if values.dtype.kind != "f":
        return values.astype("<i8")
    values = values.astype("<f8") + 0.0
    return np.where(np.isnan(values), np.nan, values).view("<i8")


def settings_checksum(ds: xr.Dataset) -> str:
    """Hash (sha256) over `SETTINGS`, which hold what the run was made with, whatever part of it is
    there."""
    said: dict[str, Any] = {name: ds.attrs.get(name) for name in SETTINGS}
    said |= {
        name: ds.attrs[name]
        for name in ("variants", "not_applicable", "notes", "quantization", "configuration")
        if name in ds.attrs
    }
    said |= {"norm": norm_of(ds)} if norm_of(ds) != "frobenius" else {}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def sealed(ds: xr.Dataset, made: dict[str, Any]) -> xr.Dataset:
    """A finished run with the record of what it was made with, and checksums of its settings and of
    every place."""
    identity = hashlib.sha256(
        json.dumps([ds.attrs.get(name) for name in IDENTITY]).encode()
    ).hexdigest()
    ds = ds.assign_attrs(made=made | {"variables": own(ds), "identity": identity})
    ds.attrs["settings_checksum"] = settings_checksum(ds)
    ds[CHECKSUM] = checksums(ds)
    return ds.set_coords(flags(ds))


def settings_altered(ds: xr.Dataset) -> bool:
    """Tell whether the settings are not those that were recorded; False for a run that has no
    checksum of them, or one of an earlier version."""
    runs = [xr.Dataset(attrs=one) for one in ds.attrs.get("runs", [])]
    return _has_checksums(ds) and any(
        settings_checksum(one) != one.attrs.get("settings_checksum") for one in (ds, *runs)
    )


def _has_checksums(ds: xr.Dataset) -> bool:
    """Tell whether there is a checksum of the settings as this version writes it; earlier ones did
    not record what the run was made with."""
    return "settings_checksum" in ds.attrs and "made" in ds.attrs


def altered(ds: xr.Dataset) -> list[tuple[int, int]] | None:
    """Positions (sample, layer) where something is not as it was computed; None for a run without
    checksums, or with those of an earlier version."""
    if CHECKSUM not in ds.variables or "made" not in ds.attrs:
        return None
    wrong = checksums(ds) != ds[CHECKSUM].transpose(*ds["exact"].dims).variable
    return [
        (int(s), int(layer))
        for s, layer in np.argwhere(
            wrong.any([dim for dim in wrong.dims if dim not in ("sample", "layer")]).values
        )
    ]


def damage(ds: xr.Dataset) -> str:
    """What of a run is no longer as it was computed, as the end of a sentence; empty where
    everything is, or where the run has no checksums."""
    said = []
    if settings_altered(ds):
        said.append("its settings (attributes) are not those that were recorded")
    if _has_checksums(ds) and CHECKSUM not in ds.variables:
        said.append("the checksums of its numbers are missing")
    if places := altered(ds):
        count = ds.sizes["sample"] * ds.sizes["layer"]
        first = ", ".join(
            f"sample {int(ds['sample'][s])} layer {int(ds['layer'][i])}" for s, i in places[:3]
        )
        where = (
            "at every sample and layer"
            if len(places) == count
            else f"at {first}"
            if len(places) <= 3
            else f"at {len(places)} places ({first}, ...)"
        )
        empty = [name for name in own(ds) if all(_empty(ds, name, *place) for place in places)]
        lost = f" (no value of {', '.join(empty)} is there)" if empty else ""
        wrong = strange(ds)
        what = (
            f"its coordinates {', '.join(wrong)}, and with them its numbers"
            if wrong
            else "its numbers"
        )
        said.append(f"{what} {where} are not those that were computed{lost}")
    return " and ".join(said)


def strange(ds: xr.Dataset) -> list[str]:
    """Coordinates with values that the run cannot have had: numbers that are there twice or were
    not measured, empty names, no length."""
    made = ds.attrs["made"]
    heads = made["heads"]
    known = {"sample": range(made["samples"]), "layer": made["layers"], "head": range(heads or 0)}
    wrong = [
        name
        for name, numbers in known.items()
        if name in ds.variables and not set(ds[name].values.tolist()) <= set(numbers)
    ]
    wrong += repeated(ds)
    wrong += (
        ["layer_name"]
        if "layer_name" not in ds.variables or not all(map(str, ds["layer_name"].values))
        else []
    )
    wrong += ["length"] if "length" not in ds.variables or bool((ds["length"] < 1).any()) else []
    return [name for name in COORDINATES if name in wrong]


def repeated(ds: xr.Dataset) -> list[str]:
    """Axes on which a sample, layer or head is there twice, as after joining runs by
    ``xarray.concat``."""
    return [
        axis
        for axis in ("sample", "layer", "head")
        if axis in ds.dims and len(np.unique(ds[axis].values)) < ds.sizes[axis]
    ]


def _empty(ds: xr.Dataset, name: str, sample: int, layer: int) -> bool:
    """Whether a variable has no value at a place where it should have one."""
    if ds[name].dtype.kind != "f" or (
        name.startswith("exact") and sample >= int(ds.attrs["exact_samples"])
    ):
        return False
    return bool(ds[name].isel(sample=sample, layer=layer).isnull().all())


def again(ds: xr.Dataset) -> str:
    """How to compute a run again, as part of a sentence: its own command where that was one of
    ours, each word quoted."""
    try:
        words = shlex.split(str(ds.attrs.get("command", "")))
    except ValueError:
        words = []
    if words[:2] in (["lipbound", "compare"], ["lipbound", "demo"]):
        return f"move it away, and `{shlex.join(words)}` computes it again"
    return "compute it again with the arguments that it was made with"


def versions() -> dict[str, str]:
    """Versions of the packages that numbers can depend on."""
    packages = (
        "lipbound",
        "torch",
        "transformers",
        "numpy",
        "scipy",
        "xarray",
        "tokenizers",
        "datasets",
    )
    return {name: package_version(name) for name in packages}


def package_version(name: str) -> str:
    """The version of a package; PackageNotFoundError where it is not installed. Torch's has what it
    was built for, which metadata may leave out."""
    if name != "torch":
        return importlib.metadata.version(name)
    import torch

    return str(torch.__version__)


def absolute(name: str | Path) -> str:
    """A path that is there in full, so that it leads to the same files from elsewhere; any other
    name, or text, as it is."""
    try:
        path = Path(name).expanduser()
        return str(path.resolve()) if path.exists() else str(name)
    except (OSError, ValueError, RuntimeError):
        return str(name)


def source(config: RunConfig) -> dict[str, Any]:
    """Where model and data are found again, paths absolute.

    ``model`` is None for one in memory; ``data``, ``split``, ``column`` and ``max_length`` are what
    `lipbound.models.inputs.prepare` was given: ``data`` None for the default, False for objects in
    memory. ``shuffle``, ``tokenizer``, ``processor`` and ``gguf_file`` are there where they were
    given.
    """
    data = config.data
    named = isinstance(data, (str, Path))
    return {
        "model": absolute(config.model) if isinstance(config.model, (str, Path)) else None,
        "data": absolute(data) if named else None if data is None else False,
        "split": config.split,
        "column": config.column,
        "max_length": config.max_length,
    } | _where_there(
        gguf_file=config.gguf_file,
        shuffle=config.shuffle,
        adapter=_found_again(config.adapter),
        tokenizer=_found_again(config.tokenizer),
        processor=_found_again(config.processor),
    )


def _found_again(name: Any) -> str | None:
    """The absolute path, or hub id, of a companion of a model; "none" is no path."""
    return name if name in (None, "none") else absolute(name)


def provenance(
    config: RunConfig, checkpoint: Checkpoint, inputs: Inputs, **settled: Any
) -> dict[str, Any]:
    """Where the numbers come from: model, data, versions, settings, date and command.

    Args:
        config: of the run.
        checkpoint, inputs: what it led to.
        settled: what was settled on the way: ``bounds`` that apply, ``map_description``, ``device``
            by its name.
    """
    packages = versions()
    return {
        "lipbound": packages["lipbound"],
        "model": checkpoint.name,
        "revision": checkpoint.revision,
        "loaded": checkpoint.loaded,
        "commit": checkpoint.commit,
        "architecture": type(checkpoint.model).__name__,
        "data": inputs.description,
        "data_fingerprint": inputs.fingerprint,
        "source": source(config),
        "preprocessing": inputs.preprocessing,
        "bounds": list(settled["bounds"]),
        "map": config.map,
        "map_description": settled["map_description"],
        "norm": config.norm,
        "tol": config.tol,
        **config.drawn,
        "dtype": config.dtype,
        "device": settled["device"],
        "versions": packages,
        "python": sys.version.split()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    } | _where_there(
        quantization=checkpoint.quantization,
        configuration=checkpoint.configuration,
        notes=[*checkpoint.notes, *inputs.notes],
    )


def _where_there(**attributes: Any) -> dict[str, Any]:
    """Attributes that have something to tell."""
    return {name: value for name, value in attributes.items() if value}
