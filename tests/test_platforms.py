"""Other systems than this one: what macOS and Windows lack, and their paths."""

import ast
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from support.checks import refused

import lipbound as lb
from lipbound import devices

LACKING = {
    "os": set(
        "chown chroot confstr fchmod fchown fork forkpty getegid geteuid getgid getgroups "
        "getloadavg getpgid getpgrp getsid getuid killpg lchown mkfifo mknod nice openpty pathconf "
        "posix_fadvise posix_fallocate posix_spawn pread pwrite readv register_at_fork "
        "sched_getaffinity sched_setaffinity sched_yield sendfile set_blocking get_blocking "
        "setpgid setpgrp setsid statvfs fstatvfs sync sysconf uname wait3 wait4 waitid writev "
        "O_CLOEXEC O_DIRECTORY O_DIRECT O_NOFOLLOW O_NONBLOCK O_SYNC O_TMPFILE".split()
    ),
    "signal": set(
        "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGSTOP SIGUSR1 SIGUSR2 SIGXFSZ alarm pause "
        "pthread_kill setitimer".split()
    ),
}
"""What Windows or macOS has not, of modules that every system has."""
MODULES = set("crypt fcntl grp nis posix pty pwd resource syslog termios tty".split())
"""What Windows has not at all."""


def asked_of_some_systems(source: str) -> set[str]:
    """What code uses that some systems lack; what it looks for by `hasattr` first does
    not count."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = node.value.id, node.attr
            if name in LACKING.get(module, ()) and f'hasattr({module}, "{name}")' not in source:
                found.add(f"{module}.{name}")
        if isinstance(node, ast.Import):
            found |= MODULES & {one.name for one in node.names}
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= MODULES & {module}
            found |= set(LACKING.get(module, ())) & {one.name for one in node.names}
    return found


def test_what_some_systems_lack_is_not_asked_of_them() -> None:
    asked = asked_of_some_systems("import os\nos.sysconf('SC_PAGE_SIZE')\nimport fcntl")
    assert asked == {"os.sysconf", "fcntl"}
    assert asked_of_some_systems('if hasattr(os, "fork"):\n    os.fork()') == set()
    for path in Path(lb.__file__).parent.rglob("*.py"):
        assert asked_of_some_systems(path.read_text(encoding="utf-8")) == set(), path


def test_memory_is_known_without_the_limits_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LIMITS", ())
    known = psutil.virtual_memory().available
    assert devices.available(torch.device("cpu")) == pytest.approx(known, rel=0.5)


PATHS = (
    r"C:\models\bert",
    "C:/models/bert",
    r"D:\run.zarr",
    r"models\bert",
    r"\\server\share\bert",
    r"C:\data\my texts\pages",
)


def test_paths_of_windows_are_no_hub_ids_no_datasets_and_no_texts() -> None:
    checkpoint = lb.load_checkpoint("builtin:gpt2")
    for name in PATHS:
        none = "there is no directory ", "there is no file or folder "
        refused(partial(lb.load_checkpoint, name), none[0], error=lb.errors.CheckpointError)
        refused(partial(lb.prepare, checkpoint, name), none[1], name, error=lb.errors.InputsError)
    for text in ("a backslash \\ is no path", "so: is this", r"the sum of \alpha and \beta"):
        assert lb.prepare(checkpoint, text, max_length=64).description == f"the text {text!r}"
