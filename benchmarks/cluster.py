"""One worker against two, on one run of builtin:minilm of a minute or so; the results must be the
same. Writes cluster.json."""

import json
import time
from pathlib import Path

import dask
import numpy as np
from dask.distributed import Client, LocalCluster

import lipbound as lb
from lipbound.cli.commands import TRIMMING

SAMPLES = 48
OPTIONS = {"samples": SAMPLES, "max_length": 128, "progress": False, "memory": "30MB"}


def timed(workers: int) -> tuple[float, np.ndarray, int]:
    """Seconds on so many single-threaded processes, once they have loaded the checkpoint; exact
    norms; samples per block."""
    with (
        dask.config.set({TRIMMING: None}),
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        lb.compare("builtin:minilm", client=client, **OPTIONS | {"samples": 2 * workers})
        start = time.perf_counter()
        ds = lb.compare("builtin:minilm", client=client, **OPTIONS)
        return time.perf_counter() - start, ds["exact"].values, ds.attrs["block"]


def main() -> None:
    """Measure, print, write."""
    one, two = timed(1), timed(2)
    report = {
        "samples": SAMPLES,
        "one_worker_s": one[0],
        "two_workers_s": two[0],
        "ratio": one[0] / two[0],
        "blocks": [one[2], two[2]],
        "largest_difference": float(np.abs(one[1] / two[1] - 1).max()),
    }
    print(json.dumps(report))
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
