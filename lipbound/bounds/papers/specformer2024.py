"""Hu, Zheng, Wang, Leung, Wu, Xie 2024, "Specformer" (ECCV)."""

from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds import conditions, factors
from lipbound.bounds.factors import values_and_softmax
from lipbound.bounds.registry import bound
from lipbound.linalg.matrix_norms import UNIT, gamma

_BIBTEX = """@inproceedings{hu2024specformer,
  title     = {{SpecFormer}: Guarding Vision Transformer Robustness via Maximum Singular Value
               Penalization},
  author    = {Hu, Xixu and Zheng, Runkai and Wang, Jindong and Leung, Cheuk Hang and Wu, Qi and
               Xie, Xing},
  booktitle = {European Conference on Computer Vision},
  pages     = {345--362},
  year      = {2024}
}"""


def _condition(att: Attention) -> Tensor:
    """True where the statement is a bound: Lemma 39 (docs/theory/published.md)."""
    n = factors.count(att)
    size = factors.root_count(att) * (n + 1) * factors.frobenius(att) ** 2
    # certainly >= 1: rounding has enlarged the size by far less than the factor on the right
    large = size >= 1 + 4 * gamma(att.x.shape[1] * att.x.shape[2] + 40)
    small = abs(att.scale) <= n * (n + 1)
    if att.variants:
        slope = abs(att.scale) * factors.turn(att) ** 2
        small = slope <= n.sqrt() * (n + 1) / 2 * (1 - 4 * UNIT)
    return large & small & conditions.no_query_bias(att)


@bound(
    "specformer",
    label="Specformer 2024",
    bibtex=_BIBTEX,
    statement_latex=r"$\|J\| \le N (N+1) \|X\|_F^2\,(\|W_V\| \|W_Q\| \|W_K\| + \|W_V\|)$",
    source="as stated in Theorem 1 of Yudin et al. 2025, at radius 0",
    assumptions="no query bias; inputs not small: (N+1) sqrt(N) ||X||_F^2 >= 1",
    condition=_condition,
    covers=conditions.LINEAR,
    cost="O(N D + D d^2)",
    terms=values_and_softmax(
        lambda att, value: 1 / (1 + factors.norm_q(att) * factors.norm_k(att))
    ),
    caveat="its value term is multiplied by ||X||_F^2 and vanishes with X while ||J|| does not; "
    "and it ignores the query bias",
)
def specformer(att: Attention, radius: float = 0.0, ball: str = "frobenius") -> Tensor:
    r"""The theorem as printed, at the point X.

    Their ball has a radius R in the Frobenius norm, here 0; over a ball :math:`\|X\|_F^2` becomes
    :math:`(\|X\|_F + R)^2`:

    .. math:: \|J\| \le N(N+1)\,\|X\|_F^2\,\big[\|W_V\|\|W_Q\|\|W_K\| + \|W_V\|\big]

    False as printed for small inputs: its value term is multiplied by :math:`\|X\|_F^2`, so it
    vanishes with X, while :math:`\|J\| \ge \|W_V\|` for equal tokens. It is a bound without query
    bias once :math:`(N+1)\sqrt N\,\|X\|_F^2 \ge 1` (and scale at most N(N+1)): Lemma 10
    (docs/theory/softmax.md) and Lemma 39 (docs/theory/published.md). No bias enters the statement.

    With rotary embeddings :math:`R_i` or a cap it is a bound if, besides, neither queries nor keys
    have a bias and :math:`\mathrm{scale}\,\max\|R_i\|^2 \le \sqrt N (N+1)/2`; its formula is
    the same, since :math:`\|A\|` is not in it.
    """
    n = factors.count(att)
    size = factors.frobenius(att) + factors.total_radius(att, radius, ball)
    slope = factors.norm_q(att) * factors.norm_k(att) + 1
    return n * (n + 1) * size**2 * factors.norm_v(att) * slope
