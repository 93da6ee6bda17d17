"""Memory for large temporaries that is used again: fresh pages would cost as much as the arithmetic on them."""

import torch
from torch import Tensor


class Room:
    """Memory for one temporary after the other, each of which ends the one before."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """A tensor of this shape with arbitrary entries, in the dtype and on the device of ``like``."""
        size, kept = torch.Size(shape).numel(), self._kept
        if kept is None or kept.numel() < size or kept.dtype != like.dtype or kept.device != like.device:
            self._kept = kept = like.new_empty(size)
        return kept[:size].view(shape)
