"""Maps that are measured: one head, all heads, or the layer with what stands around it.

The Jacobians of whole layers are here, too.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.attention.variants.base import Side
from lipbound.errors import AttentionError, LipboundError, choice
from lipbound.jacobians.head import HeadOperator
from lipbound.linalg.operators import PerEntry, TensorOperator
from lipbound.schema import INPUT, KEYS, QUERIES, VALUES, WRT

BLOCKS = {
    "residual": "multi-head attention with a residual connection, x -> x + layer(x)",
    "pre_norm": "residual block with layer normalisation before attention, h -> h + layer(norm(h))",
    "post_norm": "residual block with layer normalisation after it, x -> norm(x + layer(x))",
}


def check_block(att: Attention, map: str) -> None:
    """Check that a layer has what a map of `BLOCKS` needs.

    Raises:
        AttentionError: it does not.
    """
    if att.other_stream is not None:
        raise AttentionError(
            f"map {map!r} needs self-attention; this is cross-attention; use map='layer'"
        )
    if att.w_o is None or att.w_o.shape[2] != att.x.shape[2]:
        raise AttentionError(
            f"map {map!r} needs an output projection back to width {att.x.shape[2]}, which this "
            "layer does not have; use map='heads'"
        )
    if map != "residual" and normaliser_of(att, map) is None:
        place, other = ("before", "post") if map == "pre_norm" else ("after", "pre")
        raise AttentionError(
            f"map {map!r} needs a layer that normalises {place} attention, which this is not "
            f"known to be; try '{other}_norm' or 'residual'"
        )


def normaliser_of(att: Attention, map: str) -> Normaliser | None:
    """The normalisation that takes part in a map of `BLOCKS`."""
    around = att.surroundings
    if around is None or f"{around.residual}_norm" != map:
        return None
    return around.fed_by if map == "pre_norm" else around.followed_by


def block_bound(att: Attention, layer: Tensor, map: str) -> Tensor:
    r"""A bound on a map of `BLOCKS` from one on the layer, (samples,).

    With L the bound on the layer and n the largest norm of a token's normalisation: :math:`1 + L`,
    :math:`1 + L n` before, :math:`n (1 + L)` after: Lemma 22 (docs/theory/layers.md).
    """
    check_block(att, map)
    norm = normaliser_of(att, map)
    if norm is None:
        return (1 + layer) * (1 + 1e-13)
    sizes = norm.norms if att.valid is None else norm.norms.masked_fill(~att.valid, 0.0)
    largest = sizes.amax(-1)
    return (1 + layer * largest if map == "pre_norm" else largest * (1 + layer)) * (1 + 1e-13)


MAPS = {
    "head": "one attention head without output projection, x -> softmax(q k^T) v",
    "head_out": "one attention head followed by its slice of the output projection",
    "heads": "all attention heads of a layer, side by side, without output projection",
    "layer": "multi-head attention: all heads of a layer, with the output projection",
    **BLOCKS,
}
WHOLE = ("heads", "layer", *BLOCKS)
"""Maps of a whole layer: one norm per sample, not per head."""
SIDE_OF: dict[str, Side] = {QUERIES: "q", KEYS: "k", VALUES: "v"}
"""Sides that a head is a function of, by the names of `lipbound.schema.WRT`."""


def check_wrt(wrt: object, map: str) -> Side | None:
    """Return the side that moves alone; None where the inputs move.

    Raises:
        LipboundError: an unknown name, or a map that has no side of its own.
    """
    if choice("wrt", wrt, WRT) == INPUT:
        return None
    if map in WHOLE:
        raise LipboundError(
            f"wrt={wrt!r} is of one head, and map {map!r} of a whole layer; take map='head' or "
            "map='head_out'"
        )
    return SIDE_OF[str(wrt)]


def map_words(map: str, wrt: str = INPUT) -> str:
    """Return what captions say of a map, and of what it is a function of unless of its input."""
    return MAPS[map] if wrt == INPUT else f"{MAPS[map]}, as a function of {WRT[wrt]}"


@dataclass(init=False, eq=False, repr=False)
class LayerJacobian(TensorOperator):
    r"""Closed-form Jacobian of a layer's heads with respect to X, one batch entry per sample.

    Without projection the heads' outputs stand side by side, (N, heads d_v), head by head; with it
    they are projected by their slices ``w_o`` and added, (N, D_out). Both come from the products of
    `HeadOperator` on (dQ, dK, dV) of every head. A residual connection and a normalisation stand
    around them in `BLOCKS`, where padding takes no part.

    Args:
        att: the layer.
        heads: its heads' Jacobians.
        map: of `WHOLE`.

    Raises:
        AttentionError: for one of `BLOCKS` the output projection is not of the layer's own width,
            or its model does not put the normalisation there.
    """

    heads: HeadOperator
    count: int
    """Number of heads, which are entries of ``heads`` one after the other for each sample."""
    w_o: Tensor | None
    residual: bool
    before: PerEntry[Normaliser | None]
    after: PerEntry[Normaliser | None]
    real: PerEntry[Tensor | None]
    """(samples, N, 1), 0 for padding, or None."""

    def __init__(self, att: Attention, heads: HeadOperator, map: str):
        self.residual = map in BLOCKS
        if self.residual:
            check_block(att, map)
        norm = normaliser_of(att, map)
        self.before, self.after = (norm, None) if map == "pre_norm" else (None, norm)
        valid = att.valid if self.residual else None
        self.real = None if valid is None else valid[..., None].to(att.dtype)
        self.heads, self.count = heads, att.heads
        self.w_o = None if map == "heads" else att.w_o
        self.batch, self.dtype, self.device = att.samples, att.dtype, att.device
        self.in_shape = (att.tokens, att.x.shape[2])
        width = att.heads * att.d_v if self.w_o is None else self.w_o.shape[2]
        self.out_shape = (att.rows, width)

    def _counted(self, t: Tensor) -> Tensor:
        return t if self.real is None else t * self.real

    def jvp(self, x: Tensor) -> Tensor:
        x = self._counted(x)
        z = x if self.before is None else self.before.jvp(x)
        heads = self.heads.push(self.heads.spread(z)).unflatten(0, (-1, self.count))
        if self.w_o is None:
            return heads.transpose(1, 2).flatten(2)
        y = torch.einsum("shnv,hvo->sno", heads, self.w_o)
        y = x + y if self.residual else y
        return self._counted(y if self.after is None else self.after.jvp(y))

    def vjp(self, y: Tensor) -> Tensor:
        y = self._counted(y)
        y = y if self.after is None else self.after.vjp(y)
        if self.w_o is None:
            heads = y.unflatten(2, (self.count, -1)).transpose(1, 2)
        else:
            heads = torch.einsum("sno,hvo->shnv", y, self.w_o)
        x = self.heads.collect(self.heads.pull(heads.flatten(0, 1)))
        x = x if self.before is None else self.before.vjp(x)
        return self._counted(y + x if self.residual else x)

    def select(self, index: Tensor | slice) -> Self:
        chosen = torch.arange(self.batch, device=self.device)[index]
        every = torch.arange(self.count, device=self.device)
        heads = self.heads.select((chosen[:, None] * self.count + every).flatten())
        return super().select(index)._with(heads=heads)
