"""The command line in processes that start in a blink: forked from one that has imported everything
and done nothing else."""

import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = "forkserver" in multiprocessing.get_all_start_methods()  # Windows starts every process anew
CONTEXT = multiprocessing.get_context("forkserver" if FORKS else "spawn")
if FORKS:
    CONTEXT.set_forkserver_preload(
        [
            "lipbound.__main__",
            "lipbound.cli.measuring",
            "lipbound.runs.compare",
            "lipbound.models.inputs",
            "transformers.models.bert.modeling_bert",
        ]
    )


class Command:
    """A running ``lipbound`` of some words. ``before`` is called in its process first; standard
    output and error are files.

    Attributes:
        process: of the operating system.
    """

    def __init__(self, folder: Path, *words: object, before: Callable[[], None] | None = None):
        number = len(list(folder.glob("out-*")))
        self._out, self._err = folder / f"out-{number}", folder / f"err-{number}"
        self._out.touch()
        self._seen = 0
        run = functools.partial(_run, list(map(str, words)), str(self._out), str(self._err), before)
        self.process: BaseProcess = CONTEXT.Process(target=run)
        self.process.start()

    def has_printed(self, lines: int) -> None:
        """Wait until standard output has so many lines, or the end."""
        while self._out.read_text().count("\n") < lines and self.process.is_alive():
            time.sleep(0.005)

    def send(self, sign: signal.Signals) -> None:
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, sign)

    def ended(self, within: float = 60) -> tuple[int, str]:
        """Status and standard error."""
        self.process.join(within)
        assert self.process.exitcode is not None
        return self.process.exitcode, self._err.read_text()


def _run(words: list[str], out: str, err: str, before: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, target in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    if before is not None:
        before()
    sys.argv = ["lipbound", *words]
    from lipbound.__main__ import main

    main()
