"""Signs of life on standard error: a bar on a terminal, else a line every few seconds."""

import sys
import threading
from datetime import timedelta
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

PAUSE = 5.0
"""Seconds between two lines."""


class Signs:
    """What is being done in a ``with`` block; of several that are open the last one speaks.

    Where there is no bar (in a pipe, a log or a notebook, and before there is one on a terminal) it
    is a line every `PAUSE` seconds, without widgets.

    Args:
        text: what is being done.
        show: False says nothing.
    """

    _open: ClassVar[list["Signs"]] = []

    def __init__(self, text: str, *, show: bool = True):
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True, force_jupyter=False)
        # kernels of notebooks ask for colours as terminals do
        off = not show or console.is_dumb_terminal or not console.file.isatty()
        console.quiet = off  # rich before 14 ends a line where nothing was shown
        self._bar = Progress(*columns, console=console, transient=True, disable=off)
        self._task, self._show = self._bar.add_task(text, total=None), show
        self._ended, self.quit = threading.Event(), self._bar.stop

    def say(self, text: str, total: int | None = None) -> None:
        """Say what is done from now on, and in how many steps; on a terminal by a bar."""
        self._bar.reset(self._task, description=text, total=total)
        self._bar.start()

    def advance(self, steps: int) -> None:
        """Count steps that are done."""
        self._bar.advance(self._task, steps)

    def _lines(self) -> None:
        """Speak for the last one that is open, at one pace."""
        while not self._ended.wait(PAUSE):
            for one in self._open[-1:]:
                if one._show and not one._bar.live.is_started:
                    print(one._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        (task,) = self._bar.tasks
        said = f" {task.completed:g} of {task.total:g}" if task.total else ""
        for text, seconds in ((", {}", task.elapsed), (", about {} left", task.time_remaining)):
            said += text.format(timedelta(seconds=round(seconds))) if seconds else ""
        return task.description + said

    def __enter__(self) -> Self:
        self._open.append(self)
        if self._open == [self]:
            threading.Thread(target=self._lines, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._open.remove(self)
        self.quit()
