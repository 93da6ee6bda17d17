"""CPU time that lipbound takes to start, as ratios to ``import torch`` in the same run. Writes
startup.json.

User and system time of a fresh process, the median of five; the processes take turns, so that a
busy machine slows all alike. Every command runs once before, for byte code and file caches.
"""

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 5
BUDGET = {
    "import lipbound": 0.3,
    "lipbound --version": 0.3,
    "lipbound --help": 0.3,
    "lipbound compare --help": 0.3,
    "lipbound table RUN": 1.5,
}
"""Largest ratios that are accepted."""
MAIN = "from lipbound.cli import main; main()"


def cpu_seconds(*arguments: str) -> float:
    """User and system time of this Python with some arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def cases(folder: Path) -> dict[str, list[str]]:
    """What is measured: name -> arguments of Python."""
    run, figure = str(folder / "run.zarr"), str(folder / "run.pdf")
    commands = {
        "lipbound --version": ["--version"],
        "lipbound --help": ["--help"],
        "lipbound compare --help": ["compare", "--help"],
        "lipbound table RUN": ["table", run],
        "lipbound cite RUN": ["cite", run],
        "lipbound heatmap RUN": ["heatmap", run, "-o", figure],
        "lipbound bounds": ["bounds"],
    }
    imports = {"import torch": ["-c", "import torch"], "import lipbound": ["-c", "import lipbound"]}
    return imports | {name: ["-c", MAIN, *arguments] for name, arguments in commands.items()}


def main() -> None:
    """Measure, print, write; status 1 where a budget is exceeded."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare = ["compare", "builtin:gpt2", "--samples", "2", "--max-length", "32", "--quiet"]
        compare += ["--out", str(folder / "run.zarr")]
        subprocess.run([sys.executable, "-c", MAIN, *compare], check=True, capture_output=True)
        measured = cases(folder)
        for arguments in measured.values():
            cpu_seconds(*arguments)
        rounds = [
            {case: cpu_seconds(*arguments) for case, arguments in measured.items()}
            for _ in range(ROUNDS)
        ]
    seconds = {case: statistics.median(one[case] for one in rounds) for case in measured}
    report = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("lipbound", "torch", "typer", "numpy", "xarray", "zarr", "matplotlib")
        },
        "rounds": ROUNDS,
        "cpu_seconds": seconds,
        "of_import_torch": {
            case: value / seconds["import torch"] for case, value in seconds.items()
        },
        "budget": BUDGET,
    }
    print(json.dumps(report["of_import_torch"], indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    over = {
        case: report["of_import_torch"][case]
        for case, most in BUDGET.items()
        if report["of_import_torch"][case] > most
    }
    if over:
        sys.exit(f"over budget: {over}")


if __name__ == "__main__":
    main()
