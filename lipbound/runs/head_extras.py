"""Numbers of heads beside norms: of their weights alone, and of their attention."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.conditioning import row_norm
from lipbound.attention.layer import Attention
from lipbound.jacobians.token_norms.token_norm import beside, pieces
from lipbound.linalg.matrix_norms import product_norms
from lipbound.schema import OF_WEIGHTS


def of_weights(
    projections: Sequence[Any], scale: float, names: Collection[str] = OF_WEIGHTS
) -> dict[str, Tensor]:
    r"""Return those of `lipbound.schema.OF_WEIGHTS` that are named, (heads,) each, float64.

    ``wqk_norm`` is :math:`|scale| \|W_Q W_K^T\|`, with the head's own factor of scores (mostly
    :math:`1/\sqrt d`): what the weights alone can make of two tokens of length one (Zhai et al.
    2023, Theorem 3.1, bound entropies by it). ``wov_norm`` is :math:`\|W_V W_O\|` (the OV circuit
    of Elhage et al. 2021). The stable ranks are :math:`\|W\|_F^2 / \|W\|^2` of the two products
    (Rudelson and Vershynin 2007): how many directions are about as steep as the steepest.

    Biases take no part: they are not linear in tokens. Nor do rotations: two tokens at one position
    are turned alike, so that their score is what the products say, while ``wqk_norm`` bounds scores
    of no other pair; factors of rotations that are longer than one do not count. Nor do a cap,
    sinks, gates, and normalisations of queries, keys or values with their gains: scores of
    normalised queries and keys are not bilinear in tokens, and the numbers are of the weights
    alone; but where such a normalisation takes the mean away, which is linear, W_Q and W_K are
    without it. A layer normalisation before the layer counts as part of its input.

    Args:
        projections: W_Q (heads, D, d); W_K (heads or fewer, D, d) and W_V (as many, D, d_v), each
            shared by as many heads that follow each other; W_O (heads, d_v, D_out), or None: then
            the latter two are not known.
        scale: factor of the scores.
        names: which; products of which nothing is asked are left alone.

    Returns:
        To a relative error of 1e-6; NaN where rounding may be more, or nothing is known.
    """
    w_q, w_k, w_v, w_o = projections
    found = {name: torch.full((len(w_q),), torch.nan).double() for name in names}
    for (norm, rank), factor, a, b in (
        (OF_WEIGHTS[:2], abs(scale), w_q, w_k),
        (OF_WEIGHTS[2:], 1.0, w_v, None if w_o is None else w_o.mT),
    ):
        if b is not None and not {norm, rank}.isdisjoint(names):
            size, directions = product_norms(*(t.unflatten(0, (len(w_k), -1)) for t in (a, b)))
            found |= {norm: factor * size.flatten(), rank: directions.flatten()}
    return {name: found[name] for name in names}


@torch.no_grad()
def of_heads(att: Any, names: Collection[str], tau: float | None = None) -> dict[str, Tensor]:
    r"""Return those of `lipbound.schema.OF_HEADS` that are named, (samples, heads) each, float64.

    Those of the weights are `of_weights`, the same at every sample. ``row_norm`` is
    :math:`\max_i \|\mathrm{diag}(P_i) - P_i P_i^T\|` over queries, the largest norm of the
    softmax's Jacobian (the factor of Theorem 3 of Yudin et al. 2025), at most 1/2; a sink is one
    more entry of every row. ``largest_logit`` is that of `Attention.statistics`. ``qk_clip`` is the
    factor :math:`\min(1, \tau / \mathrm{largest\_logit})` of QK-clip (Kimi Team 2025, "Kimi K2",
    section 2.1) at each sample, 1 where the largest logit is not above tau; what it multiplies with
    is the smallest over all samples. Its logits are scaled, before any mask, and here those of
    pairs that may attend to each other. Padding does not count.

    Args:
        att: a layer. Of one without closed form nothing is known; of cross-attention no weights.
        names: which.
        tau: the largest logit that QK-clip allows.

    Returns:
        ``row_norm`` to a relative error of 1e-6, NaN where rounding may be more; NaN for what is
        not known.
    """
    found = {name: torch.full((att.samples, att.heads), torch.nan).double() for name in names}
    if not isinstance(att, Attention):
        return found
    asked = [name for name in OF_WEIGHTS if name in names and att.other_stream is None]
    weights = of_weights((att.w_q, att.w_k, att.w_v, att.w_o), att.scale, asked)
    found |= {name: t.expand(att.samples, -1) for name, t in weights.items()}
    for name in [name for name in ("row_norm", "largest_logit", "qk_clip") if name in names]:
        of = row_norm if name == "row_norm" else lambda part: part.statistics()["largest_logit"]
        parts = [of(part) for part in pieces(att, "head")]
        found[name] = beside(parts, att.samples, "head", lambda t, dim: torch.cat([*t], dim))
        if name == "qk_clip" and tau is not None:
            found[name] = tau / found[name].clamp_min(tau)
    return found
