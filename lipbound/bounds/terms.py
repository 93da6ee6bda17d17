"""Shares of the terms of a bound: which of them makes it large."""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.registry import get
from lipbound.bounds.statement import Bound
from lipbound.linalg.upper import Upper


def shares(att: Attention, name: str) -> dict[str, Tensor] | None:
    r"""Contributions of the terms of a bound, as fractions of one, (samples, heads) each.

    "values" is what would remain if attention did not depend on the input, "softmax" what comes
    from its change. Terms of Theorem 3 of Yudin et al. and of Specformer's theorem add up to the
    bound, those of Castin et al. to its square. For ours, softmax is told apart by what moves it,
    keys or queries: ``lipbound_block`` at the top singular pair of its matrix of norms,
    ``lipbound`` at the top eigenvector of the matrix of its first branch, with "mixed" for products
    of different terms.

    Args:
        att: the layer.
        name: registry name.

    Returns:
        Shares by the name of the term; None for statements that are a single product, and of ours
        for variants of attention.
    """
    return get(name).terms(att)


def values_and_softmax(
    share: Callable[[Attention, Upper], Upper],
) -> Callable[[Bound, Attention], dict[str, Tensor]]:
    """The terms of a bound of two, from the share of "values".

    That is a function of the layer and the bound's value, (samples, heads) or broadcastable.
    """

    def terms(bound: Bound, att: Attention) -> dict[str, Tensor]:
        with torch.no_grad():
            value = bound(att)
            part = Upper.of(share(att, Upper.of(value))).value()
            part = torch.where(value > 0, part, 1.0).clamp(0, 1).expand_as(value)
        return {"values": part, "softmax": 1 - part}

    return terms
