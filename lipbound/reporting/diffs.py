"""A diff of two runs, A and B, as a run whose norms are the ratios B / A, and words on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from lipbound.errors import LipboundError, UnknownNameError
from lipbound.formatting import plain, small
from lipbound.reporting import statistics
from lipbound.reporting.labels import checkpoint_words, exact_words, setting_words
from lipbound.reporting.statistics import quantity
from lipbound.runs.store import both_runs, diff_of, load
from lipbound.schema import SIDES, bounds_there, is_diff

NAMES = {"a": "A", "b": "B"}
"""Names of the two runs in tables and figures."""


def opened(given: Any, **of_runs: object) -> Any:
    """Read what was given where it is a path, and complete it where it is a diff.

    Args:
        given: a diff, or anything else, which stays as it is.
        of_runs: values of options, by their names, that a diff has not; true where they are given.

    Raises:
        LipboundError: one of them is given with a diff.
    """
    ds = load(given) if isinstance(given, str | Path) else given
    if not is_diff(ds):
        return ds
    if others := [name for name, value in of_runs.items() if value]:
        raise LipboundError(f"{others[0]} is not for a diff of two runs; leave it out")
    return diff_of(ds)


def side_names(labels: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names of the runs a and b, given or `NAMES`, and of their ``ratio``.

    Raises:
        UnknownNameError: a label of something else.
    """
    given = dict(labels or {})
    if unknown := [name for name in given if name not in NAMES]:
        raise UnknownNameError(f"labels has {unknown[0]!r}; those of a diff are of a and b")
    named = NAMES | {name: plain(text) for name, text in given.items()}
    return named | {"ratio": f"{named['b']} / {named['a']}"}


def ratio_run(ds: xr.Dataset, labels: Mapping[str, str] | None = None) -> xr.Dataset:
    """A diff as a run: its exact norms are the ratios; norms of both runs stand beside them.

    So do ratios of the bounds that both have, under their names. Ends of enclosures are
    ``NAME_lower`` and ``NAME_upper``. Of estimates they are as wide as the tolerance, and enclose
    nothing (see `diff_notes`).
    """
    runs, names, there = both_runs(ds), side_names(labels), dict[Any, Any](ds.variables)
    known = there["ratio"].notnull()
    norms: Any = [[quantity(run, "exact", end) for end in (None, 0, 1)] for run in runs]
    a, b = ([one.where(known) for one in ends] for ends in norms)
    ends = there.get("ratio_lower", b[1] / a[2]), there.get("ratio_upper", b[2] / a[1])
    found = {"a": (names["a"], a), "b": (names["b"], b)}
    found["exact"] = names["ratio"], [there["ratio"], *ends]
    for name in filter(bounds_there(runs[0]).__contains__, bounds_there(runs[1])):
        of_a, of_b = there[f"{name}_a"], there[f"{name}_b"]
        ratio = of_b / of_a.where((of_a > 0) & np.isfinite(of_a))
        found[name] = f"{runs[0][name].attrs['label']}: {names['ratio']}", [ratio] * 3
    run = runs[1].drop_vars([*runs[1].data_vars, "layer_name"], errors="ignore")  # which may differ
    for name, (label, values) in found.items():
        for end, one in zip(("", "_lower", "_upper"), values, strict=True):
            run[f"{name}{end}"] = one.dims, one.values, {"label": label}
    return run.assign_attrs(bounds=[], extras=[])


def diff_words(ds: xr.Dataset, labels: Mapping[str, str] | None = None) -> str:
    """One line on the two runs of a diff, and on what both were measured on."""
    (a, b), names = both_runs(ds), side_names(labels)
    how = exact_words(a), exact_words(b)
    others = f"; of {names['b']}, {how[1]}" if how[0] != how[1] else ""
    deltas = [run.attrs["delta"] for run in (a, b) if run.attrs.get("delta")]
    if len(deltas) == len(SIDES):
        others += f"; all enclosures together with failure probability {small(sum(deltas))}"
    called = f"{names['a']}: {checkpoint_words(a)}; {names['b']}: {checkpoint_words(b)}"
    return plain(f"{called}; {setting_words(a)}{others}")


def decided(ds: xr.Dataset) -> dict[str, int]:
    """Count the places with a ratio, and where B is surely ``smaller``, or ``larger``, than A."""
    found = {"compared": int(ds["ratio"].notnull().sum())}
    if "ratio_upper" in ds:
        found["smaller"] = int((ds["ratio_upper"] < 1).sum())
        found["larger"] = int((ds["ratio_lower"] > 1).sum())
    return found


def diff_notes(ds: xr.Dataset, labels: Mapping[str, str] | None = None) -> list[str]:
    """Sentences on a diff: what differs besides the checkpoints, what is decided, and missing."""
    notes, counts, (first, second, _) = ds.attrs["notes"], decided(ds), side_names(labels).values()
    places, a, b = counts["compared"], ds["exact_a"], ds["exact_b"]
    if len(counts) == 1:
        said = "without upper ends of both norms, ratios are estimates without an enclosure"
    else:
        said = f"at {counts['smaller']} of {places} places, and larger at {counts['larger']}"
        said = f"whatever the enclosed norms are, {second} is smaller than {first} {said}"
    either = int((a.notnull() | b.notnull()).sum())
    lost = f"{either - places} of {either} places have no ratio: no norm, or zero in {first}"
    same = places and bool((a == b).where(ds["ratio"].notnull(), True).all())
    alike = "no exact norm differs; make sure that these are two checkpoints"
    return [*notes, said, *[lost] * (either > places), *[alike] * bool(same)]


def diff_facts(ds: xr.Dataset) -> dict[str, Any]:
    """Contents of a diff, by names in words, for `lipbound info`."""
    (a, b), whole = both_runs(ds), statistics.spread_of(ratio_run(ds), "exact")
    ends = statistics.SPANS | {"b / a": ("min", "max")}
    alike = setting_words(a) == setting_words(b)
    return {
        "kind": "diff of two runs",
        "a": checkpoint_words(a),
        "b": checkpoint_words(b),
        "measured": setting_words(a),
        "measured in b": "alike" if alike else setting_words(b),
        "b / a": whole["geomean"],
        **{f"{of} from": whole[least] for of, (least, _) in ends.items()},
        **{f"{of} to": whole[most] for of, (_, most) in ends.items()},
        **decided(ds),
        "notes": diff_notes(ds),
    }
