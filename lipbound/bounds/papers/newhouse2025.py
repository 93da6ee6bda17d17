"""Newhouse, Hess, Cesista, Zahorodnii, Bernstein, Isola 2025.

"Training Transformers with Enforced Lipschitz Constants".
"""

from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds import factors
from lipbound.bounds.factors import values_and_softmax
from lipbound.bounds.papers.yudin2025 import any_biases, with_ones

_BIBTEX = """@misc{newhouse2025enforced,
  title  = {Training Transformers with Enforced {L}ipschitz Constants},
  author = {Newhouse, Laker and Hess, R. Preston and Cesista, Franz and Zahorodnii, Andrii and
            Bernstein, Jeremy and Isola, Phillip},
  year   = {2025},
  note   = {arXiv:2507.13338}
}"""


@any_biases(
    "newhouse",
    label="Newhouse 2025",
    bibtex=_BIBTEX,
    statement_latex=r"$\|J\| \le \|W_V\|\,(1 + 2 \mathrm{scale}\,\|W_Q\| \|W_K\| R^2)$, $R = "
    r"\max_i |x_i|$",
    source="the attention factor of the authors' code (utils.py), without its 1/3, with Remark 2 "
    "of Yudin et al. 2025",
    cost="O(N D + D d^2)",
    terms=values_and_softmax(lambda att, value: factors.norm_v(att) / value),
    norm="every-token",
)
def newhouse(att: Attention, radius: float = 0.0, ball: str = "token") -> Tensor:
    r"""The factor of attention in the authors' code, at the head's weights and its largest token.

    .. math::
        \|J\|_{every} \le \|W_V\|\,\big(1 + 2\,\mathrm{scale}\,\|W_Q\| \|W_K\| R^2\big),\quad R =
        \max_i |x_i|

    Their code multiplies it by :math:`1/3`, as their networks multiply the output of attention, and
    by :math:`\|W_O\|`; it is then about another map, and below the norm of this one
    (:math:`\|W_V\|` at N = 1). With unit norms and scale 1/d it is the sensitivity of "functional
    attention" in the modular norm (Large et al. 2024). No bias enters there: with a query bias X
    becomes [X 1] and :math:`W_Q` gains the row :math:`b_Q`, as in ``yudin``; without it the
    statement fails. Proof: Lemma 99 (docs/theory/token_bounds.md), for any mask.

    With rotary embeddings or a cap :math:`\|W_V\| (1 + R (2 \|A\| R + a_Q + a_K))` in the notation
    of ``castin_bias``. In a ball every token stays within R + radius of 0.
    """
    extended = with_ones(att)
    r = factors.radius(extended) + radius
    plain = 2 * abs(att.scale) * factors.norm_q(extended) * factors.norm_k(att) * r**2
    slope = factors.slope_by_lengths(att, r) if att.variants else plain
    return factors.norm_v(att) * (1 + slope)
