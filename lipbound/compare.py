"""The main job: exact norm and every bound of every head of a checkpoint, as one labelled Dataset."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

from lipbound.attention import VARIANTS
from lipbound.bounds import get
from lipbound.bounds import names as bound_names
from lipbound.bounds.auditing import audit
from lipbound.bounds.multihead import names_for
from lipbound.checkpoints import load
from lipbound.checksums import checksums, settings_checksum
from lipbound.dataset import allocate, dataset, provenance, versions
from lipbound.devices import name_of, resolve
from lipbound.errors import LipboundError, StoreError, UnknownNameError, nearest
from lipbound.inputs import prepare
from lipbound.measuring import Job, Looked, Measured, Measurer, Recipe, work
from lipbound.memory import available
from lipbound.norms import MAPS, WHOLE
from lipbound.store import check_target, save
from lipbound.store import load as load_run
from lipbound.unfinished import Unfinished, partial, same_configuration, stored_block

BLOCK_BYTES = 1.5e9
"""Working memory on a CPU, unless asked otherwise."""
BYTES_PER_SCORE = 80
"""Bytes of working memory per entry of the attention matrices (P and its temporaries, some in float64)."""
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


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
            `lipbound.checkpoints.load`), or a loaded transformers model.
        data: None for a default of the model's modality, or anything `lipbound.inputs.prepare` takes.
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
        (see `lipbound.norms.rounding`), one variable per bound under its registry name and ``<name>_sound`` (whether its assumptions held),
        ``exact_l2`` where a bound is about L2 attention. Bounds of "default" and "all" that say nothing about a layer of the model are left out;
        attrs["not_applicable"] tells why. Values are natural, not logarithms. attrs carry provenance and, in ``audit``, how
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
    where = resolve(device)
    budget = _bytes(memory, where)
    finished = resume and out is not None and Path(out).expanduser().exists()
    target = None if out is None else Path(out).expanduser() if finished else check_target(out)
    checkpoint = load(model, revision=revision, dtype=dtype, device=where, weights=weights)
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

    job = Job(tuple(names), map, tol, None, seed, exact_count)
    captured = Measurer(checkpoint.model, layers, job).look(inputs.block(0, 1, where))
    variants = frozenset().union(*(layer.variants for layer in captured))
    names, silent = _about(names, variants, everything=bounds in ("default", "all"))
    job = replace(job, names=tuple(names))
    tables = allocate(names, count, captured, certify=delta is not None, map=map)
    if delta is not None:
        job = replace(job, delta=delta / (exact_count * tables["exact"][0].size))
    block = _block_size(captured, count, budget, 1 if client is None else 4 * max(1, len(client.ncores())))
    unfinished = None
    if target is not None:
        config = settings | {"layers": [layer.index for layer in captured], "device": device if client else where, "versions": versions()}
        path = partial(target)
        block = stored_block(path, default=block) if resume else block
        unfinished = Unfinished(target, config | {"block": block}, tables, block, resume=resume)
    done = np.zeros((-(-count // block), len(captured)), dtype=bool) if unfinished is None else unfinished.done
    todo = [(b, frozenset(np.flatnonzero(done[b]).tolist())) for b in range(len(done)) if not done[b].all()]
    blocks = [(inputs.block(b * block, min(count, (b + 1) * block), "cpu"), b * block, skip) for b, skip in todo]
    if client is None:
        measurer = Measurer(checkpoint.model, layers, job)
        results: Iterator[tuple[int, Measured]] = (
            (start, m) for x, start, skip in blocks for m in measurer.block({k: t.to(where) for k, t in x.items()}, start, skip)
        )
    else:
        chosen = None if layers is None else tuple(layers)
        results = distribute(client, Recipe(str(model), revision, checkpoint.revision, dtype, device, chosen, job, weights), blocks)
    with _bar(progress, f"{checkpoint.name}: layers", count * len(captured)) as advance:
        advance(int(sum(min(block, count - b * block) * row.sum() for b, row in enumerate(done))))
        lengths, error = _fill(tables, results, unfinished, advance)
    ds = dataset(tables, names, captured, lengths)
    if map in WHOLE:
        ds = ds.isel(head=0, drop=True)
    named = data is None or isinstance(data, (str, Path))
    source = {
        "model": None if isinstance(model, PreTrainedModel) else _absolute(model),
        "data": False if not named else None if data is None else _absolute(data), "split": split, "column": column, "max_length": max_length,
    }  # fmt: skip
    settled = {"names": names, "map": map, "tol": tol, "delta": delta, "device": name_of(where), "dtype": dtype, "seed": seed, "source": source}
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


def _about(names: list[str], variants: frozenset[str], *, everything: bool) -> tuple[list[str], dict[str, str]]:
    """The bounds that say something about layers with these variants, and what the others do not cover.

    Raises:
        LipboundError: when one of the others was asked for by name.
    """
    silent = {}
    for name in names:
        if other := [VARIANTS[v] for v in VARIANTS if v in variants - get(name).covers]:
            silent[name] = "does not cover " + " and ".join(other)
    if silent and not everything:
        name, why = next(iter(silent.items()))
        fitting = [n for n in bound_names() if variants <= get(n).covers]
        raise LipboundError(f"bound {name!r} {why}, which this model has; leave it out, or take bounds='default' or some of {', '.join(fitting)}")
    return [name for name in names if name not in silent], silent


def _absolute(name: str | Path) -> str:
    """A path that is there in full, so that it leads to the same files from elsewhere; any other name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else str(name)


def _fill(
    tables: dict[str, np.ndarray], results: Iterator[tuple[int, Measured]], unfinished: Unfinished | None, advance: Callable[[int], None]
) -> tuple[np.ndarray, float]:
    """Put results where they belong, in the tables and in the unfinished run; lengths of all samples, and the largest error of their captures."""
    lengths, error = np.zeros(len(tables["exact"]), dtype=np.int64), 0.0
    try:
        for start, measured in results:
            if unfinished is not None:
                unfinished.write(start, measured)
            for name, value in measured.values.items():
                tables[name][start : start + len(value), measured.layer, : value.shape[1]] = value
            lengths[start : start + len(measured.lengths)] = measured.lengths
            error = max(error, measured.error)
            advance(len(measured.lengths))
        return (lengths, error) if unfinished is None else unfinished.read(tables)
    except BaseException:
        if unfinished is not None:
            unfinished.close(finished=False)
        raise


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


def distribute(client: Any, recipe: Recipe, blocks: list[tuple[dict[str, Tensor], int, frozenset[int]]]) -> Iterator[tuple[int, Measured]]:
    """Blocks measured by the workers of a dask.distributed client, in the order in which they end; this process alone writes what they return.

    Blocks of a worker that dies go to another (dask's own rule: three deaths on one block and it is given up).
    """
    from dask.distributed import KilledWorker, as_completed

    futures = {client.submit(work, recipe, x, start, skip, pure=False): start for x, start, skip in blocks}
    try:
        for future in as_completed(futures):
            for measured in future.result():
                yield futures[future], measured
            future.release()
    except KilledWorker as error:
        raise LipboundError(f"workers of the cluster died again and again ({error.args[0]}); give them more memory, or a smaller memory=") from error
    finally:
        client.cancel(list(futures))


def _block_size(captured: list[Looked], count: int, budget: float, parts: int) -> int:
    """How many samples to take at a time: as many as memory allows, and few enough to make so many parts."""
    scores = max(layer.heads * layer.tokens**2 for layer in captured)
    return max(1, min(int(budget // (BYTES_PER_SCORE * scores)), -(-count // parts)))


def _bytes(memory: str | float, device: str) -> float:
    """Bytes that ``memory`` means."""
    if memory == "auto":
        return min(BLOCK_BYTES, available(torch.device("cpu")) / 4) if device == "cpu" else available(torch.device(device)) / 4
    if isinstance(memory, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([kMGT]?)i?B?", memory.strip())
        memory = float(match[1]) * UNITS[match[2]] if match else -1.0
    if not memory > 0:
        raise LipboundError(f"memory is {memory!r}; give bytes, a size such as '4GB', or 'auto'")
    return memory


@contextmanager
def _bar(show: bool, title: str, total: int) -> Iterator[Any]:
    """A progress bar over samples x layers; yields ``advance(layers)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(show_speed=True))
    console = Console(stderr=True)
    silent = not (show and (console.is_terminal or console.is_jupyter))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, disable=silent) as bar:
        task = bar.add_task(title, total=total)
        yield lambda layers: bar.update(task, advance=layers)
