"""What to cite for a run, and a paragraph on how its numbers were made."""

import re
from collections.abc import Callable

import xarray as xr

from lipbound import bounds
from lipbound.attention.variants import VARIANTS
from lipbound.bounds.audit import audit
from lipbound.bounds.lipbound2026 import CITATION
from lipbound.bounds.registry import get
from lipbound.errors import UnknownNameError, nearest
from lipbound.formatting import escape_latex, plain

CITATION_FORMATS = ("bib", "latex", "text")


def keys(ds: xr.Dataset) -> list[str]:
    """BibTeX keys of every source of a run's bounds, and of lipbound."""
    return list(dict.fromkeys([get(name).citation for name in ds.attrs["bounds"]] + [CITATION]))


def bibtex(ds: xr.Dataset) -> str:
    """BibTeX entries of every source the run's bounds come from, and of lipbound."""
    return "\n\n".join(bounds.BIBTEX[key] for key in keys(ds)) + "\n"


def cite(ds: xr.Dataset, format: str = "bib") -> str:
    """What goes into a paper: "bib", the entries with the `methods` paragraph in comments; "latex" or "text", the paragraph alone.

    Raises:
        UnknownNameError: another format.
    """
    if format not in CITATION_FORMATS:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, CITATION_FORMATS)}")
    if format == "bib":
        comment = methods(ds, "latex").replace("@", "{\\char64}")  # BibTeX reads an entry after every @, comment or not
        return f"% {comment}\n\n{bibtex(ds)}"
    return methods(ds, format) + "\n"


def methods(ds: xr.Dataset, format: str = "latex") -> str:
    r"""One paragraph for a methods section: what was computed, how, how surely, from what, with what; from the run's own settings.

    Args:
        ds: a run.
        format: "latex" (foreign text escaped, ``\cite`` with the keys of `bibtex`) or "text" (author and year).

    Raises:
        UnknownNameError: another format.
    """
    if format not in CITATION_FORMATS[1:]:
        raise UnknownNameError(f"unknown format {format!r}; {nearest(format, CITATION_FORMATS[1:])}")
    a = ds.attrs
    safe: Callable[[str], str] = escape_latex if format == "latex" else plain

    def cited(key: str) -> str:
        return f"\\cite{{{key}}}" if format == "latex" else f"({_author(key)} {_year(key)})"

    across = _places(ds).replace(" x ", r" $\times$ ") if format == "latex" else _places(ds)
    kind = "commit" if a.get("commit") == a["revision"] else "weights"
    samples, exact_samples, tokens, seed = (int(a[name]) for name in ("samples", "exact_samples", "tokens", "seed"))
    dtype, tol = safe(a["dtype"]), float(a["tol"])
    sentences = [
        f"Local Lipschitz constants, the spectral norms of Jacobians, of {safe(a['map_description'])} were computed with lipbound "
        f"{safe(a['lipbound'])} {cited(CITATION)} for {safe(str(a['model']))} "
        f"({safe(a['architecture'])}, {across}; {kind} {safe(str(a['revision']))}).",
        f"Inputs were {samples} sample{'s' if samples > 1 else ''} of at most {tokens} tokens from {safe(str(a['data']))} "
        + (f"({safe(a['preprocessing'])}; " if a.get("preprocessing") else "(")
        + f"{safe(a['data_fingerprint'])})"
        + (f", exact constants on the first {exact_samples}." if exact_samples != samples else "."),
    ]
    if a.get("variants"):
        sentences.append(f"The attention of this model has {' and '.join(VARIANTS[v] for v in a['variants'])}, which are part of the map.")
    unconverged, all_of_them = int(ds["exact"].notnull().sum() - ds["exact_converged"].sum()), int(ds["exact"].notnull().sum())
    if a["delta"]:
        chance = ("1 - " if format == "text" else "$1 - ") + _power(float(a["delta"]), format) + ("" if format == "text" else "$")
        sentences.append(
            f"Each constant is enclosed, by Lanczos' method in {dtype}, between an attained value and an upper bound at most a factor {1 + tol:.10g} "
            f"above it; over the random start vectors (seed {seed}), the upper bounds hold together with probability at least {chance}."
        )
    else:
        sentences.append(f"Constants are estimates by Lanczos' method in {dtype} (relative tolerance {tol:g}, seed {seed}), without upper bounds.")
    if unconverged:
        sentences.append(f"For {unconverged} of {all_of_them} constants that was not reached.")
    sources: dict[str, list[str]] = {}
    for name in a["bounds"]:
        sources.setdefault(get(name).citation, []).append(safe(f"{ds[name].attrs['label']} [{ds[name].attrs['source']}]"))
    listed = "; ".join(f"{', '.join(labels)} {cited(key)}" for key, labels in sources.items())
    if listed:
        sentences.append(f"They are compared with upper bounds: {listed}; ratios are geometric means over samples, layers and heads.")
    if left_out := a.get("not_applicable"):
        sentences.append(
            f"Bounds whose statements do not cover such attention were left out ({', '.join(safe(get(name).label) for name in left_out)})."
        )
    counts = audit(ds)
    for name, entry in counts.items():
        if entry["violations"]:
            sentences.append(
                f"{safe(ds[name].attrs['label'])} is below the constant it should bound in {entry['violations']} of {entry['compared']} cases, "
                f"because {safe(entry['why'])}."
            )
    if any(get(name).exact != "exact" for name in a["bounds"]):
        names = ", ".join(safe(ds[name].attrs["label"]) for name in a["bounds"] if get(name).exact != "exact")
        sentences.append(
            f"The bound on L2 attention ({names}) is compared with the constant of that map, with the same weights, an "
            f"estimate to a relative tolerance of {tol:g} without upper bound."
        )
    versions = ", ".join(f"{safe(name)} {safe(a['versions'][name])}" for name in ("torch", "transformers") if name in a["versions"])
    sentences.append(f"Computed on {safe(a['device'])} with {versions}, Python {safe(a['python'])}, on {safe(a['date'][:10])}.")
    return " ".join(sentences)


def _places(ds: xr.Dataset) -> str:
    """Layers and heads of a run in words; layers by their numbers where they are not the first ones."""
    layers = ds["layer"].values.tolist()
    plural = "s" if len(layers) > 1 else ""
    first = layers == list(range(len(layers)))
    text = f"{len(layers)} layer{plural}" if first else f"layer{plural} {', '.join(str(int(layer)) for layer in layers)}"
    if "head" not in ds.dims:
        return text
    counts = ds["exact_rounding"].notnull().any("sample").sum("head").values
    heads = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    return f"{text} x {heads} head{'s' if counts.max() > 1 else ''}"


def _power(x: float, format: str) -> str:
    """A small number, as a power of ten in LaTeX."""
    text = f"{x:g}"
    match = re.fullmatch(r"(.+)e-0*(\d+)", text)
    if format == "text" or not match:
        return text
    factor = "" if match[1] == "1" else f"{match[1]} \\cdot "
    return f"{factor}10^{{-{match[2]}}}"


def _author(key: str) -> str:
    first = re.search(r"author\s*=\s*\{+([^,}]+)", bounds.BIBTEX[key])
    return first[1].strip() if first else key


def _year(key: str) -> str:
    found = re.search(r"year\s*=\s*\{?(\d{4})", bounds.BIBTEX[key])
    return found[1] if found else ""
