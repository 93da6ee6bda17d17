"""Castin, Ablin, Peyré 2024, "How Smooth Is Attention?" (ICML)."""

import math
from functools import partial

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.bounds import conditions, factors
from lipbound.bounds.factors import ROOT3, values_and_softmax
from lipbound.bounds.registry import bound
from lipbound.linalg.matrix_norms import gamma

_BIBTEX = """@inproceedings{castin2024smooth,
  title     = {How Smooth Is Attention?},
  author    = {Castin, Val{\\'e}rie and Ablin, Pierre and Peyr{\\'e}, Gabriel},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
  note      = {arXiv:2312.14820}
}"""
QUERY_BIAS = (
    "it ignores the query bias, which enters the scores; with a large one the exact norm exceeds it"
)
_EXCESS = 1e-10
"""More than the relative rounding of an exponent."""
theorem = partial(
    bound,
    bibtex=_BIBTEX,
    covers=conditions.LINEAR,
    terms=values_and_softmax(
        lambda att, value: ((ROOT3 * factors.norm_v(att) * factors.root_count(att)) / value) ** 2
    ),
)
"""Decorator of the bounds whose squares add up what values and scores contribute."""


@theorem(
    "castin",
    label="Castin 2024, 3.3",
    statement_latex=r"$\|J\| \le \sqrt{3}\,\|W_V\|\,(\|A\|^2 R^4 (4N+1) + N)^{1/2}$, $R = \max_i "
    r"|x_i|$",
    source="Theorem 3.3; Theorem 4.3 with a causal mask",
    assumptions="no query bias; any mask",
    condition=conditions.no_query_bias,
    cost="O(N D + D d^2)",
    caveat=QUERY_BIAS,
)
def castin(att: Attention, radius: float = 0.0, ball: str = "token") -> Tensor:
    r"""Theorem 3.3 (Theorem 2 of Yudin et al. 2025), with the largest length of a token.

    .. math::
        \|J\| \le \sqrt 3\,\|W_V\|\,\big(\|A\|^2 R^4 (4N+1) + N\big)^{1/2},\quad A =
        \mathrm{scale}\,W_Q W_K^T,\ R = \max_i |x_i|

    Theorem 4.3 is the same formula with a causal mask; it holds for any additive mask: Lemma 36
    (docs/theory/published.md). With a query bias it fails: use ``castin_bias``.

    With rotary embeddings :math:`\|A\|` is replaced by
    :math:`\mathrm{scale}\,\max\|R_i\|^2\|W_Q\|\|W_K\|`, which bounds every
    :math:`A_{ij} = \mathrm{scale}\,W_Q R_i^T R_j W_K^T`; with them or a cap it asks for no key bias
    either, and follows from ``castin_bias``. In a ball every token stays within R + radius of 0.
    """
    n, r = factors.count(att), factors.radius(att) + radius
    t = factors.norm_a(att) * r**2
    return ROOT3 * factors.norm_v(att) * (t**2 * (4 * n + 1) + n).sqrt()


@theorem(
    "castin_bias",
    label="Castin 2024 + biases",
    statement_latex=r"$\|J\| \le \sqrt{3}\,\|W_V\|\,(\|A\|^2 R^4 + N R^2 (\|A\| R + |a|)^2 + "
    r"N)^{1/2}$, $a = \mathrm{scale}\,W_K b_Q$",
    source="after appendix E.3, derived anew, since the printed form could not be recovered",
    assumptions="any biases, any mask",
    condition=conditions.always,
    cost="O(N D + D d^2)",
)
def castin_bias(att: Attention, radius: float = 0.0, ball: str = "token") -> Tensor:
    r"""A form of Theorem 3.3 that allows biases. Ours, in the spirit of their appendix E.3.

    .. math::
        \|J\| \le \sqrt 3\,\|W_V\|\,\big(\|A\|^2 R^4 + N R^2 (\|A\| R + |a|)^2 + N\big)^{1/2},\quad
        a = \mathrm{scale}\,W_K b_Q

    The key bias shifts each row of scores by a constant and the value bias drops out, so only the
    query bias enters: the gradient of row i's scores with respect to its keys' tokens is
    :math:`A^T x_i + a`.

    Proof: Lemma 34 (docs/theory/published.md).

    *Rotation and cap.* With :math:`\|A\|` as in ``castin``,
    :math:`a_Q = \mathrm{scale}\,\max\|R_i\|^2 \|W_K\||b_Q|` and
    :math:`a_K = \mathrm{scale}\,\max\|R_i\|^2 \|W_Q\||b_K|`,

    .. math::
        \|J\| \le \sqrt 3\,\|W_V\|\,\big(R^2 (\|A\| R + a_K)^2 + N R^2 (\|A\| R + a_Q)^2 +
        N\big)^{1/2}

    Proof: Lemma 35 (docs/theory/published.md).
    """
    n, r = factors.count(att), factors.radius(att) + radius
    t = factors.norm_a(att) * r**2
    q, k = factors.pull_of_biases(att) if att.variants else (factors.shift(att), 0.0)
    squares = (t + k * r) ** 2 + (t + q * r) ** 2 * n + n
    return ROOT3 * factors.norm_v(att) * squares.sqrt()


@memoised
def sides(att: Attention) -> tuple[Tensor, Tensor]:
    """Lengths max_i |A x_i| and max_i |A^T x_i|, (samples, heads), A = scale W_Q W_K^T.

    Without biases: Lemma 86 (docs/theory/upper_values.md).
    """
    x, w_q, w_k = att.x.double(), att.w_q.double(), att.w_k.double()
    together = torch.linalg.matrix_norm(w_q.detach()) * torch.linalg.matrix_norm(w_k.detach())
    most = x.detach().norm(dim=-1).amax(-1)[:, None]
    rounding = 2 * gamma(sum(w_q.shape[1:]) + 12) * together * most

    def largest(outer: Tensor, inner: Tensor) -> Tensor:
        with torch.no_grad():
            token = (torch.einsum("snd,hde->shne", x, inner) @ outer.mT).norm(dim=-1).argmax(-1)
        chosen = x[torch.arange(len(x), device=x.device)[:, None], token]  # (samples, heads, D)
        y = (torch.einsum("shd,hde->she", chosen, inner)[..., None, :] @ outer.mT)[..., 0, :]
        return abs(att.scale) * (y.norm(dim=-1) + rounding)

    return largest(w_q, w_k), largest(w_k, w_q)


@theorem(
    "castin_c3",
    label="Castin 2024, C.3",
    statement_latex=r"$\|J\| \le \sqrt{3}\,\|W_V\|\,(R'^2 r^2 (N+1) + N)^{1/2}$, $R' \ge |A "
    r"x_i|$ and $|A^T x_i|$, $r = \max_{ij} |x_i - x_j|$",
    source="Theorem C.3, with R' taken on both sides",
    assumptions="no query bias; any mask",
    condition=lambda att: (conditions.always if att.variants else conditions.no_query_bias)(att),
    cost="O(N^2 D + N D d)",
    caveat=QUERY_BIAS,
)
def castin_c3(att: Attention, radius: float = 0.0, ball: str = "token") -> Tensor:
    r"""Theorem C.3 in the form we can prove.

    .. math:: \|J\| \le \sqrt 3\,\|W_V\|\,\big(R'^2 r^2 (N+1) + N\big)^{1/2}

    with :math:`r = \max_{ij}|x_i - x_j|` and :math:`R' = \max_i \max(|A x_i|, |A^T x_i|)`: the path
    through keys sees the one, that through queries the other: Lemma 37 (docs/theory/published.md).
    With one side alone the statement fails (see ``castin_c3_as_coded``).

    With rotary embeddings or a cap it holds with :math:`R' = \mathrm{scale}\,\max\|R_i\| \max_i
    \max(\|W_K\||q_i|, \|W_Q\||k_i|)`, whatever the biases.

    In a ball :math:`|A x_i|` grows by at most :math:`\|A\|` times the radius; the distance of two
    tokens by twice the radius, or :math:`\sqrt 2` times it when they share a Frobenius ball.
    """
    if att.variants:  # of the queries and keys that enter the scores
        q, k = (t.norm(dim=-1).max(-1).values + error for t, error in factors.entering(att))
        side = torch.maximum(q * factors.norm_k(att), k * factors.norm_q(att))
        side = abs(att.scale) * factors.turn(att) * side
    else:
        one, other = sides(att)
        side = torch.maximum(one, other) + factors.norm_a(att) * radius
    apart = 2 if ball == "token" else math.sqrt(2)
    n, distance = factors.count(att), factors.diameter(att) + apart * radius
    return ROOT3 * factors.norm_v(att) * ((side * distance) ** 2 * (n + 1) + n).sqrt()


@bound(
    "castin_c3_as_coded",
    label="Castin C.3, as coded",
    bibtex=_BIBTEX,
    statement_latex=r"$\|W_V\|\,(R'^2 r^2 (N+1) + N)^{1/2}$, $R' = \max_i |A x_i|$",
    source="Theorem C.3 as recalled from the authors' code: without sqrt(3), R' on one side",
    assumptions="none known under which it is a bound",
    condition=conditions.never,
    cost="O(N^2 D + N D d)",
    terms=values_and_softmax(
        lambda att, value: ((factors.norm_v(att) * factors.root_count(att)) / value) ** 2
    ),
    caveat="it lacks the factor sqrt(3) and takes R' on one side only, while both enter J; "
    "random heads exceed it twofold",
)
def castin_c3_as_coded(att: Attention) -> Tensor:
    r"""Theorem C.3 as the authors' code computes it (recalled), with one side alone.

    There is no :math:`\sqrt 3`, and :math:`R' = \max_i |A x_i|`. Not a bound: down to about half of
    the exact norm on random heads even with the :math:`\sqrt 3` put back. Kept because published
    figures use it.
    """
    n, squares = factors.count(att), (sides(att)[0] * factors.diameter(att)) ** 2
    return factors.norm_v(att) * (squares * (n + 1) + n).sqrt()


@bound(
    "castin_mean_field",
    label="Castin 3.5, mean field",
    bibtex=_BIBTEX,
    statement_latex=r"$\|J\| \le \|W_V\|\,(1 + 3 \|A\| R^2) \exp(2 \|A\| R^2)$",
    source="Theorem 3.5 with Lemma 3.2",
    assumptions="no mask, no query bias",
    condition=lambda att: conditions.unmasked(att) & ~conditions.has_query_bias(att),
    cost="O(N D + D d^2)",
    caveat="it ignores masks, with which rows of P may gather on one token (norm up to 2 ||W_V|| "
    "at A = 0), and the query bias",
)
def castin_mean_field(att: Attention, radius: float = 0.0, ball: str = "token") -> Tensor:
    r"""The bound that does not depend on N, a 2-Wasserstein Lipschitz constant.

    It bounds :math:`\|J\|` by their Lemma 3.2:

    .. math:: \|J\| \le \|W_V\|\,(1 + 3\|A\|R^2)\,e^{2\|A\|R^2}

    Infinite where the value exceeds the range of float64 (about :math:`\|A\|R^2 > 350`), which
    pretrained heads do reach. Unmasked only: with a causal mask and A = 0 the norm tends to
    :math:`2\|W_V\|`, and ``castin_masked_mean_field`` takes its place: Lemma 38
    (docs/theory/published.md).
    """
    t = factors.norm_a(att) * (factors.radius(att) + radius) ** 2
    return factors.norm_v(att) * (1 + 3 * t) * (2 * t * (1 + _EXCESS)).exp()


@bound(
    "castin_masked_mean_field",
    label="Castin 4.4, masked",
    bibtex=_BIBTEX,
    covers=conditions.LINEAR,
    statement_latex=r"$\|J\| \le \|W_V\|\,(\|A\| R^2 + 2 (1 + 2u)\,e^{2u})$, $u = \|A\| R^2 + |a| "
    r"R$, $a = \mathrm{scale}\,W_K b_Q$",
    source="Theorem 4.4 with biases, its constant derived anew, since the printed one could not be "
    "recovered",
    assumptions="a causal mask or none, any biases",
    condition=lambda att: (
        (conditions.causal(att) | conditions.unmasked(att))
        & (conditions.no_query_bias if att.variants else conditions.always)(att)
    ),
    cost="O(N D + D d^2)",
    caveat="it ignores other masks, with which all rows of P may gather on one token (norm "
    "sqrt(N) ||W_V|| at A = 0), and, with rotary embeddings or a cap, biases of queries and keys",
)
def castin_masked_mean_field(att: Attention, radius: float = 0.0, ball: str = "token") -> Tensor:
    r"""The bound for causal heads that does not depend on N, of measures on positions and tokens.

    .. math::
        \|J\| \le \|W_V\|\,\big(t + 2\,(1 + 2u)\,e^{2u}\big),\quad t = \|A\|R^2,\ u = t + |a| R,
        \ a = \mathrm{scale}\,W_K b_Q

    Transport keeps positions (their Definition 4.1), and by their Lemma 4.2 the constant there
    bounds :math:`\|J\|`. The 2 is the norm of averages over the past (Hardy), and no smaller number
    will do: at A = 0 the norm tends to :math:`2\|W_V\|`. The constant of ``castin_mean_field``,
    which their proof seems to have in mind, fails for causal heads. Lemma 38
    (docs/theory/published.md) proves it, with the query bias that the theorem has not, and says
    where the proof in the paper's Appendix D.2 needs another step.

    With rotary embeddings or a cap it is the same, with :math:`\|A\|` as in ``castin``, where keys
    have no bias either. Infinite beyond the range of float64.
    """
    r = factors.radius(att) + radius
    t = factors.norm_a(att) * r**2
    u = t + factors.shift(att) * r
    return factors.norm_v(att) * (t + 2 * (1 + 2 * u) * (2 * u * (1 + _EXCESS)).exp())
