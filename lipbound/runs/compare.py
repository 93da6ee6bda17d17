"""Exact norm and every bound of every head of a checkpoint, as one labelled Dataset.

Or numbers of the weights of every head alone, without data.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from lipbound import devices, schema
from lipbound.attention.variants import titles
from lipbound.bounds import registry
from lipbound.errors import CheckpointError, LipboundError, indices, tell
from lipbound.jacobians.maps import WHOLE, map_words
from lipbound.models import weight_files
from lipbound.models.capture.verification import most_padded
from lipbound.models.checkpoint import AnyModel, Inputs, LoadOptions, in_training
from lipbound.models.head_weights import head_weights
from lipbound.models.inputs import prepare
from lipbound.models.loading import Checkpoint, load_checkpoint, load_named
from lipbound.runs import measure, store
from lipbound.runs.checksums import OF_BOUND, sealed
from lipbound.runs.config import LEAST_MEMORY, LOADING, READING, RunConfig, from_options
from lipbound.runs.head_extras import of_weights
from lipbound.runs.measure import LayerInfo, SampleBlock, Sources
from lipbound.runs.store import LayerResult, PartialRun
from lipbound.signs import Signs

OF_CHECKPOINT = ("revision", "loaded", "commit", "quantization", "configuration")
"""What a run says about its checkpoint, under the same names."""
_ALSO = ("architecture", "configuration", "samples", "exact_samples", "bounds", "extras", "tau")
DECIDING = ("model", *schema.IDENTITY, *_ALSO)
"""Attributes that decide what the numbers of a run are, and of what."""


LABELS = {
    "exact": ("Exact", "local Lipschitz constant ({norm} norm of the Jacobian), lower end"),
    "exact_upper": ("Exact, upper end", "local Lipschitz constant, upper end"),
    "exact_l2": ("Exact, L2 attention", "the same for L2 attention (Kim et al. 2021)"),
    "jacobian_frobenius": ("Frobenius norm", "Frobenius norm of the Jacobian"),
    "jacobian_condition": ("Condition number", "condition number of the Jacobian"),
    "kappa_softmax": ("kappa_softmax", "condition number of the softmax"),
    "chi_score": ("chi_score", "condition number of scores from queries and keys"),
    "kappa_val": ("kappa_val", "condition number of averages of values"),
    "rho_ln": ("rho_LN", "indicator of the LayerNorm in front, in bfloat16"),
    "largest_logit": ("Largest logit", "largest score of a query and a key before the softmax"),
    "entropy": ("Entropy", "entropy of the attention of a query, mean over queries (nats)"),
    "first_token": ("First token", "attention on the first token, mean over queries"),
    "wqk_norm": ("Norm of W_Q W_K^T", "norm of W_Q W_K^T times the factor of the scores"),
    "wqk_stable_rank": ("Stable rank of W_Q W_K^T", "stable rank of W_Q W_K^T"),
    "wov_norm": ("Norm of W_V W_O", "norm of W_V W_O"),
    "wov_stable_rank": ("Stable rank of W_V W_O", "stable rank of W_V W_O"),
    "batch_logit": ("Largest logit of the batch", "largest score in the batch of the training"),
    "row_norm": ("Largest row norm", "largest norm of a row's softmax Jacobian"),
    "qk_clip": ("QK-clip factor", "QK-clip factor min(1, {tau:g} / largest logit)"),
}
"""Labels and long names of exact norms, and of what attention itself is."""
SOURCES = {
    "wqk_norm": "Zhai et al. 2023, Theorem 3.1",
    "wov_norm": "the OV circuit of Elhage et al. 2021",
    **dict.fromkeys(schema.OF_WEIGHTS[1::2], "Rudelson and Vershynin 2007"),
    "row_norm": "the factor of Theorem 3 of Yudin et al. 2025",
    "largest_logit": "Dehghani et al. 2023",
    **dict.fromkeys(("qk_clip", "batch_logit"), "Kimi Team 2025, section 2.1"),
    **dict.fromkeys(schema.CONDITIONING, "Baek 2026"),
}
"""Where extras of heads come from."""


EMPTY: dict[str, Any] = {"f": np.nan, "i": np.int32(0), "b": False}
"""Values of a run's tables at places that were not measured, by the kind of their dtype."""
WORKING_MEMORY = 1.5e9
"""Working memory on a CPU, unless asked otherwise."""
OF_INPUT = "is of heads as functions of their input"
"""Why bounds say nothing where keys, values or queries move alone."""


@devices.in_own_modes
@from_options(RunConfig)
def compare(config: RunConfig) -> xr.Dataset:
    """Measure every attention head of a checkpoint, and set every bound beside it.

    Args:
        model: hub id ("google/vit-base-patch16-224", "name@revision"), directory, GGUF file,
            "builtin:NAME" (minilm, smollm2, gpt2, llama, vit, ...; see
            `lipbound.models.loading.load_checkpoint`), a loaded transformers model, any torch
            module, or a list of `lipbound.Attention`, which bring their inputs.
        data: None for a default of the model's modality, or anything
            `lipbound.models.inputs.prepare` takes.
        inputs: ready inputs of the model's forward, in place of ``data``: a tensor, several, or a
            dict of named ones.
        bounds: names of bounds (see `lipbound.bounds.names`), "default" or "all" (every bound of
            the norm), or "none" for exact norms alone.
        extras: where there are exact norms, in the Frobenius norm of inputs: "frobenius"
            (``jacobian_frobenius``, see `lipbound.frobenius_norm`), "condition"
            (``jacobian_condition``, see `lipbound.condition_number`; up to 1,024 outputs, N d_v of
            a head), and "kappa_softmax", "chi_score", "kappa_val" and "rho_ln", condition numbers
            in low precision (`lipbound.attention.conditioning`). NaN for what is too large, hidden
            by rounding or not there, which a `lipbound.errors.Notice` and attrs["notes"] tell.
            Of every head, whatever the norm, at all samples: `lipbound.schema.OF_HEADS`, which
            `lipbound.runs.head_extras.of_heads` defines.
        tau: the largest logit that QK-clip allows, such as 100; of the extra "qk_clip" alone.
        map: "head" (no output projection), "head_out" (with the head's slice of it; bounds then
            have ||W_V W_O|| for ||W_V||), "heads" (all heads of a layer side by side), "layer"
            (with the output projection; bounds on heads are put together by
            `lipbound.bounds.whole_layer`), or the layer with its residual connection, "residual",
            and layer normalisation, "pre_norm" or "post_norm" (see `lipbound.spectral_norm`).
        norm: "frobenius" (all tokens move, by 1 together), "every-token" (every token moves by at
            most 1, and the output token that moves furthest counts) or "one-token" (one token alone
            moves). The latter two are those of `lipbound.token_norm`, both ends deterministic, for
            the maps "head", "head_out", "heads" and "layer"; bounds are those stated in the norm.
        wrt: what heads are functions of, all else held: "input" (the tokens), or "keys", "values"
            or "queries" alone, as in `lipbound.spectral_norm`. Frobenius norm of the maps "head"
            and "head_out", without bounds, which are stated for functions of the input.
        samples: how many samples of the data, or "all"; all where it has fewer, which a
            `lipbound.errors.Notice` and attrs["notes"] tell.
        exact_samples: compute exact norms on the first so many samples only (bounds on all).
        max_length: tokens per text.
        layers: indices of attention layers, one, several, or text such as "0-3,7"; all by default.
        split: of a dataset.
        column: of a dataset that holds the text or image.
        revision: of a hub model.
        tol: relative width of the enclosure of exact norms, ``exact_upper / exact - 1``.
        delta: probability that any ``exact_upper`` of the run fails (see `lipbound.spectral_norm`);
            None for lower ends alone, which take two fifths of the time. Frobenius norm only:
            the others take neither delta nor seed.
        device: "auto" (CUDA where there is one), or a torch device.
        dtype: "float32" or "float64", or torch's.
        seed: of the start vectors of exact norms. The same seed gives the same numbers on one
            machine with one number of threads.
        out: where to save the run, a Zarr store that must not exist yet. Finished blocks are kept
            beside it meanwhile, in ``<out>.partial``.
        resume: take up the unfinished run of ``out`` where it stopped, or return a finished one as
            it is; the result is that of an uninterrupted run.
        memory: working memory that decides how many samples are taken at a time: bytes, "4GB", or
            "auto".
        weights: "whole" (in memory), "layers" (read layer by layer from files), or "auto".
        gguf_file: which GGUF file of a directory or of a hub model; attrs["quantization"] says how
            its weights are stored.
        shuffle: a seed, with which samples are drawn from all of the data; None for the first ones.
        tokenizer: directory or hub id of a tokenizer, in place of the checkpoint's own.
        processor: directory or hub id of an image processor, in place of the checkpoint's own.
        adapter: directory or hub id of a LoRA adapter to merge; "none": not even one beside them.
        client: a ``dask.distributed`` client, with one thread per worker, whose workers load
            ``model`` by its name and measure blocks of samples.
        progress: say on standard error what is being done: by a bar, or a line every 5 seconds.

    Returns:
        Dataset with dims (sample, layer, head), or (sample, layer) for maps of whole layers:
        ``exact`` (lower end), ``exact_upper``, ``exact_steps``, ``exact_converged``, one variable
        per bound under its registry name and ``<name>_sound`` (whether its assumptions held),
        ``exact_l2`` where a bound is about L2 attention, and the ``extras``. Bounds of "default"
        and "all" that say nothing about a layer of the model are left out, as
        attrs["not_applicable"] says; attrs["audit"], how often each fell below the exact norm.

    Raises:
        LipboundError: see its subclasses; nothing is computed when the output cannot be written.
    """
    return run(config)


@devices.in_own_modes
def run(config: RunConfig) -> xr.Dataset:
    """Compute a run: open, plan, execute, assemble, save."""
    if schema.BATCH_LOGIT in (config.extras or ()):
        raise LipboundError("the extra 'batch_logit' is of a training, and lb.Monitor alone has it")
    client = config.client
    device = devices.resolve_device(config.device)
    memory = memory_bytes(config.memory, device)
    target = config.target
    finished = target if config.resume and target is not None and target.exists() else None
    block = None
    if target is not None and finished is None:
        block = store.check_free(target, resume=config.resume)
    parts = 1 if client is None else 4 * max(1, len(client.ncores()))  # keeps all workers busy
    where = device if client is None else str(config.device)  # "auto" may be several on workers
    with ExitStack() as opened:
        signs = opened.enter_context(Signs("loading model and data", show=config.progress))
        sources = open_sources(config, device)
        signs.say(f"{sources.checkpoint.name}: looking at its layers")
        planned = plan(config, sources, memory, parts, block)
        spec, layers = planned.spec, planned.coords["layer"]
        asked = deciding(run_info(config, sources, planned).attributes(), layers)
        if finished is not None:
            ds = store.load(finished, damaged="refuse")
            store.same_configuration(finished, deciding_of(ds), asked)
            return ds
        asked |= {"device": where, "versions": devices.versions(), "block": planned.block}
        kept = None if target is None else opened.enter_context(PartialRun(target, asked))
        signs.say(f"{sources.checkpoint.name}: layers", planned.samples * len(layers))
        blocks = planned.blocks(() if kept is None else kept.found)
        if client is None:
            results = measure.Measurer(sources.capturer, spec, planned.room).each(sources, blocks)
        else:
            results = measure.measured_by(sources, spec, blocks)
        if kept is not None:
            results = kept.keeping(results)
        ds, error = dataset(planned, results, signs.advance)
        signs.quit()
        _tell_of_missing(config, sources, ds)
        ds = sealed(ds, run_info(config, sources, planned, error))
        if target is not None:
            store.save(ds, target)
    return ds


# -- decisions before anything is computed: sources, bounds that apply, blocks, shares of delta ---


def open_sources(config: RunConfig, device: str) -> Sources:
    """Load the model to a device and prepare the inputs.

    Raises:
        LipboundError: they cannot be found or used.
    """
    checkpoint = load_checkpoint(config.model, device=device, **config.options(*LOADING))
    inputs = open_inputs(config, checkpoint)
    if not devices.has_float64(device):
        what = "has no float64: the model runs there, and its heads are measured on the CPU"
        note(inputs, f"the device {device!r} {what}")
    return Sources(checkpoint, inputs, device, measure.capturer_of(checkpoint.model, config))


def note(inputs: Inputs, text: str) -> None:
    """Tell what is not as it was asked for, and keep it for the run's attributes."""
    inputs.notes.append(text)
    tell(text)


def open_inputs(config: RunConfig, checkpoint: Checkpoint) -> Inputs:
    """Prepare the inputs."""
    inputs = prepare(checkpoint, config.data, **config.options(*READING))
    if config.exact_samples is not None and config.exact_samples > inputs.samples:
        what = f"exact norms of {config.exact_samples} samples were asked for"
        note(inputs, f"{what}, and there are {inputs.samples}, which all get them")
    return inputs


@dataclass(frozen=True)
class Plan:
    """Work of a run.

    Attributes:
        spec: what is measured at every layer (`RunConfig.of_places`).
        layers: the chosen layers, as the first sample shows them.
        samples: how many samples.
        block: how many of them are measured at a time.
        room: how many memory has room for.
        not_applicable: bounds of "default" or "all" that say nothing about this model, and what
            they do not cover.
        model_layers: how many attention layers the model has, chosen or not.
    """

    spec: RunConfig
    layers: Sequence[LayerInfo]
    samples: int
    block: int
    room: int
    not_applicable: dict[str, str]
    model_layers: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tables: samples, layers, heads (1 for maps of whole layers)."""
        return (self.samples, *norms_shape(self.layers, self.spec.map))

    @property
    def coords(self) -> dict[str, Any]:
        """Numbers along the axes of the tables."""
        numbers = dict[str, Any](zip(schema.AXES, map(np.arange, self.shape), strict=True))
        return numbers | {"layer": [layer.index for layer in self.layers]}

    def blocks(self, found: Iterable[LayerResult]) -> list[SampleBlock]:
        """List the blocks with layers that are not found."""
        done = np.zeros((self.samples, len(self.layers)), dtype=bool)
        for one in found:
            done[one.start : one.start + len(one.lengths), one.layer] = True
        blocks: list[SampleBlock] = []
        for start in range(0, self.samples, self.block):
            stop = min(self.samples, start + self.block)
            skip = frozenset(np.flatnonzero(done[start:stop].all(0)).tolist())
            blocks += [(start, stop, skip)] * (len(skip) < len(self.layers))
        return blocks


def norms_shape(layers: Sequence[LayerInfo], map: str) -> tuple[int, int]:
    """Shape (layers, heads) of the exact norms of a sample, with the most heads of a layer."""
    return len(layers), 1 if map in WHOLE else max(layer.heads for layer in layers)


def plan(
    config: RunConfig, sources: Sources, memory: float, parts: int = 1, block: int | None = None
) -> Plan:
    """Look at the first sample, and plan the run.

    Args:
        config: of the run.
        sources: its model and inputs.
        memory: working memory in bytes.
        parts: at least so many blocks, where there are samples enough.
        block: samples at a time of an unfinished run; others would change last digits.

    Raises:
        LipboundError: a bound that was asked for by name does not apply to the model, or its
            attention cannot be captured.
    """
    samples = sources.inputs.samples
    layers = measure.layers_at(sources.capturer, sources.inputs.block(0, 1, sources.device), config)
    if (sample := most_padded(sources.inputs.batch)) is not None:
        sources.capturer.examine(sources.inputs.block(sample, sample + 1, sources.device))
    if config.layers and min(indices("layers", config.layers)) < 0:
        measured = ", ".join(str(one.index) for one in layers)
        note(sources.inputs, f"layers below zero count from the end: here {measured}")
    silent = silent_bounds(config, layers)
    names = [name for name in config.names if name not in silent]
    room = min(layer.memory.room(memory) for layer in layers)
    exact = config.exact_count(samples)
    spec = config.of_places(names, exact, norms_shape(layers, config.map))
    block = block or min(room, -(-samples // parts))
    return Plan(spec, layers, samples, block, room, silent, sources.capturer.count)


def all_variants(layers: Sequence[LayerInfo]) -> frozenset[str]:
    """Collect the variants that some layer has, of self-attention where there is any.

    Bounds that do not cover cross-attention say nothing of such layers beside others.
    """
    layers = [layer for layer in layers if layer.kind == "self"] or layers
    return frozenset().union(*(layer.variants for layer in layers))


def silent_bounds(config: RunConfig, layers: Sequence[LayerInfo]) -> dict[str, str]:
    """Say why bounds of a run say nothing about its layers, by their names.

    They are stated for functions of the input, do not cover variants, or inputs are too long.

    Raises:
        LipboundError: one of them was asked for by name.
    """
    if config.wrt != schema.INPUT:  # those asked for by name are refused before
        return dict.fromkeys(config.names, OF_INPUT)
    closed = [layer for layer in layers if layer.measured == schema.CLOSED_FORM]
    variants, silent = all_variants(closed), {}
    for name in config.names:
        bound = registry.get(name)
        said = (bound.too_long(one.tokens, one.heads, one.variants) for one in closed)
        if not closed:
            silent[name] = "does not cover layers without a closed form"
        elif other := variants - bound.covers:
            silent[name] = "does not cover " + titles(other)
        elif why := next(filter(None, said), None):
            silent[name] = why
    if silent and config.bounds not in ("default", "all"):
        name, why = next(iter(silent.items()))
        raise LipboundError(f"bound {name!r} {why}; leave it out, or take bounds='default'")
    return silent


def memory_bytes(memory: str | float, device: str) -> float:
    """Bytes that the ``memory`` of a configuration means."""
    if memory == "auto":
        quarter = devices.available(torch.device(device)) / 4
        return min(WORKING_MEMORY, quarter) if device == "cpu" else quarter
    if (size := float(memory)) < LEAST_MEMORY:
        tell(f"memory is {size:g} bytes, so samples are measured one at a time; write '4GB'")
    return size


# -- what is measured becomes a Dataset ------------------------------------------------------------


def dataset(
    plan: Plan, results: Iterable[LayerResult], advance: Callable[[int], None] = lambda count: None
) -> tuple[xr.Dataset, float]:
    """Put results where they belong, with names, coordinates and what each bound is.

    Args:
        plan: of the run.
        results: of layers at blocks of samples.
        advance: is told how many samples were measured.

    Returns:
        The variables, with NaN, 0 or False where nothing was measured, and the largest error of the
        captures.
    """
    spec, tables, error = plan.spec, dict[str, np.ndarray](), 0.0
    lengths = np.zeros(plan.samples, dtype=np.int64)
    for one in results:
        rows = slice(one.start, one.start + len(one.lengths))
        for name, value in one.values.items():
            if name not in tables:
                tables[name] = np.full(plan.shape, EMPTY[value.dtype.kind])
            tables[name][rows, one.layer][: len(value), : value.shape[1]] = value
        lengths[rows] = np.maximum(lengths[rows], one.lengths)  # streams may differ in length
        error = max(error, one.error)
        advance(len(one.lengths))
    order = (*LABELS, *spec.names, "exact_steps", "exact_converged", *map(schema.sound, spec.names))
    data = {name: (schema.AXES, tables[name]) for name in order if name in tables}
    ds = xr.Dataset(data, plan.coords | {"length": ("sample", lengths)})
    for word in schema.LAYER_WORDS:
        said = [getattr(layer, word) for layer in plan.layers]
        ds.coords[word] = "layer", np.array(said, dtype=object)
    kind = "spectral" if spec.norm == "frobenius" else spec.norm
    for name, (label, long_name) in LABELS.items():
        if name in ds:
            long_name = long_name.format(norm=kind, tau=spec.tau)
            ds[name].attrs = {"label": label, "long_name": long_name}
            if name in (spec.extras or ()):
                ds[name].attrs["source"] = SOURCES[name]
            elif spec.wrt != schema.INPUT:
                ds[name].attrs["long_name"] += f", as a function of {spec.wrt}"
    for name in spec.names:
        bound = registry.get(name)
        ds[name].attrs = {word: getattr(bound, word) for word in OF_BOUND}
        ds[name].attrs["compared_with"] = bound.exact
    return ds.isel(head=0, drop=True) if spec.map in WHOLE else ds, error


def _tell_of_missing(config: RunConfig, sources: Sources, ds: xr.Dataset) -> None:
    """Tell, and note, which extras some exact norms are without."""
    for name in map(schema.EXTRAS.__getitem__, config.extras or ()):
        without, there = int((ds[name].isnull() & ds["exact"].notnull()).sum()), ds["exact"].count()
        if without:
            why = "it has more than 1,024 outputs, several windows, or rounding hides it"
            if name in schema.OF_HEADS:
                why = "no closed form, cross-attention, no output projection, or rounding hides it"
            elif name in schema.CONDITIONING:
                why = "no closed form, sinks, or no LayerNorm in front of the layer that was found"
            what = f"{name} is missing at {without} of {int(there)} exact norms"
            note(sources.inputs, f"{what}: {why}")


def run_info(config: RunConfig, sources: Sources, plan: Plan, error: float = 0.0) -> schema.RunInfo:
    """Describe a run, whose captures have such an error at most."""
    checkpoint, inputs, packages = sources.checkpoint, sources.inputs, devices.versions()
    heads = None if config.map in WHOLE else plan.shape[2]
    numbers, exact = plan.coords["layer"], config.exact_count(plan.samples)
    return schema.RunInfo(
        lipbound=packages["lipbound"],
        model=checkpoint.name,
        **{name: getattr(checkpoint, name) for name in OF_CHECKPOINT},
        architecture=type(checkpoint.model).__name__,
        data=inputs.description,
        data_fingerprint=inputs.fingerprint,
        source=config.source,
        preprocessing=inputs.preprocessing,
        bounds=list(plan.spec.names),
        extras=list(config.extras or ()),
        map_description=map_words(config.map, config.wrt),
        **config.options("tau", "map", "norm", "wrt", "tol", "dtype", "delta", "seed"),
        method="lanczos",
        device=devices.device_name(sources.device),
        versions=packages,
        python=sys.version.split()[0],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        samples=plan.samples,
        exact_samples=exact,
        capture_error=error,
        block=plan.block,
        block_bytes=int(max(layer.memory.at(plan.block) for layer in plan.layers)) or None,
        variants=sorted(all_variants(plan.layers)),
        not_applicable=plan.not_applicable,
        notes=[*checkpoint.notes, *inputs.notes, *sources.capturer.notes],
        made=schema.Extent(plan.samples, exact, numbers, heads, plan.model_layers),
    )


def deciding(attrs: Mapping[str, Any], layers: Iterable[int]) -> dict[str, Any]:
    """Settings, in JSON's types, that a stored run must share to be the one that is asked for."""
    return {name: attrs.get(name) for name in DECIDING} | {"layers": sorted(layers)}


def deciding_of(ds: xr.Dataset) -> dict[str, Any]:
    """`deciding` of a stored run; a part of a run can be saved, too."""
    return deciding(ds.attrs | {"samples": ds.sizes["sample"]}, ds["layer"].values.tolist())


# -- a run of weights alone ------------------------------------------------------------------------


@devices.in_own_modes
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
    config = RunConfig(model, bounds="none", extras=schema.OF_WEIGHTS, out=out, dtype="float64")
    if config.target is not None:
        store.check_target(config.target)
    if isinstance(model, str | Path):
        options = LoadOptions(None, torch.float32, "cpu", "auto", lazy=True)
        checkpoint = load_named(model, options)
    else:
        checkpoint = in_training(model)
        if not checkpoint.model.training:
            checkpoint.revision = weight_files.state_sha256(checkpoint.model)
    layers, found = list[LayerInfo](), list[LayerResult]()
    for name, projections, scale in head_weights(checkpoint.model):
        if not all(bool(t.isfinite().all()) for t in projections):
            raise CheckpointError(f"weights of {name} in {checkpoint.name} are NaN or infinite")
        w_q, of_heads = projections[0], of_weights(projections, scale)
        values = {name: value[None].cpu().numpy() for name, value in of_heads.items()}
        values["exact"] = np.full((1, len(w_q)), np.nan)
        values["exact_converged"] = np.zeros((1, len(w_q)), dtype=bool)
        found.append(LayerResult(0, len(layers), values, np.zeros(1, dtype=int), 0.0))
        layers.append(LayerInfo(len(layers), name, len(w_q), 0, frozenset()))
    inputs = Inputs({"no_tokens": torch.zeros(1, 0)}, "no data", "none")
    capturer = measure.capturer_of(checkpoint.model, config)
    sources = Sources(checkpoint, inputs, str(w_q.device), capturer)
    planned = Plan(config, layers, 1, 1, 1, {}, len(layers))
    info = run_info(config, sources, planned)
    made = replace(info.made, exact_samples=0)
    info = replace(info, made=made, exact_samples=0, map_description="weights of heads alone")
    ds = sealed(dataset(planned, found)[0], info)
    if config.target is not None:
        store.save(ds, config.target)
    return ds
