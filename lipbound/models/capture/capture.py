"""The `Attention` of every layer of a transformers model at a batch of inputs.

The model runs with an attention function of our own (`lipbound.models.capture.seeing.interface`),
which records what it is handed and lets the model's own eager attention do the computing. The
projections are read off by probing (`lipbound.models.capture.probing`), whatever the architecture.
Every capture is checked against the model: rebuilt q, k, v against those of the forward pass, and
rebuilt head outputs against a second pass through the model's untouched eager attention.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from lipbound.attention.layer import Attention
from lipbound.devices import in_own_modes, measuring_device
from lipbound.errors import CaptureError, flag, indices, tell
from lipbound.models.capture.assembly import about_padding, assemble, check_mask, valid_tokens
from lipbound.models.capture.batch_dependence import dependence, telling_samples
from lipbound.models.capture.probing import ProbedWeights, Turns, probe
from lipbound.models.capture.residual_detection import Seen, surroundings, watching
from lipbound.models.capture.seeing import interface
from lipbound.models.capture.seeing.call import Call
from lipbound.models.capture.seeing.left_out import AttentionFinder, left_out
from lipbound.models.capture.verification import (
    EagerAttention,
    check_call,
    check_rebuilt,
    one_sample,
    own_outputs,
    verify_outputs,
)
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.offload import by_layer
from lipbound.models.readers.model_inputs import odd_masks
from lipbound.models.sources.loaded_model import bare_inputs, bare_model, measurable

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
    """

    index: int
    name: str
    attention: Attention
    error: float


@dataclass
class Capturer:
    """Captures the attention of a model, batch after batch.

    Weights are probed, and the model verified, on the first batch; of a model that is read layer by
    layer (`lipbound.models.offload`) weights are probed for every batch, one layer in memory at a
    time.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``.
        layers: indices of attention calls, in the order of the forward pass; all by default.
        around: also find what stands around each layer
            (`lipbound.models.capture.residual_detection`).

    Attributes:
        count: how many attention layers the model has, once it was run.
        notes: what there was to tell: attention that is left out, padding that is none, numbers
            that depend on the batch.
    """

    model: PreTrainedModel
    layers: Sequence[int] | None = None
    around: bool = False
    count: int | None = field(default=None, init=False)
    notes: list[str] = field(default_factory=list)
    _watched: bool = False
    _weights: dict[int, ProbedWeights] = field(default_factory=dict)
    _turns: list[Turns] = field(default_factory=list)
    _verified: dict[tuple[bool, int], float] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, Tensor] | Inputs) -> list[LayerCapture]:
        """Return the attention of every (chosen) layer, in the model's dtype; see `each`.

        It is on the model's device, or on the CPU where that has no float64.
        """
        return list(self.each(inputs))

    def each(
        self, inputs: Mapping[str, Tensor] | Inputs, skip: Collection[int] = ()
    ) -> Iterator[LayerCapture]:
        """Yield the attention of one (chosen) layer after the other.

        CaptureError is raised where the model never calls the attention interface, or a layer is
        not what `Attention` describes (latent attention, cross-attention, other transformations of
        queries and keys), or the rebuilt layer does not reproduce the model; it names the layer and
        the reason.

        Args:
            inputs: what the model's forward takes.
            skip: positions, among the chosen layers, of those that are left out.
        """
        inputs = interface.taken(self.model, inputs)
        seen: list[Seen]
        with (
            interface.implementation(self.model, interface.RECORDING_ATTENTION),
            watching(self.model if self.around else None) as seen,
        ):
            calls = self._record(inputs)
        self.count = len(calls)
        home = measuring_device(calls[0].q.device)
        calls = [call.to(home) for call in calls]
        seen = [Seen(s.module, s.x.to(home), s.out.to(home)) for s in seen]
        chosen = [i for position, i in enumerate(self._chosen(self.count)) if position not in skip]
        there = {name: t.to(home) if isinstance(t, Tensor) else t for name, t in inputs.items()}
        valid = {i: valid_tokens(calls[i], there) for i in chosen}
        for i in chosen:
            check_mask(calls[i], valid[i])
            check_call(calls[i], valid[i])
        self._note(*about_padding([calls[i] for i in chosen], list(valid.values())))
        own = self._own_outputs(inputs, calls, valid)
        for i in chosen:
            weights = self._probed(i, calls[i])
            attention = assemble(calls[i], weights, valid[i])
            error = check_rebuilt(self.model, calls[i], attention, weights)
            if i in own:
                seen_there, sample = own[i]
                verified = verify_outputs(calls[i], attention, seen_there, sample)
                self._verified[valid[i] is not None, i] = verified
            attention.surroundings = surroundings(attention, seen) if self.around else None
            # of all layers at once they would fill the memory
            attention.cache.drop("p", "weights", "out")
            errors = [error, *(e for (_, j), e in self._verified.items() if j == i)]
            yield LayerCapture(i, calls[i].name, attention, max(errors))

    def examine(self, inputs: Mapping[str, Tensor]) -> None:
        """Tell whether the numbers of one sample depend on more than its own tokens.

        Args:
            inputs: of that sample, with the padding that it has in its batch.
        """
        self._note(*dependence(self.model, inputs))

    def forget(self) -> None:
        """Verify the next batch against the model again; probed weights stay."""
        self._verified.clear()

    def release(self) -> None:
        """Free the probed weights; they are probed again when they are needed."""
        self._weights.clear()

    def _record(self, inputs: Mapping[str, Tensor]) -> list[Call]:
        """Return the calls of a pass, the first of which also looks for attention without calls."""
        if self._watched:
            return interface.record(self.model, inputs)
        watch, self._watched = AttentionFinder(), True
        calls = interface.record(self.model, inputs, watch=watch)
        self._note(*left_out(self.model, watch, {call.name for call in calls}))
        return calls

    def _note(self, *notes: str) -> None:
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                tell(note)

    def _own_outputs(
        self, inputs: Mapping[str, Tensor], calls: list[Call], valid: dict[int, Tensor | None]
    ) -> dict[int, tuple[EagerAttention, int]]:
        """Return the model's own outputs of layers not yet verified, and of which sample they are.

        A layer is verified once without padding, once with.
        """
        samples = {
            i: 0 if mask is None else int((~mask).any(-1).nonzero()[0])
            for i, mask in valid.items()
            if (mask is not None, i) not in self._verified
        }
        found: dict[int, tuple[EagerAttention, int]] = {}
        for sample in sorted(set(samples.values())):
            compared = [i for i in samples if samples[i] == sample]
            of_these = [calls[i] for i in compared]
            own = own_outputs(self.model, inputs, of_these, sample, len(of_these[0].x))
            found |= {i: (own[id(calls[i])], sample) for i in compared}
        return found

    def _probed(self, i: int, call: Call) -> ProbedWeights:
        weights = self._weights.get(i)
        if weights is None or not weights.belongs_to(call):
            with interface.implementation(self.model, interface.RECORDING_ATTENTION):
                weights = probe(call, self._turns)
            found = weights.turns
            if found and all(found.rotation is not turns.rotation for turns in self._turns):
                self._turns = [*self._turns, found][-ROTATIONS:]
            if not by_layer(self.model):  # its weights are many
                self._weights[i] = weights
        return weights

    def _chosen(self, count: int) -> list[int]:
        if self.layers is None:
            return list(range(count))
        layers = indices("layers", self.layers)
        wrong = [i for i in layers if not -count <= i < count]
        if wrong:
            raise CaptureError(
                f"layers {wrong} do not exist: the model has {count} attention layers, numbered "
                f"0 to {count - 1}"
            )
        if not layers:
            raise CaptureError(
                f"layers is empty; name some of the {count} attention layers, or None for all"
            )
        return list(dict.fromkeys(i % count for i in layers))


@in_own_modes
def capture(
    model: PreTrainedModel | Checkpoint,
    inputs: Mapping[str, Tensor] | Inputs,
    *,
    layers: Sequence[int] | int | str | None = None,
    around: bool = False,
) -> list[Attention]:
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

    Returns:
        One `Attention` per layer, in the order of the forward pass, with ``w_o`` where the
        projection of the concatenated heads was found.
    """
    chosen = None if layers is None else indices("layers", layers)
    bare = bare_model(model)
    batch = bare_inputs(inputs, bare)
    for said in odd_masks(bare, batch) if isinstance(batch, Mapping) else []:
        tell(said)
    capturer = Capturer(measurable(bare), chosen, flag("around", around))
    found = [layer.attention for layer in capturer.run(batch)]
    for sample in telling_samples(batch):
        capturer.examine(one_sample(batch, sample))
    return found
