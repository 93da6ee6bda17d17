"""What starting lipbound loads: commands and public names import what they need when they run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lipbound as lb
from lipbound import cli

HEAVY = (
    "torch",
    "numpy",
    "xarray",
    "pandas",
    "scipy",
    "zarr",
    "matplotlib",
    "transformers",
    "datasets",
    "plotly",
    "PIL",
)
COMMANDS = [
    command.name or command.callback.__name__
    for command in cli.app.registered_commands
    if command.callback is not None
]


def loaded(code: str, *arguments: object) -> set[str]:
    """Which of `HEAVY` a fresh process has loaded after some code."""
    script = (
        f"import sys\n{code}\nprint('LOADED', *(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def after(*arguments: object) -> set[str]:
    """The same, after a command that ends well, or after several with "then" between them."""
    code = """
from lipbound.cli import app
given = [[]]
for word in sys.argv[1:]:
    given.append([]) if word == "then" else given[-1].append(word)
for words in given:
    try:
        app(words)
    except SystemExit as end:
        assert not end.code, end.code
"""
    return loaded(code, *arguments)


def test_loading_is_seen() -> None:
    """The other tests can fail."""
    assert loaded("import numpy, xarray") >= {"numpy", "xarray", "pandas"}
    assert "torch" in loaded("import lipbound\nlipbound.Attention")


def test_importing_lipbound_loads_nothing() -> None:
    assert loaded("import lipbound\nlipbound.__version__\ndir(lipbound)") == set()


def test_modules_are_found_without_importing_them() -> None:
    """As attributes, in a process that has used nothing else."""
    assert (
        loaded("import lipbound as lb\nlb.errors.StoreError, lb.attention, lb.linalg, lb.runs")
        == set()
    )
    assert "torch" in loaded(
        "import lipbound as lb\nlb.devices.available, lb.bounds.whole_layer, lb.bounds.over_ball"
    )


def test_help_loads_nothing() -> None:
    """One after the other: what one had loaded would be there at the end."""
    assert (
        after(
            "--version",
            "then",
            "--help",
            *(word for command in COMMANDS for word in ("then", command, "--help")),
        )
        == set()
    )


def test_a_mistyped_builtin_is_told_before_anything_is_loaded() -> None:
    code = (
        "from lipbound import cli\ntry:\n    cli.main()\nexcept SystemExit as end:\n    "
        "assert end.code == 2, end.code"
    )
    assert loaded(code, "compare", "builtin:nope") == set()


def test_models_are_listed_without_loading_anything() -> None:
    assert after("models", "--json") == set()


def test_datasets_are_loaded_for_datasets_alone(bert: Path, tmp_path: Path) -> None:
    """And silenced where they are."""
    (tmp_path / "rows.csv").write_text("text\nthe ferry is in a clock\n")
    code = """
import lipbound as lb
data = ["the ferry is in a clock"] if sys.argv[2] == "text" else sys.argv[2]
options = {"bounds": "castin", "max_length": 8, "layers": [0], "progress": False}
assert lb.compare(sys.argv[1], data, **options).sizes["sample"] == 1
"""
    assert "datasets" not in loaded(code, bert, "text")
    assert "datasets" in loaded(code, bert, tmp_path / "rows.csv")


def test_imports_draw_no_random_numbers() -> None:
    """Of the caller's stream: rich does when it is first loaded."""
    code = """
import random
before = random.getstate()
import lipbound as lb
lb.Monitor, lb.compare, lb.plots, lb.tables, lb.report
assert "rich.style" in sys.modules
assert random.getstate() == before
"""
    loaded(code)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals of one's own here")
def test_a_terminal_is_told_what_is_going_on_from_the_start(bert: Path) -> None:
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
    shown = b""
    while True:
        try:
            part = os.read(reader, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(reader)
    assert process.wait(timeout=240) == 0, shown
    said = ("loading PyTorch", "looking at its layers", ": layers")
    places = [shown.find(one.encode()) for one in said]
    assert places == sorted(places), shown
    assert min(places) >= 0, shown


@pytest.fixture(scope="module")
def run(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    lb.compare(
        bert,
        ["the ferry is in a clock"],
        bounds="yudin,castin",
        max_length=8,
        out=path,
        progress=False,
    )
    return path


@pytest.mark.slow
def test_stored_runs_are_shown_without_torch_or_models(run: Path, tmp_path: Path) -> None:
    models = {"transformers", "datasets"}
    assert not after(
        "table", run, "--json", "then", "info", run, "--json", "then", "table", run
    ) & (models | {"torch", "matplotlib", "plotly"})
    # BibTeX stands in the papers' files
    assert not after("cite", run) & (models | {"matplotlib", "plotly"})
    assert not after("heatmap", run, "-o", tmp_path / "run.pdf") & (models | {"torch", "plotly"})
    assert (tmp_path / "run.pdf").stat().st_size > 1000


@pytest.mark.slow
def test_stored_runs_are_read_without_torch(run: Path) -> None:
    """Neither do provenance and checksums need it."""
    code = (
        "from pathlib import Path\nfrom lipbound.runs.store import load\nfrom "
        "lipbound.runs.checksums import altered\n"
        "assert altered(load(sys.argv[1])) == []"
    )
    assert not loaded(code, run) & {"torch", "transformers", "datasets", "matplotlib"}


@pytest.mark.slow
def test_bounds_are_listed_without_models() -> None:
    assert not after("bounds") & {
        "transformers",
        "datasets",
        "matplotlib",
        "xarray",
        "pandas",
        "zarr",
        "plotly",
    }
