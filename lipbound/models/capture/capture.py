"""From a transformers model and a batch of inputs to the `Attention` of every layer, whatever the
architecture.

The model is run with an attention function of our own (`lipbound.models.capture.recorder`), which
records what it is handed and lets the model's own eager attention do the computing. The projections
are read off by probing (`lipbound.models.capture.probing`). Every capture is checked against the
model: rebuilt q, k, v against those of the forward pass, and rebuilt head outputs against a second
pass through the model's untouched eager attention.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from lipbound.attention.layer import Attention
from lipbound.devices import in_own_modes, measuring_device
from lipbound.errors import CaptureError, flag, indices, tell
from lipbound.models.batch import Inputs
from lipbound.models.capture.assembly import about_padding, assemble, check_mask, valid_tokens
from lipbound.models.capture.batch_dependence import dependence, telling_samples
from lipbound.models.capture.left_out import AttentionFinder, left_out
from lipbound.models.capture.probing import ProbedWeights, Turns, probe
from lipbound.models.capture.recorder import (
    RECORDING_ATTENTION,
    Call,
    hidden_states,
    implementation,
    record,
    taken,
)
from lipbound.models.capture.residual_detection import Seen, surroundings, watching
from lipbound.models.capture.verification import (
    EagerAttention,
    check_call,
    check_rebuilt,
    one_sample,
    own_outputs,
    verify_outputs,
)
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.offload import by_layer
from lipbound.models.precision import measurable
from lipbound.models.readers.model_inputs import odd_masks
from lipbound.models.unwrapping import bare_inputs, bare_model

ROTATIONS = 4
"""How many of the rotations found last are tried on the next layer, which mostly has one of them.
"""


@dataclass
class LayerCapture:
    """Attention of one layer with what the check against the model said."""

    index: int
    name: str
    attention: Attention
    error: float
    """Largest relative error of rebuilt q, k, v and head outputs against the model's own."""


@dataclass
class Capturer:
    """Captures the attention of a model, batch after batch; weights are probed and the model
    verified on the first.

    Of a model that is read layer by layer (`lipbound.models.offload`) weights are probed for every
    batch, one layer in memory at a time.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``.
        layers: indices of attention calls, in the order of the forward pass; all by default.
        around: also find what stands around each layer
            (`lipbound.models.capture.residual_detection`).
    """

    model: PreTrainedModel
    layers: Sequence[int] | None = None
    around: bool = False
    count: int | None = field(default=None, init=False)
    """How many attention layers the model has, once it was run."""
    notes: list[str] = field(default_factory=list)
    """What there was to tell: attention that is left out, padding that is none, numbers that depend
    on the batch."""
    _watched: bool = False
    _weights: dict[int, ProbedWeights] = field(default_factory=dict)
    _turns: list[Turns] = field(default_factory=list)
    _verified: dict[tuple[bool, int], float] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, Tensor] | Inputs) -> list[LayerCapture]:
        """The attention of every (chosen) layer at these model inputs, in the model's dtype and on
        its device (the CPU where that has no float64); see `each`."""
        return list(self.each(inputs))

    def each(
        self, inputs: Mapping[str, Tensor] | Inputs, skip: Collection[int] = ()
    ) -> Iterator[LayerCapture]:
        """The attention of one (chosen) layer after the other, but for those at the positions
        ``skip``.

        Raises:
            CaptureError: the model never calls the attention interface, or a layer is not what
                `Attention` describes (latent attention, cross-attention, other transformations of
                queries and keys), or the rebuilt layer does not reproduce the model; the message
                names the layer and the reason.
        """
        inputs = taken(self.model, inputs)
        with (
            implementation(self.model, RECORDING_ATTENTION),
            watching(self.model if self.around else None) as seen,
        ):
            calls = self._record(inputs)
        self.count = len(calls)
        own_inputs, home = inputs, measuring_device(calls[0].q.device)
        calls, inputs = (
            [call.to(home) for call in calls],
            {name: t.to(home) if isinstance(t, Tensor) else t for name, t in inputs.items()},
        )
        seen = [Seen(s.module, s.x.to(home), s.out.to(home)) for s in seen]
        chosen = [i for position, i in enumerate(self._chosen(self.count)) if position not in skip]
        valid = {i: valid_tokens(calls[i], inputs) for i in chosen}
        for i in chosen:
            check_mask(calls[i], valid[i])
            check_call(calls[i], valid[i])
        self._note(*about_padding([calls[i] for i in chosen], list(valid.values())))
        fresh = [
            i for i in chosen if (valid[i] is not None, i) not in self._verified
        ]  # once without padding, once with
        samples = {
            i: 0 if (v := valid[i]) is None else int((~v).any(-1).nonzero()[0]) for i in fresh
        }
        own: dict[int, EagerAttention] = {}
        for sample in sorted(set(samples.values())):
            compared = [calls[i] for i in fresh if samples[i] == sample]
            own |= own_outputs(
                self.model, own_inputs, compared, sample, len(hidden_states(compared[0]))
            )
        for i in chosen:
            attention, error = self._layer(i, calls[i], valid[i])
            if i in samples:
                mine = own[id(calls[i])].to(home)
                self._verified[valid[i] is not None, i] = verify_outputs(
                    calls[i], attention, mine, samples[i]
                )
            attention.surroundings = surroundings(attention, seen) if self.around else None
            attention.cache.drop(
                "p", "weights", "out"
            )  # of all layers at once they would fill the memory
            yield LayerCapture(
                i,
                calls[i].name,
                attention,
                max([error, *(e for (_, j), e in self._verified.items() if j == i)]),
            )

    def examine(self, inputs: Mapping[str, Tensor]) -> None:
        """Tell whether the numbers of one sample, given with the padding that it has in its batch,
        depend on more than its own tokens."""
        self._note(*dependence(self.model, inputs))

    def _record(self, inputs: Mapping[str, Tensor]) -> list[Call]:
        """The calls of a forward pass; on the first, attention that the model computes without
        calling is told."""
        if self._watched:
            return record(self.model, inputs)
        watch, self._watched = AttentionFinder(), True
        calls = record(self.model, inputs, watch=watch)
        self._note(*left_out(self.model, watch, {call.name for call in calls}))
        return calls

    def _note(self, *notes: str) -> None:
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                tell(note)

    def _layer(self, i: int, call: Call, valid: Tensor | None) -> tuple[Attention, float]:
        """One layer, and its error against the recorded pass."""
        weights = self._probed(i, call)
        attention = assemble(call, weights, valid)
        return attention, check_rebuilt(self.model, call, attention, weights)

    def forget(self) -> None:
        """Verify the next batch against the model again, whatever was verified before; probed
        weights stay."""
        self._verified.clear()

    def release(self) -> None:
        """Free the probed weights; they are probed again when they are needed."""
        self._weights.clear()

    def _probed(self, i: int, call: Call) -> ProbedWeights:
        weights = self._weights.get(i)
        if weights is None or not weights.belongs_to(call):
            with implementation(self.model, RECORDING_ATTENTION):
                weights = probe(call, self._turns)
            found = weights.turns
            if found is not None and all(
                found.rotation is not turns.rotation for turns in self._turns
            ):
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
    """The `Attention` of every layer of a transformers model at a batch of ready inputs, checked
    against the model.

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

    Raises:
        CaptureError: see `Capturer.run`.
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
