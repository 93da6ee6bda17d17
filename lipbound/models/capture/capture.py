"""The `Attention` of every layer of a transformers model at a batch of inputs.

The model runs with an attention function of our own (`lipbound.models.capture.seeing.interface`),
which records what it is handed and lets the model's own eager attention do the computing. The
projections are read off by probing (`lipbound.models.capture.probing`), whatever the architecture.
Every capture is checked against the model: rebuilt q, k, v and head outputs against those of the
forward pass, and that pass against a second one through the model's untouched eager attention.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lipbound import errors
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.devices import in_own_modes, measuring_device, threads_for
from lipbound.errors import CaptureError, DifferentPositionsError, UnfaithfulPassError, tell
from lipbound.formatting import counted
from lipbound.models.capture import verification
from lipbound.models.capture.probing import ProbedWeights, Turns, probe, read_scores
from lipbound.models.capture.seeing import interface, recording
from lipbound.models.capture.seeing.recording import Call, ModuleRun, moved
from lipbound.models.capture.streams import Padding, of_stream, stream_names, through_module
from lipbound.models.checkpoint import Checkpoint, Inputs, measurable, taken, unmarked_padding
from lipbound.models.weight_files import is_offloaded
from lipbound.schema import INPUT

ROTATIONS = 4
"""Number of rotations found last that are tried on the next layer, which mostly has one."""


@dataclass
class LayerCapture:
    """Attention of one layer with what the check against the model said.

    Attributes:
        index: number of its call of attention, in the order of the forward pass.
        name: of the module that called.
        attention: the layer.
        error: largest relative error of rebuilt q, k, v and head outputs against the model's own.
        windows: how many of the samples of ``attention``, one after the other, are windows of one
            sample of the model; they do not see each other.
    """

    index: int
    name: str
    attention: Attention | ModuleAttention
    error: float
    windows: int = 1


@dataclass
class Capturer:
    """Captures the attention of a model, batch after batch.

    Weights are probed, and the model verified, on the first batch; of a model whose weights stay on
    disk (`lipbound.models.weight_files`) they are probed for every batch, one layer in memory at a
    time.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``.
        layers: indices of attention calls, in the order of the forward pass, one, several, or text;
            all by default.
        around: also find what stands around each layer
            (`lipbound.models.capture.verification.surroundings`).
        closed: whether to look for closed forms; False to measure every layer by automatic
            differentiation.

    Attributes:
        count: how many attention layers the model has; 0 before it was run.
        notes: what there was to tell: attention that is left out, padding that is none, numbers
            that depend on the batch.
    """

    model: nn.Module
    layers: Sequence[int] | int | str | None = None
    around: bool = False
    closed: bool = True
    count: int = field(default=0, init=False)
    notes: list[str] = field(default_factory=list)
    _name: str = interface.RECORDING_ATTENTION
    _weights: dict[int, ProbedWeights] = field(default_factory=dict)
    _turns: list[Turns] = field(default_factory=list)
    _verified: set[tuple[bool, str, int]] = field(default_factory=set)
    """Calls that were compared: whether they have padding, the module, and its calls before."""
    _told: set[tuple[str, str]] = field(default_factory=set)

    def run(self, inputs: Mapping[str, Tensor] | Inputs) -> list[LayerCapture]:
        """Return the attention of every (chosen) layer, in the model's dtype; see `each`.

        It is on the model's device, or on the CPU where that has no float64.
        """
        return list(self.each(inputs))

    def each(
        self, inputs: Mapping[str, Tensor] | Inputs, skip: Collection[int] = ()
    ) -> Iterator[LayerCapture]:
        """Yield the attention of one (chosen) layer after the other.

        A layer that is not what `Attention` describes (scores that are sums of several products,
        other transformations of queries and keys) is a `ModuleAttention`, and a notice gives the
        reason. CaptureError is raised where the model computes no attention, or neither form
        reproduces it; it names the layer and the reason.

        Args:
            inputs: what the model's forward takes.
            skip: positions, among the chosen layers, of those that are left out.
        """
        inputs = taken(self.model, inputs)
        work, layers = forward_work(self.model, inputs), self._each(inputs, skip)

        def following() -> LayerCapture | None:
            with threads_for(work):
                return next(layers, None)

        try:
            yield from iter(following, None)
        except UnfaithfulPassError:  # raised before the first layer
            if self._name is interface.AS_SDPA:
                raise
            self._name = interface.AS_SDPA
            yield from self.each(inputs, skip)

    def _each(self, inputs: dict[str, Tensor], skip: Collection[int]) -> Iterator[LayerCapture]:
        modules = self.model.modules() if self.around else ()
        # one vector of weights: it may be a normalisation
        wanted = [m for m in modules if getattr(getattr(m, "weight", None), "ndim", 0) == 1]
        seen = partial(interface.implementation, self.model, self._name)
        with seen():
            calls, around, notes = recording.record(self.model, inputs, wanted=wanted)
            notes += [] if self._verified else verification.about_mixing(calls)
            if (home := measuring_device(calls[0].q.device)) != calls[0].q.device:
                there = partial(moved, device=home, copies={})
                calls, around = tree_map(there, (calls, around))
            rows = [(call, stream) for call in calls for stream in stream_names(call)]
            chosen = self._chosen(len(rows), skip)
            padding = Padding([call for call, stream in rows if stream == INPUT], inputs)
            self._check_pass(inputs, dict.fromkeys(rows[i][0] for i in chosen))
            closed = {i: self._closed(*rows[i], padding) for i in chosen}
            plain = [call for call in closed.values() if call.sides == "qkv" and not call.reason]
            notes += verification.about_positions(inputs)
            self._note(*notes, *verification.about_padding(plain))
            ahead = [] if is_offloaded(self.model) else chosen
            weights = {i: _tried(self._read, closed[i], i) for i in ahead}
        for i in chosen:
            if i not in ahead:
                with seen():
                    weights = {i: _tried(self._read, closed[i], i)}
                self.release()  # weights of such models are many
            with torch.no_grad():
                layer = _tried(self._in_closed_form, closed[i], i, weights[i], around)
            if layer is None:
                with seen():
                    layer = self._automatic(i, *rows[i], closed[i].reason, padding)
            yield layer

    def _closed(self, call: Call, stream: str, padding: Padding) -> Call:
        """Return a call as it may have a closed form in a stream, or with the reason why not.

        Raises:
            CaptureError: its attention is undefined.
        """
        unasked = f"layer {call.name}: no closed form was asked for"
        call = replace(call, reason=call.reason if self.closed else unasked)
        found = _tried(of_stream, call, stream, padding)
        return call if found is None else replace(found, reason=verification.check_defined(found))

    def _read(self, call: Call, i: int) -> ProbedWeights:
        """Return the weights of layer i."""
        weights = self._weights.get(i)
        if weights is None or not weights.belongs_to(call):
            weights = probe(call, self._turns)
            found = weights.turns
            if found and all(found.rotation is not turns.rotation for turns in self._turns):
                self._turns = [*self._turns, found][-ROTATIONS:]
            self._weights[i] = weights
        if weights.sums:
            read_scores(call)
        return weights

    def _in_closed_form(
        self, call: Call, i: int, weights: ProbedWeights, around: Sequence[ModuleRun]
    ) -> LayerCapture:
        """Return layer i as tensors."""
        attention = verification.assemble(call, weights)
        try:
            error = verification.check_rebuilt(call, attention, weights)
        except CaptureError:
            if not {"rotation", "qk_norm"} <= attention.variants:
                raise
            attention = verification.assemble(call, weights, late=True)
            error = verification.check_rebuilt(call, attention, weights)
        if self.around and call.sides == "qkv":
            attention.surroundings = verification.surroundings(attention, around)
        # of all layers at once they would fill the memory
        attention.cache.drop("p", "weights", "out")
        windows = max(1, attention.samples // call.samples)
        return LayerCapture(i, call.name, attention, error, windows)

    def _automatic(
        self, i: int, call: Call, stream: str, why: str, padding: Padding
    ) -> LayerCapture:
        """Return layer i as a function of one of its streams.

        Raises:
            CaptureError: its module cannot be run by itself.
        """
        attention, error, name = through_module(call, stream, padding, why)
        kind = type(call.module).__name__
        start = rf"^layer {re.escape(call.name)}( \({kind}\))?: ({kind} )?"
        why = re.sub(start, "", why).removesuffix(recording.UNSUPPORTED)
        key = kind, re.sub(r"\d[\d.e+-]*", "", why)  # numbers of layers and errors are their own
        if self.closed and key not in self._told:
            self._told.add(key)
            how = "are measured by automatic differentiation, rounding not enclosed"
            layers = f"layers such as {call.name or 'the model itself'} ({kind})"
            others = [f"they are functions of what {name or 'the model'} is given"]
            details = (*others * (name != call.name), *attention.details)
            self._note("; ".join([f"{layers} {how}, and have no bounds: {why}", *details]))
        return LayerCapture(i, name, attention, error, attention.windows)

    def examine(self, inputs: Mapping[str, Tensor]) -> None:
        """Tell whether the numbers of one sample depend on its padding.

        Args:
            inputs: of that sample, with the padding that it has in its batch.
        """
        with threads_for(forward_work(self.model, inputs)):
            self._note(*verification.dependence(self.model, inputs))

    def forget(self) -> None:
        """Verify the next batch against the model again; probed weights stay."""
        self._verified.clear()

    def release(self) -> None:
        """Free the probed weights; they are probed again when they are needed."""
        self._weights.clear()

    def _note(self, *notes: str) -> None:
        new = [note for note in dict.fromkeys(notes) if note not in self.notes]
        self.notes += new
        tell(*new)

    def _check_pass(self, inputs: Mapping[str, Tensor], calls: Iterable[Call]) -> None:
        """Compare calls with the model's own, each once without padding, and once with."""
        samples: dict[int, list[Call]] = {}
        for call in calls:
            valid = call.valid_keys
            if (valid is not None, call.name, call.turn) not in self._verified:
                sample = 0 if valid is None else int((~valid).any(-1).nonzero()[0])
                samples.setdefault(sample, []).append(call)
        for sample, some in sorted(samples.items()):
            verification.check_pass(self.model, inputs, some, sample)
        compared = [call for call in calls if not call.reason]
        self._verified |= {(c.valid_keys is not None, c.name, c.turn) for c in compared}

    def _chosen(self, count: int, skip: Collection[int]) -> list[int]:
        """Return which of so many layers are wanted, but for those at the positions ``skip``."""
        self.count = count
        layers = range(count) if self.layers is None else errors.indices("layers", self.layers)
        wrong = [i for i in layers if not -count <= i < count]
        if wrong:
            has = f"{counted(count, 'attention layer')}, numbered 0 to {count - 1}"
            raise CaptureError(f"layers {wrong} do not exist: the model has {has}")
        if not layers:
            raise CaptureError(f"layers is empty; name some of the {count} layers, or None for all")
        wanted = dict.fromkeys(i % count for i in layers)
        return [i for position, i in enumerate(wanted) if position not in skip]


def _tried(made: Callable[..., Any], call: Call, *args: Any) -> Any:
    """Return what is made of a call; None where it has no closed form, and why as its reason.

    Raises:
        DifferentPositionsError: samples must be captured one by one.
    """
    if call.reason:
        return None
    try:
        return made(call, *args)
    except CaptureError as why:
        if isinstance(why, DifferentPositionsError) and call.samples > 1:
            raise
        call.reason = str(why)
        return None


def forward_work(model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Return about how many floating-point operations a forward pass takes, or more.

    Every number of the largest input counts as a token, every row of one that is not of integers;
    embeddings are looked up, not multiplied, but for output layers that share them.
    """
    given = [t for t in inputs.values() if isinstance(t, Tensor) and t.numel()]
    rows = (t.numel() // (t.shape[-1] if t.is_floating_point() and t.ndim else 1) for t in given)
    multiplied = (m for m in model.modules() if not isinstance(m, nn.Embedding))
    weights = (w for m in multiplied for w in m.parameters(recurse=False))
    return 2.0 * sum(w.numel() for w in weights if w.ndim > 1) * max(rows, default=0)


@in_own_modes
def capture(
    model: nn.Module | Checkpoint,
    inputs: Mapping[str, Tensor] | Inputs,
    *,
    layers: Sequence[int] | int | str | None = None,
    around: bool = False,
    closed: bool = True,
) -> list[Attention | ModuleAttention]:
    """Return the `Attention` of every layer of a transformers model at a batch of ready inputs.

    Each is checked against the model; CaptureError is raised as by `Capturer.each`.

    Args:
        model: a loaded transformers model, any task class, or a
            `lipbound.models.checkpoint.Checkpoint`. Of one in half precision a copy in float32 is
            captured, and a `lipbound.errors.Notice` says so. Wrappers (torch.compile, DataParallel,
            PEFT, a pipeline, sentence encoders) are taken off, and a notice says what that leaves
            out.
        inputs: what its forward takes, e.g.
            ``tokenizer(texts, return_tensors="pt", padding=True)``, or what `lipbound.prepare`
            returns.
        layers: indices of the attention layers wanted, one, several, or text such as "0-3,7"; all
            by default.
        around: also find residual connection and layer normalisation, for the maps "pre_norm" and
            "post_norm".
        closed: False to measure every layer by automatic differentiation through its module, closed
            form or not: slower, without bounds, and independent of all that is read off the model.

    Returns:
        One `Attention` per layer, in the order of the forward pass, with ``w_o`` where the
        projection of the concatenated heads was found.
    """
    chosen = None if layers is None else errors.indices("layers", layers)
    around, closed = errors.flag("around", around), errors.flag("closed", closed)
    capturer = Capturer(measurable(model), chosen, around, closed)
    batch = taken(capturer.model, inputs)
    tell(*unmarked_padding(capturer.model, batch))
    found = [layer.attention for layer in capturer.run(batch)]
    if (sample := verification.most_padded(batch)) is not None:
        capturer.examine(verification.one_sample(batch, sample))
    return found
