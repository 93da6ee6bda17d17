"""Bounds on heads together with the layer normalisation in front of them.

Its weights are folded into the projections.
"""

from functools import partial

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.registry import get
from lipbound.errors import AttentionError
from lipbound.linalg.upper import Upper


def fold_normalisation(att: Attention) -> Attention:
    r"""The layer as a function of the bare normalised tokens :math:`u = (x - \bar x)/s`.

    It has the same q, k, v and P, other inputs and weights. With :math:`w, b` the normaliser's
    parameters, :math:`W_Q` becomes :math:`\mathrm{diag}(w) W_Q` and :math:`b_Q` becomes :math:`b_Q
    + W_Q^T b`; likewise for keys and values. Folded inputs have :math:`|u_i| \le \sqrt D`, whatever
    the parameters. Everything is in float64, and its rounding there is not counted.

    Args:
        att: the layer.

    Returns:
        The folded layer.

    Raises:
        AttentionError: a layer that is not known to be fed by a normaliser
            (``lipbound.capture(..., around=True)`` finds it).
    """
    att.only("the ellipsoid of normalised inputs")
    fed_by = None if att.surroundings is None else att.surroundings.fed_by
    if fed_by is None:
        raise AttentionError(
            "no normalisation in front of this layer is known; capture it with around=True"
        )

    att, norm = att.double(), fed_by.double()

    def bias(w: Tensor, b: Tensor | None) -> Tensor | None:
        shift = None if norm.bias is None else torch.einsum("d,hde->he", norm.bias.double(), w)
        return b if shift is None else shift if b is None else b + shift

    scaled = [norm.weight[:, None] * w for w in (att.w_q, att.w_k, att.w_v)]
    b_q, b_k, b_v = (
        bias(w, b) for w, b in ((att.w_q, att.b_q), (att.w_k, att.b_k), (att.w_v, att.b_v))
    )
    layer = partial(Attention, norm.unit, *scaled, w_o=att.w_o, scale=att.scale, mask=att.mask)
    return layer(b_q=b_q, b_k=b_k, b_v=b_v, valid=att.valid)


def after_norm(att: Attention, name: str) -> Tensor:
    r"""A bound on the maps :math:`h \mapsto head(norm(h))`, (samples, heads), float64.

    From the registered bound ``name`` on the folded heads: :math:`L(\text{folded}) \cdot \max_i
    1/s_i` with :math:`s_i` the size that token i is divided by: Lemma 24 (docs/theory/layers.md).
    Against the bound on the head as it is times the largest norm of the normalisation,
    :math:`\max_k |w_k| / s_i`, it sees which directions the weights w make long.
    """
    folded = fold_normalisation(att)
    assert att.surroundings is not None
    assert att.surroundings.fed_by is not None
    size = 1 / att.surroundings.fed_by.size[..., 0]
    size = size if att.valid is None else size.masked_fill(~att.valid, 0.0)
    return (Upper.of(get(name)(folded)) * size.amax(-1, keepdim=True) * (1 + 1e-12)).value()
