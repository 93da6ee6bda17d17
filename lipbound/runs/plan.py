"""What a run will compute, decided before anything is computed: model and inputs, bounds that
apply, blocks of samples, shares of delta."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lipbound.attention.variants import VARIANTS
from lipbound.bounds.registry import get
from lipbound.bounds.registry import names as bound_names
from lipbound.devices import available, has_float64
from lipbound.errors import LipboundError, tell
from lipbound.jacobians.maps import WHOLE
from lipbound.models.batch import Inputs
from lipbound.models.capture.batch_dependence import telling_samples
from lipbound.models.capture.capture import Capturer
from lipbound.models.checkpoints import Checkpoint, load_unless_refused
from lipbound.models.inputs import prepare, refuse_long
from lipbound.runs.config import LEAST_MEMORY, RunConfig
from lipbound.runs.measure import LayerInfo, MeasurementSpec, capturer_of, layers_at
from lipbound.runs.partial_store import partial_path, stored_block

BLOCK_BYTES = 1.5e9
"""Working memory on a CPU, unless asked otherwise."""
BYTES_PER_SCORE = 80
"""Bytes of working memory per entry of the attention matrices (P and its temporaries, some in
float64)."""


class Sources(NamedTuple):
    """What the names in a configuration lead to: the checkpoint on a device of this machine, the
    inputs, and what reads its layers."""

    checkpoint: Checkpoint
    inputs: Inputs
    device: str
    capturer: Capturer


def open_sources(config: RunConfig, device: str) -> Sources:
    """Load the model to a device and prepare the inputs.

    Raises:
        CheckpointError, InputsError: they cannot be found or used.
    """
    checkpoint = open_checkpoint(config, device)
    inputs = open_inputs(config, checkpoint)
    if not has_float64(device):
        inputs.notes.append(
            f"the device {device!r} has no float64: the model runs there, and its heads are "
            "measured on the CPU"
        )
        tell(inputs.notes[-1])
    return Sources(
        checkpoint, inputs, device, capturer_of(checkpoint.model, config.chosen_layers, config.map)
    )


def open_checkpoint(config: RunConfig, device: str) -> Checkpoint:
    """The model, on a device.

    Raises:
        CheckpointError: it cannot be had.
        InputsError: its configuration says that it has fewer positions than texts have tokens.
    """
    return load_unless_refused(
        config.model,
        lambda found: refuse_long(str(config.model), found, config.data, config.max_length),
        revision=config.revision,
        dtype=config.dtype,
        device=device,
        weights=config.weights,
        gguf_file=config.gguf_file,
        tokenizer=config.tokenizer,
        processor=config.processor,
        adapter=config.adapter,
    )


def open_inputs(config: RunConfig, checkpoint: Checkpoint) -> Inputs:
    """The inputs; raises InputsError where they cannot be made."""
    inputs = prepare(
        checkpoint,
        config.data,
        samples=config.samples,
        max_length=config.max_length,
        split=config.split,
        column=config.column,
        shuffle=config.shuffle,
    )
    if config.exact_samples is not None and config.exact_samples > inputs.samples:
        inputs.notes.append(
            f"exact norms of {config.exact_samples} samples were asked for, and there are "
            f"{inputs.samples}, which all get them"
        )
        tell(inputs.notes[-1])
    return inputs


def identity(config: RunConfig, sources: Sources) -> dict[str, Any]:
    """What must be equal for a stored run, finished or not, to be the one that is asked for, in
    JSON's types."""
    checkpoint, inputs = sources.checkpoint, sources.inputs
    return {
        "model": checkpoint.name,
        "revision": checkpoint.revision,
        "configuration": checkpoint.configuration,
        "data_fingerprint": inputs.fingerprint,
        "samples": inputs.samples,
        "bounds": config.names,
        "map": config.map,
        "norm": config.norm,
        "exact_samples": config.exact_count(inputs.samples),
        "tol": config.tol,
        "dtype": config.dtype,
        **{name: value for name, value in config.drawn.items() if name != "method"},
    }


class SampleBlock(NamedTuple):
    """Samples start...stop-1, and the positions of layers that are measured there already."""

    start: int
    stop: int
    skip: frozenset[int]


@dataclass(frozen=True)
class Plan:
    """What a run will compute.

    Attributes:
        spec: what is measured at every layer, with the share of delta of one exact norm.
        layers: the chosen layers, as the first sample shows them.
        samples: how many samples.
        block: how many of them are measured at a time.
        not_applicable: bounds of "default" or "all" that say nothing about this model, and what
            they do not cover.
        model_layers: how many attention layers the model has, chosen or not.
    """

    spec: MeasurementSpec
    layers: Sequence[LayerInfo]
    samples: int
    block: int
    not_applicable: dict[str, str]
    model_layers: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tables: samples, layers, heads (1 for maps of whole layers)."""
        return (self.samples, *norms_shape(self.layers, self.spec.map))

    @property
    def variants(self) -> frozenset[str]:
        """Which of `lipbound.attention.variants.VARIANTS` the layers have."""
        return all_variants(self.layers)

    def blocks(self, done: np.ndarray) -> list[SampleBlock]:
        """The blocks with layers that are not measured yet; ``done`` is (blocks, layers) bool."""
        starts = range(0, self.samples, self.block)
        return [
            SampleBlock(
                start,
                min(self.samples, start + self.block),
                frozenset(np.flatnonzero(row).tolist()),
            )
            for start, row in zip(starts, done, strict=True)
            if not row.all()
        ]

    def nothing_done(self) -> np.ndarray:
        """(blocks, layers) bool, all False."""
        return np.zeros((-(-self.samples // self.block), len(self.layers)), dtype=bool)

    def count(self, done: np.ndarray) -> int:
        """How many pairs of sample and layer are measured already."""
        return int(
            sum(
                min(self.block, self.samples - b * self.block) * row.sum()
                for b, row in enumerate(done)
            )
        )


def plan(config: RunConfig, sources: Sources, memory: float, parts: int) -> Plan:
    """Look at the first sample, and decide.

    Args:
        config: of the run.
        sources: its model and inputs.
        memory: working memory in bytes.
        parts: at least so many blocks, where there are samples enough.

    Raises:
        LipboundError: a bound that was asked for by name does not apply to the model.
        CaptureError: the model's attention cannot be captured.
    """
    samples = sources.inputs.samples
    exact = config.exact_count(samples)
    layers = layers_at(sources.capturer, sources.inputs.block(0, 1, sources.device))
    for sample in telling_samples(sources.inputs.batch):
        sources.capturer.examine(sources.inputs.block(sample, sample + 1, sources.device))
    if any(i < 0 for i in config.chosen_layers or ()):
        measured = (
            f"layers {', '.join(str(one.index) for one in layers)} are"
            if len(layers) > 1
            else f"layer {layers[0].index} is"
        )
        sources.inputs.notes.append(f"layers below zero count from the end: {measured} measured")
        tell(sources.inputs.notes[-1])
    names, not_applicable = about(config.names, layers, everything=config.everything)
    block = block_size(layers, samples, memory, parts)
    if config.resume and config.target is not None:  # other blocks would change last digits
        block = stored_block(partial_path(config.target), default=block)
    spec = measurement_spec(config, names, exact, norms_shape(layers, config.map))
    return Plan(spec, layers, samples, block, not_applicable, sources.capturer.count)


def norms_shape(layers: Sequence[LayerInfo], map: str) -> tuple[int, int]:
    """(layers, heads) of the exact norms of a sample; layers with fewer heads than others leave
    places empty."""
    return len(layers), 1 if map in WHOLE else max(layer.heads for layer in layers)


def measurement_spec(
    config: RunConfig, names: Sequence[str], exact_samples: int, shape: tuple[int, ...]
) -> MeasurementSpec:
    """What is measured at every layer; all exact norms of the run share its delta equally,
    ``shape`` of them at each of ``exact_samples``."""
    norms = exact_samples * math.prod(shape)
    delta = None if config.delta is None else config.delta / norms
    return MeasurementSpec(
        tuple(names), config.map, config.tol, delta, config.seed, exact_samples, config.norm
    )


def all_variants(layers: Sequence[LayerInfo]) -> frozenset[str]:
    """Variants that some layer has."""
    return frozenset().union(*(layer.variants for layer in layers))


def about(
    names: list[str], layers: Sequence[LayerInfo], *, everything: bool
) -> tuple[list[str], dict[str, str]]:
    """The bounds that say something about these layers, and why the others do not: variants they do
    not cover, inputs too long for them.

    Raises:
        LipboundError: when one of the others was asked for by name.
    """
    variants = all_variants(layers)
    silent = {}
    for name in names:
        if other := [VARIANTS[v] for v in VARIANTS if v in variants - get(name).covers]:
            silent[name] = "does not cover " + " and ".join(other)
        elif why := [
            said
            for one in layers
            if (said := get(name).too_long(one.tokens, one.heads, one.variants))
        ]:
            silent[name] = why[0]
    if silent and not everything:
        name, why_not = next(iter(silent.items()))
        if not variants <= get(name).covers:
            fitting = [n for n in bound_names(get(name).norm) if variants <= get(n).covers]
            why_not += (
                ", which this model has; leave it out, or take bounds='default' or some "
                f"of {', '.join(fitting)}"
            )
        raise LipboundError(f"bound {name!r} {why_not}")
    return [name for name in names if name not in silent], silent


def block_size(captured: Sequence[LayerInfo], count: int, budget: float, parts: int) -> int:
    """How many samples to take at a time: as many as memory allows, and few enough to make so many
    parts."""
    scores = max(layer.heads * layer.tokens**2 for layer in captured)
    return max(1, min(int(budget // (BYTES_PER_SCORE * scores)), -(-count // parts)))


def memory_bytes(memory: str | float, device: str) -> float:
    """Bytes that the ``memory`` of a configuration means."""
    if memory == "auto":
        return (
            min(BLOCK_BYTES, available(torch.device("cpu")) / 4)
            if device == "cpu"
            else available(torch.device(device)) / 4
        )
    if float(memory) < LEAST_MEMORY:
        tell(
            f"memory is {float(memory):g} byte{'s' * (memory != 1)}, so that samples are "
            "measured one at a time; write '4GB' for gigabytes"
        )
    return float(memory)
