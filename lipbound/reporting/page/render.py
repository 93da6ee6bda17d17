"""Self-contained page of one run or several.

It holds heatmaps, single heads, the audit, provenance and citations.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import xarray as xr
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lipbound.devices import resolve_device
from lipbound.errors import LipboundError
from lipbound.formatting import formula, plain
from lipbound.formatting.files import replacing
from lipbound.reporting.labels import model_name, relabelled
from lipbound.reporting.page.contents import attention_bytes, contents
from lipbound.runs import store
from lipbound.runs.store import run_of

HERE = Path(__file__).parent
DIFFERENCES = (
    (
        "tokens_most",
        "Lengths in tokens differ: at most {}",
        "constants and bounds grow with the number of tokens, each at its own pace",
    ),
    ("map", "Maps differ: {}", "these are constants of different functions"),
    (
        "norm",
        "Norms differ: {}",
        "these are constants of different perturbations, which are not compared",
    ),
    ("samples", "Numbers of samples differ: {}", "ranges over samples widen with their number"),
)
"""What may differ between runs side by side: its name on pages, what is said of it, and why."""


def report(
    runs: xr.Dataset | str | Path | Sequence[xr.Dataset | str | Path],
    path: str | Path,
    *,
    reduce: str | float = "geomean",
    sample: int = 0,
    details: bool = True,
    balls: bool = False,
    model: Any = None,
    data: Any = None,
    device: str = "auto",
    labels: Mapping[str, str] | None = None,
) -> list[str]:
    """Write a page about one run, or about several side by side.

    The page needs no network and no other file: numbers and plotly.js are inside, compressed. For
    the details of single heads (attention, singular vectors, the terms of a bound) the model and
    the inputs are loaded again from the run's provenance, one sample of them; where that is not
    possible, or they are no longer what they were, the page says so and has everything else.

    Args:
        runs: Datasets, or names of saved runs.
        path: of the page, an .html file; an older one is replaced.
        reduce: "geomean", "mean", "max", "median" or a quantile, over samples.
        sample: position of the sample whose attention is shown.
        details: False leaves them out.
        balls: also show `lipbound.bounds.over_ball` of every head around that sample, up to a tenth
            of a token's length. For runs in the Frobenius norm, and heads without normalised
            queries and keys.
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
    several = [runs] if isinstance(runs, xr.Dataset | str | Path) else list(runs)
    if not several:
        raise LipboundError("no run was given; give at least one Dataset or saved run")
    if len(several) > 1 and (model is not None or data is not None):
        raise LipboundError("model= and data= are for a single run; make a page of each")
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise LipboundError(f"{target} is not an .html file; a report is a page")
    if details:
        # before minutes of work, and before an older page is replaced
        device = resolve_device(device)
    options: Any = {"reduce": reduce, "sample": sample, "model": model, "data": data}
    options |= {"device": device, "wanted": details, "balls": balls}
    pages = []
    for run in several:
        found = run_of(run) if isinstance(run, xr.Dataset) else store.load(run, damaged="refuse")
        ds = relabelled(found, _own(labels, found, several))
        title = model_name(ds) if isinstance(run, xr.Dataset) else Path(run).stem
        pages.append(contents(ds, title, **options))
    titles = [one["title"] for one in pages]
    for i, one in enumerate(pages):  # names that tell runs apart
        if titles.count(one["title"]) > 1:
            one["title"] = f"{one['title']} ({i + 1})"
    attention = b"".join(attention_bytes(one["details"]) for one in pages)
    text = _page(pages, attention)
    with replacing(target) as (page,):
        page.write_text(text, encoding="utf-8")
    return [
        plain(f"{one['title']}: no details of single heads: {one['reason']}")
        for one in pages
        if details and one["details"] is None
    ]


def _own(
    labels: Mapping[str, str] | None, ds: xr.Dataset, several: Sequence[Any]
) -> dict[str, str]:
    """The labels that a run of several has a use for; of a single run all of them."""
    given = dict(labels or {})
    known = given if len(several) == 1 else {*ds.variables, "model", "data"}
    return {name: text for name, text in given.items() if name in known}


def _page(pages: list[dict[str, Any]], attention: bytes) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    parts = {
        "data": _packed(json.dumps(pages, allow_nan=False, separators=(",", ":")).encode()),
        "attention": _packed(attention),
        "plotly": _plotly(),
    }
    # escapes what is no formula
    environment.filters["formula"] = lambda text: Markup(formula(text))
    files = {
        name: Markup((HERE / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")
    }
    return environment.get_template("page.html").render(
        runs=pages, parts=parts, differences=_differences(pages), **files
    )


def _differences(pages: list[dict[str, Any]]) -> list[str]:
    """A sentence for each difference between runs side by side that moves their numbers."""
    found = []
    for key, what, why in DIFFERENCES:
        if len({one[key] for one in pages}) > 1:
            each = ", ".join(f"{one[key]} in {one['title']}" for one in pages)
            found.append(f"{what.format(each)}; {why}.")
    return found


@cache
def _plotly() -> str:
    """The library of the figures."""
    return _packed(get_plotlyjs().encode())


def _packed(content: bytes) -> str:
    """Compressed, in characters that mean nothing to HTML."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
