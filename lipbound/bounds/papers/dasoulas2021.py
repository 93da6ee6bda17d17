"""Dasoulas, Scaman, Virmaux 2021 (ICML).

"Lipschitz Normalization for Self-Attention Layers with Application to Graph Neural Networks".
"""

import math

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import of_ordinary_size
from lipbound.attention.rounding import TensorErrors, tensor_errors
from lipbound.attention.variants import LINEAR_VALUES
from lipbound.attention.variants.base import Side
from lipbound.bounds import conditions, factors
from lipbound.bounds.factors import values_and_softmax
from lipbound.bounds.ours.block_norms import root
from lipbound.bounds.papers.castin2024 import sides
from lipbound.bounds.registry import bound
from lipbound.errors import LipboundError
from lipbound.linalg.matrix_norms import gamma, times_power_up

_BIBTEX = """@inproceedings{dasoulas2021lipschitz,
  title     = {{L}ipschitz Normalization for Self-Attention Layers with Application to Graph
               Neural Networks},
  author    = {Dasoulas, George and Scaman, Kevin and Virmaux, Aladin},
  booktitle = {International Conference on Machine Learning},
  year      = {2021},
  note      = {arXiv:2103.04886}
}"""
ROOT2 = math.sqrt(2)


@memoised
def _frobenius_p(att: Attention) -> Tensor:
    """Norm ||P||_F, (samples, heads)."""
    squares = factors.probabilities(att).square().sum((-1, -2)) * (1 + gamma(att.tokens**2 + 8))
    factor, unknown = factors.stretched(att)
    norm = torch.where(unknown, torch.inf, squares.sqrt() * factor + factors.TINY)
    return torch.minimum(norm, factors.root_count(att))


def _queries(att: Attention) -> Tensor:
    """Norm ||X A + 1 a^T||_F = scale ||Q W_K^T||_F, (samples, heads), from Q^T Q and W_K^T W_K.

    Lemma 86 (docs/theory/upper_values.md).
    """
    (q, error), _ = factors.entering(att)
    w = att.w_k.double()
    squares = ((q.mT @ q) * (w.mT @ w)).sum((-1, -2))
    sizes = q.detach().square().sum((-1, -2)) * w.detach().square().sum((-1, -2))
    rounding = gamma(att.tokens + att.x.shape[2] + att.d**2 + 8) * sizes
    total = root(squares.clamp_min(0) + rounding)
    more = error * factors.root_count(att) * factors.norm_k(att)
    return abs(att.scale) * (total + more)


@bound(
    "dasoulas",
    label="Dasoulas 2021, reconstructed",
    bibtex=_BIBTEX,
    statement_latex=r"$\|J\| \le \|W_V\|\,(\|P\|_F + \sqrt{2} R\,(\max_j |A x_j| + \|X A + 1 "
    r"a^T\|_F))$, $R = \max_i |x_i|$, $a = \mathrm{scale}\,W_K b_Q$",
    source="reconstructed: the theorem recalled, its code read; the slope of the scores, of this "
    "input, derived anew",
    assumptions="any biases, any mask",
    condition=conditions.always,
    covers=conditions.LINEAR,
    cost="O(N^2 + N D d)",
    terms=values_and_softmax(lambda att, value: factors.norm_v(att) * _frobenius_p(att) / value),
)
def dasoulas(att: Attention) -> Tensor:
    r"""Their bound on attention by the slope of its scores, that of dot products at this input.

    .. math::
        \|J\| \le \|W_V\|\,\big(\|P\|_F + \sqrt 2\,R\,L\big),\quad L = \max_j |A x_j| + \|X A + 1
        a^T\|_F

    Reconstructed: as recalled, :math:`L_F(Att) \le \|softmax(g(X))\|_F + \sqrt 2 \max_j |x_j|\,L_{F
    \to (2, \infty)}(g)` for scores g, with which the authors normalise g. For dot products L bounds
    their slope from :math:`|dX|_F` to the root of the sum over rows of squared largest entries,
    biases included; without the query bias in a it fails. Proof, and that the :math:`\sqrt 2` is
    not needed: Lemma 102 (docs/theory/token_bounds.md).

    With rotation, a cap, normalised queries and keys or sinks, :math:`L = \mathrm{scale}\,(\max_i
    \|D^q_i\| \max_j |k_j| + \max_j \|D^k_j\|\,\|Q\|_F)` with queries and keys as they enter the
    scores (keys centred unless there is a cap or a sink) and the maps of single tokens; with a sink
    :math:`\|W_V\| R` is :math:`\|W_V\| R + |b_V|`.
    """
    if att.variants:
        (q, q_error), (k, k_error) = factors.entering(att)
        through_q = factors.norm_q(att) * (k.norm(dim=-1).max(-1).values + k_error)
        size = factors.size(q, (-2, -1)) + q_error * factors.root_count(att)
        through_k = factors.norm_k(att) * size
        slope = abs(att.scale) * factors.turn(att) * (through_q + through_k)
    else:
        slope = sides(att)[0] + _queries(att)
    return factors.norm_v(att) * (_frobenius_p(att) + ROOT2 * factors.radius(att) * slope)


@dasoulas.extends(*LINEAR_VALUES, condition=conditions.always)
def _with_variants(att: Attention) -> Tensor:
    if att.cache.recording:
        raise LipboundError(
            "bound 'dasoulas' has no derivatives for normalised queries and keys, or sinks; call "
            "it under torch.no_grad(), or take 'lipbound'"
        )
    one, exponents = of_ordinary_size(att)
    e = tensor_errors(one)
    through_q = _slope(one, e, "q") * (e.k + e.k_error)
    q = one.wide_q if one.valid is None else one.wide_q * one.valid[:, None, :, None]
    queries = factors.size(q, (-2, -1)) + one.tokens**0.5 * e.q_error
    through_k = _slope(one, e, "k") * queries
    slope = abs(one.scale) * (through_q + through_k)
    reach = factors.norm_v(one) * factors.radius(one)
    if one.sinks is not None:
        reach = reach + factors.length_of_bias(one.b_v, one)
    value = factors.norm_v(one) * _frobenius_p(one) + ROOT2 * reach * slope
    return times_power_up(value, exponents.to(value.device))


def _slope(one: Attention, e: TensorErrors, side: Side) -> Tensor:
    """Return upper values of the slopes of queries or keys, (samples, heads).

    By spectral norms of the projections in place of the Frobenius norms in which slopes are linear;
    not where all heads are normalised together.
    """
    slope, norm = getattr(e, f"{side}_slope"), getattr(one, f"norm_{side}")
    if norm is None or norm.over is None:
        spectral = factors.norm_q(one) if side == "q" else factors.norm_k(one)
        frobenius = torch.linalg.matrix_norm(one.projection(side)[0])
        slope = slope * (spectral / frobenius.clamp_min(1e-300))
    return slope + getattr(e, f"{side}_slope_error")
