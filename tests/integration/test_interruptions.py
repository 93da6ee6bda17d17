"""Ctrl-C, SIGTERM or SIGKILL at any moment, a full disk, two processes on one run: one line each,
nothing lost, and the same run in the end."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch
from support.models import AFFINE, build
from support.runs import OPTIONS, TEXTS, identical

import lipbound as lb
from lipbound.cli.commands import TRIMMING
from lipbound.runs import store
from lipbound.runs.config import RunConfig
from lipbound.runs.store import PartialRun, partial_path

WORDS = "--max-length 12 --memory 1kB --samples 4 --bounds yudin,lipbound --quiet".split()


CONTEXT = multiprocessing.get_context("forkserver")
LOADED = ["lipbound.__main__", "lipbound.cli.commands", "lipbound.runs.compare"]
LOADED += ["lipbound.models.inputs", "transformers.models.bert.modeling_bert"]
CONTEXT.set_forkserver_preload(LOADED)


class Command:
    """A running ``lipbound`` of some words, in a process that starts in a blink: forked from one
    that has imported everything. ``before`` is called there first; output and errors are files."""

    def __init__(self, folder, *words, before=None):
        number = len(list(folder.glob("out-*")))
        self._out, self._err = folder / f"out-{number}", folder / f"err-{number}"
        self._out.touch()
        arguments = list(map(str, words)), self._out, self._err, before
        self.process: BaseProcess = CONTEXT.Process(target=_run, args=arguments)
        self.process.start()

    def has_printed(self, lines):
        """Wait until standard output has so many lines, or the end."""
        while len(self.printed()) < lines and self.process.is_alive():
            time.sleep(0.005)

    def printed(self):
        """Whole lines of standard output."""
        return self._out.read_text().split("\n")[:-1]

    def send(self, sign):
        os.kill(self.process.pid, sign)

    def ended(self):
        """Status and standard error."""
        self.process.join(60)
        return self.process.exitcode, self._err.read_text()


def _run(words, out, err, before):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = (path.open("a", buffering=1) for path in (out, err))
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    if before is not None:
        before()
    sys.argv = ["lipbound", *words]
    from lipbound.__main__ import main

    main()


def slowed(delay):
    """Say which samples of which layer are stored, and wait after it."""
    put = PartialRun.write

    def write(self, measured):
        put(self, measured)
        print(measured.start, measured.layer, flush=True)
        time.sleep(delay)

    PartialRun.write = write


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.csv"
    path.write_text("text\n" + "\n".join(TEXTS) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(bert, data):
    options = {"max_length": 12, "memory": 1, "samples": 4, "bounds": "yudin,lipbound"}
    return lb.compare(bert, data, progress=False, **options)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run.zarr"


@pytest.fixture
def words(bert, data, out):
    """A command whose run is `out`."""
    return ["compare", bert, "--data", data, *WORDS, "--out", out]


@pytest.fixture
def start(words, tmp_path_factory):
    """Starts the command, with words more."""
    return partial(Command, tmp_path_factory.mktemp("said"), *words)


@pytest.fixture
def goes_on(start, out, expected):
    """Checks that the command ends well and leaves the run as if nothing had happened."""

    def check(*more):
        assert start(*more).ended() == (0, "")
        assert identical(store.load(out), expected)
        assert [path.name for path in out.parent.iterdir()] == ["run.zarr"]

    return check


def python(*words):
    """A process that imports everything itself."""
    command, pipe = [sys.executable, *map(str, words)], subprocess.PIPE
    # as a terminal's: a shell's background jobs, such as these tests may run in, ignore it
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=hears)


def interrupt(process, sign=signal.SIGINT):
    """Status, standard error, and how long it took to end."""
    began = time.monotonic()
    process.send_signal(sign)
    _, err = process.communicate(timeout=60)
    return process.returncode, err, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.5, 1.5, 2.5])
def test_interrupted_while_it_starts(moment, words, out, expected, goes_on):
    """Within a second or so even on a busy machine; the same command goes on."""
    process = python("-m", "lipbound", *words)
    time.sleep(moment)
    status, err, took = interrupt(process)
    if out.exists():  # it was done: told so, ended, or taken down as Python ends by itself
        assert status in (0, 130, -signal.SIGINT)
        assert ("the run is finished and saved" in err) is (status == 130), err
        assert identical(store.load(out), expected)
        return
    # Python ends by the signal itself where it came within code compiled from a string
    assert status in (130, -signal.SIGINT), err
    assert err.startswith("interrupted: ")
    assert err.count("\n") == 1, err
    assert took < 2
    goes_on(*["--resume"] * partial_path(out).exists())


def broken():
    """Lose an interruption while it starts, and fail for that, as importing NumPy may."""

    def fails(self):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        raise RecursionError

    RunConfig.__post_init__ = fails


def test_an_interruption_that_a_package_takes_for_a_failure(start):
    assert start(before=broken).ended() == (130, "interrupted: nothing was measured yet\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "sign"), [(1, signal.SIGINT), (3, signal.SIGINT), (1, signal.SIGTERM)]
)
def test_interrupted_while_it_measures(stored, sign, start, out, goes_on):
    """The line says what is kept and how to go on."""
    command = start(before=partial(slowed, 5 if stored == 1 else 0.05))
    command.has_printed(stored)
    began = time.monotonic()
    command.send(sign)
    status, err = command.ended()
    assert (status, time.monotonic() - began < 2) == (130, True)
    assert err.startswith("interrupted: ")
    assert f" kept in {partial_path(out)}; the same command with --resume goes on" in err
    goes_on("--resume")


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_with_one_line(sign):
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
        assert process.stdout.readline() == "ready\n"
        status, err, _ = interrupt(process, sign)
    assert (status, err) == (130, "interrupted: what there is\n")


@pytest.mark.slow
def test_a_second_process_is_told_of_the_first(start, out, goes_on):
    """With --resume or without; once the first was killed, another takes over."""
    first = start(before=partial(slowed, 60))
    first.has_printed(1)
    for resume in ([], ["--resume"]):
        status, err = start(*resume).ended()
        assert (status, err.count("\n")) == (2, 1)
        assert f"error: another process is filling {out} at this moment; wait" in err
    first.send(signal.SIGKILL)  # which lets go of the run
    assert first.ended() == (-signal.SIGKILL, "")
    goes_on("--resume")


# -- SIGKILL ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_runs_end_like_uninterrupted_ones(start, out, goes_on):
    """At random moments; no process measures what another has stored."""
    dice, stored = random.Random(0), set[str]()
    for _ in range(3):
        command = start("--resume", before=partial(slowed, 0.2))
        command.has_printed(dice.randint(1, 2))
        time.sleep(dice.uniform(0, 0.3))
        command.send(signal.SIGKILL)
        assert command.ended() == (-signal.SIGKILL, "")
        assert not stored & set(command.printed())
        files = partial_path(out).glob("[!.]*.npz")
        stored = {" ".join(map(str, map(int, file.stem.split("-")))) for file in files}
    assert stored
    goes_on("--resume")


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_a_run_that_opens(tmp_path):
    """SIGKILL at random moments; the next training takes up what can be seen."""
    out, dice = tmp_path / "run.zarr", random.Random(0)
    reached = 0
    for _ in range(3):
        process = CONTEXT.Process(target=_trained, args=(out, reached))
        process.start()
        wanted = reached + dice.randint(2, 5)
        while process.is_alive() and (not out.exists() or _steps(out)[-1] < wanted):
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.2))
        process.kill()
        process.join()
        steps = _steps(out)
        assert steps == list(range(len(steps)))
        assert steps[-1] >= wanted
        reached = steps[-1] + 1


def _steps(out):
    return store.load(out, damaged="refuse")["step"].values.tolist()


def _trained(out, start):
    model = build(AFFINE["gpt2"])
    monitor = lb.Monitor(model, torch.arange(8)[None], every=1, out=out, resume=True)
    for step in range(start, start + 1000):
        monitor.step(step)
        with torch.no_grad():
            model.wte.weight.mul_(1.01)


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(bert, tmp_path):
    """Processes; one of two is killed while it has work."""
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("dask.distributed")
    options = OPTIONS | {"dtype": "float64", "tol": 1e-9, "samples": 8}
    whole = lb.compare(bert, TEXTS * 2, **options)
    # with what is imported there; what dask asks of it later comes too late
    forkserver.ensure_running()
    method = {"distributed.worker.multiprocessing-method": "forkserver", TRIMMING: None}
    with (
        dask.config.set(method),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as workers,
        distributed.Client(workers) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        killed, write = [], PartialRun.write

        def kill(self, measured):
            if not killed:
                killed.append(next(iter(workers.workers.values())).process.pid)
                os.kill(killed[0], signal.SIGKILL)
            write(self, measured)

        patch.setattr(PartialRun, "write", kill)
        ds = lb.compare(bert, TEXTS * 2, client=client, out=tmp_path / "run.zarr", **options)
    assert killed
    np.testing.assert_allclose(ds["exact"], whole["exact"], rtol=1e-9)
    np.testing.assert_allclose(ds["yudin"], whole["yudin"], rtol=1e-12)
