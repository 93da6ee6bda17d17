"""The source of the documentation site, without Sphinx: every bound and every public name has a
page."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
from sitegen import api, counterexamples, gallery, measured, tree
from sitegen import bounds as site_bounds
from support.oracles import dense_norms

import lipbound as lb

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site() -> tree.Tree:
    """The source of all pages."""
    return tree.assemble()


def test_every_bound_has_a_page(site: tree.Tree) -> None:
    """And one with a caveat the layer that shows it."""
    for name in lb.bounds.names(None):
        page, bound = site.pages[f"bounds/{name}.md"], lb.bounds.get(name)
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
    assert {name: site_bounds.proofs(lb.bounds.get(name)) for name in cited} == cited


@pytest.mark.parametrize("name", counterexamples.EXAMPLES)
def test_examples_show_the_failure(name: str) -> None:
    """Against the dense norm of the autograd Jacobian."""
    found, bound = counterexamples.shortfall(name), lb.bounds.get(name)
    exact = float(dense_norms(found.att, "l2" if bound.map == "l2" else "head"))
    assert found.exact == pytest.approx(exact, rel=1e-9)
    assert found.bound < 0.9 * exact
    assert not bool(bound.sound(found.att).any())


def test_every_notebook_is_in_the_gallery(site: tree.Tree) -> None:
    page = site.pages["gallery/index.md"]
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert all(f":link: {name}\n" in page for name in names)
    assert all(f"gallery/{name}.ipynb" in site.pages for name in names)
    for name in gallery.NOTEBOOKS:
        assert gallery.picture(ROOT / "notebooks" / name).startswith(b"\x89PNG")


def test_the_command_line_is_told_in_words(site: tree.Tree) -> None:
    page = site.pages["reference/cli.md"]
    assert "| `--samples` | int | `8` |" in page
    assert "| `model` | str | required |" in page
    assert re.search(r"\| (`--output`, `-o`|`-o`, `--output`) \| path \| required \|", page)
    assert "method" not in "".join(re.findall(r"^\| `[^|]*\| ([^|]*)\|", page, re.MULTILINE))


def test_every_public_name_has_a_page(site: tree.Tree) -> None:
    named = {name for names in api.GROUPS.values() for name in names}
    assert named | set(api.MODULES) == set(lb.__all__)
    assert all(f"reference/api/lipbound.{name}.rst" in site.pages for name in named)


def module_at(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_module_is_documented(site: tree.Tree) -> None:
    texts = "\n".join(t for place, t in site.pages.items() if place.startswith("reference/api/"))
    modules = map(module_at, (ROOT / "lipbound").rglob("*.py"))
    wanted = {name for name in modules if not name.startswith(api.LEFT_OUT)}
    assert set(re.findall(r"automodule:: ([\w.]+)", texts)) == wanted


def test_the_study_of_warnings_counts_false_ones_of_sooner_steps() -> None:
    """Counted anew: looks are 5 steps apart, with 8 in 40 steps, the middle two of which are twice
    the median."""
    runs = measured.report("early_warning.json")["runs"]
    calm = [[look["exact"] for look in runs[key]["looks"]] for key in runs if ", 0, " in key]
    twice = [[(v[i], sum(sorted(v[i - 8 : i])[3:5])) for i in range(20, 80)] for v in calm]
    false = sum(any(not m / 4 <= x <= m for x, m in pairs) for pairs in twice)
    assert f"by the exact norm in {false}, " in measured.warning()


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
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(importlib.import_module(module_at(path)), optionflags=options)
    assert found.attempted > 0
    assert found.failed == 0
