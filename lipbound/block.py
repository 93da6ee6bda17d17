"""The Jacobian of an attention layer with what stands around it: residual connection, layer normalisation before or after."""

import torch
from torch import Tensor

from lipbound.attention import Attention
from lipbound.errors import AttentionError
from lipbound.layer import LayerJacobian
from lipbound.normalisation import Normaliser
from lipbound.operators import JacobianOperator

BLOCKS = {
    "residual": "multi-head attention with a residual connection, x -> x + layer(x)",
    "pre_norm": "residual block with layer normalisation before attention, h -> h + layer(norm(h))",
    "post_norm": "residual block with layer normalisation after it, x -> norm(x + layer(x))",
}


class BlockJacobian(JacobianOperator):
    """Closed-form Jacobian of one of `BLOCKS`, one batch entry per sample, (N, D) -> (N, D).

    Raises:
        AttentionError: the layer has no output projection of its own width, or its model does not put the normalisation there.
    """

    def __init__(self, att: Attention, map: str):
        check(att, map)
        self._layer = LayerJacobian(att, project=True)
        around = att.surroundings
        self._before: Normaliser | None = around.fed_by if around and map == "pre_norm" else None
        self._after: Normaliser | None = around.followed_by if around and map == "post_norm" else None
        self._real = None if att.valid is None else att.valid[..., None].to(att.dtype)
        self.batch, self.dtype, self.device = att.samples, att.dtype, att.device
        self.in_shape = self.out_shape = self._layer.in_shape

    def jvp(self, x: Tensor) -> Tensor:
        x = x if self._real is None else x * self._real  # padding takes no part
        y = x + self._layer.jvp(x if self._before is None else self._before.jvp(x))
        y = y if self._after is None else self._after.jvp(y)
        return y if self._real is None else y * self._real

    def vjp(self, y: Tensor) -> Tensor:
        y = y if self._real is None else y * self._real
        y = y if self._after is None else self._after.vjp(y)
        x = self._layer.vjp(y)
        x = y + (x if self._before is None else self._before.vjp(x))
        return x if self._real is None else x * self._real

    def select(self, index: Tensor) -> "BlockJacobian":
        part = self._copy(self._layer.select(index))
        part._before, part._after = (None if norm is None else norm.select(index) for norm in (self._before, self._after))
        part._real = None if self._real is None else self._real[index]
        part.batch = len(index)
        return part

    def double(self) -> "BlockJacobian":
        other = self._copy(self._layer.double())
        other._before, other._after = (None if norm is None else norm.map(Tensor.double) for norm in (self._before, self._after))
        other._real = None if self._real is None else self._real.double()
        other.dtype = torch.float64
        return other

    def _copy(self, layer: LayerJacobian) -> "BlockJacobian":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._layer = layer
        return other


def check(att: Attention, map: str) -> None:
    """Raise AttentionError where a layer does not have what a map of `BLOCKS` needs."""
    if att.w_o is None or att.w_o.shape[2] != att.x.shape[2]:
        raise AttentionError(
            f"map {map!r} needs an output projection back to width {att.x.shape[2]}, which this layer does not have; use map='heads'"
        )
    around = att.surroundings
    if map == "pre_norm" and (around is None or around.residual != "pre" or around.fed_by is None):
        raise AttentionError(
            "map 'pre_norm' needs a layer that normalises before attention, which this is not known to be; try 'post_norm' or 'residual'"
        )
    if map == "post_norm" and (around is None or around.residual != "post" or around.followed_by is None):
        raise AttentionError(
            "map 'post_norm' needs a layer that normalises after attention, which this is not known to be; try 'pre_norm' or 'residual'"
        )


def block_bound(att: Attention, layer: Tensor, map: str) -> Tensor:
    r"""A bound on a map of `BLOCKS` from one on the layer, (samples,).

    With L the bound on the layer and n the largest norm of a token's normalisation: :math:`1 + L`, :math:`1 + L n` before, :math:`n (1 + L)` after.
    """
    check(att, map)
    around = att.surroundings
    norm = None if around is None else {"pre_norm": around.fed_by, "post_norm": around.followed_by}.get(map)
    if norm is None:
        return (1 + layer) * (1 + 1e-13)
    sizes = norm.norms if att.valid is None else norm.norms.masked_fill(~att.valid, 0.0)
    largest = sizes.amax(-1)
    return (1 + layer * largest if map == "pre_norm" else largest * (1 + layer)) * (1 + 1e-13)
