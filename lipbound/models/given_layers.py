"""Layers that are given themselves, in place of a model that they would be captured from."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import CheckpointError, InputsError, tell
from lipbound.models.capture.capture import Capturer, LayerCapture
from lipbound.models.checkpoint import Checkpoint, Inputs, LoadOptions
from lipbound.models.sources.loaded_model import state_sha256

SAMPLE = "sample"
"""The one input of given layers: the numbers of samples, which they have inside."""


class GivenLayers(nn.Module):
    """Attention layers in the place of a model; its parameters are what they are made of."""

    main_input_name = SAMPLE

    def __init__(self, layers: Sequence[Attention | ModuleAttention]):
        super().__init__()
        self.layers = tuple(layers)
        for i, layer in enumerate(layers):
            for name, t in _tensors(layer).items():
                self.register_parameter(f"{name}_{i}", nn.Parameter(t, requires_grad=False))

    def forward(self, sample: Tensor) -> Tensor:
        """Return nothing new: layers hold their inputs."""
        return sample


def _tensors(layer: Attention | ModuleAttention) -> dict[str, Tensor]:
    if isinstance(layer, ModuleAttention):
        return {"stream": layer.stream}
    steps = [t for step in layer.scoring.steps for t in step.inputs()]
    found = {"x": layer.x, **layer.projections.tensors(), "mask": layer.mask, "valid": layer.valid}
    named = {name: t for name, t in found.items() if t is not None}
    return named | {f"step_{i}": t for i, t in enumerate(steps)}


def load_layers(model: object, options: LoadOptions) -> Checkpoint | None:
    """Make a checkpoint of a list of layers.

    Args:
        model: a list or tuple of `Attention`, or of what `lipbound.capture` returns, all with as
            many samples.
        options: dtype and device that they are brought to.

    Returns:
        The checkpoint, whose revision is a hash over all tensors; None for anything else.

    Raises:
        CheckpointError: they have different numbers of samples.
    """
    if not isinstance(model, list | tuple) or not model:
        return None
    if not all(isinstance(layer, Attention | ModuleAttention) for layer in model):
        return None
    options.refuse_given("layers")
    samples = [layer.samples // _windows(layer) for layer in model]
    if len(set(samples)) > 1:
        raise CheckpointError(f"layers must have as many samples each; these have {samples}")
    notes = []
    if cast := sum(isinstance(one, Attention) and one.dtype != options.dtype for one in model):
        wanted = str(options.dtype).removeprefix("torch.")
        notes = [f"{cast} of {len(model)} layers are measured in {wanted}, not in their own dtype"]
        tell(*notes)
    brought = (
        layer.to(options.device).to(options.dtype) if isinstance(layer, Attention) else layer
        for layer in model
    )
    made, name = GivenLayers(tuple(brought)), f"{len(model)} layer{'s' * (len(model) > 1)}"
    return Checkpoint(made, name, state_sha256(made), None, loaded=True, notes=notes)


def _windows(layer: Attention | ModuleAttention) -> int:
    return layer.windows if isinstance(layer, ModuleAttention) else 1


def inputs_of(model: GivenLayers, data: Any, count: int | None) -> Inputs:
    """Return the inputs of given layers, which are those that they hold.

    Args:
        model: of the layers.
        data: must be None.
        count: of samples wanted, or None for all.

    Raises:
        InputsError: data were given.
    """
    if data is not None:
        raise InputsError("layers bring their own inputs; leave out data")
    there = model.layers[0].samples // _windows(model.layers[0])
    return Inputs({SAMPLE: torch.arange(there)[:count]}, "inputs of the layers")


class GivenCapturer(Capturer):
    """Hands out given layers as a `Capturer` does captured ones."""

    def each(
        self, inputs: Mapping[str, Tensor] | Inputs, skip: Collection[int] = ()
    ) -> Iterator[LayerCapture]:
        assert isinstance(self.model, GivenLayers)
        assert isinstance(inputs, Mapping)
        layers, numbers = self.model.layers, inputs[SAMPLE]
        self.count = len(layers)
        first, stop = int(numbers[0]), int(numbers[-1]) + 1
        for position, i in enumerate(self._chosen(self.count)):
            if position not in skip:
                windows = _windows(layers[i])
                part = layers[i].select(slice(first * windows, stop * windows))
                yield LayerCapture(i, f"layers.{i}", part, 0.0, windows)

    def examine(self, inputs: Mapping[str, Tensor]) -> None:
        """Tell nothing: samples of a layer do not see each other."""
