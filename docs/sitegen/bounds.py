"""A page for every bound, from the registry: statement, source, proof, how tight it is, where it
fails."""

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from lipbound import bounds
from lipbound.attention.variants import VARIANTS
from lipbound.bounds.statement import Bound
from lipbound.schema import NORMS
from sitegen import counterexamples
from sitegen.published import cell, paper

ROOT = Path(__file__).parents[2]
THEORY = ROOT / "docs" / "theory"
MAPS = {
    "head": "one attention head",
    "l2": "L2 attention with the weights of the head (compared with `exact_l2`, never with "
    "`exact`)",
}
OURS = "lipbound2026"
CITATION = re.compile(r"\bLemmas? ((?:\d+(?:, | and )?)+)\s+\(docs/theory/\w+\.md\)")
"""Lemmas of our own in docstrings; "Lemma 3.2" of a paper is none."""


@cache
def tightness() -> dict[str, Any]:
    """What benchmarks/tightness.py has measured."""
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "tightness.json").read_text(encoding="utf-8")
    )
    return found


@cache
def lemmas() -> dict[int, tuple[str, str]]:
    """Title of every lemma, and the code it names."""
    found = {}
    for path in sorted(THEORY.glob("*.md")):
        for section in re.split(r"^(?=### )", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            head = re.match(r"### Lemma (\d+) \((.+)\)\n", section)
            if head:
                found[int(head[1])] = (head[2], section.partition("**Code.**")[2])
    return found


def proofs(bound: Bound) -> list[int]:
    """Lemmas that prove a bound: those its docstring cites, and those that name it as
    their code."""
    cited = {
        int(n)
        for group in CITATION.findall(inspect.getdoc(bound.function) or "")
        for n in re.findall(r"\d+", group)
    }
    dotted = f"{bound.function.__module__}.{bound.name}`"
    return sorted(cited | {number for number, (_, code) in lemmas().items() if dotted in code})


def shown_ratio(value: float | None) -> str:
    """A ratio with three digits; one beyond the range of float64 is infinite."""
    if value is None:
        return "infinite"
    if value < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def over_ball(bound: Bound) -> str:
    """What is said of a bound that has no ball of its own."""
    if bound.citation != OURS:
        return "no statement in the source"
    return (
        "see {py:obj}`~lipbound.bounds.ball.over_ball.over_ball`"
        if bound.name == "lipbound"
        else "no"
    )


def facts(bound: Bound) -> list[str]:
    """What is said of a bound, as a table."""
    source = bound.source if bound.citation == OURS else f"{paper(bound.citation)}: {bound.source}"
    rows = {
        "source": "ours" if bound.citation == OURS else source,
        "a bound when": bound.assumptions,
        "otherwise": bound.caveat or "it always holds",
        "bounds": MAPS[bound.map],
        "norm": f"{bound.norm}: {NORMS[bound.norm]}",
        "covers": ", ".join(
            ["plain heads", *(title for name, title in VARIANTS.items() if name in bound.covers)]
        ),
        "cost per head": f"`{bound.cost}`",
        "over a ball of inputs": "yes, `over_ball`" if bound.ball else over_ball(bound),
        "derivatives": "yes" if bound.differentiable else "no",
    }
    return [
        "| | |",
        "|---|---|",
        *(f"| **{name}** | {cell(what)} |" for name, what in rows.items()),
        "",
    ]


def statement(bound: Bound) -> list[str]:
    """The docstring of a bound, which states it with every symbol."""
    text = inspect.getdoc(bound.function)
    return [
        "## Statement",
        "",
        "````{eval-rst}",
        *docstring(text or "").splitlines(),
        "````",
        "",
        "Symbols: [notation](../theory/notation.md).",
        "",
    ]


def docstring(text: str) -> str:
    """A docstring of the package whose citations of lemmas are links."""

    def change(match: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda n: f":ref:`Lemma {n[0]} <lemma-{n[0]}>`", match[1])

    return CITATION.sub(change, text)


def proof(bound: Bound) -> list[str]:
    """Where it is proved."""
    numbers = proofs(bound)
    lines = ["## Proof", ""]
    if numbers:
        lines += [f"- [Lemma {n}: {lemmas()[n][0]}](#lemma-{n})" for n in numbers]
    elif bound.name in counterexamples.EXAMPLES and bound.assumptions.startswith("none known"):
        lines += ["None is known: it is the form of the authors' code, kept for comparison."]
    else:
        lines += [f"In the source: {bound.source}. The statement is taken over as it is printed."]
    return [*lines, ""]


def tight(bound: Bound) -> list[str]:
    """How far above the exact norm it is on the checkpoints that come with lipbound."""
    report = tightness()
    lines = [
        "## How tight it is",
        "",
        f"`{bound.name}` divided by the exact norm, over all heads and samples:",
        "",
    ]
    lines += [
        "| checkpoint | heads | geometric mean | least | most | assumptions hold |",
        "|---|---|---|---|---|---|",
    ]
    missing = []
    for model, row in report["checkpoints"].items():
        entry = row["norms"][bound.norm]["bounds"].get(bound.name)
        if entry is None:
            missing.append(f"`{model}`")
            continue
        held = {1.0: "everywhere", 0.0: "nowhere"}.get(
            entry["sound"], f"{100 * entry['sound']:.0f} %"
        )
        ratios = " | ".join(shown_ratio(entry[key]) for key in ("geomean", "min", "max"))
        lines.append(f"| `{model}` | {row['heads']} | {ratios} | {held} |")
    if missing:
        lines += [
            "",
            f"Not measured on {', '.join(missing)}: it says nothing about heads of that kind.",
        ]
    caption = (
        "Least, geometric mean and most of bound / exact. Grey: the other bounds of the "
        f"norm; blue: {bound.name}."
    )
    lines += [
        "",
        f"```{{figure}} ../pictures/tight-{bound.name}.svg",
        f":alt: {caption}",
        "",
        caption,
        "```",
        "",
    ]
    versions = report["versions"]
    lines += [
        f"Measured by `benchmarks/tightness.py` on {report['machine']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}.",
        "",
    ]
    return lines


def failure(bound: Bound) -> list[str]:
    """The smallest layer we know of on which the statement fails."""
    code = counterexamples.EXAMPLES.get(bound.name)
    if code is None:
        return []
    found = counterexamples.shortfall(bound.name)
    exact = "exact norm of L2 attention" if bound.map == "l2" else "exact norm"
    lines = [
        "## Where it fails",
        "",
        counterexamples.REASONS[code],
        "",
        "```python",
        "import torch",
        "import lipbound as lb",
        "",
    ]
    lines += [*code.strip().splitlines(), "```", ""]
    lines += [
        f"Here `{bound.name}` is {found.bound:.4g}, and the {exact} {found.exact:.4g}. "
        f"`lb.bounds.get({bound.name!r}).sound(att)` is False.",
        "",
    ]
    return lines


def page(name: str) -> str:
    """The page of one bound."""
    bound = bounds.get(name)
    lines = [
        f"# {bound.label} (`{name}`)",
        "",
        *facts(bound),
        *statement(bound),
        *proof(bound),
        *tight(bound),
        *failure(bound),
    ]
    lines += [
        "## Use it",
        "",
        "```python",
        f'value = lb.bounds.get("{name}")(att)  # (samples, heads), float64',
    ]
    lines += [
        f'holds = lb.bounds.get("{name}").sound(att)  # where its assumptions hold',
        "```",
        "",
    ]
    lines += ["`att` is an `lb.Attention`: see [tensors of your own](../howto/tensors.md).", ""]
    if bound.citation != OURS:
        lines += ["## Cite", "", "```bibtex", bounds.BIBTEX[bound.citation], "```", ""]
    return "\n".join(lines)


def index() -> str:
    """All bounds, norm by norm."""
    lines = [
        "# Bounds",
        "",
        "All bounds of the registry, with how far above the exact norm they are: bound / exact "
        "on `builtin:minilm`, geometric mean",
    ]
    lines += [
        "over 72 heads, at 128 tokens. A mark (†): the assumptions of the bound do not hold there.",
        "",
    ]
    lines += [
        "Bounds of different norms are never compared. [Which published bounds are in, and which "
        "are left out](published.md).",
        "",
    ]
    measured = tightness()["checkpoints"]["builtin:minilm"]["norms"]
    for norm, meaning in NORMS.items():
        lines += [
            f"## Norm: {norm}",
            "",
            f"{meaning[0].upper()}{meaning[1:]}.",
            "",
            "| bound | label | bound / exact | a bound when |",
            "|---|---|---|---|",
        ]
        for name in bounds.names(norm):
            bound = bounds.get(name)
            entry = measured[norm]["bounds"][name]
            mark = " †" if entry["sound"] < 1 else ""
            lines.append(
                f"| [`{name}`]({name}.md) | {cell(bound.label)} | "
                f"{shown_ratio(entry['geomean'])}{mark} | {cell(bound.assumptions)} |"
            )
        lines += [""]
    lines += ["```{toctree}", ":hidden:", "", "published", *bounds.names(None), "```", ""]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """A page for every bound, and the list of them."""
    return {"bounds/index.md": index()} | {
        f"bounds/{name}.md": page(name) for name in bounds.names(None)
    }
