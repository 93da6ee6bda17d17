"""Whole commands and single layers, this working tree against a commit. ``--store`` writes
commands.json.

``python benchmarks/commands.py --against COMMIT`` checks the commit out into a temporary folder and
lets the two take turns, so that whatever else the machine does slows both alike: README's commands
and the demo, each in a process of its own, alone and beside one and two processes that compute
without end. A first use is one whose files are no longer in memory. A layer measured once is given
anew each time, in float32 to 1e-4, and power iteration by automatic differentiation measures it in
the same process, at the loosest tolerance with which it is that accurate (exact_norms.py).
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__)
SIDES = ("before", "after")
FIRST_USE = "compare builtin:gpt2 --samples 1"
"""The command that is also timed without files in memory."""
COMMANDS = (
    *("--version", "--help", "compare --help", "bounds", FIRST_USE),
    "compare builtin:minilm --out minilm.zarr",
    "table minilm.zarr --format latex",
    "heatmap minilm.zarr -o minilm.pdf",
    "report minilm.zarr -o minilm.html",
    "verify minilm.zarr",
    "cite minilm.zarr",
    "demo --out demo",
)
"""What is run, in this order: some read what others wrote."""
STATES = {"alone": 0, "beside one busy process": 1, "beside two": 2}
BUDGET = {"import lipbound": 0.3, "--version": 0.3, "--help": 0.3, "compare --help": 0.3}
"""Largest processor times that are accepted, as ratios to ``import torch``."""
QUIET = 0.5
"""Average load from which on a machine counts as busy with other things."""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder.

    Yields:
        The folder.
    """
    root = HERE.parents[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "before"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let so many processes compute without end."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def timed(arguments: Sequence[str], root: Path, folder: Path) -> dict[str, float]:
    """Run Python with some arguments on the code in ``root``, in a folder of its own.

    Returns:
        Seconds: "first" until something is printed, "wall" until the end, "processor" of the
        process and of those that it started.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(arguments)} failed:\n{errors.read().decode()}")
    return {"first": first, "wall": wall, "processor": used.ru_utime + used.ru_stime}


def command(words: str, root: Path, folder: Path) -> dict[str, float]:
    """Run a command of lipbound; what it writes is not there yet."""
    arguments = words.split()
    for option, target in itertools.pairwise(arguments):
        if option in ("--out", "-o"):
            path = folder / target
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return timed(["-m", "lipbound", *arguments], root, folder)


def forget(folder: Path) -> None:
    """Take the files of a folder out of memory, but for those that other processes use."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_use(root: Path, folder: Path) -> dict[str, float]:
    """Run a command with all its files on disk alone."""
    forget(root / "lipbound")
    forget(Path(importlib.metadata.distribution("torch").locate_file("")))  # all packages
    return command(FIRST_USE, root, folder)


def in_turn(
    measure: Callable[[Path, Path], dict[str, float]], roots: dict[str, Path], rounds: int
) -> dict[str, Any]:
    """Measure both sides so many times in turn; who begins alternates.

    Returns:
        The least and the median of what is measured of either side, and the ratios of the leasts.
    """
    found: dict[str, list[dict[str, float]]] = {side: [] for side in roots}
    for i in range(rounds):
        for side in list(roots)[:: 1 if i % 2 else -1]:
            found[side].append(measure(roots[side], roots[side] / "measured"))
    row: dict[str, Any] = {
        side: {
            name: {"least": min(values), "median": statistics.median(values)}
            for name in each[0]
            for values in [[one[name] for one in each]]
        }
        for side, each in found.items()
    }
    before, after = (row[side] for side in SIDES)
    row["ratio"] = {name: after[name]["least"] / before[name]["least"] for name in after}
    return row


def imports(roots: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Measure what loading modules takes."""
    return {
        words: in_turn(lambda root, folder, w=words: timed(["-c", w], root, folder), roots, rounds)
        for words in ("import torch", "import lipbound")
    }


def layers_once() -> dict[str, float]:
    """Measure layers once each, and by power iteration: seconds, and the largest errors."""
    from exact_norms import minilm, random_layer

    real, found = minilm(), {}
    for name, layer, tol in (
        ("ViT-B/16 shape, N = 197", random_layer(197, 64, 12), 1e-5),
        ("MiniLM, layer 1, N = 128", real[1], 1e-6),
        ("MiniLM, layer 4, N = 128", real[4], 1e-6),
    ):
        found |= {f"{name}: {what}": value for what, value in layer_once(layer, tol).items()}
    return found


def layer_once(layer: Any, tol: float) -> dict[str, float]:
    """Measure a layer, given anew each time, and power iteration with a tolerance on it."""
    import rivals
    from exact_norms import ACCURACY, seconds

    from lipbound.attention.layer import Attention
    from lipbound.jacobians.spectral_norm import spectral_norm

    biases = {f"b_{one}": getattr(layer, f"b_{one}") for one in "qkv"}

    def anew() -> Attention:
        return Attention(layer.x, layer.w_q, layer.w_k, layer.w_v, **biases)

    def ours() -> None:
        norms["error"] = spectral_norm(anew(), tol=ACCURACY).lower[0]

    def theirs() -> None:
        heads = range(layer.heads)
        found = rivals.values(rivals.patient_power_iteration, anew(), heads, tol)[0]
        norms["error of power iteration"] = found

    norms: dict[str, Any] = {}
    exact = spectral_norm(anew().double(), tol=1e-9).lower[0]
    ours()  # once to warm up
    time.sleep(0.5)  # threads spin for a while
    times = {"seconds": min(seconds(ours) for _ in range(5)), "power iteration": seconds(theirs)}
    return times | {what: float((t / exact - 1).abs().max()) for what, t in norms.items()}


def layers(root: Path, folder: Path) -> dict[str, float]:
    """Run `layers_once` on the code in ``root``."""
    run = subprocess.run(
        [sys.executable, str(HERE), "--layers"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def report_of(options: argparse.Namespace, roots: dict[str, Path]) -> dict[str, Any]:
    """Measure everything that is asked for, printing ratios meanwhile."""
    report: dict[str, Any] = {"states": {}, "rounds": options.rounds}

    def told(name: str, row: dict[str, Any]) -> dict[str, Any]:
        ratios = ", ".join(f"{key} {ratio:.2f}" for key, ratio in row["ratio"].items())
        print(f"{name}: {ratios}", flush=True)
        return row

    for state in options.states:
        with busy(STATES[state]):
            rows = report["states"][state] = {}
            for words in COMMANDS:
                measure = lambda root, folder, w=words: command(w, root, folder)  # noqa: E731
                if any(one in words for one in options.only):
                    rows[words] = told(f"{state}, {words}", in_turn(measure, roots, options.rounds))
    if not options.commands_only:
        report["imports"] = imports(roots, options.rounds)
        if hasattr(os, "posix_fadvise"):
            report["first_use"] = told("first use", in_turn(first_use, roots, options.rounds))
        report["layers"] = told("layers", in_turn(layers, roots, options.rounds))
    return report


def over_budget(report: dict[str, Any]) -> dict[str, float]:
    """What takes more processor time than `BUDGET`, as ratios to ``import torch``."""
    torch = report["imports"]["import torch"]["after"]["processor"]["median"]
    rows = report["imports"] | report["states"].get("alone", {})
    there = {
        name: rows[name]["after"]["processor"]["median"] / torch
        for name in BUDGET.keys() & rows.keys()
    }
    return {name: ratio for name, ratio in there.items() if ratio > BUDGET[name]}


def main() -> None:
    """Measure, print, write; status 1 where a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", default="HEAD", help="a commit; the last one by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--only", nargs="+", default=[""], help="commands with one of these words")
    parser.add_argument("--store", action="store_true", help="write commands.json")
    parser.add_argument("--commands-only", action="store_true", help="neither imports nor layers")
    parser.add_argument("--layers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layers:
        print(json.dumps(layers_once()))
        return
    load = os.getloadavg()[0]
    with ExitStack() as opened:
        here = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "after"
        # both are in temporary folders, and what they write stays there
        shutil.copytree(HERE.parents[1] / "lipbound", here / "lipbound")
        roots = {"before": opened.enter_context(checkout(options.against)), "after": here}
        for root in roots.values():
            (root / "measured").mkdir()
            command("compare builtin:minilm --samples 1 --out minilm.zarr", root, root / "measured")
        report = report_of(options, roots)
    from exact_norms import device

    report |= {
        "device": device(),
        "load": load,
        "provisional": load > QUIET,
        "against": options.against,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "numpy", "xarray", "zarr", "typer")
        },
    }
    if options.store:
        HERE.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    if not options.commands_only and (over := over_budget(report)):
        sys.exit(f"over budget: {over}")


if __name__ == "__main__":
    main()
