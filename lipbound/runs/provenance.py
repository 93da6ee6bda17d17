"""Where the numbers of a run come from, and short hashes that tell whether they are still those that were computed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from lipbound.bounds.audit import norm_of

if TYPE_CHECKING:  # reading a run needs no torch
    from lipbound.models.batch import Inputs
    from lipbound.models.checkpoints import Checkpoint
    from lipbound.runs.config import RunConfig

CHECKSUM = "checksum"
FORMER = "exact_rounding"
"""Runs of before 0.1 hold the size of the rounding errors of their exact norms, which are now inside the enclosures."""
DRAWN = ("method", "delta", "seed")
"""Attributes about exact norms found from random vectors, in runs in the Frobenius norm alone."""
SETTINGS = (
    "lipbound", "model", "revision", "loaded", "commit", "architecture", "data", "data_fingerprint", "source", "preprocessing", "bounds", "map",
    "map_description", "method", "tol", "delta", "dtype", "device", "seed", "versions", "python", "date", "command", "samples", "exact_samples",
    "tokens", "capture_error",
)  # fmt: skip
"""Attributes that tables, figures and methods paragraphs quote."""


def own(ds: xr.Dataset) -> list[str]:
    """The variables that a run computed, whatever was added to it since."""
    bounds = list(ds.attrs["bounds"])
    names = ["exact", "exact_upper", "exact_l2", FORMER, "exact_steps", "exact_converged", *bounds, *(f"{name}_sound" for name in bounds)]
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
    said |= {name: ds.attrs[name] for name in ("variants", "not_applicable", "notes", "quantization", "configuration") if name in ds.attrs}
    said |= {"norm": norm_of(ds)} if norm_of(ds) != "frobenius" else {}  # runs of before do not say it, and are Frobenius
    said |= {"layer": ds["layer"].values.tolist(), "length": ds["length"].values.tolist()}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def altered(ds: xr.Dataset) -> list[tuple[int, int]] | None:
    """Positions (sample, layer) whose values are not those that were computed; None for a run without checksums."""
    if CHECKSUM not in ds:
        return None
    return [(int(s), int(layer)) for s, layer in np.argwhere(checksums(ds).values != ds[CHECKSUM].values)]


def damage(ds: xr.Dataset) -> str:
    """What of a run is no longer as it was computed, as the end of a sentence; empty where everything is, or where the run has no checksums."""
    said = []
    if "settings_checksum" in ds.attrs:
        if settings_checksum(ds) != ds.attrs["settings_checksum"]:
            said.append("its settings (attributes, layers or lengths) are not those that were recorded")
        if CHECKSUM not in ds:
            said.append("the checksums of its numbers are missing")
    if places := altered(ds):
        count = ds.sizes["sample"] * ds.sizes["layer"]
        first = ", ".join(f"sample {int(ds['sample'][s])} layer {int(ds['layer'][i])}" for s, i in places[:3])
        where = (
            "at every sample and layer" if len(places) == count else f"at {first}" if len(places) <= 3 else f"at {len(places)} places ({first}, ...)"
        )
        empty = [name for name in own(ds) if all(_empty(ds, name, *place) for place in places)]
        lost = f" (no value of {', '.join(empty)} is there)" if empty else ""
        said.append(f"its numbers {where} are not those that were computed{lost}")
    return " and ".join(said)


def _empty(ds: xr.Dataset, name: str, sample: int, layer: int) -> bool:
    """Whether a variable has no value at a place where it should have one."""
    if ds[name].dtype.kind != "f" or (name.startswith("exact") and sample >= int(ds.attrs["exact_samples"])):
        return False
    return bool(ds[name].isel(sample=sample, layer=layer).isnull().all())


def again(ds: xr.Dataset) -> str:
    """How to compute a run again, as part of a sentence: its own command where that was one of ours, each word quoted."""
    try:
        words = shlex.split(str(ds.attrs.get("command", "")))
    except ValueError:
        words = []
    if words[:2] in (["lipbound", "compare"], ["lipbound", "demo"]):
        return f"move it away, and `{shlex.join(words)}` computes it again"
    return "compute it again with the arguments that it was made with"


def versions() -> dict[str, str]:
    """Versions of the packages that numbers can depend on."""
    packages = ("lipbound", "torch", "transformers", "numpy", "scipy", "xarray", "tokenizers", "datasets")
    return {name: package_version(name) for name in packages}


def package_version(name: str) -> str:
    """The version of a package; PackageNotFoundError where it is not installed. Torch's has what it was built for, which metadata may leave out."""
    if name != "torch":
        return importlib.metadata.version(name)
    import torch

    return str(torch.__version__)


def absolute(name: str | Path) -> str:
    """A path that is there in full, so that it leads to the same files from elsewhere; any other name, or text, as it is."""
    try:
        path = Path(name).expanduser()
        return str(path.resolve()) if path.exists() else str(name)
    except (OSError, ValueError, RuntimeError):
        return str(name)


def source(config: RunConfig) -> dict[str, Any]:
    """Where model and data are found again, paths absolute.

    ``model`` is None for one in memory; ``data``, ``split``, ``column`` and ``max_length`` are what `lipbound.models.inputs.prepare` was given:
    ``data`` None for the default, False for objects in memory. ``shuffle``, ``tokenizer``, ``processor`` and ``gguf_file`` are there where they were
    given.
    """
    data = config.data
    named = isinstance(data, (str, Path))
    return {
        "model": absolute(config.model) if isinstance(config.model, (str, Path)) else None,
        "data": absolute(data) if named else None if data is None else False, "split": config.split, "column": config.column,
        "max_length": config.max_length,
    } | _where_there(gguf_file=config.gguf_file, shuffle=config.shuffle, adapter=_found_again(config.adapter),
                     tokenizer=_found_again(config.tokenizer), processor=_found_again(config.processor))  # fmt: skip


def _found_again(name: Any) -> str | None:
    """Where a companion of a model is found again; "none" is no path."""
    return name if name in (None, "none") else absolute(name)


def provenance(config: RunConfig, checkpoint: Checkpoint, inputs: Inputs, **settled: Any) -> dict[str, Any]:
    """Where the numbers come from: model, data, versions, settings, date and command.

    Args:
        config: of the run.
        checkpoint, inputs: what it led to.
        settled: what was settled on the way: ``bounds`` that apply, ``map_description``, ``device`` by its name.
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
        quantization=checkpoint.quantization, configuration=checkpoint.configuration, notes=[*checkpoint.notes, *inputs.notes],
    )  # fmt: skip


def _where_there(**attributes: Any) -> dict[str, Any]:
    """Attributes that have something to tell."""
    return {name: value for name, value in attributes.items() if value}
