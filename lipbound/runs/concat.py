"""Put runs together along samples, layers or both, and take them apart again."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from lipbound import schema
from lipbound.errors import StoreError
from lipbound.runs.checksums import check_whole, sealed
from lipbound.runs.store import run_of, sample_identities, unlike


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
    many = isinstance(runs, Iterable) and not isinstance(runs, str | xr.Dataset)
    given = list(runs) if many else []
    if len(given) < 2:
        raise StoreError("runs is no list of two at least; give Datasets or paths of two runs")
    whole = [run_of(run) for run in given]
    if any(schema.STEP in one.coords for one in whole):
        raise StoreError("runs over steps of training are not put together; give other runs")
    numbered = [(number, part) for number, run in enumerate(whole) for part in split(run)]
    parts = [part for _, part in numbered]
    for number, part in numbered:
        _check(part, number, parts[0])
    samples = _table(parts)
    # parts of one run are from one run
    origins = {str(part.attrs["settings_checksum"]): part.attrs for part in parts}
    ds = _filled(parts, samples, list(origins))
    return sealed(ds, _together(ds, list(origins.values())))


def split(ds: xr.Dataset) -> list[xr.Dataset]:
    """Take apart what `concat` put together, as far as it is there; ``[ds]`` of any other run.

    Returns:
        The runs, with their own attributes and numbers.
    """
    if "runs" not in ds.attrs:
        return [ds]
    parts = []
    run = ds[schema.RUN].transpose("sample", "layer").values
    for number, attrs in enumerate(ds.attrs["runs"]):
        here = run == number
        if here.any():
            part = ds.isel(sample=np.flatnonzero(here.any(1)), layer=np.flatnonzero(here.any(0)))
            part = part.assign_coords(sample=part[schema.RUN_SAMPLE].values)
            part = part.drop_vars([schema.RUN, schema.RUN_SAMPLE]).sortby("sample")
            parts.append(part.drop_attrs(deep=False).assign_attrs(attrs))
    return parts


def _check(part: xr.Dataset, number: int, first: xr.Dataset) -> None:
    """Refuse a run that is not as it was computed, or does not agree with the first one."""
    name = f"run {number + 1} of those given ({part.attrs['model']}, {part.attrs['data']})"
    check_whole(part, name)
    heads = min(len(_heads(part)), len(_heads(first)))  # layers may differ in how many they have
    settings = []
    for one in (first, part):
        said = {key: one.attrs.get(key) for key in schema.AGREE} | {"heads": _heads(one)[:heads]}
        lists = {"bounds": sorted(one.attrs["bounds"]), "variables": sorted(schema.own(one))}
        settings.append(said | lists)
    if found := unlike(settings[0], settings[1], "{} is {!r:.80} in the first and {!r:.80}"):
        what = f"the runs do not agree: {found[0]} in {name}"
        raise StoreError(f"{what}; give what was measured alike")


def _heads(ds: xr.Dataset) -> list[int]:
    """Numbers of the heads; none for maps of whole layers."""
    return [int(head) for head in ds["head"].values] if "head" in ds.dims else []


def _table(parts: list[xr.Dataset]) -> list[tuple[str, int]]:
    """Samples of the table that the runs must fill, those with exact norms first.

    Raises:
        StoreError: they do not fill it once.
    """
    runs, exact = Counter[Any](), dict[tuple[str, int], bool]()
    for part in parts:
        keys = sample_identities(part)
        for key, known in zip(keys, schema.with_exact(part).values.tolist(), strict=True):
            if exact.setdefault(key, known) != known:
                what = f"sample {key[1]} of {part.attrs['data']}"
                raise StoreError(f"{what} has exact norms in some of the runs alone")
        runs.update(itertools.product(keys, part["layer"].values.tolist()))
    layers = {layer for _, layer in runs}
    for (data, sample), layer in itertools.product(exact, sorted(layers)):
        if (count := runs[(data, sample), layer]) != 1:
            what = f"layer {layer} of sample {sample} of the data {data} is in {count} of the runs"
            raise StoreError(f"{what}, and must be in one; select other parts, or the same layers")
    return sorted(exact, key=lambda key: not exact[key])


def _filled(parts: list[xr.Dataset], samples: list[Any], origins: list[str]) -> xr.Dataset:
    """Fill the table with every variable, and with where each place is from."""
    row, placed, first = {key: i for i, key in enumerate(samples)}, [], parts[0]
    for part in parts:
        origin = origins.index(str(part.attrs["settings_checksum"]))
        here = np.full((part.sizes["sample"], part.sizes["layer"]), origin)
        numbers: dict[str, Any] = {schema.RUN: (schema.AXES[:2], here)}
        numbers[schema.RUN_SAMPLE] = "sample", part["sample"].values
        for word in filter(part.coords.__contains__, schema.LAYER_WORDS):
            numbers[word] = "layer", part[word].values.astype(object)
        placed.append(
            part[schema.own(first)]
            .reset_coords([name for name in part.coords if name not in part.dims])
            .assign(numbers)
            .assign_coords(sample=[row[key] for key in sample_identities(part)])
        )
    ds = xr.merge(placed, compat="no_conflicts", join="outer", combine_attrs="override")
    for name in ds.data_vars:  # layers of fewer heads leave places empty
        kind = placed[0][name].dtype
        if kind.kind in "iub":
            ds[name] = ds[name].fillna(0).astype(kind)
    ds = ds.transpose(*first["exact"].dims)
    return ds.set_coords(["length", *(name for name in schema.LAYER_WORDS if name in ds)])


def _together(ds: xr.Dataset, runs: list[dict[str, Any]]) -> schema.RunInfo:
    """Put together what runs say: delta of all, the largest error, each text once."""
    first = runs[0]

    def joined(texts: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(text for text in texts if text))

    packages = dict.fromkeys(name for run in runs for name in run["versions"])
    said = {name: first[name] for name in schema.AGREE if name in first}
    said |= {name: joined(str(run[name]) for run in runs) for name in schema.JOINED}
    if first.get("delta") is not None:
        said["delta"] = min(1.0, sum(run["delta"] for run in runs))
    sizes, layers = ds.sizes, ds["layer"].values.tolist()
    exact_samples, model_layers = int(schema.with_exact(ds).sum()), first["made"]["model_layers"]
    made = schema.Extent(sizes["sample"], exact_samples, layers, sizes.get("head"), model_layers)
    return schema.RunInfo(
        **said,
        source=None,
        map_description=first["map_description"],
        versions={name: joined(run["versions"].get(name, "") for run in runs) for name in packages},
        samples=made.samples,
        exact_samples=made.exact_samples,
        capture_error=max(run["capture_error"] for run in runs),
        notes=list(dict.fromkeys(note for run in runs for note in run.get("notes", []))),
        made=made,
        runs=runs,
    )
