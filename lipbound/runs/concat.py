"""Runs put together along samples, layers or both, with the provenance of each; and taken apart
again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.errors import StoreError, shown
from lipbound.runs.provenance import (
    RUN,
    RUN_SAMPLE,
    altered,
    damage,
    flags,
    lacks_variables,
    own,
    sealed,
)
from lipbound.runs.run_argument import run_of
from lipbound.runs.standing import with_exact

AGREE = (
    "revision",
    "architecture",
    "loaded",
    "commit",
    "quantization",
    "map",
    "norm",
    "method",
    "tol",
    "dtype",
    "seed",
    "bounds",
    "variants",
    "not_applicable",
)
"""Attributes that must be the same in all runs, since a number means something else without."""
JOINED = (
    "lipbound",
    "model",
    "data",
    "data_fingerprint",
    "preprocessing",
    "device",
    "python",
    "date",
    "command",
)
"""Text that is said of each run once."""
Key = tuple[str, int]
"""A sample: the fingerprint of the data that it is from, and its number there."""


def concat(runs: Iterable[object]) -> xr.Dataset:
    """Put runs of one model together: other samples, other layers, or both.

    What decides the meaning of a number must agree: weights, map, norm, bounds, tolerance, dtype
    and seed. Samples of runs on the same data count as the same, so that runs of other layers there
    stand side by side. Together the runs must fill a whole table of samples by layers, each place
    once. Samples are numbered anew: those with exact norms first, else in the order of the runs.

    Args:
        runs: two or more runs of `lipbound.compare` or `lipbound.load`, parts of them, runs put
            together before, or paths.

    Returns:
        One run. ``attrs["runs"]`` has the attributes of each; the coordinate ``run`` (sample,
        layer) says which of them a place is from, and ``run_sample`` which number its sample had
        there. delta is the sum of theirs: the probability that any upper end of any of them fails.

    Raises:
        StoreError: the runs do not agree, overlap, leave places empty, lack variables, or are not
            as they were computed.
    """
    given = (
        [] if isinstance(runs, str | xr.Dataset) or not isinstance(runs, Iterable) else list(runs)
    )
    if len(given) < 2:
        what = "one run alone" if len(given) == 1 else shown(runs)
        raise StoreError(f"runs is {what}; give a list of two runs at least, Datasets or paths")
    parts = [part for run in given for part in split(run_of(run))]
    for number, part in enumerate(parts):
        _check(part, number, parts[0])
    samples, layers = _table(parts)
    origins = {
        str(part.attrs["settings_checksum"]): part.attrs for part in parts
    }  # parts of one run are from one run
    ds = _filled(parts, samples, layers, list(origins))
    attrs = list(origins.values())
    ds.attrs = _together(attrs) | {
        "samples": len(samples),
        "exact_samples": int(with_exact(ds).sum()),
        "tokens": int(ds["length"].max()),
        "runs": attrs,
    }
    made = {
        "layers": layers,
        "heads": int(ds.sizes["head"]) if "head" in ds.dims else None,
        "model_layers": attrs[0]["made"]["model_layers"],
    }
    ds = sealed(ds, {name: ds.attrs[name] for name in ("samples", "exact_samples")} | made)
    ds.attrs["audit"] = audit(ds)
    ds.attrs["violations"] = {
        name: entry["violations"] for name, entry in ds.attrs["audit"].items()
    }
    return ds


def split(ds: xr.Dataset) -> list[xr.Dataset]:
    """The runs that were put together by `concat`, as far as they are there, with their own
    attributes and numbers; ``[ds]`` of any other."""
    if "runs" not in ds.attrs:
        return [ds]
    parts = []
    run = ds[RUN].transpose("sample", "layer").values
    for number, attrs in enumerate(ds.attrs["runs"]):
        here = run == number
        if here.any():
            part = ds.isel(sample=np.flatnonzero(here.any(1)), layer=np.flatnonzero(here.any(0)))
            part = (
                part.assign_coords(sample=part[RUN_SAMPLE].values)
                .drop_vars([RUN, RUN_SAMPLE])
                .sortby("sample")
            )
            parts.append(part.drop_attrs(deep=False).assign_attrs(attrs))
    return parts


def _check(part: xr.Dataset, number: int, first: xr.Dataset) -> None:
    """Raise StoreError unless a run is as it was computed and agrees with the first one."""
    name = f"run {number + 1} of those given ({part.attrs['model']}, {part.attrs['data']})"
    if "made" not in part.attrs or altered(part) is None or "settings_checksum" not in part.attrs:
        raise StoreError(
            f"{name} has no checksums of this version of lipbound, so nothing tells whether it "
            "is as it was computed; compute it again"
        )
    if lacks_variables(part):
        raise StoreError(
            f"{name} lacks variables that it was made with; give it whole, or a selection of "
            "samples, layers or heads"
        )
    if what := damage(part):
        raise StoreError(
            f"{name} is damaged or was edited: {what}; put together runs that are as they were "
            "computed"
        )
    mine, theirs = (
        one.attrs | {"bounds": sorted(one.attrs["bounds"]), "variables": sorted(own(one))}
        for one in (part, first)
    )
    for key in (*AGREE, "variables"):
        if mine.get(key) != theirs.get(key):
            values = (
                f"{key} is {shown(theirs.get(key))} in the first and {shown(mine.get(key))} "
                f"in {name}"
            )
            raise StoreError(
                f"the runs do not agree: {values}; put together what was measured alike"
            )
    few, many = sorted((_heads(part), _heads(first)), key=len)
    if many[: len(few)] != few:
        raise StoreError(
            f"the runs do not agree: heads are {shown(_heads(first))} in the first and "
            f"{shown(_heads(part))} in {name}; select the same"
        )


def _heads(ds: xr.Dataset) -> list[int]:
    """Numbers of the heads; none for maps of whole layers."""
    return [int(head) for head in ds["head"].values] if "head" in ds.dims else []


def _keys(part: xr.Dataset) -> list[Key]:
    """The samples of a run."""
    return [(str(part.attrs["data_fingerprint"]), int(sample)) for sample in part["sample"].values]


def _table(parts: list[xr.Dataset]) -> tuple[list[Key], list[int]]:
    """Samples and layers of the table that the runs fill, samples with exact norms first; raises
    StoreError where they do not fill it once."""
    owner: dict[tuple[Key, int], int] = {}
    exact: dict[Key, bool] = {}
    for number, part in enumerate(parts):
        for key, known in zip(_keys(part), with_exact(part), strict=True):
            if exact.setdefault(key, bool(known)) != bool(known):
                raise StoreError(
                    f"sample {key[1]} of {part.attrs['data']} has exact norms in some of the "
                    "runs only; take the same exact_samples"
                )
            for layer in map(int, part["layer"].values):
                if (key, layer) in owner:
                    both = f"run {owner[key, layer] + 1} and run {number + 1} of those given"
                    raise StoreError(
                        f"sample {key[1]} of {part.attrs['data']}, layer {layer}, is in {both}; "
                        "select parts that do not overlap"
                    )
                owner[key, layer] = number
    samples, layers = (
        sorted(exact, key=lambda key: not exact[key]),
        sorted({layer for _, layer in owner}),
    )
    for key in samples:
        if missing := [layer for layer in layers if (key, layer) not in owner]:
            data = next(
                part.attrs["data"] for part in parts if part.attrs["data_fingerprint"] == key[0]
            )
            raise StoreError(
                f"sample {key[1]} of {data} lacks layers that other samples have "
                f"({', '.join(map(str, missing))}); all need the same layers"
            )
    return samples, layers


def _filled(
    parts: list[xr.Dataset], samples: list[Key], layers: list[int], origins: list[str]
) -> xr.Dataset:
    """The table: every variable, and where each place is from."""
    heads = max(map(_heads, parts), key=len)
    dims = parts[0]["exact"].dims
    shape = (len(samples), len(layers), *([len(heads)] if heads else []))
    tables = {
        name: np.full(
            shape, np.nan if parts[0][name].dtype.kind == "f" else 0, dtype=parts[0][name].dtype
        )
        for name in own(parts[0])
    }  # layers of fewer heads leave places empty
    run, number, length = (
        np.zeros(shape[:2], dtype=np.int64),
        np.zeros(shape[0], dtype=np.int64),
        np.zeros(shape[0], dtype=np.int64),
    )
    names = np.full(len(layers), "", dtype=object)
    row, column = (
        {key: i for i, key in enumerate(samples)},
        {layer: i for i, layer in enumerate(layers)},
    )
    for part in parts:
        rows, columns = (
            [row[key] for key in _keys(part)],
            [column[int(layer)] for layer in part["layer"].values],
        )
        at = np.ix_(rows, columns, range(len(_heads(part)))) if heads else np.ix_(rows, columns)
        for name, table in tables.items():
            table[at] = part[name].transpose(*dims).values
        run[np.ix_(rows, columns)] = origins.index(str(part.attrs["settings_checksum"]))
        number[rows], length[rows], names[columns] = (
            part["sample"].values,
            part["length"].values,
            part["layer_name"].values,
        )
    ds = xr.Dataset(
        {name: (dims, table, parts[0][name].attrs) for name, table in tables.items()},
        attrs={"bounds": parts[0].attrs["bounds"]},
    )
    ds = ds.assign_coords(
        sample=np.arange(len(samples)),
        layer=layers,
        layer_name=("layer", names),
        length=("sample", length),
    )
    ds = ds.assign_coords({"head": heads} if heads else {})
    ds = ds.assign_coords({RUN: (("sample", "layer"), run), RUN_SAMPLE: ("sample", number)})
    return ds.set_coords(flags(ds))


def _together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Attributes of all runs: those that agree, text of each once, delta of all, the
    largest error."""
    first = runs[0]
    kept = {
        name: first[name]
        for name in ("lipbound", "model", *AGREE, "map_description")
        if name in first
    }
    joined = {
        name: "; ".join(dict.fromkeys(str(run[name]) for run in runs if run.get(name)))
        for name in JOINED
    }
    packages = dict.fromkeys(name for run in runs for name in run["versions"])
    versions = {
        name: "; ".join(
            dict.fromkeys(str(run["versions"][name]) for run in runs if name in run["versions"])
        )
        for name in packages
    }
    notes = list(dict.fromkeys(note for run in runs for note in run.get("notes", [])))
    delta = (
        {"delta": None if first["delta"] is None else min(1.0, sum(run["delta"] for run in runs))}
        if "delta" in first
        else {}
    )
    error = max(run["capture_error"] for run in runs)
    return (
        kept
        | joined
        | delta
        | {"versions": versions, "capture_error": error}
        | ({"notes": notes} if notes else {})
    )
