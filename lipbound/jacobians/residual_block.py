"""The Jacobian of an attention layer with what stands around it: residual connection, layer normalisation before or after."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.jacobians.maps import check_block
from lipbound.jacobians.multihead import LayerJacobian
from lipbound.linalg.operators import JacobianOperator


class BlockJacobian(JacobianOperator):
    """Closed-form Jacobian of one of `BLOCKS`, one batch entry per sample, (N, D) -> (N, D).

    Raises:
        AttentionError: the layer has no output projection of its own width, or its model does not put the normalisation there.
    """

    def __init__(self, att: Attention, map: str):
        check_block(att, map)
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
