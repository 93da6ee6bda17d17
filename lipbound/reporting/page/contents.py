"""Numbers, words and details of a run for a report's page, as plain data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from lipbound.bounds.audit import allowance, audit
from lipbound.errors import LipboundError
from lipbound.formatting import plain
from lipbound.models.inputs import token_texts
from lipbound.reporting import citations, labels, statistics, tables
from lipbound.reporting.page.details import RADII, SIDE, Details, details
from lipbound.reporting.scales import log10, scales
from lipbound.reporting.statistics import across
from lipbound.runs.verify import replay
from lipbound.schema import AXES, Contents, bounds_there, compared_with, norm_of

SINGLE = 16
"""Samples whose numbers go into the page one by one; more only take part in what is aggregated."""
BINS = 40
STEEPEST = {
    "frobenius": "Moved: share of each token in the input direction that the head amplifies "
    "most; changes: in the output it moves",
    "every-token": "Every token moves by at most one, in the way that moves one output furthest. "
    "Moved: share of each token; changes: the output",
    "one-token": "One token moves by one, in the way that moves all outputs furthest. Moved: "
    "which; changes: share of each output",
}
"""Meaning of the shares of tokens, by norm."""
PROVENANCE = (
    *("model", "revision", "quantization", "architecture"),
    *("data", "data_fingerprint", "preprocessing"),
    *("layers and heads", "samples", "exact_samples", "tokens", "map_description", "norm"),
    *("method", "tol", "delta", "dtype", "device", "seed", "capture_error"),
    *("lipbound", "python", "date", "command", "versions", "state"),
)
"""Rows of the table on where numbers come from."""
DIGITS = {"right": 3, "left": 3, "alone": 4, "reached": 4}
"""Digits of `Details` by name, where six would be too many."""


def contents(
    ds: xr.Dataset,
    title: str,
    *,
    reduce: str | float,
    sample: int,
    model: Any,
    data: Any,
    device: str,
    wanted: bool,
    balls: bool = False,
) -> dict[str, Any]:
    """Collect a run's numbers, words and details for a page as plain data.

    ``wanted``: with details of single heads, which need its model and inputs again; ``balls``:
    these with bounds over balls.

    Raises:
        LipboundError: the run has no such sample, or no bounds.
    """
    if not 0 <= sample < ds.sizes["sample"]:
        raise LipboundError(
            f"sample is {sample}; the run has samples 0 to {ds.sizes['sample'] - 1}"
        )
    if not bounds_there(ds):
        raise LipboundError(
            "the run has no bounds, which a report is about; draw it with heatmaps, or compare "
            "it with some"
        )
    found, words, reason = (
        _details(ds, sample, model, data, device, balls)
        if wanted
        else (None, [], "they were left out when the report was made")
    )
    names, there, colours = bounds_there(ds), Contents.of(ds), _scales(ds, reduce)
    panels = [name for scale in colours for name in scale["names"]]
    upper = ["exact_upper"] if "exact_upper" in ds else []
    kept = ds.isel(sample=slice(0, SINGLE)) if across(ds) == "head" else ds
    ratios = {name: statistics.ratio(ds, name) for name in names}
    said, shown = {name: ds[name].attrs for name in names}, tables.readable(ds)

    def grid(values: xr.DataArray) -> Any:
        return _numbers(statistics.panel(values, reduce).values)

    return {
        "title": plain(title),
        "model": plain(labels.model_name(ds)),
        "caption": labels.run_caption(ds),
        "across": across(ds),
        "layers": ds["layer"].values.tolist(),
        "columns": ds[across(ds)].values.tolist(),
        "samples": ds.sizes["sample"],
        "reduce": statistics.reduction_name(reduce),
        "panels": panels,
        "bounds": names,
        "labels": {name: labels.label_of(ds, name) for name in panels},
        "marks": {name: labels.mark(entry).strip() for name, entry in audit(ds).items()},
        "left": list(ds.attrs.get("not_applicable", {})),
        "tokens_most": there.tokens,
        "map": plain(ds.attrs["map_description"]),
        "norm": plain(labels.norm_words(ds)),
        "steepest": STEEPEST[norm_of(ds)],
        "statements": {name: plain(said[name]["statement"]) for name in names},
        "formulas": {
            name: plain(said[name].get("statement_latex", said[name]["statement"]))
            for name in names
        },
        "sources": {name: plain(said[name]["source"]) for name in names},
        "compared": {name: compared_with(ds, name) for name in names},
        "exactSamples": there.exact_samples,
        "widths": {exact: _widths(ds, one, reduce) for exact, one in _examples(ds, names).items()},
        "slack": allowance(),
        "scales": colours,
        "grids": {name: grid(ds[name]) for name in panels},
        "ratios": {name: grid(ratio) for name, ratio in ratios.items()},
        "upper": grid(ds["exact_upper"]) if upper else None,
        "values": {name: _nested(kept[name]) for name in [*panels, *upper]},
        "histograms": {name: _histogram(ratio.values) for name, ratio in ratios.items()},
        "summary": {
            "head": list(shown.columns),
            "rows": [[name, *map(plain, row)] for name, row in shown.T.items()],
        },
        "notes": labels.footnotes(ds),
        "provenance": _provenance(ds),
        "methods": citations.methods(ds, "text"),
        "bibtex": citations.bibtex(ds),
        "sample": int(ds["sample"][sample]),
        "tokens": [plain(word) for word in words],
        "details": None if found is None else [one and _packed(one) for one in found],
        "reason": reason,
        "side": SIDE,
    }


def attention_bytes(found: Sequence[dict[str, Any] | None] | None) -> bytes:
    """All attention maps of a run one after the other, removed from the details they come with."""
    return b"".join(one.pop("attention") for one in found or [] if one)


def _details(
    ds: xr.Dataset, sample: int, model: Any, data: Any, device: str, balls: bool
) -> tuple[list[Details | None] | None, list[str], str]:
    """Details of all layers and the words of the sample's tokens; or None and the reason.

    There are no words where layers are of several streams of tokens.
    """
    if "head" not in ds.dims:
        return None, [], "the run is about whole layers, and details are of single heads"
    try:
        rerun = replay(ds, model=model, data=data, device=device)
        if rerun.differences:
            return None, [], plain("; ".join(rerun.differences))
        found = details(rerun, ds, sample, balls=balls)
        several = {"decoder_input_ids", "pixel_values"} & rerun.inputs.batch.keys()
        texts = [] if several else token_texts(rerun.checkpoint, rerun.inputs, sample)
    except LipboundError as error:
        return None, [], plain(str(error))
    there = ds.isel(sample=sample)
    pairs = zip(there["layer"].values, there["exact"], found, strict=True)
    tol = float(ds.attrs["tol"])
    wrong = [
        str(layer) for layer, exact, one in pairs if one and not _same(exact.values, one.norm, tol)
    ]
    if not wrong:
        return found, texts, ""
    which = f"the norms of layers {', '.join(wrong)} are not those of the run"
    return None, [], f"{which}: other weights, or other inputs"


def _same(stored: np.ndarray, norm: np.ndarray, tol: float) -> bool:
    """True where norms computed now lie where the run's do; nothing to compare is no objection."""
    stored = stored[: len(norm)]
    near = np.abs(norm - stored) <= stored * (tol + 1e-3)
    return bool((np.isnan(stored) | near).all())


def _packed(one: Details) -> dict[str, Any]:
    """`Details` as plain data, but for the attention maps, which stay bytes."""
    kept = ("stride", "softmax_norm", "right", "left", "alone", "reached", "parts", "bounds")
    found = {name: _rounded(getattr(one, name), DIGITS.get(name, 6)) for name in kept}
    found["balls"] = None
    if one.balls is not None:
        length, upper = float(f"{one.balls.length:.3g}"), _numbers(one.balls.upper)
        found["balls"] = {"length": length, "radii": RADII, "upper": upper}
    attention = {"attention": one.attention.tobytes(), "shape": list(one.attention.shape)}
    return found | attention


def _rounded(value: Any, digits: int) -> Any:
    """Arrays as lists of numbers, in dictionaries too."""
    if isinstance(value, dict):
        return {name: _rounded(part, digits) for name, part in value.items()}
    return _numbers(value, digits) if isinstance(value, np.ndarray) else value


def _scales(ds: xr.Dataset, reduce: str | float) -> list[dict[str, Any]]:
    """Panels and ends of every colour bar, in the order of the figures.

    The exact norm and what is near it come first, then the others.
    """
    return [
        {
            "names": list(scale.names),
            "low": round(scale.low, 3),
            "high": round(scale.high, 3),
            "colors": scale.colors.capitalize(),
        }
        for scale in scales(ds, log10(ds, statistics.panels(ds), reduce), "rows")
    ]


def _examples(ds: xr.Dataset, names: Sequence[str]) -> dict[str, str]:
    """For every exact norm of a run the name of something that is compared with it."""
    return {"exact": "exact"} | {
        compared_with(ds, name): name for name in names if compared_with(ds, name) != "exact"
    }


def _widths(ds: xr.Dataset, name: str, reduce: str | float) -> Any:
    """Relative widths of the enclosures of a grid's cells."""
    return _numbers(statistics.cell_widths(ds, name, reduce, ["layer", across(ds)]).values)


def _nested(values: xr.DataArray) -> Any:
    """(samples, layers, heads), or (layers, samples) again where there are no heads."""
    heads = across(values) == "head"
    return _numbers(values.transpose(*(AXES if heads else ("layer", "sample"))).values)


def _numbers(values: np.ndarray, digits: int = 6) -> Any:
    """Nested lists of rounded numbers; "inf" and null where JSON has no number."""
    if values.ndim:
        return [_numbers(row, digits) for row in values]
    x = float(values)
    if np.isfinite(x):
        return float(f"{x:.{digits - 1}e}")
    return None if np.isnan(x) else "inf" if x > 0 else "-inf"


def _histogram(ratio: np.ndarray) -> dict[str, Any]:
    """Counts of log10 bound / exact."""
    logs = np.log10(ratio[np.isfinite(ratio) & (ratio > 0)])
    counts, edges = np.zeros(0), np.zeros(0)
    if logs.size:
        low, high = float(logs.min()), float(logs.max())
        pad = max((high - low) * 0.02, 1e-3)
        ends = (low - pad if low < 0 else max(0.0, low - pad), high + pad)
        counts, edges = np.histogram(logs, bins=BINS, range=ends)
    infinite = int(np.isinf(ratio).sum())
    return {"edges": np.round(edges, 6).tolist(), "counts": counts.tolist(), "infinite": infinite}


def _provenance(ds: xr.Dataset) -> list[list[str]]:
    """Rows `PROVENANCE` of the page, as far as there is something to say."""
    there, said = Contents.of(ds), dict(ds.attrs)
    said |= {"samples": there.samples, "exact_samples": there.exact_samples, "tokens": there.tokens}
    said |= {"layers and heads": labels.places(ds), "norm": labels.norm_words(ds)}
    said |= {"model": labels.model_name(ds), "data": labels.data_name(ds)}
    packages = ", ".join(f"{name} {version}" for name, version in ds.attrs["versions"].items())
    said |= {"versions": packages}
    if state := labels.state_words(ds):
        said["state"] = state

    def text(value: Any) -> str:
        return plain(f"{value:.3g}" if isinstance(value, float) else str(value))

    return [[name.replace("_", " "), text(said[name])] for name in PROVENANCE if name in said]
