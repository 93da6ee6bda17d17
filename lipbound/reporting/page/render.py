"""Self-contained page of one run or several.

It holds heatmaps, single heads, the audit, provenance and tables.
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
from typing import Any, NamedTuple

import jinja2
import numpy as np
import torch
import xarray as xr
from markupsafe import Markup
from torch import Tensor

from lipbound import schema
from lipbound.attention import softmax
from lipbound.attention.layer import Attention
from lipbound.bounds.audit import allowance, audit
from lipbound.bounds.registry import get
from lipbound.devices import resolve_device
from lipbound.errors import AttentionError, LipboundError, file_path, knows_options
from lipbound.formatting import check_folder, enclosed, formula, plain, plain_data, replacing
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.jacobians.token_norms.token_norm import token_norm, token_profile
from lipbound.models.capture.capture import Capturer
from lipbound.models.inputs import token_texts
from lipbound.reporting import labels, statistics, tables
from lipbound.reporting.labels import model_name, relabelled, told_apart
from lipbound.reporting.plots import caption, heatmaps, log10, scales
from lipbound.runs import store
from lipbound.runs.verify import Replay, replay

HERE = Path(__file__).parent
SINGLE = 16
"""Samples whose numbers go into the page one by one; more only take part in what is aggregated."""
BINS = 40
SIDE = 128
"""Attention maps of more tokens are shrunk to at most this many rows: each entry then is the
largest of a square."""
TOL = 1e-6
"""Tolerance of the singular vectors, well below what a picture shows."""
TOKEN_TOL = 1e-3
"""The same in norms that tell tokens apart, where what is left open costs more to close."""


class Details(NamedTuple):
    """Details of the heads of one layer at one sample.

    Attributes:
        norm: the heads' exact norms, in the run's.
        attention: (heads, n, n) uint8, 255 sqrt(P) rounded; shrunk by ``stride``.
        softmax_norm: of every query's row, (heads, N).
        right, left: shares of the tokens in :math:`u^T J v`, (heads, N), each row summing to one:
            of those that the steepest perturbation v moves, and of those whose outputs change along
            u. In the Frobenius norm these are the squared lengths of the tokens' parts of the top
            singular vectors.
        alone, reached: `lipbound.token_profile`, (heads, N): how far all outputs go when a token
            moves alone, and an output when all tokens do.
        parts: shares of the exact norm that pass through values, keys and queries, each (heads,),
            summing to one.
        bounds: `lipbound.bounds.Bound.terms` of every bound that has terms: name -> term ->
            (heads,).
        stride: see ``attention``.
    """

    norm: np.ndarray
    attention: np.ndarray
    softmax_norm: np.ndarray
    right: np.ndarray
    left: np.ndarray
    alone: np.ndarray
    reached: np.ndarray
    parts: dict[str, np.ndarray]
    bounds: dict[str, dict[str, np.ndarray]]
    stride: int


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
    if missing := [name for name in ("latex2mathml", "plotly") if find_spec(name) is None]:
        them = " and ".join(missing)
        raise LipboundError(f"a report needs {them}; pip install 'lipbound[report]'")
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
        if schema.is_diff(ds):
            diffs.append(_diff(store.diff_of(ds)))
            named += [(one, model_name(one)) for one in store.both_runs(ds)]
        else:
            ds = store.run_of(ds)
            named.append((ds, model_name(ds) if isinstance(run, xr.Dataset) else Path(run).stem))
    titles = told_apart(plain(title) for _, title in named)
    for (run, _), title in zip(named, titles, strict=True):
        known = {*run.variables, "model", "data"} if len(named) > 1 else wanted
        ds = relabelled(store.run_of(run), {name: wanted[name] for name in wanted if name in known})
        if not 0 <= sample < ds.sizes["sample"]:
            last = ds.sizes["sample"] - 1
            raise LipboundError(f"sample is {sample}; the run has samples 0 to {last}")
        found = details_or_reason(ds, sample, model, data, device) if details else LEFT_OUT
        attention += b"".join(one.attention.tobytes() for one in found[0] or [] if one)
        pages.append(contents(ds, title, reduce, sample, found))
    text = _page(pages, attention, diffs)
    with replacing(target) as (page,):
        page.write_text(text, encoding="utf-8")
    bare = [one for one in pages if details and one["details"] is None]
    return [plain(f"{one['title']}: no details of single heads: {one['reason']}") for one in bare]


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
    ds: xr.Dataset, title: str, reduce: str | float, sample: int, details: DetailsOrReason
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
    names, made, there = schema.bounds_there(ds), tables.table_of(ds), schema.Contents.of(ds)
    shown = made.shown.drop(columns="name", errors="ignore")
    said = {name: ds[name].attrs for name in names}
    formulas = {name: said[name].get("statement_latex", said[name]["statement"]) for name in names}
    rows = [[name, *row] for name, row in shown.T.items()]
    facts = {name: labels.fact_words(fact) for name, fact in labels.facts(ds).items()}
    return {
        "caption": labels.run_caption(ds),
        "across": statistics.across(ds),
        "layers": ds["layer"].values.tolist(),
        "columns": ds[statistics.across(ds)].values.tolist(),
        "samples": there.samples,
        "exactSamples": there.exact_samples,
        "tokens_most": there.tokens,
        "bounds": names,
        "marks": {name: labels.mark(entry).strip() for name, entry in audit(ds).items()},
        "left": list(ds.attrs.get("not_applicable", {})),
        "map": plain(ds.attrs["map_description"]),
        "norm": plain(labels.norm_words(ds)),
        "norm_name": schema.norm_of(ds),
        "statements": {name: plain(said[name]["statement"]) for name in names},
        "formulas": {name: plain(text) for name, text in formulas.items()},
        "sources": {name: plain(said[name]["source"]) for name in names},
        "compared": {name: schema.compared_with(ds, name) for name in names},
        "summary": {"cells": made.head, "head": list(shown.columns), "rows": rows},
        "exact": enclosed(*statistics.mean_ends(ds, "exact")),
        "notes": made.notes,
        "provenance": [[name, words] for name, words in facts.items() if words],
        "methods": tables.methods(ds, "text"),
        "bibtex": tables.bibtex(ds),
    }


def _values(ds: xr.Dataset, reduce: str | float) -> dict[str, Any]:
    """Numbers of a run: reduced over samples, as ratios, and sample by sample."""
    names, shown = schema.bounds_there(ds), [*statistics.panels(ds), *statistics.extras(ds)]
    colours = scales(ds, log10(ds, shown, reduce), "rows")
    panels = [name for scale in colours for name in scale.names]
    upper = ["exact_upper"] if "exact_upper" in ds else []
    ratios = {name: statistics.ratio(ds, name) for name in names}
    # something that is compared with each exact norm
    examples = {schema.compared_with(ds, name): name for name in names} | {"exact": "exact"}
    widths = {of: statistics.cell_widths(ds, one, reduce) for of, one in examples.items()}
    whole = ds, ["layer", "sample"]
    kept, order = (ds.isel(sample=slice(SINGLE)), schema.AXES) if "head" in ds.dims else whole

    def grid(values: xr.DataArray) -> np.ndarray:
        return statistics.panel(values, reduce).values

    return {
        "reduce": statistics.reduction_name(reduce),
        "panels": panels,
        "labels": {name: statistics.label_of(ds, name) for name in panels},
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
    if ds.attrs["wrt"] != schema.INPUT:
        return None, [], f"details are of heads as functions of the input, not of {ds.attrs['wrt']}"
    try:
        rerun = replay(ds, model=model, data=data, device=device)
        if rerun.differences:
            return None, [], plain("; ".join(rerun.differences))
        found = details_of(rerun, ds, sample)
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


# -- single heads: attention, singular vectors, and terms of the norm ------------------------------


def details_of(rerun: Replay, ds: xr.Dataset, sample: int) -> list[Details | None]:
    """Compute `Details` of every layer of a run, at the sample at one position.

    None stands for a layer without a closed form, for cross-attention, and for layers whose samples
    are windows.

    Raises:
        AttentionError: there are none of any layer.
    """
    capturer = Capturer(rerun.checkpoint.model, ds["layer"].values.tolist())
    found = capturer.run(rerun.inputs.block(sample, sample + 1, rerun.device))
    names, norm, each = schema.bounds_there(ds), schema.norm_of(ds), list[Details | None]()
    for layer in found:
        att, one = layer.attention, None
        if isinstance(att, Attention) and layer.windows == 1 and att.kind == "self":
            with torch.no_grad():
                one = of_layer(att, ds.attrs["map"], names, norm)
        each.append(one)
    if not any(each):
        raise AttentionError("no layer is self-attention in closed form that sees whole samples")
    return each


def of_layer(att: Attention, map: str, names: list[str], norm: str = "frobenius") -> Details:
    """Compute `Details` of the heads of a layer with one sample.

    The norm is one of `lipbound.schema.NORMS`; padding is left out.
    """
    att = att.unpadded(0)
    if norm in schema.TOKEN_NORMS:
        found_norm = token_norm(att, norm, map=map, tol=TOKEN_TOL, vectors=True)
    else:
        found_norm = spectral_norm(att, map=map, tol=TOL, vectors=True)
    both = found_norm.left, found_norm.right
    left, right = (vectors[0].double() for vectors in both if vectors is not None)
    parts, moved = shares(att, map, left, right)
    profile = token_profile(att, map=map)
    folded = att.fold_output()[0] if map == "head_out" else att
    found = {name: get(name).terms(folded) for name in names}
    there = {name: terms for name, terms in found.items() if terms is not None}
    bounds = {name: {k: _array(v[0]) for k, v in terms.items()} for name, terms in there.items()}
    stride = -(-att.tokens // SIDE)
    rows = att.p[0]
    if att.sinks is not None:  # whose probability belongs to every row
        sink = (1 - rows.double().sum(-1, keepdim=True)).clamp_min(0)
        rows = torch.cat([rows, sink.to(rows.dtype)], -1)
    # the largest entry of every square
    shrunk = torch.nn.functional.max_pool2d(att.p[0], stride, ceil_mode=True)
    maps = (255 * shrunk.double().sqrt()).round()
    return Details(
        norm=_array(found_norm.lower[0]),
        attention=_array(maps.to(torch.uint8)),
        softmax_norm=_array(softmax.jacobian_norm(rows).upper),
        right=_array(moved),
        left=_array((left**2).sum(-1)),
        alone=_array(profile.lower[0]),
        reached=_array(profile.output_lower[0]),
        parts={name: _array(share) for name, share in parts.items()},
        bounds=bounds,
        stride=stride,
    )


def _array(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


def shares(
    att: Attention, map: str, left: Tensor, right: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    r"""Shares of :math:`u^T J v` by what it passes through, and by the tokens that move.

    J is the sum of three Jacobians, of what happens when values, keys or queries alone depend on
    the input; v is the steepest perturbation and u the direction of the output, left (heads, N, d_v
    or D_out) and right (heads, N, D).

    Returns:
        Of values, keys and queries, (heads,) each, and of the tokens, (heads, N); both sum to one.
    """
    op = HeadJacobian(att.double())
    if map == "head_out":  # u^T (f W_O) = (u W_O^T)^T f
        assert att.w_o is not None
        left = left @ att.w_o.double().mT
    forms = {name: (left * out).sum((-1, -2)) for name, out in op.paths(right).items()}
    total = torch.stack(list(forms.values())).sum(0)
    parts = {name: _share(form, total, torch.zeros_like(form)) for name, form in forms.items()}
    moved = (op.lift(op.vjp(left)) * right).sum(-1).clamp_min(0)  # v is the best for u: none is < 0
    return parts, _share(moved, moved.sum(-1, keepdim=True), (right**2).sum(-1))


def _share(form: Tensor, total: Tensor, instead: Tensor) -> Tensor:
    """Shares of a total where that is positive."""
    return torch.where(total > 0, form / torch.where(total > 0, total, 1.0), instead)
