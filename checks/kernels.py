"""The tests of numbers under other kernels of matrix products than this processor's own, on one and
on two threads: ``make test-kernels``.

Another processor rounds in another order. A test that holds under every kernel has an oracle that
knows its own rounding; one that fails under some of them would fail on someone else's machine.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
KERNELS = {
    "native": {},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "cbwr": {"MKL_CBWR": "COMPATIBLE"},
    "mkl-sse": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "mkl-avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "onednn": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "openblas": {"OPENBLAS_CORETYPE": "Nehalem"},
    "openblas-avx2": {"OPENBLAS_CORETYPE": "Haswell"},
}
"""Variables by name: torch's own loops, MKL's, oneDNN's, and those of OpenBLAS, which numpy and
scipy call."""
LACKS = {
    name: f"this processor has no {instructions}"
    for instructions, has, names in (
        ("AVX2", torch.cpu._is_avx2_supported(), ("avx2", "mkl-avx2", "openblas-avx2")),
        ("AVX-512", torch.cpu._is_avx512_supported(), ("avx512",)),
    )
    if not has
    for name in names
}
"""Why a kernel cannot run here."""
TESTS = (
    "attention",
    "linalg",
    "jacobians",
    "bounds",
    "regularizers",
    "models/test_capture.py",
    "test_devices.py",
    "integration/test_far_device.py",
)
"""Of tests/: those that compare numbers."""


def run(kernel: str, threads: int, tests: list[str]) -> tuple[bool, str]:
    """Run the tests that are not slow under a kernel: whether they pass, and what pytest says (its
    last line, or everything where one fails)."""
    own = {name for variables in KERNELS.values() for name in variables}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= KERNELS[kernel] | {"LIPBOUND_TESTS_THREADS": str(threads)}
    environment.setdefault("LIPBOUND_TESTS_SHARE", "0.1")
    workers = max(1, (os.cpu_count() or 1) // threads)  # threads that wait for a core spin
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(workers),
        "-m",
        "not slow",
        "--color=no",
        *tests,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stdout.strip()
    return done.returncode == 0, said.splitlines()[
        -1
    ] if said and done.returncode == 0 else f"FAILED\n{said}\n{done.stderr}".rstrip()


def main() -> int:
    """One line for every kernel and number of threads; the number of those that fail."""
    parser = argparse.ArgumentParser(
        description="The tests of numbers under other kernels.",
        epilog=f"kernels: {', '.join(KERNELS)}",
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="which; all by default")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="1 and 2 by default"
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=[f"tests/{name}" for name in TESTS],
        metavar="PATH",
        help="all tests of numbers by default",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.kernels if name not in KERNELS]:
        parser.error(f"there is no kernel {unknown[0]!r}; take some of {', '.join(KERNELS)}")
    failed = 0
    for kernel in args.kernels or KERNELS:
        variables = (
            " ".join(f"{name}={value}" for name, value in KERNELS[kernel].items()) or "nothing set"
        )
        if kernel in LACKS:
            print(f"{kernel} ({variables}): left out, {LACKS[kernel]}", flush=True)
            continue
        for threads in args.threads:
            begun = time.perf_counter()
            passed, said = run(kernel, threads, args.tests)
            failed += not passed
            print(
                f"{kernel} ({variables}), {threads} thread{'s' * (threads > 1)}: {said} "
                f"[{time.perf_counter() - begun:.0f} s]",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
