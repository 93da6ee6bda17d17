"""The Jacobian of heads whose attention matrices do not fit: P is formed anew for some rows at a time, in every product."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants import cap_slope
from lipbound.jacobians.head import HeadJacobian
from lipbound.linalg.operators import JacobianOperator

WHOLE_BYTES = {"cpu": 2e9, "cuda": 8e9}
"""Bytes of attention matrices and their temporaries above which they are not kept."""


ROW_BYTES = {"cpu": 2**23, "cuda": 2**29}
"""Bytes of the rows of float64 scores that are formed at a time."""


SCORE_BYTES = 20
"""Bytes for one entry of P while it is computed in float64, and in the products."""


def head_jacobian(att: Attention) -> HeadJacobian:
    """`HeadJacobian` where all of P fits (or is there already), else `StreamedHeadJacobian`."""
    needed = att.samples * att.heads * att.tokens**2 * SCORE_BYTES
    fits = "p" in att.__dict__ or needed <= WHOLE_BYTES.get(att.device.type, WHOLE_BYTES["cpu"])
    return HeadJacobian(att) if fits else StreamedHeadJacobian(att)


class StreamedHeadJacobian(HeadJacobian):
    """`HeadJacobian` in memory O(N (d + d_v)) per head: rows of P come from q, k, and the largest score and sum of each row, twice in every product.

    Scores are float64, as for `Attention.p`, so the numbers are those of `HeadJacobian` up to the order of summation. Products take about twice
    as long. Not differentiable.
    """

    def __init__(self, att: Attention):
        self._set(att)
        self._wide_q, self._wide_k = (t.flatten(0, 1) for t in (att.wide_q, att.centred_k))
        self._mask = None if att.mask is None else att.mask[(None,) * (4 - att.mask.ndim)]
        self._valid = att.valid
        self._entry = torch.arange(self.batch, device=self.device)
        self._heads, self._scale, self._cap = att.heads, att.scale, att.cap
        self._sinks = None if att.sinks is None else att.sinks.double()
        self._top, self._sum = (torch.zeros(self.batch, att.tokens, 1, dtype=torch.float64, device=self.device) for _ in range(2))
        self._o = torch.zeros_like(self._v)
        for b in range(self.batch):
            for rows in self._blocks():
                scores = self._scores(b, rows)
                top = scores.amax(-1, keepdim=True)
                sink = None if self._sinks is None else self._sinks[b % self._heads]
                top = top if sink is None else top.maximum(sink)
                self._top[b, rows] = top.masked_fill(top == -torch.inf, 0.0)  # rows of padding attend to nothing
                total = (scores - self._top[b, rows]).exp_().sum(-1, keepdim=True)
                total = total if sink is None else total + (sink - self._top[b, rows]).exp()
                self._sum[b, rows] = total.clamp_min(1.0)
                self._o[b, rows] = self._probabilities(b, rows, scores) @ self._v[b]

    def _blocks(self) -> Iterator[slice]:
        n = self.out_shape[0]
        step = max(1, int(ROW_BYTES.get(self.device.type, ROW_BYTES["cpu"]) // (8 * n)))
        return (slice(i, min(i + step, n)) for i in range(0, n, step))

    def _scores(self, b: int, rows: slice) -> Tensor:
        """Masked float64 scores of some queries of a batch entry, (rows, N)."""
        s, h = divmod(int(self._entry[b]), self._heads)
        scores = self._scale * (self._wide_q[b, rows] @ self._wide_k[b].mT)
        scores = scores if self._cap is None else self._cap * torch.tanh(scores / self._cap)
        if self._mask is not None:
            mask = self._mask[min(s, self._mask.shape[0] - 1), min(h, self._mask.shape[1] - 1)]
            scores = Attention.add_mask(scores, mask[rows] if len(mask) > 1 else mask)
        if self._valid is not None:
            scores = scores.masked_fill(~self._valid[s], -torch.inf).masked_fill(~self._valid[s, rows, None], -torch.inf)
        return scores

    def _probabilities(self, b: int, rows: slice, scores: Tensor) -> Tensor:
        """Some rows of P from their scores, (rows, N), in the dtype of the products."""
        return scores.sub_(self._top[b, rows]).exp_().to(self.dtype).div_(self._sum[b, rows].to(self.dtype))

    def _rows(self, b: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Some rows of P, and what changes of q k^T are weighted with there, (rows, N) each."""
        p = self._probabilities(b, rows, self._scores(b, rows))
        if self._cap is None:
            return p, p
        z = self._scale * (self._wide_q[b, rows] @ self._wide_k[b].mT)
        return p, p * cap_slope(z.div_(self._cap)).to(self.dtype)

    def _cotangents(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        to_q, to_k, to_v = torch.empty_like(self._q), torch.zeros_like(self._k), torch.zeros_like(self._v)
        for b in range(self.batch):
            for rows in self._blocks():
                (p, weights), part = self._rows(b, rows), y[b, rows]
                g = (part @ self._v[b].mT).sub_((part * self._o[b, rows]).sum(-1, keepdim=True)).mul_(weights)
                torch.mm(g, self._k[b], out=to_q[b, rows])
                to_k[b].addmm_(g.mT, self._q[b, rows])
                to_v[b].addmm_(p.mT, part)
        return to_q, to_k, to_v

    def push(self, z: Tensor) -> Tensor:
        z_q, z_k, z_v = self._arriving(z)
        out = torch.empty_like(self._v)
        for b in range(self.batch):
            for rows in self._blocks():
                p, weights = self._rows(b, rows)
                t = (z_q[b, rows] @ self._k[b].mT).addmm_(self._q[b, rows], z_k[b].mT).mul_(weights)
                out[b, rows] = (t @ self._v[b] - t.sum(-1, keepdim=True) * self._o[b, rows]).addmm_(p, z_v[b])
        return out

    def dense(self) -> Tensor:
        return JacobianOperator.dense(self)

    def double(self) -> "StreamedHeadJacobian":
        return self._doubled(("_q", "_k", "_v", "_o", "_w", "_weights_gram"))

    @property
    def _entries(self) -> tuple[str, ...]:
        names = [name for name in super()._entries if name not in ("_p", "_t")]
        return (*names, "_wide_q", "_wide_k", "_top", "_sum", "_entry")
