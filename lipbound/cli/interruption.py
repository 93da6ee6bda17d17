"""End after Ctrl-C within a second, whatever the process is doing, with a line on what is kept.

SIGTERM, by which schedulers of clusters end a job, is taken for Ctrl-C.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

PATIENCE = 0.7
"""Seconds that a command has to end by itself; products of large matrices do not look up."""

_kept: list[Callable[[], str]] = []
_said: list[str] = []


def forget() -> None:
    """Begin anew: nothing is kept yet, and nothing said."""
    _kept.clear()
    _said.clear()


def keeps(said: Callable[[], str]) -> None:
    """Tell an interruption with this sentence from now on."""
    _kept[:] = [said]


def sentence() -> str:
    """Sentence about an interruption, once; empty the second time."""
    if _said:
        return ""
    _said.append("")
    try:
        return f"interrupted: {_kept[0]()}" if _kept else "interrupted: nothing was written"
    except Exception:  # whatever state the files are in, this is the last line
        return "interrupted"


def watch() -> None:
    """Let the process end soon after a signal even where Python does not get its turn.

    For the main thread of a process of its own.
    """
    main = threading.current_thread() is threading.main_thread()
    usual = (signal.default_int_handler, signal.SIG_IGN)  # shells ignore SIGINT behind an "&"
    if not main or signal.getsignal(signal.SIGINT) not in usual:
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = _told_otherwise
    reader, writer = os.pipe()
    if hasattr(os, "set_blocking"):  # absent on Windows before Python 3.12; a pipe may block there
        os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader,), daemon=True).start()


def _told_otherwise(found: "sys.UnraisableHookArgs") -> None:
    """Leave out interruptions in callbacks and finalisers: the other thread ends the process."""
    if not issubclass(found.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(found)


def _wait(reader: int) -> None:
    """Wait for SIGINT or SIGTERM, and end the process after `PATIENCE`."""
    while (number := os.read(reader, 1)) not in (bytes([signal.SIGINT]), bytes([signal.SIGTERM])):
        if not number:
            return
    time.sleep(PATIENCE)
    end()


def end() -> None:
    """Say what is kept, and end at once: runs are stored so that this loses nothing."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # the cursor, which a progress bar hides
    if said := sentence():
        os.write(2, f"{said}\n".encode())
    os._exit(130)
