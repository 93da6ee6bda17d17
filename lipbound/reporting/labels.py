"""Words beside the numbers of a run or a diff: names, marks of the audit, footnotes, captions.

They are made from what is shown.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import numpy as np
import xarray as xr

from lipbound import schema
from lipbound.bounds.audit import audit, missing
from lipbound.errors import LipboundError, UnknownNameError, choice, shown
from lipbound.formatting import counted, joined, number, plain, small
from lipbound.reporting import statistics
from lipbound.runs.checksums import edited
from lipbound.runs.store import both_runs, diff_of, load, takes_run

TITLES = {"builtin:minilm": "all-MiniLM-L6-v2", "builtin:smollm2": "SmolLM2-135M-Instruct"}
"""Titles of builtin checkpoints that other packages bring, which need not be installed where a run
is shown."""
RECORDED: tuple[str, ...] = ("model", "called", "architecture", "revision", "quantization", "data")
RECORDED += ("data_fingerprint", "preprocessing", "bounds", "extras", "method", "tol", "delta")
RECORDED += ("dtype", "device", "seed", "capture_error", "lipbound", "python", "date", "command")
RECORDED += ("versions",)
"""Attributes that `facts` tells as they are, or, where it has more to say, by its own words."""
CALLED = "called"
"""Attribute with the names that `relabelled` gave to a run's model and data."""


def mark(entry: dict[str, Any]) -> str:
    """Audit's mark behind a bound's label.

    A double dagger where the bound is below exact, a dagger where its assumptions fail somewhere.
    """
    if entry["violations"]:
        return " \u2021"
    return " \u2020" if entry["sound"] < entry["compared"] else ""


MEANING = {
    "\u2021": "it is below the exact norm of some {}",
    "\u2020": "its assumptions do not hold on every {} here",
}
"""Meaning of the audit's marks, of heads or layers."""


def relabelled(ds: xr.Dataset, labels: Any = None) -> xr.Dataset:
    """Copy of a run with other labels of its variables, model and data.

    What the run itself says of them stays in its settings.

    Args:
        ds: a run.
        labels: texts by name: of a bound, an extra, "exact" or "exact_l2", or "model" or "data".

    Raises:
        UnknownNameError: a name that the run has not.
        LipboundError: a label that is no text.
    """
    statistics.check_numbers(ds)
    if not isinstance(labels, Mapping | None):
        raise LipboundError(f"labels is {shown(labels)}; give a text for each name, as a dict")
    given, others = dict(labels or {}), ("model", "data")
    names = {name: name for name in ("exact", "exact_l2", *schema.bounds_there(ds))} | schema.EXTRAS
    known = {name: variable for name, variable in names.items() if variable in ds.variables}
    for name, text in given.items():
        choice("label", name, [*known, *others])
        if not isinstance(text, str) or not plain(text).strip():
            raise LipboundError(f"the label of {name} is {shown(text)}; give a text")
    usual = {name: ds[one].attrs.get("label", name) for name, one in known.items()} | given
    labelled = {one: ds[one].assign_attrs(label=str(usual[k])) for k, one in known.items()}
    called = ds.attrs.get(CALLED, {}) | {name: given[name] for name in others if name in given}
    return ds.assign(labelled).assign_attrs({CALLED: called} if called else {})


def model_name(ds: xr.Dataset) -> str:
    """Name of a run's model in a paper: a builtin checkpoint's title, or a path's last part.

    With the step of its training, where that was followed.
    """
    name = str(ds.attrs["model"])
    name = str(ds.attrs.get(CALLED, {}).get("model") or _builtin_title(name) or _last_part(name))
    return f"{name} {step_words(ds)}".strip()


def told_apart(names: Iterable[str]) -> list[str]:
    """Number names that occur several times."""
    several = list(names)
    return [f"{one} ({k})" if several.count(one) > 1 else one for k, one in enumerate(several, 1)]


def step_words(ds: xr.Dataset) -> str:
    """Words on the steps of training that are shown; empty where there are none.

    "after 200 steps of training", "at 30 steps of training from 0 to 290".
    """
    if schema.STEP not in ds.coords:
        return ""
    steps = ds[schema.STEP].values.reshape(-1).tolist()
    if len(steps) == 1:
        return f"after {counted(steps[0], 'step')} of training"
    norms = int(schema.with_exact(ds, schema.STEP).sum())
    some = f" (with norms at {norms} of them)" if norms < len(steps) else ""
    return f"at {len(steps)} steps of training from {steps[0]} to {steps[-1]}{some}"


def builtin_name(ds: xr.Dataset) -> str:
    """Name by which lipbound loads a builtin model, and a comma; empty for other models."""
    return f"{ds.attrs['model']}, " if _builtin_title(str(ds.attrs["model"])) else ""


def data_name(ds: xr.Dataset) -> str:
    """Name of a run's data, from the labels given or the run's own description.

    Of runs that were put together, the data of those that are shown.
    """
    return str(ds.attrs.get(CALLED, {}).get("data") or joined(of_each(ds, "data")))


def of_each(ds: xr.Dataset, name: str) -> list[str]:
    """Texts that a setting has in the runs that are shown, each once; without empty ones."""
    return list(dict.fromkeys(str(run[name]) for run in schema.origins(ds) if run.get(name)))


def _builtin_title(name: str) -> str:
    """Title of the model card of a ``builtin:...`` checkpoint; empty where there is none."""
    from lipbound.models.catalogue import BUILTINS, PREFIX, describe

    short = name.removeprefix(PREFIX)
    known = name.startswith(PREFIX) and short in BUILTINS
    return TITLES.get(name) or (describe(short).title if known else "")


def _last_part(name: str) -> str:
    """Last part of a path, or the model's name of a folder in the cache of Hugging Face.

    Any other name stays as it is.
    """
    if stored := re.search(r"models--([^/\\]+)[/\\]snapshots", name):
        return stored[1].replace("--", "/")
    path = PureWindowsPath(name) if "\\" in name else PurePath(name)
    return path.name if (path.is_absolute() or name.startswith(("~", "."))) and path.name else name


@takes_run
def footnotes(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Lines below a table of a run, or of some of its bounds.

    They say what the marks mean, why they are there (bounds of one reason together), which values
    are missing; and, of all bounds, `left_out`.
    """
    kept = schema.bounds_there(ds) if bounds is None else list(bounds)
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, entry in audit(ds).items():
        below, fine, compared = entry["violations"], entry["sound"], entry["compared"]
        if name in kept and (sign := mark(entry).strip()):
            said = [f"below exact on {below} of {compared}"] if below else []
            said += [f"assumptions hold on {fine} of {compared}"] if 0 < fine < compared else []
            why = "; ".join([*said, entry["why"] or broken_words(ds)])
            reasons.setdefault((sign, why), []).append(named(ds, name))
    used = [sign for sign, _ in reasons]
    lines = [f"{sign}: {meaning}" for sign, meaning in meanings(ds, used).items()]
    lines += [f"{sign} {', '.join(names)}: {why}" for (sign, why), names in reasons.items()]
    empty: dict[str, list[str]] = {}
    for name in ("exact", *kept):
        if lost := missing(ds, name):
            own = name == "exact"
            of = "exact" if own else schema.compared_with(ds, name)
            places = lost * own + int(ds[of].count())
            words = f"no value at {lost} of {places} places, which are not compared"
            empty.setdefault(words, []).append("exact norms" if own else named(ds, name))
    lines += [f"{', '.join(names)}: {words}" for words, names in empty.items()]
    return lines if bounds is not None else lines + left_out(ds)


def meanings(ds: xr.Dataset, used: Iterable[str]) -> dict[str, str]:
    """Return the meanings of those of the audit's marks that are used, by mark."""
    place, there = "head" if "head" in ds.dims else "layer", set(used)
    return {sign: words.format(place) for sign, words in MEANING.items() if sign in there}


def broken_words(ds: xr.Dataset) -> str:
    """Words on a bound that is below the exact norm although its assumptions hold."""
    said = "held, but the run was edited" if edited(ds) else "hold, so please report this run"
    return f"its assumptions {said}"


def named(ds: xr.Dataset, name: str) -> str:
    """A bound by its label and its name."""
    label = str(ds[name].attrs["label"])
    return label if label == name else f"{label} ({name})"


@takes_run
def left_out(ds: xr.Dataset) -> list[str]:
    """One line per reason for which bounds do not cover the heads of a run, with their names."""
    reasons: dict[str, list[str]] = {}
    for name, why in ds.attrs.get("not_applicable", {}).items():
        reasons.setdefault(f"the statement {why}", []).append(name)
    for name in ds.attrs["bounds"]:
        if name in ds.variables and name not in schema.bounds_there(ds):
            reasons.setdefault("the exact norm of its own map is not there", []).append(str(name))
    return [f"left out, since {why}: {', '.join(names)}" for why, names in reasons.items()]


def extra_title(ds: xr.Dataset, name: str) -> str:
    """The full name of one of `lipbound.reporting.statistics.extras`."""
    attrs = ds[name].attrs
    return plain(str(attrs.get("long_name", attrs.get("label", name))))


def extra_words(ds: xr.Dataset, name: str) -> str:
    """The name of an extra, what it is, and where it comes from, if that is said."""
    said = ds[schema.EXTRAS[name]].attrs if schema.EXTRAS[name] in ds.variables else {}
    words = [str(said[key]) for key in ("long_name", "source") if key in said]
    return f"{name} ({plain('; '.join(words))})" if words else name


def extra_known(ds: xr.Dataset, name: str) -> str:
    """Words on an extra that some exact norms are without; empty where none is."""
    known, norms = int(ds[name].count()), int(ds["exact"].count())
    return f"known at {known} of {norms} exact norms" if known < norms else ""


def holds(sound: int, compared: int) -> str:
    """Where a bound's assumptions held, in words."""
    if not compared:
        return "n/a"
    if sound in (0, compared):
        return "everywhere" if sound else "nowhere"
    return f"on {sound} of {compared}"


def norm_words(ds: xr.Dataset) -> str:
    """The norm of a run: its name, and, of those that tell tokens apart, what it measures."""
    norm = schema.norm_of(ds)
    return "Frobenius" if norm == "frobenius" else f"{norm} ({schema.NORMS[norm]})"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in short: neighbours as a range.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0 to 2, 5, 7 and 8'
    """
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    short = ([f"{one[0]} to {one[-1]}"] if len(one) > 2 else map(str, one) for one in runs)
    return joined([part for parts in short for part in parts])


def over(ds: xr.Dataset, axes: Iterable[str] = schema.AXES, *, exact: bool = True) -> str:
    """Words on the axes of a mean, such as " over samples and heads"; empty for none.

    Args:
        ds: a run.
        axes: those that the mean is over.
        exact: True for means of exact norms and of ratios to them, which only some samples may
            have.
    """
    sizes = dict(ds.sizes) | ({"sample": schema.Contents.of(ds).exact_samples} if exact else {})
    there = [f"{axis}s" for axis in axes if sizes.get(axis, 1) > 1]
    return f" over {joined(there)}" if there else ""


def places(ds: xr.Dataset) -> str:
    """Layers and heads that are shown, and of how many.

    "6 layers x 12 heads", "layers 0 to 2 of 6 counted from 0, heads 3 and 4 of 12 counted from 0".
    """
    there = schema.Contents.of(ds)
    layers, of = list(there.layers), there.made.model_layers
    whole = len({*layers}) == of
    text = counted(len(layers), "layer") if whole else _some("layer", layers, of)
    if "head" not in ds.dims:
        return text
    least, most = there.heads if there.norms else (ds.sizes["head"],) * 2
    numbers = [int(head) for head in ds["head"].values]
    if there.made.heads is not None and len(numbers) < there.made.heads:
        return f"{text}, {_some('head', numbers, there.made.heads)}"
    heads = counted(most, "head") if least == most else f"{least} to {counted(most, 'head')}"
    each = "" if whole or len(layers) == 1 else " each"
    return f"{text} x {heads}" if whole else f"{text}, {heads}{each}"


def _some(what: str, numbers: list[int], of: int) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {ranges(numbers)} of {of} counted from 0"


def samples_words(there: schema.Contents) -> str:
    """Samples that are shown, of how many, and their length.

    "2 of 8 samples of at most 32 tokens".
    """
    made = there.made.samples
    # of more, somebody put runs together
    some = f"{there.samples} of " if there.samples < made else ""
    samples = counted(made if some else there.samples, "sample")
    return f"{some}{samples} of at most {there.tokens} tokens"


def widest(ds: xr.Dataset) -> float:
    """Largest relative width of the enclosures of the norms shown, rounded up to two digits.

    Infinite where one has no finite upper end; NaN where there are no upper ends, or nothing to
    enclose.
    """
    if "exact_upper" not in ds.variables:
        return float("nan")
    lower, upper = ds["exact"].values, ds["exact_upper"].values
    with np.errstate(all="ignore"):
        wide = np.where(upper == lower, 0.0, upper / lower - 1)[~np.isnan(lower)]
    most = float(np.where(np.isnan(wide), np.inf, wide).max()) if wide.size else float("nan")
    shown = float(f"{most:.1e}")
    return shown if not most > shown else float(f"{most * 1.05:.1e}")


def exact_words(ds: xr.Dataset) -> str:
    """Words on how surely the norms shown are known: method, width, probability.

    They come from the values themselves.
    """
    run, there = schema.RunInfo.of(ds), schema.Contents.of(ds)
    if not there.norms:
        return "no exact norms"
    if edited(ds):  # whatever was claimed was of other numbers
        return "exact norms of which nothing is claimed"
    to, wide, enclosed = small(run.tol), widest(ds), "exact_upper" in ds.variables
    closely = f"enclosed to {to}" if enclosed else f"lower ends, sought to {to}"
    if not there.closed:  # what was asked for says nothing about what is there
        wider = "without finite upper ends" if np.isinf(wide) else f"enclosed to {small(wide)}"
        closely = f"{wider if enclosed else 'lower ends, none converged'} ({to} was asked for)"
    if schema.norm_of(ds) != "frobenius":
        found = f"of a model in {run.dtype}, {closely}, both ends deterministic"
    else:
        # what encloses works in float64, whatever the model
        dtype = f"({run.dtype} model)" if enclosed else f"in {run.dtype}"
        method = run.method.replace("lanczos", "Lanczos' method")
        found = f"by {method} {dtype}, {closely}"
        if run.delta and enclosed:
            each = " a step" * (schema.STEP in ds.dims)
            found += f" with failure probability {small(run.delta)}{each}"
    if 0 < there.closed < there.norms:
        found += f", except {there.norms - there.closed} of {there.norms}"
        if wide > run.tol:
            within = f"enclosed to {small(wide)}"
            found += f", {'some without a finite upper end' if np.isinf(wide) else within}"
    some = f" (on {there.exact_samples} of the samples)" * (there.exact_samples < there.samples)
    if without := int(schema.automatic(ds).sum()):
        of = f"{without} of {len(there.layers)} layers"
        found += f"; {of} by automatic differentiation, rounding not enclosed"
    return f"exact norms{some} {found}"


def state_words(ds: xr.Dataset) -> str:
    """Phrase on changes made to a run since it was computed.

    Empty for runs, and parts of runs, that are as they were.
    """
    if (state := edited(ds)) is None:
        return "variables left out, so that checksums cannot exclude that others were edited"
    return "edited or put together by hand since it was computed" if state else ""


@takes_run
def run_caption(ds: xr.Dataset) -> str:
    """One line on the run that the numbers shown come from.

    The norm is named where it is another than Frobenius, so that captions stay short.
    """
    return told(ds)


def told(ds: xr.Dataset) -> str:
    """Make the line of `run_caption` of all steps of training that are there."""
    return plain(f"{checkpoint_words(ds)}, {setting_words(ds)}")


def checkpoint_words(ds: xr.Dataset) -> str:
    """Name a run's checkpoint: its model, class, and revision."""
    run = schema.RunInfo.of(ds)
    stored = f"{run.quantization.partition(' (')[0]}, " if run.quantization else ""
    return f"{model_name(ds)} ({builtin_name(ds)}{run.architecture}, {stored}{run.revision[:15]})"


def setting_words(ds: xr.Dataset) -> str:
    """Say what was measured of a checkpoint, on what, and how surely."""
    state = f"; {words}" if (words := state_words(ds)) else ""
    if schema.of_weights_alone(ds):
        return f"{places(ds)}; {ds.attrs['map_description']}{state}"
    there = schema.Contents.of(ds)
    data = f"{data_name(ds)}, {samples_words(there)}"
    norm = "" if schema.norm_of(ds) == "frobenius" else f"; norm: {norm_words(ds)}"
    runs = len(schema.origins(ds))
    together = f"; {runs} runs put together" * (runs > 1)
    what = f"map: {ds.attrs['map_description']}{norm}; data: {data}{together}"
    return f"{places(ds)}; {what}; {exact_words(ds)}{state}"


def facts(ds: xr.Dataset) -> dict[str, Any]:
    """Contents and settings of a run, by names in words; None where there is nothing to say."""
    there, exact = schema.Contents.of(ds), ds["exact"]
    said = dict.fromkeys(RECORDED) | {name: ds.attrs[name] for name in RECORDED if name in ds.attrs}
    found = {
        "called": model_name(ds),
        "data": data_name(ds),
        "map": ds.attrs["map_description"],
        "norm": norm_words(ds),
        "extras": [extra_words(ds, name) for name in ds.attrs.get("extras", ())],
        "function of": schema.WRT[str(ds.attrs["wrt"])],
        "samples": there.samples,
        "samples at once": ds.attrs.get("block"),
        "bytes at once": ds.attrs.get("block_bytes"),
        "exact on samples": there.exact_samples,
        "tokens at most": there.tokens,
        "layers": list(there.layers),
        "layers and heads": places(ds),
        "exact from": float(exact.min()),
        "exact to": float(exact.max()),
        "not converged": there.norms - there.closed,
        "below exact": {n: one["violations"] for n, one in audit(ds).items() if one["violations"]},
        "left out": list(ds.attrs.get("not_applicable", {})),
        "state": state_words(ds),
    }
    if schema.of_weights_alone(ds):  # what is about exact norms alone
        found |= dict.fromkeys(("norm", "function of", "tol", *schema.DRAWN, "not converged"))
    return {name.replace("_", " "): value for name, value in (said | found).items()}


def fact_words(value: Any) -> str:
    """One of `facts` on one line; empty where there is nothing to say."""
    if isinstance(value, dict):
        value = [f"{key} {item}" for key, item in value.items()]
    if isinstance(value, list | tuple) or value is None:
        return plain(", ".join(map(str, value or ())))
    if isinstance(value, float):
        if np.isnan(value):
            return ""
        return number(value, 4) if value >= 1e-2 else small(float(f"{value:.3g}"))
    return plain(str(value))


# -- a diff of two runs, A and B: a run whose norms are the ratios B / A, and words on it ----------


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
    if not schema.is_diff(ds):
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
    norms: Any = [[statistics.quantity(run, "exact", end) for end in (None, 0, 1)] for run in runs]
    a, b = ([one.where(known) for one in ends] for ends in norms)
    ends = there.get("ratio_lower", b[1] / a[2]), there.get("ratio_upper", b[2] / a[1])
    found = {"a": (names["a"], a), "b": (names["b"], b)}
    found["exact"] = names["ratio"], [there["ratio"], *ends]
    for name in filter(schema.bounds_there(runs[0]).__contains__, schema.bounds_there(runs[1])):
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
    if len(deltas) == len(schema.SIDES):
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
    return {
        "kind": "diff of two runs",
        "a": checkpoint_words(a),
        "b": checkpoint_words(b),
        "measured": setting_words(a),
        "measured in b": "alike" if setting_words(a) == setting_words(b) else setting_words(b),
        "b / a": whole["geomean"],
        **{f"{of} from": whole[least] for of, (least, _) in ends.items()},
        **{f"{of} to": whole[most] for of, (_, most) in ends.items()},
        **decided(ds),
        "notes": diff_notes(ds),
    }
