"""What a kind of checkpoint must know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig

from lipbound.models.checkpoint import Checkpoint
from lipbound.models.sources.adapters import Adapter


@dataclass(frozen=True)
class LoadOptions:
    """How `lipbound.models.checkpoints.load_checkpoint` was asked to load a model.

    Attributes:
        revision: branch, tag or commit of a hub model.
        dtype: torch.float32 or torch.float64.
        device: a torch device.
        weights: "auto", "whole" or "layers".
        gguf_file: which GGUF file of a directory or a hub model, or None.
        adapter: what is merged into the weights; "none": not even one that lies beside them; None:
            nothing was said.
        refuse: is shown the configuration, and may raise before the weights are read.
    """

    revision: str | None
    dtype: torch.dtype
    device: str | torch.device
    weights: str
    gguf_file: str | None = None
    adapter: Adapter | str | None = None
    refuse: Callable[[PreTrainedConfig], None] = lambda config: None


class Source(Protocol):
    """One kind of checkpoint. To add one: a class with these two methods, and its place in
    `lipbound.models.checkpoints.SOURCES`."""

    def matches(self, model: object) -> bool:
        """Whether what the user gave is of this kind, or was meant to be: then `load` says what is
        wrong with it."""

    def load(self, model: Any, options: LoadOptions) -> Checkpoint:
        """The model, in evaluation mode, with finite weights that fill its architecture.

        Raises:
            CheckpointError: it is not found, cannot be loaded, or cannot be loaded as the options
                say.
        """
