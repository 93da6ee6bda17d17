"""What a model's forward pass is given, sample by sample."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Inputs:
    """A batch for a model's forward pass, with where it came from.

    Attributes:
        batch: tensors whose first axis is the sample.
        description: one phrase for captions.
        preprocessing: what made the tensors out of the data, in words.
        options: settings of the forward pass, True or False, for all samples alike.
        notes: sentences on what is not as it was asked for, such as fewer samples.
        fingerprint: "sha256:..." over the tensors.
    """

    batch: dict[str, Tensor]
    description: str
    preprocessing: str = "none: ready model inputs"
    notes: list[str] = field(default_factory=list)
    options: dict[str, bool] = field(default_factory=dict)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.batch.items())
        return f"Inputs({shapes}; {self.description})"

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(next(iter(self.batch.values())))

    @property
    def fingerprint(self) -> str:
        """Hash of names and values of the tensors, the same on every machine."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.batch.items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        for name, option in sorted(self.options.items()):
            digest.update(f"{name}={option}".encode())
        return "sha256:" + digest.hexdigest()

    def block(self, start: int, stop: int, device: str) -> dict[str, Any]:
        """Samples start...stop-1, on a device, and the options."""
        return {
            name: tensor[start:stop].to(device) for name, tensor in self.batch.items()
        } | self.options
