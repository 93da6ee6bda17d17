"""The smallest layers we know on which a published statement is below the exact norm, as code that
the pages of bounds show and run."""

from dataclasses import dataclass

import torch

import lipbound as lb
from lipbound.jacobians.spectral_norm import l2_spectral_norm

QUERY_BIAS = """
x = torch.tensor([[[0.0, 1.0], [0.0, -1.0]]], dtype=torch.float64)  # two tokens
w_q = torch.zeros(1, 2, 1, dtype=torch.float64)  # queries are their bias alone, so A = 0
w_k = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
w_v = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
att = lb.Attention(x, w_q, w_k, w_v, b_q=torch.tensor([[10.0]], dtype=torch.float64))
"""
CAUSAL = """
one = torch.ones(1, 1, 1, dtype=torch.float64)
mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]], dtype=torch.float64)  # causal, two tokens
att = lb.Attention(torch.ones(1, 2, 1, dtype=torch.float64), 0 * one, one, one, mask=mask)
"""
GATHERED = """
one = torch.ones(1, 1, 1, dtype=torch.float64)
mask = torch.full((9, 9), -torch.inf, dtype=torch.float64)
mask[:, 0] = 0.0  # nine tokens, of which each attends to the first alone
att = lb.Attention(torch.ones(1, 9, 1, dtype=torch.float64), 0 * one, one, one, mask=mask)
"""
SMALL = """
one = torch.ones(1, 1, 1, dtype=torch.float64)
att = lb.Attention(0.1 * one, one, one, one)  # one token of length 0.1
"""
ONE_SIDE = """
x = torch.tensor([[[5.0, 0.0, 1.0], [5.0, 0.0, -1.0]]], dtype=torch.float64)  # two tokens
w_q = torch.tensor([[[1.0], [0.0], [0.0]]], dtype=torch.float64)
w_k = torch.tensor([[[0.0], [1.0], [0.0]]], dtype=torch.float64)  # keys see nothing of these tokens, so A x_i = 0
w_v = torch.tensor([[[0.0], [0.0], [1.0]]], dtype=torch.float64)
att = lb.Attention(x, w_q, w_k, w_v, scale=1.0)
"""  # noqa: E501
NEGATIVE = """
one = torch.ones(1, 1, 1, dtype=torch.float64)
x = torch.tensor([[[0.0], [10.0], [-10.0]]], dtype=torch.float64)
att = lb.Attention(x, one, one, one, scale=-1.0)  # L2 attention that prefers far tokens
"""
REASONS = {
    QUERY_BIAS: "The query bias enters the scores, and with it the Jacobian; the statement does "
    "not see it.",
    CAUSAL: "With a causal mask both rows of P look at the first token, and the norm of P "
    "exceeds one.",
    GATHERED: "All rows of P gather on one token, which moves all outputs: the norm of P is the "
    "square root of their number, and no constant without N bounds it.",
    SMALL: "The value term of the statement is multiplied by the squared norm of X and vanishes "
    "with X; the Jacobian of one token is W_V.",
    ONE_SIDE: "A perturbation of a token moves its scores as a query, and those of all others as "
    "a key: A x_i and A^T x_i both enter the Jacobian.",
    NEGATIVE: "The proof needs a scale of at least zero.",
}
EXAMPLES = {
    "castin": QUERY_BIAS,
    "castin_c3": QUERY_BIAS,
    "yudin_nobias": QUERY_BIAS,
    "castin_mean_field": CAUSAL,
    "castin_masked_mean_field": GATHERED,
    "specformer": SMALL,
    "castin_c3_as_coded": ONE_SIDE,
    "kim": NEGATIVE,
}
"""Code that makes ``att``, by the name of the bound that fails on it."""


@dataclass(frozen=True)
class Shortfall:
    """A bound and the exact norm that exceeds it, and the layer they belong to."""

    att: lb.Attention
    bound: float
    exact: float


def layer(name: str) -> lb.Attention:
    """The layer on which a bound fails.

    Raises:
        KeyError: none is known.
    """
    names: dict[str, object] = {"torch": torch, "lb": lb}
    exec(EXAMPLES[name], names)
    att = names["att"]
    assert isinstance(att, lb.Attention)
    return att


def shortfall(name: str) -> Shortfall:
    """What the bound says of that layer, and its exact norm, of the map that the bound is about."""
    att = layer(name)
    bound = lb.bounds.get(name)
    exact = l2_spectral_norm(att) if bound.map == "l2" else lb.spectral_norm(att, method="dense")
    return Shortfall(att, float(bound(att)), float(exact.lower))
