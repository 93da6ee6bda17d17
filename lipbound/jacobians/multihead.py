"""The Jacobian of all heads of a layer together, with or without the output projection."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.errors import AttentionError
from lipbound.jacobians.head_streaming import head_jacobian
from lipbound.linalg.operators import JacobianOperator


class LayerJacobian(JacobianOperator):
    r"""Closed-form Jacobian of a layer's heads with respect to their common input X, one batch entry per sample.

    Without projection the heads' outputs stand side by side, (N, heads d_v), head by head; with it they are projected by their slices ``w_o`` and
    added, (N, D_out). Both come from the products of `HeadJacobian` on (dQ, dK, dV) of every head.

    Args:
        att: the layer.
        project: apply ``w_o``.

    Raises:
        AttentionError: when ``w_o`` is asked for and not known.
    """

    def __init__(self, att: Attention, *, project: bool):
        if project and att.w_o is None:
            raise AttentionError("map 'layer' needs the output projection w_o, which this layer does not have; use map='heads'")
        self._heads = head_jacobian(att)
        self._count = att.heads
        self._w_o = att.w_o if project else None
        self.batch, self.dtype, self.device = att.samples, att.dtype, att.device
        self.in_shape = (att.tokens, att.x.shape[2])
        self.out_shape = (att.tokens, att.heads * att.d_v if self._w_o is None else self._w_o.shape[2])

    def jvp(self, x: Tensor) -> Tensor:
        y = self._heads.push(self._heads.spread(x)).unflatten(0, (-1, self._count))
        if self._w_o is None:
            return y.transpose(1, 2).flatten(2)
        return torch.einsum("shnv,hvo->sno", y, self._w_o)

    def vjp(self, y: Tensor) -> Tensor:
        parts = y.unflatten(2, (self._count, -1)).transpose(1, 2) if self._w_o is None else torch.einsum("sno,hvo->shnv", y, self._w_o)
        return self._heads.collect(self._heads.pull(parts.flatten(0, 1)))

    def select(self, index: Tensor) -> "LayerJacobian":
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        heads = torch.arange(self._count, device=self.device)
        part._heads = self._heads.select((index[:, None] * self._count + heads).flatten())
        part.batch = len(index)
        return part

    def double(self) -> "LayerJacobian":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.dtype, other._heads = torch.float64, self._heads.double()
        other._w_o = None if self._w_o is None else self._w_o.double()
        return other
