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
from sitegen.measured import table
from sitegen.published import cell, paper

ROOT = Path(__file__).parents[2]
THEORY = ROOT / "docs" / "theory"
MAPS = {
    "head": "one attention head",
    "l2": "L2 attention with the weights of the head (compared with `exact_l2`, never with "
    "`exact`)",
}
OURS = "lipbound2026"
CAPTION = (
    "Least, geometric mean and most of bound / exact. Grey: the other bounds of the norm; blue:"
)
NEWLINE = "\n"
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
    return f"{value:,.0f}" if value < 1e7 else f"{value:.2e}"


def over_ball(bound: Bound) -> str:
    """What is said of a bound over a ball of inputs."""
    if bound.ball:
        return "yes, `over_ball`"
    if bound.citation != OURS:
        return "no statement in the source"
    see = "see {py:obj}`~lipbound.bounds.ball.over_ball`"
    return see if bound.name == "lipbound" else "no"


def facts(bound: Bound) -> list[str]:
    """What is said of a bound, as a table."""
    covered = [title for name, title in VARIANTS.items() if name in bound.covers]
    source = "ours" if bound.citation == OURS else f"{paper(bound.citation)}: {bound.source}"
    rows = {
        "source": source,
        "a bound when": bound.assumptions,
        "otherwise": bound.caveat or "it always holds",
        "bounds": MAPS[bound.map],
        "norm": f"{bound.norm}: {NORMS[bound.norm]}",
        "covers": ", ".join(["plain heads", *covered]),
        "cost per head": f"`{bound.cost}`",
        "over a ball of inputs": over_ball(bound),
        "derivatives": "yes" if bound.differentiable else "no",
    }
    return table(" | ", ((f"**{name}**", cell(what)) for name, what in rows.items()))


def docstring(text: str) -> str:
    """A docstring of the package whose citations of lemmas are links."""

    def change(match: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda n: f":ref:`Lemma {n[0]} <lemma-{n[0]}>`", match[1])

    return CITATION.sub(change, text)


def proof(bound: Bound) -> str:
    """Where it is proved."""
    if numbers := proofs(bound):
        return "\n".join(f"- [Lemma {n}: {lemmas()[n][0]}](#lemma-{n})" for n in numbers)
    if bound.name in counterexamples.EXAMPLES and bound.assumptions.startswith("none known"):
        return "None is known: it is the form of the authors' code, kept for comparison."
    return f"In the source: {bound.source}. The statement is taken over as it is printed."


def tight(bound: Bound) -> str:
    """How far above the exact norm it is on the checkpoints that come with lipbound."""
    report = tightness()
    rows, missing = [], []
    for model, row in report["checkpoints"].items():
        entry = row["norms"][bound.norm]["bounds"].get(bound.name)
        if entry is None:
            missing.append(f"`{model}`")
            continue
        held = {1.0: "everywhere", 0.0: "nowhere"}.get(
            entry["sound"], f"{100 * entry['sound']:.0f} %"
        )
        ratios = (shown_ratio(entry[key]) for key in ("geomean", "min", "max"))
        rows.append((f"`{model}`", row["heads"], *ratios, held))
    lines = table("checkpoint | heads | geometric mean | least | most | assumptions hold", rows)
    if missing:
        said = f"Not measured on {', '.join(missing)}: it says nothing about heads of that kind."
        lines += ["", said]
    return "\n".join(lines)


def failure(bound: Bound) -> str:
    """The smallest layer we know of on which the statement fails."""
    code = counterexamples.EXAMPLES.get(bound.name)
    if code is None:
        return ""
    found = counterexamples.shortfall(bound.name)
    exact = "exact norm of L2 attention" if bound.map == "l2" else "exact norm"
    return f"""## Where it fails

{counterexamples.REASONS[code]}

```python
import torch
import lipbound as lb

{code.strip()}
```

Here `{bound.name}` is {found.bound:.4g}, and the {exact} {found.exact:.4g}.
`lb.bounds.get({bound.name!r}).sound(att)` is False.

"""


def page(name: str) -> str:
    """The page of one bound."""
    bound, report = bounds.get(name), tightness()
    versions = report["versions"]
    cite = f"## Cite\n\n```bibtex\n{bounds.BIBTEX[bound.citation]}\n```\n"
    return f"""# {bound.label} (`{name}`)

{NEWLINE.join(facts(bound))}

## Statement

````{{eval-rst}}
{docstring(inspect.getdoc(bound.function) or "")}
````

Symbols: [notation](../theory/notation.md).

## Proof

{proof(bound)}

## How tight it is

`{name}` divided by the exact norm, over all heads and samples:

{tight(bound)}

```{{figure}} ../pictures/tight-{name}.svg
:alt: {CAPTION} {name}.

{CAPTION} {name}.
```

Measured by `benchmarks/tightness.py` on {report["machine"]}, torch {versions["torch"]},
transformers {versions["transformers"]}.

{failure(bound)}## Use it

```python
value = lb.bounds.get("{name}")(att)  # (samples, heads), float64
holds = lb.bounds.get("{name}").sound(att)  # where its assumptions hold
```

`att` is an `lb.Attention`: see [tensors of your own](../howto/tensors.md).

{"" if bound.citation == OURS else cite}"""


def index() -> str:
    """All bounds, norm by norm."""
    measured = tightness()["checkpoints"]["builtin:minilm"]["norms"]
    parts = []
    for norm, meaning in NORMS.items():
        rows = []
        for name in bounds.names(norm):
            bound, entry = bounds.get(name), measured[norm]["bounds"][name]
            mark = " †" if entry["sound"] < 1 else ""
            ratio = f"{shown_ratio(entry['geomean'])}{mark}"
            said = (cell(bound.label), ratio, cell(bound.assumptions))
            rows.append((f"[`{name}`]({name}.md)", *said))
        parts += [f"## Norm: {norm}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        parts += [*table("bound | label | bound / exact | a bound when", rows), ""]
    listed = NEWLINE.join(["published", *bounds.names(None)])
    return f"""# Bounds

All bounds of the registry, with how far above the exact norm they are: bound / exact on
`builtin:minilm`, geometric mean over 72 heads, at 128 tokens. A mark (†): the
assumptions of the bound do not hold there.

Bounds of different norms are never compared. [Which published bounds are in, and which are
left out](published.md).

{NEWLINE.join(parts)}
```{{toctree}}
:hidden:

{listed}
```
"""


def pages() -> dict[str, str]:
    """A page for every bound, and the list of them."""
    return {"bounds/index.md": index()} | {
        f"bounds/{name}.md": page(name) for name in bounds.names(None)
    }
