"""From a transformers model and a batch of inputs to the `Attention` of every layer, whatever the architecture.

The model is run with an attention function of our own (`lipbound.models.capture.recorder`), which records what it is handed and lets the model's own
eager attention do the computing. The projections are read off by probing (`lipbound.models.capture.probing`). Every capture is checked against the
model: rebuilt q, k, v against those of the forward pass, and rebuilt head outputs against a second pass through the model's untouched eager
attention.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from lipbound.attention.layer import Attention
from lipbound.errors import CaptureError, flag, indices
from lipbound.models.capture.assembly import assemble, valid_tokens
from lipbound.models.capture.probing import Turns, Weights, probe
from lipbound.models.capture.recorder import RECORDING_ATTENTION, Call, check_model, hidden_states, implementation, record, taken
from lipbound.models.capture.residual_detection import Seen, surroundings, watching
from lipbound.models.capture.verification import check_rebuilt, own_outputs, verify_outputs
from lipbound.models.offload import by_layer
from lipbound.models.precision import measurable

ROTATIONS = 4
"""How many of the rotations found last are tried on the next layer, which mostly has one of them."""


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
    """Captures the attention of a model, batch after batch; weights are probed and the model verified on the first.

    Of a model that is read layer by layer (`lipbound.models.offload`) weights are probed for every batch, one layer in memory at a time.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``.
        layers: indices of attention calls, in the order of the forward pass; all by default.
        around: also find what stands around each layer (`lipbound.models.capture.residual_detection`).
    """

    model: PreTrainedModel
    layers: Sequence[int] | None = None
    around: bool = False
    count: int | None = field(default=None, init=False)
    """How many attention layers the model has, once it was run."""
    _weights: dict[int, Weights] = field(default_factory=dict)
    _turns: list[Turns] = field(default_factory=list)
    _verified: dict[tuple[bool, int], float] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, Tensor]) -> list[LayerCapture]:
        """The attention of every (chosen) layer at these model inputs, in the model's dtype and on its device; see `each`."""
        return list(self.each(inputs))

    def each(self, inputs: Mapping[str, Tensor], skip: Collection[int] = ()) -> Iterator[LayerCapture]:
        """The attention of one (chosen) layer after the other, but for those at the positions ``skip``.

        Raises:
            CaptureError: the model never calls the attention interface, or a layer is not what `Attention` describes (latent attention,
                cross-attention, other transformations of queries and keys), or the rebuilt layer does not reproduce the model; the message names
                the layer and the reason.
        """
        inputs = taken(self.model, inputs)
        with implementation(self.model, RECORDING_ATTENTION), watching(self.model if self.around else None) as seen:
            calls = record(self.model, inputs)
        self.count = len(calls)
        chosen = [i for position, i in enumerate(self._chosen(self.count)) if position not in skip]
        if not chosen:
            return
        valid = valid_tokens(inputs, hidden_states(calls[chosen[0]]))
        padded = valid is not None
        fresh = [i for i in chosen if (padded, i) not in self._verified]  # once without padding, once with
        sample = 0 if valid is None else int((~valid).any(-1).nonzero()[0])
        own = own_outputs(self.model, inputs, [calls[i] for i in fresh], sample, len(hidden_states(calls[chosen[0]]))) if fresh else {}
        for i in chosen:
            yield self._layer(i, calls[i], inputs, own.get(id(calls[i])), sample, seen)

    def _layer(self, i: int, call: Call, inputs: Mapping[str, Tensor], own: Tensor | None, sample: int, seen: Sequence[Seen]) -> LayerCapture:
        """One layer; ``own``: what the model itself passes on at a sample, where that is to be checked."""
        weights = self._probed(i, call)
        attention = assemble(call, weights, inputs)
        error = check_rebuilt(call, attention, weights)
        if own is not None:
            self._verified[attention.valid is not None, i] = verify_outputs(call, attention, own, sample)
        attention.surroundings = surroundings(attention, seen) if self.around else None
        attention.cache.drop("p", "weights", "out")  # of all layers at once they would fill the memory
        return LayerCapture(i, call.name, attention, max([error, *(e for (_, j), e in self._verified.items() if j == i)]))

    def forget(self) -> None:
        """Verify the next batch against the model again, whatever was verified before; probed weights stay."""
        self._verified.clear()

    def release(self) -> None:
        """Free the probed weights; they are probed again when they are needed."""
        self._weights.clear()

    def _probed(self, i: int, call: Call) -> Weights:
        weights = self._weights.get(i)
        if weights is None or not weights.belongs_to(call):
            with implementation(self.model, RECORDING_ATTENTION):
                weights = probe(call, self._turns)
            found = weights.turns
            if found is not None and all(found.rotation is not turns.rotation for turns in self._turns):
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
            raise CaptureError(f"layers {wrong} do not exist: the model has {count} attention layers, numbered 0 to {count - 1}")
        if not layers:
            raise CaptureError(f"layers is empty; name some of the {count} attention layers, or None for all")
        return list(dict.fromkeys(i % count for i in layers))


def capture(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], *, layers: Sequence[int] | int | str | None = None, around: bool = False
) -> list[Attention]:
    """The `Attention` of every layer of a transformers model at a batch of ready inputs, checked against the model.

    Args:
        model: a loaded transformers model; any task class. Of one in half precision a copy in float32 is captured, and a
            `lipbound.errors.Notice` says so.
        inputs: what its forward takes, e.g. ``tokenizer(texts, return_tensors="pt", padding=True)``.
        layers: indices of the attention layers wanted, one, several, or text such as "0-3,7"; all by default.
        around: also find residual connection and layer normalisation, for the maps "pre_norm" and "post_norm".

    Returns:
        One `Attention` per layer, in the order of the forward pass, with ``w_o`` where the projection of the concatenated heads was found.

    Raises:
        CaptureError: see `Capturer.run`.
    """
    check_model(model)
    chosen = None if layers is None else indices("layers", layers)
    return [layer.attention for layer in Capturer(measurable(model), chosen, flag("around", around)).run(inputs)]
