"""Citations for a run, and a paragraph on how its numbers were made."""

import math
import re
from collections.abc import Iterable, Mapping

import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.bounds.ours import CITATION
from lipbound.errors import choice
from lipbound.formatting import joined
from lipbound.reporting import labels as said
from lipbound.reporting.formats import FORMATTERS, Prose
from lipbound.reporting.labels import relabelled
from lipbound.runs.dataset import edited
from lipbound.runs.store import takes_run
from lipbound.schema import (
    Contents,
    RunInfo,
    automatic,
    bounds_there,
    compared_with,
    norm_of,
    origins,
)

PROSE = {name: formatter.prose for name, formatter in FORMATTERS.items() if formatter.prose}
"""How formats write paragraphs, by their names."""
CITATION_FORMATS = tuple(sorted(PROSE))
PARAGRAPH_FORMATS = tuple(name for name in CITATION_FORMATS if not FORMATTERS[name].bibliography)


def keys(ds: xr.Dataset) -> list[str]:
    """BibTeX keys of every source of a run's bounds, and of lipbound."""
    return list(dict.fromkeys([_key(name) for name in bounds_there(ds)] + [CITATION]))


@takes_run
def bibtex(ds: xr.Dataset) -> str:
    """BibTeX entries of every source the run's bounds come from, and of lipbound."""
    return "\n\n".join(_entry(key) for key in keys(ds)) + "\n"


@takes_run
def cite(ds: xr.Dataset, format: str = "bib", *, labels: Mapping[str, str] | None = None) -> str:
    """Text to put into a paper: citations and a methods paragraph.

    "bib" gives the entries with the `methods` paragraph in comments; "latex" and "text" give the
    paragraph alone.

    Args:
        ds: a run. format: of what is written.
        labels: what to call bounds, by name, and "model" and "data".

    Raises:
        UnknownNameError: another format, a label for what the run has not.
    """
    choice("format", format, CITATION_FORMATS)
    ds, together = relabelled(ds, labels), FORMATTERS[format].bibliography
    paragraph = _paragraph(ds, PROSE[format])
    return together(paragraph, bibtex(ds)) if together else f"{paragraph}\n"


@takes_run
def methods(
    ds: xr.Dataset, format: str = "latex", *, labels: Mapping[str, str] | None = None
) -> str:
    r"""Write one paragraph for a methods section from the run's own settings.

    It says what was computed, by which method, how surely, from which model and data, with which
    software.

    Args:
        ds: a run.
        format: "latex" (foreign text escaped, ``\cite`` with the keys of `bibtex`) or "text"
            (author and year).
        labels: as in `cite`.

    Raises:
        UnknownNameError: another format, a label for what the run has not.
    """
    return _paragraph(relabelled(ds, labels), PROSE[choice("format", format, PARAGRAPH_FORMATS)])


def _paragraph(ds: xr.Dataset, prose: Prose) -> str:
    """`methods` as some format writes prose; parts that have nothing to say are empty."""
    settings = (_constants, _inputs, _variants, _streams, _enclosures)
    bounds = (_comparison, _assumptions, _left_out, _below_exact, _other_map)
    parts = (*settings, *bounds, _environment, _state)
    return " ".join(filter(None, (part(ds, prose) for part in parts)))


def _constants(ds: xr.Dataset, prose: Prose) -> str:
    """Words for the constants of a run: their map, norm and model."""
    run, safe = RunInfo.of(ds), prose.escape
    name, _, meaning = said.norm_words(ds).partition(" ")
    called = ", the spectral norms of Jacobians,"
    if norm_of(ds) != "frobenius":
        called = f" in the {name} norm, norms of Jacobians {safe(meaning)},"
    model = f"{safe(said.model_name(ds))} ({safe(said.builtin_name(ds))}{safe(run.architecture)}"
    kind = "commit" if run.commit and run.revision.startswith(run.commit) else "weights"
    stored = f", stored as {safe(run.quantization)}" if run.quantization else ""
    quantized = stored and f"{stored} and computed with as floating-point numbers"
    return (
        f"Local Lipschitz constants{called} of {safe(run.map_description)}, were computed with "
        f"lipbound {safe(run.lipbound)} {_cited(CITATION, prose)} for {model}, "
        f"{said.places(ds, prose.times)}; {kind} {safe(run.revision)}{quantized})."
    )


def _inputs(ds: xr.Dataset, prose: Prose) -> str:
    """At which inputs."""
    safe, there = prose.escape, Contents.of(ds)
    settings = [*said.of_each(ds, "preprocessing"), *said.of_each(ds, "data_fingerprint")]
    made, some = "; ".join(map(safe, settings)), ""
    if there.exact_samples != there.samples:
        some = f", with exact constants on {there.exact_samples} of them"
    samples = said.samples_words(there)
    return f"Inputs were {samples} from {safe(said.data_name(ds))} ({made}){some}."


def _variants(ds: xr.Dataset, prose: Prose) -> str:
    """Words for the steps between the model's projections and its softmax."""
    if not ds.attrs.get("variants"):
        return ""
    from lipbound.attention.variants import titles  # it needs torch

    steps = titles(ds.attrs["variants"])
    return f"The attention of this model has {steps}, which are part of the map."


def _streams(ds: xr.Dataset, prose: Prose) -> str:
    """Words for rows of cross-attention."""
    if "kind" not in ds.coords or not bool((ds["kind"] == "cross").any()):
        return ""
    crossing = ds.isel(layer=(ds["kind"] == "cross").values)
    there = bounds_there(ds)
    known = [name for name in there if bool(crossing[name].notnull().any())]
    words = (
        f"Of {ds.sizes['layer']} rows of layers {crossing.sizes['layer']} are of cross-attention: "
        "their constants are with respect to the tokens that queries are made of, or those that "
        "keys and values are made of, with the others held."
    )
    if len(known) == len(there):
        return words
    labels = joined([str(ds[name].attrs["label"]) for name in known]) or "none"
    return f"{words} Of the bounds {prose.escape(labels)} say something there."


def _enclosures(ds: xr.Dataset, prose: Prose) -> str:
    """The sentences on how surely the constants that are shown are known."""
    run, there = RunInfo.of(ds), Contents.of(ds)
    if not there.norms:
        return "There are no exact constants."
    if edited(ds):
        return "Nothing is claimed of how closely the constants are known."
    dtype, tol = prose.escape(run.dtype), prose.number(run.tol)
    between = (
        "between an attained value and an upper bound at most a factor "
        f"1 + {tol} above it, both with every rounding included"
    )
    if norm_of(ds) != "frobenius":
        sentence = (
            "Each constant is enclosed, in float64 and deterministically, at the layer that the "
            f"model computes in {dtype}, {between}."
        )
    elif run.delta and "exact_upper" in ds:
        sentence = (
            f"Each constant is enclosed, by Lanczos' method in {dtype}, {between}; over the "
            f"random start vectors (seed {run.seed}), the upper bounds hold together with "
            f"probability at least {prose.complement(run.delta)}."
        )
    else:
        upper = "their upper ends are left out here" if run.delta else "there are no upper ends"
        how = f"Lanczos' method in {dtype} (relative tolerance {tol}, seed {run.seed})"
        sentence = (
            f"Constants are lower ends: values that the norms attain, found by {how}, "
            f"less every rounding; {upper}."
        )
    if without := int(automatic(ds).sum()):
        sentence += (
            f" In {without} of {len(there.layers)} layers derivatives are those of automatic "
            "differentiation in float64 through the model's own code, whose rounding is not "
            "counted."
        )
    if there.all_closed:
        return sentence
    some = f"for {there.norms - there.closed} of {there.norms} constants"
    if "exact_upper" not in ds:
        return f"{sentence} {some.capitalize()} the tolerance was not reached."
    wide, factor = said.widest(ds), "some have no finite upper bound"
    if not math.isinf(wide):
        factor = f"the widest enclosure has a factor of 1 + {prose.number(wide)}"
    sentence = sentence.replace("Each constant is", "Each constant was to be")
    return f"{sentence} This was not reached {some}: {factor}."


def _comparison(ds: xr.Dataset, prose: Prose) -> str:
    """The bounds, by source."""
    sources: dict[str, list[str]] = {}
    for name in bounds_there(ds):
        label = prose.escape(f"{ds[name].attrs['label']} [{ds[name].attrs['source']}]")
        sources.setdefault(_key(name), []).append(label)
    listed = "; ".join(f"{', '.join(those)} {_cited(key, prose)}" for key, those in sources.items())
    means, over = "", said.over(ds)
    if over:
        means = f"; ratios, bound over exact constant, are geometric means{over}"
    return f"They are compared with bounds: {listed}{means}." if listed else ""


def _labels(ds: xr.Dataset, prose: Prose, names: Iterable[str]) -> str:
    return ", ".join(prose.escape(str(ds[name].attrs["label"])) for name in names)


def _assumptions(ds: xr.Dataset, prose: Prose) -> str:
    """Sentence on the bounds whose assumptions fail here, though none is below the constants."""
    marks = {name: said.mark(entry).strip() for name, entry in audit(ds).items()}
    failing = [name for name, mark in marks.items() if mark == "\u2020"]
    place = "head" if "head" in ds.dims else "layer"
    if not failing:
        return ""
    return (
        f"The assumptions of some do not hold on every {place} here, where they are no upper "
        f"bounds: {_labels(ds, prose, failing)}."
    )


def _left_out(ds: xr.Dataset, prose: Prose) -> str:
    """Sentence on the bounds that do not cover such attention; the run holds only their names."""
    names = ds.attrs.get("not_applicable")
    if not names:
        return ""
    from lipbound.bounds.registry import get

    listed = ", ".join(prose.escape(get(name).label) for name in names)
    return f"Bounds whose statements do not cover such attention were left out ({listed})."


def _below_exact(ds: xr.Dataset, prose: Prose) -> str:
    """A sentence for every bound that is below an exact constant."""
    sentences = []
    for name, entry in audit(ds).items():
        if entry["violations"]:
            why = f", because {prose.escape(entry['why'])}"
            why = why if entry["why"] else f": {said.broken_words(ds)}"
            sentences.append(
                f"{_labels(ds, prose, [name])} is below the constant it should bound in "
                f"{entry['violations']} of {entry['compared']} cases{why}."
            )
    return " ".join(sentences)


def _other_map(ds: xr.Dataset, prose: Prose) -> str:
    """The bounds on L2 attention, which are compared with another constant."""
    names = [name for name in bounds_there(ds) if compared_with(ds, name) != "exact"]
    if not names:
        return ""
    return (
        f"The bound on L2 attention ({_labels(ds, prose, names)}) is compared with the constant of "
        "that map, with the same weights, an estimate to a relative tolerance of "
        f"{prose.number(float(ds.attrs['tol']))} without upper bound."
    )


def _environment(ds: xr.Dataset, prose: Prose) -> str:
    """The sentence on device, versions and date, of every run that was put together."""
    safe, each = prose.escape, []
    for one in origins(ds):
        there = [name for name in ("torch", "transformers") if name in one["versions"]]
        versions = ", ".join(f"{safe(name)} {safe(one['versions'][name])}" for name in there)
        python, date = safe(one["python"]), safe(one["date"][:10])
        each.append(f"on {safe(one['device'])} with {versions}, Python {python}, on {date}")
    return f"Computed {'; and '.join(dict.fromkeys(each))}."


def _state(ds: xr.Dataset, prose: Prose) -> str:
    """The sentence on what was done to the run since it was computed."""
    state = said.state_words(ds)
    if state.startswith("edited"):
        return f"The run was {state}: these are not its numbers or settings."
    return f"{state.capitalize()}." if state else ""


def _cited(key: str, prose: Prose) -> str:
    """A source in running text."""
    author = re.search(r"author\s*=\s*\{+([^,}]+)(.*)", _entry(key))
    year = re.search(r"year\s*=\s*\{?(\d{4})", _entry(key))
    first = author[1].strip() + " et al." * (author[2].count(" and ") > 1) if author else key
    return prose.cite(key, first, year[1] if year else "")


def _key(name: str) -> str:
    """BibTeX key of a bound's source, from the registry.

    A run's own key could be any text, and there would be no entry for it.
    """
    from lipbound.bounds.registry import get

    return get(name).citation


def _entry(key: str) -> str:
    """BibTeX entry of a source."""
    from lipbound.bounds import BIBTEX

    return BIBTEX[key]
