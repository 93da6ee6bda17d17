"""The words that stand beside the numbers of a run: marks of the audit, footnotes, captions."""

from collections.abc import Iterable
from typing import Any

import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.formatting import plain


def mark(entry: dict[str, Any]) -> str:
    """What the audit puts behind a bound's label: a double dagger where it is below exact, a dagger where its assumptions fail somewhere."""
    return " \u2021" if entry["violations"] else " \u2020" if entry["sound"] < entry["compared"] else ""


def footnotes(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """One line for every marked bound (of those given): why its statement is no bound where its assumptions fail; then `left_out`."""
    lines = []
    kept = None if bounds is None else list(bounds)
    for name, entry in audit(ds).items():
        if (kept is None or name in kept) and (sign := mark(entry).strip()):
            below = f"below exact on {entry['violations']} of {entry['compared']}; " if entry["violations"] else ""
            lines.append(f"{sign} {name}: {below}{entry['why']}")
    return lines if kept is not None else lines + left_out(ds)


def left_out(ds: xr.Dataset) -> list[str]:
    """One line for every reason why bounds say nothing about the heads of a run, with the names of these bounds."""
    reasons: dict[str, list[str]] = {}
    for name, why in ds.attrs.get("not_applicable", {}).items():
        reasons.setdefault(why, []).append(name)
    return [f"left out, since the statement {why}: {', '.join(names)}" for why, names in reasons.items()]


def holds(sound: int, compared: int) -> str:
    """Where a bound's assumptions held, in words."""
    return "everywhere" if sound == compared else "nowhere" if sound == 0 else f"on {sound} of {compared}"


def run_caption(ds: xr.Dataset) -> str:
    """One line that says what the numbers of a run are of."""
    a = ds.attrs
    exact = "" if a["exact_samples"] == a["samples"] else f" (exact norms on the first {a['exact_samples']})"
    how = f"enclosed to {a['tol']:g} with failure probability {a['delta']:g}" if a["delta"] else f"estimated to {a['tol']:g}"
    plural = "s" if a["samples"] > 1 else ""
    return plain(
        f"{a['model']} ({a['architecture']}, {str(a['revision'])[:15]}); map: {a['map_description']}; data: {a['data']}, "
        f"{a['samples']} sample{plural} of at most {a['tokens']} tokens{exact}; exact norms by {a['method']} in {a['dtype']}, {how}"
    )
