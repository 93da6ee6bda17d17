"""Decisions before anything is computed: sources, bounds that apply, blocks, shares of delta."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lipbound.attention.variants import WITH_TOKEN_NORMS, titles
from lipbound.bounds.registry import get
from lipbound.bounds.registry import names as bound_names
from lipbound.devices import available, has_float64
from lipbound.errors import LipboundError, tell
from lipbound.jacobians.maps import WHOLE
from lipbound.models.capture.capture import Capturer
from lipbound.models.capture.verification import telling_samples
from lipbound.models.checkpoint import Inputs
from lipbound.models.inputs import prepare
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.runs.config import LEAST_MEMORY, LOADING, READING, RunConfig
from lipbound.runs.measure import LayerInfo, MeasurementSpec, capturer_of, layers_at
from lipbound.runs.partial_store import LayerResult, configuration, partial_path
from lipbound.schema import CLOSED_FORM, EXTRAS, INPUT, STATISTICS, TOKEN_NORMS, sound

BLOCK_BYTES = 1.5e9
"""Working memory on a CPU, unless asked otherwise."""
BYTES_PER_SCORE = 80
"""Bytes of working memory per entry of the attention matrices, with temporaries in float64."""
OF_INPUT = "is of heads as functions of their input"
"""Why bounds say nothing where keys, values or queries move alone."""


class Sources(NamedTuple):
    """Checkpoint, inputs, device and capture that a configuration leads to."""

    checkpoint: Checkpoint
    inputs: Inputs
    device: str
    capturer: Capturer


def open_sources(config: RunConfig, device: str) -> Sources:
    """Load the model to a device and prepare the inputs.

    Raises:
        LipboundError: they cannot be found or used.
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
    """Load the model to a device.

    Raises:
        CheckpointError: it cannot be had.
    """
    return load_checkpoint(config.model, device=device, **config.options(*LOADING))


def open_inputs(config: RunConfig, checkpoint: Checkpoint) -> Inputs:
    """Prepare the inputs."""
    inputs = prepare(checkpoint, config.data, **config.options(*READING))
    if config.exact_samples is not None and config.exact_samples > inputs.samples:
        inputs.notes.append(
            f"exact norms of {config.exact_samples} samples were asked for, and there are "
            f"{inputs.samples}, which all get them"
        )
        tell(inputs.notes[-1])
    return inputs


def identity(config: RunConfig, sources: Sources) -> dict[str, Any]:
    """Settings, in JSON's types, that a stored run must share to be the one that is asked for."""
    checkpoint, inputs = sources.checkpoint, sources.inputs
    return {
        "model": checkpoint.name,
        "revision": checkpoint.revision,
        "configuration": checkpoint.configuration,
        "data_fingerprint": inputs.fingerprint,
        "samples": inputs.samples,
        "bounds": config.names,
        "exact_samples": config.exact_count(inputs.samples),
        **({"extras": list(config.chosen_extras)} if config.extras else {}),
        **config.options("map", "norm", "wrt", "tol", "dtype"),
        **{name: value for name, value in config.drawn.items() if name != "method"},
    }


class SampleBlock(NamedTuple):
    """Samples start...stop-1, and the positions of layers that are measured there already."""

    start: int
    stop: int
    skip: frozenset[int]


@dataclass(frozen=True)
class Plan:
    """Work of a run.

    Attributes:
        spec: what is measured at every layer, with the share of delta of one exact norm.
        layers: the chosen layers, as the first sample shows them.
        samples: how many samples.
        block: how many of them are measured at a time.
        room: how many memory has room for.
        not_applicable: bounds of "default" or "all" that say nothing about this model, and what
            they do not cover.
        model_layers: how many attention layers the model has, chosen or not.
    """

    spec: MeasurementSpec
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

    def tables(self) -> dict[str, np.ndarray]:
        """Make the tables (samples, layers, heads) of a run, of NaN, 0 or False."""
        spec, shape = self.spec, self.shape
        l2 = any(get(name).exact == "exact_l2" for name in spec.names)
        ends = ["exact", *["exact_upper"] * spec.encloses, *["exact_l2"] * l2]
        extras = [EXTRAS[name] for name in spec.extras]
        extras += STATISTICS[: None if spec.statistics else 0]
        tables = {name: np.full(shape, np.nan) for name in (*ends, *extras, *spec.names)}
        tables["exact_steps"] = np.zeros(shape, dtype=np.int32)
        flags = ("exact_converged", *map(sound, spec.names))
        return tables | {name: np.zeros(shape, dtype=bool) for name in flags}

    @property
    def variants(self) -> frozenset[str]:
        """Those of `lipbound.attention.variants.VARIANTS` that the layers have."""
        return all_variants(self.layers)

    def blocks(self, found: Iterable[LayerResult]) -> list[SampleBlock]:
        """List the blocks with layers that are not found."""
        done: defaultdict[int, set[int]] = defaultdict(set)
        for one in found:
            done[one.start].add(one.layer)
        return [
            SampleBlock(start, min(self.samples, start + self.block), frozenset(done[start]))
            for start in range(0, self.samples, self.block)
            if len(done[start]) < len(self.layers)
        ]


def plan(config: RunConfig, sources: Sources, memory: float, parts: int) -> Plan:
    """Look at the first sample, and plan the run.

    Args:
        config: of the run.
        sources: its model and inputs.
        memory: working memory in bytes.
        parts: at least so many blocks, where there are samples enough.

    Raises:
        LipboundError: a bound that was asked for by name does not apply to the model, or its
            attention cannot be captured.
    """
    samples = sources.inputs.samples
    exact = config.exact_count(samples)
    layers = layers_at(sources.capturer, sources.inputs.block(0, 1, sources.device))
    for sample in telling_samples(sources.inputs.batch):
        sources.capturer.examine(sources.inputs.block(sample, sample + 1, sources.device))
    if any(i < 0 for i in config.chosen_layers or ()):
        measured = ", ".join(str(one.index) for one in layers)
        sources.inputs.notes.append(f"layers below zero count from the end: here {measured}")
        tell(sources.inputs.notes[-1])
    check_covered(config.norm, config.wrt, layers)
    names, not_applicable = about(config.names, layers, everything=config.everything)
    if config.wrt != INPUT:  # those asked for by name are refused before
        names, not_applicable = [], dict.fromkeys(config.names, OF_INPUT)
    room = block_size(layers, memory)
    block = min(room, -(-samples // parts))
    if config.resume and config.target is not None:  # other blocks would change last digits
        block = configuration(partial_path(config.target)).get("block", block)
    spec = measurement_spec(config, names, exact, norms_shape(layers, config.map))
    count = sources.capturer.count
    assert count is not None  # it was counted with the layers
    return Plan(spec, layers, samples, block, room, not_applicable, count)


def check_covered(norm: str, wrt: str, layers: Sequence[LayerInfo]) -> None:
    """Check that every layer has the norm, and the arguments to move alone, that are asked for.

    Raises:
        LipboundError: one has not.
    """
    asked, usual = (f"wrt={wrt!r}", "wrt='input'") if wrt != INPUT else ("", "")
    if norm in TOKEN_NORMS:  # which wrt= goes with the other norm alone
        asked, usual = f"norm {norm!r}", "norm='frobenius'"
    for layer in layers if asked else ():
        without = layer.variants - set(WITH_TOKEN_NORMS) if norm in TOKEN_NORMS else frozenset()
        if layer.measured != CLOSED_FORM or without:
            what = titles(without) or "layers that are measured by automatic differentiation"
            raise LipboundError(
                f"{asked} does not cover {what}, such as layer {layer.index} "
                f"({layer.layer_name}); choose others by layers=, or take {usual}"
            )


def norms_shape(layers: Sequence[LayerInfo], map: str) -> tuple[int, int]:
    """Shape (layers, heads) of the exact norms of a sample, with the most heads of a layer."""
    return len(layers), 1 if map in WHOLE else max(layer.heads for layer in layers)


def measurement_spec(
    config: RunConfig, names: Sequence[str], exact_samples: int, shape: tuple[int, ...]
) -> MeasurementSpec:
    """Share the delta of a run equally among its exact norms.

    Args:
        config: of the run.
        names: of the bounds.
        exact_samples: how many samples have exact norms.
        shape: of the exact norms of each of them.
    """
    norms = exact_samples * math.prod(shape)
    delta = None if config.delta is None else config.delta / norms
    options: Any = config.options("map", "tol", "seed", "norm", "wrt")
    options |= {"delta": delta, "exact_samples": exact_samples, "extras": config.chosen_extras}
    return MeasurementSpec(tuple(names), **options)


def all_variants(layers: Sequence[LayerInfo]) -> frozenset[str]:
    """Collect the variants that some layer has, of self-attention where there is any.

    Bounds that do not cover cross-attention say nothing of such layers beside others.
    """
    layers = [layer for layer in layers if layer.kind == "self"] or layers
    return frozenset().union(*(layer.variants for layer in layers))


def about(
    names: list[str], layers: Sequence[LayerInfo], *, everything: bool
) -> tuple[list[str], dict[str, str]]:
    """Find the bounds that say something about these layers, and why the others do not.

    The others do not cover variants, or inputs are too long for them.

    Raises:
        LipboundError: when one of the others was asked for by name.
    """
    closed = [layer for layer in layers if layer.measured == CLOSED_FORM]
    variants, silent = all_variants(closed), {}
    for name in names:
        bound = get(name)
        if not closed:
            silent[name] = "does not cover layers without a closed form"
        elif other := variants - bound.covers:
            silent[name] = "does not cover " + titles(other)
        else:
            said = (bound.too_long(one.tokens, one.heads, one.variants) for one in closed)
            if why := next(filter(None, said), None):
                silent[name] = why
    if silent and not everything:
        name, why = next(iter(silent.items()))
        fitting = [n for n in bound_names(get(name).norm) if variants <= get(n).covers and closed]
        instead = f", or take some of {', '.join(fitting)}" if fitting else ""
        raise LipboundError(f"bound {name!r} {why}; leave it out{instead}")
    return [name for name in names if name not in silent], silent


def block_size(captured: Sequence[LayerInfo], budget: float) -> int:
    """Samples that memory has room for at a time, one at least."""
    scores = max(layer.heads * layer.tokens**2 for layer in captured)
    return max(1, int(budget // (BYTES_PER_SCORE * scores)))


def memory_bytes(memory: str | float, device: str) -> float:
    """Bytes that the ``memory`` of a configuration means."""
    if memory == "auto":
        quarter = available(torch.device(device)) / 4
        return min(BLOCK_BYTES, quarter) if device == "cpu" else quarter
    if float(memory) < LEAST_MEMORY:
        tell(
            f"memory is {float(memory):g} bytes, so that samples are measured one at a time; write "
            "'4GB' for gigabytes"
        )
    return float(memory)
