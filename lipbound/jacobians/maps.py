"""Maps that are measured: one head, all heads, or the layer with what stands around it."""

from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.attention.variants.base import Side
from lipbound.errors import AttentionError, LipboundError, choice
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
    around = att.surroundings
    if map == "pre_norm" and (around is None or around.residual != "pre" or around.fed_by is None):
        raise AttentionError(
            "map 'pre_norm' needs a layer that normalises before attention, which this is not "
            "known to be; try 'post_norm' or 'residual'"
        )
    if map == "post_norm" and (
        around is None or around.residual != "post" or around.followed_by is None
    ):
        raise AttentionError(
            "map 'post_norm' needs a layer that normalises after attention, which this is not "
            "known to be; try 'pre_norm' or 'residual'"
        )


def normaliser_of(att: Attention, map: str) -> Normaliser | None:
    """The normalisation that takes part in a map of `BLOCKS`."""
    around = att.surroundings
    if around is None:
        return None
    return {"pre_norm": around.fed_by, "post_norm": around.followed_by}.get(map)


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
