"""How well norms by keys and values foretell what rounding a cache does to the outputs of heads.

``python benchmarks/cache_bits.py`` rounds the keys and values of every head of SmolLM2-135M (real
weights) at two windows of 128 tokens to 2 to 8 bits, keys by channel and by token; some minutes
on one thread. Beside it a rule that looks at entropies of attention alone, and what both make of
four bits a head on average. Prints, and writes cache_bits.json and cache_bits.png.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import xarray as xr
from scipy.stats import spearmanr

import lipbound as lb
from lipbound.analysis.cache_bits import CACHED, KINDS, agreement

HERE = Path(__file__)
MODEL = "builtin:smollm2"
AVERAGE = 4
"""Bits of keys, and of values, that all heads have on average."""


def entropies() -> np.ndarray:
    """Entropy of order 2 of every head's attention, in bits, (sample, layer, head).

    That is -log2 of the sum of squares of a query's probabilities, mean over queries.
    """
    checkpoint = lb.load_checkpoint(MODEL)
    layers = lb.capture(checkpoint, lb.prepare(checkpoint, samples=2, max_length=128))
    found = [-att.p.double().square().sum(-1).log2().mean(-1) for att in layers]
    return torch.stack(found, 1).numpy()


def shared_out(need: np.ndarray) -> np.ndarray:
    """Whole bits of heads, `AVERAGE` of them on average, as far from it as their needs are from
    theirs, and from 2 to 8; the largest remainders are rounded up."""
    wanted = np.clip(AVERAGE + need - need.mean(), 2, 8)
    bits = np.floor(wanted).astype(int)
    left = AVERAGE * len(need) - bits.sum()
    order = np.argsort(bits - wanted, kind="stable")
    order = order[bits[order] < 8]
    bits[order[: max(0, left)]] += 1
    return bits


def rules(ds: xr.Dataset, entropy: np.ndarray) -> dict[str, Any]:
    """Rank correlations with the errors at four bits, and errors where bits are shared out.

    By what `lipbound.cache_bits` expects, by entropies (b = average + (mean H - H) / 4, which gives
    more bits to heads whose attention is concentrated), and evenly.
    """
    found: dict[str, Any] = {}
    for side in CACHED:
        of = ds.sel(side=side)
        error = of["measured"].transpose("sample", "layer", "head", "bits").values
        needs = {
            "expected": np.log2(of["expected"].sel(bits=AVERAGE).values),
            "entropy": -entropy / 4,
            "even": np.zeros_like(entropy),
        }
        at = error[..., ds["bits"].values.tolist().index(AVERAGE)].ravel()
        rows = {}
        for name, need in needs.items():
            errors, counts = [], []
            for one, errs in zip(need, error, strict=True):
                bits = shared_out(one.ravel())
                every = errs.reshape(-1, errs.shape[-1])
                errors.append(every[np.arange(len(bits)), bits - int(ds["bits"][0])])
                counts.append(bits.mean())
            moved = np.concatenate(errors)
            rows[name] = {
                "rank": None if name == "even" else float(spearmanr(need.ravel(), at).statistic),
                "median": float(np.median(moved)),
                "root_mean_square": float(np.sqrt((moved**2).mean())),
                "largest": float(moved.max()),
                "bits": float(np.mean(counts)),
            }
        found[side] = rows
    return found


def drawn(ds: xr.Dataset, entropy: np.ndarray) -> None:
    """Errors at four bits against both predictions, a point a head and window."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(6.6, 5), sharey="row", constrained_layout=True)
    for row, side in zip(axes, CACHED, strict=True):
        of = ds.sel(side=side, bits=AVERAGE)
        predictions = {
            "expected relative error": of["expected"].values,
            "entropy of order 2 [bits]": entropy,
        }
        for ax, (label, x) in zip(row, predictions.items(), strict=True):
            ax.scatter(x.ravel(), of["measured"].values.ravel(), s=5, alpha=0.5, linewidths=0)
            ax.set(yscale="log", xlabel=f"{side}: {label}")
        ends = [*row[0].get_xlim()]
        row[0].plot(ends, ends, color="0.6", linewidth=0.8, zorder=0)
        row[0].set(xscale="log", ylabel=f"relative error at {AVERAGE} bits")
    figure.savefig(HERE.with_suffix(".png"), dpi=160)


def measured(ds: xr.Dataset) -> dict[str, Any]:
    """One way to round: agreement, and the median and the most demanding head's bits."""
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
        study = lb.cache_bits(MODEL, keys=keys, samples=2)
        found[keys] = measured(study)
        if keys == "channel":
            entropy = entropies()
            found["rules"] = rules(study, entropy)
            drawn(study, entropy)
            print(json.dumps(found["rules"], indent=1), flush=True)
        print(json.dumps(found[keys], indent=1), flush=True)
    HERE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
