"""How often certificates fail that may fail with probability delta:
``python benchmarks/failure_rates.py``.

The Jacobian of a head at one token is the transpose of W_V, so any spectrum is that of some head.
Here the norm is 1 and stands alone above clusters, which a start vector with hardly any of the top
singular vector in it takes for the top; runs end by their own rule, and after a few steps, where
certificates spend their probability. Every run has a start vector of its own. A failure is an upper
end below 1, or a lower end above it. Rates must not be above delta but for chance: "at most" is
their upper 99.9 % confidence limit (Clopper and Pearson 1934), and the exit status is 1 where the
lower one exceeds delta.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from scipy.stats import beta
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.jacobians.in_range import in_range
from lipbound.linalg import enclose
from lipbound.linalg.operator_norm import DEFAULT_STEPS
from lipbound.linalg.solution import seeds_each

WIDTH = 64
TOGETHER = 500
"""Runs in a batch."""


def below(low: float, high: float) -> list[float]:
    """One, and the rest evenly between two numbers."""
    return [1.0, *torch.linspace(high, low, WIDTH - 1, dtype=torch.float64).tolist()]


SPECTRA: dict[str, list[float]] = {
    "1, then 0.99": below(0.99, 0.99),
    "1, then 0": below(0.0, 0.0),
    "1, then 0.99 or 0.98": [1.0] + [0.99] * 31 + [0.98] * 32,
    "1, then 0.99 to 0.98": below(0.98, 0.99),
    "1, then 0.999 to 0.9": below(0.9, 0.999),
    "ten equal steps of 0.001": [1 - 0.001 * (i * 10 // WIDTH) for i in range(WIDTH)],
}
STEPS = (1, 2, 4, None)
DELTAS = (0.5, 0.1, 0.01)


def head(spectrum: list[float], runs: int, dtype: torch.dtype) -> Attention:
    """The same head at as many samples as there are runs, with these singular values, rounded to
    the dtype."""
    eye = torch.eye(WIDTH, dtype=dtype)[None]
    return Attention(
        torch.ones(runs, 1, WIDTH, dtype=dtype),
        eye,
        eye,
        torch.tensor(spectrum, dtype=dtype).diag()[None],
    )


def missed(
    spectrum: list[float], runs: int, dtype: torch.dtype, delta: float, seed: int, steps: int | None
) -> Tensor:
    """By how much the norm lies outside of each run's enclosure, (runs,); 0 where it is inside.
    Each may fail with probability ``delta``."""
    # less than what stands below the top
    tol = max((1 - max(value for value in spectrum if value < 1)) / 4, 1e-4)
    att = head(spectrum, runs, dtype)
    wide = in_range(att.double(), "head")
    op = wide.jacobian()
    most, seeds = steps or DEFAULT_STEPS["lanczos"], seeds_each(op.batch, seed)
    # as `lipbound.spectral_norm` calls it, but that the runs of a batch do not share delta
    problem = enclose.Problem(op, lambda: wide.allowance(op), op, tol, most, seeds)
    norm = enclose.enclose(problem, delta * op.batch)
    return torch.maximum(1 - norm.upper, norm.lower - 1).clamp_min(0)


def row(found: Tensor, **case: Any) -> dict[str, Any]:
    """The rate of failures, with its limits."""
    runs, failed = len(found), int((found > 0).sum())
    low = float(beta.ppf(1e-3, failed, runs - failed + 1)) if failed else 0.0
    high = float(beta.ppf(1 - 1e-3, failed + 1, runs - failed)) if failed < runs else 1.0
    gross = int((found > 1e-6).sum())
    return case | {
        "runs": runs,
        "failed": failed,
        "failed_by_more_than_1e-6": gross,
        "rate": failed / runs,
        "low": low,
        "high": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="*", default=["float64"], choices=["float32", "float64"])
    parser.add_argument("--out", type=Path, help="JSON file for the rates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: list[dict[str, Any]] = []
    print(
        f"{'spectrum':26s}{'dtype':>9s}{'steps':>6s}{'delta':>7s}{'failed':>8s}{'rate':>9s}{'at most':>9s}{'by > 1e-6':>11s}"  # noqa: E501
    )
    for (name, spectrum), dtype, steps, delta in itertools.product(
        SPECTRA.items(), options.dtypes, STEPS, DELTAS
    ):
        sizes = [min(TOGETHER, options.runs - first) for first in range(0, options.runs, TOGETHER)]
        found = torch.cat(
            [
                missed(spectrum, size, getattr(torch, dtype), delta, options.seed + i, steps)
                for i, size in enumerate(sizes)
            ]
        )
        r = row(found, spectrum=name, dtype=dtype, steps=steps, delta=delta)
        record.append(r)
        print(f"{name:26s}{dtype:>9s}{steps or 'own':>6}{delta:7g}", end="")
        print(
            f"{r['failed']:8d}{r['rate']:9.4f}{r['high']:9.4f}{r['failed_by_more_than_1e-6']:11d}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(int(any(r["low"] > r["delta"] for r in record)))


if __name__ == "__main__":
    main()
