"""Ctrl-C or SIGTERM at any moment, a full disk, two processes on one run: one line each, nothing
lost, and the same run in the end."""

import functools
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import xarray as xr
from support.processes import Command
from support.runs import TEXTS, identical

import lipbound as lb
from lipbound.runs import store
from lipbound.runs.partial_store import LayerResult, PartialRun, partial_path

OPTIONS = "--max-length 12 --memory 1kB --samples 4 --bounds yudin,lipbound --quiet".split()


def slowed(delay: float) -> None:
    """Say what is stored, and wait after it."""
    put = PartialRun.write

    def write(self: PartialRun, measured: LayerResult) -> None:
        put(self, measured)
        print("measured", flush=True)
        time.sleep(delay)

    PartialRun.write = write  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.csv"
    path.write_text("text\n" + "\n".join(TEXTS) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(bert: Path, data: Path) -> xr.Dataset:
    options = {"max_length": 12, "memory": 1, "samples": 4, "bounds": "yudin,lipbound"}
    return lb.compare(bert, data, progress=False, **options)


@pytest.fixture
def words(bert: Path, data: Path, tmp_path: Path) -> list[object]:
    """A command whose run is `run.zarr` in the folder of the test."""
    return ["compare", bert, "--data", data, *OPTIONS, "--out", tmp_path / "run.zarr"]


def hears() -> None:
    """Take SIGINT as a terminal's command does: a shell's background jobs, such as these tests may
    run in, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes leave what they print."""
    return tmp_path_factory.mktemp("said")


def python(*words: object) -> subprocess.Popen:
    """A process that imports everything itself."""
    command = [sys.executable, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=hears)


def interrupt(
    process: subprocess.Popen, sign: signal.Signals = signal.SIGINT
) -> tuple[int, str, float]:
    """Status, standard error, and how long it took to end."""
    began = time.monotonic()
    process.send_signal(sign)
    _, err = process.communicate(timeout=60)
    return process.returncode, err, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.5, 1.5, 2.5])
def test_interrupted_while_it_starts(
    moment: float, words: list[object], expected: xr.Dataset, said: Path, tmp_path: Path
) -> None:
    """Within a second or so even on a busy machine; the same command goes on."""
    out = tmp_path / "run.zarr"
    process = python("-m", "lipbound", *words)
    time.sleep(moment)
    status, err, took = interrupt(process)
    if out.exists():  # it was done: told so, ended, or taken down as Python ends by itself
        assert status in (0, 130, -signal.SIGINT)
        assert ("the run is finished and saved" in err) is (status == 130), err
        assert identical(store.load(out), expected)
        return
    # Python ends by the signal itself where it came within code that is compiled from a string
    assert status in (130, -signal.SIGINT), err
    assert err.count("\n") == 1, err
    assert err.startswith("interrupted: ")
    assert "Traceback" not in err
    assert took < 2
    resume = ["--resume"] if partial_path(out).exists() else []
    assert Command(said, *words, *resume).ended() == (0, "")
    assert identical(store.load(out), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "sign"), [(1, signal.SIGINT), (3, signal.SIGINT), (1, signal.SIGTERM)]
)
def test_interrupted_while_it_measures(
    stored: int,
    sign: signal.Signals,
    words: list[object],
    expected: xr.Dataset,
    said: Path,
    tmp_path: Path,
) -> None:
    """The line says what is kept and how to go on."""
    out = tmp_path / "run.zarr"
    command = Command(said, *words, before=functools.partial(slowed, 5 if stored == 1 else 0.05))
    command.has_printed(stored)
    began = time.monotonic()
    command.send(sign)
    status, err = command.ended()
    assert (status, time.monotonic() - began < 2) == (130, True)
    assert err.startswith("interrupted: ")
    assert f" kept in {partial_path(out)}; the same command with --resume goes on" in err
    assert Command(said, *words, "--resume").ended() == (0, "")
    assert identical(store.load(out), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["run.zarr"]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_with_one_line(sign: signal.Signals) -> None:
    """SIGTERM as well where SIGINT is ignored, as shells have it for commands behind an "&"."""
    script = """
        import signal, sys, time
        if sys.argv[1] == "alone":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        from lipbound.__main__ import main
        from lipbound.cli import app, state

        @app.command()
        def wait(sign: str) -> None:
            state["kept"] = lambda: "what there is"
            print("ready", flush=True)
            time.sleep(60)

        sys.argv[:] = ["lipbound", "wait", "now"]
        main()
    """
    how = "alone" if sign == signal.SIGTERM else "both"
    with python("-c", textwrap.dedent(script), how) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        status, err, _ = interrupt(process, sign)
    assert (status, err) == (130, "interrupted: what there is\n")


@pytest.mark.slow
def test_a_second_process_is_told_of_the_first(
    words: list[object], expected: xr.Dataset, said: Path, tmp_path: Path
) -> None:
    """With --resume or without; once the first was killed, another takes over."""
    out = tmp_path / "run.zarr"
    first = Command(said, *words, before=functools.partial(slowed, 60))
    first.has_printed(1)
    for resume in ([], ["--resume"]):
        status, err = Command(said, *words, *resume).ended()
        assert (status, err.count("\n")) == (2, 1)
        assert f"error: another process is filling {out} at this moment; wait" in err
    first.send(signal.SIGKILL)  # which lets go of the run
    assert first.ended() == (-signal.SIGKILL, "")
    assert Command(said, *words, "--resume").ended() == (0, "")
    assert identical(store.load(out), expected)


def small_files() -> None:
    """Of 700 bytes at most, for this process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))


@pytest.mark.slow
def test_a_full_disk_costs_nothing_that_was_measured(
    words: list[object], expected: xr.Dataset, said: Path, tmp_path: Path
) -> None:
    """As large files cannot be written: the next command with --resume goes on."""
    out = tmp_path / "run.zarr"
    status, err = Command(said, *words, before=small_files).ended()
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert (status, len(lines)) == (2, 1), err
    assert "could not be written" in lines[0] or "cannot be" in lines[0]
    assert not out.exists()
    assert Command(said, *words, "--resume").ended() == (0, "")
    assert identical(store.load(out), expected)
