"""A penalty on a sound bound of the local Lipschitz constant."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.registry import get
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, UnknownNameError, check_layer, nearest, shown


class SoundPenalty:
    r"""Mean over samples of :math:`\sum_{l,h} \log L^{l,h}`, with L a sound bound.

    Far tighter than what `JaSMin` is built on, at a far higher price. To be called with the list of
    `lipbound.models.training.differentiable.attention_layers`, whose layers know their padding.

    Args:
        name: of a registered bound that has derivatives: "lipbound" or "lipbound_block".

    Raises:
        UnknownNameError: another bound.
    """

    NAMES = ("lipbound", "lipbound_block")

    def __init__(self, name: str = "lipbound_block"):
        if name not in self.NAMES:
            raise UnknownNameError(f"unknown penalty bound {name!r}; {nearest(name, self.NAMES)}")
        self.name = name

    @in_own_modes
    def __call__(self, layers: Sequence[Attention]) -> Tensor:
        """Return the penalty, a scalar in float64.

        Args:
            layers: what was found in the context of ``attention_layers``.

        Raises:
            LipboundError: no layers, or what is no list of them.
        """
        if not isinstance(layers, list | tuple):
            raise LipboundError(
                f"layers is {shown(layers)}; give the list of attention_layers(model)"
            )
        for att in layers:
            check_layer(att, "SoundPenalty")
        if not layers:
            raise LipboundError(
                "there are no layers; was the model run inside attention_layers, and has its "
                "context ended?"
            )
        bounds = (get(self.name)(att) for att in layers)
        tiny = torch.finfo(torch.float64).tiny
        return torch.stack([b.clamp_min(tiny).log().sum(-1).mean() for b in bounds]).sum()
