"""The main job: exact norm and every bound of every head of a checkpoint, as one labelled Dataset."""

import hashlib
import importlib.metadata
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from lipbound.attention import Attention
from lipbound.bounds import get
from lipbound.bounds.auditing import audit
from lipbound.bounds.multihead import names_for, whole_layer
from lipbound.capture import Capturer, LayerCapture
from lipbound.checkpoints import Checkpoint, load
from lipbound.errors import LipboundError, StoreError, UnknownNameError, nearest
from lipbound.inputs import Inputs, prepare
from lipbound.norms import MAPS, WHOLE, l2_spectral_norm, rounding, spectral_norm
from lipbound.store import check_target, save

BLOCK_BYTES = 1.5e9
"""Working memory that decides how many samples are taken at a time."""
BYTES_PER_SCORE = 80
"""Bytes of working memory per entry of the attention matrices (P and its temporaries, some in float64)."""


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
    progress: bool = True,
) -> xr.Dataset:
    """Exact local Lipschitz constant and upper bounds of every attention head of a checkpoint.

    Args:
        model: hub id ("google/vit-base-patch16-224", "name@revision"), directory, "builtin:minilm" | "builtin:gpt2" | "builtin:vit", or a
            loaded transformers model.
        data: None for a default of the model's modality, or anything `lipbound.inputs.prepare` takes.
        bounds: names of bounds, "default" (every published bound and the cheap ones of ours) or "all" (costly ones too; see `lipbound.bounds.names`).
        map: "head" (no output projection), "head_out" (with the head's slice of it; bounds then have ||W_V W_O|| for ||W_V||), "heads" (all heads
            of a layer side by side) or "layer" (with the output projection; bounds on heads are put together by `lipbound.bounds.whole_layer`).
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
        out: where to save the run, a Zarr store that must not exist yet.
        progress: show a progress bar on standard error, where that is a terminal or a notebook.

    Returns:
        Dataset with dims (sample, layer, head), or (sample, layer) for the maps "heads" and "layer": ``exact`` (lower end), ``exact_upper``,
        ``exact_steps``, ``exact_converged``, ``exact_rounding``
        (see `lipbound.norms.rounding`), one variable per bound under its registry name and ``<name>_sound`` (whether its assumptions held),
        ``exact_l2`` where a bound is about L2 attention. Values are natural, not logarithms. attrs carry provenance and, in ``audit``, how
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
    target = None if out is None else check_target(out)
    where = _device(device)
    checkpoint = load(model, revision=revision, dtype=dtype, device=where)
    inputs = prepare(checkpoint, data, samples=samples, max_length=max_length, split=split, column=column)
    count = inputs.samples
    exact_count = count if exact_samples is None else min(exact_samples, count)

    capturer = Capturer(checkpoint.model, layers)
    tables: dict[str, np.ndarray] = {}
    lengths = np.zeros(count, dtype=np.int64)
    captured: list[LayerCapture] = []
    error = 0.0
    with _bar(progress, f"{checkpoint.name}: layers", count) as advance:
        stop = 0
        while stop < count:
            start, stop = stop, min(count, stop + _block_size(captured))
            captured = capturer.run(inputs.block(start, stop, where))
            if not tables:
                tables = _allocate(names, count, captured, delta is not None, map)
            lengths[start:stop] = captured[0].attention.lengths.long().cpu().numpy()
            for i, layer in enumerate(captured):
                error = max(error, layer.error)
                seeds = [_seed(seed, layer.index, s) for s in range(start, stop)]
                attention = layer.attention.fold_output()[0] if map == "head_out" else layer.attention
                norms = 1 if map in WHOLE else attention.heads
                share = None if delta is None else delta * norms / (exact_count * tables["exact"][0].size)
                values = _measure(attention, names, map, tol, share, seeds, exact_count - start)
                for name, value in values.items():
                    tables[name][start : start + len(value), i, : value.shape[1]] = value
                layer.attention = layer.attention.select(slice(0, 1))  # frees P and what hangs on it
                advance(stop - start, len(captured))
    ds = _dataset(tables, names, captured, lengths)
    if map in WHOLE:
        ds = ds.isel(head=0, drop=True)
    ds.attrs = _provenance(checkpoint, inputs, captured, names=names, map=map, tol=tol, delta=delta, device=where, dtype=dtype, seed=seed) | {
        "samples": count, "exact_samples": exact_count, "tokens": int(lengths.max()), "capture_error": error,
    }  # fmt: skip
    ds.attrs["audit"] = audit(ds)
    ds.attrs["violations"] = {name: entry["violations"] for name, entry in ds.attrs["audit"].items()}
    if target is not None:
        try:
            save(ds, target)
        except StoreError as failure:
            failure.dataset = ds  # type: ignore[attr-defined]  # hours of work must not be lost to a full disk
            raise
    return ds


def _measure(
    att: Attention, names: list[str], map: str, tol: float, delta: float | None, seeds: list[int], exact_count: int
) -> dict[str, np.ndarray]:
    """Everything about one layer at one block of samples, (samples, heads) each; exact norms for the first ``exact_count`` samples.

    ``delta``: failure probability allowed for the upper ends of one sample. A whole layer counts as one head.
    """
    values: dict[str, Any] = {}
    whole = map in WHOLE
    for name in names:
        sound = get(name).sound(att)
        values[name] = whole_layer(att, name, map=map) if whole else get(name)(att)
        values[f"{name}_sound"] = sound.all(-1) if whole else sound
    values["exact_rounding"] = rounding(att, map="head" if map == "head_out" else map)
    exact_count = min(exact_count, att.samples)
    if exact_count > 0:
        part = att if exact_count == att.samples else att.select(slice(0, exact_count))
        share = None if delta is None else delta * exact_count
        norm = spectral_norm(part, map="head" if map == "head_out" else map, tol=tol, delta=share, seed=seeds[:exact_count])
        values |= {"exact": norm.lower, "exact_steps": norm.steps, "exact_converged": norm.converged}
        if delta is not None:
            values["exact_upper"] = norm.upper
        if any(get(name).exact == "exact_l2" for name in names):
            values["exact_l2"] = l2_spectral_norm(part, tol=tol, seed=seeds[:exact_count]).lower
    return {name: value.reshape(len(value), -1).cpu().numpy() for name, value in values.items()}


def _allocate(names: list[str], count: int, captured: list[LayerCapture], certify: bool, map: str) -> dict[str, np.ndarray]:
    heads = 1 if map in WHOLE else max(layer.attention.heads for layer in captured)
    shape = (count, len(captured), heads)
    tables: dict[str, np.ndarray] = {name: np.full(shape, np.nan) for name in ("exact", *(["exact_upper"] if certify else []), *names)}
    if any(get(name).exact == "exact_l2" for name in names):
        tables["exact_l2"] = np.full(shape, np.nan)
    tables["exact_rounding"] = np.full(shape, np.nan)
    tables["exact_steps"] = np.zeros(shape, dtype=np.int32)
    tables["exact_converged"] = np.zeros(shape, dtype=bool)
    tables |= {f"{name}_sound": np.zeros(shape, dtype=bool) for name in names}
    return tables


def _block_size(captured: list[LayerCapture]) -> int:
    """How many samples to take at a time: one at first, to learn the shapes, then as many as memory allows."""
    if not captured:
        return 1
    scores = max(layer.attention.heads * layer.attention.tokens**2 for layer in captured)
    return max(1, int(BLOCK_BYTES // (BYTES_PER_SCORE * scores)))


def _seed(seed: int, layer: int, sample: int) -> int:
    """Seeds that differ by layer and sample, and do not depend on how samples are grouped into blocks."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{layer}/{sample}".encode()).digest()[:6], "big")


def _dataset(tables: dict[str, np.ndarray], names: list[str], captured: list[LayerCapture], lengths: np.ndarray) -> xr.Dataset:
    dims = ("sample", "layer", "head")
    first = [name for name in ("exact", "exact_upper", "exact_l2", *names) if name in tables]
    order = first + [name for name in tables if name not in first]
    ds = xr.Dataset({name: (dims, tables[name]) for name in order})
    ds = ds.assign_coords(
        sample=np.arange(len(lengths)), layer=[layer.index for layer in captured], head=np.arange(ds.sizes["head"]),
        layer_name=("layer", np.array([layer.name for layer in captured], dtype=object)), length=("sample", lengths),
    )  # fmt: skip
    ds["exact"].attrs = {"label": "Exact", "long_name": "local Lipschitz constant (spectral norm of the Jacobian), lower end"}
    if "exact_upper" in ds:
        ds["exact_upper"].attrs = {"label": "Exact, upper end", "long_name": "probabilistic upper bound on the local Lipschitz constant"}
    if "exact_l2" in ds:
        ds["exact_l2"].attrs = {"label": "Exact, L2 attention", "long_name": "the same for L2 attention with these weights (Kim et al. 2021)"}
    for name in names:
        bound = get(name)
        ds[name].attrs = {
            "label": bound.label, "citation": bound.citation, "statement": bound.statement, "source": bound.source,
            "assumptions": bound.assumptions, "compared_with": bound.exact,
        }  # fmt: skip
    return ds


def _provenance(checkpoint: Checkpoint, inputs: Inputs, captured: list[LayerCapture], **settings: Any) -> dict[str, Any]:
    packages = ("lipbound", "torch", "transformers", "numpy", "scipy", "xarray", "tokenizers", "datasets")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "lipbound": versions["lipbound"],
        "model": checkpoint.name,
        "revision": checkpoint.revision,
        "architecture": type(checkpoint.model).__name__,
        "data": inputs.description,
        "data_fingerprint": inputs.fingerprint,
        "bounds": settings["names"],
        "map": settings["map"],
        "map_description": MAPS[settings["map"]],
        "method": "lanczos",
        "tol": settings["tol"],
        "delta": settings["delta"],
        "dtype": settings["dtype"],
        "device": _device_name(settings["device"]),
        "seed": settings["seed"],
        "versions": versions,
        "python": sys.version.split()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LipboundError(f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); try 'cpu' or 'auto'") from error
    return device


def _device_name(device: str) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device


@contextmanager
def _bar(show: bool, title: str, count: int) -> Iterator[Any]:
    """A progress bar over samples x layers; yields ``advance(samples, layers per sample)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(show_speed=True))
    console = Console(stderr=True)
    silent = not (show and (console.is_terminal or console.is_jupyter))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, disable=silent) as bar:
        task = bar.add_task(title, total=None)

        def advance(samples: int, layers: int) -> None:
            bar.update(task, advance=samples, total=count * layers)

        yield advance
