"""Run the notebooks and keep their outputs: ``make notebooks``."""

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook, and leave out timings and identifiers that would differ every time."""
    notebook = nbformat.read(path, as_version=4)
    # warnings come with paths of this machine
    os.environ["PYTHONWARNINGS"] = "ignore"
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(HERE)}}, record_timing=False
    ).execute()
    return notebook


def main() -> None:
    """Those named on the command line, or all."""
    for path in map(Path, sys.argv[1:] or sorted(map(str, HERE.glob("*.ipynb")))):
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
