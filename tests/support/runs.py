"""A short run that several files interrupt, repeat and compare."""

from typing import Any

import numpy as np
import xarray as xr

from lipbound.runs.checksums import sealed
from lipbound.runs.compare import Plan, dataset
from lipbound.runs.config import RunConfig
from lipbound.runs.measure import LayerInfo
from lipbound.runs.store import LayerResult
from lipbound.schema import Extent, RunInfo

TEXTS = ["the ferry is in a clock", "the keeper and the lighthouse"]
TEXTS += ["a island of the ferry", "the lighthouse"]
OPTIONS: dict[str, Any] = {"max_length": 12, "progress": False, "bounds": ["yudin", "lipbound"]}
OPTIONS["memory"] = 1  # one sample at a time


def identical(a: xr.Dataset, b: xr.Dataset) -> bool:
    """Everything but date and command."""
    own = dict.fromkeys(("date", "command", "settings_checksum"))
    return a.assign_attrs(own).identical(b.assign_attrs(own))


FACTORS = {"kim": 154.3, "castin": 2.3e3, "castin_c3": 0.91, "castin_mean_field": 4e302}
FACTORS |= {"specformer": 9.35e6, "yudin": 149.8, "yudin_nobias": 142.0}
FACTORS |= {"lipbound": 1.3, "lipbound_block": 1.99}
"""Bound / exact of `made_up`, on average."""
MAP = "one attention head without output projection, x -> softmax(q k^T) v"
SETTINGS: dict[str, Any] = {"model": "builtin:minilm", "architecture": "BertModel"}
SETTINGS |= {"revision": f"sha256:{'53aa5117' * 8}", "loaded": False, "commit": None}
SETTINGS |= {"data": "the text that comes with lipbound", "source": {}}
SETTINGS |= {"data_fingerprint": f"sha256:{'c78ca090' * 8}"}
SETTINGS |= {"preprocessing": "BertTokenizer, consecutive windows of 32 tokens"}
SETTINGS |= {"map": "head", "norm": "frobenius", "wrt": "input", "map_description": MAP}
SETTINGS |= {"method": "lanczos", "tol": 1e-3, "delta": 1e-6, "seed": 0, "block": 2}
SETTINGS |= {"dtype": "float32", "device": "cpu", "python": "3.11.7", "lipbound": "0.1.0"}
SETTINGS |= {"versions": {"torch": "2.13.0", "transformers": "5.23.0"}}
SETTINGS |= {"date": "2026-11-22T13:00:00+00:00", "tokens": 32, "capture_error": 1.2e-6}
SETTINGS |= {"command": "lipbound compare builtin:minilm --out run.zarr", "variants": []}
SETTINGS |= {"not_applicable": {"castin": "does not cover sink logits"}}


def made_up(*, samples: int = 2, layers: int = 3, heads: int = 4) -> xr.Dataset:
    """A run that nobody computed: the same on every machine, with every mark, infinite
    ratios and an exact norm of zero."""
    shape = (samples, layers, heads)
    steps = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    exact = 2.0 + 0.25 * (steps % 7) + 0.125 * (steps % 3)
    exact[0, 0, 0] = 0.0
    tables: dict[str, np.ndarray] = {
        "exact": exact,
        "exact_upper": exact * (1 + np.where(steps == 5, 2.0**-8, 2.0**-11)),
        "exact_l2": exact * 1.5,
    }
    tables |= {name: exact * factor * (1 + (steps % 5) / 8) for name, factor in FACTORS.items()}
    tables["castin_mean_field"][1, 0, min(1, heads - 1)] = np.inf
    tables |= {"exact_steps": np.full(shape, 12, dtype=np.int32), "exact_converged": steps != 5}
    failing = ("castin", "castin_mean_field", "specformer", "castin_c3")
    tables |= {f"{name}_sound": np.full(shape, name not in failing) for name in FACTORS}
    tables["yudin_nobias_sound"][0] = False
    found = [LayerInfo(k, f"layer.{k}", heads, 32, frozenset()) for k in range(layers)]
    config = RunConfig(SETTINGS["model"], bounds=tuple(FACTORS))
    plan, lengths = Plan(config, found, samples, 1, 1, {}, layers), 32 - 2 * np.arange(samples)
    each = ({name: values[:, k] for name, values in tables.items()} for k in range(layers))
    ds, _ = dataset(plan, (LayerResult(0, k, one, lengths, 0.0) for k, one in enumerate(each)))
    made = Extent(samples, samples, list(range(layers)), heads, layers)
    counts = {"samples": samples, "exact_samples": samples}
    return sealed(ds, RunInfo(**SETTINGS | counts, bounds=list(FACTORS), made=made))
