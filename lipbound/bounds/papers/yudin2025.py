"""Yudin, Gaponov, Kudriashov, Rakhuba 2025, "Pay Attention to Attention Distribution"."""

from functools import partial

import torch
from torch import Tensor

from lipbound.attention.cache import found_together, memoised
from lipbound.attention.layer import Attention
from lipbound.attention.validation import largest_entries
from lipbound.bounds import conditions, factors
from lipbound.bounds.ball import reachable_rows
from lipbound.bounds.factors import values_and_softmax
from lipbound.bounds.registry import bound
from lipbound.errors import LipboundError
from lipbound.linalg.matrix_norms import nonnegative_norm

_BIBTEX = """@misc{yudin2025pay,
  title  = {Pay Attention to Attention Distribution: A New Local {L}ipschitz Bound for
            Transformers},
  author = {Yudin, Nikolay and Gaponov, Alexander and Kudriashov, Sergei and Rakhuba, Maxim},
  year   = {2025},
  note   = {arXiv:2507.07814}
}"""
any_biases = partial(
    bound,
    bibtex=_BIBTEX,
    assumptions="any biases (Remark 2), any mask",
    condition=conditions.always,
    covers=conditions.LINEAR,
)
"""Decorator of the bounds that Remark 2 extends to biases."""


@memoised
def with_ones(att: Attention) -> Attention:
    """The layer on inputs [x_i, 1], biases as an extra row of the weights: Remark 2.

    It has the same q, k, v and P. The key and value biases do not change J, so their rows are zero,
    which makes the bounds a little sharper than with them. Layers without query bias, and with
    rotation or cap, are returned as they are.
    """
    if att.variants or not any(largest_entries(att).get("b_q", ())):
        return att

    def row(w: Tensor, b: Tensor | None = None) -> Tensor:
        return torch.cat([w, torch.zeros_like(w[:, :1]) if b is None else b[:, None]], 1)

    wide = factors.wide(att)
    x = torch.cat([wide.x, torch.ones_like(wide.x[..., :1])], -1)
    parts = {"w_q": row(wide.w_q, wide.b_q), "w_k": row(wide.w_k), "w_v": row(wide.w_v)}
    return wide.with_parts(x=x, **parts, b_q=None, b_k=None, b_v=None, check=False)


_terms = values_and_softmax(lambda att, value: (factors.norm_v(att) * factors.norm_p(att)) / value)


def _scores(att: Attention, extended: Attention) -> Tensor:
    """Slope of the scores; with rotation or cap by the queries and keys, which know biases."""
    if att.variants:
        return factors.slope_of_scores(att)
    return 2 * factors.norm_x(extended) * factors.norm_a(extended)


def _theorem3(att: Attention, extended: Attention, largest_m: Tensor) -> Tensor:
    slope = factors.norm_x(extended) * _scores(att, extended)
    return factors.norm_v(att) * (factors.norm_p(att) + slope * largest_m)


def g1_over_box(low: Tensor, high: Tensor) -> Tensor:
    """Upper value of g_1 over all probability rows between two others, (..., N) -> (...).

    Hence of ||M(p)||. The maximum of one concave arc on either side of a point, in q = 1 - p_1,
    formed without cancellation near one-hot rows: Lemma 30 (docs/theory/balls.md).
    """
    top, where = high.max(-1, keepdim=True)
    others = high.scatter(-1, where, 0.0)
    second = others.amax(-1)
    most = others.sum(-1).minimum(1 - low.amax(-1) + 1e-13)
    least = (1 - top[..., 0] - 1e-13).clamp_min(0).minimum(most)

    def value(q: Tensor) -> Tensor:
        q = q.maximum(least).minimum(most)
        return (1 - q) * (q + second.minimum(q))

    tries = (least, most, (1 - second) / 2, second, torch.full_like(most, 0.5))
    return torch.stack([value(q) for q in tries]).amax(0).clamp(0.0, 0.5) * (1 + 1e-12)


def _remark_1(att: Attention, radius: float, ball: str) -> Tensor:
    """Theorem 3 for every input of a ball, which Remark 1 leaves to continuity.

    Each factor is replaced by its largest value there. Proof: Lemma 33 (docs/theory/published.md).
    ||X'|| grows by at most the Frobenius radius; ||P'|| and max_i ||M(P'_i)|| are bounded over the
    box of softmax rows that scores can reach (`lipbound.bounds.ball`), the latter
    through g_1.

    Raises:
        LipboundError: derivatives may be wanted.
    """
    if att.cache.recording:
        raise LipboundError(
            "bound 'yudin' over a ball has no derivatives; call it under torch.no_grad()"
        )
    extended = with_ones(att)
    size = factors.norm_x(extended) + factors.total_radius(att, radius, ball)
    norms, largest = [], []
    for s in range(att.samples):
        low, high = reachable_rows(factors.wide(att).unpadded(s), radius, ball)
        norms.append(nonnegative_norm(high))
        largest.append(g1_over_box(low, high).amax(-1))
    norm_p = torch.minimum(torch.stack(norms), factors.root_count(att))
    slope = 2 * size**2 * factors.norm_a(extended) * torch.stack(largest)
    return factors.norm_v(att) * (norm_p + slope)


@any_biases(
    "yudin",
    label="Yudin 2025, Thm 3",
    statement_latex=r"$\|J\| \le \|W_V\|\,(\|P\| + 2 \|X\|^2 \|A\| \max_i \|M(P_i)\|)$",
    source="Theorem 3 with Remark 2",
    cost="O(N^2 d) (attention itself), O(N^2) more",
    terms=_terms,
    ball=_remark_1,
)
def yudin(att: Attention) -> Tensor:
    r"""Theorem 3 with the exact norm of the softmax Jacobians; with a query bias Remark 2.

    .. math::
        \|J\| \le \|W_V\|\,\big(\|P\| + 2\,\|X\|^2 \|A\| \max_i \|M(P_i)\|\big),\quad M(p) =
        \mathrm{diag}(p) - p p^T

    With a query bias X becomes [X 1] and :math:`W_Q` gains the row :math:`b_Q` (`with_ones`). The
    paper's Remark 2 appends all three biases; key and value biases do not change J, so they are
    left out, which is sound and slightly sharper: Lemma 31 (docs/theory/published.md), for any
    mask.

    *Rotation and cap.* :math:`2\|X\|\|A\|` is replaced by
    :math:`\mathrm{scale}\,\max\|R_i\|\,(\|Q\|\|W_K\| + \|K\|\|W_Q\|)`, Q and K being the rotated
    queries and keys (the latter centred, unless scores are capped), biases included: Lemma 32
    (docs/theory/published.md).
    """
    extended = with_ones(att)
    found_together(att, factors.norm_p, factors.norm_m)
    return _theorem3(att, extended, factors.norm_m(att))


@any_biases(
    "yudin_g1",
    label="Yudin Thm 3, g1",
    statement_latex=r"$\|J\| \le \|W_V\|\,(\|P\| + 2 \|X\|^2 \|A\| \max_i g_1(P_i))$, $g_1(p) = "
    r"p_{(1)} (1 - p_{(1)} + p_{(2)})$",
    source="Theorem 3, Corollary 1 and Remark 2",
    cost="O(N^2 d) (attention itself), O(N^2) more",
    terms=_terms,
)
def yudin_g1(att: Attention) -> Tensor:
    """`yudin` with g_1 (Corollary 1) in place of the softmax Jacobian's norm; at most twice it."""
    extended = with_ones(att)
    found_together(att, factors.norm_p)
    return _theorem3(att, extended, factors.largest_g1(att))


@bound(
    "yudin_nobias",
    label="Yudin Thm 3, no bias",
    bibtex=_BIBTEX,
    statement_latex=r"$\|J\| \le \|W_V\|\,(\|P\| + 2 \|X\|^2 \|A\| \max_i \|M(P_i)\|)$, whatever "
    r"the biases",
    source="Theorem 3 without Remark 2",
    assumptions="no query bias; any mask",
    condition=conditions.no_query_bias,
    cost="O(N^2 d) (attention itself), O(N^2) more",
    terms=_terms,
    caveat="it ignores the query bias, which enters the scores (Remark 2 adds it); 0.07 of the "
    "exact norm has been seen",
)
def yudin_nobias(att: Attention) -> Tensor:
    """Theorem 3 with weights and inputs as they are, no bound with a query bias.

    0.07 of the exact norm has been seen.
    """
    found_together(att, factors.norm_p, factors.norm_m)
    return _theorem3(att, att, factors.norm_m(att))


@any_biases(
    "yudin_sqrt_n",
    label="Yudin 2025, sqrt(N)",
    statement_latex=r"$\|J\| \le \|W_V\|\,(\|P\| + 2 \max_i \|X^T M(P_i)\| \|X\| \|A\|)$",
    source="appendix C, data-dependent form, with Remark 2",
    cost="O(N^3 + N^2 D), and a few N x N eigenvalue problems",
    terms=_terms,
)
def yudin_sqrt_n(att: Attention) -> Tensor:
    r"""The refinement of Theorem 3 that grows like :math:`\sqrt N` instead of N, with Remark 2.

    In its data-dependent form:

    .. math:: \|J\| \le \|W_V\|\,\big(\|P\| + 2 \max_i \|X^T M(P_i)\|\,\|X\|\,\|A\|\big)

    The appended ones of Remark 2 drop out of :math:`X^T M(P_i)`: Lemma 31
    (docs/theory/published.md). With rotary embeddings or a cap :math:`2\|X\|\|A\|` is replaced as
    in ``yudin``.
    """
    extended = with_ones(att)
    found_together(att, factors.norm_p, factors.deviation)
    slope = factors.deviation(att) * _scores(att, extended)
    return factors.norm_v(att) * (factors.norm_p(att) + slope)


@any_biases(
    "yudin_closed",
    label="Yudin 2025, closed",
    statement_latex=r"$\|J\| \le \|W_V\|\,(\sqrt{N} + 2 \sqrt{N} R^2 \|A\|)$, $R = \max_i |x_i|$",
    source="appendix C, closed form, with Remark 2",
    cost="O(N D + D d^2)",
    terms=values_and_softmax(
        lambda att, value: (factors.norm_v(att) * factors.root_count(att)) / value
    ),
)
def yudin_closed(att: Attention, radius: float = 0.0, ball: str = "token") -> Tensor:
    r"""The :math:`\sqrt N` refinement without attention maps.

    :math:`R = \max_i |[x_i, 1]|` when the head has a query bias (Remark 2).

    .. math:: \|J\| \le \|W_V\|\,\big(\sqrt N + 2 \sqrt N R^2 \|A\|\big)

    With rotary embeddings or a cap :math:`\|W_V\|\sqrt N\,(1 + R(2\|A\|R + a_Q + a_K))`, in the
    notation of ``castin_bias``: Lemmas 31 and 32 (docs/theory/published.md).
    """
    extended = with_ones(att)
    r = factors.radius(extended) + radius
    plain = 2 * r**2 * factors.norm_a(extended)
    slope = factors.slope_by_lengths(att, r) if att.variants else plain
    return factors.norm_v(att) * factors.root_count(att) * (1 + slope)
