"""Tables of a run: bound / exact per bound, per layer or per head; as text, Markdown, LaTeX or CSV."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.aggregating import name_of, reduce_samples
from lipbound.bounds import get
from lipbound.bounds.auditing import SLACK, audit
from lipbound.citing import bibtex, methods
from lipbound.errors import LipboundError, UnknownNameError, nearest
from lipbound.writing import digits, number, plain
from lipbound.writing import latex as in_latex
from lipbound.writing import markdown as in_markdown

__all__ = ["FORMATS", "ROWS", "bibtex", "breakdown", "caption", "footnotes", "latex", "methods", "number", "readable", "render", "summary"]
FORMATS = ("text", "markdown", "latex", "csv")
ROWS = ("bound", "layer", "head")
VALUES = ("ratio", "value")
OFF_SCALE = 4.0
"""Decades by which a panel's median may exceed every other panel's before it leaves the shared scale."""
COLUMNS = {
    "geomean": "geom. mean", "samples": "over samples", "min": "min", "max": "max", "violations": "below exact", "compared": "of",
    "sound": "assumptions hold",
}  # fmt: skip
SIGNS = {"\u2021": "$^\\ddagger$", "\u2020": "$^\\dagger$"}


def summary(ds: xr.Dataset) -> pd.DataFrame:
    """Per bound: bound / exact over samples, layers and heads, and the audit.

    Columns ``label``; ``geomean, min, max`` of bound / ``exact``; ``geomean_lower``, the geometric mean against ``exact_upper``: the true one lies
    between the two (NaN for estimates without upper ends); ``sample_min, sample_max``, smallest and largest geometric mean of single samples;
    ``violations, compared, sound``: ``sound`` counts where the bound's assumptions held, ``violations`` where it is below the exact norm (of its own
    map: L2 attention for ``kim``). Heads whose exact norm is zero have no ratio.
    """
    rows = []
    counts = audit(ds)
    for name in ds.attrs["bounds"]:
        quotient = ratio(ds, name)
        values = quotient.values[~np.isnan(quotient.values)]
        single = _geomeans(quotient)
        known = single[~np.isnan(single)]
        lower = float(_geomean(ratio(ds, name, upper=True).values)) if _upper(ds, name) else float("nan")
        low, high = (float(values.min()), float(values.max())) if values.size else (float("nan"), float("nan"))
        least, most = (float(known.min()), float(known.max())) if known.size else (float("nan"), float("nan"))
        entry = counts[name]
        rows.append(
            (name, ds[name].attrs["label"], _geomean(values), low, high, lower, least, most, entry["violations"], entry["compared"], entry["sound"])
        )
    columns = ["bound", "label", "geomean", "min", "max", "geomean_lower", "sample_min", "sample_max", "violations", "compared", "sound"]
    return pd.DataFrame(rows, columns=columns).set_index("bound")


def breakdown(
    ds: xr.Dataset, by: str = "layer", *, bounds: Iterable[str] | None = None, reduce: str | float = "geomean", values: str = "ratio"
) -> pd.DataFrame:
    """Per layer, or per layer and head: the exact norm, and every bound or its ratio to it.

    Args:
        ds: a run.
        by: "layer" or "head".
        bounds: which; all of the run by default.
        reduce: "geomean", "mean", "max", "median" or a quantile, over samples (and heads, for layers).
        values: "ratio" (bound / exact) or "value".

    Returns:
        Columns ``exact``, ``exact_upper`` (where the run has it), ``sample_min, sample_max`` (of the exact norm, reduced over heads alone), and one
        per bound.

    Raises:
        LipboundError: unknown names; heads of a run on whole layers.
    """
    if by not in ROWS[1:]:
        raise UnknownNameError(f"unknown rows {by!r}; {nearest(by, ROWS)}")
    if values not in VALUES:
        raise UnknownNameError(f"unknown values {values!r}; {nearest(values, VALUES)}")
    if by == "head" and "head" not in ds.dims:
        raise LipboundError("the run is about whole layers and has no heads; ask for a table by layer")
    names = list(ds.attrs["bounds"]) if bounds is None else _present(ds, bounds)
    inner = tuple(dim for dim in ("head",) if dim in ds.dims and by == "layer")

    def reduced(array: xr.DataArray) -> np.ndarray:
        with np.errstate(all="ignore"):
            result = reduce_samples(array, reduce, ("sample", *inner))
        return result.transpose("layer", ...).values.ravel()

    with np.errstate(all="ignore"):
        single = reduce_samples(ds["exact"], reduce, inner) if inner else ds["exact"]
    keep = ("layer",) if by == "layer" else ("layer", "head")
    columns = {"exact": reduced(ds["exact"])} | ({"exact_upper": reduced(ds["exact_upper"])} if "exact_upper" in ds else {})
    for name, extreme in (("sample_min", single.min("sample")), ("sample_max", single.max("sample"))):
        columns[name] = extreme.transpose(*keep).values.ravel()
    columns |= {name: reduced(ratio(ds, name) if values == "ratio" else ds[name]) for name in names}
    index: Any = pd.Index(ds["layer"].values, name="layer")
    if by == "head":
        index = pd.MultiIndex.from_product([ds["layer"].values, ds["head"].values], names=["layer", "head"])
    table = pd.DataFrame(columns, index=index)
    return table.loc[~table[["exact", *names]].isna().all(axis=1)]  # layers of fewer heads have empty places


def render(
    ds: xr.Dataset,
    format: str = "text",
    *,
    by: str = "bound",
    bounds: Iterable[str] | None = None,
    reduce: str | float = "geomean",
    values: str = "ratio",
) -> str:
    """`summary` (by "bound") or `breakdown` (by "layer" or "head") as "text", "markdown", "latex" (booktabs, siunitx) or "csv" (full precision).

    Numbers are the middles of their enclosures, to the digits that these support (four at most): the last one is off by at most one unit. Enclosures
    are those of the exact norms, widened by ``exact_rounding``.
    """
    if format not in FORMATS:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, FORMATS)}")
    if by not in ROWS:
        raise UnknownNameError(f"unknown rows {by!r}; {nearest(by, ROWS)}")
    chosen = None if bounds is None else list(bounds)
    if by == "bound":
        whole = summary(ds)
        table = whole if chosen is None else whole.loc[_present(ds, chosen)]
        shown = readable(ds).loc[table.index]
        head = ""
    else:
        table = breakdown(ds, by, bounds=chosen, reduce=reduce, values=values)
        shown = _by_place(ds, table, values, reduce)
        over = "samples" if by == "head" or "head" not in ds.dims else "samples and heads"
        what = "bound / exact" if values == "ratio" else "bound"
        head = f"{name_of(reduce)} over {over}: exact, its range over samples, {what}"
        if ds.attrs["exact_samples"] != ds.attrs["samples"]:
            bounded = "" if values == "ratio" else f", bounds over all {ds.attrs['samples']}"
            head += f"; exact norms are of the first {ds.attrs['exact_samples']} samples{bounded}"
    if format == "csv":
        if "label" in table:
            table = table.assign(label=table["label"].map(plain))
        return str(table.to_csv())
    notes = footnotes(ds, chosen)
    if format == "latex":
        return _latex([*filter(None, [head]), caption(ds), *notes], shown)
    if format == "markdown":
        cells = shown.map(in_markdown).rename(columns=in_markdown)
        lines = [head, ""] if head else []
        return "\n".join([*lines, str(cells.to_markdown(index=False, disable_numparse=True)), "", *(f"{note}<br>" for note in notes)]).rstrip()
    text = str(shown.map(plain).rename(columns=plain).to_markdown(index=False, disable_numparse=True, tablefmt="simple"))
    return "\n".join([*filter(None, [head]), text, *notes])


def latex(ds: xr.Dataset, **options: Any) -> str:
    r"""`render` as a LaTeX tabular for ``\usepackage{booktabs, siunitx}``, cells escaped, with the run in a comment above it."""
    return render(ds, "latex", **options)


def _present(ds: xr.Dataset, bounds: Iterable[str]) -> list[str]:
    """Names of bounds that a run has; others raise."""
    names = [get(name).name for name in bounds]
    missing = [name for name in names if name not in ds.attrs["bounds"]]
    if missing:
        raise UnknownNameError(f"the run has no bound {missing[0]!r}; it has {', '.join(ds.attrs['bounds'])}")
    return names


def panels(ds: xr.Dataset, bounds: Iterable[str] | None = None) -> list[str]:
    """Variables in the order of figures: the exact norm, then bounds, each behind the exact norm of its own map."""
    names = ["exact"]
    for name in ds.attrs["bounds"] if bounds is None else _present(ds, bounds):
        if get(name).exact not in names:
            names.append(get(name).exact)  # a bound on another map stands next to the exact norm of that map
        names.append(name)
    return names


def shared_scale(grids: dict[str, np.ndarray]) -> tuple[float, float]:
    """Limits of the common colour scale: all panels, except those whose median lies decades above every other one."""
    medians = {name: float(np.nanmedian(np.where(np.isneginf(grid), np.nan, grid))) for name, grid in grids.items() if np.isfinite(grid).any()}
    kept: list[str] = []
    for name in sorted(medians, key=lambda n: medians[n]):
        if kept and medians[name] > max(medians[n] for n in kept) + OFF_SCALE:
            break
        kept.append(name)
    finite = np.concatenate([grids[name][np.isfinite(grids[name])] for name in kept]) if kept else np.zeros(1)
    return float(finite.min()), float(finite.max())


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


def caption(ds: xr.Dataset) -> str:
    """One line that says what the numbers of a run are of."""
    a = ds.attrs
    exact = "" if a["exact_samples"] == a["samples"] else f" (exact norms on the first {a['exact_samples']})"
    how = f"enclosed to {a['tol']:g} with failure probability {a['delta']:g}" if a["delta"] else f"estimated to {a['tol']:g}"
    plural = "s" if a["samples"] > 1 else ""
    return plain(
        f"{a['model']} ({a['architecture']}, {str(a['revision'])[:15]}); map: {a['map_description']}; data: {a['data']}, "
        f"{a['samples']} sample{plural} of at most {a['tokens']} tokens{exact}; exact norms by {a['method']} in {a['dtype']}, {how}"
    )


def widths(ds: xr.Dataset, name: str = "exact") -> xr.DataArray:
    """Logarithm of upper over lower end of the exact norms that a bound (or "exact" itself) is compared with, by sample, layer, head.

    Both ends are moved apart by ``exact_rounding``.
    Estimates without an upper end count as if they were ``tol`` wide. NaN where there is no norm, infinite where rounding exceeds it.
    """
    slack, of = SLACK[ds.attrs["dtype"]], "exact" if name == "exact" else get(name).exact
    rounding = ds["exact_rounding"] if of == "exact" else 0 * ds["exact_rounding"]
    lower = ds[of] - rounding
    upper = (ds["exact_upper"] if _upper(ds, name) else ds[of] * (1 + float(ds.attrs["tol"]))) + rounding
    with np.errstate(all="ignore"):
        width: xr.DataArray = xr.apply_ufunc(np.log, upper / lower.where(lower > 0, 0.0)) + slack
    return width.where(ds[of] > 0)


def width(ds: xr.Dataset, name: str) -> float:
    """Relative width of the enclosure of the geometric mean of a bound's ratios (or of exact norms), over everything."""
    values = widths(ds, name).values
    known = values[~np.isnan(values)]
    return float(np.expm1(known.mean())) if known.size else 0.0


def _upper(ds: xr.Dataset, name: str) -> bool:
    """Whether the exact norm that a bound is compared with (or "exact" itself) has an upper end."""
    return "exact_upper" in ds and (name == "exact" or get(name).exact == "exact")


def ratio(ds: xr.Dataset, name: str, *, upper: bool = False) -> xr.DataArray:
    """Bound / exact, of the bound's own map, where that is positive; with ``upper``, against the upper end."""
    exact = ds["exact_upper" if upper else get(name).exact]
    with np.errstate(all="ignore"):
        return (ds[name] / exact).where(np.isfinite(exact) & (exact > 0))


def _geomean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(values).mean())) if values.size else float("nan")


def _geomeans(values: xr.DataArray) -> np.ndarray:
    """Geometric mean of every sample."""
    return np.array([_geomean(values.isel(sample=s).values) for s in range(values.sizes["sample"])])


def readable(ds: xr.Dataset) -> pd.DataFrame:
    """`summary` in words: as many digits as are known, labels with the audit's marks."""
    table, counts = summary(ds), audit(ds)
    shown = pd.DataFrame(index=table.index)
    shown["label"] = [row["label"] + mark(counts[str(name)]) for name, row in table.iterrows()]

    wide = {str(name): _extents(ds, str(name)) for name in table.index}

    def column(of: str) -> list[str]:
        return [_written(float(row[of]), wide[str(name)][of], -1) for name, row in table.iterrows()]

    shown["geomean"] = column("geomean")
    shown["samples"] = [f"{a} to {b}" if a != b else a for a, b in zip(column("sample_min"), column("sample_max"), strict=True)]
    shown["min"], shown["max"] = column("min"), column("max")
    shown["violations"], shown["compared"] = table["violations"].astype(str), table["compared"].astype(str)
    shown["sound"] = [holds(int(s), int(c)) for s, c in zip(table["sound"], table["compared"], strict=True)]
    return shown.rename(columns={"label": "bound"} | COLUMNS)


def _by_place(ds: xr.Dataset, table: pd.DataFrame, values: str, reduce: str | float) -> pd.DataFrame:
    """`breakdown` in words."""
    counts = audit(ds)
    shown = pd.DataFrame(index=table.index)
    for level in table.index.names:
        shown[str(level)] = [str(value) for value in table.index.get_level_values(level)]
    whole = by_width(ds, "exact", table.index, reduce)
    shown["exact"] = [_written(x, w, 1) for x, w in zip(table["exact"], whole, strict=True)]
    pairs = zip(table["sample_min"], table["sample_max"], whole, strict=True)
    shown["over samples"] = [f"{_written(a, w, 1)} to {_written(b, w, 1)}" if a != b else _written(a, w, 1) for a, b, w in pairs]
    for name in [str(c) for c in table.columns if c in ds.attrs["bounds"]]:
        wide = by_width(ds, name, table.index, reduce) if values == "ratio" else np.full(len(table), SLACK[ds.attrs["dtype"]])
        side = -1 if values == "ratio" else 0
        shown[ds[name].attrs["label"] + mark(counts[name])] = [_written(x, w, side) for x, w in zip(table[name], wide, strict=True)]
    return shown


def by_width(ds: xr.Dataset, name: str, index: pd.Index, reduce: str | float) -> np.ndarray:
    """Relative widths of the enclosures of the rows of `breakdown`: the mean logarithm for geometric means, else the largest of a row."""
    wide = widths(ds, name)
    dims = [dim for dim in wide.dims if dim not in index.names]
    with warnings.catch_warnings():  # places without a head
        warnings.simplefilter("ignore", RuntimeWarning)
        one = wide.mean(dims) if reduce == "geomean" else wide.max(dims)
    values = one.transpose(*index.names).values.ravel()
    every = pd.MultiIndex.from_product([ds[level].values for level in index.names]) if len(index.names) > 1 else pd.Index(ds["layer"].values)
    return np.expm1(values)[every.get_indexer(index)]


def _extents(ds: xr.Dataset, name: str) -> dict[str, float]:
    """Relative widths of the enclosures of a row of `summary`, by column."""
    wide, quotient = widths(ds, name).values, ratio(ds, name).values
    if not (~np.isnan(quotient)).any():
        return dict.fromkeys(("geomean", "sample_min", "sample_max", "min", "max"), 0.0)
    single = [np.nanmean(w) for w in wide if (~np.isnan(w)).any()]
    ends = {"min": wide.flat[np.nanargmin(quotient)], "max": wide.flat[np.nanargmax(quotient)]}
    found = ends | {"geomean": np.nanmean(wide), "sample_min": max(single), "sample_max": max(single)}
    return {column: float(np.expm1(value)) for column, value in found.items()}


def _written(x: float, wide: float, side: int) -> str:
    """A number to the digits that its enclosure supports: x is its lower end (side 1), its upper end (-1) or its middle (0)."""
    x, wide = float(x), float(np.nan_to_num(wide, nan=0.0, posinf=10.0))
    middle = x * (1 + wide / 2) if side > 0 else x / (1 + wide) * (1 + wide / 2) if side < 0 else x
    return number(middle, digits(middle, wide))


def _latex(comments: list[str], shown: pd.DataFrame) -> str:
    """A tabular: the first column text, then columns of numbers that siunitx aligns, where all of a column is numbers."""
    cells, formats = pd.DataFrame(index=shown.index), []
    for title in shown.columns:
        column = [str(x).replace(",", "") for x in shown[title]]
        parsed = [re.fullmatch(r"(\d+)(?:\.(\d+))?(?:e(-?)(\d+))?", x) for x in column]
        if any(parsed) and all(p or x in ("inf", "n/a") for p, x in zip(parsed, column, strict=True)):
            cells[title] = ["{$\\infty$}" if x == "inf" else "{--}" if x == "n/a" else x for x in column]
            formats.append(_table_format([p for p in parsed if p]))
        else:
            cells[title] = [_signed(x) for x in shown[title]]
            formats.append("l" if title in ("bound", COLUMNS["sound"]) else "r")
    headers = [_signed(str(title)) for title in shown.columns]
    cells.columns = pd.Index(headers)
    styler = cells.reset_index(drop=True).style.hide(axis="index")
    text = str(styler.to_latex(hrules=True, siunitx=True, column_format="".join(formats)))
    return "".join(f"% {plain(line)}\n" for line in ["\\usepackage{booktabs, siunitx}", *comments]) + text


def _table_format(numbers: list[re.Match[str]]) -> str:
    """What siunitx reserves for a column."""
    whole = max(len(m[1]) for m in numbers)
    decimals = max(len(m[2] or "") for m in numbers)
    exponent = max(len(m[4] or "") for m in numbers)
    sign = "-" if any(m[3] for m in numbers) else ""
    return f"S[table-format={whole}.{decimals}{f'e{sign}{exponent}' if exponent else ''}]"


def _signed(text: str) -> str:
    """Foreign text with the audit's marks, for LaTeX."""
    text = in_latex(text)
    for sign, command in SIGNS.items():
        text = text.replace(f" {sign}", command)
    return text
