"""L2 attention, the map that Kim et al. 2021 bound."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.jacobians.products.matrices import InParts, narrow
from lipbound.jacobians.row_space import RowSpace
from lipbound.linalg.operators import PerEntry


@dataclass(init=False, eq=False, repr=False)
class L2HeadJacobian(InParts):
    r"""Jacobian of *L2 attention* with a checkpoint's ``w_q`` and ``w_v``, tied keys, no biases.

    Kim, Papamakarios, Mnih 2021. With :math:`A = \mathrm{scale}\,W_Q W_Q^T` the map is
    :math:`f(X) = P\,X A W_V`, where P is the
    softmax of :math:`-\mathrm{scale}\,\|q_i - q_j\|^2`, :math:`q = X W_Q` (``scale`` is their
    :math:`1/\sqrt d`). It is another map than the dot-product head: ``w_k`` and all biases are
    ignored. Masks and padding act on the scores as usual.

    Its products are those of Lemma 9 (docs/theory/jacobian.md). Shapes as for
    `lipbound.jacobians.head.HeadJacobian`.
    """

    sizes: list[int]
    p: PerEntry[Tensor]
    """Probabilities of L2 attention, (batch, N, N)."""
    q: PerEntry[Tensor]
    v: PerEntry[Tensor]
    o: PerEntry[Tensor]
    r: PerEntry[Tensor]
    """Projections in coordinates of the row space of w_q, (batch, m', d + d_v)."""

    def __init__(self, att: Attention):
        att.only("L2 attention")
        self.batch = att.samples * att.heads
        self.dtype, self.device = att.dtype, att.device
        self.out_shape = (att.tokens, att.d_v)
        inner = att.scale * (att.w_q.mT @ att.w_v)
        q = torch.einsum("snd,hde->shne", att.x, att.w_q)
        q = q - q.mean(-2, keepdim=True)  # only differences matter
        scores = att.scale * (2 * q @ q.mT - (q * q).sum(-1)[..., None, :])
        p = att.probabilities(att.forbid(scores)).to(self.dtype)  # a mask may be in float64
        w = RowSpace(att.w_q, [], torch.float64).coordinates
        r = torch.cat([2 * att.scale * w, w @ inner.double()], -1).to(self.dtype)
        self.in_shape, self.sizes = (att.tokens, r.shape[1]), [att.d, att.d_v]
        self.r = r[torch.arange(att.heads, device=att.device).repeat(att.samples)]
        v = torch.einsum("snd,hde->shne", att.x, att.w_q @ inner)
        self.p, self.q, self.v = (t.flatten(0, 1) for t in (p, q, v - v.mean(-2, keepdim=True)))
        self.o = self.p @ self.v

    def jvp(self, x: Tensor) -> Tensor:
        dq, dv = (x @ self.r).split(self.sizes, -1)
        t = (dq @ self.q.mT).baddbmm_(self.q, dq.mT)
        t = t.sub_((self.q * dq).sum(-1)[:, None, :]).mul_(self.p)
        return narrow(t, self.v) - t.sum(-1, keepdim=True) * self.o + narrow(self.p, dv)

    def vjp(self, y: Tensor) -> Tensor:
        g = (y @ self.v.mT).sub_((y * self.o).sum(-1, keepdim=True)).mul_(self.p)
        dq = narrow(g, self.q) + narrow(g.mT, self.q) - g.sum(-2)[..., None] * self.q
        return torch.cat([dq, narrow(self.p.mT, y)], -1) @ self.r.mT
