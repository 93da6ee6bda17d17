"""How well norms by keys and values foretell what rounding a cache does to the outputs of heads.

``python benchmarks/cache_bits.py`` rounds the keys and values of every head of SmolLM2-135M (real
weights) at two windows of 128 tokens to 2 to 8 bits, keys by channel and by token; some minutes
on one thread. Prints, and writes cache_bits.json.
"""

import json
from pathlib import Path
from typing import Any

import torch

import lipbound as lb
from lipbound.analysis.cache_bits import CACHED, KINDS, agreement

HERE = Path(__file__)
MODEL = "builtin:smollm2"


def measured(keys: str) -> dict[str, Any]:
    """One way to round: agreement, and the median and the most demanding head's bits."""
    ds = lb.cache_bits(MODEL, keys=keys, samples=2)
    bits = {
        f"{side}_{kind}": {
            "median": float(ds[f"bits_{kind}"].sel(side=side).median()),
            "most": float(ds[f"bits_{kind}"].sel(side=side).max()),
        }
        for kind in KINDS
        for side in CACHED
    }
    more = float(
        (ds["bits_expected"].sel(side="keys") > ds["bits_expected"].sel(side="values")).mean()
    )
    return {
        **{name: ds.attrs[name] for name in ("model", "revision", "data", "dtype", "device")},
        **{name: ds.attrs[name] for name in ("error", "quantiser", "versions")},
        "heads": ds.sizes["layer"] * ds.sizes["head"],
        "samples": ds.sizes["sample"],
        "bits": bits,
        "keys_need_more": more,
        "rows": agreement(ds).to_dict("records"),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for keys in ("channel", "token"):
        found[keys] = measured(keys)
        print(json.dumps(found[keys], indent=1), flush=True)
    HERE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
