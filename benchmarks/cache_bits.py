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


def first_token() -> dict[str, float]:
    """Medians over heads, at one window: the share of the first token in the steepest direction by
    values, and the range of its value over that of the median token."""
    checkpoint, shares, ranges = lb.load_checkpoint(MODEL), [], []
    for att in lb.capture(checkpoint, lb.prepare(checkpoint, samples=1, max_length=128)):
        right = lb.spectral_norm(att, wrt="values", vectors=True).right
        assert right is not None
        shares.append(right[0, :, 0].square().sum(-1))
        reach = att.v[0].amax(-1) - att.v[0].amin(-1)
        ranges.append(reach[:, 0] / reach[:, 1:].median(-1).values)
    return {
        name: float(torch.cat(values).median())
        for name, values in (("share", shares), ("range", ranges))
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found: dict[str, Any] = {"first_token": first_token()}
    for keys in ("channel", "token"):
        found[keys] = measured(keys)
        print(json.dumps(found[keys], indent=1), flush=True)
    HERE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
