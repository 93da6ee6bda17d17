"""Two runs side by side in one Dataset, with the ratios of their exact norms.

A diff keeps all of both runs, so that each can be had again, checked by its own checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from lipbound import schema
from lipbound.errors import AlteredRunError, StoreError, shown
from lipbound.runs.checksums import check_whole, damage

SHARED = ("sample", "layer", "head", "length")
"""Coordinates that both runs have alike."""
WHOLE_LAYERS = "select what both have, or measure whole layers (map='layer')"
LAYOUT = {"layer": "select what both have (layers=)", "head": WHOLE_LAYERS}
LAYOUT |= dict.fromkeys(("kind", "stream"), "name layers of one kind (layers=)")
"""Coordinates on layers and heads that both runs have alike, and what to do where they differ."""
GIVEN = "GivenLayers"
"""Architecture of runs on layers, whose inputs have no fingerprint."""
RATIOS = {
    "ratio": "exact norm of b over that of a, lower ends of both",
    "ratio_lower": "lower end of the ratio",
    "ratio_upper": "upper end of the ratio",
}
"""Variables of a diff besides those of its runs, and what they are."""


def paired(a: xr.Dataset, b: xr.Dataset) -> xr.Dataset:
    """Set two runs side by side.

    Args:
        a: a run, with its axes. b: another, on the same samples, layers and heads.

    Returns:
        Dataset with the axes of both: every variable of theirs as ``NAME_a`` and ``NAME_b``;
        ``ratio``, ``exact_b / exact_a``; and, where both have upper ends, ``ratio_lower`` and
        ``ratio_upper``, float64, which enclose the ratio of the norms, rounding of the division
        included. They hold together with a probability of failure that is the sum of both runs'.
        All are NaN where ``exact_a`` is not positive or a norm is missing. ``attrs["diff"]`` has
        the attributes of both, ``attrs["notes"]`` what is told of them.

    Raises:
        StoreError: they are not of the same thing, or not as they were computed.
    """
    notes = check_alike(a, b)
    runs = dict(zip(schema.SIDES, (a, b), strict=True))
    parts = [
        run.rename({name: f"{name}_{side}" for name in run.variables if name not in SHARED})
        for side, run in runs.items()
    ]
    ds = xr.merge(parts, join="exact", compat="equals", combine_attrs="override")
    of_each = {side: dict(run.attrs) for side, run in runs.items()}
    attrs = {schema.DIFF: of_each, "lipbound": b.attrs["lipbound"], "notes": notes}
    return ds.assign(_ratios(a, b)).drop_attrs(deep=False).assign_attrs(attrs)


def _ratios(a: xr.Dataset, b: xr.Dataset) -> dict[str, xr.DataArray]:
    """Variables `RATIOS` of two runs."""
    lows, found = (a["exact"].values, b["exact"].values), {}
    known = np.isfinite(lows[0]) & (lows[0] > 0) & ~np.isnan(lows[1])
    with np.errstate(all="ignore"):
        found["ratio"] = lows[1] / lows[0]
        if "exact_upper" in a and "exact_upper" in b:
            highs = (a["exact_upper"].values, b["exact_upper"].values)
            found["ratio_lower"] = np.nextafter(lows[1] / highs[0], 0.0)
            found["ratio_upper"] = np.nextafter(highs[1] / lows[0], np.inf)
    names = {dim: a[dim] for dim in a["exact"].dims}
    return {
        name: xr.DataArray(
            np.where(known, value, np.nan),
            coords=names,
            dims=a["exact"].dims,
            attrs={"label": name.replace("_", ", "), "long_name": RATIOS[name]},
        )
        for name, value in found.items()
    }


def sides(ds: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Take apart what `paired` put side by side, or a part of it: the runs a and b.

    Raises:
        StoreError: it is no diff.
    """
    if not schema.is_diff(ds):
        raise StoreError("a diff of two runs is wanted; lipbound.diff makes one")
    return _side(ds, schema.SIDES[0]), _side(ds, schema.SIDES[1])


def _side(ds: xr.Dataset, side: str) -> xr.Dataset:
    """One run of a diff."""
    end = f"_{side}"
    names = {name: name.removesuffix(end) for name in map(str, ds.variables) if name.endswith(end)}
    others = [name for name in ds.variables if name not in (*names, *SHARED)]
    run = ds.drop_vars(others).rename(names).drop_attrs(deep=False)
    run = run.assign_attrs(ds.attrs[schema.DIFF][side])
    return run.set_coords(schema.flags(run))


def diff_damage(ds: xr.Dataset) -> str:
    """Describe what of a diff is no longer as it was computed; empty for nothing.

    Raises:
        AlteredRunError: settings or variables of one of its runs are missing.
    """
    try:
        runs = sides(ds)
        missing = [schema.lacking_settings(run) or schema.lacking_variables(run) for run in runs]
    except (KeyError, ValueError, TypeError) as error:
        raise AlteredRunError(f"it is no diff of two runs any more: {error}") from error
    if any(missing):
        raise AlteredRunError(f"of one of its two runs, {' and '.join(filter(None, missing))}")
    found = {side: damage(run) for side, run in zip(schema.SIDES, runs, strict=True)}
    said = [f"of {side}, {what}" for side, what in found.items() if what]
    wrong = [
        name
        for name, ratio in _ratios(*runs).items()
        if name not in ds or not np.array_equal(ratio, ds[name], equal_nan=True)
    ]
    return " and ".join(said + [f"{name} is not that of its two runs" for name in wrong])


def check_alike(a: xr.Dataset, b: xr.Dataset) -> list[str]:
    """Refuse two runs whose numbers are not of the same thing.

    Returns:
        What else differs, in sentences.

    Raises:
        StoreError: they are of other maps, norms, inputs, layers or heads, or not as they were
            computed.
    """
    for side, run in zip(schema.SIDES, (a, b), strict=True):
        check_whole(run, f"{side} ({run.attrs['model']})")
    for name in schema.ALIKE:
        refuse(name, a.attrs[name], b.attrs[name], "measure both alike")
    refuse_inputs(_inputs(a) == _inputs(b), a.attrs["data"], b.attrs["data"])
    refuse_layout(*({name: _listed(run, name) for name in (*LAYOUT, "length")} for run in (a, b)))
    notes = [
        f"{name} is {shown(a.attrs.get(name))} in a and {shown(b.attrs.get(name))} in b"
        for name in schema.TOLD
        if a.attrs.get(name) != b.attrs.get(name)
    ]
    if GIVEN in (a.attrs["architecture"], b.attrs["architecture"]):
        notes.append("layers were given with inputs of their own, which are not compared")
    counts = [int(schema.with_exact(run).sum()) for run in (a, b)]
    if counts[0] != counts[1]:
        notes.append(f"exact norms are of {counts[0]} samples in a and {counts[1]} in b")
    return notes


def refuse(name: str, of_a: Any, of_b: Any, advice: str) -> None:
    """Refuse what two runs, or what they are measured with, do not have alike."""
    if of_a != of_b:
        values = (repr(value) for value in (of_a, of_b))
        in_a, in_b = (text if len(text) <= 80 else f"{text[:76]}..." for text in values)
        raise StoreError(
            f"a and b cannot be compared: {name} is {in_a} in a and {in_b} in b; {advice}"
        )


def refuse_layout(of_a: Mapping[str, Any], of_b: Mapping[str, Any]) -> None:
    """Refuse layers and heads that are not alike, by the coordinates of a run."""
    for name in of_a:
        refuse(name, of_a[name], of_b[name], LAYOUT.get(name, "select what both have"))


def refuse_inputs(alike: bool, of_a: str, of_b: str) -> None:
    """Refuse inputs that are not alike, of data that are described so."""
    if alike:
        return
    refuse("data", of_a, of_b, "measure both on the same")
    raise StoreError(
        f"a and b cannot be compared: both are of {of_a!r}, of which they had other samples, or "
        "other tokens or pixels made of the same; give both the same samples, tokenizer and "
        "processor"
    )


def _listed(run: xr.Dataset, name: str) -> Any:
    """Values of a coordinate, as plain data; None where there is none."""
    return run[name].values.tolist() if name in run.coords else None


def _inputs(run: xr.Dataset) -> list[tuple[str, int]]:
    """Fingerprint of the data, and number, of every sample."""
    if schema.RUN not in run.variables:
        return [(run.attrs["data_fingerprint"], int(sample)) for sample in run["sample"].values]
    prints = [one["data_fingerprint"] for one in run.attrs["runs"]]
    of = run[schema.RUN].transpose("sample", "layer").values[:, 0]
    return [(prints[k], int(s)) for k, s in zip(of, run[schema.RUN_SAMPLE].values, strict=True)]
