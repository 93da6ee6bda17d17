"""Tables, captions and facts of a diff of two runs, A and B: how much larger or smaller B is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.errors import LipboundError, UnknownNameError, choice, nearest
from lipbound.formatting import directed, enclosed, outwards, plain, small
from lipbound.reporting import statistics
from lipbound.reporting.labels import checkpoint_words, exact_words, over, setting_words
from lipbound.reporting.layout import Table
from lipbound.runs.pair import sides
from lipbound.schema import SIDES, bounds_there

NAMES = {"a": "A", "b": "B"}
"""Names of the two runs in tables and figures."""
ENDS = ("ratio_lower", "ratio_upper")
COUNTS = ("smaller", "larger")
"""Columns that count places where the norm of B is surely smaller, or larger, than that of A."""
SPARE = ("min", "max", "larger", "smaller")
"""Columns that are left out where there is no room, the first one first."""


def side_names(labels: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names of the runs a and b, given or `NAMES`.

    Raises:
        UnknownNameError: a label of something else.
    """
    given = dict(labels or {})
    if unknown := [name for name in given if name not in NAMES]:
        raise UnknownNameError(f"labels has {unknown[0]!r}; those of a diff are of a and b")
    return NAMES | {name: plain(text) for name, text in given.items()}


def diff_words(ds: xr.Dataset, labels: Mapping[str, str] | None = None) -> str:
    """One line on the two runs of a diff, and on what both were measured on."""
    a, b = sides(ds)
    first, second = side_names(labels).values()
    how = exact_words(a), exact_words(b)
    others = f"; of {second}, {how[1]}" if how[0] != how[1] else ""
    deltas = [run.attrs["delta"] for run in (a, b) if run.attrs.get("delta")]
    if len(deltas) == len(SIDES):
        others += f"; all enclosures together with failure probability {small(sum(deltas))}"
    return plain(
        f"{first}: {checkpoint_words(a)}; {second}: {checkpoint_words(b)}; {setting_words(a)}"
        f"{others}"
    )


def change(ds: xr.Dataset, name: str = "exact") -> dict[str, xr.DataArray]:
    """Values of both runs where they have a ratio, the ratio, and its ends where they are known.

    Args:
        ds: a diff. name: "exact", or a bound that both runs have, whose values are what they are,
            so that the ends are the ratio itself.
    """
    values = {side: ds[f"{name}_{side}"] for side in SIDES}
    if name == "exact":
        found = {key: ds[key] for key in ("ratio", *ENDS) if key in ds}
    else:
        ratio = values["b"] / values["a"].where((values["a"] > 0) & np.isfinite(values["a"]))
        found = dict.fromkeys(("ratio", *ENDS), ratio)
    known = found["ratio"].notnull()
    return {side: one.where(known) for side, one in values.items()} | found


def _ends(ds: xr.Dataset, name: str, end: int) -> dict[str, xr.DataArray]:
    """Lower (0) or upper (1) ends of the enclosures of values of both runs and of their ratio."""
    parts = change(ds, name)
    if name != "exact":
        return {key: parts[key] for key in (*SIDES, "ratio")}
    known = parts["ratio"].notnull()
    both = [[statistics.quantity(run, name, k).where(known) for k in (0, 1)] for run in sides(ds)]
    of_ratio = both[1][end] / both[0][1 - end]
    return {"a": both[0][end], "b": both[1][end], "ratio": parts.get(ENDS[end], of_ratio)}


def reduced(parts: Mapping[str, xr.DataArray], dims: list[str]) -> dict[str, xr.DataArray]:
    """Columns of a table of a diff: `change`, reduced over some dimensions.

    Returns:
        Geometric means ``a``, ``b`` and ``ratio``, and of its ends; the interval of the ratio, or
        its range over samples (see `lipbound.reporting.statistics.spread`); its ``min`` and
        ``max``; ``compared`` places, and `COUNTS` of them; NaN where there are no ends.
    """
    reduce = statistics.reduce_samples
    found = {name: reduce(values, "geomean", dims) for name, values in parts.items()}
    ratio = parts["ratio"]
    found |= {name: found["ratio"] * np.nan for name in ENDS if name not in parts}
    found |= zip(statistics.INTERVAL, statistics.spread(ratio, "geomean", dims), strict=True)
    found |= {"min": ratio.min(dims), "max": ratio.max(dims)}
    sure = dict.fromkeys(COUNTS, found["ratio"] * np.nan)
    if ENDS[0] in parts:
        lower, upper = (parts[name] for name in ENDS)
        sure = {"smaller": (upper < 1).sum(dims), "larger": (lower > 1).sum(dims)}
    return found | sure | {"compared": ratio.notnull().sum(dims)}


def diff_table(
    ds: xr.Dataset,
    by: str = "bound",
    *,
    bounds: Iterable[str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Table:
    """Table of a diff: of exact norms and bounds over everything, or of exact norms by place.

    Args:
        ds: a diff. by: "bound", "layer" or "head".
        bounds: of rows by bound: which, of those that both runs have; all by default.
        labels: names of the runs, by "a" and "b".

    Raises:
        LipboundError: unknown names, heads of whole layers.
    """
    choice("rows", by, statistics.ROWS)
    dims = [str(dim) for dim in ds["ratio"].dims]
    if by == "head" and "head" not in dims:
        raise LipboundError("the runs are about whole layers and have no heads; ask by layer")
    if by != "bound" and bounds is not None:
        raise LipboundError("bounds are for rows by bound; rows by place are of exact norms")
    levels = ["layer", "head"][: statistics.ROWS.index(by)]
    inner = [dim for dim in dims if dim not in levels]
    if by == "bound":
        names = ["exact", *_bounds(ds, bounds)]
        numbers = _rows({name: reduced(change(ds, name), inner) for name in names})
        ends = [_rows({name: reduced(_ends(ds, name, k), inner) for name in names}) for k in (0, 1)]
        titles = [plain(str(ds[f"{name}_a"].attrs["label"])) for name in names]
        shown = pd.DataFrame({"quantity": titles}, numbers.index)
    else:
        numbers = _places(reduced(change(ds), inner), levels)
        numbers = numbers.loc[numbers["compared"] > 0]
        ends = [_places(reduced(_ends(ds, "exact", k), inner), levels) for k in (0, 1)]
        ends = [one.loc[numbers.index] for one in ends]
        shown = numbers.index.to_frame().astype(str)
    return _written(ds, numbers, shown, ends, by, labels)


def _rows(cells: Mapping[str, Mapping[str, xr.DataArray]]) -> pd.DataFrame:
    """Single numbers as a table, a row for every quantity."""
    rows = [{key: value.item() for key, value in one.items()} for one in cells.values()]
    return pd.DataFrame(rows, index=pd.Index(cells, name="bound"))


def _places(cells: Mapping[str, xr.DataArray], levels: list[str]) -> pd.DataFrame:
    """Numbers by layer, or by layer and head, as a table, a row for every place."""
    # without the names of modules, which the two models may not share
    bare = {name: values.reset_coords(drop=True) for name, values in cells.items()}
    return xr.Dataset(bare).to_dataframe(levels)


def _bounds(ds: xr.Dataset, bounds: Iterable[str] | None) -> list[str]:
    """Names of bounds that both runs have."""
    a, b = map(bounds_there, sides(ds))
    both = [name for name in a if name in b]
    names = both if bounds is None else [bounds] if isinstance(bounds, str) else list(bounds)
    if unknown := [name for name in names if name not in both]:
        raise UnknownNameError(
            f"the runs have no bound {unknown[0]!r}; {nearest(unknown[0], both)}"
        )
    return names


def _written(
    ds: xr.Dataset,
    numbers: pd.DataFrame,
    shown: pd.DataFrame,
    ends: Sequence[pd.DataFrame],
    by: str,
    labels: Mapping[str, str] | None,
) -> Table:
    """Numbers as a table, each to the digits that its enclosure supports."""
    first, second = side_names(labels).values()

    low, high = ends

    def column(name: str) -> list[str]:
        return list(map(enclosed, low[name], high[name]))

    keys = list(shown.columns)
    samples = statistics.samples_of(ds["ratio"])
    spread = statistics.spread_title(samples)
    known = list(map(statistics.digits_of_ends, low["ratio"], high["ratio"]))
    shown[first], shown[second] = column("a"), column("b")
    shown[ratio := f"{second} / {first}"] = column("ratio")
    least, most = statistics.INTERVAL
    if samples > 1:
        shown[spread] = list(map(outwards, low[least], high[most], known))
    shown["min"] = [directed(*one, up=False) for one in zip(low["min"], known, strict=True)]
    shown["max"] = [directed(*one, up=True) for one in zip(high["max"], known, strict=True)]
    sure = bool(numbers[COUNTS[0]].notna().any())
    for name in COUNTS if sure else ():
        pairs = zip(numbers[name], numbers["compared"], strict=True)
        shown[name] = ["n/a" if np.isnan(n) else f"{n:.0f} of {of}" for n, of in pairs]
    said = statistics.spread_words(samples)
    axes = [axis for axis in ("sample", "layer", "head") if by == "bound" or axis not in keys]
    means = over(sides(ds)[0], axes)
    decided = f"smaller, larger: where {second} is so whatever the norms in their enclosures are"
    return Table(
        numbers,
        shown,
        words=("quantity",),
        head=f"exact norms{' and bounds' * (by == 'bound' and len(numbers) > 1)}, and {ratio}"
        + (f": geometric means{means}" if means else ""),
        caption=diff_words(ds, labels),
        notes=[said] * (samples == 1) + diff_notes(ds),
        keys=tuple(keys),
        spare=SPARE,
        meaning={spread: said} | dict.fromkeys(["smaller"] if sure else [], decided),
    )


def diff_notes(ds: xr.Dataset) -> list[str]:
    """Sentences on a diff: what differs besides the checkpoints, what is not decided or missing."""
    notes, parts = list(ds.attrs["notes"]), change(ds)
    places = int(parts["ratio"].notnull().sum())
    if ENDS[0] not in parts:
        notes.append("without upper ends of both norms, ratios are estimates without an enclosure")
    elif unsure := int(((parts[ENDS[0]] <= 1) & (parts[ENDS[1]] >= 1)).sum()):
        notes.append(f"which is larger is not decided by the enclosures at {unsure} of {places}")
    either = int((ds["exact_a"].notnull() | ds["exact_b"].notnull()).sum())
    if either > places:
        notes.append(f"{either - places} of {either} places have no ratio: no norm, or zero in A")
    if places and bool((parts["a"] == parts["b"]).where(parts["ratio"].notnull(), True).all()):
        notes.append("no exact norm differs; make sure that these are two checkpoints")
    return notes


def diff_facts(ds: xr.Dataset) -> dict[str, Any]:
    """Contents of a diff, by names in words, for `lipbound info`."""
    parts = change(ds)
    dims = [str(dim) for dim in ds["ratio"].dims]
    whole = {name: value.item() for name, value in reduced(parts, dims).items()}
    a, b = sides(ds)
    spread = statistics.spread_title(statistics.samples_of(ds["ratio"]))
    return {
        "kind": "diff of two runs",
        "a": checkpoint_words(a),
        "b": checkpoint_words(b),
        "measured": setting_words(a),
        "measured in b": "alike" if setting_words(a) == setting_words(b) else setting_words(b),
        "b / a": whole["ratio"],
        f"{spread} from": whole[statistics.INTERVAL[0]],
        f"{spread} to": whole[statistics.INTERVAL[1]],
        "b / a from": whole["min"],
        "b / a to": whole["max"],
        "compared": whole["compared"],
        "smaller": whole["smaller"],
        "larger": whole["larger"],
        "bounds": _bounds(ds, None),
        "notes": diff_notes(ds),
    }
