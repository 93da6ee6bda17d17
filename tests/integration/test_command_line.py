"""The command line as a process of its own."""

import importlib.metadata
import subprocess
import sys

import lipbound as lb


def test_the_package_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lipbound", "compare", "builtin:nope"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown builtin checkpoint 'nope'")


def test_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lipbound", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lipbound {lb.__version__}\n", "")
    assert lb.__version__ == importlib.metadata.version("lipbound")
