"""Citations for a run, and a paragraph on how its numbers were made."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from lipbound import schema
from lipbound.bounds.audit import audit
from lipbound.bounds.ours import CITATION
from lipbound.bounds.registry import bibliography, get
from lipbound.errors import choice
from lipbound.formatting import joined, plain, small
from lipbound.reporting import labels as said
from lipbound.reporting.labels import relabelled
from lipbound.reporting.statistics import EXTRA_WIDTHS, extras
from lipbound.reporting.text_tables import typeset
from lipbound.runs.checksums import edited
from lipbound.runs.store import takes_run

COMMANDS = {"latex": "cite", "natbib": "citep"}
"""Commands of LaTeX that cite, by format."""
PARAGRAPH_FORMATS = (*COMMANDS, "text")
CITATION_FORMATS = ("bib", *PARAGRAPH_FORMATS)
EXTRA_SOURCES = {
    "baek2026numerical": """@inproceedings{baek2026numerical,
  title     = {Numerical Fragility in Transformers: A Layer-wise Theory for Explaining, Forecasting,
               and Mitigating Instability},
  author    = {Baek, Jinwoo},
  booktitle = {International Conference on Artificial Intelligence and Statistics (AISTATS)},
  year      = {2026},
  note      = {arXiv:2510.21770}
}"""
}
"""BibTeX entries of what no bound, but an extra, comes from, by key."""
PARAGRAPH = Path(__file__).with_name("methods.txt")
"""Template of `methods`."""


def keys(ds: xr.Dataset) -> list[str]:
    """BibTeX keys of every source of a run's bounds and condition numbers, and of lipbound."""
    # from the registry: a run's own key could be any text, without an entry
    known = [get(name).citation for name in schema.bounds_there(ds)]
    known += EXTRA_SOURCES if any(name in ds for name in schema.CONDITIONING) else []
    return list(dict.fromkeys([*known, CITATION]))


def _entries() -> dict[str, str]:
    return bibliography() | EXTRA_SOURCES


@takes_run
def bibtex(ds: xr.Dataset) -> str:
    """BibTeX entries of every source of a run's bounds and condition numbers, and of lipbound."""
    return "\n\n".join(_entries()[key] for key in keys(ds)) + "\n"


@takes_run
def cite(ds: xr.Dataset, format: str = "bib", *, labels: Mapping[str, str] | None = None) -> str:
    """Text to put into a paper: citations and a methods paragraph.

    "bib" gives the entries with the `methods` paragraph in comments; "latex", "natbib" and "text"
    give the paragraph alone.

    Args:
        ds: a run. format: of what is written.
        labels: what to call bounds, by name, and "model" and "data".

    Raises:
        UnknownNameError: another format, a label for what the run has not.
    """
    if choice("format", format, CITATION_FORMATS) != "bib":
        return f"{methods(ds, format, labels=labels)}\n"
    # BibTeX reads an entry after every @, comment or not
    comment = methods(ds, labels=labels).replace("@", "{\\char64}")
    return f"% {comment}\n\n{bibtex(ds)}"


@takes_run
def methods(
    ds: xr.Dataset, format: str = "latex", *, labels: Mapping[str, str] | None = None
) -> str:
    r"""Write one paragraph for a methods section from the run's own settings.

    It says what was computed, by which method, how surely, from which model and data, with which
    software.

    Args:
        ds: a run.
        format: "latex" (foreign text escaped, ``\cite`` with the keys of `bibtex`), "natbib" (the
            same with ``\citep``) or "text" (author and year).
        labels: as in `cite`.

    Raises:
        UnknownNameError: another format, a label for what the run has not.
    """
    import jinja2  # tables, which list this module's names, start without it

    choice("format", format, PARAGRAPH_FORMATS)
    ds = relabelled(ds, labels)
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    rendered = environment.from_string(PARAGRAPH.read_text(encoding="utf-8")).render(_facts(ds))
    text = plain(" ".join(filter(None, map(str.strip, rendered.splitlines()))))
    if format == "text":
        return text
    text = typeset(text)
    for key in keys(ds):
        text = text.replace(_cited(key), f"\\{COMMANDS[format]}{{{key}}}")
    return text


def _facts(ds: xr.Dataset) -> dict[str, Any]:
    """Return the values that the template of `methods` is filled with, by name."""
    names, audited = schema.bounds_there(ds), audit(ds)
    norm, _, meaning = said.norm_words(ds).partition(" ")
    variants, sources = ds.attrs.get("variants"), dict[str, list[str]]()
    if variants:
        from lipbound.attention.variants import titles  # it needs torch

        variants = titles(variants)
    for name in names:
        label = f"{ds[name].attrs['label']} [{ds[name].attrs['source']}]"
        sources.setdefault(_cited(get(name).citation), []).append(label)
    across = ds["kind"] == "cross" if "kind" in ds.coords else ds["layer"].isnull()
    return {
        "ds": ds,
        "run": schema.RunInfo.of(ds),
        "there": schema.Contents.of(ds),
        "said": said,
        "joined": joined,
        "small": small,
        "norm": norm,
        "meaning": meaning,
        "software": _cited(CITATION),
        "variants": variants,
        "crossing": int(across.sum()),
        "bounds": names,
        "reaching": [name for name in names if bool(ds[name].where(across).notnull().any())],
        "edited": edited(ds),
        "weights": schema.of_weights_alone(ds),
        "automatic": bool(schema.automatic(ds).any()),
        "sources": sources,
        "labels": lambda names: [str(ds[name].attrs["label"]) for name in names],
        "audited": audited,
        "failing": [k for k, entry in audited.items() if said.mark(entry) == " \u2020"],
        "left_out": [get(name).label for name in ds.attrs.get("not_applicable") or ()],
        "others": [name for name in names if schema.compared_with(ds, name) != "exact"],
        "extras": [_extra(ds, name) for name in extras(ds)],
        "environments": dict.fromkeys(map(_environment, schema.origins(ds))),
        "state": said.state_words(ds),
    }


def _extra(ds: xr.Dataset, name: str) -> str:
    """The name of an extra, where it comes from, and how accurate it is."""
    error = f" to a relative error of {small(EXTRA_WIDTHS[name] / 2)}"
    error *= not (edited(ds) or name in schema.OF_HEADS)
    lost = ", infinite where rounding hides whether the smallest singular value is zero"
    infinite = lost * (name == schema.EXTRAS["condition"] and bool(np.isinf(ds[name]).any()))
    known = f" ({some})" if (some := said.extra_known(ds, name)) else ""
    source = f" ({ds[name].attrs['source']})" if "source" in ds[name].attrs else ""
    return f"the {said.extra_title(ds, name)}{source}{error}{infinite}{known}"


def _environment(run: Mapping[str, Any]) -> str:
    """Device, versions and date of a run."""
    known = [name for name in ("torch", "transformers") if name in run["versions"]]
    versions = [*(f"{name} {run['versions'][name]}" for name in known), f"Python {run['python']}"]
    return f"on {run['device']} with {', '.join(versions)}, on {run['date'][:10]}"


def _cited(key: str) -> str:
    """A source in running text: its first author and year."""
    entry = _entries()[key]
    author = re.search(r"author\s*=\s*\{+([^,}]+)(.*)", entry)
    year = re.search(r"year\s*=\s*\{?(\d{4})", entry)
    first = author[1].strip() + " et al." * (author[2].count(" and ") > 1) if author else key
    return f"({first} {year[1] if year else ''})"
