"""Kim, Papamakarios, Mnih 2021, "The Lipschitz Constant of Self-Attention" (ICML)."""

import math

import numpy as np
import torch
from scipy.special import lambertw
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds import conditions, factors
from lipbound.bounds.registry import bound
from lipbound.linalg.matrix_norms import UNIT

_BIBTEX = """@inproceedings{kim2021lipschitz,
  title     = {The {L}ipschitz Constant of Self-Attention},
  author    = {Kim, Hyunjik and Papamakarios, George and Mnih, Andriy},
  booktitle = {International Conference on Machine Learning},
  year      = {2021}
}"""


def inverse_phi(y: Tensor) -> Tensor:
    r"""Upper value of the inverse of :math:`\phi(x) = x e^{x+1}` on x >= 0, float64, any shape.

    The Lambert function :math:`W_0(y / e)`, enlarged by more than its own rounding; infinite unless
    :math:`\phi`, which increases, then exceeds y by more than its own.
    """
    y, there = y.cpu(), y.device
    x = torch.from_numpy(np.asarray(np.real(lambertw(y.numpy() / math.e)), dtype=np.float64))
    x = torch.where(y > 0, x.clamp_min(0) * (1 + 2.0**-44), 0.0)
    least = x * (x + 1).exp() * (1 - 8 * UNIT * (x + 2))
    return torch.where(least < y, torch.inf, x).to(there)


@bound(
    "kim",
    label="Kim 2021 (L2 map)",
    bibtex=_BIBTEX,
    statement_latex=r"$\|J\| \le \sqrt{N}\,\mathrm{scale}\,(4 \phi^{-1}(N-1) + 1) \|W_Q\|^2 "
    r"\|W_V\|$, $\phi(x) = x e^{x+1}$, on L2 attention",
    source="Theorem 3.2, in the degree-two form",
    assumptions="bounds L2 attention with these W_Q, W_V, not the checkpoint's head; masks may "
    "only forbid, never a token to itself",
    condition=lambda att: conditions.hides_or_shows(att) & (att.scale >= 0),
    cost="O(D d^2)",
    map="l2",
    caveat="finite offsets on the scores, or a token that may not attend to itself, are outside "
    "its proof",
)
def kim(att: Attention) -> Tensor:
    r"""Global Lipschitz constant of L2 attention, :math:`P\,X A W_V`.

    With :math:`A = W_Q W_Q^T/\sqrt d`, P from :math:`-|q_i - q_j|^2/\sqrt d`.

    .. math:: Lip \le \sqrt{N/d}\,(4\,\phi^{-1}(N-1) + 1)\,\|W_Q\|^2 \|W_V\|

    ``att.scale`` stands for :math:`1/\sqrt d`. It holds everywhere, hence at any X, for *this other
    map*: ``w_k`` and all biases are ignored, and the value must be compared with
    `lipbound.jacobians.spectral_norm.l2_spectral_norm` (variable ``exact_l2``), never with the
    dot-product head.

    The theorem is printed with :math:`\sqrt{\sum_h \|W_{Q,h}\|^2 \|W_{V,h}\|^2}`, of degree one in
    :math:`W_Q` where the map is of degree two. That reading is false: at N = 1 the map is
    :math:`X A W_V`, whose norm reaches :math:`\|W_Q\|^2\|W_V\|/\sqrt d`. This is the degree-two
    form.

    Proved in Lemma 40 (docs/theory/published.md), where each token's zero distance to itself must
    take part: so a mask that only forbids, but never a token to itself, leaves it valid.
    """
    slope = 4 * inverse_phi(factors.count(att) - 1) + 1
    factor = factors.root_count(att) * abs(att.scale) * slope
    return factor * factors.norm_q(att) ** 2 * factors.norm_v(att)
