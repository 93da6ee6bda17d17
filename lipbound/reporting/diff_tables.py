"""Tables, captions and facts of a diff of two runs, A and B: how much larger or smaller B is."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.errors import LipboundError, UnknownNameError, choice, nearest
from lipbound.formatting import directed, enclosed, outwards, plain, small
from lipbound.reporting import statistics
from lipbound.reporting.labels import checkpoint_words, exact_words, over, setting_words
from lipbound.reporting.text_tables import Table
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


def change(ds: xr.Dataset, name: str = "exact", end: int | None = None) -> xr.Dataset:
    """Values ``a`` and ``b`` of both runs, and their ``ratio``, at the places that have one.

    Args:
        ds: a diff.
        name: "exact", or a bound that both runs have, whose values are what they are.
        end: None for the values, 0 or 1 for lower or upper ends of their enclosures.
    """
    if name == "exact":
        a, b = (statistics.quantity(run, name, end) for run in sides(ds))
        known, ratio = ds["ratio"].notnull(), ds["ratio"]
        if end is not None:
            other = statistics.quantity(sides(ds)[0], name, 1 - end)
            ratio = ds[ENDS[end]] if ENDS[end] in ds else (b / other).where(known)
    else:
        a, b = (ds[f"{name}_{side}"] for side in SIDES)
        ratio = b / a.where((a > 0) & np.isfinite(a))
        known = ratio.notnull()
    found = {"a": a.where(known), "b": b.where(known), "ratio": ratio}
    # without the names of modules, which the two models may not share
    return xr.Dataset({key: one.reset_coords(drop=True) for key, one in found.items()})


def _reduced(parts: xr.Dataset, levels: list[str]) -> xr.Dataset:
    """Geometric means of `change` over all but some dimensions, and the spread of the ratio."""
    ratio = parts["ratio"]
    dims = [str(dim) for dim in ratio.dims if dim not in levels]
    found = {name: statistics.reduce_samples(one, "geomean", dims) for name, one in parts.items()}
    found |= zip(statistics.INTERVAL, statistics.spread(ratio, "geomean", dims), strict=True)
    return xr.Dataset(found | {"min": ratio.min(dims), "max": ratio.max(dims)})


def diff_table(
    ds: xr.Dataset,
    by: str = "bound",
    *,
    bounds: Iterable[str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Table:
    """Table of a diff: of exact norms and bounds over everything, or of exact norms by place.

    Its numbers are geometric means ``a``, ``b`` and ``ratio``, and of the ends of the ratio; its
    interval, or its range over samples (see `lipbound.reporting.statistics.spread`); its ``min``
    and ``max``; `COUNTS`, and the ``compared`` places; NaN where there are no ends.

    Args:
        ds: a diff. by: "bound", "layer" or "head".
        bounds: of rows by bound: which, of those that both runs have; all by default.
        labels: names of the runs, by "a" and "b".

    Raises:
        LipboundError: unknown names, heads of whole layers.
    """
    choice("rows", by, statistics.ROWS)
    if by == "head" and "head" not in ds["ratio"].dims:
        raise LipboundError("the runs are about whole layers and have no heads; ask by layer")
    if by != "bound" and bounds is not None:
        raise LipboundError("bounds are for rows by bound; rows by place are of exact norms")
    levels = {"bound": ["bound"], "layer": ["layer"], "head": ["layer", "head"]}[by]
    names = ["exact", *(_bounds(ds, bounds) if by == "bound" else ())]
    values, lower, upper = (
        xr.concat([change(ds, name, end) for name in names], pd.Index(names, name="bound"))
        for end in (None, 0, 1)
    )
    found, low, high = (_reduced(one, levels) for one in (values, lower, upper))
    dims = [dim for dim in values["ratio"].dims if dim not in levels]
    sure = (values["bound"] != "exact") | all(end in ds for end in ENDS)  # estimates have no ends
    below, above = upper["ratio"].where(sure) < 1, lower["ratio"].where(sure) > 1
    sure = sure.any([dim for dim in dims if dim == "bound"])
    found = found.assign(dict(zip(ENDS, (low["ratio"], high["ratio"]), strict=True)))
    found = found.assign(smaller=below.sum(dims), larger=above.sum(dims))
    found = found.assign({name: found[name].where(sure) for name in (*ENDS, *COUNTS)})
    found = found.assign(compared=values["ratio"].notnull().sum(dims))
    columns = ["a", "b", "ratio", *ENDS, *statistics.INTERVAL, "min", "max", *COUNTS, "compared"]
    numbers = found[columns].to_dataframe(levels)
    numbers = numbers.loc[(numbers["compared"] > 0) | (by == "bound")]
    ends = [one.to_dataframe(levels).loc[numbers.index] for one in (low, high)]
    shown = numbers.index.to_frame().astype(str)
    if by == "bound":
        titles = [plain(str(ds[f"{name}_a"].attrs["label"])) for name in names]
        shown = pd.DataFrame({"quantity": titles}, numbers.index)
    return _written(ds, numbers, shown, ends, by, labels)


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
    ends: list[pd.DataFrame],
    by: str,
    labels: Mapping[str, str] | None,
) -> Table:
    """Numbers as a table, each to the digits that its enclosure supports."""
    first, second = side_names(labels).values()
    keys, ratio = list(shown.columns), f"{second} / {first}"
    low, high = ends
    samples = statistics.samples_of(ds["ratio"])
    spread, said = statistics.spread_title(samples), statistics.spread_words(samples)
    known = list(map(statistics.digits_of_ends, low["ratio"], high["ratio"]))
    for title, name in ((first, "a"), (second, "b"), (ratio, "ratio")):
        shown[title] = list(map(enclosed, low[name], high[name]))
    least, most = statistics.INTERVAL
    if samples > 1:
        shown[spread] = list(map(outwards, low[least], high[most], known))
    shown["min"] = [directed(*one, up=False) for one in zip(low["min"], known, strict=True)]
    shown["max"] = [directed(*one, up=True) for one in zip(high["max"], known, strict=True)]
    counted = COUNTS if bool(numbers[COUNTS[0]].notna().any()) else ()
    for name in counted:
        pairs = zip(numbers[name], numbers["compared"], strict=True)
        shown[name] = ["n/a" if np.isnan(n) else f"{n:.0f} of {of}" for n, of in pairs]
    means = over(sides(ds)[0], [axis for axis in ("sample", "layer", "head") if axis not in keys])
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
        meaning={spread: said} | dict.fromkeys(counted[:1], decided),
    )


def diff_notes(ds: xr.Dataset) -> list[str]:
    """Sentences on a diff: what differs besides the checkpoints, what is not decided or missing."""
    notes, parts = list(ds.attrs["notes"]), change(ds)
    places = int(parts["ratio"].notnull().sum())
    if ENDS[0] not in ds:
        notes.append("without upper ends of both norms, ratios are estimates without an enclosure")
    elif unsure := int(((ds[ENDS[0]] <= 1) & (ds[ENDS[1]] >= 1)).sum()):
        notes.append(f"which is larger is not decided by the enclosures at {unsure} of {places}")
    either = int((ds["exact_a"].notnull() | ds["exact_b"].notnull()).sum())
    if either > places:
        notes.append(f"{either - places} of {either} places have no ratio: no norm, or zero in A")
    if places and bool((parts["a"] == parts["b"]).where(parts["ratio"].notnull(), True).all()):
        notes.append("no exact norm differs; make sure that these are two checkpoints")
    return notes


def diff_facts(ds: xr.Dataset) -> dict[str, Any]:
    """Contents of a diff, by names in words, for `lipbound info`."""
    row, (a, b) = diff_table(ds, bounds=[]).numbers.iloc[0], sides(ds)
    spread = statistics.spread_title(statistics.samples_of(ds["ratio"]))
    least, most = statistics.INTERVAL
    columns = {"b / a": "ratio", f"{spread} from": least, f"{spread} to": most}
    columns |= {"b / a from": "min", "b / a to": "max"}
    alike = setting_words(a) == setting_words(b)
    return {
        "kind": "diff of two runs",
        "a": checkpoint_words(a),
        "b": checkpoint_words(b),
        "measured": setting_words(a),
        "measured in b": "alike" if alike else setting_words(b),
        **{words: row[name] for words, name in columns.items()},
        **{name: row[name] for name in ("compared", *COUNTS)},
        "bounds": _bounds(ds, None),
        "notes": diff_notes(ds),
    }
