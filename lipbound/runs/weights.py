"""Numbers of the weights of every head of a checkpoint, without data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from lipbound.devices import in_own_modes
from lipbound.errors import CheckpointError
from lipbound.models.checkpoint import AnyModel, Inputs, LoadOptions
from lipbound.models.head_weights import head_weights
from lipbound.models.in_memory import in_training, state_sha256
from lipbound.models.loading import load_named
from lipbound.runs import compare, measure, store
from lipbound.runs.checksums import sealed
from lipbound.runs.config import RunConfig
from lipbound.runs.head_extras import of_weights
from lipbound.schema import OF_WEIGHTS


@in_own_modes
@torch.no_grad()
def weight_norms(model: AnyModel, *, out: str | Path | None = None) -> xr.Dataset:
    """Measure the weights of every attention head of a checkpoint: no data, no forward pass.

    What is measured are the extras `lipbound.schema.OF_WEIGHTS`, as
    `lipbound.runs.head_extras.of_weights` defines them. Safetensors and GGUF files are read one
    tensor at a time, weights in other formats as a whole.

    Args:
        model: as of `lipbound.compare`, of one of `lipbound.models.head_weights.FAMILIES`; a loaded
            model stays as and where it is.
        out: where to save the run, a Zarr store that must not exist yet.

    Returns:
        A run with dims (sample, layer, head), one sample of no tokens: ``wqk_norm``,
        ``wqk_stable_rank``, ``wov_norm`` and ``wov_stable_rank``, float64, computed in float64;
        ``exact`` is NaN. Tables, heatmaps and `lipbound.cite` take it. The revision of a model in
        training mode is "in training", and no hash.

    Raises:
        LipboundError: an unknown checkpoint, one of another family, weights that are not finite.

    >>> ds = weight_norms("builtin:gpt2")
    >>> dict(ds["wqk_norm"].sizes)
    {'sample': 1, 'layer': 6, 'head': 4}
    """
    config = RunConfig(model, bounds="none", extras=OF_WEIGHTS, out=out)
    if config.target is not None:
        store.check_target(config.target)
    if isinstance(model, str | Path):
        options = LoadOptions(None, torch.float32, "cpu", "auto", lazy=True)
        checkpoint = load_named(model, options)
    else:
        checkpoint = in_training(model)
        if not checkpoint.model.training:
            checkpoint.revision = state_sha256(checkpoint.model)
    layers, found = list[measure.LayerInfo](), list[store.LayerResult]()
    for name, projections, scale in head_weights(checkpoint.model):
        if not all(bool(t.isfinite().all()) for t in projections):
            raise CheckpointError(f"weights of {name} in {checkpoint.name} are NaN or infinite")
        w_q, of_heads = projections[0], of_weights(projections, scale)
        values = {name: value[None].cpu().numpy() for name, value in of_heads.items()}
        values["exact"] = np.full((1, len(w_q)), np.nan)
        values["exact_converged"] = np.zeros((1, len(w_q)), dtype=bool)
        found.append(store.LayerResult(0, len(layers), values, np.zeros(1, dtype=int), 0.0))
        layers.append(measure.LayerInfo(len(layers), name, len(w_q), 0, frozenset()))
    inputs = Inputs({"no_tokens": torch.zeros(1, 0)}, "no data", "none")
    capturer = measure.capturer_of(checkpoint.model, config)
    sources = measure.Sources(checkpoint, inputs, str(w_q.device), capturer)
    plan = compare.Plan(config, layers, 1, 1, 1, {}, len(layers))
    tables, lengths, _ = compare.filled(plan, found)
    info = compare.run_info(config, sources, plan)
    made = replace(info.made, exact_samples=0)
    said: Any = {"map_description": "weights of heads alone", "dtype": "float64"}
    ds = compare.dataset(tables, config, layers, lengths)
    ds = sealed(ds, replace(info, made=made, exact_samples=0, **said))
    if config.target is not None:
        store.save(ds, config.target)
    return ds
