"""Citations for a run, and a paragraph on how its numbers were made."""

import re
from collections.abc import Iterable, Mapping

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
from lipbound.reporting.latex import typeset
from lipbound.reporting.statistics import EXTRA_WIDTHS, extras
from lipbound.runs.checksums import edited
from lipbound.runs.store import takes_run

COMMANDS = {"latex": "cite", "natbib": "citep"}
"""Commands of LaTeX that cite, by format."""
PARAGRAPH_FORMATS = (*COMMANDS, "text")
CITATION_FORMATS = ("bib", *PARAGRAPH_FORMATS)


def keys(ds: xr.Dataset) -> list[str]:
    """BibTeX keys of every source of a run's bounds, and of lipbound."""
    # from the registry: a run's own key could be any text, without an entry
    known = [get(name).citation for name in schema.bounds_there(ds)]
    return list(dict.fromkeys([*known, CITATION]))


@takes_run
def bibtex(ds: xr.Dataset) -> str:
    """BibTeX entries of every source the run's bounds come from, and of lipbound."""
    return "\n\n".join(bibliography()[key] for key in keys(ds)) + "\n"


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
    choice("format", format, PARAGRAPH_FORMATS)
    ds = relabelled(ds, labels)
    settings = (_constants, _inputs, _variants, _streams, _enclosures)
    bounds = (_comparison, _assumptions, _left_out, _below_exact, _other_map, _extras)
    parts = (*settings, *bounds, _environment, _state)
    text = plain(" ".join(filter(None, (part(ds) for part in parts))))
    if format == "text":
        return text
    text = typeset(text)
    for key in keys(ds):
        text = text.replace(_cited(key), f"\\{COMMANDS[format]}{{{key}}}")
    return text


def _constants(ds: xr.Dataset) -> str:
    """Words for the constants of a run: their map, norm and model."""
    run = schema.RunInfo.of(ds)
    name, _, meaning = said.norm_words(ds).partition(" ")
    called = f" in the {name} norm, norms of Jacobians {meaning},"
    called = ", the spectral norms of Jacobians," if name == "Frobenius" else called
    kind = "commit" if run.commit and run.revision.startswith(run.commit) else "weights"
    quantized = f", stored as {run.quantization} and computed with as floating-point numbers"
    quantized = quantized if run.quantization else ""
    return (
        f"Local Lipschitz constants{called} of {run.map_description}, were computed with "
        f"lipbound {run.lipbound} {_cited(CITATION)} for {said.model_name(ds)} "
        f"({said.builtin_name(ds)}{run.architecture}, {said.places(ds)}; {kind} "
        f"{run.revision}{quantized})."
    )


def _inputs(ds: xr.Dataset) -> str:
    """At which inputs."""
    there = schema.Contents.of(ds)
    made = "; ".join([*said.of_each(ds, "preprocessing"), *said.of_each(ds, "data_fingerprint")])
    some = f", with exact constants on {there.exact_samples} of them"
    some = some if there.exact_samples != there.samples else ""
    return f"Inputs were {said.samples_words(there)} from {said.data_name(ds)} ({made}){some}."


def _variants(ds: xr.Dataset) -> str:
    """Words for the steps between the model's projections and its softmax."""
    if not ds.attrs.get("variants"):
        return ""
    from lipbound.attention.variants import titles  # it needs torch

    steps = titles(ds.attrs["variants"])
    return f"The attention of this model has {steps}, which are part of the map."


def _streams(ds: xr.Dataset) -> str:
    """Words for rows of cross-attention."""
    if "kind" not in ds.coords or not bool((ds["kind"] == "cross").any()):
        return ""
    crossing = ds.isel(layer=(ds["kind"] == "cross").values)
    there = schema.bounds_there(ds)
    known = [name for name in there if bool(crossing[name].notnull().any())]
    words = (
        f"Of {ds.sizes['layer']} rows of layers {crossing.sizes['layer']} are of cross-attention: "
        "their constants are with respect to the tokens that queries are made of, or those that "
        "keys and values are made of, with the others held."
    )
    if len(known) == len(there):
        return words
    labels = joined([str(ds[name].attrs["label"]) for name in known]) or "none"
    return f"{words} Of the bounds {labels} say something there."


def _enclosures(ds: xr.Dataset) -> str:
    """Sentences on how surely the constants that are shown are known."""
    if not schema.Contents.of(ds).norms:
        return "There are no exact constants."
    run, sentence = schema.RunInfo.of(ds), f"The constants are {said.exact_words(ds)}."
    if edited(ds):
        return sentence
    if "exact_upper" not in ds:
        return (
            f"{sentence} They are values that the norms attain, less every rounding, without upper "
            f"ends (seed {run.seed})."
        )
    where = " in the other layers" if bool(schema.automatic(ds).any()) else ""
    sentence += " Each constant lies between an attained value and an upper bound, both with every "
    sentence += f"rounding included{where}"
    if run.delta:
        sentence += (
            f"; over the random start vectors (seed {run.seed}), the upper bounds hold together "
            f"with probability at least 1 - {small(run.delta)}"
        )
    return f"{sentence}."


def _comparison(ds: xr.Dataset) -> str:
    """The bounds, by source."""
    sources: dict[str, list[str]] = {}
    for name in schema.bounds_there(ds):
        label = f"{ds[name].attrs['label']} [{ds[name].attrs['source']}]"
        sources.setdefault(_cited(get(name).citation), []).append(label)
    listed = "; ".join(f"{', '.join(those)} {source}" for source, those in sources.items())
    means = said.over(ds)
    if means:
        means = f"; ratios, bound over exact constant, are geometric means{means}"
    return f"They are compared with bounds: {listed}{means}." if listed else ""


def _labels(ds: xr.Dataset, names: Iterable[str]) -> str:
    return ", ".join(str(ds[name].attrs["label"]) for name in names)


def _assumptions(ds: xr.Dataset) -> str:
    """Sentence on the bounds whose assumptions fail here, though none is below the constants."""
    marks = {name: said.mark(entry).strip() for name, entry in audit(ds).items()}
    failing = [name for name, mark in marks.items() if mark == "\u2020"]
    place = "head" if "head" in ds.dims else "layer"
    words = f"The assumptions of some do not hold on every {place} here, where they are no upper "
    return f"{words}bounds: {_labels(ds, failing)}." if failing else ""


def _left_out(ds: xr.Dataset) -> str:
    """Sentence on the bounds that do not cover such attention; the run holds only their names."""
    listed = "; ".join(get(name).label for name in ds.attrs.get("not_applicable") or ())
    which = "whose statements do not cover such attention were"
    if ds.attrs["wrt"] != schema.INPUT:
        which = "are stated for functions of the input and were"
    return f"Bounds {which} left out ({listed})." if listed else ""


def _below_exact(ds: xr.Dataset) -> str:
    """A sentence for every bound that is below an exact constant."""
    return " ".join(
        f"{_labels(ds, [name])} is below the constant it should bound in {entry['violations']} of "
        f"{entry['compared']} cases, because {entry['why'] or said.broken_words(ds)}."
        for name, entry in audit(ds).items()
        if entry["violations"]
    )


def _other_map(ds: xr.Dataset) -> str:
    """The bounds on L2 attention, which are compared with another constant."""
    names = [name for name in schema.bounds_there(ds) if schema.compared_with(ds, name) != "exact"]
    return bool(names) * (
        f"{_labels(ds, names)} is compared with the constant of L2 attention with the same "
        f"weights, an estimate to a relative tolerance of {small(float(ds.attrs['tol']))} without "
        "upper bound."
    )


def _extras(ds: xr.Dataset) -> str:
    """The sentence on Frobenius norms and condition numbers, and how accurate they are."""
    each = []
    for name in extras(ds):
        error = f" to a relative error of {small(EXTRA_WIDTHS[name] / 2)}" * (not edited(ds))
        lost = ", infinite where rounding hides whether the smallest singular value is zero"
        infinite = lost * bool(np.isinf(ds[name]).any())
        known = f" ({some})" if (some := said.extra_known(ds, name)) else ""
        each.append(f"the {said.extra_title(ds, name)}{error}{infinite}{known}")
    return f"Also computed {'were' if len(each) > 1 else 'was'} {joined(each)}." if each else ""


def _environment(ds: xr.Dataset) -> str:
    """The sentence on device, versions and date, of every run that was put together."""
    each = []
    for run in schema.origins(ds):
        known = [name for name in ("torch", "transformers") if name in run["versions"]]
        versions = [f"{name} {run['versions'][name]}" for name in known]
        versions.append(f"Python {run['python']}")
        each.append(f"on {run['device']} with {', '.join(versions)}, on {run['date'][:10]}")
    return f"Computed {'; and '.join(dict.fromkeys(each))}."


def _state(ds: xr.Dataset) -> str:
    """The sentence on what was done to the run since it was computed."""
    state = said.state_words(ds)
    if state.startswith("edited"):
        return f"The run was {state}: these are not its numbers or settings."
    return f"{state.capitalize()}." if state else ""


def _cited(key: str) -> str:
    """A source in running text: its first author and year."""
    entry = bibliography()[key]
    author = re.search(r"author\s*=\s*\{+([^,}]+)(.*)", entry)
    year = re.search(r"year\s*=\s*\{?(\d{4})", entry)
    first = author[1].strip() + " et al." * (author[2].count(" and ") > 1) if author else key
    return f"({first} {year[1] if year else ''})"
