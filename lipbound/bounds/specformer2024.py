"""Hu, Zheng, Wang, Leung, Wu, Xie 2024, "Specformer" (ECCV)."""

from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds import ingredients as qty
from lipbound.bounds.registry import bound


def _condition(att: Attention) -> Tensor:
    n = qty.count(att)
    large = (n + 1) * n.sqrt() * qty.frobenius(att) ** 2 >= 1
    most = n.sqrt() * (n + 1) / 2 if att.variants else n * (n + 1)
    return large & (abs(att.scale) * qty.turn(att) ** 2 <= most) & qty.no_query_bias(att)


def _theorem(att: Attention, radius: float, norm: str = "frobenius") -> Tensor:
    """Their ball is one in the Frobenius norm."""
    n = qty.count(att)
    size = qty.frobenius(att) + qty.total_radius(att, radius, norm)
    return n * (n + 1) * size**2 * qty.norm_v(att) * (qty.norm_q(att) * qty.norm_k(att) + 1)


@bound(
    "specformer",
    label="Specformer 2024",
    citation="hu2024specformer",
    statement="||J|| <= N (N+1) ||X||_F^2 (||W_V|| ||W_Q|| ||W_K|| + ||W_V||)",
    source="as stated in Theorem 1 of Yudin et al. 2025, at radius 0",
    assumptions="no query bias; inputs not small: (N+1) sqrt(N) ||X||_F^2 >= 1",
    condition=_condition,
    cost="O(N D + D d^2)",
    ball=_theorem,
    covers=qty.LINEAR,
    caveat="its value term is multiplied by ||X||_F^2 and vanishes with X while ||J|| does not; and it ignores the query bias",
)
def specformer(att: Attention) -> Tensor:
    r"""As printed, at the point X (radius R = 0 of their ball; ``over_ball`` has :math:`(\|X\|_F + R)^2`):

    .. math:: \|J\| \le N(N+1)\,\|X\|_F^2\,\big[\|W_V\|\|W_Q\|\|W_K\| + \|W_V\|\big]

    False as printed for small inputs: its value term is multiplied by :math:`\|X\|_F^2`, so it vanishes with X, while
    :math:`\|J\| \ge \|W_V\|` for equal tokens. It is a bound without query bias once :math:`(N+1)\sqrt N\,\|X\|_F^2 \ge 1` (and scale at most
    N(N+1)): Lemma 10 (docs/theory/softmax.md) and Lemma 39 (docs/theory/published.md). No bias enters the statement.

    With rotary embeddings or a cap it is one without biases of queries and keys and for :math:`scale\,\max\|R_i\|^2 \le \sqrt N (N+1)/2`;
    nothing in it stands for :math:`\|A\|`.
    """
    return _theorem(att, 0.0)
