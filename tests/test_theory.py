"""The theory pages and the docstrings that cite them fit together."""

import ast
import re
from pathlib import Path

from sitegen.docstrings import exists

ROOT = Path(__file__).parents[1]
THEORY = ROOT / "docs" / "theory"
PAGES = {path.name: path.read_text() for path in sorted(THEORY.glob("*.md"))}
CITATION = re.compile(
    r"\bLemmas?\s+([0-9]+(?:(?:,\s+|\s+and\s+)[0-9]+)*)(?![0-9.]*[0-9])"
    r"(?:\s+\((docs/theory/\w+\.md)\))?"
)
"""Lemmas of our own, "Lemma 7" or "Lemmas 7, 8 and 9", and the page named behind; "Lemma 3.8" of a
paper is none."""


def pages_in_order() -> list[str]:
    """The pages as the index lists them."""
    return re.findall(r"^\| \[[^]]+\]\((\w+\.md)\)", PAGES["index.md"], re.MULTILINE)


def lemmas() -> dict[int, str]:
    """Page of every lemma."""
    found = [
        (int(number), page)
        for page in pages_in_order()
        for number in re.findall(r"^### Lemma (\d+) \(", PAGES[page], re.MULTILINE)
    ]
    numbers = [number for number, _ in found]
    # in the order of the pages; some numbers are free
    assert numbers == sorted(set(numbers))
    return dict(found)


def sources() -> list[Path]:
    """Files of the package and of the figures."""
    return sorted(path for room in ("lipbound", "figures") for path in (ROOT / room).rglob("*.py"))


def docstrings() -> list[tuple[str, str]]:
    """Every docstring of package and figures, those below constants included, and where it is."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.value.value)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def citations() -> list[tuple[str, int, str]]:
    """Where, lemma and page of everything that docstrings cite."""
    return [
        (where, int(number), match[2] or "")
        for where, text in docstrings()
        for match in CITATION.finditer(text)
        for number in re.findall(r"\d+", match[1])
    ]


def test_the_index_lists_every_page() -> None:
    assert sorted(["index.md", *pages_in_order()]) == sorted(PAGES)
    toctree = PAGES["index.md"].split("```")[1].split("\n\n")[1].split()
    assert [f"{name}.md" for name in toctree] == pages_in_order()


PARTS = ("**Statement.**", "**Assumptions.**", "**Proof.**", "QED\n", "**Code.** `")


def test_every_lemma_has_statement_assumptions_proof_and_code() -> None:
    assert len(lemmas()) > 50
    for page, text in PAGES.items():
        for section in re.split(r"^(?=###? )", text, flags=re.MULTILINE):
            if section.startswith("### Lemma"):
                for part in PARTS:
                    assert part in section, (part, section.splitlines()[0], page)


def test_what_docstrings_cite_is_on_the_page_they_name() -> None:
    where_is = lemmas()
    cited = citations()
    for where, number, page in cited:
        assert page == f"docs/theory/{where_is.get(number)}", (where, number)
    # every lemma is cited by a docstring
    assert {number for _, number, _ in cited} == set(where_is)


def test_links_between_lemmas_lead_to_their_pages() -> None:
    where_is = lemmas()
    for page, text in PAGES.items():
        for number, target in re.findall(r"\[Lemma (\d+)\]\((\w+\.md)\)", text):
            assert where_is[int(number)] == target != page
        for number in re.findall(r"(?<!\[)(?<!### )Lemma (\d+)(?!\.\d|\d)", text):
            assert where_is[int(number)] == page, f"Lemma {number} on {page} lacks a link"


def test_names_in_code_type_exist_or_occur_in_the_source() -> None:
    long = set(re.findall(r"`(lipbound\.[\w.]+)`", "\n".join(PAGES.values())))
    assert [name for name in long if not exists(name)] == []
    files = sources()
    source = "\n".join(path.read_text() for path in files)
    words = {*re.findall(r"\w+", source), *(path.stem for path in files)}
    named = set(re.findall(r"`([A-Za-z_][\w.]*)`", "\n".join(PAGES.values())))
    assert len(named) > 50
    assert not {name for name in named if not set(name.split(".")) <= words}


def test_inline_formulas_are_closed() -> None:
    for page, text in PAGES.items():
        assert text.count("$$") % 2 == 0, page
        for paragraph in re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL).split("\n\n"):
            assert paragraph.count("$") % 2 == 0, f"{page}: {paragraph[:80]}"
