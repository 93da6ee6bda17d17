"""Self-contained page of one run or several.

It holds heatmaps, single heads, the audit, provenance and citations.
"""

import base64
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import xarray as xr
from markupsafe import Markup

from lipbound.bounds.audit import allowance, audit
from lipbound.devices import resolve_device
from lipbound.errors import LipboundError, file_path, knows_options
from lipbound.formatting import check_folder, enclosed, formula, plain, plain_data, replacing
from lipbound.models.inputs import token_texts
from lipbound.reporting import citations, labels, statistics, tables
from lipbound.reporting.labels import model_name, relabelled, told_apart
from lipbound.reporting.page.details import Details, details
from lipbound.reporting.plots import caption, heatmaps, log10, scales
from lipbound.reporting.statistics import across
from lipbound.runs import store
from lipbound.runs.store import both_runs, diff_of, run_of
from lipbound.runs.verify import replay
from lipbound.schema import AXES, INPUT, Contents, bounds_there, compared_with, is_diff, norm_of

HERE = Path(__file__).parent
_NEEDED = ("latex2mathml", "plotly")
"""Packages that only the page needs: the extra ``report``."""
SINGLE = 16
"""Samples whose numbers go into the page one by one; more only take part in what is aggregated."""
BINS = 40
DetailsOrReason = tuple[list[Details | None] | None, list[str], str]
LEFT_OUT: DetailsOrReason = (None, [], "they were left out when the report was made")


@knows_options
def report(
    runs: xr.Dataset | str | Path | Sequence[xr.Dataset | str | Path],
    path: str | Path,
    *,
    reduce: str | float = "geomean",
    sample: int = 0,
    details: bool = True,
    model: Any = None,
    data: Any = None,
    device: str = "auto",
    labels: Mapping[str, str] | None = None,
) -> list[str]:
    """Write a page about one run, or about several side by side.

    The page needs no network and no other file: numbers and plotly.js are inside, compressed. For
    the details of single heads (attention, singular vectors, the terms of a bound) the model and
    the inputs are loaded again from the run's provenance, one sample of them; where that is not
    possible, or they are no longer what they were, the page says so and has everything else. Of a
    run without bounds it shows exact norms alone.

    Args:
        runs: Datasets, or names of saved runs. A diff of two runs counts as both of them; its
            ratios come first.
        path: of the page, an .html file; an older one is replaced.
        reduce: "geomean", "mean", "max", "median" or a quantile, over samples.
        sample: position of the sample whose attention is shown.
        details: False leaves them out.
        model, data: in place of those recorded, for runs on objects in memory (one run only).
        device: where details are computed.
        labels: what to call bounds, by name ("exact" and "exact_l2" among them), and "model" and
            "data"; each is for the runs that have the name.

    Returns:
        A sentence for every run without the details that were wanted: why there are none.

    Raises:
        LipboundError: no run, an unknown reduction, no such sample or device, a file that cannot be
            written.
    """
    _check_needed()
    given: Any = runs
    single = isinstance(runs, xr.Dataset | str | Path) or not isinstance(runs, Iterable)
    if not (several := [given] if single else list(given)):
        raise LipboundError("no run was given; give at least one Dataset or saved run")
    if len(several) > 1 and (model is not None or data is not None):
        raise LipboundError("model= and data= are for a single run; make a page of each")
    target = file_path(path, "report.html")
    if target.suffix.lower() not in (".html", ".htm"):
        raise LipboundError(f"{target} is not an .html file; a report is a page")
    # before minutes of work, and before an older page is replaced
    check_folder(target)
    if details:
        device = resolve_device(device)
    pages, attention, diffs, named = [], b"", list[dict[str, str]](), []
    wanted: Any = dict(labels or {})
    for run in several:
        ds = store.load(run, damaged="refuse") if isinstance(run, str | Path) else run
        if is_diff(ds):
            diffs.append(_diff(diff_of(ds)))
            named += [(one, model_name(one)) for one in both_runs(ds)]
        else:
            ds = run_of(ds)
            named.append((ds, model_name(ds) if isinstance(run, xr.Dataset) else Path(run).stem))
    for run, title in named:
        known = {*run.variables, "model", "data"} if len(named) > 1 else wanted
        ds = relabelled(run_of(run), {name: wanted[name] for name in wanted if name in known})
        if not 0 <= sample < ds.sizes["sample"]:
            last = ds.sizes["sample"] - 1
            raise LipboundError(f"sample is {sample}; the run has samples 0 to {last}")
        found = details_or_reason(ds, sample, model, data, device) if details else LEFT_OUT
        attention += b"".join(one.attention.tobytes() for one in found[0] or [] if one)
        pages.append(contents(ds, title, reduce=reduce, sample=sample, details=found))
    for one, title in zip(pages, told_apart(one["title"] for one in pages), strict=True):
        one["title"] = title
    text = _page(pages, attention, diffs)
    with replacing(target) as (page,):
        page.write_text(text, encoding="utf-8")
    bare = [one for one in pages if details and one["details"] is None]
    return [plain(f"{one['title']}: no details of single heads: {one['reason']}") for one in bare]


def _check_needed() -> None:
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        them = " and ".join(missing)
        raise LipboundError(f"a report needs {them}; pip install 'lipbound[report]'")


def _diff(ds: xr.Dataset) -> dict[str, str]:
    """Figure of a diff, as the address of an image, and its tables, in HTML."""
    drawn = io.BytesIO()
    heatmaps(ds).savefig(drawn, format="svg", metadata={"Date": None})
    made = [replace(tables.table_of(ds, by), caption="") for by in ("bound", "layer")]
    return {
        "image": f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}",
        "words": caption(ds),
        "tables": "".join(one._repr_html_() for one in made),
    }


def _page(pages: list[dict[str, Any]], attention: bytes, diffs: list[dict[str, str]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    # escapes what is no formula
    environment.filters["formula"] = lambda text: Markup(formula(text))
    data = json.dumps(pages, default=_numbers, allow_nan=False, separators=(",", ":"))
    parts = {"data": _packed(data.encode()), "attention": _packed(attention), "plotly": _plotly()}
    return environment.get_template("page.html").render(runs=pages, parts=parts, diffs=diffs)


@cache
def _plotly() -> str:
    """The library of the figures."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs().encode())


def _packed(content: bytes) -> str:
    """Compressed, in characters that mean nothing to HTML."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def contents(
    ds: xr.Dataset,
    title: str,
    *,
    reduce: str | float = "geomean",
    sample: int = 0,
    details: DetailsOrReason = LEFT_OUT,
) -> dict[str, Any]:
    """Collect a run's numbers, words and details for a page as plain data and arrays.

    ``details`` are those of its layers and the words of the sample's tokens, or None and why there
    are none; attention maps are left out.
    """
    found, tokens, reason = details
    return {
        "title": plain(title),
        **_words(ds),
        **_values(ds, reduce),
        "sample": int(ds["sample"][sample]),
        "tokens": [plain(token) for token in tokens],
        "details": None if found is None else [one and _of_layer(one) for one in found],
        "reason": reason,
    }


def _words(ds: xr.Dataset) -> dict[str, Any]:
    """What a run and its bounds are called and say, and what is to be said of them."""
    names, made, there = bounds_there(ds), tables.table_of(ds), Contents.of(ds)
    shown = made.shown.drop(columns="name", errors="ignore")
    said = {name: ds[name].attrs for name in names}
    formulas = {name: said[name].get("statement_latex", said[name]["statement"]) for name in names}
    rows = [[name, *row] for name, row in shown.T.items()]
    facts = {name: labels.fact_words(fact) for name, fact in labels.facts(ds).items()}
    return {
        "caption": labels.run_caption(ds),
        "across": across(ds),
        "layers": ds["layer"].values.tolist(),
        "columns": ds[across(ds)].values.tolist(),
        "samples": there.samples,
        "exactSamples": there.exact_samples,
        "tokens_most": there.tokens,
        "bounds": names,
        "marks": {name: labels.mark(entry).strip() for name, entry in audit(ds).items()},
        "left": list(ds.attrs.get("not_applicable", {})),
        "map": plain(ds.attrs["map_description"]),
        "norm": plain(labels.norm_words(ds)),
        "norm_name": norm_of(ds),
        "statements": {name: plain(said[name]["statement"]) for name in names},
        "formulas": {name: plain(text) for name, text in formulas.items()},
        "sources": {name: plain(said[name]["source"]) for name in names},
        "compared": {name: compared_with(ds, name) for name in names},
        "summary": {"cells": made.head, "head": list(shown.columns), "rows": rows},
        "exact": enclosed(*statistics.mean_ends(ds, "exact")),
        "notes": made.notes,
        "provenance": [[name, words] for name, words in facts.items() if words],
        "methods": citations.methods(ds, "text"),
        "bibtex": citations.bibtex(ds),
    }


def _values(ds: xr.Dataset, reduce: str | float) -> dict[str, Any]:
    """Numbers of a run: reduced over samples, as ratios, and sample by sample."""
    names, shown = bounds_there(ds), [*statistics.panels(ds), *statistics.extras(ds)]
    colours = scales(ds, log10(ds, shown, reduce), "rows")
    panels = [name for scale in colours for name in scale.names]
    upper = ["exact_upper"] if "exact_upper" in ds else []
    ratios = {name: statistics.ratio(ds, name) for name in names}
    # something that is compared with each exact norm
    examples = {compared_with(ds, name): name for name in names} | {"exact": "exact"}
    widths = {of: statistics.cell_widths(ds, one, reduce) for of, one in examples.items()}
    whole = ds, ["layer", "sample"]
    kept, order = (ds.isel(sample=slice(SINGLE)), AXES) if "head" in ds.dims else whole

    def grid(values: xr.DataArray) -> np.ndarray:
        return statistics.panel(values, reduce).values

    return {
        "reduce": statistics.reduction_name(reduce),
        "panels": panels,
        "labels": {name: labels.label_of(ds, name) for name in panels},
        "slack": allowance(),
        "extras": {name: statistics.EXTRA_WIDTHS[name] for name in statistics.extras(ds)},
        "scales": [asdict(scale) for scale in colours],
        "widths": {of: wide.values for of, wide in widths.items()},
        "grids": {name: grid(ds[name]) for name in panels},
        "ratios": {name: grid(ratio) for name, ratio in ratios.items()},
        "upper": grid(ds["exact_upper"]) if upper else None,
        "values": {name: kept[name].transpose(*order).values for name in [*panels, *upper]},
        "histograms": {name: _histogram(ratio.values) for name, ratio in ratios.items()},
    }


def _of_layer(one: Details) -> dict[str, Any]:
    """`Details` by name; of the attention maps the shape alone."""
    return one._asdict() | {"attention": None, "shape": one.attention.shape}


def details_or_reason(
    ds: xr.Dataset, sample: int, model: Any, data: Any, device: str
) -> DetailsOrReason:
    """Details of all layers and the words of the sample's tokens; or None and the reason.

    There are no words where layers are of several streams of tokens.
    """
    if "head" not in ds.dims:
        return None, [], "the run is about whole layers, and details are of single heads"
    if ds.attrs["wrt"] != INPUT:
        return None, [], f"details are of heads as functions of the input, not of {ds.attrs['wrt']}"
    try:
        rerun = replay(ds, model=model, data=data, device=device)
        if rerun.differences:
            return None, [], plain("; ".join(rerun.differences))
        found = details(rerun, ds, sample)
        several = {"decoder_input_ids", "pixel_values"} & rerun.inputs.batch.keys()
        texts = [] if several else token_texts(rerun.checkpoint, rerun.inputs, sample)
    except LipboundError as error:
        return None, [], plain(str(error))
    there = ds.isel(sample=sample)
    pairs = zip(there["layer"].values, there["exact"], found, strict=True)
    tol = float(ds.attrs["tol"])
    wrong = [str(k) for k, exact, one in pairs if one and not _same(exact.values, one.norm, tol)]
    if not wrong:
        return found, texts, ""
    which = f"the norms of layers {', '.join(wrong)} are not those of the run"
    return None, [], f"{which}: other weights, or other inputs"


def _same(stored: np.ndarray, norm: np.ndarray, tol: float) -> bool:
    """True where norms computed now lie where the run's do; nothing to compare is no objection."""
    stored = stored[: len(norm)]
    return bool((np.isnan(stored) | np.isclose(norm, stored, rtol=tol + 1e-3, atol=0)).all())


def _numbers(values: np.ndarray) -> Any:
    """Nested lists of rounded numbers; "inf" and null where JSON has no number."""
    rounded = np.vectorize(lambda x: float(f"{x:.5e}"), otypes=[float])(values)
    return plain_data(rounded.tolist())


def _histogram(ratio: np.ndarray) -> dict[str, Any]:
    """Counts of log10 bound / exact."""
    logs = np.log10(ratio[np.isfinite(ratio) & (ratio > 0)])
    counts, edges = np.zeros(0), np.zeros(0)
    if logs.size:
        low, high = statistics.ends(logs)
        pad = max((high - low) * 0.02, 1e-3)
        ends = (low - pad if low < 0 else max(0.0, low - pad), high + pad)
        counts, edges = np.histogram(logs, bins=BINS, range=ends)
    infinite = int(np.isinf(ratio).sum())
    return {"edges": np.round(edges, 6).tolist(), "counts": counts.tolist(), "infinite": infinite}
