"""What to cite for a run, and a paragraph on how its numbers were made."""

import re

import xarray as xr

from lipbound.bounds.audit import audit, compared_with, norm_of
from lipbound.bounds.lipbound2026 import CITATION
from lipbound.errors import UnknownNameError, nearest
from lipbound.reporting.formats import FORMATTERS, Prose
from lipbound.reporting.labels import norm_words
from lipbound.runs.given import takes_run
from lipbound.runs.provenance import FORMER

CITATION_FORMATS = tuple(sorted(name for name, formatter in FORMATTERS.items() if formatter.prose is not None))
PARAGRAPH_FORMATS = tuple(name for name in CITATION_FORMATS if FORMATTERS[name].bibliography is None)


def keys(ds: xr.Dataset) -> list[str]:
    """BibTeX keys of every source of a run's bounds, and of lipbound."""
    return list(dict.fromkeys([_key(name) for name in ds.attrs["bounds"]] + [CITATION]))


@takes_run
def bibtex(ds: xr.Dataset) -> str:
    """BibTeX entries of every source the run's bounds come from, and of lipbound."""
    return "\n\n".join(_entry(key) for key in keys(ds)) + "\n"


@takes_run
def cite(ds: xr.Dataset, format: str = "bib") -> str:
    """What goes into a paper: "bib", the entries with the `methods` paragraph in comments; "latex" or "text", the paragraph alone.

    Raises:
        UnknownNameError: another format.
    """
    formatter = FORMATTERS.get(format)
    if formatter is None or formatter.prose is None:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, CITATION_FORMATS)}")
    paragraph = _paragraph(ds, formatter.prose)
    return f"{paragraph}\n" if formatter.bibliography is None else formatter.bibliography(paragraph, bibtex(ds))


@takes_run
def methods(ds: xr.Dataset, format: str = "latex") -> str:
    r"""One paragraph for a methods section: what was computed, how, how surely, from what, with what; from the run's own settings.

    Args:
        ds: a run.
        format: "latex" (foreign text escaped, ``\cite`` with the keys of `bibtex`) or "text" (author and year).

    Raises:
        UnknownNameError: another format.
    """
    formatter = FORMATTERS.get(format)
    if formatter is None or formatter.prose is None or formatter.bibliography is not None:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, PARAGRAPH_FORMATS)}")
    return _paragraph(ds, formatter.prose)


def _paragraph(ds: xr.Dataset, prose: Prose) -> str:
    """`methods` as some format writes prose; parts that have nothing to say are empty."""
    parts = (_constants, _inputs, _variants, _enclosures, _comparison, _left_out, _below_exact, _other_map, _environment)
    return " ".join(filter(None, (part(ds, prose) for part in parts)))


def _constants(ds: xr.Dataset, prose: Prose) -> str:
    """Of which map, in which norm, of which model."""
    a, safe = ds.attrs, prose.escape
    name, _, meaning = norm_words(ds).partition(" ")
    called = ", the spectral norms of Jacobians," if norm_of(ds) == "frobenius" else f" in the {name} norm, norms of Jacobians {safe(meaning)},"
    kind = "commit" if a.get("commit") and str(a["revision"]).startswith(a["commit"]) else "weights"
    quantized = f", stored as {safe(str(a['quantization']))} and computed with as floating-point numbers" if a.get("quantization") else ""
    return (
        f"Local Lipschitz constants{called} of {safe(a['map_description'])} were computed with lipbound "
        f"{safe(a['lipbound'])} {_cited(CITATION, prose)} for {safe(str(a['model']))} ({safe(a['architecture'])}, {_places(ds, prose.times)}; "
        f"{kind} {safe(str(a['revision']))}{quantized})."
    )


def _inputs(ds: xr.Dataset, prose: Prose) -> str:
    """At which inputs."""
    a, safe = ds.attrs, prose.escape
    samples, exact_samples, tokens = (int(a[name]) for name in ("samples", "exact_samples", "tokens"))
    made = f"{safe(a['preprocessing'])}; " if a.get("preprocessing") else ""
    some = f", exact constants on the first {exact_samples}" if exact_samples != samples else ""
    return (
        f"Inputs were {samples} sample{'s' if samples > 1 else ''} of at most {tokens} tokens from {safe(str(a['data']))} "
        f"({made}{safe(a['data_fingerprint'])}){some}."
    )


def _variants(ds: xr.Dataset, prose: Prose) -> str:
    """What stands between the model's projections and its softmax."""
    if not ds.attrs.get("variants"):
        return ""
    from lipbound.attention.variants import VARIANTS  # it needs torch

    return f"The attention of this model has {' and '.join(VARIANTS[v] for v in ds.attrs['variants'])}, which are part of the map."


def _enclosures(ds: xr.Dataset, prose: Prose) -> str:
    """How surely the constants are known, and how many are not."""
    a = ds.attrs
    dtype, tol, seed = prose.escape(a["dtype"]), float(a["tol"]), int(a.get("seed", 0))
    former = "" if FORMER in ds else ", both with every rounding included"
    if norm_of(ds) != "frobenius":
        sentence = (
            f"Each constant is enclosed, in float64 and deterministically, at the layer that the model computes in {dtype}, between an attained "
            f"value and an upper bound at most a factor {1 + tol:.10g} above it{former}."
        )
    elif a["delta"]:
        sentence = (
            f"Each constant is enclosed, by Lanczos' method in {dtype}, between an attained value and an upper bound at most a factor {1 + tol:.10g} "
            f"above it{former}; over the random start vectors (seed {seed}), the upper bounds hold together with probability at least "
            f"{prose.complement(float(a['delta']))}."
        )
    elif FORMER in ds:
        sentence = (
            f"Constants are estimates by Lanczos' method in {dtype} (relative tolerance {prose.number(tol)}, seed {seed}), without upper bounds."
        )
    else:
        how = f"Lanczos' method in {dtype} (relative tolerance {prose.number(tol)}, seed {seed})"
        sentence = f"Constants are lower ends: values that the norms attain, found by {how}, less every rounding; there are no upper ends."
    known = int(ds["exact"].notnull().sum())
    unconverged = int((ds["exact"].notnull() & ~ds["exact_converged"]).sum())
    return f"{sentence} For {unconverged} of {known} constants that was not reached." if unconverged else sentence


def _comparison(ds: xr.Dataset, prose: Prose) -> str:
    """The bounds, by source."""
    sources: dict[str, list[str]] = {}
    for name in ds.attrs["bounds"]:
        sources.setdefault(_key(name), []).append(prose.escape(f"{ds[name].attrs['label']} [{ds[name].attrs['source']}]"))
    listed = "; ".join(f"{', '.join(labels)} {_cited(key, prose)}" for key, labels in sources.items())
    return f"They are compared with upper bounds: {listed}; ratios are geometric means over samples, layers and heads." if listed else ""


def _left_out(ds: xr.Dataset, prose: Prose) -> str:
    """The bounds that say nothing about such attention, of which the run has no more than the names."""
    names = ds.attrs.get("not_applicable")
    if not names:
        return ""
    from lipbound.bounds.registry import get

    listed = ", ".join(prose.escape(get(name).label) for name in names)
    return f"Bounds whose statements do not cover such attention were left out ({listed})."


def _below_exact(ds: xr.Dataset, prose: Prose) -> str:
    """A sentence for every bound that is below an exact constant."""
    safe = prose.escape
    return " ".join(
        f"{safe(ds[name].attrs['label'])} is below the constant it should bound in {entry['violations']} of {entry['compared']} cases, "
        f"because {safe(entry['why'])}."
        for name, entry in audit(ds).items()
        if entry["violations"]
    )


def _other_map(ds: xr.Dataset, prose: Prose) -> str:
    """The bounds on L2 attention, which are compared with another constant."""
    labels = [prose.escape(ds[name].attrs["label"]) for name in ds.attrs["bounds"] if compared_with(ds, name) != "exact"]
    if not labels:
        return ""
    return (
        f"The bound on L2 attention ({', '.join(labels)}) is compared with the constant of that map, with the same weights, an "
        f"estimate to a relative tolerance of {prose.number(float(ds.attrs['tol']))} without upper bound."
    )


def _environment(ds: xr.Dataset, prose: Prose) -> str:
    """On what device, with which versions, when."""
    a, safe = ds.attrs, prose.escape
    versions = ", ".join(f"{safe(name)} {safe(a['versions'][name])}" for name in ("torch", "transformers") if name in a["versions"])
    return f"Computed on {safe(a['device'])} with {versions}, Python {safe(a['python'])}, on {safe(a['date'][:10])}."


def _places(ds: xr.Dataset, times: str) -> str:
    """Layers and heads of a run in words; layers by their numbers where they are not the first ones."""
    layers = ds["layer"].values.tolist()
    plural = "s" if len(layers) > 1 else ""
    first = layers == list(range(len(layers)))
    text = f"{len(layers)} layer{plural}" if first else f"layer{plural} {', '.join(str(int(layer)) for layer in layers)}"
    if "head" not in ds.dims:
        return text
    counts = ds["exact"].notnull().any("sample").sum("head").values
    heads = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    return f"{text} {times} {heads} head{'s' if counts.max() > 1 else ''}"


def _cited(key: str, prose: Prose) -> str:
    """A source in running text."""
    author = re.search(r"author\s*=\s*\{+([^,}]+)", _entry(key))
    year = re.search(r"year\s*=\s*\{?(\d{4})", _entry(key))
    return prose.cite(key, author[1].strip() if author else key, year[1] if year else "")


def _key(name: str) -> str:
    """BibTeX key of a bound's source: the registry's, since a run's own could be any text, and there would be no entry for it."""
    from lipbound.bounds.registry import get

    return get(name).citation


def _entry(key: str) -> str:
    """BibTeX entry of a source."""
    from lipbound.bounds import BIBTEX

    return BIBTEX[key]
