"""L2 attention, the map that Kim et al. 2021 bound."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.linalg.operators import JacobianOperator, cast, select_entries


class L2HeadJacobian(JacobianOperator):
    r"""Jacobian of *L2 attention* with a checkpoint's ``w_q`` and ``w_v`` (Kim, Papamakarios, Mnih 2021; tied keys, no biases).

    With :math:`A = scale\,W_Q W_Q^T` the map is :math:`f(X) = P\,X A W_V`, where P is the softmax of
    :math:`-scale\,\|q_i - q_j\|^2`, :math:`q = X W_Q` (``scale`` is their :math:`1/\sqrt d`). It is another map than the
    dot-product head: ``w_k`` and all biases are ignored. Masks and padding act on the scores as usual.

    Its products are those of Lemma 9 (docs/theory/jacobian.md). Shapes as for `lipbound.jacobians.head.HeadJacobian`.
    """

    def __init__(self, att: Attention):
        att.only("L2 attention")
        self.batch = att.samples * att.heads
        self.dtype, self.device = att.dtype, att.device
        self.out_shape = (att.tokens, att.d_v)
        w_v = att.scale * att.w_q @ (att.w_q.mT @ att.w_v)
        q = torch.einsum("snd,hde->shne", att.x, att.w_q)
        q = q - q.mean(-2, keepdim=True)  # only differences matter
        scores = att.scale * (2 * q @ q.mT - (q * q).sum(-1)[..., None, :])
        p = att.probabilities(att.forbid(scores))
        self._u, r = torch.linalg.qr(torch.cat([2 * att.scale * att.w_q, w_v], -1).double())
        self.in_shape = (att.tokens, r.shape[1])
        self._sizes = [att.d, att.d_v]
        self._head = torch.arange(att.heads, device=att.device).repeat(att.samples)
        self._r = r.to(self.dtype)[self._head]
        v = torch.einsum("snd,hde->shne", att.x, w_v)
        self._p, self._q, self._v = (t.flatten(0, 1) for t in (p, q, v - v.mean(-2, keepdim=True)))
        self._o = self._p @ self._v
        self.p = p
        """Probabilities of L2 attention, (samples, heads, N, N)."""

    def jvp(self, x: Tensor) -> Tensor:
        dq, dv = (x @ self._r).split(self._sizes, -1)
        scores = dq @ self._q.mT + self._q @ dq.mT - (self._q * dq).sum(-1)[:, None, :]
        t = self._p * scores
        return t @ self._v - t.sum(-1, keepdim=True) * self._o + self._p @ dv

    def vjp(self, y: Tensor) -> Tensor:
        g = self._p * (y @ self._v.mT - (y * self._o).sum(-1, keepdim=True))
        dq = g @ self._q + g.mT @ self._q - g.sum(-2)[..., None] * self._q
        return torch.cat([dq, self._p.mT @ y], -1) @ self._r.mT

    def double(self) -> "L2HeadJacobian":
        return cast(self, ("_p", "_q", "_v", "_o", "_r"))

    def select(self, index: Tensor) -> "L2HeadJacobian":
        return select_entries(self, ("_p", "_q", "_v", "_o", "_r", "_head"), index)
