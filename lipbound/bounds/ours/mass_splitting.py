r"""Our bound by how softmax rows split their mass, where every token moves.

:math:`\theta`, and the form of the bound, are those of Emadi 2026 (arXiv:2602.18849; its abstract
and quotations were read, its text was not). Symbols: docs/theory/notation.md.
"""

from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.softmax import splitting_bound
from lipbound.bounds.ours.block_norms import WeightNorms, distances, in_chunks, lengths, weights_of
from lipbound.bounds.ours.pairwise import our_bound
from lipbound.linalg.matrix_norms import gamma


@our_bound(
    "mass_splitting",
    label="lipbound, theta and diam(V)",
    statement_latex=r"$\|J\| \le \|W_V\| + 1/2\,\mathrm{diam}(V)\,\max_i \theta_i (|A^T x_i + a| "
    r"+ \max_j |A (x_j - m)|)$, $\theta_i \ge 4 \max_S p_i(S) (1 - p_i(S))$, $m$ the mean token, "
    r"$a = \mathrm{scale}\,W_K b_Q$",
    source="Lemma 103 in the documentation of lipbound, with theta and in the form of Emadi 2026, "
    "Theorem 5.1 (arXiv:2602.18849)",
    cost="O(N^2 d_v)",
    norm="every-token",
)
def mass_splitting(att: Attention) -> Tensor:
    r"""A bound by the diameter of the values, which rows that split their mass move across.

    .. math::
        \|J\| \le \|W_V\| + \tfrac12\,\mathrm{diam}(V)\,\max_i \theta_i \big(|A^T x_i + a| + \max_j
        |A (x_j - m)|\big),\quad \mathrm{diam}(V) = \max_{jl} |v_j - v_l|

    with m the mean token. :math:`4 \max_S p_i(S)(1 - p_i(S))` over all sets S of keys is what the
    probabilities of a row can change by in sum when no score changes by more than 1 (Emadi 2026).
    Finding it is a problem of partition; :math:`\theta_i` is an upper value:
    :math:`4 p (1 - p)` where the largest entry p of a row is at least 1/2, which is exact, and 1
    elsewhere. Proof: Lemma 103 (docs/theory/token_bounds.md). For plain heads.

    It is of the form of Emadi's Theorem 5.1 (quoted by others), a layer's bound
    :math:`\|W_O\| \sum_h (\|W_V^h\| + \theta_h \Phi_h / \tau)` with :math:`1/\tau` the scale of the
    scores. What :math:`\Phi_h` stands for there could not be read; which numbers will do is Lemma
    104 (docs/theory/token_bounds.md).
    """
    return in_chunks(att, _values, [float(att.lengths.max()) ** 0.5])[..., 0]


def _values(att: Attention, heads: slice) -> Tensor:
    """The bound on some heads of one sample, (heads, 1), but for the allowance of `Bound`."""
    w = WeightNorms(*(t[heads] for t in weights_of(att)))
    real = slice(None) if att.valid is None else att.valid[0]  # padding has values of its own
    p, v = att.p[0, heads][:, real], att.centred_v[0, heads][:, real]

    def reach(t: Tensor, factor: Tensor, size: Tensor) -> Tensor:
        """Lengths of scaled queries or keys behind the other projection, (heads, N)."""
        t = att.scale * t[0, heads][:, real]
        return (t @ factor.mT).norm(dim=-1) + gamma(att.d + 2) * lengths(t) * size[:, None]

    slopes = reach(att.q, w.factor_k, w.size_k)
    slopes = slopes + reach(att.centred_k, w.factor_q, w.size_q).amax(-1, keepdim=True)
    apart = distances(v, v).amax((-1, -2))
    rounding = gamma(att.tokens + 20)  # of the sums of rows
    steepest = ((splitting_bound(p) + 4 * rounding) * slopes).amax(-1)
    return (w.norm_v * (1 + rounding) + apart / 2 * steepest)[:, None]
