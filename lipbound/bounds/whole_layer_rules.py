r"""Bounds on whole layers from bounds on their heads.

With :math:`L_h` a bound on head h, :math:`W_O^h` its slice of the output projection (d_v x D_out)
and :math:`W_O` all of them stacked:

- ``"sum"``: all heads side by side ("heads") :math:`\sum_h L_h` (Yudin et al. 2025, section 3);
  with the output projection ("layer") :math:`\sum_h \|W_O^h\| L_h` (Castin et al. 2024, Lemma 3.8);
- ``"root_sum_square"``: :math:`(\sum_h L_h^2)^{1/2}` (Yudin et al. 2025), and
  :math:`\|W_O\| (\sum_h L_h^2)^{1/2}`;
- ``"folded"`` (ours): the same for "heads", and for "layer" see `folded`;
- ``"best"``: the smaller of the published two, and for our own bounds of all three.

Proof: Lemmas 19 and 20 (docs/theory/layers.md); in the norms of single tokens Lemma 98
(docs/theory/token_bounds.md).
"""

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.bounds.factors import root_count, size, wide
from lipbound.bounds.registry import get, resolve
from lipbound.bounds.statement import Bound, formula_rounding
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, check_layer, choice
from lipbound.jacobians.maps import BLOCKS, block_bound
from lipbound.jacobians.rounding import folding_loss
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.matrix_norms import matrix_norm

RULES = ("best", "sum", "root_sum_square", "folded")
MAPS_OF_LAYERS = ("heads", "layer", *BLOCKS)


def names_for(bounds: str | list[str], map: str, norm: str = "frobenius") -> list[str]:
    """Names of the bounds that say something about a map in a norm.

    Those on L2 attention say nothing about a whole layer here.

    Args:
        bounds: as for `lipbound.bounds.resolve`.
        map: of `lipbound.jacobians.maps.MAPS`.
        norm: of `lipbound.schema.NORMS`.

    Returns:
        The names.

    Raises:
        LipboundError: when such a bound, or one of another norm, is asked for by name.
    """
    names = resolve(bounds, norm)
    other = [name for name in names if map in MAPS_OF_LAYERS and get(name).map != "head"]
    if other and bounds not in ("default", "all"):
        raise LipboundError(
            f"{other[0]!r} bounds {get(other[0]).map} attention head by head and has no value "
            f"for map={map!r}; use map='head' or leave it out"
        )
    return [name for name in names if name not in other]


@in_own_modes
def whole_layer(att: Attention, name: str, *, map: str = "layer", rule: str = "best") -> Tensor:
    """A bound on all heads of a layer together, (samples,), float64.

    Args:
        att: the layer.
        name: registry name of a bound on heads, in any norm, which is that of the value then.
        map: "heads" (side by side), "layer" (with the output projection), or one of
            `lipbound.jacobians.maps.BLOCKS`, by `lipbound.jacobians.maps.block_bound`.
        rule: one of `RULES`, see the module's header.

    Returns:
        The bound.

    Raises:
        UnknownNameError: unknown rule, map or bound.
        LipboundError: a bound on another map.
        AttentionError: an unknown output projection.
    """
    check_layer(att, "whole_layer")
    choice("map of a whole layer", map, MAPS_OF_LAYERS)
    choice("rule", rule, RULES)
    if map in BLOCKS:
        return block_bound(att, whole_layer(att, name, rule=rule), map)
    (name,) = names_for([name], map, get(name).norm)
    if map == "layer":
        att.output_projection(map, "heads")
    bound = get(name)
    if rule == "best":
        return (bound.formula(att).layer or published)(bound, att, map)
    if rule == "folded" and map == "layer":
        return folded(att, name)
    total, root_sum_square = _together(bound, att, map)
    return (total if rule == "sum" else root_sum_square) * (1 + formula_rounding(att))


def _together(bound: Bound, att: Attention, map: str) -> tuple[Tensor, Tensor]:
    """The rules "sum" and "root_sum_square", (samples,)."""
    heads = bound(att)
    if map == "heads":
        return heads.sum(-1), size(heads, -1)
    w_o = att.output_projection(map, "heads")
    together = matrix_norm(w_o.flatten(0, 1)) * size(heads, -1)
    return (heads * matrix_norm(w_o)).sum(-1), together


def published(bound: Bound, att: Attention, map: str) -> Tensor:
    """The smaller of the published rules, (samples,)."""
    total, root_sum_square = _together(bound, att, map)
    return torch.minimum(total, root_sum_square) * (1 + formula_rounding(att))


def with_folded(bound: Bound, att: Attention, map: str) -> Tensor:
    """The smallest of all rules, (samples,): for bounds that gain from folding, as ours do."""
    best = published(bound, att, map)
    return torch.minimum(best, folded(att, bound.name)) if map == "layer" else best


def folded(att: Attention, name: str) -> Tensor:
    r"""A layer's bound from heads that have absorbed their projections, (samples,).

    With the thin QR of the transposes, :math:`W_O^h = R_h^T E_h^T` (E_h orthonormal columns), the
    layer is :math:`\sum_h (I \otimes E_h) J_h`, where :math:`J_h` is the head with values
    :math:`V R_h^T`, bounded by :math:`L_h`. Then, with :math:`\Omega_{hg} = \|E_h^T E_g\|`,

    .. math:: \|J\| \le \min\big\{ (L^T \Omega L)^{1/2},\ \|[E_1 \dots E_H]\|\,|L| \big\}

    Proof: Lemma 20 (docs/theory/layers.md); what folding rounds is added, by Lemma 72
    (docs/theory/rounding.md).
    """
    heads, e, lost = _folded(att)
    values = get(name)(heads)
    omega = matrix_norm(e[:, None].mT @ e[None])
    pairs = torch.einsum("sh,hg,sg->s", values, omega, values).sqrt()
    together = torch.fmin(pairs, matrix_norm(torch.cat(list(e), 1)) * size(values, -1))
    return (together + (lost * _reach(att, name)).sum(-1)) * (1 + formula_rounding(att))


def with_output(att: Attention, name: str) -> tuple[Tensor, Tensor]:
    """A bound on heads followed by their output slices, and where it is sound, (samples, heads).

    The map "head_out". The bound's value at the heads that have absorbed them, and what that has
    rounded: Lemma 4 (docs/theory/jacobian.md) and Lemma 72 (docs/theory/rounding.md).
    """
    heads, e, lost = _folded(att)
    bound = get(name)
    value = bound(heads) * matrix_norm(e) + lost * _reach(att, name)
    return value * (1 + formula_rounding(att)), bound.sound(heads)


@memoised
def _folded(att: Attention) -> tuple[Attention, Tensor, Tensor]:
    """Float64 heads with their output slices absorbed, the bases of outputs, and what that loses.

    The last in the Frobenius norm, (samples, heads).
    """
    given = wide(att)
    heads, e = given.fold_output()
    return heads, e, folding_loss(given, e, head_jacobian(given))


def _reach(att: Attention, name: str) -> Tensor | float:
    """Return the factor between the Frobenius norm and the norm of a bound."""
    return root_count(att) if get(name).norm == "every-token" else 1.0
