"""The source of the documentation site, without Sphinx: every bound has a page, every page is in a
toctree, links lead somewhere."""

import doctest
import importlib
import posixpath
import re
from pathlib import Path

import pytest
from sitegen import api, counterexamples, gallery, tree
from sitegen import bounds as site_bounds
from support.oracles import dense_norms

import lipbound as lb
from lipbound import bounds

ROOT = Path(__file__).parents[1]
SITE = tree.assemble()
TOCTREE = re.compile(
    r"^```\{toctree\}\n(.*?)^```|^\.\. toctree::\n((?:\s*\n|\s+.*\n)+)", re.MULTILINE | re.DOTALL
)


def children(place: str) -> list[str]:
    """The pages that the toctrees of a page list."""
    folder, found = posixpath.dirname(place), []
    for match in TOCTREE.finditer(SITE.pages[place]):
        for line in (match[1] or match[2]).splitlines():
            entry = re.sub(r".*<(.+)>$", r"\1", line.strip())
            path = posixpath.join(folder, entry)
            found += [f"{path}{suffix}" for suffix in (".md", ".rst", ".ipynb") if entry]
    return [one for one in found if one in SITE.pages]


def labels(text: str) -> set[str]:
    """What links within a page may lead to: labels, and headings as MyST writes them."""
    headings = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", one.replace("`", "").lower()).strip() for one in headings]
    slugs = {one.replace(" ", "-") for one in words}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def test_every_page_is_in_a_toctree() -> None:
    reached, todo = {"index.md"}, ["index.md"]
    while todo:
        new = set(children(todo.pop())) - reached
        reached |= new
        todo += new
    assert set(SITE.pages) - reached == set()
    assert len(reached) > 100


def test_every_bound_has_a_page() -> None:
    """And one with a caveat the layer that shows it."""
    for name in bounds.names(None):
        page, bound = SITE.pages[f"bounds/{name}.md"], bounds.get(name)
        picture = f"pictures/tight-{name}.svg"
        assert bound.label in page.splitlines()[0]
        titles = ("## Statement", "## Proof", "## How tight it is")
        for part in (*titles, picture, "```{eval-rst}", bound.cost):
            assert part in page
        assert picture in tree.DRAWN
        fails = "## Where it fails" in page, name in counterexamples.EXAMPLES
        assert fails == (bool(bound.caveat),) * 2, name


def test_proofs_are_our_own_lemmas() -> None:
    """Those that docstrings cite or that name the bound; "Lemma 3.2" of a paper is none."""
    cited = {"castin_mean_field": [38], "castin_bias": [34, 35], "lipbound": [16, 78]}
    cited |= {"yudin": [31, 32, 33]}
    assert {name: site_bounds.proofs(bounds.get(name)) for name in cited} == cited


@pytest.mark.parametrize("name", counterexamples.EXAMPLES)
def test_examples_show_the_failure(name: str) -> None:
    """Against the dense norm of the autograd Jacobian."""
    found, bound = counterexamples.shortfall(name), bounds.get(name)
    exact = float(dense_norms(found.att, "l2" if bound.map == "l2" else "head"))
    assert found.exact == pytest.approx(exact, rel=1e-9)
    assert found.bound < 0.9 * exact
    assert not bool(bound.sound(found.att).any())


def test_relative_links_lead_somewhere() -> None:
    every_label = {label for page in SITE.pages.values() for label in labels(page)}
    for place, page in SITE.pages.items():
        if not place.endswith(".md"):
            continue
        parts = tree.FENCE.split(page)
        text = "".join(
            part for i, part in enumerate(parts) if i % 2 == 0 or "{eval-rst}" not in part
        )
        for _, target, _ in [*tree.LINK.findall(text), *tree.FIGURE.findall(text)]:
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target) or not re.search(r"\.\w+$|^$", path):
                continue
            beside = posixpath.join(posixpath.dirname(place), path)
            found = posixpath.normpath(beside) if path else place
            assert {found} & {*SITE.pages, *SITE.files, *tree.DRAWN}, (place, target)
            if anchor and found in SITE.pages:
                assert anchor in (labels(SITE.pages[found]) if path else every_label), target
        assert not re.search("^<!-- table:", text, re.MULTILINE), place


def test_files_that_pages_show_exist() -> None:
    assert [path for path in SITE.files.values() if not path.exists()] == []
    assert len(SITE.files) > 20


def test_links_are_set_right() -> None:
    site = tree.Tree({"theory/index.md": "", "howto/cite.md": ""})
    text = (
        "[a](../docs/theory/index.md#x) ![b](minilm.png) "
        "[c](https://x.org/a.md)\n```\n[d](minilm.png)\n```\n"
    )
    changed = site.relinked(text, "figures/README.md", "findings/papers.md")
    expected = text.replace("../docs/theory", "../theory")
    assert changed == expected.replace("![b](minilm", "![b](../files/figures/minilm")
    assert site.files == {"files/figures/minilm.png": ROOT / "figures" / "minilm.png"}


def test_every_notebook_is_in_the_gallery() -> None:
    page = SITE.pages["gallery/index.md"]
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert children("gallery/index.md") == [f"gallery/{name}.ipynb" for name in names]
    assert all(f":link: {name}\n" in page for name in names)
    for name in gallery.NOTEBOOKS:
        assert gallery.picture(ROOT / "notebooks" / name).startswith(b"\x89PNG")


def test_the_command_line_is_told_in_words() -> None:
    page = SITE.pages["reference/cli.md"]
    for row in (
        "| `--samples` | int | `8` |",
        "| `model` | str | required |",
        "| `--output`, `-o` | path | required |",
    ):
        assert row in page or row.replace("`--output`, `-o`", "`-o`, `--output`") in page, row
    assert "method" not in "".join(re.findall(r"^\| `[^|]*\| ([^|]*)\|", page, re.MULTILINE))


def test_every_public_name_has_a_page() -> None:
    named = {name for names in api.GROUPS.values() for name in names}
    assert named | set(api.MODULES) == set(lb.__all__)
    assert all(f"reference/api/lipbound.{name}.rst" in SITE.pages for name in named)


def test_every_module_is_documented() -> None:
    pages = SITE.pages.items()
    texts = "\n".join(text for place, text in pages if place.startswith("reference/api/"))
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "lipbound").rglob("*.py")
    ]
    wanted = {name for name in modules if not name.startswith(api.LEFT_OUT)}
    assert set(re.findall(r"automodule:: ([\w.]+)", texts)) == wanted


def test_the_map_of_the_package_names_files_that_are_there() -> None:
    named = 0
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if folder := re.match(r"\| `([\w/]+/)` \|", line):
            for name in re.findall(r"`(\w+\.py|\w+/)`", line.split("|")[3]):
                assert (ROOT / "lipbound" / folder[1] / name).exists(), (folder[1], name)
                named += 1
    assert named > 30


@pytest.mark.parametrize(
    "path",
    [path for path in (ROOT / "lipbound").rglob("*.py") if ">>> " in path.read_text("utf-8")],
    ids=lambda path: path.stem,
)
def test_examples_print_what_docstrings_say(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(importlib.import_module(name), optionflags=options)
    assert found.attempted > 0
    assert found.failed == 0
