"""What `benchmarks/jasmin/study.py` measured, for Figures 4 and 5 and the tables of Yudin et al."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
import yaml

from lipbound.formatting import counted

STUDIES = Path(__file__).parents[1] / "benchmarks" / "jasmin"
sys.path.append(str(STUDIES))
from robustness import ATTACKS, AUTO_STEPS, PGD_STEPS  # noqa: E402

STEPS = f"PGD takes {PGD_STEPS} steps, AutoAttack {AUTO_STEPS}"

IMAGES_OF_HEADS = 32
"""Test images over which statistics of single heads are means, at most."""
BY_HEAD = ("softmax_norm", "largest_probability", "head_norm")
NETWORK, HEADS = "median network constant", "mean head constant"


def studied(results: Path, config: dict[str, Any], data: str) -> xr.Dataset:
    """Results of a study, a run for each network that was trained.

    Args:
        results: file of a JSON object a line. config: what the study was asked for. data: what it
            trained and tested on.

    Returns:
        Dataset of float64: accuracy (run, attack) in percent; network_norm (run, image), and its
        median over images network_constant (run); softmax_norm, largest_probability and head_norm
        (run, layer, head), and the geometric mean of the last over heads, head_constant (run);
        coordinates method and seed of each run.
    """
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    found = {name: (("run", "layer", "head"), [row[name] for row in rows]) for name in BY_HEAD}
    found["network_norm"] = ("run", "image"), [row["network_norm"] for row in rows]
    found["accuracy"] = ("run", "attack"), [[row[name] for name in ATTACKS] for row in rows]
    names = np.array([row["method"] for row in rows], dtype=object)
    coords = {"method": ("run", names), "seed": ("run", [row["seed"] for row in rows])}
    coords["attack"] = "attack", np.array(ATTACKS, dtype=object)
    ds = xr.Dataset(found, coords)
    ds["network_constant"] = ds["network_norm"].median("image")
    ds["head_constant"] = np.exp(np.log(ds["head_norm"]).mean(("layer", "head")))
    shape = {"layers": ds.sizes["layer"], "heads": ds.sizes["head"]}
    return ds.assign_attrs({"config": config, "data": data} | shape)


def ours(name: str) -> xr.Dataset:
    """The study of that name in this repository, small or search."""
    config = yaml.safe_load((STUDIES / f"{name}.yaml").read_text(encoding="utf-8"))
    return studied(STUDIES / name / "results.jsonl", config, "CIFAR-10")


def methods(ds: xr.Dataset) -> list[str]:
    """Methods in the order of the study."""
    return list(dict.fromkeys(ds["method"].values.tolist()))


def averaged(ds: xr.Dataset) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Mean and standard deviation over seeds: a row a method, a column an attack or a constant."""
    columns = {name: ds["accuracy"].sel(attack=name).values for name in ATTACKS}
    columns |= {NETWORK: ds["network_constant"].values, HEADS: ds["head_constant"].values}
    grouped = pd.DataFrame(columns).groupby(ds["method"].values, sort=False)
    return grouped.mean(), grouped.std()


def cells(ds: xr.Dataset) -> pd.DataFrame:
    """`averaged` as text, the spread left out where there is one seed."""
    mean, spread = averaged(ds)
    texts = {
        name: [
            f"{m:.3g}" if np.isnan(s) else f"{m:.3g} ± {s:.2g}"
            for m, s in zip(mean[name], spread[name], strict=True)
        ]
        for name in mean
    }
    seeds = [int((ds["method"] == method).sum()) for method in mean.index]
    return pd.DataFrame({"seeds": seeds} | texts, index=mean.index)


def trained(ds: xr.Dataset) -> str:
    """What was trained in a study, and that it is not the paper's network, in sentences."""
    config, layers, heads = ds.attrs["config"], ds.attrs["layers"], ds.attrs["heads"]
    images = f"{config['images']:,}" if "images" in config else "all"
    seeds = counted(len(np.unique(ds["seed"])), "seed")
    said = (
        f"{config['start']} ({layers} layers x {heads} heads) fine-tuned with each method on "
        f"{ds.attrs['data']}: {counted(config['epochs'], 'epoch')} of {images} training images, "
        f"batches of {config['batch']}, {seeds}."
    )
    if (layers, heads) == (12, 12):
        return said
    return f"{said} The paper's ViT-B (12 x 12; 40 epochs, batches of 512) was not trained here."
