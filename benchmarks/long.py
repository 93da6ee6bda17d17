"""Time and peak memory of the exact norm of one head of width 64 at N = 1024 ... 16384, each in a
process of its own. Writes long.json.

``python benchmarks/long.py certified 16384`` takes one thread for the certified norm of the same
head, and renews this row alone.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from lipbound.attention.layer import Attention
from lipbound.jacobians.spectral_norm import spectral_norm

LENGTHS = (1024, 2048, 4096, 8192, 16384)


def layer(n: int) -> Attention:
    """One head of width 64."""
    g = torch.Generator().manual_seed(0)
    return Attention(
        torch.randn(1, n, 256, generator=g),
        *(torch.randn(1, 256, 64, generator=g) * 0.06 for _ in range(3)),
    )


def one(n: int) -> dict[str, float]:
    """Seconds, steps, and peak resident memory in GB of this process."""
    torch.set_num_threads(2)
    att = layer(n)
    start = time.perf_counter()
    norm = spectral_norm(att, tol=1e-4)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "steps": int(norm.steps),
        "error": float(norm.error),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def certified(n: int) -> dict[str, float]:
    """Upper end, seconds of the processor, and peak resident memory in GB of this process, of one
    thread."""
    torch.set_num_threads(1)
    att, start = layer(n), time.process_time()
    return {
        "value": float(spectral_norm(att, tol=1e-3, delta=1e-10).upper),
        "processor_seconds": time.process_time() - start,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    """Run all lengths, fit exponents, print, write."""
    path = Path(__file__).with_suffix(".json")
    if sys.argv[1:2] == ["certified"]:
        n = sys.argv[2]
        row = certified(int(n))
        print(n, row)
        report = json.loads(path.read_text())
        report.setdefault("one_thread", {})[n] = row
        path.write_text(json.dumps(report, indent=1) + "\n")
        return
    if len(sys.argv) > 1:
        print(json.dumps(one(int(sys.argv[1]))))
        return
    runs = {}
    for n in LENGTHS:
        done = subprocess.run(
            [sys.executable, __file__, str(n)], capture_output=True, text=True, check=True
        )
        runs[n] = json.loads(done.stdout)
        print(n, runs[n], flush=True)
    x = np.log(LENGTHS)
    report = json.loads(path.read_text()) | {
        "runs": runs,
        "time_exponent": float(np.polyfit(x, np.log([r["seconds"] for r in runs.values()]), 1)[0]),
        "memory_exponent": float(
            np.polyfit(x, np.log([r["peak_gb"] for r in runs.values()]), 1)[0]
        ),
    }
    print({key: value for key, value in report.items() if key.endswith("exponent")})
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
