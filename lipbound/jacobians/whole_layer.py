"""Jacobians of all heads of a layer together, and of what stands around them."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.errors import AttentionError
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.maps import check_block
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.operators import PerEntry, TensorOperator


@dataclass(init=False, eq=False, repr=False)
class LayerJacobian(TensorOperator):
    r"""Closed-form Jacobian of a layer's heads with respect to X, one batch entry per sample.

    Without projection the heads' outputs stand side by side, (N, heads d_v), head by head; with it
    they are projected by their slices ``w_o`` and added, (N, D_out). Both come from the products of
    `HeadOperator` on (dQ, dK, dV) of every head.

    Args:
        att: the layer.
        project: apply ``w_o``.

    Raises:
        AttentionError: when ``w_o`` is asked for and not known.
    """

    heads: HeadOperator
    count: int
    """Number of heads, which are entries of ``heads`` one after the other for each sample."""
    w_o: Tensor | None

    def __init__(self, att: Attention, *, project: bool):
        if project and att.w_o is None:
            raise AttentionError(
                "map 'layer' needs the output projection w_o, which this layer does not have; "
                "use map='heads'"
            )
        self.heads = head_jacobian(att)
        self.count = att.heads
        self.w_o = att.w_o if project else None
        self.batch, self.dtype, self.device = att.samples, att.dtype, att.device
        self.in_shape = (att.tokens, att.x.shape[2])
        width = att.heads * att.d_v if self.w_o is None else self.w_o.shape[2]
        self.out_shape = (att.rows, width)

    def jvp(self, x: Tensor) -> Tensor:
        y = self.heads.push(self.heads.spread(x)).unflatten(0, (-1, self.count))
        if self.w_o is None:
            return y.transpose(1, 2).flatten(2)
        return torch.einsum("shnv,hvo->sno", y, self.w_o)

    def vjp(self, y: Tensor) -> Tensor:
        if self.w_o is None:
            parts = y.unflatten(2, (self.count, -1)).transpose(1, 2)
        else:
            parts = torch.einsum("sno,hvo->shnv", y, self.w_o)
        return self.heads.collect(self.heads.pull(parts.flatten(0, 1)))

    def select(self, index: Tensor | slice) -> Self:
        chosen = torch.arange(self.batch, device=self.device)[index]
        every = torch.arange(self.count, device=self.device)
        heads = self.heads.select((chosen[:, None] * self.count + every).flatten())
        return self._with(batch=len(chosen), heads=heads)


@dataclass(init=False, eq=False, repr=False)
class BlockJacobian(TensorOperator):
    """Closed-form Jacobian of one of `BLOCKS`, one batch entry per sample, (N, D) -> (N, D).

    Raises:
        AttentionError: the layer has no output projection of its own width, or its model does not
            put the normalisation there.
    """

    layer: PerEntry[LayerJacobian]
    before: PerEntry[Normaliser | None]
    after: PerEntry[Normaliser | None]
    real: PerEntry[Tensor | None]
    """(samples, N, 1), 0 for padding, or None."""

    def __init__(self, att: Attention, map: str):
        check_block(att, map)
        self.layer = LayerJacobian(att, project=True)
        around = att.surroundings
        self.before = around.fed_by if around and map == "pre_norm" else None
        self.after = around.followed_by if around and map == "post_norm" else None
        self.real = None if att.valid is None else att.valid[..., None].to(att.dtype)
        self.batch, self.dtype, self.device = att.samples, att.dtype, att.device
        self.in_shape = self.out_shape = self.layer.in_shape

    def jvp(self, x: Tensor) -> Tensor:
        x = x if self.real is None else x * self.real  # padding takes no part
        y = x + self.layer.jvp(x if self.before is None else self.before.jvp(x))
        y = y if self.after is None else self.after.jvp(y)
        return y if self.real is None else y * self.real

    def vjp(self, y: Tensor) -> Tensor:
        y = y if self.real is None else y * self.real
        y = y if self.after is None else self.after.vjp(y)
        x = self.layer.vjp(y)
        x = y + (x if self.before is None else self.before.vjp(x))
        return x if self.real is None else x * self.real
