"""How tight every bound is on the checkpoints that come with lipbound: writes tightness.json, which
README.md and the pages of bounds show.

Eight samples of at most 128 tokens of the checkpoint that README.md shows, two of the others (one
sample of every third layer of the largest), of each one's own data, one attention head at a time.
For every norm: bound / exact over samples, layers and
heads, the exact norm being that of the map that the bound is about, and how often the assumptions
of the bound hold.
"""

import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

import lipbound as lb
from lipbound.devices import versions
from lipbound.reporting.statistics import mean_ends
from lipbound.schema import NORMS

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "builtin:minilm": {"samples": 8},
    "builtin:gpt2": {"samples": 2},
    "builtin:vit": {"samples": 2},
    "builtin:llama": {"samples": 2},
    "builtin:qwen3": {"samples": 2},
    "builtin:smollm2": {"samples": 1, "layers": list(range(0, 30, 3))},
}


def finite(value: float) -> float | None:
    """A number that JSON has; None for one beyond the range of float64."""
    return float(value) if np.isfinite(value) else None


def entries(ds: xr.Dataset) -> dict[str, Any]:
    """For each bound of a run: bound / exact, and the share of heads where its assumptions hold."""
    found = {}
    for name in ds.attrs["bounds"]:
        quotient = (ds[name] / ds[lb.bounds.get(name).exact]).values
        with np.errstate(over="ignore"):
            geomean = np.mean(mean_ends(ds, name))  # as tables and figures show it
        sound = float(ds[f"{name}_sound"].mean())
        found[name] = {
            "geomean": finite(geomean),
            "min": finite(quotient.min()),
            "max": finite(quotient.max()),
            "sound": sound,
        }
    return found


def measured(model: str, samples: int, layers: list[int] | None = None) -> dict[str, Any]:
    """Every norm of one checkpoint."""
    row: dict[str, Any] = {"samples": samples, "norms": {}}
    for norm in NORMS:
        start = time.perf_counter()
        ds = lb.compare(model, norm=norm, samples=samples, layers=layers, progress=False)
        row |= {
            "layers": ds.sizes["layer"],
            "heads": ds.sizes["layer"] * ds.sizes["head"],
            "tokens": int(ds.attrs["tokens"]),
        }
        row["norms"][norm] = {
            "exact": [float(ds["exact"].min()), float(ds["exact"].max())],
            "bounds": entries(ds),
        }
        print(model, norm, f"{time.perf_counter() - start:.0f} s", flush=True)
    return row


def main() -> None:
    """Measure, print, write."""
    rows = {model: measured(model, **how) for model, how in CHECKPOINTS.items()}
    machine = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    report = {**machine, "versions": versions(), "checkpoints": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
