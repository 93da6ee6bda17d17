"""The command line as a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_installed_command_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "lipbound.cli", "compare", "builtin:nope"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown builtin checkpoint 'nope'")
