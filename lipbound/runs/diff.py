"""Two runs, or two checkpoints measured on the same inputs, head by head: before and after."""

import tempfile
import warnings
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import xarray as xr

from lipbound.devices import resolve_device
from lipbound.errors import LipboundError, Notice, StoreError, choice, tell
from lipbound.models.checkpoint import Inputs
from lipbound.runs.compare import norms_shape, open_sources, run
from lipbound.runs.config import RunConfig, check_run_name
from lipbound.runs.measure import layers_at
from lipbound.runs.store import check_target, paired, refuse_inputs, refuse_unlike, run_of, save

OF_B = ("revision", "gguf_file", "adapter")
"""Options that are of the second checkpoint alone."""
_OPTIONS = {one.name for one in fields(RunConfig)} - {"model", "data", "out"}
"""All options of a diff of two checkpoints."""


def diff(
    a: Any, b: Any, data: Any = None, *, out: str | Path | None = None, **options: Any
) -> xr.Dataset:
    """Set two runs side by side, or measure two checkpoints on the same inputs and do so.

    Before and after fine-tuning, an adapter, quantisation, another training step. For every sample,
    layer and head there are both exact norms and their ratio b / a; `lipbound.tables.render`,
    `lipbound.plots.heatmaps`, `lipbound.report` and `lipbound.save` take what is returned.

    Args:
        a: a run of `lipbound.compare` or its path; or a checkpoint, as `lipbound.compare` takes it.
        b: another of the same kind.
        data: of two checkpoints: what both are measured on.
        out: where to save the diff, a Zarr store that must not exist yet. Runs of two checkpoints
            are saved beside it: ``diff.zarr`` has ``diff-a.zarr`` and ``diff-b.zarr``.
        options: of two checkpoints: other options of `lipbound.compare`, for both: ``resume`` takes
            up unfinished runs, and keeps finished ones; but ``revision``, ``gguf_file`` and
            ``adapter`` are of b alone ("name@revision" names another one of a).

    Returns:
        Dataset with dims (sample, layer, head), or (sample, layer) for maps of whole layers:
        ``exact_a``, ``exact_b`` and every other variable of both runs under such names; ``ratio``,
        ``exact_b / exact_a``; and, where both runs have upper ends, ``ratio_lower`` and
        ``ratio_upper``, which enclose the ratio of the norms.
        `lipbound.runs.store.both_runs` returns the two runs.

    Raises:
        StoreError: the runs are of other maps, norms, inputs (samples, tokens, pixels), layers or
            heads, or not as they were computed.
        LipboundError: a run and a checkpoint, options for two runs, an unknown option, and whatever
            `lipbound.compare` raises.
    """
    for name in options:
        choice("option of a diff", name, _OPTIONS)
    stored = [_is_run(one) for one in (a, b)]
    check_run_name(out)
    target = None if out is None else check_target(Path(out).expanduser())
    if any(stored):
        if not all(stored):
            raise LipboundError("of a and b one is a run, one a checkpoint; give two of a kind")
        given = {"data": data} | options
        given |= {"progress": None, "resume": options.get("resume") or None}
        if others := [name for name, value in given.items() if value is not None]:
            raise LipboundError(f"a and b are runs, measured already; leave out {others[0]}")
        runs = [run_of(a), run_of(b)]
    else:
        both = {name: value for name, value in options.items() if name not in OF_B}
        configs = []
        for model, side, given in ((a, "a", both), (b, "b", options)):
            beside = target and target.with_name(f"{target.stem}-{side}{target.suffix}")
            if beside is not None and not options.get("resume"):
                check_target(beside)
            configs.append(RunConfig(model, data, **given, out=beside))
        runs = _measured(configs)
    ds = paired(*runs)
    tell(*ds.attrs["notes"])
    if target is not None:
        save(ds, target)
    return ds


def _is_run(given: Any) -> bool:
    """True for a Dataset, and for the path of a stored run or of what is called like one."""
    if isinstance(given, str | Path):
        path = Path(given).expanduser()
        with suppress(OSError):
            return path.suffix in (".zarr", ".nc") or (path / "exact").is_dir()
    return isinstance(given, xr.Dataset)


def _looked_at(config: RunConfig) -> tuple[Inputs, dict[str, list[Any]]]:
    """Inputs of a run, and coordinates of its layers as the first sample shows them."""
    sources = open_sources(config, resolve_device(config.device))
    layers = layers_at(sources.capturer, sources.inputs.block(0, 1, sources.device), config)
    words = {"layer": "index", "kind": "kind", "stream": "stream"}
    layout = {name: [getattr(one, word) for one in layers] for name, word in words.items()}
    return sources.inputs, layout | {"head": [*range(norms_shape(layers, config.map)[1])]}


def _measured(configs: list[RunConfig]) -> list[xr.Dataset]:
    """Measure two checkpoints; what they are measured on, and their layers, are compared before.

    Raises:
        StoreError: the same data become other inputs of the one than of the other, or they have
            other numbers of layers or heads, or layers of other kinds.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)  # they are told when the runs are made
        (a, of_a), (b, of_b) = map(_looked_at, configs)
    refuse_inputs(a.fingerprint == b.fingerprint, a.description, b.description)
    refuse_unlike(of_a, of_b)
    runs = [run(configs[0])]
    try:
        runs.append(run(configs[1]))
    except Exception:
        if configs[0].target is None:  # a is finished work
            with suppress(StoreError, OSError):
                refuge = Path(tempfile.mkdtemp(prefix="lipbound-")) / "a.zarr"
                tell(f"the run of a was finished, and is saved to {save(runs[0], refuge)}")
        raise
    return runs
