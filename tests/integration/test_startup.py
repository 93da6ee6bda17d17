"""The command line as a process of its own, and what starting lipbound loads: commands and public
names import what they need when they run."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

import lipbound as lb
from lipbound import cli

HEAVY = set(
    "torch numpy xarray pandas scipy zarr matplotlib transformers datasets plotly PIL".split()
)
COMMANDS = [
    command.name or command.callback.__name__
    for command in cli.app.registered_commands
    if command.callback is not None
]
APP = """
from lipbound.cli import app
def run(*words):
    try:
        app(list(map(str, words)))
    except SystemExit as end:
        assert not end.code, end.code
"""


def loaded(code, *arguments):
    """Which of `HEAVY` a fresh process has loaded after some code."""
    script = f"import sys\n{code}\nprint('LOADED', *({HEAVY!r} & set(sys.modules)))"
    words = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_loading_is_seen():
    """The other tests can fail. Names of papers are taken before these are imported."""
    code = """
import pandas
from lipbound import bounds
words = "label citation statement statement_latex source assumptions cost"
try:
    bounds.bound("yudin", **dict.fromkeys(words.split(), ""), condition=len)(len)
except ValueError as error:
    assert "registered" in str(error)
else:
    raise AssertionError
assert sorted(bounds.__all__) == dir(bounds)
"""
    assert loaded(code) >= {"numpy", "pandas", "torch"}


def test_importing_and_helping_load_nothing():
    """Neither do modules that are found as attributes, nor lists of models; the registry of bounds
    is imported without torch."""
    code = f"""
import lipbound as lb
lb.__version__, dir(lb), lb.errors.StoreError, lb.attention, lb.linalg, lb.runs
{APP}
run("--help")
for command in {COMMANDS!r}:
    run(command, "--help")
run("models", "--json")
"""
    assert loaded(code) == set()
    assert "torch" not in loaded("import lipbound.bounds.registry, lipbound.bounds.audit")


def test_a_mistyped_builtin_is_told_before_anything_is_loaded():
    code = """
from lipbound.__main__ import main
try:
    main()
except SystemExit as end:
    assert end.code == 2, end.code
"""
    assert loaded(code, "compare", "builtin:nope") == set()


def test_the_package_runs():
    for words, status, out, err in (
        (("compare", "builtin:nope"), 2, "", "error: unknown builtin checkpoint 'nope'"),
        (("--version",), 0, f"lipbound {lb.__version__}\n", ""),
    ):
        command = [sys.executable, "-m", "lipbound", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr[: len(err)]) == (status, out, err)
    assert done.stderr == ""
    assert lb.__version__ == importlib.metadata.version("lipbound")


@pytest.mark.slow
def test_datasets_are_loaded_for_datasets_alone(bert, tmp_path):
    """And nothing draws random numbers of the caller's stream: rich does when it is loaded."""
    (tmp_path / "rows.csv").write_text("text\nthe ferry is in a clock\n")
    code = """
import random
before = random.getstate()
import lipbound as lb
lb.Monitor, lb.compare, lb.plots, lb.tables, lb.report
assert "rich.style" in sys.modules
assert random.getstate() == before
for data in (["the ferry is in a clock"], sys.argv[2]):
    assert "datasets" not in sys.modules
    options = {"bounds": "castin", "max_length": 8, "layers": [0], "progress": False}
    assert lb.compare(sys.argv[1], data, **options).sizes["sample"] == 1
"""
    assert "datasets" in loaded(code, bert, tmp_path / "rows.csv")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals of one's own here")
def test_a_terminal_is_told_what_is_going_on_from_the_start(bert):
    """Modules are loaded, then layers looked at, then measured, and none of it stays."""
    reader, writer = os.openpty()
    words = [bert, "--data", "the ferry is in a clock", "--bounds", "castin", "--max-length", "8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lipbound", "compare", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=writer,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(writer)
    shown, part = b"", b"-"
    while part:
        try:
            part = os.read(reader, 4096)
        except OSError:  # the other end is closed
            part = b""
        shown += part
    os.close(reader)
    assert process.wait(timeout=240) == 0, shown
    places = [
        shown.find(said) for said in (b"loading PyTorch", b"looking at its layers", b": layers")
    ]
    assert places == sorted(places), shown
    assert min(places) >= 0, shown


@pytest.mark.slow
def test_stored_runs_are_shown_without_torch_or_models(bert, tmp_path):
    """Neither do provenance and checksums need it; BibTeX stands in the papers' files."""
    run, figure, models = tmp_path / "run.zarr", tmp_path / "run.pdf", {"transformers", "datasets"}
    options = {"bounds": "yudin,castin", "max_length": 8, "progress": False}
    lb.compare(bert, ["the ferry is in a clock"], out=run, **options)
    altered = "from lipbound.runs.checksums import altered\nassert altered(load(sys.argv[1])) == []"
    tables = (
        "run('table', sys.argv[1], '--json'); run('info', sys.argv[1]); run('table', sys.argv[1])"
    )
    for code, absent in (
        (f"from lipbound.runs.store import load\n{altered}", {"torch", "matplotlib"}),
        (f"{APP}{tables}", {"torch", "matplotlib", "plotly"}),
        (f"{APP}run('cite', sys.argv[1])", {"matplotlib", "plotly"}),
        (f"{APP}run('heatmap', sys.argv[1], '-o', sys.argv[2])", {"torch", "plotly"}),
        (f"{APP}run('bounds')", {"matplotlib", "xarray", "pandas", "zarr", "plotly"}),
    ):
        assert not loaded(code, run, figure) & (absent | models), code
    assert figure.stat().st_size > 1000
