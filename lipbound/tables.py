"""Summary tables of a run, and the citations that belong to it."""

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds import BIBTEX, get
from lipbound.bounds.auditing import audit
from lipbound.errors import UnknownNameError, nearest

FORMATS = ("text", "markdown", "latex", "csv")
COLUMNS = {"geomean": "geom. mean", "min": "min", "max": "max", "violations": "below exact", "compared": "of", "sound": "assumptions hold"}


def summary(ds: xr.Dataset) -> pd.DataFrame:
    """Per bound: geometric mean, minimum and maximum of bound / exact over samples, layers and heads, and the audit.

    Columns ``label, geomean, min, max, violations, compared, sound``; ``sound`` counts where the bound's assumptions held, ``violations`` where it is
    below the exact norm (of its own map: L2 attention for ``kim``). Heads whose exact norm is zero have no ratio.
    """
    rows = []
    counts = audit(ds)
    for name in ds.attrs["bounds"]:
        exact, value = ds[get(name).exact].values, ds[name].values
        known = np.isfinite(exact) & (exact > 0) & ~np.isnan(value)
        ratio = value[known] / exact[known]
        with np.errstate(divide="ignore"):
            geomean = float(np.exp(np.log(ratio).mean())) if ratio.size else float("nan")
        low, high = (float(ratio.min()), float(ratio.max())) if ratio.size else (float("nan"), float("nan"))
        entry = counts[name]
        rows.append((name, ds[name].attrs["label"], geomean, low, high, entry["violations"], entry["compared"], entry["sound"]))
    return pd.DataFrame(rows, columns=["bound", "label", "geomean", "min", "max", "violations", "compared", "sound"]).set_index("bound")


def number(x: float) -> str:
    """A ratio to three significant digits, without exponent between 0.001 and 100,000.

    >>> number(1386.3), number(0.0123), number(4.79e8)
    ('1,390', '0.0123', '4.79e8')
    """
    if not np.isfinite(x):
        return "inf" if x > 0 else "n/a"
    if 1e3 <= abs(x) < 1e5:
        return f"{float(f'{x:.3g}'):,.0f}"
    return f"{x:.3g}" if 1e-3 <= abs(x) < 1e3 else f"{x:.2e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def mark(entry: dict[str, Any]) -> str:
    """What the audit puts behind a bound's label: a double dagger where it is below exact, a dagger where its assumptions fail somewhere."""
    return " \u2021" if entry["violations"] else " \u2020" if entry["sound"] < entry["compared"] else ""


def footnotes(ds: xr.Dataset) -> list[str]:
    """One line for every marked bound: why its statement is no bound where its assumptions fail."""
    lines = []
    for name, entry in audit(ds).items():
        if sign := mark(entry).strip():
            below = f"below exact on {entry['violations']} of {entry['compared']}; " if entry["violations"] else ""
            lines.append(f"{sign} {name}: {below}{entry['why']}")
    return lines


def _readable(ds: xr.Dataset) -> pd.DataFrame:
    table = summary(ds)
    table["label"] = [label + mark(entry) for label, entry in zip(table["label"], audit(ds).values(), strict=True)]
    for name in ("geomean", "min", "max"):
        table[name] = table[name].map(number)
    table["sound"] = [holds(s, c) for s, c in zip(table["sound"], table["compared"], strict=True)]
    return table.rename(columns=COLUMNS)


def holds(sound: int, compared: int) -> str:
    """Where a bound's assumptions held, in words."""
    return "everywhere" if sound == compared else "nowhere" if sound == 0 else f"on {sound} of {compared}"


def render(ds: xr.Dataset, format: str = "text") -> str:
    """`summary` as "text", "markdown", "latex" (booktabs) or "csv" (full precision)."""
    if format not in FORMATS:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, FORMATS)}")
    if format == "csv":
        return summary(ds).to_csv()
    if format == "latex":
        return latex(ds)
    table = _readable(ds).reset_index()
    notes = footnotes(ds)
    if format == "markdown":
        return "\n".join([str(table.to_markdown(index=False, disable_numparse=True)), "", *(f"{note}<br>" for note in notes)]).rstrip()
    return "\n".join([str(table.to_markdown(index=False, disable_numparse=True, tablefmt="simple")), *notes])


def latex(ds: xr.Dataset) -> str:
    """`summary` as a LaTeX tabular (booktabs), cells escaped, with the run in a comment above it."""
    signs = {"\u2021": "$^\\ddagger$", "\u2020": "$^\\dagger$"}
    styler = _readable(ds).reset_index(drop=True).style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1)
    text = str(styler.to_latex(hrules=True, column_format="lrrrrrl"))
    for sign, command in signs.items():
        text = text.replace(f" {sign}", command)
    return "".join(f"% {line}\n" for line in [caption(ds), *footnotes(ds)]) + text


def caption(ds: xr.Dataset) -> str:
    """One line that says what the numbers of a run are of."""
    a = ds.attrs
    exact = "" if a["exact_samples"] == a["samples"] else f" (exact norms on the first {a['exact_samples']})"
    how = f"enclosed to {a['tol']:g} with failure probability {a['delta']:g}" if a["delta"] else f"estimated to {a['tol']:g}"
    plural = "s" if a["samples"] > 1 else ""
    return (
        f"{a['model']} ({a['architecture']}, {str(a['revision'])[:15]}); map: {a['map_description']}; data: {a['data']}, "
        f"{a['samples']} sample{plural} of at most {a['tokens']} tokens{exact}; exact norms by {a['method']} in {a['dtype']}, {how}"
    ).replace("\n", " ")


def bibtex(ds: xr.Dataset) -> str:
    """BibTeX entries of every source the run's bounds come from, and of lipbound."""
    keys = dict.fromkeys([ds[name].attrs["citation"] for name in ds.attrs["bounds"]] + ["lipbound2026"])
    return "\n\n".join(BIBTEX[key] for key in keys) + "\n"
