"""Bounds on heads together with the layer normalisation in front of them.

Its weights are folded into the projections.
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.attention.rounding import InheritedErrors
from lipbound.bounds.factors import root_count
from lipbound.bounds.registry import get
from lipbound.errors import AttentionError, LipboundError
from lipbound.jacobians.rounding import inherited_error
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.upper import Upper


def normaliser(att: Attention) -> Normaliser:
    """The normalisation in front of a layer.

    Raises:
        AttentionError: a layer that is not known to be fed by one (``lipbound.capture(...,
            around=True)`` finds it).
    """
    fed_by = None if att.surroundings is None else att.surroundings.fed_by
    if fed_by is None:
        raise AttentionError(
            "no normalisation in front of this layer is known; capture it with around=True"
        )
    return fed_by


def fold_normalisation(att: Attention) -> Attention:
    r"""The layer as a function of the bare normalised tokens :math:`u = (x - \bar x)/s`.

    It has the same q, k, v and P, other inputs and weights. With :math:`w, b` the normaliser's
    parameters, :math:`W_Q` becomes :math:`\mathrm{diag}(w) W_Q` and :math:`b_Q` becomes :math:`b_Q
    + W_Q^T b`; likewise for keys and values. Folded inputs have :math:`|u_i| \le \sqrt D`, whatever
    the parameters. Everything is in float64, whose rounding `folding_rounds` knows.

    Args:
        att: the layer.

    Returns:
        The folded layer.

    Raises:
        AttentionError: a layer that is not known to be fed by a normaliser
            (``lipbound.capture(..., around=True)`` finds it).
    """
    att.only("the ellipsoid of normalised inputs")
    norm, att = normaliser(att).double(), att.double()

    def bias(w: Tensor, b: Tensor | None) -> Tensor | None:
        shift = None if norm.bias is None else torch.einsum("d,hde->he", norm.bias.double(), w)
        return b if shift is None else shift if b is None else b + shift

    weights = {"q": att.w_q, "k": att.w_k, "v": att.w_v}
    scaled = (norm.weight[:, None] * w for w in weights.values())
    given = {name: getattr(att, name) for name in ("w_o", "scale", "mask", "valid")}
    given |= {f"b_{side}": bias(w, getattr(att, f"b_{side}")) for side, w in weights.items()}
    return Attention(norm.unit, *scaled, **given)


def folding_rounds(folded: Attention, att: Attention) -> InheritedErrors:
    """Errors of a layer that `fold_normalisation` made, beside the exact one.

    Args:
        folded: that layer. att: the float64 layer it was made of.
    """
    norm = normaliser(att).double()
    length, moved = torch.linalg.vector_norm(norm.unit, dim=-1), norm.rounding[1]
    if att.valid is not None:
        length, moved = (t.masked_fill(~att.valid, 0.0) for t in (length, moved))
    tokens, weights = {}, {}
    for side, w, b in (("q", "w_q", "b_q"), ("k", "w_k", None), ("v", "w_v", None)):
        given, made = getattr(att, w), getattr(folded, w)
        size = torch.linalg.matrix_norm(made)
        weights[w] = 2 * UNIT * size + made[0].numel() * 2.0**-1074
        off = length[:, None] * weights[w][:, None] + 2 * moved[:, None] * size[:, None]
        if b is None:  # keys and values less their means, and their biases drop out
            tokens[side] = 2 * off.amax(-1, keepdim=True).expand_as(off)
            continue
        if norm.bias is not None:
            reach = torch.linalg.vector_norm(norm.bias) * torch.linalg.matrix_norm(given)
            own = torch.linalg.vector_norm(getattr(folded, b), dim=-1)
            off = off + (2 * (given.shape[1] + 8) * UNIT * (reach + own))[:, None]
        tokens[side] = off
    return InheritedErrors(**tokens, **weights)


def after_norm(att: Attention, name: str) -> Tensor:
    r"""A bound on the maps :math:`h \mapsto head(norm(h))`, (samples, heads), float64.

    From the registered bound ``name`` on the folded heads: :math:`L(\text{folded}) \cdot \max_i
    1/s_i` with :math:`s_i` the size that token i is divided by, and what folding rounds: Lemma 24
    (docs/theory/layers.md). Against the bound on the head as it is times the largest norm of the
    normalisation, :math:`\max_k |w_k| / s_i`, it sees which directions the weights w make long.

    Args:
        att: the layer, captured with what stands around it.
        name: registry name of a bound on the head.

    Raises:
        AttentionError: a layer that is not known to be fed by a normaliser.
        LipboundError: an unknown bound, or one on another map.
    """
    bound = get(name)
    if bound.map != "head":
        raise LipboundError(
            f"{name!r} bounds {bound.map} attention, and after_norm the heads of the layer; take "
            "another bound, 'lipbound' for instance"
        )
    folded = fold_normalisation(att)
    lost = Upper.of(2 * inherited_error(folded, folding_rounds(folded, att.double())))
    lost = lost * root_count(att) if bound.norm == "every-token" else lost
    slopes = normaliser(att).slopes
    slopes = slopes if att.valid is None else slopes.masked_fill(~att.valid, 0.0)
    return ((Upper.of(bound(folded)) + lost) * slopes.amax(-1, keepdim=True)).value()
