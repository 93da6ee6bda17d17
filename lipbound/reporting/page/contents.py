"""Numbers, words and details of a run for a report's page, as plain data."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from lipbound.bounds.audit import allowance, audit
from lipbound.errors import LipboundError
from lipbound.formatting import plain
from lipbound.models.inputs import token_texts
from lipbound.reporting import citations, labels, statistics, tables
from lipbound.reporting.figures.scales import scales
from lipbound.reporting.page.details import RADII, SIDE, Details, details
from lipbound.reporting.statistics import reduce_samples, reduction_name
from lipbound.runs.replay import replay
from lipbound.schema import Contents, bounds_there, compared_with, norm_of

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
    "model",
    "revision",
    "quantization",
    "architecture",
    "data",
    "data_fingerprint",
    "preprocessing",
    "layers and heads",
    "samples",
    "exact_samples",
    "tokens",
    "map_description",
    "norm",
    "method",
    "tol",
    "delta",
    "dtype",
    "device",
    "seed",
    "capture_error",
    "lipbound",
    "python",
    "date",
    "command",
)


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
    across = "head" if "head" in ds.dims else "sample"
    names, there = bounds_there(ds), Contents.of(ds)
    colours = _scales(ds, reduce)
    panels = [name for scale in colours for name in scale["names"]]
    kept = ds.isel(sample=slice(0, SINGLE)) if across == "head" else ds
    ratios = {name: statistics.ratio(ds, name) for name in names}
    shown = tables.readable(ds)
    return {
        "title": plain(title),
        "model": plain(labels.model_name(ds)),
        "caption": labels.run_caption(ds),
        "across": across,
        "layers": ds["layer"].values.tolist(),
        "columns": ds[across].values.tolist(),
        "samples": ds.sizes["sample"],
        "reduce": reduction_name(reduce),
        "panels": panels,
        "bounds": names,
        "labels": {name: plain(ds[name].attrs["label"]) for name in panels},
        "marks": {name: labels.mark(entry).strip() for name, entry in audit(ds).items()},
        "left": list(ds.attrs.get("not_applicable", {})),
        "tokens_most": there.tokens,
        "map": plain(ds.attrs["map_description"]),
        "norm": plain(labels.norm_words(ds)),
        "steepest": STEEPEST[norm_of(ds)],
        "statements": {name: plain(ds[name].attrs["statement"]) for name in names},
        "formulas": {
            name: plain(ds[name].attrs.get("statement_latex", ds[name].attrs["statement"]))
            for name in names
        },
        "sources": {name: plain(ds[name].attrs["source"]) for name in names},
        "compared": {name: compared_with(ds, name) for name in names},
        "exactSamples": there.exact_samples,
        "widths": {
            name: _widths(ds, one, reduce, across) for name, one in _examples(ds, names).items()
        },
        "slack": allowance(),
        "scales": colours,
        "grids": {name: _grid(ds[name], reduce, across) for name in panels},
        "ratios": {name: _grid(ratio, reduce, across) for name, ratio in ratios.items()},
        "upper": _grid(ds["exact_upper"], reduce, across) if "exact_upper" in ds else None,
        "values": {
            name: _nested(kept[name], across)
            for name in [*panels, *(["exact_upper"] if "exact_upper" in ds else [])]
        },
        "histograms": {name: _histogram(ratio) for name, ratio in ratios.items()},
        "summary": {
            "head": list(shown.columns),
            "rows": [
                [name, *map(plain, row)] for name, row in zip(names, shown.values, strict=True)
            ],
        },
        "notes": labels.footnotes(ds),
        "provenance": _provenance(ds),
        "methods": citations.methods(ds, "text"),
        "bibtex": citations.bibtex(ds),
        "sample": int(ds["sample"][sample]),
        "tokens": [plain(word) for word in words],
        "details": None if found is None else [_packed(one) for one in found],
        "reason": reason,
        "side": SIDE,
    }


def attention_bytes(found: Sequence[dict[str, Any]] | None) -> bytes:
    """All attention maps of a run one after the other, removed from the details they come with."""
    return b"".join(one.pop("attention") for one in found or [])


def _details(
    ds: xr.Dataset, sample: int, model: Any, data: Any, device: str, balls: bool
) -> tuple[list[Details] | None, list[str], str]:
    """Details of all layers and the words of the sample's tokens; or None and the reason."""
    if "head" not in ds.dims:
        return None, [], "the run is about whole layers, and details are of single heads"
    try:
        rerun = replay(ds, model=model, data=data, device=device)
        if rerun.differences:
            return None, [], plain("; ".join(rerun.differences))
        found = details(rerun, ds, sample, balls=balls)
        wrong = [
            int(ds["layer"][i]) for i, one in enumerate(found) if not _same(ds, sample, i, one.norm)
        ]
        if wrong:
            return (
                None,
                [],
                f"the norms of layers {', '.join(map(str, wrong))} are not those of the run: "
                "other weights, or other inputs",
            )
        return found, token_texts(rerun.checkpoint, rerun.inputs, sample), ""
    except LipboundError as error:
        return None, [], plain(str(error))


def _same(ds: xr.Dataset, sample: int, layer: int, norm: np.ndarray) -> bool:
    """True where norms computed now lie where the run's do; nothing to compare is no objection."""
    stored = ds["exact"].isel(sample=sample, layer=layer).values[: len(norm)]
    allowed = stored * (float(ds.attrs["tol"]) + 1e-3)
    return bool((np.isnan(stored) | (np.abs(norm - stored) <= allowed)).all())


def _packed(one: Details) -> dict[str, Any]:
    return {
        "attention": one.attention.tobytes(),
        "shape": list(one.attention.shape),
        "stride": one.stride,
        "softmax_norm": _numbers(one.softmax_norm),
        "right": _numbers(one.right, 3),
        "left": _numbers(one.left, 3),
        "alone": _numbers(one.alone, 4),
        "reached": _numbers(one.reached, 4),
        "parts": {name: _numbers(v) for name, v in one.parts.items()},
        "shares": {
            name: {term: _numbers(v) for term, v in terms.items()}
            for name, terms in one.bounds.items()
        },
        "balls": None
        if one.balls is None
        else {
            "length": float(f"{one.balls.length:.3g}"),
            "radii": RADII,
            "upper": _numbers(one.balls.upper),
        },
    }


def _scales(ds: xr.Dataset, reduce: str | float) -> list[dict[str, Any]]:
    """Panels and ends of every colour bar, in the order of the figures.

    The exact norm and what is near it come first, then the others.
    """
    names = statistics.panels(ds)
    with np.errstate(all="ignore"):
        grids = {
            name: np.log10(
                np.array(reduce_samples(ds[name], reduce) if "head" in ds.dims else ds[name])
            )
            for name in names
        }
    return [
        {
            "names": list(scale.names),
            "low": round(scale.low, 3),
            "high": round(scale.high, 3),
            "colors": scale.colors.capitalize(),
        }
        for scale in scales(ds, grids, "rows")
    ]


def _grid(values: xr.DataArray, reduce: str | float, across: str) -> Any:
    """(layers, heads) over samples, or (layers, samples)."""
    with np.errstate(all="ignore"):
        grid = reduce_samples(values, reduce) if across == "head" else values
    return _numbers(grid.transpose("layer", across).values)


def _examples(ds: xr.Dataset, names: Sequence[str]) -> dict[str, str]:
    """For every exact norm of a run the name of something that is compared with it."""
    return {"exact": "exact"} | {
        compared_with(ds, name): name for name in names if compared_with(ds, name) != "exact"
    }


def _widths(ds: xr.Dataset, name: str, reduce: str | float, across: str) -> Any:
    """Relative widths of the enclosures of a grid's cells.

    The mean logarithm for geometric means, else the largest.
    """
    wide = statistics.widths(ds, name)
    if across == "head":
        with warnings.catch_warnings():  # places without a head
            warnings.simplefilter("ignore", RuntimeWarning)
            wide = wide.mean("sample") if reduce == "geomean" else wide.max("sample")
    return _numbers(np.expm1(wide.transpose("layer", across).values))


def _nested(values: xr.DataArray, across: str) -> Any:
    """(samples, layers, heads), or (layers, samples) again where there are no heads."""
    return _numbers(
        values.transpose("sample", "layer", "head").values
        if across == "head"
        else values.transpose("layer", "sample").values
    )


def _numbers(values: np.ndarray, digits: int = 6) -> Any:
    """Nested lists of rounded numbers; "inf" and null where JSON has no number."""
    if values.ndim:
        return [_numbers(row, digits) for row in values]
    x = float(values)
    return (
        None
        if np.isnan(x)
        else ("inf" if x > 0 else "-inf")
        if np.isinf(x)
        else float(f"{x:.{digits - 1}e}")
    )


def _histogram(ratio: xr.DataArray) -> dict[str, Any]:
    """Counts of log10 bound / exact."""
    values = ratio.values[np.isfinite(ratio.values) & (ratio.values > 0)]
    if not values.size:
        return {"edges": [], "counts": [], "infinite": int(np.isinf(ratio.values).sum())}
    logs = np.log10(values)
    low, high = float(logs.min()), float(logs.max())
    pad = max((high - low) * 0.02, 1e-3)
    counts, edges = np.histogram(
        logs, bins=BINS, range=(low - pad if low < 0 else max(0.0, low - pad), high + pad)
    )
    return {
        "edges": np.round(edges, 6).tolist(),
        "counts": counts.tolist(),
        "infinite": int(np.isinf(ratio.values).sum()),
    }


def _provenance(ds: xr.Dataset) -> list[list[str]]:
    there = Contents.of(ds)
    shown = {
        "layers and heads": labels.places(ds),
        "samples": there.samples,
        "exact_samples": there.exact_samples,
        "tokens": there.tokens,
    }
    said = (
        ds.attrs
        | shown
        | {
            "norm": labels.norm_words(ds),
            "model": labels.model_name(ds),
            "data": labels.data_name(ds),
        }
    )
    rows = [
        [
            name.replace("_", " "),
            plain(f"{said[name]:.3g}" if isinstance(said[name], float) else str(said[name])),
        ]
        for name in PROVENANCE
        if name in said
    ]
    packages = ", ".join(f"{name} {version}" for name, version in ds.attrs["versions"].items())
    state = labels.state_words(ds)
    return [*rows, ["versions", plain(packages)], *([["state", state]] if state else [])]
