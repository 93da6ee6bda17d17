"""Exact norms and bounds of every layer at blocks of samples, here or by workers of a cluster."""

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from lipbound import errors, schema
from lipbound.attention.conditioning import conditioning
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention, described
from lipbound.attention.variants import WITH_TOKEN_NORMS, titles
from lipbound.bounds.ours.block_norms import ROW_BYTES, head_bytes, heads_at_once
from lipbound.bounds.registry import get
from lipbound.bounds.whole_layer_rules import whole_layer, with_output
from lipbound.devices import available, on_cpu, resolve_device, side_by_side
from lipbound.errors import CaptureError, LipboundError
from lipbound.jacobians.maps import BLOCKS, WHOLE
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm
from lipbound.jacobians.spectrum import condition_number, frobenius_norm
from lipbound.jacobians.streaming import SCORE_BYTES, whole_bytes
from lipbound.jacobians.token_norms.token_norm import token_norm
from lipbound.models.capture.capture import Capturer, LayerCapture
from lipbound.models.capture.verification import one_sample
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.loading import GivenCapturer, GivenLayers, load_checkpoint
from lipbound.runs.config import LOADING, RunConfig
from lipbound.runs.head_extras import of_heads
from lipbound.runs.store import LayerResult

Batch = Mapping[str, Tensor]
"""Inputs of a model by name, whose first axis is the sample."""
Arrays = dict[str, np.ndarray]
"""Measured numbers by the name of their variable, (samples, heads) each."""
SampleBlock = tuple[int, int, frozenset[int]]
"""Samples start...stop-1, and the positions of layers that are measured there already."""
_SMALL = 1024
"""Tokens up to which samples and layers are measured side by side; the matrices of longer inputs
keep torch's own threads busy."""

_MEASURERS: dict[tuple[RunConfig, str], "Measurer"] = {}
_TURN = threading.Lock()


class Sources(NamedTuple):
    """Checkpoint, inputs, device and capture that a configuration leads to."""

    checkpoint: Checkpoint
    inputs: Inputs
    device: str
    capturer: Capturer


@dataclass(frozen=True)
class Memory:
    """Bytes of working memory that measuring a layer takes, to within a factor of about 1.5.

    The factors in `of` are measured: allocations on CPUs and on the tests' other device, of
    estimates, enclosures and our bounds at 24 to 1,024 tokens. Heads that need more steps than
    usual take more.

    Attributes:
        layer: of its projections, whatever the samples are.
        scores: of a sample's attention matrices, where they are kept.
        vectors: of a sample's Krylov spaces.
        kept: up to which ``scores`` of all samples are.
        own: of our own bounds of a sample, before or after norms.
        most: up to which those of all samples are.
    """

    layer: float = 0.0
    scores: float = 0.0
    vectors: float = 0.0
    kept: float = math.inf
    own: float = 0.0
    most: float = math.inf

    @classmethod
    def of(cls, att: Attention | ModuleAttention, names: Collection[str]) -> Self:
        """Estimate the memory of a layer from its sizes.

        Args:
            att: the layer at one sample, which it may see in windows.
            names: of bounds.
        """
        layer = own = most = 0.0
        if isinstance(att, ModuleAttention):
            rows, keys = att.shape[1], att.tokens
        else:
            rows, keys = att.rows, att.keys
            layer = 3.5 * 8 * sum(w.numel() for w in (att.w_q, att.w_k, att.w_v))
            if "lipbound" in names:
                own, most = head_bytes(att), 4.0 * ROW_BYTES
                if att.device.type != "cpu":
                    most = heads_at_once(att, available(att.device)) * own
                own *= att.heads
        rows = att.samples * att.heads * rows
        kept, scores = 1.35 * whole_bytes(att.device), 1.35 * SCORE_BYTES * rows * keys
        return cls(layer, scores, 350.0 * rows * att.d_v, kept, own, most)

    def at(self, samples: int) -> float:
        """Return the bytes that a block of so many samples takes."""
        norms = samples * self.vectors + min(samples * self.scores, self.kept)
        return self.layer + max(norms, min(samples * self.own, self.most))

    def room(self, memory: float) -> int:
        """Return how many samples fit into so many bytes, one at least.

        No more than so many that their attention matrices are kept.
        """
        fits = (memory - self.layer) / max(self.scores + self.vectors, 1.0)
        return max(1, int(min(fits, self.kept / max(self.scores, 1.0))))


@dataclass(frozen=True)
class LayerInfo:
    """A layer as one sample shows it, with its `lipbound.attention.variants.VARIANTS`."""

    index: int
    layer_name: str
    heads: int
    tokens: int
    variants: frozenset[str]
    memory: Memory = field(default_factory=Memory)
    kind: str = "self"
    stream: str = schema.INPUT
    measured: str = schema.CLOSED_FORM


def capturer_of(model: nn.Module, spec: RunConfig, *, closed: bool = True) -> Capturer:
    """Prepare the capture of the layers of a model that are measured, as map and extras need them.

    Args:
        model: loaded.
        spec: what is measured.
        closed: False for automatic differentiation of every layer.

    Raises:
        LipboundError: layers that are given themselves have no module to differentiate.
    """
    if not isinstance(model, GivenLayers):
        around = spec.map in BLOCKS or "rho_ln" in (spec.extras or ())
        return Capturer(model, spec.layers, around=around, closed=closed)
    if not closed:
        raise LipboundError("the run is of layers without a model, and there is no module to run")
    return GivenCapturer(model, spec.layers)


def layers_at(capturer: Capturer, inputs: Batch, spec: RunConfig) -> list[LayerInfo]:
    """Describe the layers at some inputs.

    Raises:
        LipboundError: one has not the norm asked for, or not that of the arguments ``wrt`` alone.
    """
    found = []
    for layer in capturer.each(inputs):
        att, name, memory = layer.attention, layer.name, Memory.of(layer.attention, spec.names)
        size = att.heads, att.tokens
        found.append(LayerInfo(layer.index, name, *size, att.variants, memory, **described(att)))
    by_token = spec.norm in schema.TOKEN_NORMS  # where functions of the input alone have norms
    for one in found if by_token or spec.wrt != schema.INPUT else ():
        without = one.variants - set(WITH_TOKEN_NORMS) if by_token else frozenset()
        if one.measured == schema.AUTOMATIC or without:
            asked = f"norm {spec.norm!r}" if by_token else f"wrt={spec.wrt!r}"
            what = titles(without) or "layers that are measured by automatic differentiation"
            where = f"such as layer {one.index} ({one.layer_name}); choose other layers="
            usual = "norm='frobenius'" if by_token else "wrt='input'"
            raise LipboundError(f"{asked} does not cover {what}, {where}, or take {usual}")
    return found


@dataclass
class Measurer:
    """Measure blocks of samples on the layers that a `Capturer` finds.

    Attributes:
        capturer: finds them.
        spec: what is measured (`RunConfig.of_places`).
        room: samples of one layer that memory has room for; where a block has fewer, layers are
            measured side by side, as many as fit.
        verify: whether every block after the first is compared with the model's own outputs once
            more.
        statistics: also measure `lipbound.schema.STATISTICS`; of a whole layer, over its heads.
    """

    capturer: Capturer
    spec: RunConfig
    room: int = 1
    verify: bool = True
    statistics: bool = False

    def block(self, inputs: Batch, start: int, skip: Collection[int] = ()) -> Iterator[LayerResult]:
        """Measure every layer but those at the positions ``skip``.

        Samples with different positions are measured one by one, a result each. Results depend on
        the block alone, not on blocks measured before. What was verified when the run was planned,
        on its first sample, counts for the first block.

        Args:
            inputs: of the model, for the samples of the block.
            start: number of the first of them.
            skip: positions among the chosen layers.

        Yields:
            Layer by layer.
        """
        done = set(skip)
        try:
            for measured in self._layers(inputs, start, skip):
                done.add(measured.layer)
                yield measured
        except errors.DifferentPositionsError:
            samples = len(next(t for t in inputs.values() if isinstance(t, Tensor)))
            if samples == 1:
                raise
            for k in range(samples):
                yield from self._layers(one_sample(inputs, k, samples), start + k, done)
        if self.verify:
            self.capturer.forget()

    def each(self, sources: Sources, blocks: Iterable[SampleBlock]) -> Iterator[LayerResult]:
        """Measure blocks of the inputs, layer by layer."""
        for start, stop, skip in blocks:
            yield from self.block(sources.inputs.block(start, stop, sources.device), start, skip)

    def _layers(self, inputs: Batch, start: int, skip: Collection[int]) -> Iterator[LayerResult]:
        """Measure the layers at samples that are captured together.

        Yields:
            Layer by layer.
        """
        positions = (i for i in itertools.count() if i not in skip)
        waiting: list[Callable[[], LayerResult]] = []
        for i, layer in zip(positions, self.capturer.each(inputs, skip), strict=False):
            count = next(len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim)
            attention, windows = layer.attention, layer.windows
            if attention.samples != windows * count:
                what = f"layer {layer.name} has {attention.samples} samples, the inputs {count}"
                raise CaptureError(f"{what} on their first axis; lipbound.capture takes them")
            waiting.append(partial(self._result, layer, i, start))
            together = 1 if _alone(attention) else torch.get_num_threads() // attention.samples
            del layer, attention  # frees P and what hangs on it
            if len(waiting) >= min(together, self.room // count):
                ready, waiting = side_by_side(waiting), []
                yield from ready
        yield from side_by_side(waiting)

    def _result(self, layer: LayerCapture, position: int, start: int) -> LayerResult:
        """Measure one layer."""
        spec, attention, windows = self.spec, layer.attention, layer.windows
        lengths = attention.lengths.long().cpu().numpy().reshape(-1, windows).sum(-1)
        seeds = [seed_of(spec.seed, layer.index, s) for s in range(start, start + len(lengths))]
        count = spec.exact_count(start + len(lengths)) - start
        values = self._measured(attention, seeds, count, windows)
        return LayerResult(start, position, values, lengths, layer.error, layer.name)

    def _measured(self, att: Any, seeds: list[int], exact_count: int, windows: int = 1) -> Arrays:
        """Measure an Attention or a `ModuleAttention` in parts side by side, one a thread of torch.

        The norm, and a bound, of a sample is the largest of those of its windows; what is a mean
        over queries is the mean of theirs.
        """
        if windows > 1:
            delta = None if self.spec.delta is None else self.spec.delta / windows
            seeds = [seed + window for seed in seeds for window in range(windows)]
            alone = replace(self, spec=replace(self.spec, delta=delta))
            found = alone._measured(att, seeds, exact_count * windows)
            each = {name: t.reshape(-1, windows, t.shape[-1]) for name, t in found.items()}
            return {name: _of_windows(name, t) for name, t in each.items()}
        count = 1 if _alone(att) else min(att.samples, torch.get_num_threads())
        if count == 1:
            return self._measure(att, seeds, exact_count)
        ends = [att.samples * i // count for i in range(count + 1)]
        parts = [
            partial(self._measure, att.of_samples(slice(i, j)), seeds[i:j], exact_count - i)
            for i, j in itertools.pairwise(ends)
        ]
        made = side_by_side(parts)  # exact norms may be missing from the last samples
        return {n: np.concatenate([part[n] for part in made if n in part]) for n in made[0]}

    @torch.no_grad()
    def _measure(self, att: Any, seeds: list[int], exact_count: int) -> Arrays:
        """Measure one layer at one block of samples, (samples, heads) each.

        Exact norms are those of the first ``exact_count`` samples. A whole layer is one head.
        """
        values, spec = dict[str, Any](), self.spec
        whole = spec.map in WHOLE
        closed = not isinstance(att, ModuleAttention)
        names = spec.names
        said = [name for name in names if closed and att.variants <= get(name).covers]
        for name in names:
            if name not in said:
                values[name] = torch.full((att.samples, 1 if whole else att.heads), torch.nan)
                values[schema.sound(name)] = torch.zeros(values[name].shape, dtype=torch.bool)
            elif spec.map == "head_out":
                values[name], values[schema.sound(name)] = with_output(att, name)
            else:
                holds = get(name).sound(att)
                values[name] = whole_layer(att, name, map=spec.map) if whole else get(name)(att)
                values[schema.sound(name)] = holds.all(-1) if whole else holds
        for name, value in att.statistics().items() if self.statistics else ():
            over_heads = value.mean(-1) if name in schema.MEANS else value.amax(-1)
            values[name] = over_heads if whole else value
        extras = spec.extras or ()
        own = [name for name in extras if name in schema.OF_HEADS]
        values |= of_heads(att, own, spec.tau) if own else {}
        exact_count = min(exact_count, att.samples)
        if exact_count > 0:
            part = att if exact_count == att.samples else att.select(slice(0, exact_count))
            if spec.norm in schema.TOKEN_NORMS:
                norm = token_norm(part, spec.norm, map=spec.map, tol=spec.tol)
            else:
                norms = part.samples * (1 if whole else part.heads)
                delta = None if spec.delta is None else spec.delta * norms
                options = spec.options("map", "tol", "wrt")
                norm = spectral_norm(part, seed=seeds[:exact_count], delta=delta, **options)
            values["exact"], values["exact_steps"] = norm.lower, norm.steps
            values["exact_converged"] = norm.converged
            if spec.encloses:
                values["exact_upper"] = norm.upper
            for name in [name for name in extras if name not in own]:
                values[schema.EXTRAS[name]] = torch.full_like(norm.lower, torch.nan)
                if name in schema.CONDITIONING:
                    values[name] = conditioning(part, name, whole=whole)
                    continue
                with suppress(errors.TooLargeError):
                    measure = frobenius_norm if name == "frobenius" else condition_number
                    values[schema.EXTRAS[name]] = measure(part, map=spec.map)
            if any(get(name).exact == "exact_l2" for name in said):
                l2 = l2_spectral_norm(part, tol=spec.tol, seed=seeds[:exact_count])
                values["exact_l2"] = l2.lower
        known = zip(values, on_cpu([*values.values()]), strict=True)
        return {name: value.reshape(len(value), -1).numpy() for name, value in known}


def _alone(att: Any) -> bool:
    """Tell whether a layer keeps all threads of torch busy, or must not be cut."""
    return isinstance(att, ModuleAttention) or att.device.type != "cpu" or att.tokens > _SMALL


def _of_windows(name: str, values: np.ndarray) -> np.ndarray:
    """Return what holds of a sample, of its windows' (samples, windows, heads).

    Its Jacobian is block diagonal.
    """
    if name == schema.EXTRAS["frobenius"]:
        return np.linalg.norm(values, axis=1)
    if name == schema.EXTRAS["condition"]:  # the extremes of all windows together are not known
        return np.full_like(values[:, 0], np.nan)
    if name in schema.MEANS:
        return np.mean(values, 1)
    # QK-clip clips by the largest logit; assumptions hold where they do in all windows
    return np.min(values, 1) if name == "qk_clip" or values.dtype == bool else np.max(values, 1)


def seed_of(seed: int, *place: int | str) -> int:
    """Seed of a layer and sample, whatever block the sample is in, or of a step of training."""
    key = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")


def work(
    spec: RunConfig, revision: str, inputs: Batch, start: int, skip: Collection[int]
) -> list[LayerResult]:
    """Run `Measurer.block` in a process of its own, which loads the checkpoint once.

    Threads of one process take turns, since they share the model.

    Args:
        spec: what is measured, and how the model is loaded, without its data.
        revision: of the checkpoint that must be found.
        inputs: of the model, for the samples of the block.
        start: number of the first of them.
        skip: positions of layers that are measured already.

    Returns:
        Layer by layer.

    Raises:
        CheckpointError: the checkpoint found here is another one.
    """
    device, worker = resolve_device(spec.device), (spec, revision)
    with _TURN:
        if worker not in _MEASURERS:
            _MEASURERS.clear()  # before another model is loaded
            checkpoint = load_checkpoint(spec.model, device=device, **spec.options(*LOADING))
            if checkpoint.revision != revision:
                found = f"{spec.model} is {checkpoint.revision} on a worker"
                raise errors.CheckpointError(f"{found} but {revision} here; give all the same")
            capturer = capturer_of(checkpoint.model, spec)
            _MEASURERS[worker] = Measurer(capturer, spec)
        here = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in inputs.items()}
        return list(_MEASURERS[worker].block(here, start, skip))


def measured_by(
    sources: Sources, spec: RunConfig, blocks: Iterable[SampleBlock]
) -> Iterator[LayerResult]:
    """Have blocks measured by the workers of a dask.distributed client, which load the model.

    Blocks of a worker that dies go to another (dask's own rule: three deaths on one block and it is
    given up).

    Args:
        sources: model, whose probed weights are freed here, and inputs.
        spec: what is measured (`RunConfig.of_places`).
        blocks: of samples.

    Yields:
        Layer by layer, in the order in which blocks end.

    Raises:
        LipboundError: workers died again and again.
    """
    from dask.distributed import KilledWorker, as_completed

    sources.capturer.release()
    client = spec.client
    alone = replace(spec, data=None, out=None, resume=False, client=None)
    job = partial(client.submit, work, alone, sources.checkpoint.revision, pure=False)
    futures = [job(sources.inputs.block(a, b, "cpu"), a, skip) for a, b, skip in blocks]
    try:
        for future in as_completed(futures):
            yield from future.result()
            future.release()
    except KilledWorker as error:
        what = f"workers of the cluster died again and again ({error.args[0]})"
        raise LipboundError(f"{what}; give them more memory, or a smaller memory=") from error
    finally:
        client.cancel(futures)
