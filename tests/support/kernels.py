"""Jupyter kernels that start in a blink: forked from the process of `support.processes`, which has
imported everything and run nothing."""

import os
import signal
import time
import warnings
from multiprocessing.process import BaseProcess

from support.processes import CONTEXT


class Kernel:
    """As much of `subprocess.Popen` as Jupyter asks of a kernel's process."""

    stdin = stdout = stderr = None

    def __init__(
        self,
        command: list[str],
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **_: object,
    ):
        # what the specification of the kernel puts before is Python and the module
        options = command[command.index("-f") :]
        self._process: BaseProcess = CONTEXT.Process(
            target=_run, args=(options, cwd, dict(env or os.environ))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        while (
            self._process.is_alive() and os.getpgid(self.pid) != self.pid
        ):  # Jupyter sends signals to the kernel's group: not to ours
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, sign: int) -> None:
        os.kill(self.pid, sign)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(options: list[str], cwd: str | None, env: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if env.get("PYTHONWARNINGS") == "ignore":  # an interpreter reads it when it starts
        warnings.simplefilter("ignore")
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(argv=options)
