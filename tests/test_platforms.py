"""Other systems than this one: what macOS and Windows lack, their paths, and processes that are
spawned rather than forked."""

import ast
import multiprocessing
import os
import signal
import sys
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

import lipbound as lb
from lipbound import devices
from lipbound.cli import application
from lipbound.errors import CheckpointError, InputsError

SOURCES = sorted((Path(lb.__file__).parent).rglob("*.py"))
LACKING = {
    "os": {
        "chown",
        "chroot",
        "confstr",
        "fchmod",
        "fchown",
        "fork",
        "forkpty",
        "getegid",
        "geteuid",
        "getgid",
        "getgroups",
        "getloadavg",
        "getpgid",
        "getpgrp",
        "getsid",
        "getuid",
        "killpg",
        "lchown",
        "mkfifo",
        "mknod",
        "nice",
        "openpty",
        "pathconf",
        "posix_fadvise",
        "posix_fallocate",
        "posix_spawn",
        "pread",
        "pwrite",
        "readv",
        "register_at_fork",
        "sched_getaffinity",
        "sched_setaffinity",
        "sched_yield",
        "sendfile",
        "set_blocking",
        "get_blocking",
        "setpgid",
        "setpgrp",
        "setsid",
        "statvfs",
        "fstatvfs",
        "sync",
        "sysconf",
        "uname",
        "wait3",
        "wait4",
        "waitid",
        "writev",
        "O_CLOEXEC",
        "O_DIRECTORY",
        "O_DIRECT",
        "O_NOFOLLOW",
        "O_NONBLOCK",
        "O_SYNC",
        "O_TMPFILE",
    },
    "signal": {
        "SIGALRM",
        "SIGCHLD",
        "SIGHUP",
        "SIGKILL",
        "SIGPIPE",
        "SIGSTOP",
        "SIGUSR1",
        "SIGUSR2",
        "SIGXFSZ",
        "alarm",
        "pause",
        "pthread_kill",
        "setitimer",
    },
}
"""What Windows or macOS has not, of modules that every system has."""
MODULES = {
    "crypt",
    "fcntl",
    "grp",
    "nis",
    "posix",
    "pty",
    "pwd",
    "resource",
    "syslog",
    "termios",
    "tty",
}
"""What Windows has not at all."""


def asked_of_some_systems(source: str) -> set[str]:
    """What code uses that some systems lack; what it looks for by `hasattr` first does
    not count."""
    tree = ast.parse(source)
    asked = {
        (node.args[0].id, node.args[1].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hasattr"
        and isinstance(node.args[0], ast.Name)
        and isinstance(node.args[1], ast.Constant)
    }
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr in LACKING.get(node.value.id, ())
        ):
            found |= (
                {f"{node.value.id}.{node.attr}"}
                if (node.value.id, node.attr) not in asked
                else set()
            )
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name in MODULES}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {node.module}
                if node.module in MODULES
                else {one.name for one in node.names if one.name in LACKING.get(node.module, ())}
            )
    return found


def test_what_some_systems_lack_is_not_asked_of_them() -> None:
    assert asked_of_some_systems("import os\nos.sysconf('SC_PAGE_SIZE')\nimport fcntl") == {
        "os.sysconf",
        "fcntl",
    }
    assert asked_of_some_systems("import os\nif hasattr(os, 'fork'):\n    os.fork()") == set()
    assert {
        path.name: found
        for path in SOURCES
        if (found := asked_of_some_systems(path.read_text(encoding="utf-8")))
    } == {}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module of lipbound sees an `os` and a `signal` without what Windows and macOS lack."""

    stubs = {}
    for module in (os, signal):
        kept = {
            name: value
            for name, value in vars(module).items()
            if name not in LACKING[module.__name__]
        }
        stubs[module.__name__] = types.ModuleType(module.__name__)
        vars(stubs[module.__name__]).update(kept)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "lipbound":
            for known, stub in stubs.items():
                if vars(module).get(known) in (os, signal):
                    monkeypatch.setattr(module, known, stub)


@pytest.mark.usefixtures("elsewhere")
def test_a_run_is_measured_and_stored_there(tmp_path: Path) -> None:
    ds = lb.compare(
        "builtin:gpt2",
        samples=2,
        max_length=6,
        layers=[0],
        bounds=["yudin"],
        out=tmp_path / "run.zarr",
        progress=False,
    )
    assert lb.load(tmp_path / "run.zarr")["exact"].equals(ds["exact"])
    with pytest.raises(AttributeError):
        application.os.fork()


@pytest.mark.usefixtures("elsewhere")
def test_memory_is_known_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LIMITS", ())
    assert devices.available(torch.device("cpu")) == pytest.approx(
        psutil.virtual_memory().available, rel=0.5
    )


def measured() -> float:
    """A number, from a process of its own."""
    return float(
        lb.compare(
            "builtin:gpt2", samples=1, max_length=6, layers=[0], bounds=["yudin"], progress=False
        )["yudin"].max()
    )


def test_spawned_processes_measure_the_same() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(measured).result() == pytest.approx(measured(), rel=1e-12)


PATHS = (
    r"C:\models\bert",
    "C:/models/bert",
    r"D:\run.zarr",
    r"models\bert",
    r"\\server\share\bert",
    r"C:\data\my texts\pages",
)


@pytest.mark.parametrize("name", PATHS)
def test_paths_of_windows_are_no_hub_ids(name: str) -> None:
    with pytest.raises(CheckpointError, match="there is no directory "):
        lb.load_checkpoint(name)


@pytest.mark.parametrize("name", PATHS)
def test_paths_of_windows_are_no_datasets_and_no_texts(name: str) -> None:
    with pytest.raises(InputsError, match="there is no file or folder ") as error:
        lb.prepare(lb.load_checkpoint("builtin:gpt2"), name)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "text", ["a backslash \\ is no path", "so: is this", r"the sum of \alpha and \beta"]
)
def test_texts_are_texts(text: str) -> None:
    assert (
        lb.prepare(lb.load_checkpoint("builtin:gpt2"), text, max_length=64).description
        == f"the text {text!r}"
    )
