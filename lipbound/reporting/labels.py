"""The words that stand beside the numbers of a run: marks of the audit, footnotes, captions."""

from collections.abc import Iterable
from typing import Any

import xarray as xr

from lipbound.bounds.audit import audit, compared_with, missing, norm_of
from lipbound.bounds.entry import NORMS
from lipbound.formatting import plain, small


def mark(entry: dict[str, Any]) -> str:
    """What the audit puts behind a bound's label: a double dagger where it is below exact, a dagger where its assumptions fail somewhere."""
    return " \u2021" if entry["violations"] else " \u2020" if entry["sound"] < entry["compared"] else ""


MEANING = {
    "\u2020": "a published statement whose assumptions do not hold everywhere here, and which is no bound where they do not",
    "\u2021": "below the exact norm somewhere",
}
"""What the audit's marks say."""


def footnotes(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Lines below a table of a run, or of some of its bounds: what the marks mean, why they are there (bounds of one reason together), which values
    are missing; and, of all bounds, `left_out`.
    """
    kept = list(ds.attrs["bounds"]) if bounds is None else list(bounds)
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, entry in audit(ds).items():
        if name in kept and (sign := mark(entry).strip()):
            below = [f"below exact on {entry['violations']} of {entry['compared']}"] if entry["violations"] else []
            partly = [f"assumptions hold on {entry['sound']} of {entry['compared']}"] if 0 < entry["sound"] < entry["compared"] else []
            why = "; ".join([*below, *partly, entry["why"] or "its assumptions hold, so please report this run"])
            reasons.setdefault((sign, why), []).append(named(ds, name))
    used = {sign for sign, _ in reasons}
    lines = [f"{sign}: {meaning}" for sign, meaning in MEANING.items() if sign in used]
    lines += [f"{sign} {', '.join(names)}: {why}" for (sign, why), names in reasons.items()]
    places = int(ds["exact"].notnull().sum())
    if lost := missing(ds, "exact"):
        lines.append(f"exact norms: none at {lost} of {places + lost} places, which are not compared")
    for name in kept:
        if lost := missing(ds, name):
            lines.append(
                f"{named(ds, name)}: no value at {lost} of {int(ds[compared_with(ds, name)].notnull().sum())} places, which are not compared"
            )
    return lines if bounds is not None else lines + left_out(ds)


def named(ds: xr.Dataset, name: str) -> str:
    """A bound by its label and its name."""
    return f"{ds[name].attrs['label']} ({name})"


def left_out(ds: xr.Dataset) -> list[str]:
    """One line for every reason why bounds say nothing about the heads of a run, with the names of these bounds."""
    reasons: dict[str, list[str]] = {}
    for name, why in ds.attrs.get("not_applicable", {}).items():
        reasons.setdefault(why, []).append(name)
    return [f"left out, since the statement {why}: {', '.join(names)}" for why, names in reasons.items()]


def holds(sound: int, compared: int) -> str:
    """Where a bound's assumptions held, in words."""
    return "n/a" if not compared else "everywhere" if sound == compared else "nowhere" if sound == 0 else f"on {sound} of {compared}"


def norm_words(ds: xr.Dataset) -> str:
    """The norm of a run: its name, and, of those that tell tokens apart, what it measures."""
    norm = norm_of(ds)
    return "Frobenius" if norm == "frobenius" else f"{norm} ({NORMS[norm]})"


def stored_as(ds: xr.Dataset) -> str:
    """How the weights of a run's model were quantised, in short, and a comma; empty where they were not, or where an earlier version made the run."""
    how = str(ds.attrs.get("quantization", "")).partition(" (")[0]
    return f"{how}, " if how else ""


def run_caption(ds: xr.Dataset) -> str:
    """One line that says what the numbers of a run are of; its norm where it is another than Frobenius, so that captions stay short."""
    a = ds.attrs
    exact = "" if a["exact_samples"] == a["samples"] else f" (exact norms on the first {a['exact_samples']})"
    to = small(float(a["tol"]))
    norm = "" if norm_of(ds) == "frobenius" else f"norm: {norm_words(ds)}; "
    if norm:
        how = f"of layers in {a['dtype']}, enclosed to {to}, both ends deterministic"
    elif a["delta"]:
        how = f"by {a['method']} in {a['dtype']}, enclosed to {to} with failure probability {small(float(a['delta']))}"
    else:
        how = f"by {a['method']} in {a['dtype']}, lower ends, sought to {to}"
    plural = "s" if a["samples"] > 1 else ""
    return plain(
        f"{a['model']} ({a['architecture']}, {stored_as(ds)}{str(a['revision'])[:15]}); map: {a['map_description']}; {norm}data: {a['data']}, "
        f"{a['samples']} sample{plural} of at most {a['tokens']} tokens{exact}; exact norms {how}"
    )
