"""The main job: exact norm and every bound of every head of a checkpoint, as one labelled Dataset."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from transformers import PreTrainedModel

from lipbound.bounds.audit import audit
from lipbound.bounds.multihead import names_for
from lipbound.devices import device_name, resolve_device
from lipbound.errors import LipboundError, StoreError, UnknownNameError, nearest
from lipbound.jacobians.maps import MAPS, WHOLE
from lipbound.models.checkpoints import load_checkpoint
from lipbound.models.inputs import prepare
from lipbound.runs.dataset import allocate, dataset
from lipbound.runs.execute import WorkerSpec, distribute, fill, progress_bar
from lipbound.runs.measure import LayerResult, MeasurementSpec, Measurer
from lipbound.runs.partial_store import PartialRun, partial_path, same_configuration, stored_block
from lipbound.runs.plan import about, absolute, block_size, memory_bytes
from lipbound.runs.provenance import checksums, provenance, settings_checksum, versions
from lipbound.runs.store import check_target, save
from lipbound.runs.store import load as load_run


def compare(
    model: str | Path | PreTrainedModel,
    data: Any = None,
    *,
    bounds: str | Iterable[str] = "default",
    map: str = "head",
    samples: int = 8,
    exact_samples: int | None = None,
    max_length: int = 128,
    layers: Sequence[int] | None = None,
    split: str | None = None,
    column: str | None = None,
    revision: str | None = None,
    tol: float = 1e-3,
    delta: float | None = 1e-10,
    device: str = "auto",
    dtype: str = "float32",
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    memory: str | float = "auto",
    weights: str = "auto",
    client: Any = None,
    progress: bool = True,
) -> xr.Dataset:
    """Exact local Lipschitz constant and upper bounds of every attention head of a checkpoint.

    Args:
        model: hub id ("google/vit-base-patch16-224", "name@revision"), directory, "builtin:NAME" (minilm, gpt2, llama, qwen3, vit, ...; see
            `lipbound.models.checkpoints.load_checkpoint`), or a loaded transformers model.
        data: None for a default of the model's modality, or anything `lipbound.models.inputs.prepare` takes.
        bounds: names of bounds, "default" (every published bound and the cheap ones of ours) or "all" (costly ones too; see `lipbound.bounds.names`).
        map: "head" (no output projection), "head_out" (with the head's slice of it; bounds then have ||W_V W_O|| for ||W_V||), "heads" (all heads
            of a layer side by side), "layer" (with the output projection; bounds on heads are put together by `lipbound.bounds.whole_layer`),
            or the layer with its residual connection, "residual", and layer normalisation, "pre_norm" or "post_norm" (see `lipbound.spectral_norm`).
        samples: how many samples of the data.
        exact_samples: compute exact norms on the first so many samples only (bounds on all).
        max_length: tokens per text.
        layers: indices of attention layers; all by default.
        split, column: of a dataset. revision: of a hub model.
        tol: relative width of the enclosure of exact norms, ``exact_upper / exact - 1``.
        delta: probability that any ``exact_upper`` of the run fails (see `lipbound.spectral_norm`); None for plain
            estimates, about twice as fast.
        device: "auto" (CUDA where there is one), or a torch device. dtype: "float32" or "float64".
        seed: of the start vectors of exact norms. The same seed gives the same numbers on the same machine.
        out: where to save the run, a Zarr store that must not exist yet. While it is computed, its finished blocks are kept beside it, in
            ``<out>.partial``.
        resume: take up the unfinished run of ``out`` where it stopped (and return a finished one as it is): what is stored is not computed
            again, and the result is that of an uninterrupted run. Without an unfinished run it starts one.
        memory: working memory that decides how many samples are taken at a time: bytes, "4GB", or "auto".
        weights: "whole" (the model in memory), "layers" (read from its safetensors files layer by layer, several times, with little in memory), or
            "auto": the latter where the weights would take more than half of the free memory.
        client: a ``dask.distributed`` client whose workers measure blocks of samples; each loads the checkpoint once, so ``model`` must be a name
            that they can load, and computes with the ``device`` asked for. Start it with one thread per worker.
        progress: show a progress bar on standard error, where that is a terminal or a notebook.

    Returns:
        Dataset with dims (sample, layer, head), or (sample, layer) for maps of whole layers: ``exact`` (lower end), ``exact_upper``,
        ``exact_steps``, ``exact_converged``, ``exact_rounding``
        (see `lipbound.jacobians.rounding.rounding`), one variable per bound under its registry name and ``<name>_sound`` (whether its assumptions
        held), ``exact_l2`` where a bound is about L2 attention. Bounds of "default" and "all" that say nothing about a layer of the model are left
        out; attrs["not_applicable"] tells why. Values are natural, not logarithms. attrs carry provenance and, in ``audit``, how
        often each bound fell below the exact norm.

    Raises:
        LipboundError: see its subclasses; nothing is computed when the output cannot be written.
    """
    if map not in MAPS:
        raise UnknownNameError(f"unknown map {map!r}; {nearest(map, MAPS)}")
    names = names_for(bounds if isinstance(bounds, str) else list(bounds), map)
    if not 0 < tol < 1:
        raise LipboundError(f"tol is {tol}; it must be between 0 and 1 (relative error of the exact norms)")
    if exact_samples is not None and exact_samples < 1:
        raise LipboundError(f"exact_samples is {exact_samples}; at least one sample is needed")
    if client is not None and not isinstance(model, (str, Path)):
        raise LipboundError("with a client, model must be a name that every worker can load (hub id, directory or builtin), not a loaded model")
    if resume and out is None:
        raise LipboundError("resume=True needs out, the name of the run to take up")
    where = resolve_device(device)
    budget = memory_bytes(memory, where)
    finished = resume and out is not None and Path(out).expanduser().exists()
    target = None if out is None else Path(out).expanduser() if finished else check_target(out)
    checkpoint = load_checkpoint(model, revision=revision, dtype=dtype, device=where, weights=weights)
    inputs = prepare(checkpoint, data, samples=samples, max_length=max_length, split=split, column=column)
    count = inputs.samples
    exact_count = count if exact_samples is None else min(exact_samples, count)
    settings = {
        "model": checkpoint.name, "revision": checkpoint.revision, "data_fingerprint": inputs.fingerprint, "samples": count, "bounds": list(names),
        "map": map, "exact_samples": exact_count, "tol": tol, "delta": delta, "dtype": dtype, "seed": seed,
    }  # fmt: skip
    if finished:
        assert target is not None
        return _finished(target, settings, layers)

    job = MeasurementSpec(tuple(names), map, tol, None, seed, exact_count)
    captured = Measurer(checkpoint.model, layers, job).look(inputs.block(0, 1, where))
    variants = frozenset().union(*(layer.variants for layer in captured))
    names, silent = about(names, variants, everything=bounds in ("default", "all"))
    job = replace(job, names=tuple(names))
    tables = allocate(names, count, captured, certify=delta is not None, map=map)
    if delta is not None:
        job = replace(job, delta=delta / (exact_count * tables["exact"][0].size))
    block = block_size(captured, count, budget, 1 if client is None else 4 * max(1, len(client.ncores())))
    unfinished = None
    if target is not None:
        config = settings | {"layers": [layer.index for layer in captured], "device": device if client else where, "versions": versions()}
        path = partial_path(target)
        block = stored_block(path, default=block) if resume else block
        unfinished = PartialRun(target, config | {"block": block}, tables, block, resume=resume)
    done = np.zeros((-(-count // block), len(captured)), dtype=bool) if unfinished is None else unfinished.done
    todo = [(b, frozenset(np.flatnonzero(done[b]).tolist())) for b in range(len(done)) if not done[b].all()]
    blocks = [(inputs.block(b * block, min(count, (b + 1) * block), "cpu"), b * block, skip) for b, skip in todo]
    if client is None:
        measurer = Measurer(checkpoint.model, layers, job)
        results: Iterator[tuple[int, LayerResult]] = (
            (start, m) for x, start, skip in blocks for m in measurer.block({k: t.to(where) for k, t in x.items()}, start, skip)
        )
    else:
        chosen = None if layers is None else tuple(layers)
        results = distribute(client, WorkerSpec(str(model), revision, checkpoint.revision, dtype, device, chosen, job, weights), blocks)
    with progress_bar(progress, f"{checkpoint.name}: layers", count * len(captured)) as advance:
        advance(int(sum(min(block, count - b * block) * row.sum() for b, row in enumerate(done))))
        lengths, error = fill(tables, results, unfinished, advance)
    ds = dataset(tables, names, captured, lengths)
    if map in WHOLE:
        ds = ds.isel(head=0, drop=True)
    named = data is None or isinstance(data, (str, Path))
    source = {
        "model": None if isinstance(model, PreTrainedModel) else absolute(model),
        "data": False if not named else None if data is None else absolute(data), "split": split, "column": column, "max_length": max_length,
    }  # fmt: skip
    settled = {"names": names, "map": map, "tol": tol, "delta": delta, "device": device_name(where), "dtype": dtype, "seed": seed, "source": source}
    ds.attrs = provenance(checkpoint, inputs, **settled) | {
        "samples": count, "exact_samples": exact_count, "tokens": int(lengths.max()), "capture_error": error, "block": block,
        "variants": sorted(variants), "not_applicable": silent,
    }  # fmt: skip
    ds["checksum"] = checksums(ds)
    ds.attrs["settings_checksum"] = settings_checksum(ds)
    ds.attrs["audit"] = audit(ds)
    ds.attrs["violations"] = {name: entry["violations"] for name, entry in ds.attrs["audit"].items()}
    if target is not None and unfinished is not None:
        try:
            save(ds, target)
        except StoreError as failure:
            unfinished.close(finished=False)
            failure.dataset = ds  # type: ignore[attr-defined]  # hours of work must not be lost to a full disk
            raise
        unfinished.close(finished=True)
    return ds


def _finished(path: Path, settings: dict[str, Any], layers: Sequence[int] | None) -> xr.Dataset:
    """A run that was finished before, if it is the one that is asked for."""
    ds = load_run(path)
    stored = {key: ds.attrs[key] for key in settings} | {"layers": ds["layer"].values.tolist()}
    if {*stored["bounds"], *ds.attrs.get("not_applicable", ())} == {*settings["bounds"]}:
        stored["bounds"] = settings["bounds"]
    asked = settings | {"layers": stored["layers"] if layers is None else sorted(dict.fromkeys(layers))}
    stored["layers"] = sorted(stored["layers"])
    same_configuration(path, stored, asked)
    return ds
