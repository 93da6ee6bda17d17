"""What README.md and the pages of the documentation say stays true."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from sitegen import measured, published, tree
from support.checks import script

import lipbound as lb
from lipbound.cli import app
from lipbound.linalg.operator_norm import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {
    "README.md": README,
    "figures/README.md": (ROOT / "figures" / "README.md").read_text(),
    **tree.handwritten(),
}
PYTHON = [
    (name, code)
    for name, text in PAGES.items()
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
]
LINES = re.compile(r"^(?:    |\$ )(lipbound .*?)(?: #.*)?$", re.MULTILINE)
COMMANDS = sorted({line for text in PAGES.values() for line in LINES.findall(text)})
LONG = "README.md start.md howto/diff.md howto/training.md howto/sweeps.md".split()
"""Pages whose snippets take long."""
ELSEWHERE = ("from_pretrained", "dask", "Trainer", "minilm.zarr")
"""What a snippet has that takes the hub, other processes, or a run that is not there."""


def benchmark(name):
    """A script of benchmarks/ as a module."""
    return script(ROOT / "benchmarks" / f"{name}.py")


def test_the_page_of_published_bounds_has_all():
    """As registered, and what is left out with a reason for each."""
    page = published.page()
    assert all(f"`{name}`" in page for name in lb.bounds.names(None))
    for one in published.LEFT_OUT:
        assert one.reason in published.REASONS
        assert one.remark
        assert re.search(r"\b20[12]\d\b", one.source)


def test_generated_parts_are_up_to_date():
    """The figure, and how tight the bounds are; ``python benchmarks/readme.py`` writes both."""
    readme = benchmark("readme")
    assert readme.written(README) == README
    assert all(f"| `{name}` |" in README for name in lb.bounds.names(None))
    assert readme.figure() in README
    assert (ROOT / readme.FIGURE).exists()
    assert readme.caption().strip("*") in (ROOT / "docs" / "index.md").read_text()


def test_tightness_is_of_bounds():
    """Where the assumptions of a bound hold, it is nowhere below the exact norm, but for the width
    of the enclosure."""
    rows = json.loads((ROOT / "benchmarks" / "tightness.json").read_text())["checkpoints"]
    norms = [norm["bounds"] for row in rows.values() for norm in row["norms"].values()]
    assert {name for norm in norms for name in norm} == set(lb.bounds.names(None))
    for norm in norms:
        for name, one in norm.items():
            assert one["sound"] != 1 or one["min"] >= 1 - 1e-9, name


def test_no_enclosure_of_the_accuracy_table_misses():
    rows = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text())["rows"]
    assert {row["method"].split(",")[0] for row in rows} == {*METHODS}
    assert all(row["outside"] in (0, None) for row in rows)


def test_every_part_that_was_measured_is_shown():
    shown = {name for text in PAGES.values() for name in re.findall(r"<!-- table: (\w+) -->", text)}
    assert shown == set(measured.PARTS)


@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, marks=pytest.mark.slow if page in LONG else ())
        for page, code in PYTHON
        if not any(word in code for word in ELSEWHERE)
    ],
)
def test_python_examples_of_pages_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(code, {})


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_names_in_python_examples_exist(page, code):
    """``lb.plots.heatmaps`` and its like."""
    for node in ast.walk(ast.parse(code)):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"lb(\.\w+)+", dotted):
            found = lb
            for part in dotted.split(".")[1:]:
                found = getattr(found, part)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line):
    """Every command line of the pages: the command is there, and takes these options."""
    _, name, *arguments = shlex.split(line.split(" > ")[0])
    if name != "COMMAND":
        command = typer.main.get_command(app).commands[name]
        assert command.make_context(name, arguments) is not None
