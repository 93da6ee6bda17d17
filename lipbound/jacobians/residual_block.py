"""The Jacobian of an attention layer with what stands around it: residual connection, layer
normalisation before or after."""

from dataclasses import dataclass

from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.jacobians.maps import check_block
from lipbound.jacobians.multihead import LayerJacobian
from lipbound.linalg.operators import PerEntry, TensorOperator


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
